"""The training process's connection to one fork server."""

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

from keras_fastdata._call_stack import raise_of_handler
from keras_fastdata.errors import LoaderError
from keras_fastdata.memory.shared_state import write_shared_state
from keras_fastdata.workers import environment
from keras_fastdata.workers.exit_messages import how_it_ended
from keras_fastdata.workers.process import (
    forkserver,
    packages,
    sockets,
    worker_main,
)
from keras_fastdata.workers.process.children import (
    Child,
    DirectChild,
    kill,
    start_python,
)
from keras_fastdata.workers.process.inherited import Key, open_streams

_START_TIMEOUT_S = 60.0  # for an interpreter to start on a loaded machine
_NOTICE_WAIT_S = 1.0
_EXIT_LOOK_S = 0.05  # between two looks while another thread reads notices
_EXIT_TIMEOUT_S = 0.5  # for a process whose socket has closed to end
_END_TIMEOUT_S = 5.0  # for the kernel to deliver SIGKILL
_IMPORT_TIMEOUT_S = 120.0  # for one package, before each worker imports it
_KEPT_S = 60.0  # for a fork server without users

_log = logging.getLogger("keras_fastdata")


class ForkserverGoneError(LoaderError):
    """Raised when the fork server has ended or does not answer."""


class ThreadsError(LoaderError):
    """Raised when the fork server has threads, which makes forks unsafe."""


class ForkserverState(enum.Enum):
    """The state of a fork server."""

    IMPORTING = enum.auto()  # imports packages, or is not even forked yet
    READY = enum.auto()  # forks workers
    KEPT = enum.auto()  # has no user, and ends soon unless it gets one
    REFUSED = enum.auto()  # must fork no more, because of what it has imported
    GONE = enum.auto()  # has ended, or does not answer


# Packages that each worker imports itself.
_refused: set[packages.Stamp] = set()


def is_refused(stamp: packages.Stamp) -> bool:
    """Returns whether each worker imports a package itself."""
    return stamp in _refused


class _ExitCodes:
    """The exit codes of processes by their ids, until they are asked for.

    It needs no lock: `note` stores a code, and then looks whether anybody will
    ask for it.
    """

    def __init__(self) -> None:
        self._codes: dict[int, int] = {}
        self._abandoned: set[int] = set()

    def __contains__(self, pid: int) -> bool:
        return pid in self._codes

    def note(self, pid: int, code: int) -> None:
        self._codes[pid] = code
        if pid in self._abandoned:
            self.abandon(pid)

    def pop(self, pid: int) -> int | None:
        return self._codes.pop(pid, None)

    def abandon(self, pid: int) -> None:
        """Drops the exit code of a process, now or once it is there."""
        self._abandoned.add(pid)
        if self.pop(pid) is not None:
            self._abandoned.discard(pid)


