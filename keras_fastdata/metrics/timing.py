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

# Looking at a batch and a step takes some 30 us of a training loop, whose
# caches are full of other things: a sixth of a hundredth of this.
INTERVAL_S = 0.02
# Asking the kernel takes twice that. So it is asked as often at first, and more
# rarely the more it has told of an epoch; unless all builds are to be told of.
_ENOUGH = 25
_RARELY = 5  # times the interval is how long it is left in peace at most


class Timing(NamedTuple):
    """How one batch was built. Moments are those of `time.monotonic`.

    Attributes:
        began_s: When `__getitem__` was called.
        built_s: When it had returned.
        stored_s: When its arrays lay in shared memory; `built_s`, where they
            need not.
        cpu_s: CPU time that was used meanwhile; by the worker process with
            all its threads, or else by the thread. NaN where it was not asked
            for: at most once in `INTERVAL_S`.
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


def pause_s(asked: int) -> float:
    """How long to leave the kernel in peace that was asked so many times."""
    return INTERVAL_S * min(max(1.0, asked / _ENOUGH), _RARELY)


class RunDelay:
    """How long the calling thread has been ready to run, and had no core.

    To be read by one thread alone.
    """

    def __init__(self) -> None:
        self._fd: int | None = None  # -1: the kernel does not tell

    def read(self) -> float:
        """Seconds, since the thread began; 0 where the kernel does not tell."""
        if self._fd is None:
            try:
                self._fd = os.open(_SCHEDSTAT, os.O_RDONLY)
            except OSError:
                self._fd = -1
        if self._fd < 0:
            return 0.0
        return int(os.pread(self._fd, _SCHEDSTAT_BYTES, 0).split()[1]) / 1e9

    def close(self) -> None:
        """Gives back what it holds. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None and fd >= 0:
            os.close(fd)


class Stopwatch:
    """Times one build after another, in the thread that builds.

    Args:
        cpu_s: `time.thread_time`, or `time.process_time` where the process
            does nothing else.
    """

    def __init__(self, cpu_s: Callable[[], float] = time.thread_time) -> None:
        self._cpu_s = cpu_s
        self._run_delay = RunDelay()
        self._interval_s: float | None = None
        self._tells = self._asks = False  # of this build
        self._tell_s = self._ask_s = 0.0  # when to do so again
        self._asked = 0  # times, in this epoch:
        self._epoch = -1
        self._began = self._built = self._cpu = self._delay = 0.0

    def start(self, interval_s: float | None, epoch: int) -> None:
        """Called before a build.

        Args:
            interval_s: Of builds that take less than this, one is to be told
                of in this time; `None`: of none at all.
            epoch: What it is for. The first that is told of is asked about.
        """
        self._interval_s = interval_s
        if interval_s is None:
            return
        self._began = now = time.monotonic()
        self._tells = now >= self._tell_s
        if self._tells:
            self._tell_s = now + INTERVAL_S
            if epoch != self._epoch:
                self._epoch, self._asked, self._ask_s = epoch, 0, 0.0
            self._asks = now >= self._ask_s or not interval_s
            if self._asks:
                self._ask_first()

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
        began, ended = self._began, time.monotonic()
        tells = self._tells
        if not tells and ended - began < self._interval_s:
            return None
        cpu = delay = math.nan
        if tells and self._asks:
            cpu = self._cpu_s() - self._cpu
            delay = self._run_delay.read() - self._delay
        built = self._built if self._built >= began else ended
        return Timing(began, built, ended, cpu, delay)

    def _ask_first(self) -> None:
        """Asks the kernel where things stand, just before the build."""
        self._asked += 1
        self._ask_s = self._began + pause_s(self._asked)
        self._delay = self._run_delay.read()
        self._cpu = self._cpu_s()
        self._began = time.monotonic()

    def close(self) -> None:
        """Gives back what it holds. Idempotent."""
        self._run_delay.close()
