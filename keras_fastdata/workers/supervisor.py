"""Starts, watches and replaces the workers of one pool.

Processes and Ray share this module. The transport of the pool starts and kills
the workers: `process.channel.Channel` or `ray.actors.Actors`.

    STARTING --loaded--> READY
    STARTING, READY --time is up--> KILLED
    STARTING, READY, KILLED --has ended--> EXITED
    STARTING, READY, KILLED --does not end--> ABANDONED

Runs in the training process, in the thread that calls `collect`.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Collection, Iterable
from typing import Generic, NamedTuple, NoReturn, Protocol, TypeVar

from keras_fastdata._call_stack import raise_of_handler
from keras_fastdata.errors import LoaderError
from keras_fastdata.workers import log_forwarding
from keras_fastdata.workers.base import (
    BatchResult,
    LocalResult,
    PoolPlan,
    WorkerPool,
)
from keras_fastdata.workers.exit_messages import WorkerExit
from keras_fastdata.workers.in_flight import InFlight, Task
from keras_fastdata.workers.restart_policy import RestartPolicy
from keras_fastdata.workers.signals import DeferredSignals
from keras_fastdata.workers.watchdog import Activity, Expired, Watchdog

GRACE_S = 2.0  # for a worker to end when it is asked to, or killed


class WorkerState(enum.Enum):
    """The state of a worker."""

    STARTING = enum.auto()  # has not loaded the dataset yet
    READY = enum.auto()  # builds a batch, or waits for a task
    KILLED = enum.auto()  # took too long; see `expired` and `killed_s`
    ABANDONED = enum.auto()  # did not end when it was killed; is replaced
    EXITED = enum.auto()  # has ended


_ENDS = {WorkerState.EXITED, WorkerState.ABANDONED}
_NEXT = {
    WorkerState.STARTING: {WorkerState.READY, WorkerState.KILLED, *_ENDS},
    WorkerState.READY: {WorkerState.KILLED, *_ENDS},
    WorkerState.KILLED: _ENDS,
}


@dataclasses.dataclass(eq=False, kw_only=True)
class Worker:
    """The training process's record of one worker."""

    index: int  # from 0, below the number of workers
    started_s: float  # time of the start, by `time.monotonic`
    state: WorkerState = WorkerState.STARTING  # where the worker stands
    # The activity that took too long, if the worker was killed.
    expired: Expired | None = None
    killed_s: float = 0.0  # time of the kill, by `time.monotonic`, or 0
    # Whether somebody still waits for what it was started for.
    is_wanted: bool = True

    @property
    def pid(self) -> int:
        """The process id, or 0 if it is unknown."""
        raise NotImplementedError

    @property
    def is_ready(self) -> bool:
        """Whether the worker has loaded the dataset, and was not killed."""
        return self.state is WorkerState.READY

    def move(self, state: WorkerState) -> None:
        """Changes the state; raises RuntimeError for a forbidden transition."""
        if state not in _NEXT.get(self.state, ()):
            raise RuntimeError(
                f"Worker {self.index} is {self.state.name}, and cannot be "
                f"{state.name} after that."
            )
        self.state = state

    def starts_anew(self, now_s: float) -> None:
        """Restarts the measurement of the worker's start-up time at `now_s`."""
        self.started_s = now_s

    def loaded(self) -> None:
        """Records that the dataset is loaded, unless the worker was killed."""
        if self.state is WorkerState.STARTING:
            self.move(WorkerState.READY)

    def lose_consumer(self) -> None:
        """Records that nobody waits any more for what it was started for."""
        self.is_wanted = False

    def mark_killed(self, expired: Expired, now_s: float) -> None:
        """Marks the worker as killed, and stores the reason and the time."""
        self.move(WorkerState.KILLED)
        self.expired, self.killed_s = expired, now_s


W = TypeVar("W", bound=Worker)


class WorkerEnd(NamedTuple):
    """Describes how a worker ended, as reported by its transport."""

    exit_code: int | None = None  # as in `Popen.returncode`; `None` if unknown
    how: str = ""  # a description of the end, where there is no exit code
    # Whether the end uses up a restart. Workers that die with their node or
    # their fork server use up one restart together.
    counts: bool = True
    blames: bool = True  # whether a batch may be to blame


class Transport(Protocol[W]):
    """The interface to start, watch and kill the workers of a pool."""

    # The living workers, by index. The supervisor adds and removes them; the
    # pool removes them all when it ends.
    workers: dict[int, W]
    in_flight: InFlight  # the pool's tasks

    def start(self, index: int) -> W | None:
        """Starts the worker with the given index, and returns it.

        Returns `None` while workers cannot start yet.
        """

    def activities(self, now_s: float) -> Iterable[Activity]:
        """Returns the activities of all busy workers that were not killed."""

    def has_moved_on(self, worker: W) -> bool:
        """Returns whether the worker has finished the task in `activities`."""

    def kill(self, worker: W) -> None:
        """Tries to kill a worker."""

    def abandon(self, worker: W) -> WorkerEnd:
        """Stops tracking a worker that was killed but does not end."""

    def recover(self, worker: W) -> list[Task]:
        """Requeues a lost worker's tasks, except tasks that could be the cause.

        Returns the tasks that may have caused the loss, the likeliest first.
        Their state is DONE, and the caller owns their slots.
        """


