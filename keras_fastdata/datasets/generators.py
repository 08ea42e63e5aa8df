"""Generators, made safe: several at once, each item once, in a fixed order.

    GeneratorDataset          in the training process: whose turn is it?
        GeneratorShards       one for each worker, which it has to itself
            generator         one for each shard

Shards take turns: batch k is the next of the shard whose turn it is, and a
shard that has ended is left out from then on. A worker has every so-many-th
shard, and has these take turns likewise; so it need not be told which is next.

A worker that dies takes its generators along. The next one makes new ones, and
drops what they give until they are where the first ones were. What it drops
has to be what was delivered: batches carry a checksum of all before them.
"""

from __future__ import annotations

import collections
import copy
import inspect
import itertools
import random
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from keras_fastdata._dataset_internals import (
    answer,
    internals_of,
    state_dict_of,
)
from keras_fastdata._validation import (
    arguments_of,
    boolean,
    integer,
    unknown_arguments,
)
from keras_fastdata.building.held_generators import Held, Search, seeds_its_own
from keras_fastdata.dataset import FastPyDataset
from keras_fastdata.datasets.collate import Padded, Padding, collate
from keras_fastdata.datasets.sampling import GENERATOR_KEY
from keras_fastdata.engine.sharding import has_random_access
from keras_fastdata.engine.state_dict import State
from keras_fastdata.errors import EndOfData, LoaderError
from keras_fastdata.memory.ownership import copied
from keras_fastdata.workers import exceptions

_BATCH, _LAST = 0, 1  # what a turn of a shard came to
_UNKNOWN = -1  # a checksum, where the factory left out what was before
# Of data that goes on: the first batches of a `fit`, where a hook has changed
# the dataset after Keras had looked at them.
_ASKED_FOR_AGAIN = 2
# Arguments of other datasets that have no meaning here.
_REFUSED = ("shuffle", "cache", "cache_bytes", "cache_version", "on_error")
_CHECKED = 1024  # bytes at either end of an array that go into a checksum


