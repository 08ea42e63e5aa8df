"""What feeding costs a training step, on each backend.

    python -m benchmarks.fit [options of python -m benchmarks]

A model that does almost nothing trains on batches that take next to nothing to
make: what is left of a step is `fit` itself and the feeding of it. "constant"
is stock Keras with one batch, made beforehand, returned again and again in the
training process: no loader can have less to do. The others make each batch, in
two producers.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import harness, peers
from benchmarks.workloads import SIZES, AtHand, Filled

FIGURES = (
    harness.Figure("ms_per_batch", "ms/step"),
    harness.Figure("consumer_cpu_us", "thread's CPU us/step"),
    harness.Figure("cpu_ms", "CPU ms/step"),
    harness.Figure("peak_pss_mb", "PSS MB"),
)
TIMEOUT_S = 120.0
PRODUCERS = 2
LOADERS = (
    "fastdata",
    "fastdata empty",
    "fastdata threads",
    "constant",
    "stock inline",
    "stock processes",
    "torch",
)


def cases() -> Iterator[harness.Case]:
    return harness.combine(
        backend=("tensorflow", "jax", "torch"),
        size=("1 KB", "38.5 MB"),
        loader=LOADERS,
    )


def measure(case: harness.Case, seconds: float) -> dict[str, float]:
    from benchmarks.training import measure_fit

    build = Filled(SIZES[case["size"]])
    name = case["loader"]
    if name == "constant":
        build, name = AtHand(build), "stock inline"
    with peers.open_loader(name, build, PRODUCERS) as loader:
        return measure_fit(build, loader.for_fit(), seconds, peers.AHEAD)


if __name__ == "__main__":
    harness.main(["fit"])