class ForkserverConnection:
    """The training process's connection to one fork server.

    Attributes:
        key: What it is for.
        base: The fork server that it is a fork of, if any.
        state: See `ForkserverState`.
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
        self.state = ForkserverState.READY
        self._lock = threading.RLock()
        self._unanswered = 0  # requests
        stamps = () if key.imports is None else key.imports.stamps
        self._specs = packages.specs_of(stamps)
        self._exit_codes = _ExitCodes()
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
            self.state = ForkserverState.IMPORTING

    def fork(self, files: worker_main.Files) -> Child:
        """Forks a new worker from the fork server."""
        return self.request(forkserver.FORK, files.all())

    def has_imported(self) -> bool:
        """Returns whether all imports have succeeded, without waiting.

        Raises:
            ForkserverGoneError: It has ended, but not because of an import.
        """
        if self.state is ForkserverState.IMPORTING and self._lock.acquire(
            blocking=False
        ):
            try:
                self._follow_import()
            finally:
                self._lock.release()
        if self.state is ForkserverState.GONE:
            raise ForkserverGoneError("It has ended.")
        return self.state is ForkserverState.READY

    def refuse_all(self, reason: str) -> None:
        """Has each further worker import the packages for itself."""
        self.importing = ""
        self._refuse(reason)

    def exit_code(self, pid: int, timeout_s: float) -> int | None:
        deadline = time.monotonic() + timeout_s
        while (code := self._exit_codes.pop(pid)) is None:
            if (
                self.state is ForkserverState.GONE
                or time.monotonic() > deadline
            ):
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
        self._exit_codes.abandon(pid)

    def keep(self) -> bool:
        """Has the fork server wait for its next user; returns whether it does.

        It kills its remaining workers, and gives up its output streams.
        """
        if self.state is ForkserverState.KEPT:
            return True
        is_reusable = self.state is ForkserverState.READY and self.has_forked
        if not is_reusable or self._unanswered:
            return False
        text = forkserver.KEEP.pack(forkserver.KEEP_KIND, _KEPT_S)
        try:
            self._socket.send(text, socket.MSG_DONTWAIT)
        except OSError as error:
            raise_of_handler(error)
            return False
        self.state = ForkserverState.KEPT
        return True

    def add_user(self) -> None:
        """Counts one user more; a kept fork server is in use again."""
        self.users += 1
        if self.state is ForkserverState.KEPT:
            self.state = ForkserverState.READY
            streams = open_streams()
            text = forkserver.USE + bytes(streams)
            with contextlib.suppress(OSError):  # it ends: the next fork fails
                socket.send_fds(self._socket, [text], streams)

    def drop_user(self) -> int:
        """Counts one user less; returns how many there are still."""
        self.users -= 1
        return self.users

    @property
    def is_current(self) -> bool:
        """Whether it has not ended, and none of its packages was reloaded."""
        return not self.has_ended and packages.are_current(self._specs)

    def close(self) -> None:
        """Ends the fork server, which kills its remaining workers."""
        is_idle = self.state in (
            ForkserverState.READY,
            ForkserverState.KEPT,
            ForkserverState.GONE,
        )
        self.state = ForkserverState.GONE
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
            while self.state is ForkserverState.IMPORTING and self._read_notice(
                0
            ):
                pass
        except ForkserverGoneError:
            if self.state is not ForkserverState.REFUSED:
                self.state = ForkserverState.GONE  # maybe only its base was
                raise
        if self.state is ForkserverState.IMPORTING and (
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
                raise_of_handler(error)
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
            datagram, fds = _receive(self._socket)
        except BlockingIOError:
            return True
        except ConnectionResetError:
            # It was killed before it had read all of our requests.
            raise self._is_gone() from None
        if not datagram:
            raise self._is_gone()
        kind, pid, number = forkserver.NOTICE.unpack_from(datagram)
        if kind == forkserver.ENDED:
            self._exit_codes.note(pid, number)
        elif kind == forkserver.IMPORTING:
            assert self.key.imports is not None
            self.importing = self.key.imports.names[pid]
            self._limit_s = time.monotonic() + _IMPORT_TIMEOUT_S
        elif kind == forkserver.READY:
            self.state, self.importing = ForkserverState.READY, ""
        elif kind == forkserver.FAILED:
            self._refuse(datagram[forkserver.NOTICE.size :].decode())
        else:
            self._exit_codes.pop(pid)  # of an earlier one's
            self._answers.append((kind, pid, number, fds))
        return True

    def _reap(self, timeout_s: float) -> int | None:
        """Returns the fork server's exit code, or `None` if unknown."""
        if self._exit_code is None and self._child is not None:
            self._exit_code = self._child.exit_code(timeout_s)
        return self._exit_code

    def _is_gone(self) -> ForkserverGoneError:
        was_importing = self.state is ForkserverState.IMPORTING
        self.state = ForkserverState.GONE
        code = self._reap(_EXIT_TIMEOUT_S)
        if was_importing and code is not None:
            self._refuse(f"its import ends the process (exit code {code})")
        return _gone(self.pid, code)

    def _refuse(self, reason: str) -> None:
        """Stops sharing the package being imported; each worker imports it.

        If none is being imported, this holds for all packages.
        """
        self.state = ForkserverState.REFUSED
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


def _receive(notices: socket.socket) -> tuple[bytes, list[int]]:
    """Returns a notice, or b"" at the end, and the descriptors it brings.

    Raises:
        BlockingIOError: There is no notice.
        ConnectionResetError: The fork server has ended.
    """
    datagram, fds, flags, _ = socket.recv_fds(
        notices,
        forkserver.NOTICE.size + forkserver.MAX_TEXT_BYTES,
        1,
        socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT,
    )
    if flags & socket.MSG_CTRUNC:
        raise LoaderError(
            "This process has no file descriptor left for a worker. "
            "Raise the limit on open files (`ulimit -n`)."
        )
    return datagram, fds


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


def _gone(pid: int, code: int | None) -> ForkserverGoneError:
    how = "does not answer" if code is None else how_it_ended(code)
    return ForkserverGoneError(
        f"The process that forks workers (pid {pid}) {how}. Unless somebody "
        "has ended this process, look at the limits on memory and stack "
        "(`ulimit -a`)."
    )
