"""The main loop of a worker process, which builds requested batches.

Runs in a worker process, on its main thread. The dataset's state is the
training process's; a request names the version it is for, and a worker that is
behind first reads the newer ones from its control socket.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from keras_fastdata import _process_role
from keras_fastdata.errors import LoaderError
from keras_fastdata.memory import codec, os_limits, shared_state
from keras_fastdata.memory.arena import Heartbeats, Segment
from keras_fastdata.metrics.timing import Stopwatch
from keras_fastdata.workers import exceptions, log_forwarding, stack_dump
from keras_fastdata.workers.base import BatchRequest, Builds, describe_batch
from keras_fastdata.workers.process import messages
from keras_fastdata.workers.process.messages import (
    RETAINED,
    SPILLED,
    MessageKind,
    ResultMessage,
    TaskMessage,
)

# What a whole job, or a terminal, is sent. It is for the trainer to answer;
# the fork server and the workers end when it does.
NOT_FOR_US = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGBREAK")
    if hasattr(signal, name)
)
_ACTIONS = {
    # Printing to a terminal that others have (`stty tostop`) stops nobody.
    "SIGTTOU": signal.SIG_IGN,
    "SIGCHLD": signal.SIG_DFL,
    "SIGTERM": signal.SIG_DFL,
}
_OOM_SCORE = 500  # of 1000: the kernel picks a worker before the trainer


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """The process-wide settings that workers copy from the training process.

    Attributes:
        environ: Environment variables, complete.
        cwd: Working directory; `None` to stay.
        path: `sys.path`.
        argv: `sys.argv`.
        umask: File mode creation mask.
    """

    environ: tuple[tuple[str, str], ...]
    cwd: str | None
    path: tuple[Any, ...]
    argv: tuple[str, ...]
    umask: int

    @staticmethod
    def of_this_process(environ: Mapping[str, str]) -> Surroundings:
        """Returns this process's settings, but with the given environment."""
        return Surroundings(
            tuple(sorted(environ.items())),
            working_dir(),
            tuple(sys.path),
            tuple(getattr(sys, "argv", [])),
            _umask(),
        )

    def apply(self) -> None:
        """Applies the settings, unless the fork server has applied them.

        What the packages that it has imported then changed is kept.
        """
        global _applied
        if self == _applied:
            return
        _applied = self
        os.environ.clear()
        os.environ.update(self.environ)
        if self.cwd is not None:
            with contextlib.suppress(OSError):
                os.chdir(self.cwd)
        sys.path[:] = self.path
        sys.argv[:] = self.argv
        os.umask(self.umask)


_applied: Surroundings | None = None  # to this process, or to its fork server


