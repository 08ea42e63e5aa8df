"""Which batches are this process's, where several train together.

Of `count` processes that train in step, step k is at places `k * count` to
`k * count + count - 1` of the epoch's order; process `index` takes the one that
far from the first. So the order is the same for any number of processes. Where
the epoch has no whole number of such steps, the last one is filled up from the
beginning of the order: all have as many batches, none is left out, and up to
`count - 1` come twice.

Nothing is imported to find out; what has not been loaded distributes nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any

from keras_fastdata.errors import LoaderError


@dataclasses.dataclass(frozen=True)
class Shard:
    """A process's part of the batches.

    Attributes:
        index: Its number, from 0.
        count: How many processes there are.
        source: What says so; empty if there is but one.
    """

    index: int = 0
    count: int = 1
    source: str = ""

    def __str__(self) -> str:
        if self.count == 1:
            return ""
        return (
            f"batch {self.index + 1} of each {self.count} that follow one "
            f"another ({self.source})"
        )

    def length(self, num_batches: int | None) -> int | None:
        """Returns the number of batches of this shard, of those in all."""
        return None if num_batches is None else -(-num_batches // self.count)

    def place(self, position: int, num_batches: int | None) -> int:
        """Returns the place in the whole order of this shard's `position`."""
        place = position * self.count + self.index
        return place if num_batches is None else place % num_batches

    def position(self, place: int) -> int:
        """Its next position, where `place` batches have gone before in all.

        Raises:
            ValueError: That is in the middle of a step.
        """
        position, rest = divmod(place, self.count)
        if rest:
            raise ValueError(
                f"The state is {place} batches into its epoch, over all "
                f"processes, and {self.count} of them train now: that is no "
                "whole number of steps. Resume with a number of processes "
                f"that divides {place}, or at the end of an epoch."
            )
        return position


def shard_of(setting: Any, dataset: Any) -> Shard:
    """What the argument `shard` comes to now.

    Args:
        setting: The argument.
        dataset: The dataset.

    Raises:
        LoaderError: It is to be sharded, and cannot be.
    """
    if setting is None:
        return Shard()
    if setting == "auto":
        shard = _detected()
    else:
        index, count = setting
        shard = Shard(index, count, "shard=")
    if shard.count > 1 and not has_random_access(dataset):
        raise LoaderError(
            f"A {type(dataset).__name__} has its batches one after the other; "
            f"it cannot have {shard}. Pass `shard=None`, and give the "
            "generators of each process items of their own."
        )
    return shard


@functools.singledispatch
def has_random_access(dataset: Any) -> bool:
    """Whether any batch can be had without those before it.

    A class of which that is not so registers a function of its own.
    """
    return True


def _detected() -> Shard:
    for find in (_of_keras, _of_tensorflow, _of_jax, _of_torch):
        shard = find()
        if shard is not None:
            return shard
    return Shard()


def _of_keras() -> Shard | None:
    """Returns the shard by `keras.distribution`, by model replica."""
    keras = sys.modules.get("keras")
    library = getattr(keras, "distribution", None)
    if library is None:
        return None
    found = library.distribution()
    processes = getattr(found, "num_processes", 1)
    if found is None or processes < 2:
        return None
    count = min(found.num_model_replicas, processes)
    name = f"keras.distribution.{type(found).__name__}"
    return Shard(found.data_shard_id, count, name)


def _of_tensorflow() -> Shard | None:
    """The workers of a strategy that is in scope.

    A strategy of one process has no part in this: it splits each batch.
    """
    tf = sys.modules.get("tensorflow")
    distribute = getattr(tf, "distribute", None)
    if distribute is None or not distribute.has_strategy():
        return None
    resolver = distribute.get_strategy().cluster_resolver
    if resolver is None:
        return None
    tasks = resolver.cluster_spec().as_dict()
    chiefs, workers = len(tasks.get("chief", ())), len(tasks.get("worker", ()))
    if chiefs + workers < 2:
        return None
    first = 0 if resolver.task_type == "chief" else chiefs
    name = "tf.distribute"
    return Shard(first + resolver.task_id, chiefs + workers, name)


def _of_jax() -> Shard | None:
    jax = sys.modules.get("jax")
    is_initialized = getattr(
        getattr(jax, "distributed", None), "is_initialized", None
    )
    if jax is None or is_initialized is None or not is_initialized():
        return None
    if jax.process_count() < 2:
        return None
    return Shard(jax.process_index(), jax.process_count(), "jax.distributed")


def _of_torch() -> Shard | None:
    library = sys.modules.get("torch.distributed")
    if library is None or not library.is_available():
        return None
    if not library.is_initialized() or library.get_world_size() < 2:
        return None
    return Shard(
        library.get_rank(), library.get_world_size(), "torch.distributed"
    )
