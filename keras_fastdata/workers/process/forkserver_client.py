"""The training process's side of the fork servers.

All launchers whose workers are to be alike when they begin share a fork server
(see `Key`). It ends with the last of them. But the fork server with packages
that was left last is kept for `_KEPT_S`: programs open one dataset after the
other, as in cross-validation, and each would wait for the imports.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import logging
import math
import os
import select
import socket
import threading
import time
import weakref
from typing import NamedTuple

from keras_fastdata import _process_role
from keras_fastdata.errors import LoaderError
from keras_fastdata.memory.shared_state import write_shared_state
from keras_fastdata.workers import environment, stack_dump
from keras_fastdata.workers.process import (
    forkserver,
    imports,
    sockets,
    worker_main,
)
from keras_fastdata.workers.process.children import (
    Child,
    DirectChild,
    kill,
    start_python,
)

_START_TIMEOUT_S = 60.0  # for an interpreter to start on a loaded machine
_NOTICE_WAIT_S = 1.0
_EXIT_LOOK_S = 0.05  # between two looks while another thread reads notices
_EXIT_TIMEOUT_S = 0.5  # for a process whose socket has closed to end
_END_TIMEOUT_S = 5.0  # for the kernel to deliver SIGKILL
_IMPORT_TIMEOUT_S = 120.0  # for one package, before each worker imports it
_KEPT_S = 60.0  # for a fork server without users
_OF_RIGHTS = ("Cap", "NoNewPrivs", "Seccomp")  # in /proc/*/status

_log = logging.getLogger("keras_fastdata")

_Rights = tuple[object, ...]


class ForkserverGoneError(LoaderError):
    """Raised when the fork server has ended or does not answer."""


class ThreadsError(LoaderError):
    """Raised when the fork server has threads, which makes forks unsafe."""


class Key(NamedTuple):
    """The properties that all workers of one fork server have at their start.

    Attributes:
        worker_env: Environment variables over the clean defaults.
        rights: User, groups and capabilities.
        imports: What it has imported, if more than this package.
    """

    worker_env: tuple[tuple[str, str], ...]
    rights: _Rights
    imports: imports.Imports | None = None


class _State(enum.Enum):
    """The state of a fork server."""

    IMPORTING = enum.auto()  # imports packages, or is not even forked yet
    READY = enum.auto()  # forks workers
    KEPT = enum.auto()  # has no user, and ends soon unless it gets one
    REFUSED = enum.auto()  # must fork no more, because of what it has imported
    GONE = enum.auto()  # has ended, or does not answer


# Packages that each worker imports itself.
_refused: set[imports.Stamp] = set()


def is_refused(stamp: imports.Stamp) -> bool:
    """Returns whether each worker imports a package itself."""
    return stamp in _refused


class ForkserverConnection:
    """The training process's connection to one fork server.

    Attributes:
        key: What it is for.
        base: The fork server that it is a fork of, if any.
        state: See `_State`.
        importing: The module that is being imported, or "".
        users: How many launchers and other fork servers use it.
        has_forked: Whether it has forked a process.
    """

    def __init__(self, key: Key, base: ForkserverConnection | None) -> None:
        self.key = key
        self.base = base
        self.users = 0
        self.importing = ""
        self.has_forked = False
        self.state = _State.READY
        self._lock = threading.RLock()
        self._unanswered = 0  # requests
        self._inherited = _inherited()
        self._exit_codes: dict[int, int] = {}
        self._abandoned: set[int] = set()
        self._answers: collections.deque[tuple[bytes, int, int, list[int]]] = (
            collections.deque()
        )
        self._socket, theirs = sockets.socket_pair()
        self._child: Child | None = None
        self._exit_code: int | None = None
        self._theirs: socket.socket | None = theirs
        self._limit_s = math.inf  # by `time.monotonic`
        if base is None:
            with theirs:
                process = start_python(
                    "forkserver.main",
                    environment.of_worker(dict(key.worker_env)),
                    [theirs.fileno()],
                )
            self._child = DirectChild(process.pid, process)
        else:
            self.state = _State.IMPORTING

    def fork(self, files: worker_main.Files) -> Child:
        """Forks a new worker from the fork server."""
        return self.request(forkserver.FORK, files.all())

    def has_imported(self) -> bool:
        """Returns whether all imports have succeeded, without waiting.

        Raises:
            ForkserverGoneError: It has ended, but not because of an import.
        """
        if self.state is _State.IMPORTING and self._lock.acquire(
            blocking=False
        ):
            try:
                self._follow_import()
            finally:
                self._lock.release()
        if self.state is _State.GONE:
            raise ForkserverGoneError("It has ended.")
        return self.state is _State.READY

    def refuse_all(self, reason: str) -> None:
        """Has each further worker import the packages for itself."""
        self.importing = ""
        self._refuse(reason)

    def exit_code(self, pid: int, timeout_s: float) -> int | None:
        deadline = time.monotonic() + timeout_s
        while (code := self._exit_codes.pop(pid, None)) is None:
            if self.state is _State.GONE or time.monotonic() > deadline:
                return None
            # A thread that keeps the lock for long reads the notices itself.
            if not self._lock.acquire(timeout=_EXIT_LOOK_S):
                continue
            try:
                if pid not in self._exit_codes:
                    self._await_notice(deadline)
            except ForkserverGoneError:
                return None
            finally:
                self._lock.release()
        return code

    def abandon(self, pid: int) -> None:
        # Needs no lock: `_read_notice` stores the code, and then looks here.
        self._abandoned.add(pid)
        if self._exit_codes.pop(pid, None) is not None:
            self._abandoned.discard(pid)

    def keep(self) -> bool:
        """Has the fork server wait for its next user; returns whether it does.

        It kills its remaining workers.
        """
        is_reusable = self.state is _State.READY and self.has_forked
        if self.key.imports is None or not is_reusable or self._unanswered:
            return False
        text = forkserver.KEEP.pack(forkserver.KEEP_KIND, _KEPT_S)
        try:
            self._socket.send(text, socket.MSG_DONTWAIT)
        except OSError:
            return False
        self.state = _State.KEPT
        return True

    def use_again(self) -> None:
        """Marks a kept fork server as in use; see `is_usable`."""
        self.state = _State.READY

    @property
    def is_usable(self) -> bool:
        """Whether it has not ended, and is as one that starts now."""
        return not self.has_ended and self._inherited == _inherited()

    def close(self) -> None:
        """Ends the fork server, which kills its remaining workers."""
        is_idle = self.state in (_State.READY, _State.KEPT, _State.GONE)
        self.state = _State.GONE
        # Not just closed: a process that the user forked holds it open too.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._theirs is not None:
            self._theirs.close()
        if self._child is None:
            return
        # It may be another user's by now, and not be killed.
        if not is_idle or not sockets.wait_readable(
            self._child.pidfd, _END_TIMEOUT_S
        ):
            kill(self._child)
        if self._reap(_END_TIMEOUT_S) is None:
            self._child.abandon()
        os.close(self._child.pidfd)

    @property
    def pid(self) -> int:
        """The fork server's process id, or 0 before its start."""
        return 0 if self._child is None else self._child.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process of the fork server has ended."""
        child = self._child
        return child is not None and sockets.wait_readable(child.pidfd, 0)

    def _follow_import(self) -> None:
        """Starts the imports, or handles the notices about their progress."""
        try:
            if self._child is None:
                self._begin_import()
            while self.state is _State.IMPORTING and self._read_notice(0):
                pass
        except ForkserverGoneError:
            if self.state is not _State.REFUSED:
                self.state = _State.GONE  # maybe only its base was
                raise
        if self.state is _State.IMPORTING and (
            time.monotonic() > self._limit_s
        ):
            self._refuse(f"its import takes over {_IMPORT_TIMEOUT_S:g} s")
            assert self._child is not None
            kill(self._child)

    def _begin_import(self) -> None:
        assert self.base is not None
        assert self._theirs is not None
        fd = write_shared_state(self.key.imports)
        try:
            fds = [self._theirs.fileno(), fd]
            self._child = self.base.request(forkserver.DERIVE, fds)
        finally:
            os.close(fd)
        self._theirs.close()
        self._limit_s = time.monotonic() + _IMPORT_TIMEOUT_S

    def request(self, kind: bytes, fds: list[int]) -> Child:
        """Requests a fork, and returns the new process."""
        with self._lock:
            self._unanswered += 1
            try:
                socket.send_fds(self._socket, [kind], fds)
            except OSError as error:
                raise self._is_gone() from error
            deadline = time.monotonic() + _START_TIMEOUT_S
            while not self._answers:
                self._await_notice(deadline)
            kind, pid, number, fds = self._answers.popleft()
            self._unanswered -= 1
            if kind == forkserver.FORKED:
                self.has_forked = True
                return _ForkserverChild(self, pid, fds[0])
            raise _refusal(number)

    def _await_notice(self, deadline: float) -> None:
        """Waits about 1 s for a notice; raises an error after `deadline`.

        It need not be for the caller. A dataset may be collected at any line
        here, in this thread, and its workers' end be waited for: that takes
        in notices too, so none may be left that its caller waits for.
        """
        if not self._read_notice(_NOTICE_WAIT_S) and (
            time.monotonic() > deadline
        ):
            raise self._is_gone()

    def _read_notice(self, wait_s: float) -> bool:
        """Handles one notice from the server; returns False on a timeout."""
        assert self._child is not None
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._child.pidfd, select.POLLIN)
        if not (ready := poll.poll(wait_s * 1000)):
            return False
        if self._socket.fileno() not in (fd for fd, _ in ready):
            raise self._is_gone()
        try:
            datagram, fds, flags, _ = socket.recv_fds(
                self._socket,
                forkserver.NOTICE.size + forkserver.MAX_TEXT_BYTES,
                1,
                socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT,
            )
        except BlockingIOError:
            return True
        except ConnectionResetError:
            # It was killed before it had read all of our requests.
            raise self._is_gone() from None
        if not datagram:
            raise self._is_gone()
        if flags & socket.MSG_CTRUNC:
            raise LoaderError(
                "This process has no file descriptor left for a worker. "
                "Raise the limit on open files (`ulimit -n`)."
            )
        kind, pid, number = forkserver.NOTICE.unpack_from(datagram)
        if kind == forkserver.ENDED:
            self._exit_codes[pid] = number
            if pid in self._abandoned:
                self._abandoned.discard(pid)
                self._exit_codes.pop(pid, None)
        elif kind == forkserver.IMPORTING:
            assert self.key.imports is not None
            self.importing = self.key.imports.names[pid]
            self._limit_s = time.monotonic() + _IMPORT_TIMEOUT_S
        elif kind == forkserver.READY:
            self.state, self.importing = _State.READY, ""
        elif kind == forkserver.FAILED:
            self._refuse(datagram[forkserver.NOTICE.size :].decode())
        else:
            self._exit_codes.pop(pid, None)  # of an earlier one's
            self._answers.append((kind, pid, number, fds))
        return True

    def _reap(self, timeout_s: float) -> int | None:
        """Returns the fork server's exit code, or `None` if unknown."""
        if self._exit_code is None and self._child is not None:
            self._exit_code = self._child.exit_code(timeout_s)
        return self._exit_code

    def _is_gone(self) -> ForkserverGoneError:
        was_importing = self.state is _State.IMPORTING
        self.state = _State.GONE
        code = self._reap(_EXIT_TIMEOUT_S)
        if was_importing and code is not None:
            self._refuse(f"its import ends the process (exit code {code})")
        return ForkserverGoneError(
            f"The process that forks workers (pid {self.pid}) has "
            f"ended or does not answer; exit code {code}. "
            "Look at the limits on memory and stack (`ulimit -a`)."
        )

    def _refuse(self, reason: str) -> None:
        """Stops sharing the package being imported; each worker imports it.

        If none is being imported, this holds for all packages.
        """
        self.state = _State.REFUSED
        assert self.key.imports is not None
        top = self.importing.partition(".")[0]
        stamps = self.key.imports.stamps
        refused = [stamp for stamp in stamps if top in ("", stamp[0])]
        _refused.update(refused)
        self.importing = ""
        _log.warning(
            "Each worker process imports %s itself, which takes longer: the "
            "process that forks workers cannot do it for all of them, because "
            "%s.",
            " and ".join(f"`{name}`" for name, *_ in refused),
            reason,
        )


