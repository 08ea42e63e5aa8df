"""Starts the worker processes of a pool, and connects them by sockets.

    trainer --task--> task socket --> whichever worker is free
    trainer <--message-- result socket <-- every worker
    trainer --version, end--> control socket of one worker

Runs in the training process. Nothing here blocks in a send. `ProcessPool.wait`
waits for a message or the end of a worker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import logging
import os
import select
import socket
import time
from collections.abc import Callable, Iterator

from keras_fastdata.memory import os_limits
from keras_fastdata.memory.arena import Arena, Segment, memfd
from keras_fastdata.memory.shared_state import SharedState, write_shared_state
from keras_fastdata.workers import stack_dump
from keras_fastdata.workers.base import Builds, PoolPlan
from keras_fastdata.workers.in_flight import InFlight, Task
from keras_fastdata.workers.process import launchers, messages, worker_main
from keras_fastdata.workers.process.messages import ResultMessage, TaskMessage
from keras_fastdata.workers.supervisor import Worker, WorkerEnd, WorkerState
from keras_fastdata.workers.watchdog import Activity, building, loading

_EXIT_CODE_TIMEOUT_S = 2.0
# Errors of a send to a worker that has not read earlier messages, or has died.
_NOT_SENT = {errno.EAGAIN, errno.ETOOMANYREFS, errno.EPIPE, errno.ECONNRESET}
_IDLE_LOOKS = 4  # in a row, before a worker that builds nothing is suspect

_log = logging.getLogger("keras_fastdata")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessPlan(PoolPlan):
    """The settings of a pool of worker processes."""

    start_method: str  # "forkserver", "spawn" or "fork"


@dataclasses.dataclass(eq=False, kw_only=True)
class ProcessWorker(Worker):
    """The training process's record of one worker process."""

    process: launchers.Child  # as it was launched
    control: socket.socket  # the training process's end of its control socket
    stacks: int  # the file that it writes its stacks into
    version: int  # of the dataset's state that it has been sent
    # Slots that its copy of the dataset holds on to.
    retained_slots: list[int] = dataclasses.field(default_factory=list)
    # Its heartbeat at the last look: the task id, and the time when building
    # began.
    seen: tuple[int, float] = (0, 0.0)
    # The work that it had left undone at the last look although it built
    # nothing; since when; and for how many looks.
    idle: tuple[tuple[int, int] | None, float, int] = (None, 0.0, 0)

    @property
    def name(self) -> str:
        return f"worker {self.index} (pid {self.process.pid})"

    @property
    def pid(self) -> int:
        return self.process.pid

    def look(self, segment: Segment) -> None:
        """Reads and stores the worker's latest heartbeat."""
        self.seen = _heartbeat_of(self, segment)

    def look_for_idle_s(self, unclaimed: int | None, now_s: float) -> float:
        """Returns for how many seconds the worker has left its work undone.

        The work is to deliver the task in its heartbeat, or to take a task that
        is in no heartbeat. Only work that is undone at several looks in a row
        counts.
        """
        heartbeat = self.seen[0]
        undone = None
        if heartbeat:
            undone = heartbeat, 0
        elif unclaimed:
            undone = 0, unclaimed
        before, since_s, looks = self.idle
        if undone is None or undone != before:
            self.idle = undone, now_s, 0
            return 0.0
        self.idle = undone, since_s, looks + 1
        return now_s - since_s if looks >= _IDLE_LOOKS else 0.0


