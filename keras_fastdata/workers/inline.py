"""`workers=0`: batches are built in the caller, when they are asked for.

`wait` is where they are built, so that the engine holds no lock meanwhile.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Iterable

from keras_fastdata.health.staff import Staff
from keras_fastdata.health.timing import Stopwatch
from keras_fastdata.memory import ownership
from keras_fastdata.workers.base import Builds, Built, Ticket, where
from keras_fastdata.workers.failures import note

_CLOSE_TIMEOUT_S = 5.0  # what a batch that another thread builds gets to end


class InlineWorkers:
    """Builds in the calling thread.

    Args:
        builder: What builds a batch.
        dataset: The dataset's class name, for messages.
    """

    def __init__(self, builder: Builds, dataset: str) -> None:
        self._builder = builder
        self._dataset = dataset
        self._tickets: collections.deque[Ticket] = collections.deque()
        self._broken_off: set[int] = set()  # serials; for those who ask again
        self._built: tuple[Ticket, Built] | None = None
        self._lock = threading.RLock()  # held by the thread that builds
        self._builds_in = 0  # that one
        self._started = self._closed = False
        self._stopwatch = Stopwatch()

    def submit(self, ticket: Ticket) -> bool:
        self._tickets.append(ticket)
        return True

    def wait(self, timeout_s: float) -> None:
        """Builds the next batch. One that is broken off is begun again."""
        with self._lock:
            if self._built is not None:
                return
            ticket = self._next()
            if ticket is None:
                return  # none was asked for, or a signal handler has closed
            outer = self._builds_in
            self._builds_in = threading.get_ident()
            try:
                self._built = ticket, self._build(ticket)
            except BaseException:
                self._broken_off.add(ticket.serial)
                raise
            finally:
                self._builds_in = outer
                if self._closed:
                    self._stop()

    def _next(self) -> Ticket | None:
        """The ticket to build: one that was broken off comes last.

        Whoever had asked for that one may never come back.
        """
        tickets = list(self._tickets)
        for ticket in tickets:
            if ticket.serial not in self._broken_off:
                return ticket
        return tickets[0] if tickets else None

    def collect(self) -> list[Built]:
        if self._built is None:
            return []
        (ticket, built), self._built = self._built, None
        if ticket not in self._tickets:
            return []  # it was cancelled meanwhile
        self._tickets.remove(ticket)
        self._broken_off.discard(ticket.serial)
        return [built]

    def cancel(self, serials: Iterable[int]) -> None:
        gone = set(serials)
        kept = (t for t in self._tickets if t.serial not in gone)
        self._tickets = collections.deque(kept)
        self._broken_off -= gone

    def _build(self, ticket: Ticket) -> Built:
        if not self._started:
            self._builder.start(0)
            self._started = True
        self._stopwatch.start(ticket.interval_s, ticket.epoch)
        try:
            batch = ownership.take(
                [self._builder.build(ticket.epoch, ticket.index, 0)]
            )
            timing = self._stopwatch.stop()
            return Built(ticket.serial, 0, batch, timing=timing)
        except Exception as error:
            note(error, where(self._dataset, ticket, "the calling thread"))
            return Built(ticket.serial, 0, error=error, by_dataset=True)

    def pause(self) -> None:
        """Nothing to do: nothing is built while the caller does not wait."""

    def resume(self) -> None:
        """Nothing to do."""

    @property
    def busy(self) -> bool:
        return False

    def change(self) -> None:
        """The next batch is built from the dataset itself."""
        self._builder.change()

    def expect(self, ahead: int) -> None:
        """Nothing to do: batches take no shared memory."""

    def begin_epoch(self) -> None:
        """Nothing to do: there is no worker to restart."""

    def staff(self) -> Staff:
        return Staff("inline", 0)

    def close(self) -> None:
        """Ends it; where a thread builds, that is, once it has.

        A thread that builds may be this one: a signal handler interrupts it.
        """
        self._closed = True
        self._tickets.clear()
        if self._builds_in != threading.get_ident() and self._lock.acquire(
            timeout=_CLOSE_TIMEOUT_S
        ):
            try:
                self._stop()
            finally:
                self._lock.release()

    def _stop(self) -> None:
        self._stopwatch.close()
        if self._started:
            self._started = False
            # A dataset that has been collected has nothing left to stop.
            with contextlib.suppress(ReferenceError):
                self._builder.stop(0)