class _ForkserverChild(Child):
    def __init__(
        self, owner: ForkserverConnection, pid: int, pidfd: int
    ) -> None:
        self._owner = owner
        self.pid = pid
        self.pidfd = pidfd
        self.forkserver = owner.pid

    def exit_code(self, timeout_s: float) -> int | None:
        return self._owner.exit_code(self.pid, timeout_s)

    def abandon(self) -> None:
        self._owner.abandon(self.pid)


def _inherited() -> list[object]:
    """Returns what else children inherit: streams, limits, cores, priority.

    It may differ between an open fork server and its trainer, but a kept fork
    server is not used for a dataset if it does.
    """
    import resource

    found: list[object] = [
        resource.getrlimit(getattr(resource, name))
        for name in sorted(vars(resource))
        if name.startswith("RLIMIT_")
    ]
    for fd in range(3):
        with contextlib.suppress(OSError):  # it is closed
            status = os.fstat(fd)
            found.append((fd, status.st_dev, status.st_ino))
    # Of the main thread; others may have their own.
    found.append(os.sched_getaffinity(os.getpid()))
    found.append(os.getpriority(os.PRIO_PROCESS, os.getpid()))
    return found


def _refusal(number: int) -> LoaderError:
    """Returns the error for a fork that was refused with a number."""
    if number == forkserver.HAS_THREADS:
        return ThreadsError(
            "No worker process can be forked: something starts threads as "
            "soon as Python or NumPy is there, like `OPENBLAS_NUM_THREADS` "
            "above 1 in `worker_env`, or a `sitecustomize`. Leave it out, or "
            "pass `start_method='spawn'`."
        )
    return LoaderError(
        f"A worker process could not be forked: {os.strerror(number)}. Look "
        "at the limits on processes (`ulimit -u`), open files (`ulimit -n`) "
        "and memory, or lower `workers`."
    )