@dataclasses.dataclass(frozen=True)
class WorkerStart:
    """The settings that a worker receives before it loads the dataset.

    Attributes:
        worker: Index of the worker.
        dataset: The dataset's class name, for messages.
        version: Version of the dataset's state.
        state: Where in its file that state begins.
        stride: Bytes from slot to slot.
        surroundings: Environment, folder and paths.
        logging_config: How to log and warn.
    """

    worker: int
    dataset: str
    version: int
    state: int
    stride: int
    surroundings: Surroundings
    logging_config: log_forwarding.LoggingConfig = dataclasses.field(
        default_factory=log_forwarding.LoggingConfig.of_this_process
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
    stack_dump.enable(files.stacks)
    results = messages.socket_of(files.results)
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
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return _end_alone(main(own, make_builder, segment, own_pidfd))


def _end_alone(status: int) -> int:
    """Kills this worker and its child processes if `status` is 0.

    A trainer that ends closes its sockets before its pidfd tells, so that
    the worker may be gone before its watch has heard.
    """
    if not status:
        flush()
        os.killpg(0, signal.SIGKILL)
    return status


def leave(status: int) -> NoReturn:
    """Ends the process without running exit handlers."""
    flush()
    os._exit(status)


def flush() -> None:
    """Flushes Python's buffers of standard output and standard error."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def run_and_leave(run: Callable[[], int]) -> NoReturn:
    """Calls `run`, and then ends the process, even if `run` raises."""
    status = 1
    try:
        status = run()
    except SystemExit as request:
        status = _status_of(request)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        leave(status)


def _die_with(trainer_pidfd: int) -> None:
    """Starts a thread that kills this process group if the trainer ends.

    For workers that no fork server watches over. The signal of
    PR_SET_PDEATHSIG would come when the trainer's *thread* ends.
    """

    def watch() -> None:
        messages.wait_readable(trainer_pidfd)
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


class WorkerLoop:
    """Loads the dataset and builds batches, in one worker.

    A subclass receives and sends the messages.

    Args:
        start: The settings of the worker.
        heartbeats: Stores which task the worker builds, and since when.
        dataset_fd: A file with the pickled maker of the builder, which is
            closed after it is read.
    """

    def __init__(
        self, start: WorkerStart, heartbeats: Heartbeats, dataset_fd: int
    ) -> None:
        self._start = start
        self._version = start.version
        self._dataset_fd = dataset_fd
        self._heartbeats = heartbeats
        self._writers: list[codec.SlotWriter] = []  # with arrays alive
        _process_role.at_fork(after_in_child=self._leave_slots)
        self._in_place = True
        self._stopwatch = Stopwatch(owns_process=True)
        self._pid = os.getpid()
        self._name = f"worker {start.worker} (pid {os.getpid()})"

    def _next_task(self) -> TaskMessage | None:
        """Waits for a task; returns `None` if there are no more tasks."""
        raise NotImplementedError

    def _send(self, message: bytes, *, may_wait: bool = True) -> None:
        """Sends a message to the trainer.

        Raises:
            BlockingIOError: There is no room for it, and `may_wait` is False.
        """
        raise NotImplementedError

    def _writer(self, task: TaskMessage) -> codec.SlotWriter:
        """Returns the writer for the slot of a task."""
        raise NotImplementedError

    def _update(self) -> None:
        """Reads and applies the next version of the dataset's state."""
        raise NotImplementedError

    def _leave_slots(self) -> None:
        """Makes slot memory private in a process that the dataset forks."""
        for writer in self._writers:
            writer.make_private()

    def tell(self, kind: MessageKind, body: bytes) -> None:
        """Sends a message that belongs to no request, such as a log record."""
        message = ResultMessage(kind, self._start.worker, body=body).pack()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            try:
                self._send(message, may_wait=False)
            except BlockingIOError:
                with self._without_heartbeat():
                    self._send(message)

    @contextlib.contextmanager
    def _without_heartbeat(self) -> Iterator[None]:
        """Excludes the time of the `with` block from the build's duration."""
        worker, heartbeats = self._start.worker, self._heartbeats
        in_main_thread = threading.current_thread() is threading.main_thread()
        # `__getitem__` may have forked this process; the clock is not its own.
        if not in_main_thread or os.getpid() != self._pid:
            yield
            return
        began, stopped = heartbeats.started_s(worker), time.monotonic()
        heartbeats.set_started(worker, 0)
        yield
        if began:
            waited_s = time.monotonic() - stopped
            heartbeats.set_started(worker, began + waited_s)

    def load(self, make_builder: Callable[[], Builds] | None) -> bool:
        """Loads the dataset; on failure, reports the error to the trainer."""
        try:
            if make_builder is None:
                make_builder = shared_state.read_shared_state(
                    self._dataset_fd, self._start.state
                )
            os.close(self._dataset_fd)
            self._builder: Builds = make_builder()
            # Once more, now that the user's modules are imported.
            self._start.logging_config.apply()
            log_forwarding.take_over()
            self._builder.start(self._start.worker)
        except SystemExit:
            raise
        except BaseException as error:
            self._fail_start(error)
            return False
        self.tell(MessageKind.READY, b"")
        return True

    def _fail_start(self, error: BaseException) -> None:
        exceptions.note(
            error,
            f"While {self._start.dataset} was loaded or its "
            f"`on_worker_start` ran, in {self._name}.",
        )
        send_failure(self._send, self._start.worker, error)

    def serve(self) -> None:
        """Builds requested batches until there are no more tasks."""
        receive, note = self._next_task, self._heartbeats.set_heartbeat
        clock = self._heartbeats.set_started
        worker = self._start.worker
        while (task := receive()) is not None:
            note(worker, task.task_id)
            clock(worker, time.monotonic())
            while self._version < task.version:
                try:
                    self._update()
                except (BrokenPipeError, ConnectionResetError):
                    raise
                except Exception as error:
                    self._fail_start(error)
                    raise SystemExit(1) from None
            if self._version > task.version:
                result = ResultMessage(MessageKind.STALE, worker, task.task_id)
            else:
                result = self._build(task)
            # From here it may wait for the trainer, which is nobody's fault.
            clock(worker, 0)
            self._send(result.pack())
            note(worker, 0)

    def stop(self) -> None:
        """Runs `on_worker_stop`; the builder logs the hook's exceptions."""
        self._builder.stop(self._start.worker)

    def _build(self, task: TaskMessage) -> ResultMessage:
        writer = self._writer(task)
        self._writers.append(writer)
        batch: list[Any] = []
        kind, extents = MessageKind.BATCH, b""
        began = time.monotonic_ns()
        self._stopwatch.start(task.interval_s, task.epoch)
        try:
            batch.append(self._build_in_this_process(task, writer))
            self._stopwatch.built()
            body, extents, _, retained = codec.encode(batch, writer)
        except SystemExit:
            raise
        except BaseException as error:
            batch.clear()
            request = BatchRequest(task.task_id, task.epoch, task.index)
            exceptions.note(
                error, describe_batch(self._start.dataset, request, self._name)
            )
            kind, body = MessageKind.FAILURE, exceptions.dump_exception(error)
        if kind is MessageKind.FAILURE:
            # The exception is gone by now, and with it the frames it held.
            retained = writer.copy_retained([])
        if retained:
            self._in_place = False
        else:
            self._writers.remove(writer)
        result = ResultMessage(
            kind,
            self._start.worker,
            task.task_id,
            RETAINED if retained else 0,
            writer.used,
            time.monotonic_ns() - began,
            extents,
            body,
            timing=self._stopwatch.stop(),
        )
        try:
            return self._fitted(result, writer)
        except LoaderError as error:  # there is no room in the slot for it
            body = exceptions.dump_exception(error)
        result = result._replace(
            kind=MessageKind.FAILURE, extents=b"", body=body
        )
        return self._fitted(result, writer)

    def _build_in_this_process(
        self, task: TaskMessage, writer: codec.SlotWriter
    ) -> Any:
        try:
            return self._builder.build(
                task.epoch, task.index, self._start.worker, writer.empty
            )
        finally:
            if os.getpid() != self._pid:
                # `__getitem__` has forked this one, and let it return.
                leave(1)

    def _fitted(
        self, result: ResultMessage, writer: codec.SlotWriter
    ) -> ResultMessage:
        """Moves result data that exceeds the message size into the slot."""
        extents, body = result.extents, result.body
        if len(extents) + len(body) <= messages.MAX_INLINE_BYTES:
            return result
        writer.append(extents + body)
        return result._replace(
            flags=result.flags | SPILLED,
            extents=b"",
            body=b"",
            extents_nbytes=len(extents),
            body_nbytes=len(body),
        )


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
        self._tasks = messages.socket_of(files.tasks)
        self._results = results
        self._control = messages.socket_of(files.control)

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


def send_failure(
    send: Callable[[bytes], object], worker: int, error: BaseException
) -> None:
    """Reports the error that ends a worker, in one or more messages."""
    body = exceptions.dump_exception(error)
    size = messages.MAX_DATAGRAM_BYTES
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    for follow, part in zip(reversed(range(len(parts))), parts, strict=True):
        message = ResultMessage(
            MessageKind.START_FAILED, worker, follow, body=part
        )
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            send(message.pack())


def set_up(start: WorkerStart) -> None:
    """Sets up a worker's environment, paths, signals and streams."""
    start.surroundings.apply()
    start.logging_config.apply()
    # A handler that does nothing, rather than SIG_IGN: a program that the
    # worker starts gets the default action back, as exec resets handlers.
    for number in NOT_FOR_US:
        signal.signal(number, lambda *_: None)
    for name, action in _ACTIONS.items():
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), action)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with (
        contextlib.suppress(OSError),
        open("/proc/self/oom_score_adj", "w") as f,
    ):
        f.write(str(_OOM_SCORE))
    # When a worker wakes, it does not push the training thread off its core:
    # their turns get longer, and the caches stay warm.
    with contextlib.suppress(OSError, AttributeError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    sys.breakpointhook = exceptions.no_breakpoint
    # A fork has the trainer's; nobody could tell whom a line is for.
    with contextlib.suppress(OSError):
        sys.stdin = open(os.devnull)  # noqa: SIM115
        os.dup2(sys.stdin.fileno(), 0)
    gc.freeze()


def working_dir() -> str | None:
    """Returns the working directory, or `None` if it has been deleted."""
    try:
        return os.getcwd()
    except OSError:
        return None


def _umask() -> int:
    """Returns the file mode creation mask of this process."""
    told = stack_dump.status_of("self").get("Umask")
    if told is not None:
        return int(told, 8)
    # Without /proc it is read by setting it. What another thread makes in
    # between is for this user alone.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _status_of(request: SystemExit) -> int:
    if request.code is None:
        return 0
    if not isinstance(request.code, int):
        print(request.code, file=sys.stderr)
    return request.code & 0xFF if isinstance(request.code, int) else 1
