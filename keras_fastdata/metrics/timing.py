"""Measures when a batch is built, and how long the build computes.

A slow build may be computing, waiting (for a disk, a network, the GIL), or
ready to run without a core. The kernel accounts for all three, for each thread.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import threading
import time
from typing import NamedTuple

from keras_fastdata.metrics import stack_sampler

# Of the calling thread: ns on a core, ns ready without a core, time slices.
_SCHEDSTAT = "/proc/thread-self/schedstat"
_SCHEDSTAT_BYTES = 96

# Measuring a batch and a step takes some 30 us of a training loop with cold
# caches: 0.15% of this interval.
INTERVAL_S = 0.02
# Reading the kernel's figures takes twice as long. They are read at each
# measurement at first, and less often after `_ENOUGH` readings in an epoch; but
# always if all builds are to be measured.
_ENOUGH = 25
_RARELY = 5  # intervals between two readings, at most
_WEIGHT = 1 / 8  # of the latest build in the moving average
_MOST_S = 0.08  # counts of a build there, so that one late build is forgotten
_MOST_STACKS = 64  # between two measured builds
_rng = random.Random()  # the global one is the user's


class Timing(NamedTuple):
    """The times of building one batch; the clock is `time.monotonic`."""

    began_s: float  # when `__getitem__` was called
    built_s: float  # when `__getitem__` returned
    # When the arrays were in shared memory; `built_s` if they do not go there.
    stored_s: float
    # CPU time from `began_s` to `stored_s`: of the worker process with all its
    # threads, or of the thread. NaN if it was not read; it is read at most once
    # in `INTERVAL_S`.
    cpu_s: float
    # How long the thread was ready to run and had no core. NaN if it was not
    # read, and 0 if the kernel does not report it.
    delay_s: float
    retries: int = 0  # how many workers died, or were replaced, over this batch
    # Where slow builds of the same thread were met since its last `Timing`; see
    # `stack_sampler`.
    stacks: tuple[str, ...] = ()


def pause_s(asked: int) -> float:
    """Returns how many seconds to wait before the next reading.

    `asked` is the number of readings so far.
    """
    return INTERVAL_S * min(max(1.0, asked / _ENOUGH), _RARELY)


class RunDelay:
    """Reads how long the calling thread was runnable but had no core.

    Only one thread at a time may use an object.
    """

    def __init__(self) -> None:
        self._fd = -1  # the kernel's file, if it has one
        self._thread = 0  # the thread that opened it

    def read(self) -> float:
        """Returns the total delay so far in seconds, or 0 if unknown."""
        thread = threading.get_native_id()
        if thread != self._thread:
            self.close()
            with contextlib.suppress(OSError):
                self._fd = os.open(_SCHEDSTAT, os.O_RDONLY)
            self._thread = thread
        if self._fd < 0:
            return 0.0
        return int(os.pread(self._fd, _SCHEDSTAT_BYTES, 0).split()[1]) / 1e9

    def close(self) -> None:
        """Closes the file of the kernel's scheduler statistics. Idempotent."""
        fd, self._fd, self._thread = self._fd, -1, 0
        if fd >= 0:
            os.close(fd)


class Stopwatch:
    """Measures the building of batches, in the thread that builds them.

    If it `owns_process`, the CPU time of all threads counts.
    """

    def __init__(self, *, owns_process: bool = False) -> None:
        self.owns_process = owns_process
        self._cpu_s = time.process_time if owns_process else time.thread_time
        self._run_delay = RunDelay()
        self._interval_s: float | None = None
        self._tells = self._asks = False  # measure, read the kernel's figures
        self._tell_s = self._ask_s = 0.0  # when to do so again
        self._asked = 0  # readings in `_epoch`
        self._epoch = -1
        self._began = self._built = self._cpu = self._delay = 0.0
        self.thread = 0
        self._mean_s = 0.0  # a moving average of measured builds
        self._stacks: list[str] = []
        self._met = 0  # stacks since the last `Timing`

    def start(self, interval_s: float | None, epoch: int) -> None:
        """Starts the measurement, just before a build.

        Args:
            interval_s: Builds that take at least this long are always
                measured, shorter ones at most once in `INTERVAL_S`; `None`:
                measure none.
            epoch: The epoch of the batch. The kernel's figures are read for
                the first measured build of an epoch.
        """
        before_s, self._interval_s = self._interval_s, interval_s
        if interval_s is None:
            if before_s is not None:
                stack_sampler.ignore(self)
            return
        self._began = now = time.monotonic()
        self._tells = now >= self._tell_s
        if self._tells:
            self._tell_s = now + INTERVAL_S
            if not self._mean_s:
                self._watch()  # the first build, which may be a late one
            if epoch != self._epoch:
                self._epoch, self._asked, self._ask_s = epoch, 0, 0.0
            self._asks = now >= self._ask_s or not interval_s
            if self._asks:
                self._ask_first()

    def built(self) -> None:
        """Records the time at which `__getitem__` returned."""
        if self._interval_s is not None:
            self._built = time.monotonic()

    def stop(self) -> Timing | None:
        """Ends the measurement, after a batch was stored or its build failed.

        Returns the times of the build; `None` if it is not measured.
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
        self._find_out_if_slow(ended - began)
        stacks, self._stacks, self._met = self._stacks, [], 0
        return Timing(began, built, ended, cpu, delay, 0, tuple(stacks))

    def add_stack(self, stack: str) -> None:
        """Stores a sampled call stack of a build in this thread.

        Of more than `_MOST_STACKS`, each is kept with the same probability.
        """
        self._met += 1
        if len(self._stacks) < _MOST_STACKS:
            self._stacks.append(stack)
        elif (place := _rng.randrange(self._met)) < _MOST_STACKS:
            self._stacks[place] = stack

    def _find_out_if_slow(self, took_s: float) -> None:
        """Starts stack sampling if builds are slow, and stops it otherwise."""
        self._mean_s += (min(took_s, _MOST_S) - self._mean_s) * _WEIGHT
        if self._mean_s >= stack_sampler.SLOW_S:
            self._watch()
        else:
            stack_sampler.ignore(self)

    def _watch(self) -> None:
        self.thread = threading.get_ident()
        stack_sampler.watch(self)

    def _ask_first(self) -> None:
        """Reads the CPU time and the run delay, just before the build."""
        self._asked += 1
        self._ask_s = self._began + pause_s(self._asked)
        self._delay = self._run_delay.read()
        self._cpu = self._cpu_s()
        self._began = time.monotonic()

    def close(self) -> None:
        """Stops sampling, and closes the kernel's file. Idempotent."""
        stack_sampler.ignore(self)
        self._run_delay.close()