def rights() -> _Rights:
    """Returns the user, groups and capabilities that children inherit."""
    status = stack_dump.status_of("thread-self")
    rest = [(k, v) for k, v in status.items() if k.startswith(_OF_RIGHTS)]
    groups = tuple(sorted(os.getgroups()))
    return os.getresuid(), os.getresgid(), groups, *sorted(rest)


# The fork servers of this process. The lock is reentrant: a dataset may be
# collected, and so closed, while it is held.
_forkservers: dict[Key, ForkserverConnection] = {}


_forkservers_lock = threading.RLock()


# The fork server without users that waits for one; `None` if there is none.
_kept: ForkserverConnection | None = None


# Those that somebody has left. Leaving waits for no lock: a dataset may be
# collected by a thread that holds the lock of another fork server.
_left: collections.deque[ForkserverConnection] = collections.deque()


def forkserver_pids() -> list[int]:
    """Returns the process ids of the fork servers of this process."""
    servers = list(_forkservers.values())
    return [server.pid for server in servers if server.pid]


def join(key: Key) -> ForkserverConnection:
    """Returns the fork server for a key, and counts the caller as a user."""
    kept = _kept
    if kept is not None and not kept.is_usable:
        close_kept()
    try:
        with _forkservers_lock:
            found = _forkservers.get(key)
            if found is None or found.state is _State.GONE:
                base = None if key.imports is None else _base_of(key)
                found = _forkservers[key] = ForkserverConnection(key, base)
            _add_user(found)
            return found
    finally:
        _close_left()


