"""Creates the Ray actors of one pool, and calls them.

Ray starts the processes, on any node, and moves the batches. A batch lies in
the object store of the node that built it. Ray copies it to this node's store
ahead of its turn, and it is read there without a copy. Ray restarts and retries
nothing.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from keras_fastdata._modules import current_folder, import_folders
from keras_fastdata.errors import LoaderError
from keras_fastdata.metrics.timing import Timing
from keras_fastdata.workers import (
    environment,
    log_forwarding,
    supervisor,
)
from keras_fastdata.workers.base import PoolPlan
from keras_fastdata.workers.in_flight import InFlight, Task, TaskState
from keras_fastdata.workers.process import sockets
from keras_fastdata.workers.ray import actor, cluster
from keras_fastdata.workers.ray.object_store import RemoteDataset
from keras_fastdata.workers.ray.options import Options
from keras_fastdata.workers.supervisor import Worker, WorkerEnd, WorkerState
from keras_fastdata.workers.watchdog import Activity, building, loading

_GET_S = 5.0  # for an answer that is here
_STACK_S = 2.0  # for one that is stuck to say where
_NODE_LOSS_S = 60.0  # in which the workers of a node are lost with it

# A worker whose builds take less than this has its next request before it has
# answered: asking takes a millisecond or two.
_QUICK_S = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class RayPlan(PoolPlan):
    """The settings of a pool of Ray actors."""

    options: Options  # what the user says of Ray


class Assignment(NamedTuple):
    """A task that was sent to an actor, and the reference to its answer."""

    task: Task
    reference: Any


@dataclasses.dataclass(eq=False, kw_only=True)
class RayWorker(Worker):
    """The training process's record of one Ray actor."""

    handle: Any  # Ray's
    # Reference to the next answer before it is ready: first its location, then
    # that the dataset is loaded; `None` afterwards.
    start: Any
    version: int  # of the dataset's state that it has
    # Where it is; `None` until it has answered that.
    location: actor.WorkerLocation | None = None
    pidfd: int = -1  # its process, if it is on this machine; else -1
    # The tasks that it was given, oldest first.
    assigned: collections.deque[Assignment] = dataclasses.field(
        default_factory=collections.deque
    )
    began_s: float = 0.0  # when it began with the oldest task
    # Seconds that its last batch took; infinite before that.
    build_s: float = math.inf
    # How far its machine's clock is behind this one's, at most.
    behind_s: float = math.inf

    @property
    def name(self) -> str:
        if self.location is None:
            return f"Ray worker {self.index}"
        pid, _, host, _ = self.location
        return f"Ray worker {self.index} (pid {pid} on {host})"

    @property
    def pid(self) -> int:
        return self.location.pid if self.location else 0

    @property
    def capacity(self) -> int:
        """The maximum number of tasks that the actor has at once."""
        alone = any(task.crashes for task, _ in self.assigned)
        return 2 if self.build_s < _QUICK_S and not alone else 1

    @property
    def awaited(self) -> Iterator[Any]:
        """Yields references to the actor's outstanding answers, in order."""
        if self.start is not None:
            yield self.start
        for assignment in self.assigned:
            yield assignment.reference

    def loaded(self) -> None:
        super().loaded()
        self.start = None

    def assign(self, task: Task, state: actor.DatasetState) -> None:
        """Sends a task, with the dataset if the actor has an older version."""
        news = state if self.version < state.version else None
        reference = self.handle.build.remote(task.request, news)
        self.version = state.version
        if not self.assigned:
            self.began_s = time.monotonic()
        self.assigned.append(Assignment(task, reference))

    def take_answered(self, build_s: float | None = None) -> Task:
        """Removes the oldest task, after its answer arrived or was lost."""
        task, _ = self.assigned.popleft()
        self.began_s = time.monotonic()
        if build_s is not None:
            self.build_s = build_s
        return task

    def timing_here(self, answer: actor.Answer, crashes: int) -> Timing | None:
        """Converts the timing of a batch to this machine's clock."""
        timing = answer.timing
        if timing is None:
            return None
        if crashes:
            timing = timing._replace(retries=crashes)
        location = self.location
        if location is None or location.machine == cluster.machine():
            return timing
        # Clocks of two machines have nothing in common: at best it came at
        # once.
        self.behind_s = min(self.behind_s, time.monotonic() - answer.at_s)
        return timing._replace(
            began_s=timing.began_s + self.behind_s,
            built_s=timing.built_s + self.behind_s,
            stored_s=timing.stored_s + self.behind_s,
        )

    def close(self) -> None:
        """Kills the actor, and closes the descriptor of its process."""
        _kill(self.handle)
        self.close_pidfd()

    def close_pidfd(self) -> None:
        """Closes the descriptor of the actor's process."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class _NoSlots:
    """Replaces `Arena` on Ray, where batches have no slots."""

    def take(self, leave: int = 0) -> int:
        return 0

    def free(self, slot: int) -> None:
        """Does nothing, because batches on Ray have no slots."""


class _NodeLoss(NamedTuple):
    """The time when a node was lost, and the workers lost with the node."""

    at_s: float
    lost: set[int]


class NotYetError(Exception):
    """Raised when an answer that seemed ready cannot be fetched yet."""


class AnswerLostError(Exception):
    """Raised when Ray has lost the answer of an actor."""


class WorkerGoneError(Exception):
    """Raised when an actor has died or cannot be reached."""

    def __init__(self, error: Exception, *, is_missing: bool) -> None:
        super().__init__(_text_of(error))
        # Whether it could not even be made.
        self.is_at_start = getattr(error, "actor_init_failed", True)
        self.is_missing = is_missing  # whether it is not known to have died


class Actors:
    """Implements `Transport` for one pool of Ray actors."""

    def __init__(self, plan: RayPlan, dataset: RemoteDataset) -> None:
        # Those that live, by index; the supervisor adds and removes.
        self.workers: dict[int, RayWorker] = {}
        self.in_flight = InFlight(_NoSlots())
        self._plan = plan
        self._dataset = dataset
        self._make_actor = _actor_maker(plan)
        self._node_losses: dict[str, _NodeLoss] = {}  # by node

    # -- making actors ------------------------------------------------------

    def start(self, index: int) -> RayWorker:
        handle = self._make_actor()
        return RayWorker(
            index=index,
            started_s=time.monotonic(),
            handle=handle,
            start=handle.location.remote(),
            version=self._dataset.state.version,
        )

    def load(self, worker: RayWorker, location: actor.WorkerLocation) -> None:
        """Stores an actor's location, and calls the actor's `load`."""
        worker.location = location
        worker.pidfd = _pidfd(location)
        start = self._start_of(worker.index)
        worker.version = start.state.version
        worker.starts_anew(time.monotonic())
        worker.start = worker.handle.load.remote(start)

    def _start_of(self, index: int) -> actor.ActorStart:
        # What the user has brought to the nodes goes before what is here.
        leads = not set(self._plan.options.runtime_env) - {"env_vars"}
        return actor.ActorStart(
            index,
            self._plan.dataset,
            self._dataset.state,
            current_folder() if leads else "",
            import_folders(),
            leads,
            list(getattr(sys, "argv", [])),
            log_forwarding.LoggingConfig.of_this_process(),
        )

    def check_start(self, worker: RayWorker, gone: WorkerGoneError) -> None:
        """Raises a `LoaderError` if an actor could not be created."""
        if (
            worker.location is not None
            or worker.state is WorkerState.KILLED
            or not gone.is_at_start
        ):
            return
        raise LoaderError(
            f"{worker.name} of {self._plan.dataset} could not be made: {gone}\n"
            "The nodes need the same Python, keras_fastdata, and what the "
            "dataset imports. `ray_options={'runtime_env': {'pip': [...], "
            "'working_dir': '.'}}` brings them there."
        ) from gone

    def check_places(self, now_s: float) -> None:
        """Raises `LoaderError` if no actor has started within a time limit."""
        limit_s = self._plan.options.timeout_s
        if not self.workers or any(
            worker.location is not None or now_s - worker.started_s <= limit_s
            for worker in self.workers.values()
        ):
            return
        if wait([worker.start for worker in self.workers.values()], 1, 0):
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

    # -- giving out tasks ---------------------------------------------------

    def assign(self, task: Task) -> bool:
        """Sends a task to the least busy actor, if any actor is free."""
        # A batch that has cost a worker is built alone, so that it is known
        # whether it was that one.
        alone = task.crashes > 0
        free = [
            worker
            for worker in self.workers.values()
            if worker.is_ready
            and len(worker.assigned) < worker.capacity
            and not (alone and worker.assigned)
        ]
        if not free:
            return False
        least = min(free, key=lambda worker: len(worker.assigned))
        least.assign(task, self._dataset.state)
        return True

    def start_backups(self) -> bool:
        """Requeues tasks that wait behind a slow batch, if actors are idle.

        Such a batch is built twice, and delivered once. Returns whether there
        is one.
        """
        in_flight, workers = self.in_flight, self.workers.values()
        if in_flight.has_queued:
            return False
        idle = sum(w.is_ready and not w.assigned for w in workers)
        since_s = time.monotonic() - _QUICK_S
        for worker in workers:
            if not idle:
                break
            if len(worker.assigned) < 2 or worker.began_s > since_s:
                continue
            last = worker.assigned[-1].task
            if last.state is TaskState.SENT:
                in_flight.cancel_task(last)
                in_flight.send_anew(last)
                idle -= 1
        return in_flight.has_queued

    # -- answers ------------------------------------------------------------

    def get(self, reference: Any) -> Any:
        """Fetches the answer that a Ray reference points to.

        Raises:
            NotYetError: It is not here after all.
            WorkerGoneError: The worker has died, or cannot be reached.
            AnswerLostError: The answer has died with its node.
            LoaderError: Ray cannot go on.
        """
        import ray
        from ray import exceptions

        try:
            return ray.get(reference, timeout=_GET_S)
        except exceptions.GetTimeoutError as error:
            raise NotYetError from error
        except (
            exceptions.RayActorError,
            exceptions.WorkerCrashedError,
            exceptions.NodeDiedError,
            exceptions.OutOfMemoryError,
            exceptions.RuntimeEnvSetupError,
            exceptions.ActorUnschedulableError,
        ) as error:
            missing = isinstance(error, exceptions.ActorUnavailableError)
            raise WorkerGoneError(error, is_missing=missing) from error
        except exceptions.ObjectLostError as error:
            raise AnswerLostError from error
        except exceptions.RayError as error:
            raise LoaderError(
                f"Ray could not deliver a batch of {self._plan.dataset}: "
                f"{error}"
            ) from error

    # -- what the supervisor calls besides ----------------------------------

    def activities(self, now_s: float) -> Iterator[Activity]:
        name = self._plan.dataset
        built = self._answered()
        for index, worker in self.workers.items():
            if (
                worker.state is WorkerState.KILLED
                or worker.location is None
                or index in built
            ):
                continue
            ask = functools.partial(_stack_of, worker.handle)
            if not worker.is_ready:
                what = loading(name, worker.name)
                since_s = worker.started_s
                yield Activity(
                    *(index, what, None, now_s - since_s, ask),
                    starting=True,
                    is_wanted=worker.is_wanted,
                )
            elif worker.assigned:
                task, _ = worker.assigned[0]
                what = building(name, task.request, worker.name)
                yield Activity(
                    *(index, what, task.request, now_s - worker.began_s, ask),
                    is_wanted=self.in_flight.is_wanted(task.task_id),
                )

    def _answered(self) -> set[int]:
        """Returns the indices of the actors whose oldest answer is ready."""
        first = {
            reference: index
            for index, worker in self.workers.items()
            if (reference := next(worker.awaited, None))
        }
        if not first:
            return set()
        there = wait([*first], len(first), 0, fetch=False)
        return {first[reference] for reference in there}

    def has_moved_on(self, worker: RayWorker) -> bool:
        return False

    def kill(self, worker: RayWorker) -> None:
        _kill(worker.handle)

    def abandon(self, worker: RayWorker) -> WorkerEnd:
        return self.reap(worker, "It was killed, and does not answer")

    def recover(self, worker: RayWorker) -> list[Task]:
        # The oldest, or the next, if an answer was lost with the worker.
        tasks = [
            self.in_flight.complete(task.task_id, worker.index)[0]
            for task, _ in worker.assigned
        ]
        worker.assigned.clear()
        return [task for task in tasks if task is not None]

    # -- the end of workers -------------------------------------------------

    def reap(
        self, worker: RayWorker, how: str, *, is_missing: bool = False
    ) -> WorkerEnd:
        """Kills an actor, and returns how it ended."""
        worker.close()
        location = worker.location
        # A batch is not to blame for the end of a node.
        is_node_lost = location is not None and not cluster.is_alive(
            location.node
        )
        if is_node_lost:
            how = f"Its node has left the cluster. {how}"
        own = not self._count_node_loss(worker, is_node_lost or is_missing)
        return WorkerEnd(how=how, counts=own, blames=not is_node_lost)

    def _count_node_loss(self, worker: RayWorker, is_node_lost: bool) -> bool:
        """Records a lost node; returns whether the loss was counted before.

        All actors of a node die together, and use up one restart. An actor that
        is lost again counts again.
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

    def stop(self, workers: Iterable[RayWorker]) -> Iterator[actor.Answer]:
        """Runs `on_worker_stop` in all running actors; yields the answers."""
        stopping = [
            worker.handle.stop.remote()
            for worker in workers
            if worker.location is not None
            and worker.state is not WorkerState.KILLED
        ]
        if not stopping:
            return
        for reference in wait(stopping, len(stopping), supervisor.GRACE_S):
            with contextlib.suppress(
                WorkerGoneError, AnswerLostError, NotYetError, LoaderError
            ):
                yield self.get(reference)


