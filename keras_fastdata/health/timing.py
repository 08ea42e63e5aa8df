"""When a batch was built, and what that time went into.

A build that takes long may be computing, waiting (for a disk, a network, the
GIL), or ready to go on without a core to do so on. The kernel accounts for all
three, thread by thread.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import NamedTuple

# Of this very thread: ns on a core, ns ready without a core, time slices.
_SCHEDSTAT = "/proc/thread-self/schedstat"
_SCHEDSTAT_BYTES = 96

# Looking at a batch and a step takes some 25 us of a training loop, whose
# caches are full of other things, and asking the kernel 6 us: together a sixth
# of a hundredth of this.
INTERVAL_S = 0.02


class Timing(NamedTuple):
    """How one batch was built. Moments are those of `time.monotonic`.

    Attributes:
        began_s: When `__getitem__` was called.
        built_s: When it had returned.
        stored_s: When its arrays lay in shared memory; `built_s`, where they
            need not.
        cpu_s: CPU time that was used meanwhile; by the worker process with
            all its threads, or else by the thread. NaN where it was not asked
            for: it is once in `INTERVAL_S`.
        delay_s: How long its thread was ready to run and had no core; likewise
            NaN, and 0 where the kernel does not tell.
        retries: Workers that died over it, or were replaced, before.
    """

    began_s: float
    built_s: float
    stored_s: float
    cpu_s: float
    delay_s: float
    retries: int = 0


class Stopwatch:
    """Times one build after another, in the thread that builds.

    Args:
        cpu_s: `time.thread_time`, or `time.process_time` where the process
            does nothing else.
    """

    def __init__(self, cpu_s: Callable[[], float] = time.thread_time) -> None:
        self._cpu_s = cpu_s
        self._schedstat: int | None = None
        self._interval_s: float | None = None
        self._asks = False
        self._next_s = 0.0  # when to ask the kernel again
        self._began = self._built = self._cpu = self._delay = 0.0

    def start(self, interval_s: float | None) -> None:
        """Called before a build.

        Args:
            interval_s: Of builds that take less than this, one is to be told
                of in this time; `None`: of none at all.
        """
        self._interval_s = interval_s
        if interval_s is None:
            return
        self._built = 0.0
        self._began = now = time.monotonic()
        self._asks = now >= self._next_s
        if self._asks:
            self._next_s = now + INTERVAL_S
            self._delay = self._delay_s()
            self._cpu = self._cpu_s()
            self._began = time.monotonic()

    def built(self) -> None:
        """Called when `__getitem__` has returned."""
        if self._interval_s is not None:
            self._built = time.monotonic()

    def stop(self) -> Timing | None:
        """Called when the batch is where it shall be, or has failed.

        Returns:
            How it was built; `None` if that need not be told.
        """
        if self._interval_s is None:
            return None
        ended = time.monotonic()
        cpu = delay = math.nan
        if self._asks:
            cpu = self._cpu_s() - self._cpu
            delay = self._delay_s() - self._delay
        elif ended - self._began < self._interval_s:
            return None
        return Timing(self._began, self._built or ended, ended, cpu, delay)

    def close(self) -> None:
        """Gives back what it holds. Idempotent."""
        fd, self._schedstat = self._schedstat, None
        if fd is not None and fd >= 0:
            os.close(fd)

    def _delay_s(self) -> float:
        if self._schedstat is None:
            try:
                self._schedstat = os.open(_SCHEDSTAT, os.O_RDONLY)
            except OSError:
                self._schedstat = -1
        if self._schedstat < 0:
            return 0.0
        read = os.pread(self._schedstat, _SCHEDSTAT_BYTES, 0)
        return int(read.split()[1]) / 1e9
