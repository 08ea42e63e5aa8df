"""Workers that are Ray actors, and the training process's side of them.

    submit -> queue -> whichever actor has least to do
    collect <-- ray.wait <-- references to what the actors return

Ray starts the processes, on whatever node, and moves the batches: each lies in
the object store of the node that built it, is fetched to this one ahead of its
turn, and is read from there without a copy. Order, seeds, retries, limits of
time and the books of who builds what are the same as everywhere; Ray is told
to restart and to retry nothing.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import functools
import logging
import math
import os
import select
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from keras_fastdata.errors import LoaderError
from keras_fastdata.memory import codec, shared_state
from keras_fastdata.memory.arena import Bytes, aligned_copy
from keras_fastdata.metrics.pool_stats import PoolStats
from keras_fastdata.metrics.timing import Timing
from keras_fastdata.workers import exceptions, exit_messages, log_forwarding
from keras_fastdata.workers.base import (
    BatchRequest,
    BatchResult,
    Builds,
    LocalResult,
    describe_batch,
)
from keras_fastdata.workers.process import launchers
from keras_fastdata.workers.ray import actor, cluster
from keras_fastdata.workers.ray.object_store import RemoteDataset, store_usage
from keras_fastdata.workers.ray.options import Options
from keras_fastdata.workers.restart_policy import (
    MAX_CRASHES_PER_BATCH,
    RestartPolicy,
    record_crash,
)
from keras_fastdata.workers.signals import DeferredSignals
from keras_fastdata.workers.watchdog import (
    Activity,
    Expired,
    Watchdog,
    building,
    loading,
)

_GRACE_S = 2.0  # for a worker to end by itself when asked to
_GET_S = 5.0  # for an answer that is here
_STACK_S = 2.0  # for one that is stuck to say where
_IDLE_S = 0.05  # between two looks, where there is nothing to wait for
_NODE_LOSS_S = 60.0  # in which the workers of a node are lost with it

# A worker whose builds take less than this has its next request before it has
# answered: asking takes a millisecond or two.
_QUICK_S = 0.1

# Shares of this node's object store: for batches that the consumer keeps (the
# others are copied out of it), and for those and all that are asked for. More,
# and Ray would write some of them to the disk.
_HELD = 0.25
_TAKEN = 0.5

_log = logging.getLogger("keras_fastdata")


@dataclasses.dataclass(frozen=True)
class RayPlan:
    """How the actors of one loader are to be run.

    Attributes:
        dataset: The dataset's class name, for messages.
        count: Number of workers, at least 1.
        lookahead: Batches that may wait to be delivered.
        max_restarts: Worker deaths survived in one epoch.
        batch_timeout: Seconds that one batch may take, or `None`.
        worker_env: Environment variables over the clean defaults.
        options: What the user says of Ray.
    """

    dataset: str
    count: int
    lookahead: int
    max_restarts: int
    batch_timeout: float | None
    worker_env: dict[str, str] | None
    options: Options


@dataclasses.dataclass(eq=False)
class RemoteTask:
    """A request on its way.

    Attributes:
        request: The engine's order.
        crashes: Workers that have died over it.
        reference: To the answer, once it is with a worker.
        is_wanted: Whether it has not been cancelled.
    """

    request: BatchRequest
    crashes: int = 0
    reference: Any = None
    is_wanted: bool = True


@dataclasses.dataclass(eq=False)
class _RayWorker:
    """An actor.

    Attributes:
        index: From 0, below the number of workers.
        handle: Ray's.
        started: When it was asked for, by `time.monotonic`.
        start: What is to be answered before it is ready: where it is, then
            whether it has loaded the dataset; `None` when it is.
        version: Of the dataset's state that it has.
        location: Where it is, once it has told.
        pidfd: Its process, if it is on this machine; else -1.
        assigned: The requests that it was given, oldest first.
        began: Since when it has been at the oldest.
        build_s: How long its last batch took; infinite before that.
        behind_s: How far its machine's clock is behind this one's, at most.
        expired: Why it was killed, if it was.
        killed: When, by `time.monotonic`.
    """

    index: int
    handle: Any
    started: float
    start: Any
    version: int
    location: actor.WorkerLocation | None = None
    pidfd: int = -1
    assigned: collections.deque[RemoteTask] = dataclasses.field(
        default_factory=collections.deque
    )
    began: float = 0.0
    build_s: float = math.inf
    behind_s: float = math.inf
    expired: Expired | None = None
    killed: float = 0.0

    @property
    def is_ready(self) -> bool:
        return self.start is None

    @property
    def capacity(self) -> int:
        """How many requests it may have."""
        alone = any(task.crashes for task in self.assigned)
        return 2 if self.build_s < _QUICK_S and not alone else 1

    @property
    def name(self) -> str:
        if self.location is None:
            return f"Ray worker {self.index}"
        pid, _, host, _ = self.location
        return f"Ray worker {self.index} (pid {pid} on {host})"

    @property
    def awaited(self) -> Iterator[Any]:
        """The references that it is to answer, in this order."""
        if self.start is not None:
            yield self.start
        for task in self.assigned:
            yield task.reference


class _NodeLoss(NamedTuple):
    """The end of a node: when, and which workers were lost with it."""

    at_s: float
    lost: set[int]


class StoreResult:
    """A batch in the object store, waiting to be opened."""

    by_dataset = is_lost = False

    def __init__(
        self,
        dataset: str,
        task: RemoteTask,
        worker: _RayWorker,
        answer: actor.Answer,
        arrays: list[Bytes],
        limit: int,
    ) -> None:
        self.request_id = task.request.request_id
        self.worker = worker.index
        self.nbytes = sum(answer.sizes)
        self.timing = _here(answer, worker, task.crashes)
        self._where = describe_batch(
            dataset, task.request, worker.name, "loading"
        )
        self._structure, self._sizes = answer.structure, answer.sizes
        self._arrays = arrays
        self._limit = limit
        store_usage.wait(self.nbytes)

    def open(self) -> Any:
        nbytes = self.nbytes
        arrays = iter(self._take())
        buffers = [
            next(arrays) if size else np.empty(0, np.uint8)
            for size in self._sizes
        ]
        large = [
            n for n, b in enumerate(buffers) if b.nbytes >= codec.SMALL_BYTES
        ]
        leases = large and store_usage.leased < self._limit
        if leases:
            roots = store_usage.lease([buffers[n] for n in large], nbytes)
            for number, root in zip(large, roots, strict=True):
                buffers[number] = root
        for number, buffer in enumerate(buffers):
            if not leases or buffer.nbytes < codec.SMALL_BYTES:
                buffers[number] = aligned_copy(buffer)
        try:
            return codec.assemble(self._structure, buffers)
        except Exception as error:
            exceptions.note(error, self._where)
            raise

    def discard(self) -> None:
        self._take()

    def _take(self) -> list[Bytes]:
        arrays, self._arrays = self._arrays, []
        store_usage.wait(-self.nbytes)
        self.nbytes = 0
        return arrays


class RayPool:
    """Builds in Ray actors.

    Args:
        plan: How many, made how.
        make_builder: Makes a worker's builder. It is pickled at once, and
            again at each `change`, with the dataset it refers to.
        receiver: Hands on what they log, and warn of.

    Raises:
        LoaderError: Ray is not installed, or the cluster not to be reached.
        Exception: Whatever pickling the dataset raises.
    """

    def __init__(
        self,
        plan: RayPlan,
        make_builder: Callable[[], Builds],
        receiver: log_forwarding.Receiver,
    ) -> None:
        self._plan = plan
        self._make_builder = make_builder
        self._watchdog = Watchdog(
            plan.batch_timeout,
            "`batch_timeout` replaces a worker that is stuck.",
        )
        self._queued: collections.deque[RemoteTask] = collections.deque()
        self._workers: dict[int, _RayWorker] = {}
        self._restart_policy = RestartPolicy(plan.count, plan.max_restarts)
        self._node_losses: dict[str, _NodeLoss] = {}  # by node
        self._receiver = receiver
        self._arrived: list[Any] = []  # what the last wait has found
        self._largest = 0
        self._paused = self._closed = False
        # Pickled first: no cluster is needed to say that it cannot be.
        in_parts = shared_state.pickle_in_parts(make_builder)
        with contextlib.ExitStack() as undo:
            self._session = cluster.join(plan.options)
            undo.callback(self._session.leave)
            self._dataset = RemoteDataset()
            self._dataset.put(*in_parts)
            self._make_actor = _actor_maker(plan)
            self._store = cluster.store_nbytes()
            self._cores = cluster.cores()
            undo.pop_all()
        # Before Ray's own, which was registered before.
        atexit.register(self.close)

    # -- what the engine calls ----------------------------------------------

    def submit(self, request: BatchRequest) -> bool:
        self._check_session()
        if not self._store_has_room():
            return False
        self._queued.append(RemoteTask(request))
        self._hand_out()
        return True

    def wait(self, timeout_s: float) -> None:
        timeout_s = min(timeout_s, self._watchdog.interval_s)
        try:
            self._check_session()
            first = [
                next(w.awaited, None) for w in list(self._workers.values())
            ]
            if awaited := [reference for reference in first if reference]:
                self._arrived = _wait(awaited, 1, timeout_s)
            else:
                time.sleep(min(timeout_s, _IDLE_S))
        except Exception:
            if not self._closed:  # by another thread, meanwhile
                raise

    def collect(self) -> Iterable[BatchResult]:
        self._check_session()
        self._start_missing()
        done: list[BatchResult] = []
        ready = self._ready()
        for worker in list(self._workers.values()):
            while worker.start is not None and worker.start in ready:
                ready.discard(worker.start)
                done += self._welcome(worker)
            while worker.assigned and worker.assigned[0].reference in ready:
                received = self._receive(worker)
                if received is None:
                    break
                done += received
        if self._watchdog.is_due():
            done += self._look_at_workers()
        self._start_missing()
        if self._restart_policy.is_over:
            done += self._fail_all()
        self._hand_out()
        self._receiver.hand_on()
        return done

    def cancel(self, request_ids: Iterable[int]) -> None:
        gone = set(request_ids)
        kept = [s for s in self._queued if s.request.request_id not in gone]
        self._queued = collections.deque(kept)
        for worker in self._workers.values():
            for task in worker.assigned:
                if task.request.request_id in gone:
                    task.is_wanted = False

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._hand_out()

    @property
    def busy(self) -> bool:
        return any(worker.assigned for worker in self._workers.values())

    def change(self) -> None:
        self._check_session()
        self._dataset.put(*shared_state.pickle_in_parts(self._make_builder))

    def expect(self, ahead: int) -> None:
        """Nothing to do: the store keeps no memory ready."""

    def begin_epoch(self) -> None:
        self._restart_policy.begin_epoch()

    def pool_stats(self) -> PoolStats:
        return PoolStats(
            "ray",
            self._plan.count,
            {
                index: worker.location.pid
                for index, worker in list(self._workers.items())
                if worker.location is not None and worker.pidfd >= 0
            },
            self._restart_policy.losses,
            store_usage.nbytes,
            cores=self._cores,
        )

    def close(self) -> None:
        if self._closed:
            return
        with DeferredSignals(), contextlib.ExitStack() as last:
            self._closed = True
            atexit.unregister(self.close)
            # Its store would give what views are lent of to somebody else.
            stay = self._session.is_shared and store_usage.leased > 0
            last.callback(self._session.leave, stay=stay)
            last.callback(self._dataset.drop)
            self._end_workers()
        self._receiver.hand_on()

    def _check_session(self) -> None:
        """Asks Ray, which joins by itself whatever it finds when used."""
        if not self._session.is_on:
            raise LoaderError(
                f"Ray was shut down (`ray.shutdown`) while "
                f"{self._plan.dataset} had its workers there. Close the "
                "dataset before."
            )

    # -- giving out requests -------------------------------------------------

    def _store_has_room(self) -> bool:
        """Whether the object store has room for another batch.

        One batch is always allowed. Before any has come, so are as many as
        there are workers.
        """
        out = len(self._queued) + sum(
            len(worker.assigned) for worker in self._workers.values()
        )
        if not out:
            return True
        if not self._largest:
            return out < self._plan.count
        taken = (out + 1) * self._largest + store_usage.nbytes
        return taken <= (self._store - self._dataset.nbytes) * _TAKEN

    def _hand_out(self) -> None:
        """Gives requests to the workers that have the least to do."""
        while self._queued and not self._paused:
            # A batch that has cost a worker is built alone, so that it is
            # known whether it was that one.
            alone = self._queued[0].crashes > 0
            free = [
                worker
                for worker in self._workers.values()
                if worker.is_ready
                and not worker.killed
                and len(worker.assigned) < worker.capacity
                and not (alone and worker.assigned)
            ]
            if not free:
                return
            self._assign(min(free, key=lambda w: len(w.assigned)))
        self._start_backups()

    def _start_backups(self) -> None:
        """Has idle workers build what waits behind a batch that is slow.

        It cannot be taken back: it is built twice, and delivered once.
        """
        if self._queued or self._paused:
            return
        workers = self._workers.values()
        idle = sum(
            w.is_ready and not w.assigned and not w.killed for w in workers
        )
        since = time.monotonic() - _QUICK_S
        for worker in workers:
            if not idle:
                return
            if len(worker.assigned) < 2 or worker.began > since:
                continue
            last = worker.assigned[-1]
            if last.is_wanted:
                last.is_wanted = False
                self._queued.append(RemoteTask(last.request, last.crashes))
                idle -= 1
        if self._queued:
            self._hand_out()

    def _assign(self, worker: _RayWorker) -> None:
        task = self._queued[0]
        state = None
        if worker.version < self._dataset.state.version:
            state = self._dataset.state
        task.reference = worker.handle.build.remote(task.request, state)
        self._queued.popleft()
        worker.version = self._dataset.state.version
        if not worker.assigned:
            worker.began = time.monotonic()
        worker.assigned.append(task)

    # -- receiving ----------------------------------------------------------

    def _ready(self) -> set[Any]:
        """The references of which the answer is here."""
        arrived, self._arrived = self._arrived, []
        if arrived:
            return set(arrived)
        awaited = [r for w in self._workers.values() for r in w.awaited]
        return set(_wait(awaited, len(awaited), 0)) if awaited else set()

    def _welcome(self, worker: _RayWorker) -> list[BatchResult]:
        """Takes in what a worker says that is not ready yet."""
        try:
            answer = self._get(worker.start)
        except _Gone as gone:
            if self._was_never_there(worker, gone):
                raise LoaderError(self._cannot_begin(worker, gone)) from gone
            return self._on_exit(worker, str(gone), missing=gone.is_missing)
        except _Lost:
            return self._on_exit(worker, "Its answer was lost", missing=True)
        except _NotYet:
            return []
        if isinstance(answer, actor.WorkerLocation):
            worker.location = answer
            worker.pidfd = _pidfd(answer)
            start = self._start_of(worker.index)
            worker.version = start.state.version
            worker.started = time.monotonic()
            worker.start = worker.handle.load.remote(start)
            return []
        self._listen(answer)
        worker.start = None
        return []

    def _ask_again(
        self, task: RemoteTask, worker: _RayWorker
    ) -> list[BatchResult]:
        """Has a batch built again that got lost on its way."""
        task.crashes += 1
        if not task.is_wanted:
            return []
        if task.crashes <= MAX_CRASHES_PER_BATCH:
            self._queued.appendleft(task)
            return []
        error = LoaderError(
            f"Batch {task.request.index} of epoch {task.request.epoch} of "
            f"{self._plan.dataset} was built {task.crashes} times, and each "
            "time lost in Ray's object store before it could be fetched from "
            "there. Look at the network between the nodes."
        )
        return [LocalResult(task.request.request_id, worker.index, error=error)]

    def _receive(self, worker: _RayWorker) -> list[BatchResult] | None:
        """Takes in the answer to a worker's oldest request; `None`: not yet."""
        task = worker.assigned[0]
        try:
            answer, arrays = self._get(task.reference)
        except _NotYet:
            return None
        except _Lost:
            # The batch is lost, and not the worker, as far as is known.
            worker.assigned.popleft()
            worker.began = time.monotonic()
            return self._ask_again(task, worker)
        except _Gone as gone:
            return self._on_exit(worker, str(gone), missing=gone.is_missing)
        worker.assigned.popleft()
        worker.began = time.monotonic()
        worker.build_s = answer.build_s
        self._listen(answer)
        self._watchdog.learn(answer.build_s)
        self._largest = max(self._largest, sum(answer.sizes))
        if not task.is_wanted:
            return []
        if answer.failure is not None:
            error = exceptions.load_exception(answer.failure)
            usual = isinstance(error, Exception)
            request_id = task.request.request_id
            return [
                LocalResult(
                    request_id, worker.index, error=error, by_dataset=usual
                )
            ]
        return [
            StoreResult(
                self._plan.dataset,
                task,
                worker,
                answer,
                arrays,
                int(self._store * _HELD),
            )
        ]

    def _get(self, reference: Any) -> Any:
        """What a worker has answered.

        Raises:
            _NotYet: It is not here after all.
            _Gone: The worker has died, or cannot be reached.
            _Lost: The answer has died with its node.
            LoaderError: Ray cannot go on.
        """
        import ray
        from ray import exceptions

        try:
            return ray.get(reference, timeout=_GET_S)
        except exceptions.GetTimeoutError as error:
            raise _NotYet from error
        except (
            exceptions.RayActorError,
            exceptions.WorkerCrashedError,
            exceptions.NodeDiedError,
            exceptions.OutOfMemoryError,
            exceptions.RuntimeEnvSetupError,
            exceptions.ActorUnschedulableError,
        ) as error:
            missing = isinstance(error, exceptions.ActorUnavailableError)
            raise _Gone(error, is_missing=missing) from error
        except exceptions.ObjectLostError as error:
            raise _Lost from error
        except exceptions.RayError as error:
            raise LoaderError(
                f"Ray could not deliver a batch of {self._plan.dataset}: "
                f"{error}"
            ) from error

    def _listen(self, answer: actor.Answer) -> None:
        """Hears what an answer is about besides a request.

        Raises:
            BaseException: What has left the worker without a dataset.
        """
        for kind, body in answer.forwarded:
            self._receiver.put(kind, body)
        if answer.by_start and answer.failure is not None:
            raise exceptions.load_exception(answer.failure)

    # -- making workers -----------------------------------------------------

    def _start_missing(self) -> None:
        """Asks for the workers that are missing, as far as allowed."""
        for index in range(self._plan.count):
            if index not in self._workers and self._restart_policy.replaces(
                index
            ):
                with DeferredSignals():
                    handle = self._make_actor()
                    self._workers[index] = _RayWorker(
                        index,
                        handle,
                        time.monotonic(),
                        handle.location.remote(),
                        self._dataset.state.version,
                    )

    def _start_of(self, index: int) -> actor.ActorStart:
        cwd = None
        with contextlib.suppress(OSError):  # it has been deleted
            cwd = os.getcwd()
        # What the user has brought to the nodes goes before what is here.
        leads = not set(self._plan.options.runtime_env) - {"env_vars"}
        return actor.ActorStart(
            index,
            self._plan.dataset,
            self._dataset.state,
            cwd if leads else None,
            list(sys.path),
            leads,
            list(getattr(sys, "argv", [])),
            log_forwarding.LoggingConfig.of_this_process(),
        )

    def _was_never_there(self, worker: _RayWorker, gone: _Gone) -> bool:
        """Whether a worker could not be made, rather than died."""
        return (
            worker.location is None and not worker.killed and gone.is_at_start
        )

    def _cannot_begin(self, worker: _RayWorker, gone: _Gone) -> str:
        return (
            f"{worker.name} of {self._plan.dataset} could not be made: {gone}\n"
            "The nodes need the same Python, keras_fastdata, and what the "
            "dataset imports. `ray_options={'runtime_env': {'pip': [...], "
            "'working_dir': '.'}}` brings them there."
        )

    # -- workers that are stuck ---------------------------------------------

    def _look_at_workers(self) -> list[BatchResult]:
        """Kills workers whose time is up; leaves behind what survives that."""
        now = time.monotonic()
        self._look_for_a_place(now)
        for expired in self._watchdog.look(list(self._activities(now))):
            worker = self._workers[expired.activity.worker]
            worker.expired, worker.killed = expired, now
            _kill(worker.handle)
        done: list[BatchResult] = []
        for worker in list(self._workers.values()):
            if worker.killed and now - worker.killed > _GRACE_S:
                done += self._on_exit(
                    worker, "It was killed, and does not answer"
                )
        return done

    def _activities(self, now: float) -> Iterator[Activity]:
        """What each worker is busy with."""
        name = self._plan.dataset
        built = self._answered()
        for index, worker in self._workers.items():
            if worker.killed or worker.location is None or index in built:
                continue
            ask = functools.partial(_stack_of, worker.handle)
            if not worker.is_ready:
                what = loading(name, worker.name)
                since = worker.started
                yield Activity(
                    index, what, None, now - since, ask, starting=True
                )
            elif worker.assigned:
                request = worker.assigned[0].request
                what = building(name, request, worker.name)
                yield Activity(index, what, request, now - worker.began, ask)

    def _answered(self) -> set[int]:
        """Workers whose oldest answer is on some node, if not yet on this."""
        first = {
            reference: index
            for index, worker in self._workers.items()
            if (reference := next(worker.awaited, None))
        }
        if not first:
            return set()
        there = _wait([*first], len(first), 0, fetch=False)
        return {first[reference] for reference in there}

    def _look_for_a_place(self, now: float) -> None:
        """Raises when the cluster has had no place for any worker in time."""
        limit_s = self._plan.options.timeout_s
        if not self._workers or any(
            worker.location is not None or now - worker.started <= limit_s
            for worker in self._workers.values()
        ):
            return
        if _wait([worker.start for worker in self._workers.values()], 1, 0):
            return  # nobody has looked for long
        import ray

        raise LoaderError(
            f"None of the {self._plan.count} Ray workers of "
            f"{self._plan.dataset} had a place in the cluster within "
            f"{limit_s:g} s (`ray_options['timeout_s']`). They ask for "
            f"{self._plan.options.actor or 'nothing in particular'}. The "
            f"cluster has {_resources(ray.cluster_resources())}; free are "
            f"{_resources(ray.available_resources())}."
        )

    # -- the end of workers -------------------------------------------------

    def _on_exit(
        self, worker: _RayWorker, how: str, *, missing: bool = False
    ) -> list[BatchResult]:
        """Accounts for a worker that ended without being asked to.

        What it held is built again, by its replacement or another worker,
        unless it may not be: then those requests end in an error.

        Args:
            worker: The one.
            how: What is known of its end.
            missing: Whether it cannot be reached, and may have lost its node.
        """
        self._dismiss(worker)
        location = worker.location
        # A batch is not to blame for the end of a node.
        is_node_lost = location is not None and not cluster.is_alive(
            location.node
        )
        if is_node_lost:
            how = f"Its node has left the cluster. {how}"
        pid = location.pid if location else 0
        own = not self._is_of_a_lost_node(worker, is_node_lost or missing)
        self._restart_policy.record(worker.index, pid, counts=own)
        held = [task for task in worker.assigned if task.is_wanted]
        if not is_node_lost:
            # The oldest, or the next, if an answer was lost with the worker.
            for task in held:
                record_crash(task)
        suspect = next(iter(held), None)
        self._queued.extendleft(reversed(held[1:]))
        worker.assigned.clear()
        error = self._restart_policy.judge(
            exit_messages.WorkerExit(
                dataset=self._plan.dataset,
                worker=worker.index,
                pid=pid,
                exit_code=None,
                expired=worker.expired,
                starting=not worker.is_ready,
                how=how,
            ),
            suspect,
        )
        if suspect is None:
            return []
        if error is None:
            self._queued.appendleft(suspect)
            return []
        return [
            LocalResult(suspect.request.request_id, worker.index, error=error)
        ]

    def _is_of_a_lost_node(
        self, worker: _RayWorker, is_node_lost: bool
    ) -> bool:
        """Whether its end is one with that of another worker there.

        The end of a node is one death, however many workers it had; but each
        of them is lost to it only once.
        """
        if worker.location is not None and not is_node_lost:
            return False
        node = worker.location.node if worker.location else ""  # one of them
        now = time.monotonic()
        fall = self._node_losses.get(node)
        if fall is None or now - fall.at_s >= _NODE_LOSS_S:
            self._node_losses[node] = _NodeLoss(now, {worker.index})
            return False
        if worker.index in fall.lost:
            return False
        fall.lost.add(worker.index)
        return True

    def _fail_all(self) -> Iterator[BatchResult]:
        """Ends all there is: no worker is left, and none may be started."""
        worker_exit = self._restart_policy.end()
        requests = [task.request for task in self._queued]
        self._queued.clear()
        for request in requests:
            yield LocalResult(
                request.request_id,
                worker_exit.worker,
                error=worker_exit.error(),
            )

    def _dismiss(self, worker: _RayWorker) -> None:
        """Forgets a worker, and makes sure that it has ended."""
        del self._workers[worker.index]
        _kill(worker.handle)
        if worker.pidfd >= 0:
            os.close(worker.pidfd)
            worker.pidfd = -1

    def _end_workers(self) -> None:
        """Asks the workers to end, and kills those that do not."""
        workers, self._workers = self._workers, {}
        self._queued.clear()
        self._arrived = []
        try:
            if self._session.is_on:
                with contextlib.suppress(Exception):
                    # Ray may be at its end, in whatever way.
                    self._stop(list(workers.values()))
                for worker in workers.values():
                    _kill(worker.handle)
            _await_ends([w.pidfd for w in workers.values() if w.pidfd >= 0])
        finally:
            for worker in workers.values():
                if worker.pidfd >= 0:
                    os.close(worker.pidfd)

    def _stop(self, workers: list[_RayWorker]) -> None:
        """Runs `on_worker_stop` where there is somebody to run it."""
        stopping = [
            worker.handle.stop.remote()
            for worker in workers
            if worker.location is not None and not worker.killed
        ]
        if not stopping:
            return
        for reference in _wait(stopping, len(stopping), _GRACE_S):
            with contextlib.suppress(_Gone, _Lost, _NotYet, LoaderError):
                self._listen(self._get(reference))


