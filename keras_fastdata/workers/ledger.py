"""The books of a set of worker processes: which ticket is where, in which slot.

A ticket travels under a wire number, a new one each time it is sent. Until its
result is settled it is in exactly one of three states, and holds a slot:

    backlog     waits here, because the task socket was full
    out         in the task socket, or in a worker's hands
    cancelled   out, but nobody wants the batch any more

A slot whose ticket went missing is in limbo: some living worker may yet write
to it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping

from keras_fastdata.errors import LoaderError
from keras_fastdata.memory.arena import Arena
from keras_fastdata.workers.base import Ticket
from keras_fastdata.workers.recovery import losses_of


@dataclasses.dataclass(slots=True)
class Sent:
    """A ticket on its way.

    Attributes:
        ticket: The engine's order.
        slot: Where its batch is to be built.
        strikes: Workers that have died over it.
    """

    ticket: Ticket
    slot: int
    strikes: int = 0


@dataclasses.dataclass
class _Limbo:
    """Slots that are free once each of `awaited` has moved on.

    A worker builds one batch at a time: when it answers a ticket that was
    sent after `mark`, it is done with whatever it had before. Or a late
    result tells whose a slot was.
    """

    slots: dict[int, int]  # by wire
    mark: int
    awaited: set[int]


class Ledger:
    """Accounts for tickets and slots; sends nothing itself.

    Args:
        arena: Has the slots.
        spare: Slots that no new ticket takes. They are for tickets that are
            sent again while somebody may yet write to the slot they had.
    """

    def __init__(self, arena: Arena, spare: int = 0) -> None:
        self._arena = arena
        self._spare = spare
        self._wire = 0
        self._sent: dict[int, Sent] = {}
        self._cancelled: dict[int, Sent] = {}
        self._backlog: collections.deque[int] = collections.deque()
        self._limbo: list[_Limbo] = []

    # -- on the way out -----------------------------------------------------

    def enter(self, ticket: Ticket) -> bool:
        """Queues a ticket, or returns False: there is no free slot."""
        slot = self._arena.take(self._spare)
        if slot is None:
            return False
        self._queue(Sent(ticket, slot))
        return True

    def send(self, take: Callable[[int, Sent], bool]) -> None:
        """Sends what is queued.

        Args:
            take: Given a wire number and its ticket; returns whether it could
                be sent. If not, it is the first one the next time.
        """
        backlog = self._backlog
        while backlog and take(backlog[0], self._sent[backlog[0]]):
            backlog.popleft()

    def take_back(self, wires: Iterable[int]) -> list[int]:
        """Books tickets found in the task socket as not sent after all.

        Returns:
            Those of them that are still wanted.
        """
        found = []
        for wire in wires:
            if wire in self._sent:
                found.append(wire)
            else:
                self._arena.put(self._cancelled.pop(wire).slot)
        self._backlog.extendleft(reversed(found))
        return found

    @property
    def is_awaited(self) -> bool:
        """Whether any ticket is out, wanted or not."""
        return len(self._sent) + len(self._cancelled) > len(self._backlog)

    def is_out(self, serials: Collection[int]) -> bool:
        """Whether any ticket with these serials is unsettled."""
        return any(s.ticket.serial in serials for s in self._sent.values())

    def cancel(self, serials: Collection[int]) -> None:
        """Gives up tickets; call `take_back` with the socket's before."""
        gone = [w for w, s in self._sent.items() if s.ticket.serial in serials]
        for wire in gone:
            sent = self._sent.pop(wire)
            if wire in self._backlog:
                self._backlog.remove(wire)
                self._arena.put(sent.slot)
            else:
                self._cancelled[wire] = sent

    # -- on the way back ----------------------------------------------------

    def ticket_of(self, wire: int) -> Ticket | None:
        """The ticket under this number, if it is out, wanted or not."""
        sent = self._sent.get(wire) or self._cancelled.get(wire)
        return sent.ticket if sent else None

    def oldest_unclaimed(self, noted: Collection[int]) -> int | None:
        """The lowest wire number that is out and that nobody has noted."""
        out = (w for w in self._sent if w not in noted)
        waiting = set(self._backlog)
        return min((w for w in out if w not in waiting), default=None)

    def settle(self, wire: int, worker: int) -> tuple[Sent | None, int | None]:
        """Closes the account of a ticket that `worker` has answered.

        Returns:
            The ticket, or `None` if it was cancelled, or given up for lost
            and sent again; and its slot, now the caller's.
        """
        if self._limbo:
            self._leave_limbo(worker, wire)
        sent = self._sent.pop(wire, None)
        if sent is not None:
            return sent, sent.slot
        for limbo in self._limbo:
            if wire in limbo.slots:
                return None, limbo.slots.pop(wire)
        cancelled = self._cancelled.pop(wire, None)
        return None, cancelled.slot if cancelled else None

    def send_anew(self, sent: Sent) -> None:
        """Queues a settled ticket again, in another slot."""
        self._queue(dataclasses.replace(sent, slot=self._take()))

    # -- when a worker has died ---------------------------------------------

    def recover(
        self,
        worker: int,
        queued: Collection[int],
        noted: int,
        noted_by_living: Mapping[int, int],
        *,
        ended: bool,
    ) -> Sent | None:
        """Sends again what a lost worker took with it, but for one ticket.

        Args:
            worker: The lost one.
            queued: What `take_back` returned, after its death.
            noted: Its last note.
            noted_by_living: The notes of the others.
            ended: Whether it can write no more. One that was left behind may
                yet, so the slots it may have are not used again.

        Returns:
            The ticket it was building, for the caller to judge, together with
            its slot; `None` if it was building none that is wanted.
        """
        losses = losses_of(
            self._sent.keys() - set(self._backlog) | self._cancelled.keys(),
            queued,
            noted,
            noted_by_living,
        )
        limbo = _Limbo({}, self._wire + 1, set(noted_by_living))
        for wire in losses.unclaimed:
            if wire in self._cancelled:
                limbo.slots[wire] = self._cancelled.pop(wire).slot
            else:
                sent = self._sent.pop(wire)
                limbo.slots[wire] = sent.slot
                sent = dataclasses.replace(sent, slot=self._take())
                self.send_first(sent)
        if ended:
            self._leave_limbo(worker, self._wire + 1)
        else:
            limbo.awaited.add(worker)
        if limbo.slots:
            self._limbo.append(limbo)
        suspect = losses.suspect
        if suspect in self._cancelled:
            cancelled = self._cancelled.pop(suspect)
            if ended:
                self._arena.put(cancelled.slot)
            return None
        if suspect is None:
            return None
        sent = self._sent.pop(suspect)
        return sent if ended else dataclasses.replace(sent, slot=self._take())

    def send_first(self, sent: Sent) -> None:
        """Queues a lost ticket before all others: it is the oldest."""
        self._queue(sent)
        self._backlog.rotate(1)

    def give_up(self) -> list[Ticket]:
        """Closes the accounts of all wanted tickets, and returns those."""
        tickets = []
        for sent in self._sent.values():
            self._arena.put(sent.slot)
            tickets.append(sent.ticket)
        self._sent.clear()
        self._backlog.clear()
        return tickets

    def clear(self) -> None:
        """Closes every account: no worker is left."""
        self.give_up()
        for cancelled in self._cancelled.values():
            self._arena.put(cancelled.slot)
        self._cancelled.clear()
        for limbo in self._limbo:
            for slot in limbo.slots.values():
                self._arena.put(slot)
        self._limbo.clear()

    # -- slots --------------------------------------------------------------

    def _queue(self, sent: Sent) -> None:
        self._wire += 1
        self._sent[self._wire] = sent
        self._backlog.append(self._wire)

    def _take(self) -> int:
        slot = self._arena.take()
        if slot is None:
            raise LoaderError(
                "No slot of shared memory is left. Batches of this dataset "
                "are held in too many places; copy those you keep."
            )
        return slot

    def _leave_limbo(self, worker: int, wire: int) -> None:
        for limbo in self._limbo[:]:
            if wire >= limbo.mark:
                limbo.awaited.discard(worker)
            if not limbo.awaited:
                self._limbo.remove(limbo)
                for slot in limbo.slots.values():
                    self._arena.put(slot)