class GeneratorDataset(FastPyDataset):
    """Batches from generators, each item once, also with several workers.

    `factory` is called to make a generator, in the worker that has it, anew
    for every epoch. For more than one worker it must take its share of the
    data: `factory(shard_index, num_shards)`. Shards take turns, so that the
    order depends on `num_shards` alone.

    `factory` may have these parameters too, and is given them by name:

    - `rng`, a `np.random.Generator` of seed, epoch and shard. `np.random` and
      `random` are seeded before every batch as well, except in threads.
    - `start`, how many items the generator shall leave out. After the death of
      a worker that has one shard, a new generator is told so; otherwise it
      gives them all again, and they are dropped. That counts as one batch for
      `batch_timeout`.

    Args:
        factory: Such a function; for `workers` up to 1 in threads or inline
            it may be an iterator, which can be walked through once. What a
            thread has read ahead is lost with `close`.
        batch_size: Items in a batch, at least 1, stacked as samples are in
            `SampleDataset`. `None`: each item is a batch. Defaults to `None`.
        num_shards: Generators, at least 1. `None`: one for each worker.
        num_batches: Batches in an epoch, at least 1. `None`: all that there
            are; `fit` then needs `steps_per_epoch` where there is no end.
        restart: Whether every epoch starts anew. `False`: it goes on where
            the one before ended, and starts anew where the data ends; this
            needs `num_batches`. `None`: `True`, but for an iterator.
        drop_remainder: With `batch_size`: whether to leave out a last batch,
            of every shard, that would be smaller. Defaults to `False`.
        pad_to: See `SampleDataset`.
        pad_value: Likewise.
        workers: Where generators run. 0: in the caller. n >= 1: ahead of
            time, in n threads, or n processes with `use_multiprocessing=True`.
            There are at most as many as shards. Defaults to 1.
        seed: See `FastPyDataset`.
        max_queue_size: Batches being built or ready, in all, but at least one
            for each worker; 0: no bound. Defaults to 10.
        **kwargs: The other arguments of `FastPyDataset`, for the workers.

    Raises:
        TypeError: `factory` cannot be called so, or an argument is unknown
            or of the wrong type.
        ValueError: `factory` cannot be shared out to so many workers, or an
            argument is out of range.

    While batches are fetched, `LoaderError` says that generators could not be
    made to give the same again, and `WorkerDiedError` that workers die over
    and over. What a generator raises ends the epoch.

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
        factory: Callable[..., Any] | Iterator[Any],
        batch_size: int | None = None,
        *,
        num_shards: int | None = None,
        num_batches: int | None = None,
        restart: bool | None = None,
        drop_remainder: bool = False,
        pad_to: Padding = None,
        pad_value: float = 0,
        workers: int = 1,
        seed: int | None = None,
        max_queue_size: int = 10,
        **kwargs: Any,
    ) -> None:
        _check_kwargs(type(self), workers, kwargs)
        if kwargs.get("executor") == "ray":
            kwargs["use_multiprocessing"] = True  # Ray's workers are those
        super().__init__(
            workers=0,
            shuffle=False,
            seed=seed,
            max_queue_size=max_queue_size,
            **kwargs,
        )
        workers = integer("workers", workers, least=0)
        if batch_size is not None:
            batch_size = integer("batch_size", batch_size, least=1)
        if num_batches is not None:
            num_batches = integer("num_batches", num_batches, least=1)
        shared = kwargs.get("use_multiprocessing", False)
        source = _Source.of(factory)
        if num_shards is None:
            num_shards = max(1, workers)
        num_shards = integer("num_shards", num_shards, least=1)
        source.check(num_shards, shared)
        restarts = source.restarts(restart, num_batches)
        # Each has its shards to itself, and the ways of a dataset for itself.
        count = min(max(1, workers), num_shards)
        if kwargs.get("max_queue_bytes") is not None:
            given = kwargs["max_queue_bytes"]
            most = integer("max_queue_bytes", given, least=1)
            kwargs["max_queue_bytes"] = max(1, most // count)
        shards = [
            GeneratorShards(
                source,
                range(index, num_shards, count),
                num_shards,
                batch_size,
                bool(drop_remainder),
                Padded(pad_to, pad_value),
                repeats=not restarts and not source.is_iterator,
                workers=min(1, workers),
                seed=0,  # what is drawn depends on keys from our own
                max_queue_size=max_queue_size
                and max(1, (max_queue_size + count - 1 - index) // count),
                **kwargs,
            )
            for index in range(count)
        ]
        self._fastdata_plan = _Plan(
            restarts, num_shards, num_batches, shards, count if workers else 0
        )

    @property  # type: ignore[misc]
    def workers(self) -> int:
        """Number of workers; it cannot be changed."""
        return self._fastdata_plan.workers

    @property  # type: ignore[misc]
    def use_multiprocessing(self) -> bool:
        """Whether they are processes; it cannot be changed."""
        return internals_of(self).settings.use_multiprocessing

    @property  # type: ignore[misc]
    def max_queue_size(self) -> int:
        """Batches that lie ready, in all; it cannot be changed."""
        return internals_of(self).settings.max_queue_size

    @property
    def num_batches(self) -> int | None:
        """Batches in an epoch; `None`: all that there are."""
        if sys._getframe(1).f_code.co_name == "get_data_adapter":
            # Keras asks whether to warn of `shuffle=True`, its own default.
            return 0
        return self._fastdata_plan.num_batches

    def __getitem__(self, index: int) -> Any:
        """The next batch; it is one from the beginning, for an index of 0."""
        plan, epoch = self._fastdata_plan, answer(self, "epoch")
        turns = plan.turns
        for place, batch in turns.latest if turns is not None else ():
            if place == (epoch, index):
                return batch
        if turns is None or not turns.leads_to(epoch, index):
            turns = _turns_to(self, index)
        turns.epoch, turns.index = epoch, index
        try:
            batch = turns.next()
        except EndOfData:
            if plan.num_batches is None:
                raise
        except BaseException:
            plan.turns = None  # whose turn it is, nobody knows
            raise
        else:
            turns.index += 1
            if not plan.restarts:
                turns.latest.append(((epoch, index), batch))
            return batch
        way_out = "Pass the true number, or `None`"
        if plan.restarts:
            way_out += "; or `restart=False`, which starts anew where data ends"
        raise LoaderError(
            f"The generators have ended after {index} of the "
            f"{plan.num_batches} batches that `num_batches` says. {way_out}."
        )

    def close(self) -> None:
        """Ends the workers and waits until they are gone."""
        self._fastdata_plan.turns = None
        for shards in self._fastdata_plan.shards:
            shards.close()
        super().close()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_fastdata_plan": copy.copy(self._fastdata_plan)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As of any dataset; the items before that place are made again."""
        name = type(self).__name__
        State.from_dict(state_dict, name, also=["num_shards"])
        rest = dict(state_dict)
        shards = rest.pop("num_shards")
        mine = self._fastdata_plan.num_shards
        if shards != mine:
            raise ValueError(
                f"The state is of {shards} shards, and this {name} has "
                f"{mine}. Pass `num_shards={shards}`, with any number of "
                "workers."
            )
        super().load_state_dict(rest)


