"""Tries Keras and each way to start worker processes, in a process of its own.

`doctor` starts this process. Whatever is broken may end or block it, so each
result is written at once, as a line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable
from typing import Any

BATCHES, BATCH_BYTES = 2, 1 << 20
_BATCH_TIMEOUT_S = 20.0


def main() -> None:
    """Writes a line for Keras, and one for each start method that may work."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what packages print is no result
    logging.disable()  # the trial's own errors are results
    if not _write(lines.write, "keras", _keras):
        return
    from keras_fastdata.workers.portable import requirements

    methods = ["forkserver", "spawn", "fork", "portable"]
    for method in ["portable"] if requirements.lacking() else methods:
        _write(lines.write, method, lambda: _move_batches(method))  # noqa: B023


def _write(
    write: Callable[[str], Any],
    step: str,
    tried: Callable[[], dict[str, Any]],
) -> bool:
    """Writes what `tried` returns or raises; returns whether it succeeded."""
    write(json.dumps({"step": step, "begun": True}) + "\n")
    began_s = time.monotonic()
    try:
        found = tried()
    except BaseException as error:
        said = f"{type(error).__name__}: {error}".strip()
        write(json.dumps({"step": step, "error": said}) + "\n")
        return False
    took_s = time.monotonic() - began_s
    write(json.dumps({"step": step, "took_s": took_s, **found}) + "\n")
    return True


def _keras() -> dict[str, Any]:
    import keras

    devices: list[str] = []
    with contextlib.suppress(Exception):  # not on every backend
        devices = keras.distribution.list_devices()
    return {
        "version": keras.__version__,
        "backend": keras.backend.backend(),
        "devices": devices,
    }


def _move_batches(method: str) -> dict[str, Any]:
    from keras_fastdata.commands.blank import Blank

    with Blank(
        BATCHES,
        BATCH_BYTES,
        workers=1,
        use_multiprocessing=True,
        start_method=method,
        batch_timeout=_BATCH_TIMEOUT_S,
        max_worker_restarts=0,
    ) as dataset:
        for index, batch in enumerate(dataset):
            if not (batch == index).all():
                raise RuntimeError(f"batch {index} has other bytes")
    return {}


if __name__ == "__main__":
    main()
