"""Has forks of the training process wait for the builds of worker threads.

A forked process has only the thread that forked it. A lock that another thread
holds at that moment stays locked in the forked process: a lock of the user's,
that of `np.random`, or those of PyTorch's generators. So a fork by a thread
that trains waits until no worker thread builds, and the next builds wait for
the fork. Forks by other threads wait for nothing: a build may need them. If a
build has a thread use another dataset, the worker threads of that dataset wait
for no fork: the build needs them.

The wait is in `os.fork`, and not in a hook of `os.register_at_fork`: Python
drops what a signal handler raises amid such a hook. `subprocess` does not call
`os.fork`; its child becomes another program.
"""

from __future__ import annotations

import enum
import functools
import logging
import os
import threading
from typing import Any

from keras_fastdata import _process_role

_LONGEST_BUILD_S = 10.0  # for which a fork waits
_AFTERWARDS_S = 1.0  # for which forks wait once one has waited in vain

_log = logging.getLogger("keras_fastdata")


class _Builds:
    """Records which threads build, and which threads fork."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._patience_s = _LONGEST_BUILD_S
        # Identifiers of threads.
        self._building: set[int] = set()
        self._forking: set[int] = set()  # or wait to fork

    def begin_build(self) -> None:
        """Records that this thread builds, as soon as no other one forks."""
        with self._changed:
            if _role() is not _Role.IS_OF_BUILD:
                self._changed.wait_for(
                    lambda: not self._forking, self._patience_s
                )
            self._building.add(threading.get_ident())

    def end_build(self, thread: int) -> None:
        """Records that a thread builds no more."""
        with self._changed:
            self._building.discard(thread)
            self._changed.notify_all()

    def begin_fork(self) -> None:
        """Has new builds wait for `end_fork`; waits for those that run."""
        with self._changed:
            self._forking.add(threading.get_ident())
            patience_s = self._patience_s
            if self._changed.wait_for(lambda: not self._building, patience_s):
                return
            self._patience_s = _AFTERWARDS_S
        _log.warning(
            "A fork of this process waited %g s for a batch that a worker "
            "thread builds, and now goes on. A lock that the worker thread "
            "holds will stay locked in the forked process. Start that "
            "process with the start method 'spawn', or build the batches "
            "in worker processes (`use_multiprocessing=True`).",
            patience_s,
        )

    def end_fork(self) -> None:
        """Lets builds begin again."""
        with self._changed:
            self._forking.discard(threading.get_ident())
            self._changed.notify_all()


class _Role(enum.Enum):
    """What a thread does. Only a fork changes this, once it is known.

    The thread that has forked is the main thread of the forked process.
    """

    TRAINS = enum.auto()  # the main thread, and those that take batches
    BUILDS = enum.auto()  # worker threads
    IS_OF_BUILD = enum.auto()  # threads that a build has started


_ROLE = "_keras_fastdata_role"  # an attribute of threads

_builds = _Builds()


def _role() -> _Role | None:
    thread = threading.current_thread()
    if thread is threading.main_thread():
        return _Role.TRAINS
    return vars(thread).get(_ROLE)


def note_consumer() -> None:
    """Notes that this thread takes batches that worker threads build."""
    vars(threading.current_thread()).setdefault(_ROLE, _Role.TRAINS)


def note_worker() -> None:
    """Notes that this thread is a worker."""
    vars(threading.current_thread()).setdefault(_ROLE, _Role.BUILDS)


def wait_for_builds() -> None:
    """Replaces `os.fork` and `Thread.start`, if that was not done before."""
    fork: Any = getattr(os, "fork", None)
    if fork is None or hasattr(fork, "waits_for_builds"):
        return
    start = threading.Thread.start

    @functools.wraps(fork)
    def fork_between_builds() -> int:
        if _role() is not _Role.TRAINS:
            return int(fork())
        try:
            _builds.begin_fork()
            return int(fork())
        finally:
            _builds.end_fork()

    @functools.wraps(start)
    def start_with_role(thread: threading.Thread) -> None:
        if _role() in (_Role.BUILDS, _Role.IS_OF_BUILD):
            vars(thread)[_ROLE] = _Role.IS_OF_BUILD
        start(thread)

    fork_between_builds.waits_for_builds = True  # type: ignore[attr-defined]
    os.fork = fork_between_builds
    threading.Thread.start = start_with_role  # type: ignore[assignment,method-assign]


class held_back:  # noqa: N801 - called like a function
    """Has forks by other threads wait until the end of a `with` block.

    Not `contextlib.contextmanager`, which sets attributes of exceptions.
    """

    def __enter__(self) -> None:
        _builds.begin_build()

    def __exit__(self, *_: object) -> None:
        _builds.end_build(threading.get_ident())


def forget(thread: int) -> None:
    """Has forks wait no longer for a thread, by its identifier."""
    _builds.end_build(thread)


_process_role.at_fork(after_in_child=_builds.__init__)  # type: ignore[misc]
