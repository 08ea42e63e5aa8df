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
from keras_fastdata.memory.arena import Arena, memfd
from keras_fastdata.memory.shared_state import SharedState, write_shared_state
from keras_fastdata.workers import messages, stack_dump, worker_process
from keras_fastdata.workers.base import Builds, PoolPlan
from keras_fastdata.workers.in_flight import InFlight, Task
from keras_fastdata.workers.messages import ResultMessage, TaskMessage
from keras_fastdata.workers.process import (
    children,
    launchers,
    sockets,
    worker_main,
)
from keras_fastdata.workers.signals import Interruptible
from keras_fastdata.workers.slot_channel import SlotChannel, SlotWorker
from keras_fastdata.workers.supervisor import WorkerEnd, WorkerState

_EXIT_CODE_TIMEOUT_S = 2.0
# Errors of a send to a worker that has not read earlier messages, or has died.
_NOT_SENT = {errno.EAGAIN, errno.ETOOMANYREFS, errno.EPIPE, errno.ECONNRESET}

_log = logging.getLogger("keras_fastdata")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessPlan(PoolPlan):
    """The settings of a pool of worker processes."""

    start_method: str  # "forkserver", "spawn" or "fork"


@dataclasses.dataclass(eq=False, kw_only=True)
class ProcessWorker(SlotWorker):
    """The training process's record of one worker process."""

    process: children.Child  # as it was launched
    control: socket.socket  # the training process's end of its control socket
    stacks: int  # the file that it writes its stacks into

    @property
    def pid(self) -> int:
        return self.process.pid


class Channel(SlotChannel[ProcessWorker]):
    """Implements `Transport` with worker processes and sockets.

    Args:
        plan: How many, started how.
        make_builder: Makes a worker's builder. It is pickled at once, and
            again at each `change`, with the dataset it refers to.

    Attributes:
        arena: Has the slots, and the heartbeats.
        launcher: Starts the processes.

    Raises:
        Exception: Whatever pickling the dataset raises.
    """

    def __init__(
        self, plan: ProcessPlan, make_builder: Callable[[], Builds]
    ) -> None:
        super().__init__(plan)
        self._make_builder = make_builder
        self._last_dead_forkserver: int | None = None
        self._buffer = memoryview(bytearray(messages.RECEIVE_BYTES))
        os_limits.keep_standard_files()
        with contextlib.ExitStack() as undo:
            self._shared_state: SharedState | None = None
            if plan.start_method != "fork":
                self._shared_state = SharedState(make_builder, Interruptible())
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
        self.heartbeats = self.arena.segment
        self.in_flight = InFlight(self.arena, spare=plan.count)

    @property
    def importing(self) -> str:
        return self.launcher.importing

    # -- sockets ------------------------------------------------------------

    def open(self) -> None:
        self._tasks, self._tasks_taken = sockets.socket_pair()
        self._results, self._results_told = sockets.socket_pair()
        # Unlike a poll object, it stands being used by a signal handler, or
        # another thread, that ends the workers while they are waited for.
        self._poll = select.epoll()
        self._poll.register(self._results, select.EPOLLIN)

    def ask_to_end(self) -> None:
        ends = [self._tasks, self._tasks_taken]
        for end in (*ends, *(w.control for w in self.workers.values())):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def forget_workers(self) -> None:
        ends = [self._tasks, self._tasks_taken, self._results]
        for end in (*ends, self._results_told):
            end.close()
        self._poll.close()

    def close(self) -> None:
        self.launcher.close()
        if self._shared_state is not None:
            self._shared_state.close()
        self.arena.close()

    def send(self, task: Task) -> bool:
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
        with contextlib.suppress(BlockingIOError):
            while True:
                datagram = self._tasks_taken.recv(
                    messages.TASK.size, socket.MSG_DONTWAIT
                )
                yield TaskMessage.unpack(datagram).task_id

    def receive(self) -> Iterator[ResultMessage]:
        while True:
            try:
                nbytes = self._results.recv_into(
                    self._buffer, 0, socket.MSG_DONTWAIT
                )
            except BlockingIOError:
                return
            yield ResultMessage.unpack(bytes(self._buffer[:nbytes]))

    # -- the dataset's state ------------------------------------------------

    def change(self) -> bool:
        if self._shared_state is not None:
            self._shared_state.renew(self._make_builder)
        # Even if no byte of it is new: what it refers to (a file) may be.
        self._version += 1
        self.version_is_sent = False
        return self._shared_state is not None

    def tell_version(self) -> None:
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
                worker.has_been_told(self._version)
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
            control, theirs = sockets.socket_pair()
            undo.callback(control.close)
            handed.callback(theirs.close)
            start_fd = write_shared_state(
                worker_process.WorkerStart(
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
            undo.callback(children.kill, process)
            self._poll.register(process.pidfd, select.EPOLLIN)
            undo.pop_all()
        return ProcessWorker(
            index=index,
            started_s=time.monotonic(),
            process=process,
            control=control,
            stacks=stacks,
            version=self._version,
        )

    def _ask(self, worker: ProcessWorker) -> Callable[[], str]:
        process = worker.process
        return functools.partial(
            stack_dump.request, process.pid, process.pidfd, worker.stacks
        )

    def _unclaimed(self) -> Callable[[ProcessWorker], int | None]:
        heartbeats = [worker.seen[0] for worker in self.workers.values()]
        oldest = self.in_flight.oldest_unclaimed(heartbeats)
        return lambda _: oldest  # any of them might have taken it

    def kill(self, worker: ProcessWorker) -> None:
        children.kill(worker.process)

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

    def wait(self, timeout_s: float) -> None:
        try:
            self._poll.poll(timeout_s)
        except (OSError, ValueError):
            if not self._poll.closed:  # by whoever has ended the workers
                raise

    def ended(self, timeout_s: float) -> list[ProcessWorker]:
        ready = {fd for fd, _ in self._poll.poll(timeout_s)}
        return [w for w in self.workers.values() if w.process.pidfd in ready]

    def reap(self, worker: ProcessWorker) -> WorkerEnd:
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

    def end(self, worker: ProcessWorker, timeout_s: float) -> bool:
        if not sockets.wait_readable(worker.process.pidfd, timeout_s):
            return False
        self.reap(worker)
        return True

    def keep_slots_of(self, worker: ProcessWorker) -> None:
        heartbeat = self.heartbeats.heartbeat(worker.index)
        self.in_flight.recover(worker.index, heartbeat, {}, ended=False)

    def _forget(self, worker: ProcessWorker) -> None:
        self.forget_failure(worker)
        self._poll.unregister(worker.process.pidfd)
        os.close(worker.process.pidfd)
        os.close(worker.stacks)
        worker.control.close()


def _why_abandoned(process: children.Child) -> str:
    """Returns the reason why a killed worker has not ended."""
    if children.kill(process, 0):
        return (
            "does not end, although it was killed (SIGKILL). It is left "
            "behind; it ends when the system call it is in does."
        )
    return (
        "does not end, and may not be killed (EPERM): it runs as the user that "
        "this process was when it started it. It is left behind; it ends when "
        "its batch does."
    )
