"""`GeneratorDataset` runs generators in workers, in a fixed order.

    GeneratorDataset          in the training process: which shard is next?
        GeneratorShards       one for each worker
            generator         one for each shard

Shards take turns, and a shard that has ended is left out of later rounds.
With n workers, worker k runs the shards k, k + n, k + 2n ... Within a worker
these take turns in the same order, so that a worker needs no message about
which shard is next.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from keras_fastdata import _process_role
from keras_fastdata._dataset_internals import (
    answer,
    internals_of,
    loader_of,
    make_twin,
    state_dict_of,
    twin_of,
    version_of,
    worker_limit,
    workers_within,
)
from keras_fastdata._validation import (
    arguments_of,
    integer,
    optional_integer,
    unknown_arguments,
)
from keras_fastdata.building import build_context, seeding
from keras_fastdata.building.global_rng import preserved_globals
from keras_fastdata.building.held_generators import seeds_its_own
from keras_fastdata.building.interface import set_name
from keras_fastdata.dataset import FastPyDataset
from keras_fastdata.datasets.collate import Mask, Padded, Padding
from keras_fastdata.datasets.columns import ColumnChoice
from keras_fastdata.datasets.generator_shards import (
    GeneratorShards,
    Spec,
)
from keras_fastdata.datasets.generator_source import GeneratorSource
from keras_fastdata.datasets.generator_turns import Place, Turns, TurnState
from keras_fastdata.datasets.generator_workers import GeneratorWorkers
from keras_fastdata.datasets.order import GENERATOR_KEY
from keras_fastdata.engine.pool_handle import ForkSafeLock
from keras_fastdata.engine.sharding import has_random_access
from keras_fastdata.engine.state_dict import State
from keras_fastdata.errors import EndOfData, LoaderError
from keras_fastdata.metrics.recorder import WorkersWithin
from keras_fastdata.metrics.worker_kinds import WorkerLimit

# Arguments of `FastPyDataset` that have no meaning here.
_REFUSED = ("shuffle", "cache", "cache_bytes", "cache_version", "on_error")

_log = logging.getLogger("keras_fastdata")


class GeneratorDataset(FastPyDataset):
    """Builds batches from the items of Python generators, or of an iterable.

    Each item comes once, with several workers too.

    Each epoch calls `factory` in a worker to make a generator. For more than
    one worker, a generator must yield only its share of the data:
    `factory(shard_index, num_shards)`. Shards take turns, so that the order
    of batches depends on `num_shards` alone.

    `factory` may also have these parameters, which are passed by name:

    - `rng`, a `np.random.Generator` that depends on seed, epoch and shard.
      `np.random`, `random` and torch's default generator are also seeded
      before every batch, except in threads.
    - `start`, the items of its shard that the generator shall skip. It is used
      when a worker with one shard died, and when training is resumed with
      `num_shards=1`. Else a new generator yields all items again, and those
      already delivered are dropped; for `batch_timeout` this counts as one
      batch.

    Args:
        factory: A function that returns a generator. Or an iterable that
            serves any number of passes: a Hugging Face `IterableDataset`, a
            torch `IterableDataset`, a `tf.data.Dataset`, or another. The
            first two can be split among workers: by
            `split_dataset_by_node`, and by `get_worker_info()`. All others
            need `workers` 0 or 1. With `workers` 0, or 1 in a thread, it may
            be an iterator, which serves one pass over its items.
        batch_size: Items in a batch, at least 1, stacked as samples are in
            `SampleDataset`. `None`: each item is a batch. Defaults to `None`.
        columns: As in `SampleDataset`, where items are dicts.
        label: As in `SampleDataset`, where items are dicts.
        num_shards: Number of generators, at least 1. `None`: one for each
            worker.
        num_batches: Batches in an epoch, at least 1. `None`: all of them; if
            the data has no end, `fit` then needs `steps_per_epoch`.
        restart: Whether every epoch makes new generators. `False`: an epoch
            goes on where the one before ended, and new generators are made
            when the data ends; this needs `num_batches`. After an interrupt or
            `close`, new generators yield all items again, and those already
            delivered are dropped; after an exception of a generator, the next
            epoch begins anew. `None`: `True`, but `False` for an iterator.
        drop_remainder: With `batch_size`: whether to leave out a smaller last
            batch of every shard. Defaults to `False`.
        pad_to: As in `SampleDataset`.
        pad_value: As in `SampleDataset`.
        truncate: As in `SampleDataset`.
        pad_to_multiple_of: As in `SampleDataset`.
        mask: As in `SampleDataset`.
        workers: Where generators run. 0: in the caller. n >= 1: ahead of
            time, in n threads, or n processes with `use_multiprocessing=True`.
            There are never more workers than shards. Defaults to 1.
        seed: As in `FastPyDataset`.
        max_queue_size: Batches in progress or ready, in total, but at least
            one for each worker; 0: no limit. Defaults to 10.
        **kwargs: The other arguments of `FastPyDataset`, for the workers.

    Raises:
        TypeError: `factory` has other required parameters, or an argument is
            unknown or of the wrong type.
        ValueError: `factory` cannot split its data among several workers, or
            an argument is out of range.

    Fetching batches raises `LoaderError` if new generators do not repeat the
    batches of lost ones, and `WorkerDiedError` if workers keep dying. An
    exception of a generator ends the epoch.

    Example:

    >>> from keras_fastdata import GeneratorDataset
    >>> def numbers(shard_index, num_shards):
    ...     yield from range(shard_index, 10, num_shards)
    >>> with GeneratorDataset(numbers, batch_size=3, workers=2) as dataset:
    ...     [batch.tolist() for batch in dataset]
    [[0, 2, 4], [1, 3, 5], [6, 8], [7, 9]]
    """

    def __init__(
        self,
        factory: Callable[..., Any] | Iterable[Any],
        batch_size: int | None = None,
        *,
        columns: str | Sequence[str] | None = None,
        label: str | Sequence[str] | None = None,
        num_shards: int | None = None,
        num_batches: int | None = None,
        restart: bool | None = None,
        drop_remainder: bool = False,
        pad_to: Padding = None,
        pad_value: float = 0,
        truncate: bool | int = False,
        pad_to_multiple_of: int | tuple[int | None, ...] | None = None,
        mask: Mask | None = None,
        workers: int = 1,
        seed: int | None = None,
        max_queue_size: int = 10,
        **kwargs: Any,
    ) -> None:
        _check_kwargs(type(self), workers, kwargs)
        super().__init__(
            workers=0,
            shuffle=False,
            seed=seed,
            max_queue_size=max_queue_size,
            **kwargs,
        )
        workers = integer("workers", workers, least=0)
        batch_size = optional_integer("batch_size", batch_size, least=1)
        num_batches = optional_integer("num_batches", num_batches, least=1)
        source = GeneratorSource.of(factory)
        asked = optional_integer("num_shards", num_shards, least=1)
        limit, num_shards = source.limit(asked), asked or max(1, workers)
        source.check(num_shards, kwargs.get("use_multiprocessing", False))
        restarts = source.restarts(restart, num_batches)
        count = min(max(1, workers), num_shards)
        spec = Spec(
            source,
            num_shards,
            batch_size,
            bool(drop_remainder),
            Padded(pad_to, pad_value, truncate, pad_to_multiple_of, mask),
            ColumnChoice.of(columns, label),
            repeats=not restarts and not source.is_iterator,
        )
        shards = _shards(spec, count, min(1, workers), max_queue_size, kwargs)
        for each in shards:
            set_name(each, type(self).__name__)  # for errors
        self._fastdata_plan = _Plan(
            restarts, num_shards, num_batches, shards, workers and count, limit
        )

    @property  # type: ignore[misc]
    def workers(self) -> int:
        """The number of workers, which cannot be changed."""
        return self._fastdata_plan.workers

    @property  # type: ignore[misc]
    def use_multiprocessing(self) -> bool:
        """Whether workers are processes; this cannot be changed."""
        return internals_of(self).settings.use_multiprocessing

    @property  # type: ignore[misc]
    def max_queue_size(self) -> int:
        """The maximum number of queued batches, which cannot be changed."""
        return internals_of(self).settings.max_queue_size

    @property
    def num_batches(self) -> int | None:
        """The number of batches in an epoch, or `None` for all of the data."""
        if not _process_role.is_worker():
            from keras_fastdata import keras_bridge

            if keras_bridge.is_asked_whether_to_shuffle():
                return 0  # Keras then does not warn of its default
        return self._fastdata_plan.num_batches

    def __getitem__(self, index: int) -> Any:
        """Returns batch `index` of the epoch.

        With `restart=True`, an index out of sequence starts a new pass. An
        epoch that goes on then starts another one, and replays it up to its
        place: so ask rarely. With `restart=False`, the generators go on.
        """
        plan, context = self._fastdata_plan, build_context.current_context()
        # In the order in which a build takes the two.
        is_safe = context is not None or plan.workers
        held = nullcontext() if is_safe else preserved_globals()
        is_epoch = context is not None and context.dataset is self
        with held, plan.lock.own():
            while True:
                # A loaded state may have another seed.
                place = (answer(self, "seed"), answer(self, "epoch")), index
                try:
                    return _batch_at(self, plan, place, is_epoch)
                except _OtherPassError:
                    continue

    def close(self) -> None:
        """Ends the workers, and waits until they have ended."""
        self._fastdata_plan.end_pass()
        for shards in self._fastdata_plan.shards:
            shards.close()
        super().close()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_fastdata_plan": copy.copy(self._fastdata_plan)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores a position, by running new generators up to this position.

        The batches before the position are dropped. With `num_shards=1`, a
        factory that has a parameter `start` is told to skip them.
        """
        name = type(self).__name__
        rest, checksum = state_dict, None
        if isinstance(state_dict, Mapping):
            rest = dict(state_dict)
            checksum = rest.pop("checksum", None)
        state = State.from_dict(rest, name, also=["num_shards"])
        rest, plan = dict(rest), self._fastdata_plan
        shards, mine = rest.pop("num_shards"), plan.num_shards
        if shards != mine:
            raise ValueError(
                f"The state is of {shards} shards, and this {name} has "
                f"{mine}. Pass `num_shards={shards}`, with any number of "
                "workers."
            )
        super().load_state_dict(rest)
        place = (state.seed, state.epoch), state.position
        known = checksum is not None and state.position > 0
        plan.resumed = (place, checksum) if known else None