def await_ends(workers: Iterable[RayWorker]) -> None:
    """Waits up to `GRACE_S` for the actors on this machine to end."""
    deadline = time.monotonic() + supervisor.GRACE_S
    for worker in workers:
        if worker.pidfd >= 0:
            left_s = max(0.0, deadline - time.monotonic())
            sockets.wait_readable(worker.pidfd, left_s)


def _text_of(error: Exception) -> str:
    """Returns the text of a Ray error, without the details of the actor."""
    ours = ("class_name:", "actor_id:", "pid:", "namespace:", "ip:")
    lines = (line.strip() for line in str(error).splitlines())
    return " ".join(
        line for line in lines if line and not line.startswith(ours)
    )


def _actor_maker(plan: RayPlan) -> Callable[[], Any]:
    """Returns a function that creates one Ray actor for each call."""
    import ray

    options = dict(plan.options.actor)
    runtime_env = dict(options.pop("runtime_env", None) or {})
    clean = environment.CLEAN_ENVIRONMENT
    if options.get("num_gpus"):
        seen = environment.NO_ACCELERATOR
        clean = {name: clean[name] for name in clean if name not in seen}
    runtime_env["env_vars"] = {
        **clean,
        **environment.hash_seed(),
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


def wait(
    references: list[Any], count: int, timeout_s: float, *, fetch: bool = True
) -> list[Any]:
    """Waits for results, up to a time limit; returns the ready references.

    Without `fetch`, those that are anywhere.
    """
    import ray

    try:
        ready, _ = ray.wait(
            references, num_returns=count, timeout=timeout_s, fetch_local=fetch
        )
    except SystemError as error:
        # What a signal's handler raises meanwhile comes out as its cause.
        if error.__cause__ is not None:
            raise error.__cause__ from None
        raise
    return list(ready)


def _stack_of(handle: Any) -> str:
    """Fetches an actor's call stack; waits at most `_STACK_S` seconds."""
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
    """Opens an actor's pidfd; returns -1 if the actor is elsewhere or ended."""
    if location.machine != cluster.machine():
        return -1
    try:
        return os.pidfd_open(location.pid)
    except OSError:
        return -1


def _resources(found: dict[str, float]) -> str:
    plain = {n: v for n, v in found.items() if not n.startswith("node:")}
    return ", ".join(f"{value:g} {name}" for name, value in plain.items())