class Supervisor(Generic[W]):
    """Starts, watches and replaces the workers of one pool."""

    def __init__(self, plan: PoolPlan, transport: Transport[W]) -> None:
        self._plan = plan
        self._workers = transport.workers
        self._in_flight = transport.in_flight
        self._transport = transport
        self.policy = RestartPolicy(plan.count, plan.max_restarts)
        self.watchdog = Watchdog(
            plan.batch_timeout,
            "`batch_timeout` replaces a worker that is stuck.",
        )

    @property
    def missing(self) -> list[int]:
        """The indices of the workers that are to be started."""
        workers, count = self._workers, self._plan.count
        if len(workers) == count:
            return []
        replaces = self.policy.replaces
        return [n for n in range(count) if n not in workers and replaces(n)]

    def start_missing(self) -> None:
        """Starts missing workers, unless they cannot start yet."""
        for index in self.missing:
            worker = self._transport.start(index)
            if worker is None:
                return
            self._workers[index] = worker

    def look(self) -> list[BatchResult]:
        """Kills overdue workers; abandons killed workers that do not end."""
        now_s = time.monotonic()
        activities = list(self._transport.activities(now_s))
        for expired in self.watchdog.look(activities):
            worker = self._workers[expired.activity.worker]
            if self._transport.has_moved_on(worker):
                continue
            worker.mark_killed(expired, now_s)
            self._transport.kill(worker)
        done: list[BatchResult] = []
        for worker in list(self._workers.values()):
            if worker.killed_s and now_s - worker.killed_s > GRACE_S:
                end = self._transport.abandon(worker)
                done += self.on_exit(worker, end, WorkerState.ABANDONED)
        return done

    def on_exit(
        self, worker: W, end: WorkerEnd, state: WorkerState = WorkerState.EXITED
    ) -> list[BatchResult]:
        """Handles the unexpected end of a worker.

        Another worker builds the lost batches again. Returns an error for the
        batch that the worker died over, if the restart policy says so.
        """
        starting = worker.state is WorkerState.STARTING
        self.remove(worker, state)
        expired = worker.expired
        counts = end.counts and (not expired or expired.activity.is_wanted)
        self.policy.record(worker.index, worker.pid, counts=counts)
        held = self._transport.recover(worker)
        if end.blames:
            for task in held:
                task.note_crash()
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
        self._in_flight.free(suspect)
        return [
            LocalResult(suspect.request.request_id, worker.index, error=error)
        ]

    def note_cancel(self) -> None:
        """Records that requests are cancelled.

        Before any worker is ready, it takes their consumer from all of them.
        """
        if not any(worker.is_ready for worker in self._workers.values()):
            for worker in self._workers.values():
                worker.lose_consumer()

    def remove(self, worker: W, state: WorkerState) -> None:
        """Removes a worker that has ended, or is abandoned."""
        worker.move(state)
        del self._workers[worker.index]

    def fail_all(self) -> list[BatchResult]:
        """Fails all requests, because all workers died and none is replaced."""
        worker_exit = self.policy.end()
        return [
            LocalResult(
                request.request_id,
                worker_exit.worker,
                error=worker_exit.error(),
            )
            for request in self._in_flight.take_wanted()
        ]


class SupervisedPool(WorkerPool, Generic[W]):
    """The base class of pools that replace dead workers."""

    def __init__(
        self,
        plan: PoolPlan,
        transport: Transport[W],
        receiver: log_forwarding.Receiver,
    ) -> None:
        self._workers = transport.workers
        self._in_flight = transport.in_flight
        self._receiver = receiver
        self._supervisor = Supervisor(plan, transport)
        self._policy = self._supervisor.policy
        self._watchdog = self._supervisor.watchdog
        self._is_paused = self._is_closed = False

    @property
    def lacks_workers(self) -> bool:
        return bool(self._supervisor.missing)

    def start_missing(self) -> None:
        try:
            self._supervisor.start_missing()
        except (LoaderError, OSError) as error:
            raise_of_handler(error)
            self._fail_start(error)

    def collect(self) -> Iterable[BatchResult]:
        supervisor = self._supervisor
        is_due = self._watchdog.begin_look()
        done = self._receive(is_due)
        if is_due:
            done += supervisor.look()
        if self._policy.is_over:
            last = self._policy.end()
            if last.starting:
                self._fail_start(last.error())
            done += supervisor.fail_all()
        self._flush()
        self._receiver.hand_on()
        return done

    def cancel(self, request_ids: Iterable[int]) -> None:
        self._supervisor.note_cancel()

    @property
    def starting(self) -> int:
        """The number of workers that have not loaded the dataset yet."""
        workers = list(self._workers.values())
        return sum(w.state is WorkerState.STARTING for w in workers)

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._flush()

    @property
    def slow_requests(self) -> Collection[int]:
        return self._watchdog.slow

    @property
    def busy(self) -> bool:
        return self._in_flight.is_awaited

    def renew_restarts(self) -> None:
        self._policy.renew_restarts()

    def close(self) -> None:
        if not self._is_closed:
            with DeferredSignals():
                self._is_closed = True
                self._end()
            self._receiver.hand_on()

    def _fail_start(self, error: BaseException) -> NoReturn:
        """Raises the error that kept workers from starting."""
        self.has_failed_to_start = True
        raise error

    def _receive(self, is_due: bool) -> list[BatchResult]:
        """Returns new results; if `is_due`, also checks the workers."""
        raise NotImplementedError

    def _flush(self) -> None:
        """Sends as many queued tasks as the workers can accept."""
        raise NotImplementedError

    def _end(self) -> None:
        """Ends the workers, and frees all resources of the pool."""
        raise NotImplementedError
