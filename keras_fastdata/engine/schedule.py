"""Which batch comes when: a pure function of seed, epoch and length."""

from __future__ import annotations

import dataclasses
import functools

from keras_fastdata.building import seeding
from keras_fastdata.building.permutation import Permutation
from keras_fastdata.engine.sharding import Shard

_ALL = Shard()


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The order of one epoch.

    Attributes:
        total: Batches in the epoch, over all shards; `None` if it never ends.
        order: The batch index at each place of all, or `None` where the index
            is the place itself.
        shard: Which of those places are here.
    """

    total: int | None
    order: Permutation | None
    shard: Shard = _ALL

    @functools.cached_property
    def num_batches(self) -> int | None:
        """The batches of this shard in the epoch; `None` if it never ends."""
        return self.shard.length(self.total)

    def index_at(self, position: int) -> int | None:
        """The index of the batch at `position`, which counts from 0.

        Returns:
            `None`, if the epoch ends before.
        """
        if not self.holds(position):
            return None
        if self.shard.count > 1:
            position = self.shard.place(position, self.total)
        return position if self.order is None else self.order[position]

    def holds(self, position: int) -> bool:
        """Returns whether the epoch has a batch at `position`."""
        return self.num_batches is None or position < self.num_batches


def plan_epoch(
    num_batches: int | None,
    *,
    shuffle: bool,
    seed: int,
    epoch: int,
    shard: Shard = _ALL,
) -> Schedule:
    """Plans one epoch.

    Args:
        num_batches: Length of the epoch, or `None` for one without an end,
            which cannot be shuffled and counts up from 0.
        shuffle: Whether to draw a permutation rather than count. Beyond a
            million it takes neither time nor memory.
        seed: Base seed of the dataset.
        epoch: Number of the epoch, from 0.
        shard: The part of it that is planned.
    """
    if num_batches is None or not shuffle:
        return Schedule(num_batches, None, shard)
    stream = seeding.sequence(seed, seeding.ORDER, epoch)
    return Schedule(num_batches, Permutation(num_batches, stream), shard)
