"""Starts a child process of the training process, and waits for its end.

`multiprocessing` is not used: its workers import `__main__` again, and outlive
what ours must not.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Protocol

from keras_fastdata import _process_role
from keras_fastdata.memory import os_limits
from keras_fastdata.workers import environment, resource_tracker
from keras_fastdata.workers.process import sockets

# Held while a process is started. `Popen` waits until nobody has one of its
# pipes, and a process that was forked amid it would have that for ever.
STARTING = threading.RLock()
_process_role.at_fork(after_in_child=STARTING._at_fork_reinit)  # type: ignore[attr-defined]  # noqa: SLF001

_BOOTSTRAP = (
    "import sys; sys.path.extend(p for p in {path!r} if p not in sys.path); "
    "from keras_fastdata import _process_role; _process_role.become_worker(); "
    "import keras_fastdata.dataset; "
    "from keras_fastdata.workers import resource_tracker; "
    "resource_tracker.adopt({tracker}); "
    "from keras_fastdata.workers.process import forkserver, worker_main; "
    "{function}({trainer}, {fds})"
)


class Child(Protocol):
    """A started worker process.

    Attributes:
        pid: Its process id, which is also its process group's.
        pidfd: Becomes readable when it has ended; owned by this object.
        forkserver: Process id of the fork server that forked it, if one did.
    """

    pid: int
    pidfd: int
    forkserver: int | None = None

    def exit_code(self, timeout_s: float) -> int | None:
        """Returns the exit code as in `Popen.returncode`, or `None` if unknown.

        To be called once `pidfd` is readable. Kills what it left running.
        """

    def abandon(self) -> None:
        """Declares that the exit code of the process is no longer needed."""
        return


def kill(worker: Child, number: int = signal.SIGKILL) -> bool:
    """Sends SIGKILL, or `number`, to a worker; returns False if forbidden."""
    try:
        signal.pidfd_send_signal(worker.pidfd, number)
    except PermissionError:
        return False
    except OSError as error:
        if error.errno not in (errno.ESRCH, errno.EBADF):
            raise
    return True


class DirectChild(Child):
    """A worker that is a direct child process of the training process."""

    def __init__(
        self, pid: int, process: subprocess.Popen[bytes] | None
    ) -> None:
        self.pid = pid
        self.pidfd = _pidfd_of(pid)
        self._process = process

    def exit_code(self, timeout_s: float) -> int | None:
        if not sockets.wait_readable(self.pidfd, timeout_s):
            return None
        # The group first: once reaped, its number may be another's.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        # Not Popen.wait: it makes 0 of a status that is lost.
        code = None
        with contextlib.suppress(ChildProcessError):
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if self._process is not None:
            self._process.returncode = code or 0
        return code


def start_python(
    function: str, env: dict[str, str], fds: list[int]
) -> subprocess.Popen[bytes]:
    """Starts a new interpreter that runs a function of this package.

    The function gets a pidfd of this process, and descriptors like `fds`.
    """
    interpreter = environment.interpreter()
    tracker = resource_tracker.descriptors()
    with (
        own_pidfd() as pidfd,
        _above_stdio([pidfd, *fds, *tracker]) as passed,
    ):
        code = _BOOTSTRAP.format(
            path=environment.import_paths(),
            function=function,
            trainer=passed[0],
            fds=passed[1 : 1 + len(fds)],
            tracker=passed[1 + len(fds) :],
        )
        with STARTING:
            return subprocess.Popen(
                [*interpreter, code],
                env=env,
                stdin=subprocess.DEVNULL,
                pass_fds=passed,
                process_group=0,  # Ctrl-C in the terminal is for the trainer
            )


def _pidfd_of(pid: int) -> int:
    """Opens a descriptor that becomes readable when a process ends.

    A process that has ended already may have no pidfd: the trainer ignores
    SIGCHLD, or has waited for any child. A pipe that nobody writes to, which
    is always readable, then takes its place. (Signals to it fail with EBADF.)
    """
    with os_limits.allowed("pidfd_open"):
        try:
            return os.pidfd_open(pid)
        except ProcessLookupError:
            ended, unused = os.pipe()
            os.close(unused)
            return ended


@contextlib.contextmanager
def own_pidfd() -> Iterator[int]:
    """Yields a descriptor that becomes readable when this process ends."""
    pidfd = _pidfd_of(os.getpid())
    try:
        yield pidfd
    finally:
        os.close(pidfd)


@contextlib.contextmanager
def _above_stdio(fds: list[int]) -> Iterator[list[int]]:
    """Duplicates descriptors to numbers above 2, and yields the copies.

    A trainer without standard input gives out descriptor 0 like any other.
    """
    high: list[int] = []
    try:
        for fd in fds:
            high.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3))
        yield high
    finally:
        for fd in high:
            os.close(fd)
