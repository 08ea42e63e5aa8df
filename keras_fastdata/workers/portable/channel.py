"""Starts worker processes, and connects each worker by its own pipes.

    trainer --task, version, block to drop--> task pipe of one worker
    trainer <--message-- result pipe of the worker
    trainer --question--> question pipe, to a second thread of the worker
    trainer <--done-- answer pipe; the stack is in a file

Uses only what Python has on every system. Runs in the training process. No send
blocks here: a worker gets a new task only when few of its tasks are left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import mmap
import os
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection
from multiprocessing.connection import Connection

from keras_fastdata._call_stack import raise_of_handler
from keras_fastdata.memory import os_limits
from keras_fastdata.memory.arena import HEARTBEATS_BYTES, Heartbeats
from keras_fastdata.memory.block_arena import BlockArena
from keras_fastdata.memory.shared_state import (
    SharedState,
    anonymous_file,
    write_shared_state,
)
from keras_fastdata.workers import environment, messages, stack_dump
from keras_fastdata.workers.base import Builds, PoolPlan
from keras_fastdata.workers.in_flight import InFlight, Task
from keras_fastdata.workers.messages import MessageKind, ResultMessage
from keras_fastdata.workers.portable import launcher
from keras_fastdata.workers.portable.pipes import Inbox, Outbox
from keras_fastdata.workers.portable.worker_main import (
    DROP,
    DROPPED,
    END,
    MADE,
    TASK,
    VERSION,
    PipeStart,
)
from keras_fastdata.workers.signals import Interruptible
from keras_fastdata.workers.slot_channel import SlotChannel, SlotWorker
from keras_fastdata.workers.supervisor import WorkerEnd, WorkerState
from keras_fastdata.workers.worker_process import Surroundings

_EXIT_TIMEOUT_S = 0.1  # for a process whose pipe is closed to end
_STACK_TIMEOUT_S = 1.0  # for a stuck worker to write its stacks
_IDLE_S = 0.05  # the longest sleep if there is no pipe to wait for

# The number of tasks that a worker has at a time. A slow worker has few, since
# another worker may be free earlier. A quick worker has more, since it may
# build several before the training process looks again.
_FEW = 2
_MOST = 32  # they must fit into a pipe
_QUICK_S = 0.1

_QUESTION = struct.Struct("<Q")  # its number, which the answer repeats
_ANSWERS = {MessageKind.BATCH, MessageKind.FAILURE, MessageKind.STALE}

_log = logging.getLogger("keras_fastdata")


@dataclasses.dataclass(eq=False, kw_only=True)
class PipeWorker(SlotWorker):
    """The training process's record of one worker."""

    process: subprocess.Popen[bytes]
    owner: int  # the number by which the arena knows it
    tasks: Outbox
    results: Inbox
    questions: Connection  # a question asks for the stacks of its threads
    answers: Inbox  # the worker repeats each question after the stacks
    stacks: int  # the file that it writes its stacks into
    # The tasks that it was sent and has not answered, by task id.
    assigned: dict[int, Task] = dataclasses.field(default_factory=dict)
    build_s: float = 0.0  # the build time of its last batch
    is_silent: bool = False  # whether its result pipe has ended

    @property
    def pid(self) -> int:
        return self.process.pid

    def answered(self, result: ResultMessage) -> None:
        """Removes an answered task, and stores its build time."""
        self.assigned.pop(result.task_id, None)
        if result.kind is not MessageKind.STALE:
            self.build_s = result.build_ns / 1e9

    def fall_silent(self) -> None:
        """Marks the end of the worker's results, and kills the worker."""
        self.is_silent = True
        self.killed_s = self.killed_s or time.monotonic()
        launcher.kill(self.process)

    def close(self) -> None:
        """Closes this process's ends of the pipes, and the file of stacks."""
        ends = [self.tasks.pipe, self.results.pipe, self.answers.pipe]
        for end in (*ends, self.questions):
            end.close()
        os.close(self.stacks)


