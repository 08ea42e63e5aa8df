"""Creates and ends the workers of one dataset, protected by a lock.

    ABSENT --run--> IN_CALL --its end--> READY, or ABSENT if none were needed
    READY --run--> IN_CALL
    ABSENT, READY, IN_CALL --invalidate--> INVALID
    INVALID, or IN_CALL when `run` begins --the workers are dropped--> ABSENT
    every state --fork, in the child: the parent keeps its workers--> ABSENT

One lock guards it all, and is held for moments only. No thread holds it while
it waits for a batch or for the end of a worker, nor while a batch is built in
the caller or an epoch hook runs. So `close` returns soon, from any thread and
from a signal handler; and each step looks anew at what there is.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from keras_fastdata import _process_role
from keras_fastdata.building import build_context
from keras_fastdata.building.interface import Dataset
from keras_fastdata.engine.prefetcher import Prefetcher
from keras_fastdata.errors import LoaderError
from keras_fastdata.workers.base import WorkerPool
from keras_fastdata.workers.signals import DeferredSignals

# Seconds between two looks at the state during a wait. Another thread may have
# collected the batch, or ended the workers.
_WAIT_S = 0.05
_SHUTDOWN_S = 5.0  # for a daemon thread to leave the loader at exit


class PoolState(enum.IntEnum):
    """The state of a worker pool; the values are indices into `_NEXT`."""

    ABSENT = 0  # there are none; the first call makes them
    READY = 1  # they hold what the dataset and its epochs say
    IN_CALL = 2  # a call is under way; or was interrupted
    INVALID = 3  # they are ended when the present call ends


# Faster than attributes of the enum, which are looked up for every batch.
ABSENT, READY, IN_CALL, INVALID = PoolState

_NEXT = (
    (ABSENT, IN_CALL, INVALID),
    (ABSENT, IN_CALL, INVALID),
    tuple(PoolState),
    (ABSENT,),
)


@dataclasses.dataclass
class ShutdownFlag:
    """Records that Python exits or that the dataset was garbage-collected."""

    is_asked: bool = False


class _StepAgainError(Exception):
    """A step is to be taken again when the dropped workers have ended."""


class ForkSafeLock:
    """A reentrant lock that is created anew in a forked child process.

    The thread that holds the parent's lock does not exist in the child.
    """

    def __init__(self) -> None:
        self.renew()
        _fork_safe_locks.add(self)

    def own(self) -> Any:
        """Returns the lock that is valid in this process."""
        return self._lock

    def renew(self) -> None:
        """Replaces the lock with a new, unlocked lock."""
        self._lock: Any = threading.RLock()


_fork_safe_locks: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in list(_fork_safe_locks):
        lock.renew()


_process_role.at_fork(after_in_child=_after_fork)


class PoolHandle:
    """Creates and ends the workers of one dataset, protected by a lock."""

    def __init__(
        self,
        dataset: weakref.ref[Dataset],
        name: str,
        prefetched: Prefetcher,
    ) -> None:
        self.state = ABSENT
        # The workers; `None` if there are none.
        self.workers: WorkerPool | None = None
        self._dataset = dataset
        self.name = name
        self._prefetched = prefetched
        self._lock = ForkSafeLock()
        self._ending = ForkSafeLock()  # held while workers are ended
        self._pid = os.getpid()
        self._shutdown = ShutdownFlag()
        self._finalizer: weakref.finalize[Any, Any] | None = None
        # Workers that are no longer used, and what would end them at exit.
        self._dropped: collections.deque[
            tuple[WorkerPool, weakref.finalize[Any, Any] | None]
        ] = collections.deque()

    @property
    def lock(self) -> Any:
        """The lock on the workers in this process."""
        return self._lock.own()

    def run(
        self, step: Callable[..., Any], *args: Any, nests: bool = False
    ) -> Any:
        """Drops invalid workers, then calls `step` while holding the lock.

        The step must not wait. Only if it `nests`, it may run during another
        step of this thread, which a signal handler has interrupted; then the
        workers stay as they are.
        """
        lock = self._lock.own()
        if lock._is_owned():
            if nests:
                return step(*args)
            raise LoaderError(
                f"{self.name} was asked for a batch while this thread was "
                "about to hand one out: by a signal handler, or by a method "
                "that counts, pickles or logs. Ask for it elsewhere."
            )
        try:
            while True:
                with lock:
                    if self.state is not READY or self._is_forked:
                        self._become_usable()
                    if not self._dropped:
                        self._move_to(IN_CALL)
                        try:
                            result = step(*args)
                        except _StepAgainError:
                            continue  # it has dropped the workers
                        self.confirm()
                        return result
                self._end_dropped()
        finally:
            self.end_invalid()

    def confirm(self) -> None:
        """Marks the workers as valid, even if the running step fails later."""
        if self.state is IN_CALL:
            absent = self.workers is None
            self._move_to(ABSENT if absent else READY)

    def invalidate(self) -> None:
        """Marks the workers as invalid, so that `run` ends them."""
        self._move_to(INVALID)

    def ensure(
        self, dataset: Dataset, create: Callable[[], WorkerPool]
    ) -> WorkerPool:
        """Returns the workers, and creates and starts those that lack."""
        workers = self.workers
        if workers is None or workers.lacks_workers:
            try:
                with DeferredSignals():
                    workers = self.workers or self._adopt(dataset, create())
                    workers.start_missing()
            except BaseException:
                # A signal's error comes when the workers are there: they stay,
                # or nothing would ever start between frequent signals.
                workers = self.workers
                if workers is not None and not workers.has_failed_to_start:
                    self.confirm()
                raise
        return workers

    def _adopt(self, dataset: Dataset, workers: WorkerPool) -> WorkerPool:
        """Keeps new workers, until the dataset or Python ends."""
        self._finalizer = weakref.finalize(
            dataset, _dismiss, workers, os.getpid(), self.lock, self._shutdown
        )
        self.workers = workers
        return workers

    def replace(self) -> None:
        """Ends the workers, and has `run` take the present step again.

        New workers may need what the former ones hold: a port, a lock file.
        """
        if self.workers is not None:
            self._drop()
            raise _StepAgainError

    def end_invalid(self) -> None:
        """Ends the workers if they were marked as invalid."""
        if self.state is not INVALID and not self._dropped:
            return
        lock = self.lock
        if not lock._is_owned():
            with lock:
                if self.state is INVALID:
                    self._drop()
            self._end_dropped()

    def close(self) -> None:
        """Ends the workers and waits for their end (idempotent).

        A later call makes new ones. Where a signal handler has interrupted a
        call of this thread, that call ends them when it goes on. A worker
        cannot: it would wait for its own end.
        """
        if self._is_in_worker:
            return
        lock = self.lock
        if self._is_forked:
            return
        if lock._is_owned():
            self.invalidate()
            return
        with lock:
            if self.state is IN_CALL:  # it was interrupted
                build_context.forget_context(self._dataset())
            self._drop()
        self._end_dropped()

    def wait(self, workers: WorkerPool, *, builds: bool = False) -> None:
        """Waits briefly for a batch, or lets an inline pool build the batch.

        An interrupt during the wait, when it is likeliest, costs nothing.

        Args:
            workers: The workers.
            builds: Whether they build the batch in the calling thread.

        Raises:
            LoaderError: A worker thread waits for other workers' batch. It may
                have to build that batch itself.
        """
        if not builds and self._is_in_worker:
            raise LoaderError(
                f"{self.name} was asked for its next batch by a worker thread "
                "while the thread built a batch, and would wait for itself. "
                "`__getitem__` asked, or a `__del__` method that Python's "
                "garbage collector ran in it. Ask in another thread."
            )
        context = build_context.current_context()
        try:
            workers.wait(_WAIT_S)
        except BaseException:
            build_context.forget_context(self._dataset())
            raise
        if build_context.current_context() is not context:
            # An exception of a signal handler has ended the build.
            build_context.forget_context(self._dataset())

    def check_shutdown(self, *, builds: bool) -> None:
        """Ends the current daemon thread if the interpreter is exiting.

        Silently: Python reports no SystemExit that ends a thread. An `atexit`
        handler gets a `LoaderError`, unless it `builds` its batches.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if not self._shutdown.is_asked or (builds and is_main):
            return
        if not is_main:
            raise SystemExit
        raise LoaderError(
            f"{self.name} has ended its workers, as the interpreter ends: "
            "this `atexit` handler was registered before they started, so it "
            "runs after. Register it when they have, or use `workers=0`."
        )

    def _move_to(self, state: PoolState) -> None:
        """Changes `state`; no other method changes it.

        `INVALID` stays, where a signal handler has set it a moment ago.
        """
        if state in _NEXT[self.state]:
            self.state = state
        else:
            assert self.state is INVALID, (self.state, state)

    @property
    def _is_in_worker(self) -> bool:
        """Whether the calling thread is a worker of this dataset."""
        dataset = self._dataset()
        return dataset is not None and build_context.is_in_worker(dataset)

    @property
    def _is_forked(self) -> bool:
        """Whether this process is a fork of the one that made the workers."""
        return self._pid != os.getpid()

    def _become_usable(self) -> None:
        """Drops workers that are invalid or belong to the parent process."""
        if self._is_forked:
            self._disown()
        elif self.state in (IN_CALL, INVALID):
            build_context.forget_context(self._dataset())
            self._drop()

    def _drop(self) -> None:
        """Removes the workers from use; `_end_dropped` ends them later."""
        with DeferredSignals():
            workers, self.workers = self.workers, None
            finalizer, self._finalizer = self._finalizer, None
            self._prefetched.clear()
            self._move_to(ABSENT)
            if workers is not None:
                self._dropped.append((workers, finalizer))

    def _end_dropped(self) -> None:
        """Ends the dropped workers, and waits until they have ended."""
        with self._ending.own():
            while self._dropped:
                workers, finalizer = dropped = self._dropped[0]
                with DeferredSignals():
                    workers.close()
                    if finalizer is not None:
                        finalizer.detach()
                    with contextlib.suppress(ValueError):
                        self._dropped.remove(dropped)

    def _disown(self) -> None:
        """Detaches this forked process from the parent process's workers.

        They are kept: if Python collected them, some would send messages.
        """
        self._pid = os.getpid()
        dropped = list(self._dropped)
        _disowned.append((self.workers, self._prefetched.results(), dropped))
        self.workers = None
        self._dropped.clear()
        for finalizer in (self._finalizer, *(f for _, f in dropped)):
            if finalizer is not None:
                finalizer.detach()
        self._finalizer = None
        self._prefetched.clear()
        self._move_to(ABSENT)


# What a forked child must not finalize.
_disowned: list[Any] = []


def _dismiss(
    workers: WorkerPool, pid: int, lock: threading.RLock, shutdown: ShutdownFlag
) -> None:
    """Ends workers when the dataset is garbage-collected or Python exits.

    If Python ends, a daemon thread may use them. A thread that keeps the lock
    keeps the workers until the process is gone, and they end with it.
    """
    if pid != os.getpid():
        return  # the workers belong to the process that forked this one
    shutdown.is_asked = True
    if lock.acquire(timeout=_SHUTDOWN_S):
        try:
            workers.close()
        finally:
            lock.release()
