"""A pool of worker processes that build batches in shared memory slots.

    submit -> in flight -> task socket   -> whichever worker is free
    collect <------------- result socket <- every worker

What the task socket does not take waits in the in-flight book. A request is
only sent together with a free slot, so a worker never waits for memory.
`Channel` has the sockets and processes; `Supervisor` replaces the workers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable
from typing import Any

from keras_fastdata.errors import LoaderError
from keras_fastdata.memory import codec
from keras_fastdata.metrics.pool_stats import PoolStats
from keras_fastdata.metrics.timing import Timing
from keras_fastdata.metrics.worker_kinds import WorkerKind
from keras_fastdata.workers import exceptions, log_forwarding, supervisor
from keras_fastdata.workers.base import (
    BatchRequest,
    BatchResult,
    LocalResult,
    PoolPlan,
    describe_batch,
)
from keras_fastdata.workers.in_flight import Task
from keras_fastdata.workers.messages import (
    RETAINED,
    SPILLED,
    MessageKind,
    ResultMessage,
)
from keras_fastdata.workers.signals import DeferredSignals
from keras_fastdata.workers.slot_channel import SlotChannel, W
from keras_fastdata.workers.supervisor import WorkerState

_ANSWERS = {MessageKind.BATCH, MessageKind.FAILURE, MessageKind.STALE}


@dataclasses.dataclass(slots=True, eq=False)
class SlotResult:
    """A batch that is still encoded in its slot of shared memory."""

    request_id: int
    worker: int
    nbytes: int
    timing: Timing | None
    _dataset: str
    _task: Task
    _encoded: codec.Encoded
    _arena: codec.Lender
    by_dataset = is_lost = False

    def open(self) -> Any:
        try:
            return codec.decode(self._encoded, self._arena, self._task.slot)
        except Exception as error:
            worker, request = f"worker {self.worker}", self._task.request
            exceptions.note(
                error, describe_batch(self._dataset, request, worker, "loading")
            )
            raise

    def discard(self) -> None:
        self._arena.free(self._task.slot)


class ProcessPool(supervisor.SupervisedPool[W]):
    """Builds batches in worker processes.

    Args:
        plan: How many, started how.
        channel: Starts and reaches them.
        receiver: Hands on what they log, and warn of.
    """

    def __init__(
        self,
        plan: PoolPlan,
        channel: SlotChannel[W],
        receiver: log_forwarding.Receiver,
    ) -> None:
        self._plan = plan
        self._channel = channel
        self._arena = channel.arena
        super().__init__(plan, channel, receiver)

    # -- what the engine calls ----------------------------------------------

    def submit(self, request: BatchRequest) -> bool:
        if not self._in_flight.enter(request):
            return False
        self._flush()
        return True

    def wait(self, timeout_s: float) -> None:
        self._channel.wait(min(timeout_s, self._watchdog.interval_s))

    def cancel(self, request_ids: Iterable[int]) -> None:
        gone = set(request_ids)
        super().cancel(gone)
        if self._in_flight.is_out(gone):
            self._unqueue()
            self._in_flight.cancel(gone)
            self._flush()

    def pause(self) -> None:
        if not self._is_paused:
            self._unqueue()
            super().pause()

    def change(self, *, anew: bool = False) -> None:
        if not self._channel.change() or anew:
            with DeferredSignals():  # no exception comes between the two
                self._end_workers()
                self._channel.open()
        self._flush()

    def expect(self, ahead: int) -> None:
        self._arena.keep_warm(ahead + self._plan.count)

    def pool_stats(self) -> PoolStats:
        count, importing = self._plan.count, self._channel.importing
        waiting = count - len(self._workers) if importing else 0
        return PoolStats(
            WorkerKind.PROCESS,
            count,
            {i: w.pid for i, w in list(self._workers.items())},
            self._policy.losses,
            self._arena.nbytes,
            starting=self.starting + waiting,
            importing=importing,
        )

    def _end(self) -> None:
        self._end_workers()
        self._channel.close()

    # -- sending ------------------------------------------------------------

    def _flush(self) -> None:
        if not self._workers or self._is_paused:
            return
        if not self._channel.version_is_sent:
            self._channel.tell_version()
        self._in_flight.send(self._channel.send)

    def _unqueue(self) -> None:
        """Moves sent tasks that no worker has read back to the queue."""
        self._in_flight.requeue(self._channel.unread())

    # -- receiving ----------------------------------------------------------

    def _receive(self, is_due: bool) -> list[BatchResult]:
        done = self._read()
        # Now and then also while batches flow: one worker may be missing.
        if is_due or not done:
            ended = self._channel.ended(0)
            done += self._read()
            for worker in ended:
                with DeferredSignals():  # a reaped worker must be removed
                    end = self._channel.reap(worker)
                    done += self._supervisor.on_exit(worker, end)
        return done

    def _read(self) -> list[BatchResult]:
        """Handles all received messages; returns the results among them."""
        done: list[BatchResult] = []
        for result in self._channel.receive():
            kind = result.kind
            if kind in _ANSWERS:
                self._complete(result, done)
            elif kind in log_forwarding.KINDS:
                self._receiver.put(kind, result.body)
            elif kind is MessageKind.READY:
                if result.worker in self._workers:
                    self._workers[result.worker].loaded()
            elif failure := self._channel.failure_of(result):
                self._fail_start(exceptions.load_exception(failure))
        return done

    def _complete(self, result: ResultMessage, done: list[BatchResult]) -> None:
        """Handles a worker's answer to a task."""
        task, slot = self._in_flight.complete(result.task_id, result.worker)
        if slot is None:
            return
        if task is None or result.kind is MessageKind.STALE:
            self._free(slot, result)
            if task is not None:
                self._in_flight.send_anew(task)
            return
        built_s = result.build_ns / 1e9
        if built_s > self._watchdog.slowest_s:
            self._watchdog.learn(built_s)
        request_id = task.request.request_id
        extents, body = result.extents, result.body
        if result.flags & SPILLED:
            extents, body = self._spilled(result, slot)
        if result.kind is MessageKind.FAILURE:
            self._free(slot, result)
            error = exceptions.load_exception(body)
            done.append(LocalResult.failed(request_id, result.worker, error))
            return
        timing = result.timing
        if timing is not None and task.crashes:
            timing = timing._replace(retries=task.crashes)
        retained = bool(result.flags & RETAINED)
        delivery = SlotResult(
            request_id,
            result.worker,
            result.used,
            timing,
            self._plan.dataset,
            task,
            codec.Encoded(body, extents, result.used, retained),
            self._arena,
        )
        if not retained:
            done.append(delivery)
            return
        done.append(_opened(delivery))
        self._free(slot, result)

    def _spilled(self, result: ResultMessage, slot: int) -> tuple[bytes, bytes]:
        """Reads the parts of a large result message from its slot."""
        split = result.extents_nbytes
        spilled = codec.read_appended(
            self._arena.segment, slot, result.used, split + result.body_nbytes
        )
        return spilled[:split], spilled[split:]

    def _free(self, slot: int, result: ResultMessage) -> None:
        """Frees a slot, unless the worker's dataset still uses the slot."""
        worker = self._workers.get(result.worker)
        if result.flags & RETAINED and worker is not None:
            worker.retained_slots.append(slot)
        else:
            self._arena.free(slot)

    # -- the end of workers -------------------------------------------------

    def _end_workers(self) -> None:
        """Asks all workers to end, and kills the workers that do not end."""
        channel, remove = self._channel, self._supervisor.remove
        if self._workers:
            self._unqueue()
        channel.ask_to_end()
        deadline = time.monotonic() + supervisor.GRACE_S
        while self._workers and time.monotonic() < deadline:
            ended = channel.ended(0.1)
            self._drop_results()
            for worker in ended:
                channel.reap(worker)
                remove(worker, WorkerState.EXITED)
        for worker in list(self._workers.values()):
            channel.kill(worker)
        deadline = time.monotonic() + supervisor.GRACE_S
        for worker in list(self._workers.values()):
            left_s = max(0.0, deadline - time.monotonic())
            if channel.end(worker, left_s):
                remove(worker, WorkerState.EXITED)
        self._drop_results()
        for worker in list(self._workers.values()):
            channel.abandon(worker)
            channel.keep_slots_of(worker)
            remove(worker, WorkerState.ABANDONED)
        self._in_flight.clear()
        channel.forget_workers()

    def _drop_results(self) -> None:
        """Discards waiting results, but keeps log records and warnings."""
        is_complete = False
        while not is_complete:
            # Memory that cannot be opened ends `receive`. Each call gets on.
            with contextlib.suppress(LoaderError):
                for result in self._channel.receive():
                    self._drop(result)
                is_complete = True

    def _drop(self, result: ResultMessage) -> None:
        if result.kind in log_forwarding.KINDS:
            self._receiver.put(result.kind, result.body)
        elif result.kind in _ANSWERS:
            _, slot = self._in_flight.complete(result.task_id, result.worker)
            if slot is not None:
                self._free(slot, result)


def _opened(delivery: SlotResult) -> LocalResult:
    """Copies a batch out of its slot.

    The dataset holds on to the slot: its worker may still write there, and die.
    """
    batch: Any = None
    error: Exception | None = None
    try:
        batch = delivery.open()
    except Exception as broken:
        error = broken
    return LocalResult(
        delivery.request_id,
        delivery.worker,
        batch,
        error,
        nbytes=delivery.nbytes,
        timing=delivery.timing,
    )
