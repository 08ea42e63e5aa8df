"""Runs a worker process that is connected by sockets."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import multiprocessing.util
import os
import signal
import socket
import stat
import threading
from collections.abc import Callable
from typing import NoReturn

from keras_fastdata import _process_role
from keras_fastdata.errors import LoaderError
from keras_fastdata.memory import codec, os_limits, shared_state
from keras_fastdata.memory.arena import Segment
from keras_fastdata.workers import log_forwarding, messages, stack_dump
from keras_fastdata.workers.base import Builds
from keras_fastdata.workers.low_descriptors import move_away
from keras_fastdata.workers.messages import TaskMessage
from keras_fastdata.workers.process import sockets
from keras_fastdata.workers.worker_loop import WorkerLoop, send_failure
from keras_fastdata.workers.worker_process import (
    WorkerStart,
    flush,
    run_and_leave,
    set_up,
)


@dataclasses.dataclass(frozen=True)
class Files:
    """The file descriptors that a worker receives at its start.

    Attributes:
        start: An anonymous file with the `WorkerStart`.
        dataset: An anonymous file with the pickled maker of the builder.
        arena: The segment that batches are built in.
        tasks: The receiving end of the task socket.
        results: The sending end of the result socket.
        control: The worker's end of its control socket.
        stacks: An anonymous file to write this process's stacks into.
    """

    start: int
    dataset: int
    arena: int
    tasks: int
    results: int
    control: int
    stacks: int

    def all(self) -> list[int]:
        return list(dataclasses.astuple(self))


def main(
    files: Files,
    make_builder: Callable[[], Builds] | None = None,
    segment: Segment | None = None,
    trainer_pidfd: int | None = None,
) -> int:
    """Runs a worker until the training process shuts the task socket down.

    Args:
        files: Descriptors; this function takes them over.
        make_builder: Makes the builder where the process was forked from the
            trainer; else the maker is read from `files.dataset`.
        segment: The arena, where the process was forked with it mapped.
        trainer_pidfd: The training process, where no fork server watches it.

    Returns:
        The exit status for the process.
    """
    _process_role.become_worker()
    if segment is None:  # it does not have the trainer's descriptors
        files = Files(*move_away(files.all()))
        if trainer_pidfd is not None:
            (trainer_pidfd,) = move_away([trainer_pidfd])
    stack_dump.enable(files.stacks)
    results = sockets.socket_of(files.results)
    try:
        with os_limits.named("A worker process could not begin"):
            start: WorkerStart = shared_state.read_shared_state(files.start)
            os.close(files.start)
            if trainer_pidfd is not None:
                _die_with(trainer_pidfd)
            set_up(start)
            worker = _SocketLoop(files, start, results, segment)
    except Exception as error:
        send_failure(results.send, messages.NOBODY, error)
        return 1
    log_forwarding.install(worker.tell)
    if not worker.load(make_builder):
        return 1
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        worker.serve()
    worker.stop()
    return 0


def spawned(trainer_pidfd: int, fds: list[int]) -> NoReturn:
    """Runs a worker in a process that `SpawnLauncher` has started."""
    for fd in (trainer_pidfd, *fds):
        os.set_inheritable(fd, False)
    run_and_leave(
        lambda: _end_alone(main(Files(*fds), trainer_pidfd=trainer_pidfd))
    )


def forked(
    trainer_pidfd: int,
    files: Files,
    make_builder: Callable[[], Builds],
    segment: Segment,
) -> int:
    """Runs a worker in a process forked from the training process."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    # The trainer's objects hold these descriptors too. Its limit must not
    # keep this process from having its own.
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    own_pidfd = os.dup(trainer_pidfd)
    own = Files(*map(os.dup, files.all()))
    _open_files_again()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    # As `multiprocessing.Process` does: the proxies of a `Manager` then have
    # a connection of their own.
    multiprocessing.util._run_after_forkers()  # type: ignore[attr-defined] # noqa: SLF001
    return _end_alone(main(own, make_builder, segment, own_pidfd))


def _open_files_again() -> None:
    """Gives this process its own positions in files that are open for reading.

    A forked process shares positions with the trainer and other workers.
    """
    import fcntl

    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # that of the listing, for one
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            is_file = stat.S_ISREG(os.fstat(fd).st_mode)
            if is_file and flags & os.O_ACCMODE == os.O_RDONLY:
                again = os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)
                os.lseek(again, os.lseek(fd, 0, os.SEEK_CUR), os.SEEK_SET)
                os.dup2(again, fd, inheritable=os.get_inheritable(fd))
                os.close(again)


def _end_alone(status: int) -> int:
    """Kills this worker and its child processes if `status` is 0.

    A trainer that ends closes its sockets before its pidfd tells, so that
    the worker may be gone before its watch has heard.
    """
    if not status:
        flush()
        os.killpg(0, signal.SIGKILL)
    return status


def _die_with(trainer_pidfd: int) -> None:
    """Starts a thread that kills this process group if the trainer ends.

    For workers that no fork server watches over. The signal of
    PR_SET_PDEATHSIG would come when the trainer's *thread* ends.
    """

    def watch() -> None:
        sockets.wait_readable(trainer_pidfd)
        os.killpg(0, signal.SIGKILL)

    thread = threading.Thread(target=watch, name="trainer-watch", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, f"{error}") from error


def _map(fd: int, stride: int, inherited: Segment | None) -> Segment:
    """Maps the arena into this worker, or reuses an inherited mapping.

    That of the trainer, which a fork inherits, has private copies of what is
    lent, and the dataset may refer to these. It is used only where a limit on
    address space has no room for another one.
    """
    try:
        return Segment(fd, stride)
    except (OSError, ValueError):
        if inherited is None:
            raise
        inherited.make_all_shared()
        return inherited


class _SocketLoop(WorkerLoop):
    """Runs a worker that shares sockets and slots with other workers."""

    def __init__(
        self,
        files: Files,
        start: WorkerStart,
        results: socket.socket,
        segment: Segment | None,
    ) -> None:
        self._segment = _map(files.arena, start.stride, segment)
        super().__init__(start, self._segment, files.dataset)
        self._tasks = sockets.socket_of(files.tasks)
        self._results = results
        self._control = sockets.socket_of(files.control)

    def _next_task(self) -> TaskMessage | None:
        datagram = self._tasks.recv(messages.TASK.size)
        return TaskMessage.unpack(datagram) if datagram else None

    def _send(self, message: bytes, *, may_wait: bool = True) -> None:
        self._results.send(message, 0 if may_wait else socket.MSG_DONTWAIT)

    def _writer(self, task: TaskMessage) -> codec.SlotWriter:
        return codec.SlotWriter(self._segment, task.slot, self._in_place)

    def _update(self) -> None:
        datagram, fds, flags, _ = socket.recv_fds(
            self._control, 64, 1, socket.MSG_CMSG_CLOEXEC
        )
        if not datagram:
            raise BrokenPipeError("the training process closed")
        if flags & socket.MSG_CTRUNC or len(fds) != 1:
            raise LoaderError(
                f"A new state of {self._start.dataset} did not reach "
                f"{self._name}: it has no file descriptor left. Raise the "
                "limit on open files (`ulimit -n`)."
            )
        version, state = messages.VERSION.unpack(datagram)
        make_builder = shared_state.read_shared_state(fds[0], state)
        os.close(fds[0])
        self._builder.adopt(make_builder())
        self._version = version
