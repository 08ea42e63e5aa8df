"""The main loop of a worker process, which builds requested batches.

Runs in a worker process, on its main thread. The dataset's state is the
training process's; a request names the version it is for, and a worker that is
behind first reads the newer ones.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from keras_fastdata import _process_role
from keras_fastdata.errors import LoaderError
from keras_fastdata.memory import codec, shared_state
from keras_fastdata.memory.arena import Heartbeats
from keras_fastdata.metrics.timing import Stopwatch
from keras_fastdata.workers import exceptions, log_forwarding, messages
from keras_fastdata.workers.base import BatchRequest, Builds, describe_batch
from keras_fastdata.workers.messages import (
    RETAINED,
    SPILLED,
    MessageKind,
    ResultMessage,
    TaskMessage,
)
from keras_fastdata.workers.worker_process import (
    WorkerStart,
    leave,
    run_finalizers,
)


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
        """Runs `on_worker_stop`, and ends what `multiprocessing` has here.

        The builder logs the hook's exceptions.
        """
        self._builder.stop(self._start.worker)
        run_finalizers()

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
