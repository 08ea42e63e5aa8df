"""The fork server: a process with few imports that forks the workers.

A process that has run TensorFlow or JAX is full of threads and must not be
forked. The fork server has imported NumPy and little else, has one thread, and
forks in milliseconds. It reports how each worker ended. When the trainer ends,
however it ends, the fork server kills the workers with all they have started,
and ends too. If the fork server is killed, the kernel kills the workers
(PR_SET_PDEATHSIG).

    trainer --FORK + descriptors--> fork server --fork--> worker
    trainer <--FORKED pid + pidfd, ENDED pid status--  fork server
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import select
import signal
import socket
import struct
import time

from keras_fastdata.workers.process import messages, worker_main

FORK = b"F"
# What it tells: a kind, a process id, and an exit code or an errno, or 0.
NOTICE = struct.Struct("<cqq")
FORKED, ENDED, REFUSED = b"P", b"E", b"R"
HAS_THREADS = -1  # in place of an errno

_REAP_TIMEOUT_S = 2.0
_PR_SET_PDEATHSIG = 1


def main(trainer_pidfd: int, fds: list[int]) -> None:
    """Serves fork requests until the training process disconnects or ends."""
    (requests_fd,) = fds
    for fd in (requests_fd, trainer_pidfd):
        os.set_inheritable(fd, False)
    for number in worker_main.NOT_FOR_US:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # or no child could be met
    forkserver = _Server(messages.socket_of(requests_fd), trainer_pidfd)
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
        self._poll = select.poll()
        self._poll.register(requests, select.POLLIN)
        self._poll.register(trainer_pidfd, select.POLLIN)

    def run(self) -> None:
        while True:
            ready = {fd for fd, _ in self._poll.poll()}
            for pidfd in ready & self._workers.keys():
                self._report_end(pidfd)
            if self._trainer_pidfd in ready:
                return
            if self._requests.fileno() in ready and not self._answer():
                return

    def end_all(self) -> None:
        """Kills all workers and their children, and closes the socket."""
        for pid in self._workers.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        # Not for ever: one may be in an uninterruptible system call.
        deadline = time.monotonic() + _REAP_TIMEOUT_S
        for pidfd, pid in self._workers.items():
            left_s = max(0.0, deadline - time.monotonic())
            if messages.wait_readable(pidfd, left_s):
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
        self._requests.close()

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
        try:
            if flags & socket.MSG_CTRUNC:
                raise OSError(errno.EMFILE, "out of file descriptors")
            if _threads() > 1:
                raise OSError(HAS_THREADS, "a fork would lack some of them")
            pid, pidfd = self._fork(fds)
        except OSError as error:
            self._requests.send(NOTICE.pack(REFUSED, 0, error.errno or 0))
            return True
        finally:
            for fd in fds:
                os.close(fd)
        self._workers[pidfd] = pid
        self._poll.register(pidfd, select.POLLIN)
        notice = NOTICE.pack(FORKED, pid, 0)
        try:
            socket.send_fds(self._requests, [notice], [pidfd])
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def _fork(self, fds: list[int]) -> tuple[int, int]:
        forkserver = os.getpid()
        pid = os.fork()
        if not pid:
            worker_main.run_and_leave(
                lambda: self._become_worker(fds, forkserver)
            )
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # whoever of the two comes first
        try:
            return pid, os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)  # nobody would ever hear of it
            os.waitpid(pid, 0)
            raise

    def _become_worker(self, fds: list[int], forkserver: int) -> int:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != forkserver:
            return 1  # the fork server died before the line above
        self._requests.close()
        for fd in (self._trainer_pidfd, *self._workers):
            os.close(fd)
        return worker_main.main(worker_main.Files(*fds))

    def _report_end(self, pidfd: int) -> None:
        pid = self._workers.pop(pidfd)
        self._poll.unregister(pidfd)
        # The group first: once reaped, its number may be another's.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        os.close(pidfd)
        code = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(OSError):
            self._requests.send(NOTICE.pack(ENDED, pid, code))


def _threads() -> int:
    """Counts the threads of this process; returns 1 if /proc is missing."""
    try:
        return len(os.listdir("/proc/self/task"))
    except FileNotFoundError:
        return 1
