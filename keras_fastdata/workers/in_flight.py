"""Records the state and the slot of each request that a pool accepted.

A request travels as a task. If a worker may have read the task, the request is
sent again as a new task, with a new task id.

    enter -> QUEUED -send-> SENT -complete-> DONE
             QUEUED <-requeue- SENT
             QUEUED -cancel-> DONE
                               SENT -cancel-> CANCELLED -complete-> DONE
                               SENT, CANCELLED -recover-> QUARANTINED -> DONE
                               SENT, CANCELLED -recover-> DONE

This book of tasks and slots sends nothing itself.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple, Protocol

from keras_fastdata.errors import LoaderError
from keras_fastdata.workers.base import BatchRequest

_ABANDONED = -1  # in place of the index of a worker that is never done
_NO_SLOT = -1  # of a queued task that is sent once a slot is free


class TaskState(enum.IntEnum):
    """The state of a task, from `QUEUED` to `DONE`.

    The values below `DONE` are indices of `InFlight._tasks`.
    """

    QUEUED = 0  # waits to be sent
    SENT = 1  # on the way to a worker, or at a worker
    CANCELLED = 2  # was sent, but its batch is not wanted any more
    QUARANTINED = 3  # was lost and sent again; a worker may write to its slot
    DONE = 4  # no longer in the book, which owns its slot no longer


_NEXT = (
    (TaskState.QUEUED, TaskState.SENT, TaskState.DONE),
    (
        *(TaskState.QUEUED, TaskState.CANCELLED),
        *(TaskState.QUARANTINED, TaskState.DONE),
    ),
    (TaskState.QUARANTINED, TaskState.DONE),
    (TaskState.DONE,),
)


@dataclasses.dataclass(slots=True, eq=False)
class Task:
    """One attempt to build a requested batch in a worker."""

    request: BatchRequest
    slot: int  # the slot that the batch is built in; -1 if it has none yet
    crashes: int = 0  # how many workers have died over the request
    task_id: int = 0  # the number of the task, from 1
    # Where the task is. Only `InFlight._move` changes it.
    state: TaskState = TaskState.QUEUED

    def note_crash(self) -> None:
        """Counts one more worker death that this request could have caused."""
        self.crashes += 1
        if self.request.interval_s is not None:
            # The times of this build are always recorded.
            self.request = dataclasses.replace(self.request, interval_s=0.0)


class Slots(Protocol):
    """The methods of `memory.arena.Arena` that take and free slots."""

    def take(self, leave: int = 0) -> int | None:
        """Takes a free slot, or returns `None` if at most `leave` are free."""

    def free(self, slot: int) -> None:
        """Marks a slot as free."""


@dataclasses.dataclass
class _Quarantine:
    """Slots that cannot be reused until no worker can write to them.

    A worker builds one batch at a time: when it answers a task that was sent
    after `since`, it has finished all earlier tasks.
    """

    task_ids: list[int]
    since: int
    awaited: set[int]


class Losses(NamedTuple):
    """The tasks that were lost when a worker died."""

    suspect: int | None  # the task that the dead worker was building, or `None`
    # Tasks that are in no heartbeat, lowest first. The dead worker may have
    # taken one. So may a living worker, a moment before writing its heartbeat:
    # the tasks must be built again, but not in the same slots.
    unclaimed: tuple[int, ...]


def losses_of(
    outstanding: Collection[int],
    last_heartbeat: int,
    heartbeats: Mapping[int, int],
) -> Losses:
    """Finds the tasks that were lost when a worker died.

    A worker takes a task off the task socket, then writes it in its heartbeat.
    A worker that is killed in between leaves a task that is in neither. So the
    training process empties the socket itself. Then every task without a result
    was in the socket, is in the heartbeat of a living worker, or is lost.

    Args:
        outstanding: The tasks without a result, without those of the socket.
        last_heartbeat: The task in the dead worker's heartbeat; 0 for none.
        heartbeats: The same for each living worker, read after the socket.
    """
    suspect = last_heartbeat if last_heartbeat in outstanding else None
    accounted = {suspect, *heartbeats.values()}
    return Losses(
        suspect, tuple(sorted(s for s in outstanding if s not in accounted))
    )


class InFlight:
    """Tracks the tasks and slots of one pool.

    Args:
        slots: Gives and takes back slots.
        spare: How many slots new requests leave free. They are for requests
            that are sent again while a worker may write to their old slots.
    """

    def __init__(self, slots: Slots, spare: int = 0) -> None:
        self._slots = slots
        self._spare = spare
        self._last_task_id = 0
        # By state, then by task id. Queued tasks are in the order of sending.
        self._tasks: list[collections.OrderedDict[int, Task]] = [
            collections.OrderedDict() for _ in range(TaskState.DONE)
        ]
        self._queued, self._sent, self._cancelled, self._quarantined = (
            self._tasks
        )
        self._quarantines: list[_Quarantine] = []

    def _move(self, task: Task, state: TaskState) -> None:
        """Changes a task's state; no other method sets `Task.state`."""
        assert state in _NEXT[task.state], (task.state, state)
        self._tasks[task.state].pop(task.task_id, None)
        task.state = state
        if state is not TaskState.DONE:
            self._tasks[state][task.task_id] = task

    # -- on the way out -----------------------------------------------------

    def enter(self, request: BatchRequest) -> bool:
        """Queues a request, or returns False if too few slots are free."""
        slot = self._slots.take(self._spare)
        if slot is None:
            return False
        self._last_task_id += 1
        task = Task(request, slot, 0, self._last_task_id)
        self._move(task, TaskState.QUEUED)
        return True

    def send(self, take: Callable[[Task], bool]) -> None:
        """Sends queued tasks until no slot is free or `take` refuses a task.

        Raises `LoaderError` if no slot is free, and no worker has a task.
        """
        queued = self._queued
        while queued:
            task = next(iter(queued.values()))
            if task.slot == _NO_SLOT and not self._find_slot(task):
                return
            if not take(task):
                return
            self._move(task, TaskState.SENT)

    def requeue(self, task_ids: Iterable[int]) -> None:
        """Moves sent but unread tasks back to the front of the queue.

        Their order stays. Cancelled tasks among them are done. A task that was
        sent while a signal handler raised an exception in `send` is not in the
        book as sent; it stays as it is, and the pool is closed.
        """
        found = []
        for task_id in task_ids:
            if task_id in self._sent:
                found.append(self._sent[task_id])
            elif task_id in self._cancelled:
                self._close(self._cancelled[task_id])
        for task in reversed(found):
            self._move(task, TaskState.QUEUED)
            self._put_first(task)

    @property
    def has_queued(self) -> bool:
        """Whether any task waits to be sent."""
        return bool(self._queued)

    @property
    def is_awaited(self) -> bool:
        """Whether any sent task is unfinished, cancelled tasks included."""
        return bool(self._sent or self._cancelled)

    def __len__(self) -> int:
        """Returns the number of queued, sent and cancelled tasks."""
        return len(self._queued) + len(self._sent) + len(self._cancelled)

    def is_out(self, request_ids: Collection[int]) -> bool:
        """Returns whether any of the given requests is queued or sent."""
        return any(
            task.request.request_id in request_ids for task in self._wanted()
        )

    def cancel(self, request_ids: Collection[int]) -> None:
        """Cancels the requests with the given ids.

        Call `requeue` with the unread tasks first.
        """
        for task in self._wanted():
            if task.request.request_id in request_ids:
                self.cancel_task(task)

    def cancel_task(self, task: Task) -> None:
        """Cancels a task that is queued or sent."""
        if task.state is TaskState.QUEUED:
            self._close(task)
        else:
            self._move(task, TaskState.CANCELLED)

    # -- on the way back ----------------------------------------------------

    def request_of(self, task_id: int) -> BatchRequest | None:
        """Returns a task's request; `None` if the task is not outstanding."""
        task = self._sent.get(task_id) or self._cancelled.get(task_id)
        return task.request if task else None

    def is_wanted(self, task_id: int) -> bool:
        """Returns whether an outstanding task's batch is still wanted."""
        return task_id not in self._cancelled

    def oldest_unclaimed(self, heartbeats: Collection[int]) -> int | None:
        """Returns the lowest id of a sent task that is not in `heartbeats`."""
        unclaimed = (i for i in self._sent if i not in heartbeats)
        return min(unclaimed, default=None)

    def complete(
        self, task_id: int, worker: int
    ) -> tuple[Task | None, int | None]:
        """Removes a task that `worker` has answered.

        Returns the task, or `None` if it was cancelled or quarantined; and its
        slot, which the caller owns now. Both are `None` for an unknown task.
        """
        if self._quarantines:
            self._free_quarantined(worker, task_id)
        task = self._sent.get(task_id)
        if task is not None:
            self._move(task, TaskState.DONE)
            return task, task.slot
        gone = self._quarantined.get(task_id) or self._cancelled.get(task_id)
        if gone is None:
            return None, None
        self._move(gone, TaskState.DONE)
        return None, gone.slot

    def send_anew(self, task: Task) -> None:
        """Queues a task's request again, to be built in another slot."""
        self._queue_again(task, _NO_SLOT)

    # -- when a worker has died ---------------------------------------------

    def recover(
        self,
        worker: int,
        heartbeat: int,
        heartbeats: Mapping[int, int],
        *,
        ended: bool,
    ) -> Task | None:
        """Requeues a lost worker's tasks, except for the task being built.

        Call `requeue` first, with the tasks that are unread after the death.

        Args:
            worker: Index of the lost worker.
            heartbeat: The task in its last heartbeat; 0 for none.
            heartbeats: The task in the heartbeat of each other worker.
            ended: Whether the worker has ended. An abandoned worker may still
                write, so the slots that it may have are not used again.

        Returns:
            The wanted task that the worker was building, if any; its state is
            DONE, and the caller owns its slot, if it has one.
        """
        outstanding = self._sent.keys() | self._cancelled.keys()
        losses = losses_of(outstanding, heartbeat, heartbeats)
        quarantine = _Quarantine(
            [*losses.unclaimed], self._last_task_id + 1, set(heartbeats)
        )
        for task_id in reversed(losses.unclaimed):  # the oldest comes first
            task = self._out(task_id)
            is_wanted = task.state is TaskState.SENT
            self._move(task, TaskState.QUARANTINED)
            if is_wanted:
                self._put_first(self._queue_again(task, _NO_SLOT))
        if quarantine.task_ids:
            self._quarantines.append(quarantine)
        if ended:
            self._free_quarantined(worker, self._last_task_id + 1)
        else:
            self._await_for_ever(worker, quarantine)
        if losses.suspect is None:
            return None
        suspect = self._out(losses.suspect)
        is_wanted = suspect.state is TaskState.SENT
        self._move(suspect, TaskState.DONE)
        if is_wanted and not ended:
            return dataclasses.replace(suspect, slot=_NO_SLOT)
        if is_wanted:
            return suspect
        if ended:
            self.free(suspect)
        return None

    def send_first(self, task: Task) -> None:
        """Queues a done task's request at the front, with the same slot."""
        self._put_first(self._queue_again(task, task.slot))

    def free(self, task: Task) -> None:
        """Frees the slot of a done task, if the task has a slot."""
        if task.slot != _NO_SLOT:
            self._slots.free(task.slot)

    def take_wanted(self) -> list[BatchRequest]:
        """Removes all queued and sent tasks, and returns their requests."""
        wanted = self._wanted()
        for task in wanted:
            self._close(task)
        return [task.request for task in wanted]

    def clear(self) -> None:
        """Removes all tasks, after the pool has ended or abandoned its workers.

        Slots that an abandoned worker may write to are not used again.
        """
        for quarantine in self._quarantines:
            if _ABANDONED in quarantine.awaited:
                for task_id in self._quarantined.keys() & quarantine.task_ids:
                    self._move(self._quarantined[task_id], TaskState.DONE)
        for tasks in self._tasks:
            for task in list(tasks.values()):
                self._close(task)
        self._quarantines.clear()

    # -- the parts of the above ---------------------------------------------

    def _wanted(self) -> list[Task]:
        """Returns all sent and queued tasks."""
        return [*self._sent.values(), *self._queued.values()]

    def _out(self, task_id: int) -> Task:
        return self._sent.get(task_id) or self._cancelled[task_id]

    def _close(self, task: Task) -> None:
        """Removes a task that no worker builds, and frees its slot."""
        self._move(task, TaskState.DONE)
        self.free(task)

    def _queue_again(self, task: Task, slot: int) -> Task:
        self._last_task_id += 1
        again = Task(task.request, slot, task.crashes, self._last_task_id)
        self._move(again, TaskState.QUEUED)
        return again

    def _put_first(self, task: Task) -> None:
        """Moves a queued task to the front, because its request is oldest."""
        self._queued.move_to_end(task.task_id, last=False)

    def _find_slot(self, task: Task) -> bool:
        """Assigns a free slot to a task; returns False if no slot is free."""
        slot = self._slots.take()
        if slot is not None:
            task.slot = slot
        elif not self.is_awaited:
            raise LoaderError(
                "No slot of shared memory is left. Batches of this dataset "
                "are held in too many places; copy those you keep."
            )
        return slot is not None

    def _await_for_ever(self, worker: int, latest: _Quarantine) -> None:
        """Permanently quarantines the slots that an abandoned worker could use.

        The answers of its replacement, of the same index, do not free them.
        """
        latest.awaited.add(worker)
        for quarantine in self._quarantines:
            if worker in quarantine.awaited:
                quarantine.awaited.remove(worker)
                quarantine.awaited.add(_ABANDONED)

    def _free_quarantined(self, worker: int, task_id: int) -> None:
        """Frees the slots of each quarantine that waited only for `worker`."""
        for quarantine in self._quarantines[:]:
            if task_id >= quarantine.since:
                quarantine.awaited.discard(worker)
            if quarantine.awaited:
                continue
            self._quarantines.remove(quarantine)
            for each in quarantine.task_ids:
                if each in self._quarantined:  # no late result was first
                    self._close(self._quarantined[each])
