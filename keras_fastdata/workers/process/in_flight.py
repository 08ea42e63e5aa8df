"""Which request is where, and in which slot, in a pool of worker processes.

A request travels under a task id, a new one each time it is sent. Until its
result is settled it is in exactly one of three states, and holds a slot:

    queued      waits here, because the task socket was full
    out         in the task socket, or in a worker's hands
    cancelled   out, but nobody wants the batch any more

A slot whose request went missing is in quarantine: some living worker may yet
write to it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping

from keras_fastdata.errors import LoaderError
from keras_fastdata.memory.arena import Arena
from keras_fastdata.workers.base import BatchRequest
from keras_fastdata.workers.process.recovery import losses_of


@dataclasses.dataclass(slots=True)
class Task:
    """A request on its way.

    Attributes:
        request: The engine's order.
        slot: Where its batch is to be built.
        crashes: Workers that have died over it.
    """

    request: BatchRequest
    slot: int
    crashes: int = 0


@dataclasses.dataclass
class _Quarantine:
    """Slots that are free once each of `awaited` has moved on.

    A worker builds one batch at a time: when it answers a request that was
    sent after `since`, it is done with whatever it had before. Or a late
    result tells whose a slot was.
    """

    slots: dict[int, int]  # by task id
    since: int
    awaited: set[int]


class InFlight:
    """Accounts for requests and slots; sends nothing itself.

    Args:
        arena: Has the slots.
        spare: Slots that no new request takes. They are for requests that are
            sent again while somebody may yet write to the slot they had.
    """

    def __init__(self, arena: Arena, spare: int = 0) -> None:
        self._arena = arena
        self._spare = spare
        self._last_task_id = 0
        self._tasks: dict[int, Task] = {}
        self._cancelled: dict[int, Task] = {}
        self._queued: collections.deque[int] = collections.deque()
        self._quarantines: list[_Quarantine] = []

    # -- on the way out -----------------------------------------------------

    def enter(self, request: BatchRequest) -> bool:
        """Queues a request, or returns False: there is no free slot."""
        slot = self._arena.take(self._spare)
        if slot is None:
            return False
        self._queue(Task(request, slot))
        return True

    def send(self, take: Callable[[int, Task], bool]) -> None:
        """Sends what is queued.

        Args:
            take: Given a task id and its request; returns whether it could
                be sent. If not, it is the first one the next time.
        """
        queued = self._queued
        while queued and take(queued[0], self._tasks[queued[0]]):
            queued.popleft()

    def requeue(self, task_ids: Iterable[int]) -> list[int]:
        """Books requests found in the task socket as not sent after all.

        Returns:
            Those of them that are still wanted.
        """
        found = []
        for task_id in task_ids:
            if task_id in self._tasks:
                found.append(task_id)
            else:
                self._arena.release(self._cancelled.pop(task_id).slot)
        self._queued.extendleft(reversed(found))
        return found

    @property
    def is_awaited(self) -> bool:
        """Whether any request is out, wanted or not."""
        return len(self._tasks) + len(self._cancelled) > len(self._queued)

    def is_out(self, request_ids: Collection[int]) -> bool:
        """Whether any request with these ids is unsettled."""
        return any(
            s.request.request_id in request_ids for s in self._tasks.values()
        )

    def cancel(self, request_ids: Collection[int]) -> None:
        """Gives up requests; call `requeue` with the socket's before."""
        gone = [
            w
            for w, s in self._tasks.items()
            if s.request.request_id in request_ids
        ]
        for task_id in gone:
            task = self._tasks.pop(task_id)
            if task_id in self._queued:
                self._queued.remove(task_id)
                self._arena.release(task.slot)
            else:
                self._cancelled[task_id] = task

    # -- on the way back ----------------------------------------------------

    def request_of(self, task_id: int) -> BatchRequest | None:
        """The request under this number, if it is out, wanted or not."""
        task = self._tasks.get(task_id) or self._cancelled.get(task_id)
        return task.request if task else None

    def oldest_unclaimed(self, heartbeat: Collection[int]) -> int | None:
        """The lowest task id that is out and that nobody has noted."""
        out = (w for w in self._tasks if w not in heartbeat)
        waiting = set(self._queued)
        return min((w for w in out if w not in waiting), default=None)

    def complete(
        self, task_id: int, worker: int
    ) -> tuple[Task | None, int | None]:
        """Closes the account of a request that `worker` has answered.

        Returns:
            The request, or `None` if it was cancelled, or given up for lost
            and sent again; and its slot, now the caller's.
        """
        if self._quarantines:
            self._release_quarantined(worker, task_id)
        task = self._tasks.pop(task_id, None)
        if task is not None:
            return task, task.slot
        for quarantine in self._quarantines:
            if task_id in quarantine.slots:
                return None, quarantine.slots.pop(task_id)
        cancelled = self._cancelled.pop(task_id, None)
        return None, cancelled.slot if cancelled else None

    def send_anew(self, task: Task) -> None:
        """Queues a settled request again, in another slot."""
        self._queue(dataclasses.replace(task, slot=self._take()))

    # -- when a worker has died ---------------------------------------------

    def recover(
        self,
        worker: int,
        queued: Collection[int],
        heartbeat: int,
        heartbeats: Mapping[int, int],
        *,
        ended: bool,
    ) -> Task | None:
        """Sends again what a lost worker took with it, but for one request.

        Args:
            worker: The lost one.
            queued: What `requeue` returned, after its death.
            heartbeat: Its last note.
            heartbeats: The notes of the others.
            ended: Whether it can write no more. One that was left behind may
                yet, so the slots it may have are not used again.

        Returns:
            The request it was building, for the caller to judge, together with
            its slot; `None` if it was building none that is wanted.
        """
        losses = losses_of(
            self._tasks.keys() - set(self._queued) | self._cancelled.keys(),
            queued,
            heartbeat,
            heartbeats,
        )
        quarantine = _Quarantine({}, self._last_task_id + 1, set(heartbeats))
        for task_id in losses.unclaimed:
            if task_id in self._cancelled:
                quarantine.slots[task_id] = self._cancelled.pop(task_id).slot
            else:
                task = self._tasks.pop(task_id)
                quarantine.slots[task_id] = task.slot
                task = dataclasses.replace(task, slot=self._take())
                self.send_first(task)
        if ended:
            self._release_quarantined(worker, self._last_task_id + 1)
        else:
            quarantine.awaited.add(worker)
        if quarantine.slots:
            self._quarantines.append(quarantine)
        suspect = losses.suspect
        if suspect in self._cancelled:
            cancelled = self._cancelled.pop(suspect)
            if ended:
                self._arena.release(cancelled.slot)
            return None
        if suspect is None:
            return None
        task = self._tasks.pop(suspect)
        return task if ended else dataclasses.replace(task, slot=self._take())

    def send_first(self, task: Task) -> None:
        """Queues a lost request before all others: it is the oldest."""
        self._queue(task)
        self._queued.rotate(1)

    def give_up(self) -> list[BatchRequest]:
        """Closes the accounts of all wanted requests, and returns those."""
        requests = []
        for task in self._tasks.values():
            self._arena.release(task.slot)
            requests.append(task.request)
        self._tasks.clear()
        self._queued.clear()
        return requests

    def clear(self) -> None:
        """Closes every account: no worker is left."""
        self.give_up()
        for cancelled in self._cancelled.values():
            self._arena.release(cancelled.slot)
        self._cancelled.clear()
        for quarantine in self._quarantines:
            for slot in quarantine.slots.values():
                self._arena.release(slot)
        self._quarantines.clear()

    # -- slots --------------------------------------------------------------

    def _queue(self, task: Task) -> None:
        self._last_task_id += 1
        self._tasks[self._last_task_id] = task
        self._queued.append(self._last_task_id)

    def _take(self) -> int:
        slot = self._arena.take()
        if slot is None:
            raise LoaderError(
                "No slot of shared memory is left. Batches of this dataset "
                "are held in too many places; copy those you keep."
            )
        return slot

    def _release_quarantined(self, worker: int, task_id: int) -> None:
        for quarantine in self._quarantines[:]:
            if task_id >= quarantine.since:
                quarantine.awaited.discard(worker)
            if not quarantine.awaited:
                self._quarantines.remove(quarantine)
                for slot in quarantine.slots.values():
                    self._arena.release(slot)
