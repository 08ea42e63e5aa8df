"""How much memory a loader takes, with all its processes.

    python -m benchmarks.memory [options of python -m benchmarks]

Memory is PSS: what n processes share counts as 1/n in each, so that the sum
over a tree of processes is what they take together. "Added" is what came on
top of the training process, which has imported all that it needs and holds the
dataset, once 200 batches have been read.

- 1 GB array: four producers, each of which reads all of it.
- 1,000,000 paths: four producers, each of which reads a whole list of strings.
  Reading a string writes its reference count, so that forked processes end
  with copies.
- lookahead: two producers, 38.5 MB batches, 8 ahead; a consumer that waits
  long enough for the queue to fill. Also as a number of batches.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks import harness, peers
from benchmarks.processes import family, private_mb, pss_mb
from benchmarks.workloads import SIZES, Filled, Shares, touch

FIGURES = (
    harness.Figure("added_mb", "added PSS MB"),
    harness.Figure("private_mb", "private MB/producer"),
    harness.Figure("batches_held", "added, in batches"),
    harness.Figure("total_mb", "PSS MB in all"),
)
TIMEOUT_S = 120.0
PRODUCERS = 4
READ = 200
ARRAY_BYTES = 2**30
NUM_PATHS = 1_000_000
SHARED_LIST = "fastdata SharedList"
LOOKAHEAD_PRODUCERS = 2
LOOKAHEAD_SIZE = "38.5 MB"
FILL_S = 2.0


def cases() -> Iterator[harness.Case]:
    yield from harness.combine(what=["1 GB array"], loader=peers.WITH_PROCESSES)
    yield from harness.combine(
        what=["1,000,000 paths"], loader=(*peers.WITH_PROCESSES, SHARED_LIST)
    )
    yield from harness.combine(what=["lookahead"], loader=peers.WITH_PROCESSES)


def measure(case: harness.Case, seconds: float) -> dict[str, float]:
    name = case["loader"].removesuffix(" SharedList")
    if case["what"] == "lookahead":
        return _lookahead(name)
    if case["what"] == "1 GB array":
        whole: Any = np.ones((ARRAY_BYTES // 4096, 1024), "float32")
    else:
        whole = _paths(case["loader"])
    workload = Shares(whole, PRODUCERS)
    gc.collect()
    before_mb = pss_mb()
    with peers.open_loader(name, workload, PRODUCERS) as loader:
        batches = iter(loader)
        for _ in range(READ):
            touch(next(batches))
        return _figures(before_mb, PRODUCERS)


def _paths(loader: str) -> Any:
    paths = [
        f"images/{number % 1000:03}/{number:08}.jpeg"
        for number in range(NUM_PATHS)
    ]
    if loader != SHARED_LIST:
        return paths
    import keras_fastdata

    return keras_fastdata.SharedList(paths)


def _lookahead(name: str) -> dict[str, float]:
    workload = Filled(SIZES[LOOKAHEAD_SIZE])
    # The allocators of NumPy and the loader's imports come first.
    touch(workload(0))
    before_mb = pss_mb()
    with peers.open_loader(name, workload, LOOKAHEAD_PRODUCERS) as loader:
        batches = iter(loader)
        for _ in range(2 * peers.AHEAD):
            touch(next(batches))
        time.sleep(FILL_S)
        figures = _figures(before_mb, LOOKAHEAD_PRODUCERS)
    batch_mb = SIZES[LOOKAHEAD_SIZE] / 1e6
    return {**figures, "batches_held": figures["added_mb"] / batch_mb}


def _figures(before_mb: float, producers: int) -> dict[str, float]:
    total_mb = pss_mb()
    _, *others = family()
    return {
        "total_mb": total_mb,
        "added_mb": total_mb - before_mb,
        "private_mb": private_mb(others) / producers,
    }


if __name__ == "__main__":
    harness.main(["memory"])
