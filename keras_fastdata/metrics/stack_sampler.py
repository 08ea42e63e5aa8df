"""Samples the call stacks of slow builds.

    no thread --`watch`--> one thread looks at the watched ones
    it ends at `end`, before a fork, or when no watched thread has built of late

The garbage collector may run in that thread at any line, and there close a
dataset, which calls `ignore`. So the thread waits on a lock that it can release
itself; within an Event is one that it would wait for without end.

Each look needs the GIL. If a build holds it, the look comes late: where the
build next lets go of it, or when the switch interval is over. The former would
count for a line that came after, so those looks are left out. In processes
that only build, the switch interval is 0.5 ms instead of Python's 5 ms.

The thread looks at the stack of one of the watched threads of its process some
25 times a second. A thread is watched during its first build, which may be a
late one, and from then on while its builds are measured and take `SLOW_S` on
average. The sampling thread first looks 20 ms after its start at the earliest:
by then a quick build has ended, and so has the thread.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import time
from typing import Protocol

from keras_fastdata import _call_stack, _process_role

SLOW_S = 0.005
# Looking at a stack takes some 50 us with cold caches, the exchange of the GIL
# included: 0.13% of the mean pause. Random pauses never keep step with builds.
_PAUSE_S = 0.02, 0.06
_SWITCH_S = 0.0005  # of processes that only build
_PROMPT_S = 0.0003  # a look that is not later than this has met no GIL
_MOST_IDLE = 50  # looks in a row that meet no build
_JOIN_S = 1.0  # for a thread that closes a dataset, as the collector runs there
# The innermost code of ours above the user's `__getitem__`.
_BUILDS_IN = os.path.join(
    os.path.dirname(_call_stack.__file__), "building", "build.py"
)


class Watched(Protocol):
    """Receives the sampled stacks of one thread."""

    thread: int
    owns_process: bool

    def add_stack(self, stack: str) -> None:
        """Receives a folded stack, in the thread of the sampler."""
        ...


class _StackSampler:
    """Samples the call stacks of threads."""

    def __init__(self) -> None:
        # A signal handler may call this amid a call by the same thread.
        self._lock = threading.RLock()
        self._watched: dict[int, Watched] = {}
        # With a lock that is released when the thread is to end.
        self._thread: tuple[threading.Thread, threading.Lock] | None = None

    def watch(self, watched: Watched) -> None:
        """Starts to sample a thread's call stacks. Idempotent.

        Without the GIL stacks cannot be read, and nothing is sampled.
        """
        if not _call_stack.has_gil():
            return
        with self._lock:
            self._watched[watched.thread] = watched
            if self._thread is None or not self._thread[0].is_alive():
                ending = threading.Lock()
                ending.acquire()
                thread = threading.Thread(
                    target=self._run,
                    args=(ending, watched.owns_process),
                    name="keras_fastdata-stack-sampler",
                    daemon=True,
                )
                self._thread = thread, ending
                # Where no thread can be started, nothing is sampled.
                with contextlib.suppress(RuntimeError):
                    thread.start()

    def ignore(self, watched: Watched) -> None:
        """Stops the sampling of a thread. Idempotent."""
        if self._watched.get(watched.thread) is watched:
            with self._lock:
                self._watched.pop(watched.thread, None)
                is_last = not self._watched
            if is_last:
                self.end()

    def end(self) -> None:
        """Stops the sampling thread. The next `watch` starts a new thread."""
        with self._lock:
            self._watched.clear()
            ended, self._thread = self._thread, None
        if ended is None:
            return
        thread, ending = ended
        ending.release()
        if thread is not threading.current_thread() and thread.is_alive():
            thread.join(_JOIN_S)

    def _run(self, ending: threading.Lock, owns_process: bool) -> None:
        switch_s = sys.getswitchinterval()
        if owns_process:
            sys.setswitchinterval(min(switch_s, _SWITCH_S))
        try:
            self._sample(ending)
        finally:
            if owns_process:
                sys.setswitchinterval(switch_s)

    def _sample(self, ending: threading.Lock) -> None:
        rng = random.Random()  # the global one is the user's
        idle = 0
        while idle < _MOST_IDLE:
            pause_s = rng.uniform(*_PAUSE_S)
            due_s = time.monotonic() + pause_s
            if ending.acquire(timeout=pause_s):
                return
            late_s = time.monotonic() - due_s
            watched = dict(self._watched)
            threads = list(watched)
            rng.shuffle(threads)
            met = _call_stack.folded_stack(threads, _BUILDS_IN)
            if met is None:
                idle += 1
                continue
            idle = 0
            if not _PROMPT_S < late_s < sys.getswitchinterval():
                thread, stack = met
                watched[thread].add_stack(stack)


_sampler = _StackSampler()
watch, ignore, end = _sampler.watch, _sampler.ignore, _sampler.end
# Python warns of a fork beside threads; and the child has no thread.
_process_role.at_fork(before=end, after_in_child=_sampler.__init__)  # type: ignore[misc]
