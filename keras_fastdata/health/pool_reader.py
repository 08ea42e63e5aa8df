"""Reads the statistics of workers at the end of each measured epoch."""

from __future__ import annotations

import collections
import dataclasses
import time
import weakref

from keras_fastdata.metrics import ram
from keras_fastdata.metrics.pool_stats import PoolStats
from keras_fastdata.metrics.recorder import BatchSource

# Reading a worker's memory walks its page tables.
_MEMORY_INTERVAL_S = 3.0


class PoolReader:
    """Reads the statistics of the workers, and adds them up by phase."""

    def __init__(self) -> None:
        self._stacks: dict[str, collections.Counter[str]] = {}  # by phase
        self._stacks_before: weakref.WeakKeyDictionary[
            BatchSource, dict[str, int]
        ] = weakref.WeakKeyDictionary()
        self._memory_s = time.monotonic()  # when it was measured
        self._memory_nbytes: int | None = None

    def meet(self, source: BatchSource, stacks: dict[str, int]) -> None:
        """Notes the stacks that were sampled before a source was measured."""
        self._stacks_before.setdefault(source, stacks)

    def read(self, phase: str, source: BatchSource | None) -> PoolStats | None:
        """Returns the statistics, with the stacks sampled in this phase alone.

        `None` where there are no workers.
        """
        pool_stats = None if source is None else source.pool_stats()
        if source is None or pool_stats is None:
            return None
        stacks = self._stacks.setdefault(phase, collections.Counter())
        stacks.update(pool_stats.stacks)
        stacks.subtract(self._stacks_before.get(source, {}))
        self._stacks_before[source] = pool_stats.stacks
        return dataclasses.replace(pool_stats, stacks=dict(+stacks))

    def memory_nbytes(self, pool_stats: PoolStats | None) -> int | None:
        """Returns the workers' memory in bytes, measured at most every 3 s.

        `None` where no process was measured.
        """
        if pool_stats is None or not pool_stats.pids:
            return None
        now_s = time.monotonic()
        if now_s - self._memory_s >= _MEMORY_INTERVAL_S:
            self._memory_s = now_s
            self._memory_nbytes = ram.pss(pool_stats.pids.values())
        return self._memory_nbytes
