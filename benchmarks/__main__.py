"""All benchmarks, or some.

python -m benchmarks [--only NAME ...] [--where LABEL=VALUE|VALUE ...]
    [--rounds N] [--seconds S] [--quick] [--json FILE] [--plot FILE] [--list]

`advice`, `auto`, `planning`, `soak`, `chaos` and `health_overhead` have command
lines of their own.
"""

from __future__ import annotations

from benchmarks.harness import main

if __name__ == "__main__":
    main()