class _Gone(Exception):
    """A worker has died, or cannot be reached.

    Attributes:
        is_at_start: Whether it could not even be made.
        is_missing: Whether it is not known to have died.
    """

    def __init__(self, error: Exception, *, is_missing: bool) -> None:
        super().__init__(_text_of(error))
        self.is_at_start = getattr(error, "actor_init_failed", True)
        self.is_missing = is_missing


class _NotYet(Exception):
    """An answer is on its way, again."""


class _Lost(Exception):
    """A batch is no longer anywhere."""


def _text_of(error: Exception) -> str:
    """What Ray says of a death, without what we know ourselves."""
    ours = ("class_name:", "actor_id:", "pid:", "namespace:", "ip:")
    lines = (line.strip() for line in str(error).splitlines())
    return " ".join(
        line for line in lines if line and not line.startswith(ours)
    )


def _actor_maker(plan: RayPlan) -> Callable[[], Any]:
    """What asks for one more actor."""
    import ray

    options = dict(plan.options.actor)
    runtime_env = dict(options.pop("runtime_env", None) or {})
    clean = launchers.CLEAN_ENVIRONMENT
    if options.get("num_gpus"):
        seen = launchers.NO_ACCELERATOR
        clean = {name: clean[name] for name in clean if name not in seen}
    runtime_env["env_vars"] = {
        **clean,
        **launchers.hash_seed(),
        **runtime_env.get("env_vars", {}),
        **(plan.worker_env or {}),
    }
    # A second thread says where the first one is stuck.
    remote: Any = ray.remote(concurrency_groups={"ask": 1})(actor.Actor)
    made = remote.options(
        **{"scheduling_strategy": "SPREAD", **options},
        runtime_env=runtime_env,
        max_restarts=0,
        max_task_retries=0,
    )
    maker: Callable[[], Any] = made.remote
    return maker


