"""The base class of the transports that connect worker processes.

Workers build batches in slots of shared memory. Heartbeats in shared memory
show which task each worker builds. `process.channel.Channel` uses sockets,
`portable.channel.PipeChannel` uses pipes.

Runs in the training process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from keras_fastdata.memory.arena import Heartbeats
from keras_fastdata.workers.base import PoolPlan
from keras_fastdata.workers.in_flight import Task
from keras_fastdata.workers.messages import ResultMessage
from keras_fastdata.workers.supervisor import (
    Transport,
    Worker,
    WorkerEnd,
    WorkerState,
)
from keras_fastdata.workers.watchdog import Activity, building, loading

_IDLE_LOOKS = 4  # in a row, before a worker that builds nothing is suspect


@dataclasses.dataclass(eq=False, kw_only=True)
class SlotWorker(Worker):
    """The training process's record of a worker that builds in slots."""

    version: int  # of the dataset's state that it has been sent
    # Slots that its copy of the dataset holds on to.
    retained_slots: list[int] = dataclasses.field(default_factory=list)
    # Its heartbeat at the last look: the task id, and the time when building
    # began.
    seen: tuple[int, float] = (0, 0.0)
    # The work that it had left undone at the last look although it built
    # nothing; since when; and for how many looks.
    idle: tuple[tuple[int, int] | None, float, int] = (None, 0.0, 0)

    @property
    def name(self) -> str:
        return f"worker {self.index} (pid {self.pid})"

    def has_been_told(self, version: int) -> None:
        """Stores the version of the dataset's state last sent to the worker."""
        self.version = version

    def look(self, heartbeats: Heartbeats) -> None:
        """Reads and stores the worker's latest heartbeat."""
        self.seen = heartbeats.both(self.index)

    def look_for_idle_s(self, unclaimed: int | None, now_s: float) -> float:
        """Returns for how many seconds the worker has left its work undone.

        The work is to deliver the task in its heartbeat, or to take a task that
        is in no heartbeat. Only work that is undone at several looks in a row
        counts.
        """
        heartbeat = self.seen[0]
        undone = None
        if heartbeat:
            undone = heartbeat, 0
        elif unclaimed:
            undone = 0, unclaimed
        before, since_s, looks = self.idle
        if undone is None or undone != before:
            self.idle = undone, now_s, 0
            return 0.0
        self.idle = undone, since_s, looks + 1
        return now_s - since_s if looks >= _IDLE_LOOKS else 0.0


W = TypeVar("W", bound=SlotWorker)


class SlotChannel(Transport[W], Generic[W]):
    """The base class of the transports of worker processes.

    Attributes:
        workers: The living workers by index; the supervisor sets them.
        in_flight: The tasks and their slots.
        arena: Manages the slots.
        heartbeats: Stores which task each worker builds.
        version_is_sent: Whether every worker was sent the latest version of
            the dataset's state.
    """

    arena: Any
    heartbeats: Heartbeats

    def __init__(self, plan: PoolPlan) -> None:
        self._plan = plan
        self.workers: dict[int, W] = {}
        self._version = 1
        self.version_is_sent = True
        self._failures: dict[int, bytes] = {}  # in parts, by worker

    # -- implemented by a subclass ------------------------------------------

    @property
    def importing(self) -> str:
        """The package being imported for new workers now, or "" if none."""
        return ""

    def open(self) -> None:
        """Opens the connections that all workers share."""

    def send(self, task: Task) -> bool:
        """Sends a task, or returns False if no worker can take it now."""
        raise NotImplementedError

    def unread(self) -> Iterable[int]:
        """Takes unread tasks back from the workers; returns their ids."""
        raise NotImplementedError

    def receive(self) -> Iterator[ResultMessage]:
        """Yields every message that has come from the workers."""
        raise NotImplementedError

    def change(self) -> bool:
        """Stores the dataset's current state as the latest version for workers.

        Returns:
            Whether it can be sent. If not, the workers must be replaced.
        """
        raise NotImplementedError

    def tell_version(self) -> None:
        """Sends the dataset's latest version to the workers that lack it."""
        raise NotImplementedError

    def wait(self, timeout_s: float) -> None:
        """Waits for a message, or the end of a worker.

        Another thread, or a signal handler, may end the workers meanwhile.
        """
        raise NotImplementedError

    def ended(self, timeout_s: float) -> list[W]:
        """Waits for a message or a worker's end; returns the ended workers."""
        raise NotImplementedError

    def reap(self, worker: W) -> WorkerEnd:
        """Releases an ended worker's files and slots; returns a `WorkerEnd`."""
        raise NotImplementedError

    def end(self, worker: W, timeout_s: float) -> bool:
        """Waits for the end of a killed worker, and reaps the worker.

        Returns:
            Whether the worker has ended in time.
        """
        raise NotImplementedError

    def keep_slots_of(self, worker: W) -> None:
        """Prevents the reuse of slots that an abandoned worker can write to."""
        raise NotImplementedError

    def ask_to_end(self) -> None:
        """Signals all workers to end."""
        raise NotImplementedError

    def forget_workers(self) -> None:
        """Closes the connections made by `open`, after workers are removed."""

    def close(self) -> None:
        """Releases all resources, after all workers are removed."""
        raise NotImplementedError

    def _ask(self, worker: W) -> Callable[[], str]:
        """Returns a function that reads the worker's current stack."""
        raise NotImplementedError

    def _unclaimed(self) -> Callable[[W], int | None]:
        """Returns a function that finds the oldest unread task of a worker."""
        raise NotImplementedError

    # -- shared -------------------------------------------

    def failure_of(self, result: ResultMessage) -> bytes | None:
        """Joins parts of a start-up error; returns `None` until complete."""
        failure = self._failures.pop(result.worker, b"") + result.body
        if not result.task_id:
            return failure
        self._failures[result.worker] = failure
        return None

    def forget_failure(self, worker: W) -> None:
        """Drops the incomplete error of a worker that has ended."""
        self._failures.pop(worker.index, None)

    def activities(self, now_s: float) -> Iterator[Activity]:
        name = self._plan.dataset
        for worker in self.workers.values():
            worker.look(self.heartbeats)
        unclaimed = self._unclaimed()
        for index, worker in self.workers.items():
            if worker.state is WorkerState.KILLED:
                continue
            ask = self._ask(worker)
            heartbeat, began_s = worker.seen
            request = self.in_flight.request_of(heartbeat)
            if not worker.is_ready:
                what = loading(name, worker.name)
                elapsed_s, is_wanted = (
                    now_s - worker.started_s,
                    worker.is_wanted,
                )
                yield Activity(
                    *(index, what, None, elapsed_s, ask),
                    starting=True,
                    is_wanted=is_wanted,
                )
            elif request is not None and began_s:
                what = building(name, request, worker.name)
                is_wanted = self.in_flight.is_wanted(heartbeat)
                yield Activity(
                    *(index, what, request, now_s - began_s, ask),
                    is_wanted=is_wanted,
                )
            elif (
                idle_s := worker.look_for_idle_s(unclaimed(worker), now_s)
            ) > 0:
                what = f"Taking or delivering a batch of {name}, {worker.name},"
                yield Activity(index, what, None, idle_s, ask)

    def has_moved_on(self, worker: W) -> bool:
        return worker.seen != self.heartbeats.both(worker.index)