class _OtherPassError(Exception):
    """Another pass has begun, in a signal handler, or `close` was called."""


@dataclasses.dataclass(eq=False)
class _Plan:
    """The configuration of a `GeneratorDataset`, and its current pass."""

    _fastdata_passing = (
        *("turns", "ended", "measured", "resumed", "version", "lock"),
    )

    restarts: bool  # whether each epoch makes new generators
    num_shards: int
    num_batches: int | None  # of an epoch; `None`: all of them
    shards: list[GeneratorShards]  # one object for each worker
    workers: int  # 0 if the caller builds
    limit: WorkerLimit  # which workers the source of the items can use
    turns: Turns | None = None  # the present pass over the shards
    # With `restart=False`, the pass that `close`, an interrupt or an exception
    # has ended.
    ended: Turns | None = None
    # The workers, once `fit` has had them.
    measured: GeneratorWorkers | None = None
    # The place of a loaded state, and the checksum of the batches before.
    resumed: tuple[Place, Any] | None = None
    # Of the dataset, as the generators of the present pass were made, or as
    # `check_seen` was called last; and whether that has logged its warning.
    version: object = None
    has_warned: bool = False
    # Held while a batch is taken: each call may begin a pass of its own.
    lock: ForkSafeLock = dataclasses.field(default_factory=ForkSafeLock)

    def end_pass(self) -> None:
        """Ends the present pass, whose generators are lost."""
        if not self.restarts:
            self.ended = self.turns or self.ended
        self.turns = None

    def lost_before(self, place: Place) -> Turns | None:
        """Returns the pass that goes on at `place`, with new generators.

        A pass that an exception of a generator has ended goes on only in the
        same epoch, unless its source is an iterator.
        """
        if (ended := self.ended) is None or self.is_iterator:
            return ended
        has_failed = ended.state is TurnState.FAILED
        is_in_next_epoch = place[1] == 0 and ended.place != place
        return None if has_failed and is_in_next_epoch else ended

    def goes_on_at(self, place: Place) -> bool:
        """Returns whether the batch at `place` is of the present pass."""
        if (turns := self.turns) is None or self.is_iterator:
            return turns is not None
        is_next = turns.place == place or not self.restarts
        return turns.state is TurnState.BETWEEN and is_next

    @property
    def is_iterator(self) -> bool:
        """Whether the items come from the user's own iterator."""
        return self.shards[0].spec.source.is_iterator

    def check_resumed(self, name: str, place: Place) -> None:
        """Warns if the present pass is resumed after batches of other items."""
        if self.resumed is None or self.turns is None:
            return
        known, checksum = self.resumed
        if known == place and self.turns.checksum not in (None, checksum):
            _log.warning(
                "%s is resumed at batch %d of epoch %d, and its generators "
                "have not given the same %d batches before that one as when "
                "the state was saved. So items of this epoch may be missing, "
                "or come twice. Let the items depend on nothing random but the "
                "parameter `rng`; or add a parameter `start` to the factory.",
                *(name, place[1], place[0][1], place[1]),
            )
        self.resumed = None

    def check_seen(self, dataset: FastPyDataset) -> None:
        """Warns once of a change that running generators do not see."""
        before, self.version = self.version, version_of(dataset)
        if before is self.version or self.has_warned:
            return
        factories = (loader_of(each).factory for each in self.shards)
        changes = (factory.find_unsent_change() for factory in factories)
        if change := next(filter(None, changes), ""):
            self.has_warned = True
            if change.partition(".")[0] == "self":  # of an object of ours
                change = change.rpartition(".")[2].removeprefix("self")
            _log.warning(
                "The generators of %s run in worker processes, and do not see "
                "that the program has changed %s since they began. With "
                "`num_batches=` and `restart=True`, each epoch makes new "
                "generators. Or use `workers=0`.",
                type(dataset).__name__,
                f"`{change}`" if change else "the dataset",
            )

    def __getstate__(self) -> dict[str, Any]:
        passing = self._fastdata_passing
        return {k: v for k, v in vars(self).items() if k not in passing}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=ForkSafeLock())