class Channel:
    """Implements `Transport` with worker processes and sockets.

    Args:
        plan: How many, started how.
        make_builder: Makes a worker's builder. It is pickled at once, and
            again at each `change`, with the dataset it refers to.

    Attributes:
        workers: Those that live, by index; the supervisor adds and removes.
        arena: Has the slots, and the heartbeats.
        in_flight: The tasks and their slots.
        launcher: Starts the processes.
        poll: Ready when there is a message, or a worker has ended.
        version_is_sent: Whether every worker was sent the latest version of
            the dataset's state.

    Raises:
        Exception: Whatever pickling the dataset raises.
    """

    def __init__(
        self, plan: ProcessPlan, make_builder: Callable[[], Builds]
    ) -> None:
        self._plan = plan
        self._make_builder = make_builder
        self.workers: dict[int, ProcessWorker] = {}
        self._version = 1
        self.version_is_sent = True
        self._last_dead_forkserver: int | None = None
        self._failures: dict[int, bytes] = {}  # in parts, by worker
        self._buffer = memoryview(bytearray(messages.RECEIVE_BYTES))
        os_limits.keep_standard_files()
        with contextlib.ExitStack() as undo:
            self._shared_state: SharedState | None = None
            if plan.start_method != "fork":
                self._shared_state = SharedState(make_builder)
                undo.callback(self._shared_state.close)
            self.arena = Arena(
                warm_slots=plan.lookahead + plan.count,
                hold_limit=max(16, plan.lookahead),
            )
            undo.callback(self.arena.close)
            with os_limits.named("Worker processes could not be started"):
                self.launcher = launchers.make_launcher(
                    plan.start_method,
                    plan.worker_env,
                    make_builder,
                    self.arena.segment,
                    self._shared_state.modules if self._shared_state else (),
                )
                undo.callback(self.launcher.close)
                self.open()
            undo.pop_all()
        self.in_flight = InFlight(self.arena, spare=plan.count)

    # -- sockets ------------------------------------------------------------

    def open(self) -> None:
        """Opens the sockets that all workers share."""
        self._tasks, self._tasks_taken = messages.socket_pair()
        self._results, self._results_told = messages.socket_pair()
        # Unlike a poll object, it stands being used by a signal handler, or
        # another thread, that ends the workers while they are waited for.
        self.poll = select.epoll()
        self.poll.register(self._results, select.EPOLLIN)

    def hang_up(self) -> None:
        """Shuts the sockets down, as the signal for all workers to end."""
        ends = [self._tasks, self._tasks_taken]
        for end in (*ends, *(w.control for w in self.workers.values())):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close_sockets(self) -> None:
        """Closes the sockets from `open`, after all workers are removed."""
        ends = [self._tasks, self._tasks_taken, self._results]
        for end in (*ends, self._results_told):
            end.close()
        self.poll.close()

    def close(self) -> None:
        """Releases memory and fork server, after all workers are removed."""
        self.launcher.close()
        if self._shared_state is not None:
            self._shared_state.close()
        self.arena.close()

    def send(self, task: Task) -> bool:
        """Sends a task, or returns False if the task socket is full."""
        request, interval_s = task.request, task.request.interval_s
        message = messages.TASK.pack(
            task.task_id,
            request.epoch,
            request.index,
            self._version,
            task.slot,
            messages.NO_INTERVAL_S if interval_s is None else interval_s,
        )
        try:
            self._tasks.send(message, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def unread(self) -> Iterator[int]:
        """Empties the task socket, and yields the ids of the removed tasks."""
        with contextlib.suppress(BlockingIOError):
            while True:
                datagram = self._tasks_taken.recv(
                    messages.TASK.size, socket.MSG_DONTWAIT
                )
                yield TaskMessage.unpack(datagram).task_id

    def receive(self) -> Iterator[ResultMessage]:
        """Yields every message that waits in the result socket."""
        while True:
            try:
                nbytes = self._results.recv_into(
                    self._buffer, 0, socket.MSG_DONTWAIT
                )
            except BlockingIOError:
                return
            yield ResultMessage.unpack(bytes(self._buffer[:nbytes]))

    def failure_of(self, result: ResultMessage) -> bytes | None:
        """Joins parts of a start-up error; returns `None` until complete."""
        failure = self._failures.pop(result.worker, b"") + result.body
        if not result.task_id:
            return failure
        self._failures[result.worker] = failure
        return None

    # -- the dataset's state ------------------------------------------------

    def change(self) -> bool:
        """Stores the dataset's current state as the latest version for workers.

        Returns whether it can be sent. If not, the forks must be replaced.
        """
        if self._shared_state is not None:
            self._shared_state.renew(self._make_builder)
        # Even if no byte of it is new: what it refers to (a file) may be.
        self._version += 1
        self.version_is_sent = False
        return self._shared_state is not None

    def tell_version(self) -> None:
        """Sends the dataset's latest version to the workers that lack it."""
        state, workers = self._shared_state, self.workers.values()
        for worker in workers:
            if state is None or worker.version == self._version:
                continue
            news = messages.VERSION.pack(self._version, state.start)
            try:
                socket.send_fds(
                    worker.control, [news], [state.fd], socket.MSG_DONTWAIT
                )
            except OSError as error:
                # One that is far behind is sent it with a later flush; the
                # end of one that has died is met by the next wait.
                if error.errno not in _NOT_SENT:
                    raise
            else:
                worker.version = self._version
        self.version_is_sent = all(w.version == self._version for w in workers)

    # -- what the supervisor calls ------------------------------------------

    def start(self, index: int) -> ProcessWorker | None:
        surroundings = launchers.surroundings(self._plan.worker_env)
        segment, state = self.arena.segment, self._shared_state
        segment.set_heartbeat(index, 0)
        segment.set_started(index, 0)  # one that was killed left its own
        with (
            os_limits.named(f"Worker {index} could not be started"),
            contextlib.ExitStack() as undo,
            contextlib.ExitStack() as handed,
        ):
            if not self.launcher.is_ready(surroundings):
                return None
            control, theirs = messages.socket_pair()
            undo.callback(control.close)
            handed.callback(theirs.close)
            start_fd = write_shared_state(
                worker_main.WorkerStart(
                    *(index, self._plan.dataset, self._version),
                    state=state.start if state else 0,
                    stride=segment.stride,
                    surroundings=surroundings,
                )
            )
            handed.callback(os.close, start_fd)
            stacks = memfd("keras_fastdata-stacks")
            undo.callback(os.close, stacks)
            files = worker_main.Files(
                start=start_fd,
                # A fork needs no dataset; the descriptor is closed unread.
                dataset=state.fd if state else start_fd,
                arena=segment.fd,
                tasks=self._tasks_taken.fileno(),
                results=self._results_told.fileno(),
                control=theirs.fileno(),
                stacks=stacks,
            )
            if (process := self.launcher.start(files)) is None:
                return None
            undo.callback(os.close, process.pidfd)
            undo.callback(process.exit_code, _EXIT_CODE_TIMEOUT_S)
            undo.callback(launchers.kill, process)
            self.poll.register(process.pidfd, select.EPOLLIN)
            undo.pop_all()
        return ProcessWorker(
            index=index,
            started_s=time.monotonic(),
            process=process,
            control=control,
            stacks=stacks,
            version=self._version,
        )

    def activities(self, now_s: float) -> Iterator[Activity]:
        segment, name = self.arena.segment, self._plan.dataset
        for worker in self.workers.values():
            worker.look(segment)
        heartbeats = [worker.seen[0] for worker in self.workers.values()]
        unclaimed = self.in_flight.oldest_unclaimed(heartbeats)
        for index, worker in self.workers.items():
            if worker.state is WorkerState.KILLED:
                continue
            process = worker.process
            ask = functools.partial(
                stack_dump.request, process.pid, process.pidfd, worker.stacks
            )
            heartbeat, began_s = worker.seen
            request = self.in_flight.request_of(heartbeat)
            if not worker.is_ready:
                what = loading(name, worker.name)
                elapsed_s = now_s - worker.started_s
                yield Activity(index, what, None, elapsed_s, ask, starting=True)
            elif request is not None and began_s:
                what = building(name, request, worker.name)
                yield Activity(index, what, request, now_s - began_s, ask)
            elif (idle_s := worker.look_for_idle_s(unclaimed, now_s)) > 0:
                what = f"Taking or delivering a batch of {name}, {worker.name},"
                yield Activity(index, what, None, idle_s, ask)

    def has_moved_on(self, worker: ProcessWorker) -> bool:
        return worker.seen != _heartbeat_of(worker, self.arena.segment)

    def kill(self, worker: ProcessWorker) -> None:
        launchers.kill(worker.process)

    def abandon(self, worker: ProcessWorker) -> WorkerEnd:
        why = _why_abandoned(worker.process)
        worker.process.abandon()
        name = worker.name.capitalize()
        _log.warning("%s of %s %s", name, self._plan.dataset, why)
        self._forget(worker)
        return WorkerEnd()

    def recover(self, worker: ProcessWorker) -> list[Task]:
        self.in_flight.requeue(self.unread())
        segment = self.arena.segment
        task = self.in_flight.recover(
            worker.index,
            segment.heartbeat(worker.index),
            {index: segment.heartbeat(index) for index in self.workers},
            ended=worker.state is WorkerState.EXITED,
        )
        return [] if task is None else [task]

    # -- the end of workers -------------------------------------------------

    def ended(self, timeout_s: float) -> list[ProcessWorker]:
        """Waits for a message or a worker's end; returns the ended workers."""
        ready = {fd for fd, _ in self.poll.poll(timeout_s)}
        return [w for w in self.workers.values() if w.process.pidfd in ready]

    def reap(self, worker: ProcessWorker) -> WorkerEnd:
        """Releases an ended worker's files and slots; returns a `WorkerEnd`."""
        exit_code = worker.process.exit_code(_EXIT_CODE_TIMEOUT_S)
        self._forget(worker)
        for slot in worker.retained_slots:
            self.arena.free(slot)
        # Nobody to say how: its fork server died. That is one loss, however
        # many workers it had, and no batch is to blame.
        forkserver = worker.process.forkserver
        if forkserver is None or exit_code is not None:
            return WorkerEnd(exit_code)
        is_known = forkserver == self._last_dead_forkserver
        self._last_dead_forkserver = forkserver
        return WorkerEnd(counts=not is_known, blames=False)

    def _forget(self, worker: ProcessWorker) -> None:
        self._failures.pop(worker.index, None)
        self.poll.unregister(worker.process.pidfd)
        os.close(worker.process.pidfd)
        os.close(worker.stacks)
        worker.control.close()


def _heartbeat_of(worker: Worker, segment: Segment) -> tuple[int, float]:
    """Returns a worker's current task id and the start time of the build."""
    return segment.heartbeat(worker.index), segment.started_s(worker.index)


def _why_abandoned(process: launchers.Child) -> str:
    """Returns the reason why a killed worker has not ended."""
    if launchers.kill(process, 0):
        return (
            "does not end, although it was killed (SIGKILL). It is left "
            "behind; it ends when the system call it is in does."
        )
    return (
        "does not end, and may not be killed (EPERM): it runs as the user that "
        "this process was when it started it. It is left behind; it ends when "
        "its batch does."
    )
