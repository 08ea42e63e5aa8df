"""Keeps the workers of one pool: starts, watches, replaces and gives up.

Processes and Ray share it. How a worker is started, killed and heard of is for
the transport: `process.channel.Channel`, `ray.actors.Actors`.

    STARTING --loaded--> READY
    STARTING, READY --its time is up--> KILLED
    STARTING, READY, KILLED --it has ended--> EXITED
    STARTING, READY, KILLED --it does not end--> ABANDONED

Runs in the training process, in the thread that calls `collect`.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Iterable
from typing import Generic, NamedTuple, Protocol, TypeVar

from keras_fastdata.workers.base import BatchResult, LocalResult, PoolPlan
from keras_fastdata.workers.exit_messages import WorkerExit
from keras_fastdata.workers.in_flight import InFlight, Task
from keras_fastdata.workers.restart_policy import RestartPolicy, record_crash
from keras_fastdata.workers.signals import DeferredSignals
from keras_fastdata.workers.watchdog import Activity, Expired, Watchdog

GRACE_S = 2.0  # for a worker to end when it is asked to, or killed


class WorkerState(enum.Enum):
    """Where a worker stands."""

    STARTING = enum.auto()  # it has not loaded the dataset yet
    READY = enum.auto()  # it builds, or waits for a task
    KILLED = enum.auto()  # its time was up; see `expired` and `killed_s`
    ABANDONED = enum.auto()  # it does not end; nothing is expected of it
    EXITED = enum.auto()  # it has ended


_ENDS = {WorkerState.EXITED, WorkerState.ABANDONED}
_NEXT = {
    WorkerState.STARTING: {WorkerState.READY, WorkerState.KILLED, *_ENDS},
    WorkerState.READY: {WorkerState.KILLED, *_ENDS},
    WorkerState.KILLED: _ENDS,
}


@dataclasses.dataclass(eq=False, kw_only=True)
class Worker:
    """A worker, as the training process knows it.

    Attributes:
        index: From 0, below the number of workers.
        started_s: When it was started, by `time.monotonic`.
        state: Where it stands.
        expired: Why it was killed, if it was.
        killed_s: When, by `time.monotonic`.
    """

    index: int
    started_s: float
    state: WorkerState = WorkerState.STARTING
    expired: Expired | None = None
    killed_s: float = 0.0

    @property
    def pid(self) -> int:
        """Its process; 0 if unknown."""
        raise NotImplementedError

    @property
    def is_ready(self) -> bool:
        """Whether it has loaded the dataset, and was not killed."""
        return self.state is WorkerState.READY

    def move(self, state: WorkerState) -> None:
        """Changes its state; nothing else does.

        Raises:
            RuntimeError: The diagram above has no such change.
        """
        if state not in _NEXT.get(self.state, ()):
            raise RuntimeError(
                f"Worker {self.index} is {self.state.name}, and cannot be "
                f"{state.name} after that."
            )
        self.state = state

    def loaded(self) -> None:
        """Takes note that it is ready, unless it was killed meanwhile."""
        if self.state is WorkerState.STARTING:
            self.move(WorkerState.READY)

    def kill(self, expired: Expired, now_s: float) -> None:
        """Takes note of why it is being killed, and when."""
        self.move(WorkerState.KILLED)
        self.expired, self.killed_s = expired, now_s


W = TypeVar("W", bound=Worker)


class WorkerEnd(NamedTuple):
    """What a transport learned of the end of a worker.

    Attributes:
        exit_code: As in `Popen.returncode`; `None` if unknown.
        how: What is known of its end, where no exit code can say.
        counts: Whether it is a loss of its own, rather than one with that of
            another worker: their node or their fork server has died.
        blames: Whether a batch may be to blame for it.
    """

    exit_code: int | None = None
    how: str = ""
    counts: bool = True
    blames: bool = True


class Transport(Protocol[W]):
    """What the supervisor asks of the pool's own side. Nothing here waits."""

    def start(self, index: int) -> W:
        """Starts a worker."""
        ...

    def activities(self, now_s: float) -> Iterable[Activity]:
        """What each worker is busy with, but for those that were killed."""
        ...

    def has_moved_on(self, worker: W) -> bool:
        """Whether it does something else than `activities` has told."""
        ...

    def kill(self, worker: W) -> None:
        """Kills a worker, as far as that is possible."""
        ...

    def abandon(self, worker: W) -> WorkerEnd:
        """Lets go of a worker that was killed and does not end."""
        ...

    def recover(self, worker: W) -> list[Task]:
        """Sends again what a lost worker had, but for the tasks returned.

        Returns:
            What it may have died over, the likeliest first. They are done,
            and their slots are the caller's.
        """
        ...


