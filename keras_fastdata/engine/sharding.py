"""Divides batches among processes that train together.

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
from typing import Any

from keras_fastdata._modules import loaded
from keras_fastdata.errors import LoaderError


@dataclasses.dataclass(frozen=True)
class Shard:
    """The share of an epoch's batches that belongs to one process."""

    index: int = 0
    count: int = 1  # processes
    source: str = ""  # what says so; empty for one process

    def __str__(self) -> str:
        if self.count == 1:
            return ""
        return (
            f"batch {self.index + 1} of each {self.count} that follow one "
            f"another ({self.source})"
        )

    def length(self, num_batches: int | None) -> int | None:
        """Returns how many of `num_batches` batches this shard has."""
        return None if num_batches is None else -(-num_batches // self.count)

    def place(self, position: int, num_batches: int | None) -> int:
        """Converts a position in this shard to a place in the epoch's order."""
        place = position * self.count + self.index
        return place if num_batches is None else place % num_batches

    def position(self, place: int) -> int:
        """Returns how many of an epoch's first `place` batches this shard has.

        Raises:
            ValueError: Other shards have more, or fewer, of them.
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
    """Returns the shard that the argument `shard` specifies.

    Raises:
        LoaderError: The dataset cannot be sharded.
    """
    if setting is None:
        return Shard()
    if setting == "auto":
        finders = _of_keras, _of_tensorflow, _of_jax, _of_torch
        found = (find() for find in finders)
        shard = next((one for one in found if one is not None), Shard())
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
    """Returns whether a batch can be built without the batches before it.

    A class whose batches cannot registers its own function.
    """
    return True


def _of_keras() -> Shard | None:
    """Returns this process's shard under `keras.distribution`, if in use."""
    keras = loaded("keras")
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
    """Returns this process's shard under the `tf.distribute` strategy in scope.

    A strategy of one process splits each batch itself.
    """
    tf = loaded("tensorflow")
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
    jax = loaded("jax")
    library = getattr(jax, "distributed", None)
    is_initialized = getattr(library, "is_initialized", lambda: False)
    if jax is None or not is_initialized() or jax.process_count() < 2:
        return None
    return Shard(jax.process_index(), jax.process_count(), "jax.distributed")


def _of_torch() -> Shard | None:
    library = loaded("torch.distributed")
    if library is None or not library.is_available():
        return None
    if not library.is_initialized() or library.get_world_size() < 2:
        return None
    rank, count = library.get_rank(), library.get_world_size()
    return Shard(rank, count, "torch.distributed")