@has_random_access.register
def _(dataset: GeneratorDataset) -> bool:
    return False


@seeds_its_own.register
def _(dataset: GeneratorDataset) -> bool:
    return True


@twin_of.register
def _(dataset: GeneratorDataset) -> Any:
    plan = dataset._fastdata_plan
    if plan.is_iterator:
        raise LoaderError(
            f"{type(dataset).__name__} was made with an iterator, whose items "
            "come once: what is shown would be missing in training. Pass a "
            "function that makes the iterator."
        )
    inline: dict[str, Any] = {"workers": 0, "use_multiprocessing": False}
    inline |= {"executor": "local", "ray_options": None}
    twin = make_twin(dataset, **inline)
    shards = [make_twin(each, **inline) for each in plan.shards]
    for each in shards:
        vars(each).pop("_running", None)  # the generators of the original
    # A copy has no pass, and a lock of its own.
    twin._fastdata_plan = dataclasses.replace(
        copy.copy(plan), shards=shards, workers=0
    )
    return twin


@workers_within.register
def _(dataset: GeneratorDataset) -> WorkersWithin | None:
    plan = dataset._fastdata_plan
    if not plan.workers:
        return None
    if plan.measured is None:
        plan.measured = GeneratorWorkers(dataset, plan.shards)
    return plan.measured


