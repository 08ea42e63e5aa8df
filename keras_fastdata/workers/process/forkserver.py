"""The fork server: a process with few imports that forks the workers.

A process that has run TensorFlow or JAX is full of threads and must not be
forked. The fork server has imported NumPy and little else, has one thread, and
forks in milliseconds. It reports how each worker ended. When the trainer ends,
however it ends, the fork server kills the workers with all they have started,
and ends too. If the fork server is killed, the kernel kills the workers
(PR_SET_PDEATHSIG).

    trainer --FORK + descriptors--> fork server --fork--> worker
    trainer <--FORKED pid + pidfd, ENDED pid status--  fork server

Datasets whose modules import installed packages have a fork server with these
packages. It is a fork of another one, has a socket of its own to the trainer,
and imports the packages before it serves requests:

    trainer --DERIVE + socket, imports--> fork server --fork--> fork server 2
    trainer <--IMPORTING number ..., READY or FAILED reason-- fork server 2
    trainer --FORK + descriptors--> fork server 2 --fork--> worker

A derived fork server whose last user has left waits for the next one, so that
the packages need not be imported again, and ends after some seconds. So does
the fork server that it is a fork of. While they wait, they keep nobody's output
open:

    trainer --KEEP seconds--> fork server 2
    trainer --USE + streams--> fork server 2

An import may hang, or end the process: it never runs in a process that others
depend on, and the fork server that it was forked from watches the trainer.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import importlib
import math
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterable

from keras_fastdata.memory import shared_state
from keras_fastdata.workers import worker_process
from keras_fastdata.workers.process import (
    imports,
    sockets,
    worker_main,
)
from keras_fastdata.workers.process.inherited import open_streams

FORK, DERIVE = b"F", b"D"
# Without children, end after these seconds, unless it is used again.
KEEP = struct.Struct("<cd")
KEEP_KIND = b"K"
USE = b"U"  # and the numbers of the descriptors that come with it
# What it tells: a kind, a process id, and an exit code or an errno, or 0.
NOTICE = struct.Struct("<cqq")
FORKED, ENDED, REFUSED = b"P", b"E", b"R"
# In place of a process id, the number of a package, or 0. Text may follow.
IMPORTING, READY, FAILED = b"I", b"Y", b"X"
MAX_TEXT_BYTES = 1000
HAS_THREADS = -1  # in place of an errno

_REAP_TIMEOUT_S = 2.0
_PR_SET_PDEATHSIG = 1


def main(trainer_pidfd: int, fds: list[int]) -> None:
    """Serves fork requests until the training process disconnects or ends."""
    (requests_fd,) = fds
    for fd in (requests_fd, trainer_pidfd):
        os.set_inheritable(fd, False)
    _set_signals()
    forkserver = _Server(sockets.socket_of(requests_fd), trainer_pidfd)
    gc.collect()
    gc.freeze()
    try:
        forkserver.run()
    finally:
        forkserver.end_all()


class _Server:
    def __init__(self, requests: socket.socket, trainer_pidfd: int) -> None:
        self._requests = requests
        self._trainer_pidfd = trainer_pidfd
        self._workers: dict[int, int] = {}  # pidfd -> pid
        self._derived: set[int] = set()  # pidfds of fork servers among them
        self._ends_at = math.inf  # by `time.monotonic`, unless in use
        self._poll = select.poll()
        self._poll.register(requests, select.POLLIN)
        self._poll.register(trainer_pidfd, select.POLLIN)

    def run(self) -> None:
        while (left_s := self._left_s()) > 0:
            wait_ms = None if left_s == math.inf else math.ceil(left_s * 1000)
            ready = {fd for fd, _ in self._poll.poll(wait_ms)}
            for pidfd in ready & self._workers.keys():
                self._report_end(pidfd)
            if self._trainer_pidfd in ready:
                return
            if self._requests.fileno() in ready and not self._answer():
                return

    def end_all(self) -> None:
        """Kills all workers and their children, and closes the socket."""
        # A derived fork server does the same now, unless it is importing.
        deadline = time.monotonic() + _REAP_TIMEOUT_S
        for pidfd in self._derived:
            sockets.wait_readable(pidfd, max(0.0, deadline - time.monotonic()))
        for pid in self._workers.values():
            _kill_group(pid)
        # Not for ever: one may be in an uninterruptible system call.
        deadline = time.monotonic() + _REAP_TIMEOUT_S
        for pidfd, pid in self._workers.items():
            left_s = max(0.0, deadline - time.monotonic())
            if sockets.wait_readable(pidfd, left_s):
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
        self._requests.close()

    def _left_s(self) -> float:
        """Returns the time until the end of a server that nobody uses."""
        return math.inf if self._workers else self._ends_at - time.monotonic()

    def _answer(self) -> bool:
        """Serves one request; returns False if the trainer has disconnected."""
        try:
            datagram, fds, flags, _ = socket.recv_fds(
                self._requests, 16, 8, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:
            return False
        if not datagram:
            return False
        if datagram.startswith(KEEP_KIND):
            self._wait_for_use(*KEEP.unpack(datagram)[1:])
            return True
        if datagram.startswith(USE):
            self._ends_at = math.inf
            _put_in_place(fds, datagram.removeprefix(USE))
            return True
        try:
            if flags & socket.MSG_CTRUNC:
                raise OSError(errno.EMFILE, "out of file descriptors")
            if imports.threads() > 1:
                raise OSError(HAS_THREADS, "a fork would lack some of them")
            is_worker = datagram == FORK
            become = self._become_worker if is_worker else self._become_server
            pid, pidfd = self._fork(become, fds)
        except OSError as error:
            self._requests.send(NOTICE.pack(REFUSED, 0, error.errno or 0))
            return True
        finally:
            for fd in fds:
                os.close(fd)
        self._workers[pidfd] = pid
        if not is_worker:
            self._derived.add(pidfd)
        self._poll.register(pidfd, select.POLLIN)
        notice = NOTICE.pack(FORKED, pid, 0)
        try:
            socket.send_fds(self._requests, [notice], [pidfd])
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def _wait_for_use(self, seconds: float) -> None:
        self._ends_at = time.monotonic() + seconds
        for pidfd, pid in self._workers.items():
            if pidfd not in self._derived:
                _kill_group(pid)
        with open(os.devnull, "wb") as nowhere:
            for number in open_streams():
                os.dup2(nowhere.fileno(), number)

    def _fork(
        self, become: Callable[[list[int]], int], fds: list[int]
    ) -> tuple[int, int]:
        forkserver = os.getpid()
        pid = os.fork()
        if not pid:
            worker_process.run_and_leave(
                lambda: become(fds) if self._separate(forkserver) else 1
            )
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # whoever of the two comes first
        try:
            return pid, os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)  # nobody would ever hear of it
            os.waitpid(pid, 0)
            raise

    def _separate(self, forkserver: int) -> bool:
        """Sets up a forked child; returns False if the parent has died."""
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != forkserver:
            return False  # it died before the line above
        self._requests.close()
        for fd in self._workers:
            os.close(fd)
        return True

    def _become_worker(self, fds: list[int]) -> int:
        os.close(self._trainer_pidfd)
        imports.reseed()
        importlib.invalidate_caches()  # packages may have been installed
        return worker_main.main(worker_main.Files(*fds))

    def _become_server(self, fds: list[int]) -> int:
        """Imports packages, and then serves fork requests like `main`."""
        requests_fd, imports_fd = fds
        server = _Server(sockets.socket_of(requests_fd), self._trainer_pidfd)
        try:
            if server.import_packages(imports_fd):
                server.run()
        finally:
            server.end_all()
        return 0

    def import_packages(self, fd: int) -> bool:
        """Imports packages, or reports the failure and returns False."""
        wanted: imports.Imports = shared_state.read_shared_state(fd)
        os.close(fd)
        try:
            # To read from the terminal fails, rather than stop this process.
            signal.signal(signal.SIGTTIN, signal.SIG_IGN)
            imports.run(wanted, lambda number: self._tell(IMPORTING, number))
            signal.signal(signal.SIGTTIN, signal.SIG_DFL)
            _set_signals()
        except imports.NotShareableError as error:
            self._tell(FAILED, 0, f"{error}")
            return False
        self._tell(READY)
        return True

    def _tell(self, kind: bytes, number: int = 0, text: str = "") -> None:
        body = text.encode(errors="replace")[:MAX_TEXT_BYTES]
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._requests.send(NOTICE.pack(kind, number, 0) + body)

    def _report_end(self, pidfd: int) -> None:
        pid = self._workers.pop(pidfd)
        self._derived.discard(pidfd)
        self._poll.unregister(pidfd)
        # The group first: once reaped, its number may be another's.
        _kill_group(pid)
        _, status = os.waitpid(pid, 0)
        os.close(pidfd)
        code = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(OSError):
            self._requests.send(NOTICE.pack(ENDED, pid, code))


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _put_in_place(fds: Iterable[int], numbers: Iterable[int]) -> None:
    """Gives descriptors other numbers."""
    for fd, number in zip(fds, numbers, strict=False):
        os.dup2(fd, number)
        os.close(fd)


def _set_signals() -> None:
    """Ignores the signals that only the trainer handles, and resets SIGCHLD.

    A package may have changed them.
    """
    for number in worker_process.NOT_FOR_US:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # or no child could be met