class PipeChannel(SlotChannel[PipeWorker]):
    """Implements `Transport` with worker processes and pipes.

    Args:
        plan: How many workers.
        make_builder: Makes a worker's builder. It is pickled at once, and
            again at each `change`, with the dataset it refers to.

    Raises:
        Exception: Whatever pickling the dataset raises.
    """

    def __init__(
        self, plan: PoolPlan, make_builder: Callable[[], Builds]
    ) -> None:
        super().__init__(plan)
        self._make_builder = make_builder
        self._questions = itertools.count(1)
        self._capacity = -(-plan.lookahead // plan.count)
        os_limits.keep_standard_files()
        with contextlib.ExitStack() as undo:
            self._shared_state = SharedState(make_builder, Interruptible())
            undo.callback(self._shared_state.close)
            with os_limits.named("Worker processes could not be started"):
                self._heartbeats_fd = anonymous_file("keras_fastdata-beats")
                undo.callback(os.close, self._heartbeats_fd)
                os.truncate(self._heartbeats_fd, HEARTBEATS_BYTES)
                self.heartbeats = Heartbeats(
                    mmap.mmap(self._heartbeats_fd, HEARTBEATS_BYTES)
                )
            undo.pop_all()
        self.arena = BlockArena(
            warm_slots=plan.lookahead + plan.count,
            hold_limit=max(16, plan.lookahead),
        )
        self.in_flight = InFlight(self.arena, spare=plan.count)

    def close(self) -> None:
        self._shared_state.close()
        fd, self._heartbeats_fd = self._heartbeats_fd, -1
        if fd >= 0:
            os.close(fd)
        self.arena.close()

    # -- tasks and messages -------------------------------------------------

    def send(self, task: Task) -> bool:
        free = [w for w in self.workers.values() if self._has_room(w)]
        if not free:
            return False
        worker = min(free, key=lambda each: len(each.assigned))
        request, interval_s = task.request, task.request.interval_s
        block = self.arena.bind(task.slot, worker.owner)
        message = messages.TASK.pack(
            *(task.task_id, request.epoch, request.index),
            *(self._version, block),
            messages.NO_INTERVAL_S if interval_s is None else interval_s,
        )
        worker.assigned[task.task_id] = task
        with contextlib.suppress(OSError):  # the worker has ended; see `ended`
            for number in self.arena.take_dropped(worker.owner):
                worker.tasks.send(DROP + DROPPED.pack(number))
            if worker.version != self._version:
                start = self._shared_state.start
                news = messages.VERSION.pack(self._version, start)
                worker.tasks.send(VERSION + news)
                worker.has_been_told(self._version)
            worker.tasks.send(TASK + message)
        return True

    def _has_room(self, worker: PipeWorker) -> bool:
        if worker.is_silent or worker.state is WorkerState.KILLED:
            return False
        is_quick = worker.is_ready and worker.build_s < _QUICK_S
        most = max(_FEW, self._capacity) if is_quick else _FEW
        return len(worker.assigned) < min(most, _MOST)

    def unread(self) -> list[int]:
        # A pipe gives no message back. The worker answers STALE at once.
        for worker in self.workers.values():
            last = max(worker.assigned, default=0)
            self.heartbeats.set_unwanted(worker.index, last)
        return []

    def receive(self) -> Iterator[ResultMessage]:
        while ready := self._ready(0):
            for worker in ready:
                for result in self._messages_of(worker):
                    if result.kind is MessageKind.MEMORY:
                        self._attach(worker, result)
                    elif not worker.is_silent:
                        if result.kind in _ANSWERS:
                            worker.answered(result)
                        yield result

    def _messages_of(self, worker: PipeWorker) -> Iterator[ResultMessage]:
        """Reads a part of a message; yields the message if it is complete."""
        try:
            message = worker.results.receive_part()
        except (EOFError, OSError) as error:
            raise_of_handler(error)
            worker.fall_silent()
            return
        if message is not None:
            yield ResultMessage.unpack(message)

    def _attach(self, worker: PipeWorker, made: ResultMessage) -> None:
        """Opens the shared memory that a worker has created for a batch."""
        task_id, nbytes = MADE.unpack(made.body)
        task = worker.assigned.get(task_id)
        if task is None:
            return
        try:
            with os_limits.named("The memory of a batch could not be opened"):
                self.arena.attach(task.slot, task_id, nbytes)
        except FileNotFoundError:
            # The worker has ended, or could not enlarge the memory and has
            # removed it. Its end or its error is the next thing to come.
            pass

    def wait(self, timeout_s: float) -> None:
        workers = list(self.workers.values())
        try:
            self._ready(timeout_s)
        except (OSError, ValueError):
            # Has a signal handler, or another thread, ended the workers?
            if not any(worker.results.pipe.closed for worker in workers):
                raise

    def _ready(self, timeout_s: float) -> list[PipeWorker]:
        """Waits for messages; returns workers that sent one or have ended."""
        ends: dict[object, PipeWorker] = {
            worker.results.pipe: worker
            for worker in list(self.workers.values())
            if not worker.is_silent
        }
        if not ends:
            if timeout_s:
                time.sleep(min(timeout_s, _IDLE_S))
            return []
        found = connection.wait(list(ends), timeout_s)  # type: ignore[arg-type]
        return [ends[end] for end in found]

    # -- the dataset's state ------------------------------------------------

    def change(self) -> bool:
        fd = self._shared_state.fd
        self._shared_state.renew(self._make_builder)
        # Even if the bytes are equal: a file that the dataset names may differ.
        self._version += 1
        # Workers have inherited the old file, and cannot open another one.
        return fd == self._shared_state.fd

    # -- what the supervisor calls ------------------------------------------

    def start(self, index: int) -> PipeWorker:
        heartbeats, state = self.heartbeats, self._shared_state
        heartbeats.set_heartbeat(index, 0)
        heartbeats.set_started(index, 0)  # of a worker that was killed
        heartbeats.set_unwanted(index, 0)
        with (
            os_limits.named(f"Worker {index} could not be started"),
            contextlib.ExitStack() as undo,
            contextlib.ExitStack() as handed,
        ):
            environ = environment.of_worker(self._plan.worker_env)
            start = write_shared_state(
                PipeStart(
                    worker=index,
                    dataset=self._plan.dataset,
                    version=self._version,
                    state=state.start,
                    stride=0,
                    surroundings=Surroundings.of_this_process(environ),
                    prefix=self.arena.prefix,
                )
            )
            handed.callback(os.close, start)
            theirs: list[Connection] = []
            ours: list[Connection] = []
            for is_to_worker in (True, True, False, False):
                reader, writer = connection.Pipe(duplex=False)
                mine, other = reader, writer
                if is_to_worker:
                    mine, other = writer, reader
                undo.callback(mine.close)
                handed.callback(other.close)
                ours.append(mine)
                theirs.append(other)
            stacks = anonymous_file("keras_fastdata-stacks")
            undo.callback(os.close, stacks)
            files = start, state.fd, self._heartbeats_fd, stacks
            process = launcher.start(environ, files, theirs)
            undo.pop_all()
        tasks, questions, results, answers = ours
        return PipeWorker(
            index=index,
            started_s=time.monotonic(),
            version=self._version,
            process=process,
            owner=self.arena.add_owner(),
            tasks=Outbox(tasks),
            results=Inbox(results),
            questions=questions,
            answers=Inbox(answers),
            stacks=stacks,
        )

    def _ask(self, worker: PipeWorker) -> Callable[[], str]:
        return functools.partial(self._stack_of, worker)

    def _stack_of(self, worker: PipeWorker) -> str:
        """Requests a worker's stacks, and waits up to a second for them."""
        question = _QUESTION.pack(next(self._questions))
        deadline = time.monotonic() + _STACK_TIMEOUT_S
        pipe = worker.answers.pipe
        with contextlib.suppress(EOFError, OSError):
            worker.questions.send_bytes(question)
            while pipe.poll(max(0.0, deadline - time.monotonic())):
                if worker.answers.receive_part() == question:
                    break
        return _written_stack(worker.stacks) or (
            "It does not answer, so its stack cannot be had."
        )

    def _unclaimed(self) -> Callable[[PipeWorker], int | None]:
        return lambda worker: min(worker.assigned, default=None)

    def kill(self, worker: PipeWorker) -> None:
        launcher.kill(worker.process)

    def abandon(self, worker: PipeWorker) -> WorkerEnd:
        name = worker.name.capitalize()
        _log.warning(
            "%s of %s does not end, although it was killed. It is left behind; "
            "it ends when the system call it is in does.",
            name,
            self._plan.dataset,
        )
        self._forget(worker)
        return WorkerEnd()

    def recover(self, worker: PipeWorker) -> list[Task]:
        found: list[Task] = []
        heartbeat = self.heartbeats.heartbeat(worker.index)
        if worker.assigned.pop(heartbeat, None) is not None:
            task, slot = self.in_flight.complete(heartbeat, worker.index)
            if task is not None:
                found.append(task)
            elif slot is not None:  # its request was cancelled
                self.arena.free(slot)
        self.in_flight.requeue(worker.assigned)
        return found

    # -- the end of workers -------------------------------------------------

    def ended(self, timeout_s: float) -> list[PipeWorker]:
        if timeout_s:
            self._ready(timeout_s)
        return [w for w in self.workers.values() if self._has_ended(w)]

    def _has_ended(self, worker: PipeWorker) -> bool:
        if worker.is_silent:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(_EXIT_TIMEOUT_S)
        return worker.process.poll() is not None

    def reap(self, worker: PipeWorker) -> WorkerEnd:
        exit_code = worker.process.returncode
        launcher.kill(worker.process)  # the processes that it has started
        self._forget(worker)
        for slot in worker.retained_slots:
            self.arena.free(slot)
        return WorkerEnd(exit_code)

    def end(self, worker: PipeWorker, timeout_s: float) -> bool:
        try:
            worker.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        self.reap(worker)
        return True

    def keep_slots_of(self, worker: PipeWorker) -> None:
        """Does nothing, because no other worker gets this worker's blocks."""

    def ask_to_end(self) -> None:
        for worker in self.workers.values():
            # A fork of this process may have the pipe open, too.
            with contextlib.suppress(OSError):
                worker.tasks.send(END)
            worker.tasks.pipe.close()

    def _forget(self, worker: PipeWorker) -> None:
        self.forget_failure(worker)
        worker.close()
        self.arena.remove_owner(worker.owner)
        self.arena.forget(worker.assigned)


def _written_stack(stacks: int) -> str:
    """Reads the stacks that a worker has written; returns "" if none."""
    with contextlib.suppress(OSError, ValueError):
        # A read would move the offset at which the worker writes.
        size = os.fstat(stacks).st_size
        with mmap.mmap(stacks, size, access=mmap.ACCESS_READ) as written:
            threads = written[:].decode(errors="replace").split("\n\n")
        theirs = [text for text in threads if " in watch_trainer" not in text]
        return stack_dump.users_part("\n".join(theirs))
    return ""
