"""Random images, which take long to make: what parallel workers gain.

    python -m benchmarks.seed_workload [options of python -m benchmarks]

A batch is `np.random.rand(256, 224, 224, 3).astype("float32")` (154 MB), 128
of them an epoch, consumed by `fit` with a model that does almost nothing, and
by a plain loop; and the same with 64 images (38.5 MB). Two producers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from benchmarks import harness, peers
from benchmarks.meter import measure_loop
from benchmarks.workloads import Noise

FIGURES = harness.THROUGHPUT
TIMEOUT_S = 120.0
BATCHES = 128
PRODUCERS = 2
LOADERS = (
    "fastdata",
    "fastdata empty",
    "fastdata threads",
    "stock inline",
    "stock threads",
    "stock processes",
    "torch",
)


def cases() -> Iterator[harness.Case]:
    return harness.combine(
        images=(256, 64), consumer=("fit", "loop"), loader=LOADERS
    )


def measure(case: harness.Case, seconds: float) -> dict[str, float]:
    noise = Noise(case["images"])
    with peers.open_loader(case["loader"], noise, PRODUCERS, BATCHES) as loader:
        if case["consumer"] == "fit":
            from benchmarks.training import measure_fit

            return measure_fit(noise, loader.for_fit(), seconds, peers.AHEAD)
        epochs = itertools.chain.from_iterable(itertools.repeat(loader))
        return measure_loop(epochs, seconds, peers.AHEAD)


if __name__ == "__main__":
    harness.main(["seed_workload"])