class _Plan:
    """How a `GeneratorDataset` takes turns; copied without the present walk.

    Attributes:
        restarts: Whether generators begin anew with each epoch.
        num_shards: How many there are.
        num_batches: Of an epoch; `None` for all that there are.
        shards: Those of each worker.
        workers: How many workers there are; 0 if the caller builds.
        turns: The turns, as far as they have come.
    """

    def __init__(
        self,
        restarts: bool,
        num_shards: int,
        num_batches: int | None,
        shards: list[GeneratorShards],
        workers: int,
    ) -> None:
        self.restarts = restarts
        self.num_shards = num_shards
        self.num_batches = num_batches
        self.shards = shards
        self.workers = workers
        self.turns: _Turns | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "turns": None}


@has_random_access.register
def _(dataset: GeneratorDataset) -> bool:
    return False


@seeds_its_own.register
def _(dataset: GeneratorDataset) -> bool:
    return True


@state_dict_of.register
def _(dataset: GeneratorDataset, state: State) -> dict[str, Any]:
    plan = dataset._fastdata_plan
    if not plan.restarts:
        raise LoaderError(
            f"{type(dataset).__name__} goes on from epoch to epoch, so that "
            "the place of a batch tells nothing of where its generators "
            "stand. With `restart=True` they begin anew with each epoch, "
            "and can be resumed."
        )
    return {**state.as_dict(), "num_shards": plan.num_shards}


def _turns_to(dataset: GeneratorDataset, index: int) -> _Turns:
    """The walk that has batch `index` of this epoch next."""
    plan = dataset._fastdata_plan
    if plan.turns is None or plan.restarts:
        key = int(answer(dataset, "rng_for")(GENERATOR_KEY).integers(2**63))
        turns = _Turns(plan.shards, key)
        for _ in range(index):
            turns.next()
        plan.turns = turns
    return plan.turns


class _Turns:
    """Turns of shards, from their beginning on.

    Attributes:
        epoch: The dataset's epoch.
        index: Of the batch that is next.
        latest: Epoch and index of batches given last, and these.
    """

    def __init__(self, shards: list[GeneratorShards], key: int) -> None:
        self.epoch, self.index = -1, 0
        self.latest: collections.deque[tuple[tuple[int, int], Any]] = (
            collections.deque(maxlen=_ASKED_FOR_AGAIN)
        )
        self._chains: dict[int, int] = {}  # checksums, by shard
        self._rounds: list[Iterator[Any]] = []
        for one in shards:
            one.key = key
            one.mark_changed()  # `key` is set while a batch is being built
            self._rounds.append(iter(one))
        self._live = list(range(shards[0].num_shards))
        self._turn = 0  # place in these

    def leads_to(self, epoch: int, index: int) -> bool:
        """Whether that batch is the next."""
        return (self.epoch, self.index) == (epoch, index)

    def next(self) -> Any:
        """The next batch.

        Raises:
            EndOfData: There is none.
            LoaderError: The shard had a new worker, and is not as it was.
        """
        while self._live:
            self._turn %= len(self._live)
            shard = self._live[self._turn]
            # Of those who take turns there, this one is next.
            (what, before, after), *batch = next(
                self._rounds[shard % len(self._rounds)]
            )
            known = self._chains.get(shard, 0)
            if _UNKNOWN not in (before, known) and before != known:
                raise LoaderError(
                    f"The generator of shard {shard} cannot be replayed: the "
                    "worker that had it was lost, and a new generator did not "
                    "give the same batches again. Draw from the parameter "
                    "`rng`, and let nothing else decide what comes; or let "
                    "the factory have a parameter `start`."
                )
            self._chains[shard] = int(after)
            if what == _BATCH:
                self._turn += 1
                return batch[0]
            del self._live[self._turn]
        raise EndOfData("All generators have ended.")