def _add_user(server: ForkserverConnection) -> None:
    """Counts one user more; a fork server that was kept is in use again."""
    global _kept
    if server.state is _State.KEPT:
        server.use_again()
        _kept = None
    server.users += 1


def _base_of(key: Key) -> ForkserverConnection:
    """Returns the fork server from which to fork a new fork server.

    It has the most of the packages that are wanted, and no others. The new
    fork server counts as one of its users.
    """
    wanted = key.imports
    assert wanted is not None
    bases = [
        server
        for other, server in _forkservers.items()
        if other.imports is not None
        and server.state in (_State.READY, _State.KEPT)
        and other._replace(imports=wanted) == key
        and other.imports.surroundings == wanted.surroundings
        and {*other.imports.names} < {*wanted.names}
        and {*other.imports.stamps} <= {*wanted.stamps}
    ]
    if not bases:
        return join(key._replace(imports=None))
    base = max(bases, key=_num_names)
    _add_user(base)
    return base


def _num_names(server: ForkserverConnection) -> int:
    return 0 if server.key.imports is None else len(server.key.imports.names)


def leave(held: ForkserverConnection) -> None:
    """Counts one user less; the fork server ends or is kept after its last."""
    _left.append(held)
    _close_left()


def close_kept() -> None:
    """Ends the fork server that is kept, if there is one."""
    global _kept
    with _forkservers_lock:
        unused, _kept = _kept, None
        _forget(unused)
    if unused is not None:
        _close(unused)
        _close_left()


# After the datasets, whose finalizers are made later, and so run before.
weakref.finalize(_left, close_kept)


def _close_left() -> None:
    """Closes unused fork servers, unless another thread is closing them."""
    unused: list[ForkserverConnection] = []
    while _left and _forkservers_lock.acquire(blocking=False):
        try:
            while _left:
                held = _left.popleft()
                held.users -= 1
                if not held.users:
                    unused += _keep_or_forget(held)
        finally:
            _forkservers_lock.release()
        while unused:
            _close(unused.pop())


def _keep_or_forget(held: ForkserverConnection) -> list[ForkserverConnection]:
    """Returns the fork servers to close after the last user of one has left."""
    global _kept
    unused: ForkserverConnection | None = held
    if held.keep():
        unused, _kept = _kept, held
    _forget(unused)
    return [] if unused is None else [unused]


def _forget(unused: ForkserverConnection | None) -> None:
    if unused is not None and _forkservers.get(unused.key) is unused:
        del _forkservers[unused.key]


def _close(unused: ForkserverConnection) -> None:
    unused.close()
    if unused.base is not None:
        _left.append(unused.base)


def _after_fork() -> None:
    """Drops the parent's fork servers and lock in a forked child process."""
    global _forkservers_lock, _kept
    _forkservers_lock = threading.RLock()
    _kept = None
    _forkservers.clear()
    _left.clear()


_process_role.at_fork(after_in_child=_after_fork)
