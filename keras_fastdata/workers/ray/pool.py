"""A pool of Ray actors that put batches into Ray's object store.

    submit -> in flight -> whichever actor has least to do
    collect <-- ray.wait <-- references to what the actors return

`Actors` makes and reaches the workers; `Supervisor` replaces them. Order,
seeds, retries and limits of time are the same as with processes.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any

from keras_fastdata.errors import LoaderError
from keras_fastdata.memory import shared_state
from keras_fastdata.metrics.pool_stats import PoolStats
from keras_fastdata.metrics.worker_kinds import WorkerKind
from keras_fastdata.workers import exceptions, log_forwarding
from keras_fastdata.workers.base import (
    BatchRequest,
    BatchResult,
    Builds,
    LocalResult,
    describe_batch,
)
from keras_fastdata.workers.in_flight import Task
from keras_fastdata.workers.ray import actor, actors, cluster
from keras_fastdata.workers.ray.actors import (
    Actors,
    AnswerLostError,
    NotYetError,
    RayPlan,
    RayWorker,
    WorkerGoneError,
)
from keras_fastdata.workers.ray.object_store import (
    RemoteDataset,
    StoreResult,
    store_usage,
)
from keras_fastdata.workers.restart_policy import MAX_CRASHES_PER_BATCH
from keras_fastdata.workers.supervisor import SupervisedPool, WorkerState

_IDLE_S = 0.05  # between two looks, where there is nothing to wait for

# Shares of this node's object store: for batches that the consumer keeps (the
# others are copied out of it), and for those and all that are asked for. More,
# and Ray would write some of them to the disk.
_HELD = 0.25
_TAKEN = 0.5


class RayPool(SupervisedPool[RayWorker]):
    """Builds batches in Ray actors; `Channel` documents the arguments."""

    def __init__(
        self,
        plan: RayPlan,
        make_builder: Callable[[], Builds],
        receiver: log_forwarding.Receiver,
    ) -> None:
        self._plan = plan
        self._make_builder = make_builder
        self._arrived: list[Any] = []  # what the last wait has found
        self._largest = 0
        # Pickled first: no cluster is needed to say that it cannot be.
        in_parts = shared_state.pickle_in_parts(make_builder)
        with contextlib.ExitStack() as undo:
            self._session = cluster.join(plan.options)
            undo.callback(self._session.leave)
            self._dataset = RemoteDataset()
            self._dataset.put(*in_parts)
            self._actors = Actors(plan, self._dataset)
            self._store = cluster.store_nbytes()
            self._cores = cluster.cores()
            undo.pop_all()
        super().__init__(plan, self._actors, receiver)
        # Before Ray's own, which was registered before.
        atexit.register(self.close)

    # -- what the engine calls ----------------------------------------------

    def submit(self, request: BatchRequest) -> bool:
        self._check_session()
        if not self._store_has_room():
            return False
        self._in_flight.enter(request)
        self._flush()
        return True

    def wait(self, timeout_s: float) -> None:
        timeout_s = min(timeout_s, self._watchdog.interval_s)
        try:
            self._check_session()
            first = [next(w.awaited, None) for w in [*self._workers.values()]]
            if awaited := [reference for reference in first if reference]:
                self._arrived = actors.wait(awaited, 1, timeout_s)
            else:
                time.sleep(min(timeout_s, _IDLE_S))
        except Exception:
            if not self._is_closed:  # by another thread, meanwhile
                raise

    def collect(self) -> Iterable[BatchResult]:
        self._check_session()
        return super().collect()

    def cancel(self, request_ids: Iterable[int]) -> None:
        super().cancel(request_ids)
        self._in_flight.cancel(set(request_ids))

    def change(self, *, anew: bool = False) -> None:
        self._check_session()
        if anew:
            self._end_workers()
        self._dataset.put(*shared_state.pickle_in_parts(self._make_builder))

    def pool_stats(self) -> PoolStats:
        return PoolStats(
            WorkerKind.RAY,
            self._plan.count,
            {
                index: worker.pid
                for index, worker in list(self._workers.items())
                if worker.pidfd >= 0
            },
            self._policy.losses,
            store_usage.nbytes,
            cores=self._cores,
            starting=self.starting,
        )

    def _end(self) -> None:
        atexit.unregister(self.close)
        with contextlib.ExitStack() as last:
            # Its store would give what views are lent of to somebody else.
            stay = self._session.is_shared and store_usage.leased > 0
            last.callback(self._session.leave, stay=stay)
            last.callback(self._dataset.drop)
            self._end_workers()

    def _check_session(self) -> None:
        """Raises a `LoaderError` if the user has shut Ray down."""
        if not self._session.is_on:
            raise LoaderError(
                f"Ray was shut down (`ray.shutdown`) while "
                f"{self._plan.dataset} had its workers there. Close the "
                "dataset before."
            )

    # -- giving out requests -------------------------------------------------

    def _store_has_room(self) -> bool:
        """Returns whether the object store has room for another batch.

        One batch is always allowed. Before any has come, so are as many as
        there are workers.
        """
        out = len(self._in_flight)
        if not out:
            return True
        if not self._largest:
            return out < self._plan.count
        taken = (out + 1) * self._largest + store_usage.nbytes
        return taken <= (self._store - self._dataset.nbytes) * _TAKEN

    def _flush(self) -> None:
        if not self._is_paused:
            self._in_flight.send(self._actors.assign)
            if self._actors.start_backups():
                self._flush()

    # -- receiving ----------------------------------------------------------

    def _receive(self, is_due: bool) -> list[BatchResult]:
        done: list[BatchResult] = []
        ready = self._ready()
        for worker in list(self._workers.values()):
            while worker.start is not None and worker.start in ready:
                ready.discard(worker.start)
                done += self._welcome(worker)
            while worker.assigned and worker.assigned[0].reference in ready:
                received = self._receive_from(worker)
                if received is None:
                    break
                done += received
        if is_due:
            self._actors.check_places(time.monotonic())
        return done

    def _ready(self) -> set[Any]:
        """Returns the references whose answers are ready to be fetched."""
        arrived, self._arrived = self._arrived, []
        if arrived:
            return set(arrived)
        awaited = [r for w in self._workers.values() for r in w.awaited]
        return set(actors.wait(awaited, len(awaited), 0)) if awaited else set()

    def _welcome(self, worker: RayWorker) -> list[BatchResult]:
        """Handles an answer from an actor that is still starting."""
        try:
            answer = self._actors.get(worker.start)
        except WorkerGoneError as gone:
            self._actors.check_start(worker, gone)
            return self._on_exit(worker, str(gone), gone.is_missing)
        except AnswerLostError:
            return self._on_exit(worker, "Its answer was lost", True)
        except NotYetError:
            return []
        if isinstance(answer, actor.WorkerLocation):
            self._actors.load(worker, answer)
            return []
        self._listen(answer)
        worker.loaded()
        return []

    def _receive_from(self, worker: RayWorker) -> list[BatchResult] | None:
        """Handles an actor's oldest answer, or returns `None` if not ready."""
        try:
            answer, arrays = self._actors.get(worker.assigned[0].reference)
        except NotYetError:
            return None
        except AnswerLostError:
            # The batch is lost, and not the worker, as far as is known.
            return self._build_again(worker.take_answered(), worker)
        except WorkerGoneError as gone:
            return self._on_exit(worker, str(gone), gone.is_missing)
        task_id = worker.take_answered(answer.build_s).task_id
        task, _ = self._in_flight.complete(task_id, worker.index)
        self._listen(answer)
        self._watchdog.learn(answer.build_s)
        self._largest = max(self._largest, sum(answer.sizes))
        if task is None:
            return []
        request = task.request
        if answer.failure is not None:
            error = exceptions.load_exception(answer.failure)
            request_id = request.request_id
            return [LocalResult.failed(request_id, worker.index, error)]
        return [
            StoreResult(
                request.request_id,
                worker.index,
                worker.timing_here(answer, task.crashes),
                describe_batch(
                    self._plan.dataset, request, worker.name, "loading"
                ),
                answer,
                arrays,
                int(self._store * _HELD),
            )
        ]

    def _build_again(self, task: Task, worker: RayWorker) -> list[BatchResult]:
        """Requeues a batch that Ray lost, or fails it after repeated losses."""
        wanted, _ = self._in_flight.complete(task.task_id, worker.index)
        if wanted is None:
            return []
        times = task.crashes + 1
        if times <= MAX_CRASHES_PER_BATCH:
            again = dataclasses.replace(task, crashes=times)
            self._in_flight.send_first(again)
            return []
        error = LoaderError(
            f"Batch {task.request.index} of epoch {task.request.epoch} of "
            f"{self._plan.dataset} was built {times} times, and each "
            "time lost in Ray's object store before it could be fetched from "
            "there. Look at the network between the nodes."
        )
        return [LocalResult(task.request.request_id, worker.index, error=error)]

    def _listen(self, answer: actor.Answer) -> None:
        """Forwards an actor's log messages; raises if its start failed."""
        for kind, body in answer.forwarded:
            self._receiver.put(kind, body)
        if answer.by_start and answer.failure is not None:
            self._fail_start(exceptions.load_exception(answer.failure))

    # -- the end of workers -------------------------------------------------

    def _on_exit(
        self, worker: RayWorker, how: str, is_missing: bool
    ) -> list[BatchResult]:
        end = self._actors.reap(worker, how, is_missing=is_missing)
        return self._supervisor.on_exit(worker, end)

    def _end_workers(self) -> None:
        """Runs `on_worker_stop` in the workers, and then kills the workers."""
        workers = list(self._workers.values())
        self._workers.clear()
        self._arrived = []
        try:
            if self._session.is_on:
                with contextlib.suppress(Exception):
                    # Ray may be at its end, in whatever way.
                    for answer in self._actors.stop(workers):
                        self._listen(answer)
                for worker in workers:
                    self._actors.kill(worker)
            actors.await_ends(workers)
        finally:
            self._in_flight.clear()
            for worker in workers:
                worker.close_pidfd()
                worker.move(WorkerState.EXITED)
