"""When a batch was built, and what that time went into.

A build that takes long may be computing, waiting (for a disk, a network, the
GIL), or ready to go on without a core to do so on. The kernel accounts for all
three, thread by thread.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable

# Of this very thread: ns on a core, ns ready without a core, time slices.
_SCHEDSTAT = "/proc/thread-self/schedstat"
_SCHEDSTAT_BYTES = 96


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """How one batch was built. Moments are those of `time.monotonic`.

    Attributes:
        began_s: When `__getitem__` was called.
        built_s: When it had returned.
        stored_s: When its arrays lay in shared memory; `built_s`, where they
            need not.
        cpu_s: CPU time that was used meanwhile; by the worker process with
            all its threads, or else by the thread.
        delay_s: How long its thread was ready to run and had no core; 0 where
            the kernel does not tell.
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
        cpu_ns: `time.thread_time_ns`, or `time.process_time_ns` where the
            process does nothing else.
    """

    def __init__(self, cpu_ns: Callable[[], int] = time.thread_time_ns) -> None:
        self._cpu_ns = cpu_ns
        self._schedstat: int | None = None
        self._timed = False
        self._began = self._built = self._cpu = self._delay = 0

    def start(self, timed: bool) -> None:
        """Called before a build; unless `timed`, all else costs nothing."""
        self._timed = timed
        if timed:
            self._built = 0
            self._delay = self._delay_ns()
            self._cpu = self._cpu_ns()
            self._began = time.monotonic_ns()

    def built(self) -> None:
        """Called when `__getitem__` has returned."""
        if self._timed:
            self._built = time.monotonic_ns()

    def stop(self) -> Timing | None:
        """Called when the batch is where it shall be, or has failed."""
        if not self._timed:
            return None
        ended = time.monotonic_ns()
        return Timing(
            self._began / 1e9,
            (self._built or ended) / 1e9,
            ended / 1e9,
            (self._cpu_ns() - self._cpu) / 1e9,
            (self._delay_ns() - self._delay) / 1e9,
        )

    def close(self) -> None:
        """Gives back what it holds. Idempotent."""
        fd, self._schedstat = self._schedstat, None
        if fd is not None and fd >= 0:
            os.close(fd)

    def _delay_ns(self) -> int:
        if self._schedstat is None:
            try:
                self._schedstat = os.open(_SCHEDSTAT, os.O_RDONLY)
            except OSError:
                self._schedstat = -1
        if self._schedstat < 0:
            return 0
        return int(os.pread(self._schedstat, _SCHEDSTAT_BYTES, 0).split()[1])
