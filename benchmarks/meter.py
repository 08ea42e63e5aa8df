"""How fast batches come: the same count for a plain loop and for `fit`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from benchmarks.processes import Watch, cpu_s
from benchmarks.workloads import touch

WARM_UP_S = 0.3
MEMORY_SAMPLES = 5


class Meter:
    """Is told of every batch, and measures a bounded time of them.

    First come batches that are not counted, as many as had been made ahead
    and a few more; then those that are timed; then some during which memory
    is sampled, so that the sampling costs nothing of what is timed.

    Args:
        seconds: How long to time. At least three batches are.
        ahead: Batches that a loader may have at hand when timing begins.
    """

    def __init__(self, seconds: float, ahead: int) -> None:
        self._seconds = seconds
        self._count = 0
        self._enough = ahead + 2
        self._until = 0.0
        self._next: Callable[[], bool] = self._warm_up

    def saw_batch(self) -> bool:
        """Counts a batch; returns whether to go on."""
        self._count += 1
        return self._next()

    def _warm_up(self) -> bool:
        now = time.perf_counter()
        if self._count == 1:
            self._until = now + WARM_UP_S
        if self._count >= self._enough and now >= self._until:
            self._count = 0
            self._family_s = cpu_s()
            self._thread_s = time.thread_time()
            self._began = time.perf_counter()
            self._until = self._began + self._seconds
            self._next = self._timed
        return True

    def _timed(self) -> bool:
        now = time.perf_counter()
        if now < self._until or self._count < 3:
            return True
        thread_s = time.thread_time() - self._thread_s
        self._figures = {
            "batches_per_s": self._count / (now - self._began),
            "ms_per_batch": (now - self._began) / self._count * 1e3,
            "consumer_cpu_us": thread_s / self._count * 1e6,
            "cpu_ms": (cpu_s() - self._family_s) / self._count * 1e3,
        }
        self._watch = Watch()
        self._watch.start()
        self._next = self._watched
        return True

    def _watched(self) -> bool:
        return self._watch.samples < MEMORY_SAMPLES

    def figures(self) -> dict[str, float]:
        """What was measured, per batch, once `saw_batch` has said `False`."""
        self._watch.end()
        return {**self._figures, "peak_pss_mb": self._watch.peak_mb}


def again_and_again(batches: Iterable[Any]) -> Iterator[Any]:
    """One epoch after the other."""
    return itertools.chain.from_iterable(itertools.repeat(batches))


def measure_loop(
    batches: Iterator[Any], seconds: float, ahead: int, *, filled: bool = False
) -> dict[str, float]:
    """Takes batches in a plain loop that reads one value of each.

    Args:
        batches: Endless.
        seconds: How long to time.
        ahead: Batches that may be at hand when timing begins.
        filled: Whether each batch is full of its index, which is then
            checked: a loader that loses the order has no place here.
    """
    meter = Meter(seconds, ahead)
    for index in itertools.count():
        batch = next(batches)
        if touch(batch) != index and filled:
            raise RuntimeError(f"batch {index} is full of {touch(batch):g}")
        del batch  # before the next is asked for
        if not meter.saw_batch():
            break
    return meter.figures()
