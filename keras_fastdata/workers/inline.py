"""`workers=0`: batches are built in the caller, when they are asked for."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable

from keras_fastdata.health.staff import Staff
from keras_fastdata.health.timing import Stopwatch
from keras_fastdata.workers.base import Builds, Built, Ticket, where
from keras_fastdata.workers.failures import note


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
        self._started = False
        self._stopwatch = Stopwatch()

    def submit(self, ticket: Ticket) -> bool:
        self._tickets.append(ticket)
        return True

    def wait(self, timeout_s: float) -> None:
        """Nothing to wait for: `collect` builds."""

    def collect(self) -> Iterable[Built]:
        if not self._tickets:
            return []
        ticket = self._tickets.popleft()
        if not self._started:
            self._builder.start(0)
            self._started = True
        self._stopwatch.start(ticket.interval_s, ticket.epoch)
        try:
            batch = self._builder.build(ticket.epoch, ticket.index, 0)
            timing = self._stopwatch.stop()
            return [Built(ticket.serial, 0, batch, timing=timing)]
        except Exception as error:
            note(error, where(self._dataset, ticket, "the calling thread"))
            return [Built(ticket.serial, 0, error=error, by_dataset=True)]

    def cancel(self, serials: Iterable[int]) -> None:
        gone = set(serials)
        kept = (t for t in self._tickets if t.serial not in gone)
        self._tickets = collections.deque(kept)

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
        self._stopwatch.close()
        self._tickets.clear()
        if self._started:
            self._started = False
            # A dataset that has been collected has nothing left to stop.
            with contextlib.suppress(ReferenceError):
                self._builder.stop(0)