@worker_limit.register
def _(dataset: GeneratorDataset) -> WorkerLimit:
    return dataset._fastdata_plan.limit


@state_dict_of.register
def _(dataset: GeneratorDataset, state: State) -> dict[str, Any]:
    plan = dataset._fastdata_plan
    if not plan.restarts:
        raise LoaderError(
            f"{type(dataset).__name__} goes on from epoch to epoch, so that "
            "the number of a batch does not give the position of its "
            "generators. With `restart=True` each epoch makes new generators, "
            "and can be resumed."
        )
    known = {**state.as_dict(), "num_shards": plan.num_shards}
    place = (state.seed, state.epoch), state.position
    checksum = plan.turns.checksums.get(place) if plan.turns else None
    return known if checksum is None else {**known, "checksum": checksum}


def _batch_at(
    dataset: GeneratorDataset, plan: _Plan, place: Place, is_epoch: bool
) -> Any:
    """Returns the batch at `place`, from the present pass or a new one.

    `is_epoch` tells whether an epoch of the dataset itself asks for it.
    """
    turns, (epoch, index) = plan.turns or plan.lost_before(place), place
    if turns is not None:
        if is_epoch and not _process_role.is_worker():
            done = loader_of(dataset).checkpoint.count_delivered
            turns.move_undelivered(place, done)
        if (known := turns.take_again(place)) is not None:
            return known.batch
    if plan.goes_on_at(place):
        turns = plan.turns
        if plan.workers:
            plan.check_seen(dataset)
    else:
        turns = _begin_pass(dataset, plan, place)
    assert turns is not None
    turns.begin_batch(place)
    try:
        batch = turns.next(plan.measured)
    except (EndOfData, StopIteration) as error:
        if plan.turns is not turns:
            raise _OtherPassError from error
        if plan.num_batches is None or isinstance(error, StopIteration):
            raise
    except Exception:
        turns.note_error()
        if turns.state is TurnState.FAILED:
            plan.end_pass()
        raise
    else:
        is_other = plan.turns not in (turns, None) and not plan.is_iterator
        if is_other or turns.state is not TurnState.TAKING:
            raise _OtherPassError  # a signal handler has taken a batch
        if plan.measured is not None:
            plan.measured.note(epoch[1], index)
        turns.end_batch(batch, keeps=not plan.restarts, is_epoch=is_epoch)
        return batch
    way_out = "Pass the true number, or `None`"
    if plan.restarts:
        way_out += "; or `restart=False`, which starts again at the end"
    raise LoaderError(
        f"The generators have ended after {index} of the "
        f"{plan.num_batches} batches of `num_batches`. {way_out}."
    )


