"""Computes the order of an epoch from seed, epoch number and length."""

from __future__ import annotations

import dataclasses
import functools

from keras_fastdata.building import seeding
from keras_fastdata.building.permutation import Permutation
from keras_fastdata.engine.sharding import Shard

_ALL = Shard()


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The order of the batches of one epoch in one shard."""

    total: int | None  # batches, over all shards; `None` if it never ends
    order: Permutation | None  # of all batches; `None`: by index
    shard: Shard = _ALL

    @functools.cached_property
    def num_batches(self) -> int | None:
        """The number of batches in this shard; `None` for endless data."""
        return self.shard.length(self.total)

    def index_at(self, position: int) -> int | None:
        """Returns the batch index at `position`; `None` after the end."""
        if not self.holds(position):
            return None
        if self.shard.count > 1:
            position = self.shard.place(position, self.total)
        return position if self.order is None else self.order[position]

    def by_index(self) -> Schedule:
        """Returns an unshuffled schedule of the same length, from index 0."""
        return Schedule(self.num_batches, None)

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
    """Returns an epoch's order in a shard; endless epochs are not shuffled."""
    if num_batches is None or not shuffle:
        return Schedule(num_batches, None, shard)
    stream = seeding.sequence(seed, seeding.ORDER, epoch)
    return Schedule(num_batches, Permutation(num_batches, stream), shard)
