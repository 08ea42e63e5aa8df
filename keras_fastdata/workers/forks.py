"""Has forks of the training process wait for the builds of worker threads.

A forked process has only the thread that forked it. A lock that another thread
holds at that moment stays locked in the forked process: a lock of the user's,
that of `np.random`, or those of PyTorch's generators. So a fork waits until no
worker thread builds, and the next builds wait for the fork. A build that forks
itself is not waited for, as long as it waits, too. A fork by a thread that may
belong to a build, such as that of a pool which the build uses, waits for none;
nor does `subprocess`, whose child becomes another program.
"""

from __future__ import annotations

import logging
import subprocess
import threading

from keras_fastdata import _call_stack, _process_role

_LONGEST_BUILD_S = 10.0  # for which a fork waits
_AFTERWARDS_S = 1.0  # for which forks wait once one has waited in vain

_log = logging.getLogger("keras_fastdata")


class _Builds:
    """Records which threads build, and which of all threads fork."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._patience_s = _LONGEST_BUILD_S
        # Identifiers of threads.
        self._building: set[int] = set()
        self._forking: set[int] = set()  # those that wait to fork as well
        self._forks_now: int | None = None

    def begin(self) -> None:
        """Records that this thread builds, as soon as no other one forks."""
        with self._changed:
            self._changed.wait_for(lambda: not self._forking, self._patience_s)
            self._building.add(threading.get_ident())

    def end(self, thread: int) -> None:
        """Records that a thread builds no more."""
        with self._changed:
            self._building.discard(thread)
            self._changed.notify_all()

    def before_fork(self) -> None:
        thread = threading.get_ident()

        def may_fork() -> bool:
            building = self._building - self._forking - {thread}
            return not building and self._forks_now is None

        is_main = threading.current_thread() is threading.main_thread()
        if (
            not (is_main or _role.is_consumer or thread in self._building)
            or _call_stack.caller(1)[0] == subprocess.__file__
        ):
            return
        with self._changed:
            self._forking.add(thread)
            self._changed.notify_all()
            patience_s = self._patience_s
            waited = self._changed.wait_for(may_fork, patience_s)
            if not waited:
                self._patience_s = _AFTERWARDS_S
            self._forks_now = thread
        if not waited:
            _log.warning(
                "A fork of this process waited %g s for a batch that a worker "
                "thread builds, and now goes on. A lock that the worker thread "
                "holds will stay locked in the forked process. Start that "
                "process with the start method 'spawn', or build the batches "
                "in worker processes (`use_multiprocessing=True`).",
                patience_s,
            )

    def after_fork(self) -> None:
        thread = threading.get_ident()
        with self._changed:
            self._forking.discard(thread)
            if self._forks_now == thread:
                self._forks_now = None
            self._changed.notify_all()


class _ThreadRole(threading.local):
    """What is known of each thread."""

    is_consumer = False  # of batches that worker threads build


_role = _ThreadRole()
_builds = _Builds()


def note_consumer() -> None:
    """Notes that this thread takes batches that worker threads build."""
    _role.is_consumer = True


class held_back:  # noqa: N801 - called like a function
    """Has forks by other threads wait until the end of a `with` block.

    Not `contextlib.contextmanager`, which sets attributes of exceptions.
    """

    def __enter__(self) -> None:
        _builds.begin()

    def __exit__(self, *_: object) -> None:
        _builds.end(threading.get_ident())


def forget(thread: int) -> None:
    """Has forks wait no longer for a thread, by its identifier."""
    _builds.end(thread)


_process_role.at_fork(
    before=_builds.before_fork,
    after_in_parent=_builds.after_fork,
    after_in_child=_builds.__init__,  # type: ignore[misc]
)