class Supervisor(Generic[W]):
    """Decides about the workers of one pool.

    Args:
        plan: How many workers, and how often they may be replaced.
        workers: Shared with the pool. The supervisor adds and removes.
        in_flight: The pool's tasks.
        transport: Acts on the workers.

    Attributes:
        policy: Which workers are replaced.
        watchdog: Notices what takes too long.
    """

    def __init__(
        self,
        plan: PoolPlan,
        workers: dict[int, W],
        in_flight: InFlight,
        transport: Transport[W],
    ) -> None:
        self._plan = plan
        self._workers = workers
        self._in_flight = in_flight
        self._transport = transport
        self.policy = RestartPolicy(plan.count, plan.max_restarts)
        self.watchdog = Watchdog(
            plan.batch_timeout,
            "`batch_timeout` replaces a worker that is stuck.",
        )

    def start_missing(self) -> None:
        """Starts the workers that are missing, as far as that is allowed."""
        workers = self._workers
        if len(workers) == self._plan.count:
            return
        for index in range(self._plan.count):
            if index not in workers and self.policy.replaces(index):
                with DeferredSignals():
                    workers[index] = self._transport.start(index)

    def look(self) -> list[BatchResult]:
        """Kills workers whose time is up; abandons what survives that."""
        now_s = time.monotonic()
        activities = list(self._transport.activities(now_s))
        for expired in self.watchdog.look(activities):
            worker = self._workers[expired.activity.worker]
            if self._transport.has_moved_on(worker):
                continue  # a moment ago, after all
            worker.kill(expired, now_s)
            self._transport.kill(worker)
        done: list[BatchResult] = []
        for worker in list(self._workers.values()):
            if (
                worker.state is WorkerState.KILLED
                and now_s - worker.killed_s > GRACE_S
            ):
                end = self._transport.abandon(worker)
                done += self.on_exit(worker, end, WorkerState.ABANDONED)
        return done

    def on_exit(
        self,
        worker: W,
        end: WorkerEnd,
        state: WorkerState = WorkerState.EXITED,
    ) -> list[BatchResult]:
        """Accounts for a worker that ended without being asked to.

        What it held is built again, by its replacement or another worker,
        unless it may not be: then that request ends in an error.

        Args:
            worker: The worker that ended, or is abandoned.
            end: What is known of that.
            state: EXITED or ABANDONED.
        """
        starting = worker.state is WorkerState.STARTING
        self.remove(worker, state)
        self.policy.record(worker.index, worker.pid, counts=end.counts)
        held = self._transport.recover(worker)
        if end.blames:
            for task in held:
                record_crash(task)
        for task in reversed(held[1:]):
            self._in_flight.send_first(task)
        suspect = held[0] if held else None
        error = self.policy.judge(
            WorkerExit(
                dataset=self._plan.dataset,
                worker=worker.index,
                pid=worker.pid,
                exit_code=end.exit_code,
                expired=worker.expired,
                starting=starting,
                how=end.how,
            ),
            suspect,
        )
        if suspect is None:
            return []
        if error is None:
            self._in_flight.send_first(suspect)
            return []
        self._in_flight.release(suspect)
        return [
            LocalResult(suspect.request.request_id, worker.index, error=error)
        ]

    def remove(self, worker: W, state: WorkerState) -> None:
        """Forgets a worker that has ended, or is abandoned."""
        worker.move(state)
        del self._workers[worker.index]

    def fail_all(self) -> list[BatchResult]:
        """Ends all there is: no worker is left, and none may be started."""
        worker_exit = self.policy.end()
        return [
            LocalResult(
                request.request_id,
                worker_exit.worker,
                error=worker_exit.error(),
            )
            for request in self._in_flight.give_up()
        ]