def _begin_pass(dataset: GeneratorDataset, plan: _Plan, place: Place) -> Turns:
    """Makes new generators, which give the batch at `place` next."""
    plan.end_pass()
    if (ended := plan.lost_before(place)) is not None:
        key, count = ended.key, ended.count
    else:
        (seed, epoch), count = place
        key = int(answer(dataset, "rng_for")(GENERATOR_KEY).integers(2**63))
        if any(given := seeding.given_parts(seed)):
            stream = seeding.sequence(max(given), min(given), epoch)
            key = seeding.joined(key, int(stream.generate_state(1)[0]))
    try:
        turns = Turns(plan.shards, key, plan.measured, count)
    except (EndOfData, StopIteration, LoaderError) as error:
        if plan.turns is None:
            raise
        raise _OtherPassError from error
    if plan.turns is not None:
        raise _OtherPassError  # a signal handler has begun another one
    if ended is not None:
        turns.latest.extend(ended.latest)
    plan.turns, plan.version, plan.ended = turns, version_of(dataset), None
    plan.check_resumed(type(dataset).__name__, place)
    return turns


def _shards(
    spec: Spec,
    count: int,
    workers: int,
    max_queue_size: int,
    kwargs: dict[str, Any],
) -> list[GeneratorShards]:
    """Divides the shards, and the places in the queue, among `count` objects.

    Each of them has `workers` workers, 0 or 1.
    """
    if most := optional_integer(
        "max_queue_bytes", kwargs.get("max_queue_bytes"), least=1
    ):
        kwargs = {**kwargs, "max_queue_bytes": max(1, most // count)}
    return [
        GeneratorShards(
            spec,
            range(index, spec.num_shards, count),
            workers=workers,
            seed=0,  # draws depend on `GeneratorShards.key` instead
            max_queue_size=max_queue_size
            and max(1, (max_queue_size + count - 1 - index) // count),
            **kwargs,
        )
        for index in range(count)
    ]


def _check_kwargs(kind: type, workers: Any, kwargs: dict[str, Any]) -> None:
    """Raises an error for an argument that a `GeneratorDataset` cannot use.

    Sets `use_multiprocessing` where the other arguments imply it.
    """
    if "shuffle" in kwargs:
        raise TypeError(
            "GeneratorDataset takes no `shuffle`: its generators decide the "
            "order. Shuffle there, with the parameter `rng`."
        )
    if kwargs.get("cache") is not None:
        raise ValueError(
            "GeneratorDataset takes no `cache`: its batches have no index by "
            "which to keep them."
        )
    if kwargs.get("on_error", "raise") != "raise":
        raise ValueError(
            "GeneratorDataset needs `on_error='raise'`: a generator that has "
            "raised has ended. Catch what can be left out in the generator."
        )
    if workers == "auto":
        raise ValueError(
            'GeneratorDataset takes no `workers="auto"`: each of its workers '
            "has generators of its own. Pass the number of workers."
        )
    if kwargs.get("executor") == "ray":
        kwargs["use_multiprocessing"] = True  # Ray's workers are processes
    allowed = [name for name in arguments_of(kind) if name not in _REFUSED]
    unknown = set(kwargs) - set(arguments_of(FastPyDataset))
    if unknown:
        raise unknown_arguments(kind.__name__, unknown, allowed)
