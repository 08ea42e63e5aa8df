"""Runs a worker process that is connected by pipes.

A second thread writes the stacks of all threads when it is asked to, and ends
the process when the training process ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import faulthandler
import mmap
import os
import struct
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NoReturn

from keras_fastdata.memory import os_limits, shared_state
from keras_fastdata.memory.arena import HEARTBEATS_BYTES, Heartbeats
from keras_fastdata.memory.block_writer import Blocks, BlockWriter
from keras_fastdata.memory.codec import SlotWriter
from keras_fastdata.workers import (
    log_forwarding,
    messages,
    worker_loop,
    worker_process,
)
from keras_fastdata.workers.low_descriptors import move_away
from keras_fastdata.workers.messages import (
    MessageKind,
    ResultMessage,
    TaskMessage,
)
from keras_fastdata.workers.portable import launcher
from keras_fastdata.workers.portable.pipes import Inbox, Outbox
from keras_fastdata.workers.worker_loop import WorkerLoop
from keras_fastdata.workers.worker_process import WorkerStart

# The first byte of a message to a worker.
TASK, VERSION, DROP, END = b"T", b"V", b"D", b"E"
DROPPED = struct.Struct("<I")  # the number of a block
MADE = struct.Struct("<QQ")  # the body of `MEMORY`: a task, and its bytes

_LOOK_S = 0.5  # between two looks whether the trainer is alive, at most


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipeStart(WorkerStart):
    """The settings that a worker receives before it loads the dataset.

    Attributes:
        prefix: The begin of the names of shared memory that it creates.
    """

    prefix: str


def run(trainer: int, files: Sequence[int], pipes: Sequence[int]) -> NoReturn:
    """Runs a worker until the training process closes the task pipe.

    Args:
        trainer: The training process's id.
        files: Handles of the worker's start, the dataset, the heartbeats, and
            the file for the worker's stacks.
        pipes: Handles of the pipes: tasks, questions; results, answers.
    """
    moved = move_away([*files, *pipes])
    files, pipes = moved[: len(files)], moved[len(files) :]
    start, dataset, heartbeats, stacks = map(launcher.inherited_file, files)
    tasks, questions = (
        launcher.inherited_pipe(end, writes=False) for end in pipes[:2]
    )
    results, answers = (
        launcher.inherited_pipe(end, writes=True) for end in pipes[2:]
    )
    outbox = Outbox(results)
    worker_process.run_and_leave(
        lambda: _main(
            trainer,
            (start, dataset, heartbeats, stacks),
            Inbox(tasks),
            outbox,
            (questions, answers),
        )
    )


def _main(
    trainer: int,
    files: tuple[int, int, int, int],
    tasks: Inbox,
    results: Outbox,
    questions: tuple[Connection, Connection],
) -> int:
    try:
        with os_limits.named("A worker process could not begin"):
            start: PipeStart = shared_state.read_shared_state(files[0])
            os.close(files[0])
            blocks = Blocks(start.prefix)
            _answer_in_thread(trainer, *questions, blocks, files[3])
            worker_process.set_up(start)
            loop = _PipeLoop(start, files, tasks, results, blocks)
    except Exception as error:
        worker_loop.send_failure(results.send, messages.NOBODY, error)
        return 1
    log_forwarding.install(loop.tell)
    if not loop.load(None):
        return 1
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, EOFError):
        loop.serve()
    loop.stop()
    worker_process.flush()
    if not loop.is_asked_to_end:  # the trainer has ended
        blocks.remove_names()
    launcher.end_this_worker(0)
    return 0


def _answer_in_thread(
    trainer: int,
    questions: Connection,
    answers: Connection,
    blocks: Blocks,
    stacks: int,
) -> None:
    """Starts a thread that writes stacks on request and watches the trainer.

    If the main thread never releases the GIL, this thread cannot run. Then a
    timer of `faulthandler`, which needs no GIL, has written the stacks.
    """
    outbox = Outbox(answers)
    # Another process may be between: `python.exe` of a venv starts a second.
    has_parent = os.getppid() == trainer

    def watch_trainer() -> None:
        # The pipe ends with the trainer, unless a fork of the trainer has the
        # pipe open, too.
        with contextlib.suppress(EOFError, OSError):
            while not has_parent or os.getppid() == trainer:
                _restart_timer(stacks)
                if questions.poll(_LOOK_S):
                    number = questions.recv_bytes()
                    faulthandler.dump_traceback(stacks, all_threads=True)
                    outbox.send(number)
                    # The trainer reads the file before it is emptied.
                    questions.poll(_LOOK_S)
        blocks.remove_names()
        launcher.end_this_worker(1)

    thread = threading.Thread(
        target=watch_trainer, name="trainer-watch", daemon=True
    )
    try:
        thread.start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, f"{error}") from error


def _restart_timer(stacks: int) -> None:
    """Schedules a dump of all stacks, which the next call soon cancels."""
    faulthandler.cancel_dump_traceback_later()
    with contextlib.suppress(OSError):
        if os.fstat(stacks).st_size:  # an earlier dump
            os.truncate(stacks, 0)
            os.lseek(stacks, 0, os.SEEK_SET)
    with contextlib.suppress(RuntimeError):  # there can be no thread for it
        faulthandler.dump_traceback_later(2 * _LOOK_S, file=stacks)


class _PipeLoop(WorkerLoop):
    """Runs a worker that has its own pipes and its own shared memory."""

    def __init__(
        self,
        start: PipeStart,
        files: tuple[int, int, int, int],
        tasks: Inbox,
        results: Outbox,
        blocks: Blocks,
    ) -> None:
        _, dataset, heartbeats, _ = files
        memory = mmap.mmap(heartbeats, HEARTBEATS_BYTES)
        os.close(heartbeats)
        super().__init__(start, Heartbeats(memory), os.dup(dataset))
        self._dataset = dataset
        self._tasks, self._results = tasks, results
        self._blocks = blocks
        self._latest = start.version, start.state
        self.is_asked_to_end = False

    def _next_task(self) -> TaskMessage | None:
        worker, heartbeats = self._start.worker, self._heartbeats
        while True:
            try:
                message = self._tasks.receive()
            except (EOFError, OSError):
                return None
            kind, body = message[:1], message[1:]
            if kind == END:
                self.is_asked_to_end = True
                return None
            if kind == DROP:
                (number,) = DROPPED.unpack(body)
                self._blocks.drop(number)
            elif kind == VERSION:
                self._latest = messages.VERSION.unpack(body)
            else:
                task = TaskMessage.unpack(body)
                if task.task_id > heartbeats.unwanted(worker):
                    return task
                stale = ResultMessage(MessageKind.STALE, worker, task.task_id)
                self._send(stale.pack())

    def _send(self, message: bytes, *, may_wait: bool = True) -> None:
        if os.getpid() != self._pid:
            return  # a fork by `__getitem__` must not write to the pipe
        if not may_wait:
            raise BlockingIOError
        self._results.send(message)

    def _writer(self, task: TaskMessage) -> BlockWriter:
        return BlockWriter(
            self._blocks, task.slot, task.task_id, self._in_place
        )

    def _fitted(
        self, result: ResultMessage, writer: SlotWriter
    ) -> ResultMessage:
        fitted = super()._fitted(result, writer)
        assert isinstance(writer, BlockWriter)
        if made := writer.made_nbytes:
            self.tell(MessageKind.MEMORY, MADE.pack(result.task_id, made))
        return fitted

    def _update(self) -> None:
        version, state = self._latest
        make_builder = shared_state.read_shared_state(self._dataset, state)
        self._builder.adopt(make_builder())
        self._version = version
