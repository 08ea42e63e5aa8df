"""Which batch comes when: a pure function of seed, epoch and length."""

from __future__ import annotations

import dataclasses

from keras_fastdata.engine import seeding
from keras_fastdata.engine.permutation import Permutation


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The order of one epoch.

    Attributes:
        num_batches: Batches in the epoch; `None` if it never ends.
        order: The batch index at each position, or `None` where the index is
            the position itself.
    """

    num_batches: int | None
    order: Permutation | None

    def index_at(self, position: int) -> int:
        """The index of the batch at `position`, which counts from 0."""
        return position if self.order is None else self.order[position]

    def holds(self, position: int) -> bool:
        """Whether the epoch has a batch at `position`."""
        return self.num_batches is None or position < self.num_batches


def plan_epoch(
    num_batches: int | None, *, shuffle: bool, seed: int, epoch: int
) -> Schedule:
    """Plans one epoch.

    Args:
        num_batches: Length of the epoch, or `None` for one without an end,
            which cannot be shuffled and counts up from 0.
        shuffle: Whether to draw a permutation rather than count. Beyond a
            million it takes neither time nor memory.
        seed: Base seed of the dataset.
        epoch: Number of the epoch, from 0.
    """
    if num_batches is None or not shuffle:
        return Schedule(num_batches, None)
    stream = seeding.sequence(seed, seeding.ORDER, epoch)
    return Schedule(num_batches, Permutation(num_batches, stream))