def _wait(
    references: list[Any], count: int, timeout_s: float, *, fetch: bool = True
) -> list[Any]:
    """Those that are here, after waiting for so many of them to come.

    Without `fetch`, those that are anywhere.
    """
    import ray

    try:
        ready, _ = ray.wait(
            references,
            num_returns=count,
            timeout=timeout_s,
            fetch_local=fetch,
        )
    except SystemError as error:
        # What a signal's handler raises meanwhile comes out as its cause.
        if error.__cause__ is not None:
            raise error.__cause__ from None
        raise
    return list(ready)


def _stack_of(handle: Any) -> str:
    """Where a worker is stuck; takes up to `_STACK_S`."""
    import ray
    from ray import exceptions

    try:
        asked = handle.stack.options(concurrency_group="ask").remote()
        return str(ray.get(asked, timeout=_STACK_S))
    except exceptions.RayError:
        return "It does not answer, so its stack cannot be had."


def _kill(handle: Any) -> None:
    import ray

    with contextlib.suppress(Exception):
        # Ray may be at its end, in whatever way.
        ray.kill(handle, no_restart=True)


def _pidfd(location: actor.WorkerLocation) -> int:
    """The process, if it is one of this machine's; else -1."""
    if location.machine != cluster.machine():
        return -1
    try:
        return os.pidfd_open(location.pid)
    except OSError:
        return -1


def _await_ends(pidfds: list[int]) -> None:
    """Waits for processes to end, for a while."""
    deadline = time.monotonic() + _GRACE_S
    for pidfd in pidfds:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll(max(0.0, deadline - time.monotonic()) * 1000)


def _here(
    answer: actor.Answer, worker: _RayWorker, crashes: int
) -> Timing | None:
    """When a batch was built, by this machine's clock."""
    timing = answer.timing
    if timing is None:
        return None
    if crashes:
        timing = timing._replace(retries=crashes)
    location = worker.location
    if location is None or location.machine == cluster.machine():
        return timing
    # Clocks of two machines have nothing in common: at best it came at once.
    worker.behind_s = min(worker.behind_s, time.monotonic() - answer.at_s)
    behind_s = worker.behind_s
    return timing._replace(
        began_s=timing.began_s + behind_s,
        built_s=timing.built_s + behind_s,
        stored_s=timing.stored_s + behind_s,
    )


def _resources(found: dict[str, float]) -> str:
    plain = {n: v for n, v in found.items() if not n.startswith("node:")}
    return ", ".join(f"{value:g} {name}" for name, value in plain.items())