class GeneratorShards(FastPyDataset):
    """The generators of one worker, in turns; `GeneratorDataset` has these.

    A batch is a row of three integers (whether it is the shard's end; the
    checksums of all that the shard gave before it, and with it) and, unless
    it is the end, what the generator gave.

    Attributes:
        key: Of the walk, from seed and epoch: what is drawn depends on it.
    """

    def __init__(
        self,
        source: _Source,
        indices: range,
        num_shards: int,
        batch_size: int | None,
        drop_remainder: bool,
        padded: Padded,
        *,
        repeats: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(shuffle=False, **kwargs)
        self.key = 0
        self.num_shards = num_shards
        self.source = source
        self.indices = indices
        self.batch_size = batch_size
        self.drop_remainder = drop_remainder
        self.padded = padded
        self.repeats = repeats

    @property
    def num_batches(self) -> None:
        """Nobody knows."""

    def __getitem__(self, index: int) -> Any:
        """What turn `index` of the shards comes to."""
        running: _Running | None = vars(self).get("_running")
        if running is None or not running.leads_to(self.key, index):
            running = self._running = _Running(self, self.key)
            running.skip(index)
        return running.next()

    def on_worker_stop(self) -> None:
        running: _Running | None = vars(self).pop("_running", None)
        if running is not None:
            running.close()

    def __getstate__(self) -> dict[str, Any]:
        # Generators stay where they are.
        return {k: v for k, v in vars(self).items() if k != "_running"}

    def stacked(self, items: list[Any], first: int) -> Any:
        """A batch of items, of which the first is the shard's `first`."""
        numbers = range(first, first + len(items))
        return collate(items, numbers, self.empty, self.padded)


class _Running:
    """Generators under way in a worker, and whose turn it is."""

    def __init__(self, owner: GeneratorShards, key: int) -> None:
        self._key = key
        self._turns = 0
        self._live = [_Shard(owner, key, index) for index in owner.indices]
        self._place = 0
        self._failed = False

    def leads_to(self, key: int, turn: int) -> bool:
        """Whether that turn is the next."""
        if key != self._key:
            return False
        # Some turns are asked for before it is known that there is none.
        over = turn > self._turns and (self._failed or not self._live)
        return over or (turn == self._turns and not self._failed)

    def skip(self, turns: int) -> None:
        """Goes on to that turn, as if all before it had been asked for."""
        if len(self._live) == 1 and self._live[0].skip(turns):
            self._turns = turns
            return
        for turn in range(turns):
            if not self._live:
                raise LoaderError(
                    f"The generators cannot be replayed: all of them have "
                    f"ended after {turn} turns, of which there were more "
                    "before their worker was lost."
                )
            self.next(dropped=True)

    def close(self) -> None:
        """Ends the generators."""
        for shard in self._live:
            shard.close()

    def next(self, *, dropped: bool = False) -> Any:
        """What the next turn comes to."""
        if self._failed or not self._live:
            raise EndOfData("The generators have ended.")
        self._place %= len(self._live)
        try:
            found = self._live[self._place].next(dropped)
        except BaseException:
            self._failed = True
            raise
        self._turns += 1
        if found[0][0] == _BATCH:
            self._place += 1
        else:
            del self._live[self._place]
        return found


@seeds_its_own.register
def _(dataset: GeneratorShards) -> bool:
    return True


class _Shard:
    """One generator, or one after another where it repeats."""

    def __init__(self, owner: GeneratorShards, key: int, index: int) -> None:
        self._owner = owner
        self._stream = key, index
        self._index = index
        self._round = 0
        self._generator: Iterator[Any] | None = None
        self._position = 0  # in the round, in batches
        self._start = 0  # where the round begins
        self._chain = 0
        self._held: list[Held] = []  # generators that the factory reaches

    def skip(self, batches: int) -> bool:
        """Has the generator leave out batches, if it can."""
        owner = self._owner
        if not owner.source.takes_start or owner.repeats or not batches:
            return False
        self._position = self._start = batches
        self._chain = _UNKNOWN
        return True

    def close(self) -> None:
        """Ends the generator, unless it is the user's own iterator."""
        if not self._owner.source.is_iterator:
            getattr(self._generator, "close", lambda: None)()

    def next(self, dropped: bool) -> Any:
        """The next batch, or the end; see `GeneratorShards`."""
        items = self._take()
        if not items and self._owner.repeats and self._position:
            self._round += 1
            self._position = 0
            self._generator = None
            items = self._take()
        before = self._chain
        if not items:
            return (np.array([_LAST, before, before]),)
        if before != _UNKNOWN:
            for item in items:
                self._chain = _checksum(item, self._chain)
        first = self._position * (self._owner.batch_size or 1)
        self._position += 1
        told = np.array([_BATCH, before, self._chain])
        if dropped:
            return (told,)
        if self._owner.batch_size is None:
            return told, items[0]
        return told, self._owner.stacked(items, first)

    def _take(self) -> list[Any]:
        """The items of the next batch; none at the end."""
        owner = self._owner
        items: list[Any] = []
        # An item that is a batch is copied where a worker takes it.
        is_batch = owner.batch_size is None
        self._seed()
        try:
            if self._generator is None:
                self._generator = self._made()
            for item in itertools.islice(
                self._generator, owner.batch_size or 1
            ):
                items.append(item if is_batch else copied(item))
        except EndOfData:
            pass
        except Exception as error:
            exceptions.note(
                error, f"In batch {self._position} of {self._name}."
            )
            raise
        short = len(items) < (owner.batch_size or 1)
        return [] if short and owner.drop_remainder else items

    @property
    def _name(self) -> str:
        return f"shard {self._index} of {self._owner.num_shards}"

    def _made(self) -> Iterator[Any]:
        owner = self._owner
        named: dict[str, Any] = {}
        if owner.source.takes_rng:
            named["rng"] = np.random.default_rng((*self._stream, self._round))
        if owner.source.takes_start:
            named["start"] = self._start * (owner.batch_size or 1)
        return owner.source.make(self._index, owner.num_shards, named)

    def _seed(self) -> None:
        """Seeds what is everybody's, for this very batch."""
        if self._owner.workers and not self._owner.use_multiprocessing:
            return  # the threads of a process share it
        sequence = np.random.SeedSequence(
            (*self._stream, self._round, self._position)
        )
        words = sequence.generate_state(8)
        np.random.seed(words[:4])
        random.seed(words[4:].tobytes())
        if self._generator is None:
            self._held = Search(self._owner.source.factory).held
        for held in self._held:
            held.reseed(0, *self._stream, self._round, self._position)


class _Source(NamedTuple):
    """What generators come from.

    Attributes:
        factory: A function that makes them, or an iterator.
        is_iterator: Whether it is one.
        takes_shards: Whether it is called with a shard and their number.
        takes_rng: Whether it has a parameter `rng`.
        takes_start: Whether it has a parameter `start`.
    """

    factory: Any
    is_iterator: bool = False
    takes_shards: bool = False
    takes_rng: bool = False
    takes_start: bool = False

    @staticmethod
    def of(factory: Any) -> _Source:
        """Looks at what the user passed.

        Raises:
            TypeError: It is neither, or cannot be called so.
        """
        if hasattr(factory, "__next__"):
            return _Source(factory, is_iterator=True)
        if not callable(factory):
            raise TypeError(
                "`factory` must be a function that makes a generator, or an "
                f"iterator. Received a {type(factory).__name__}; "
                "`SampleDataset` takes what has items by number, and "
                "`lambda: iter(it)` makes a factory of what can be iterated "
                "over again and again."
            )
        try:
            parameters = dict(inspect.signature(factory).parameters)
        except ValueError:
            return _Source(factory)  # written in C, without a signature
        rng = _is_free(parameters, "rng", factory)
        start = _is_free(parameters, "start", factory)
        kinds = inspect.Parameter
        places = [
            p
            for p in parameters.values()
            if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        ]
        needed = [
            p
            for p in parameters.values()
            if p.default is kinds.empty
            and p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
        ]
        many = any(p.kind is kinds.VAR_POSITIONAL for p in parameters.values())
        named = [p.name for p in places[:2]] == ["shard_index", "num_shards"]
        # Others that have defaults are the user's own.
        wanted = [p.default is kinds.empty for p in places[:2]]
        shards = many or named or wanted == [True, True]
        if any(p not in (places[:2] if shards else []) for p in needed):
            names = ", ".join(p.name for p in needed)
            raise TypeError(
                "`factory` must be callable as `factory()` or as "
                f"`factory(shard_index, num_shards)`; it needs ({names}). "
                "`functools.partial` fills in the others."
            )
        return _Source(factory, False, shards, rng, start)

    def check(self, num_shards: int, processes: bool) -> None:
        """Refuses what several would do alike.

        Raises:
            ValueError: Each would give the same items.
        """
        if num_shards > 1 and not self.takes_shards:
            what = "iterator" if self.is_iterator else "factory"
            raise ValueError(
                f"This {what} cannot be shared out to {num_shards} workers or "
                "shards: each would give the same items. Pass a function "
                "`factory(shard_index, num_shards)` that makes a generator of "
                "every so-many-th item, or of some of the files; or leave it "
                "to one worker, with `workers=1`."
            )
        if processes and self.is_iterator:
            raise ValueError(
                "An iterator cannot go to a worker process: it cannot be "
                "copied, and each copy would give the same items. Pass the "
                "function that makes it, without calling it, and it will be "
                "called there; or leave it to a thread of this process, with "
                "`use_multiprocessing=False`."
            )

    def restarts(self, asked: bool | None, num_batches: int | None) -> bool:
        """Whether every epoch starts anew.

        Args:
            asked: What the user wants; `None` leaves it to us.
            num_batches: Batches in an epoch; `None`: all there are.

        Raises:
            ValueError: It cannot be as the user wants it.
        """
        restarts = boolean(
            "restart", not self.is_iterator if asked is None else asked
        )
        if restarts and self.is_iterator:
            raise ValueError(
                "`restart=True` needs a function that makes a generator; an "
                "iterator can be walked through once."
            )
        if not restarts and num_batches is None and not self.is_iterator:
            raise ValueError(
                "`restart=False` needs `num_batches`, the length of an epoch "
                "after which the next one goes on."
            )
        return restarts

    def make(
        self, index: int, num_shards: int, named: Mapping[str, Any]
    ) -> Iterator[Any]:
        """A new generator; or the iterator, however far it is."""
        if self.is_iterator:
            iterator: Iterator[Any] = self.factory
            return iterator
        shard = (index, num_shards) if self.takes_shards else ()
        made = self.factory(*shard, **named)
        try:
            return iter(made)
        except TypeError:
            raise TypeError(
                "`factory` must return a generator or another iterable. It "
                f"returned a {type(made).__name__}."
            ) from None


def _check_kwargs(kind: type, workers: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuses what other datasets take, with the reason."""
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
    allowed = [name for name in arguments_of(kind) if name not in _REFUSED]
    unknown = set(kwargs) - set(arguments_of(FastPyDataset))
    if unknown:
        raise unknown_arguments(kind.__name__, unknown, allowed)


def _is_free(parameters: dict[str, Any], name: str, factory: Any) -> bool:
    """Takes a parameter out; whether it is there for us to fill in."""
    found = parameters.get(name)
    if found is None or name in getattr(factory, "keywords", {}):
        return False
    del parameters[name]
    return found.default in (inspect.Parameter.empty, None, 0)


def _checksum(part: Any, before: int) -> int:
    """A checksum of all that was given, with another item."""
    if isinstance(part, Mapping):
        for key, value in part.items():
            before = _checksum(value, zlib.crc32(repr(key).encode(), before))
        return before
    if isinstance(part, (tuple, list)):
        for value in part:
            before = _checksum(value, before)
        return zlib.crc32(b"%d" % len(part), before)
    if isinstance(part, (np.ndarray, np.generic)):
        return _checksum_of_array(np.asarray(part), before)
    if isinstance(part, (int, float, complex, str, bytes, type(None))):
        return zlib.crc32(repr(part).encode(), before)
    return zlib.crc32(type(part).__name__.encode(), before)


def _checksum_of_array(array: Any, before: int) -> int:
    before = zlib.crc32(f"{array.dtype.str}{array.shape}".encode(), before)
    if array.dtype.hasobject:
        return before
    flat = array.reshape(-1)
    some = max(1, _CHECKED // max(1, array.itemsize))
    ends = flat if flat.size <= 2 * some else np.r_[flat[:some], flat[-some:]]
    return zlib.crc32(np.ascontiguousarray(ends).view(np.uint8).data, before)
