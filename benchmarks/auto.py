"""`workers="auto"` against every fixed number of threads and processes.

    python -m benchmarks.auto [options of python -m benchmarks]

Six loads, one or two cores, and a step that keeps a device busy for a
millisecond (it sleeps). The first 200 batches count for nobody: "auto" looks
around meanwhile. "moves" is how often it went elsewhere after them, and
"settled" the batch after which it did not.

    cheap    an array of 1 KB
    sleeps   10 ms of waiting
    python   5 ms of Python code
    numpy    8 ms of sorting, without Python's lock
    huge     154 MB, filled
    mixed    5 ms of waiting, 5 ms of Python code
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks import harness
from keras_fastdata import FastPyDataset
from keras_fastdata.metrics.pool_stats import TuningDecision

FIGURES = (
    harness.Figure("batches_per_s", "batches/s", larger_is_better=True),
    harness.Figure("moves", "moves later"),
    harness.Figure("settled", "settled at batch"),
    harness.Figure("workers", "workers"),
    harness.Figure("are_processes", "processes"),
)
TIMEOUT_S = 120.0
STEP_S = 1e-3
LOOKING_AROUND = 200
PLACES: dict[str, dict[str, Any]] = {
    "auto": {"workers": "auto"},
    "inline": {"workers": 0},
    **{f"{n} threads": {"workers": n} for n in (1, 2, 4, 8)},
    **{
        f"{n} processes": {"workers": n, "use_multiprocessing": True}
        for n in (1, 2, 4, 8)
    },
}


def _cheap() -> np.ndarray:
    return np.zeros(128)


def _sleeps() -> np.ndarray:
    time.sleep(0.01)
    return np.zeros(128)


def _python() -> np.ndarray:
    return np.full(128, sum(n * n for n in range(80_000)))


def _numpy() -> np.ndarray:
    return np.sort(np.resize(_UNSORTED, 150_000))[:128]


def _huge() -> np.ndarray:
    return np.full((1024, 224, 168), 1.0, "float32")


def _mixed() -> np.ndarray:
    time.sleep(0.005)
    return _python()


_UNSORTED = np.random.default_rng(0).random(150_000)
LOADS: dict[str, Callable[[], np.ndarray]] = {
    "cheap": _cheap,
    "sleeps": _sleeps,
    "python": _python,
    "numpy": _numpy,
    "huge": _huge,
    "mixed": _mixed,
}


class Load(FastPyDataset):
    """A long epoch of one of the loads."""

    def __init__(self, load: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.load = load

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int) -> np.ndarray:
        return LOADS[self.load]()


def cases() -> Iterator[harness.Case]:
    return harness.combine(cores=(1, 2), load=tuple(LOADS), place=tuple(PLACES))


def measure(case: harness.Case, seconds: float) -> dict[str, float]:
    allowed = sorted(os.sched_getaffinity(0))[: case["cores"]]
    os.sched_setaffinity(0, allowed)
    with Load(case["load"], seed=0, **PLACES[case["place"]]) as dataset:
        looking = LOOKING_AROUND if case["place"] == "auto" else 30
        batches = iter(dataset)
        _train(itertools.islice(batches, looking))
        before = len(_decisions(dataset))
        began_s = time.perf_counter()
        count = 0
        while time.perf_counter() < began_s + seconds:
            count += _train(itertools.islice(batches, 20))
        elapsed_s = time.perf_counter() - began_s
        decisions = _decisions(dataset)
        return {
            "batches_per_s": count / elapsed_s,
            "moves": len(decisions) - before,
            "settled": decisions[-1].batches if decisions else 0,
            "workers": dataset.workers,
            "are_processes": float(dataset.use_multiprocessing),
        }


def _decisions(dataset: FastPyDataset) -> tuple[TuningDecision, ...]:
    pool_stats = dataset._fastdata.loader.pool_stats()
    return () if pool_stats is None else pool_stats.decisions


def _train(batches: Iterator[np.ndarray]) -> int:
    count = 0
    for _ in batches:
        time.sleep(STEP_S)
        count += 1
    return count


if __name__ == "__main__":
    harness.main(["auto"])
