"""What it costs to move a batch from its producers to a plain loop.

    python -m benchmarks.transport [options of python -m benchmarks]

Batches are full of one value, which takes little to make, so that moving them
shows. The consumer reads one value of each, and checks that it is the right
one: all loaders keep the order. `benchmarks/peers.py` says how each is used.

Every size is measured as `(x, y)`; two sizes, and two producers, also as a
single array and as nested dicts, which shows what a leaf costs.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import harness, peers
from benchmarks.meter import measure_loop
from benchmarks.workloads import SIZES, STRUCTURES, Filled

FIGURES = harness.THROUGHPUT
TIMEOUT_S = 60.0
PRODUCERS = (1, 2)
BY_STRUCTURE = ("1 KB", "1.5 MB")


def cases() -> Iterator[harness.Case]:
    every = harness.combine(
        size=list(SIZES),
        structure=STRUCTURES,
        producers=PRODUCERS,
        loader=list(peers.LOADERS),
    )
    return filter(_is_measured, every)


def _is_measured(case: harness.Case) -> bool:
    if case["loader"] == "stock inline" and case["producers"] > 1:
        return False
    if case["loader"] == "stock threads" and case["producers"] == 1:
        return False  # one thread is no thread to Keras
    return case["structure"] == "(x, y)" or (
        case["size"] in BY_STRUCTURE and case["producers"] == 2
    )


def measure(case: harness.Case, seconds: float) -> dict[str, float]:
    build = Filled(SIZES[case["size"]], case["structure"])
    with peers.open_loader(
        case["loader"], build, workers=case["producers"]
    ) as loader:
        return measure_loop(iter(loader), seconds, peers.AHEAD, filled=True)


if __name__ == "__main__":
    harness.main(["transport"])
