"""Keeps the batches that are counted as delivered until consumers have them.

A signal handler may raise an error while `next` returns. The batch is then
requeued, and the next call of `next` delivers it.

    counted --acknowledge--> gone
    counted --requeue--> requeued --redeliver--> counted
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from typing import Any


@dataclasses.dataclass(slots=True, eq=False)  # frozen, it is made slower
class DeliveredBatch:
    """A batch that is counted, but that its consumer may not have yet."""

    batch: Any
    is_from_cache: bool
    position: int
    delivered: int  # how many batches the epoch had delivered before


class Acknowledgements:
    """Tracks the deliveries of one epoch until consumers have the batches.

    `acknowledge` and `requeue` need no lock: an error that interrupts a wait
    for a lock would lose the batch.
    """

    def __init__(self) -> None:
        self._counted: dict[
            int, DeliveredBatch
        ] = {}  # by the consumer's thread
        self._requeued: collections.deque[DeliveredBatch] = collections.deque()

    @property
    def has_requeued(self) -> bool:
        """Whether a batch is requeued."""
        return bool(self._requeued)

    def requeued_before(self, position: int) -> int:
        """Returns how many requeued batches have an earlier position."""
        return sum(one.position < position for one in list(self._requeued))

    def count(self, delivery: DeliveredBatch) -> None:
        """Notes that a batch is counted for the calling thread."""
        self._counted[threading.get_ident()] = delivery

    @property
    def latest(self) -> DeliveredBatch | None:
        """The delivery that the calling thread has not acknowledged."""
        return self._counted.get(threading.get_ident())

    def acknowledge(self) -> None:
        """Notes that the calling thread has its batch."""
        self._counted.pop(threading.get_ident(), None)

    def requeue(self, delivery: DeliveredBatch) -> None:
        """Stores a batch that the calling thread has not got."""
        # An error may have come before a former call's last step.
        if not any(one is delivery for one in self._requeued):
            self._requeued.append(delivery)
        self.acknowledge()

    def redeliver(self) -> DeliveredBatch:
        """Returns the oldest requeued batch, for the calling thread."""
        delivery = self._requeued[0]
        self.count(delivery)
        self._requeued.popleft()
        return delivery

    def clear(self) -> None:
        """Drops the requeued batches, because the epoch starts again."""
        self._requeued.clear()
