"""Runs the generators of some shards, in one worker of a `GeneratorDataset`.

When a worker dies, its generators are lost. A new worker makes new generators,
and drops their first batches until they reach the position of the lost ones.
Each batch carries a checksum of all batches of its shard so far, which shows
whether the dropped batches were those that had been delivered.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from keras_fastdata import _process_role
from keras_fastdata._dataset_internals import answer, loader_of, mark_changed
from keras_fastdata.building import seeding
from keras_fastdata.building.held_generators import Held, Search, seeds_its_own
from keras_fastdata.dataset import FastPyDataset
from keras_fastdata.datasets.collate import Padded, collate
from keras_fastdata.datasets.columns import ColumnChoice
from keras_fastdata.datasets.generator_source import GeneratorSource
from keras_fastdata.datasets.iterables import Passes
from keras_fastdata.errors import EndOfData, LoaderError
from keras_fastdata.memory.ownership import copied
from keras_fastdata.workers import exceptions

BATCH, _LAST = 0, 1  # the result of a shard's turn
UNKNOWN = -1  # the checksum if the factory skipped the batches before
_CHECKED = 1024  # bytes at each end of an array that a checksum covers


class Spec(NamedTuple):
    """The settings that the shards of all workers share."""

    source: GeneratorSource
    num_shards: int  # of all workers
    batch_size: int | None  # items; `None` if an item is a batch
    drop_remainder: bool
    padded: Padded
    choice: ColumnChoice  # what of an item is read, and what of it is y
    repeats: bool  # whether to make new generators when the data ends

    @property
    def can_skip(self) -> bool:
        """Whether a generator can begin amid the items of its shard.

        The user's own iterator always does: it has given the items before.
        """
        begins_amid = self.source.takes_start and not self.repeats
        return begins_amid or self.source.is_iterator


class GeneratorShards(FastPyDataset):
    """The shards whose generators one `GeneratorDataset` worker runs.

    A batch is an array of three integers: `BATCH` or `_LAST`, and checksums
    of all items of the shard, without and with this batch. Unless the shard
    has ended, the batch of the generator follows.

    Attributes:
        key: Seeds the random generators; depends on seed and epoch.
        since: The epoch, of this object, that the present pass begins with.
        skipped: How many turns the present pass leaves out at its beginning.
        indices: The shards of this worker.
    """

    _fastdata_passing = ("_running", "_taken", "key", "since", "skipped")

    def __init__(self, spec: Spec, indices: range, **kwargs: Any) -> None:
        super().__init__(shuffle=False, **kwargs)
        self.key = self.since = self.skipped = 0
        self._taken: dict[int, list[Any]] = {}  # see `taken_at`
        self.spec = spec
        self.indices = indices

    def begin_pass(self, key: int, skipped: int) -> None:
        """Begins a new pass over the data, with new generators."""
        self.skipped = skipped
        # Before `key`, which a thread may read meanwhile.
        self.since = 0 if _process_role.is_worker() else loader_of(self).epoch
        self.key = key
        mark_changed(self)  # assignments during a build are not noticed

    @property
    def num_batches(self) -> None:
        """`None`, because the number of batches is unknown."""

    def __getitem__(self, index: int) -> Any:
        """Returns a batch, or an end marker, from the next shard in turn.

        `index` counts the turns of all shards of this worker, but for those
        that the pass leaves out.
        """
        index += self.skipped
        running: _Running | None = vars(self).get("_running")
        if running is None or not running.leads_to(self.key, index):
            if answer(self, "epoch") < self.since:
                # A thread took this request before it was cancelled.
                raise EndOfData("Another pass over the data has begun.")
            running = _Running(self, self.key)
            running.replay(index)
            self._running = running  # not before: an interrupt may come
        running.skip_to(index)
        return running.next()

    def taken_at(self, position: int) -> list[Any]:
        """Returns the list of what an iterator has given for a batch so far.

        An error or an interrupt may have ended the build of this batch; or the
        batch was built ahead, and the thread has ended since.
        """
        return self._taken.setdefault(position, [])

    def forget_before(self, position: int) -> None:
        """Drops what an iterator has given for the batches delivered."""
        for known in list(self._taken):
            if known < position:
                self._taken.pop(known, None)

    def on_worker_stop(self) -> None:
        running: _Running | None = vars(self).pop("_running", None)
        if running is not None:
            running.close()

    def __getstate__(self) -> dict[str, Any]:
        # Generators cannot be pickled.
        return {k: v for k, v in vars(self).items() if k != "_running"}


class _Running:
    """Runs the generators of one worker in round-robin order."""

    def __init__(self, owner: GeneratorShards, key: int) -> None:
        self._key = key
        self._turns = 0
        self._live = [_Shard(owner, key, index) for index in owner.indices]
        self._place = 0
        # Whether a turn has begun and not ended; after an error it never does.
        self._is_in_turn = False
        self._is_used = False  # by a thread
        self._is_iterator = owner.spec.source.is_iterator

    def leads_to(self, key: int, turn: int) -> bool:
        """Returns whether the generators can still have a turn.

        A turn is one batch, or the end marker, of one shard. Turns after the
        end also count: they are requested before the end is known. Turns that
        were cancelled are missing.

        A thread that `close()` has given up waiting for may still be in a
        generator. Then other generators can have the turn, but not the user's
        own iterator, of which there is one.
        """
        is_free = self._is_iterator or not self._is_used
        is_ahead = turn >= self._turns + self._is_in_turn
        return is_free and key == self._key and is_ahead

    def replay(self, turns: int) -> None:
        """Discards the turns before `turns`, which a lost worker has had."""
        if len(self._live) == 1 and self._live[0].skip(turns):
            self._turns = turns
        self.skip_to(turns)
        if self._turns < turns:
            raise LoaderError(
                f"The generators cannot be replayed: all of them have ended "
                f"after {self._turns} turns, and had more turns before their "
                "worker was lost."
            )

    def skip_to(self, turn: int) -> None:
        """Discards batches and end markers before `turn`, up to the end."""
        while self._live and self._turns < turn and not self._is_in_turn:
            self.next(dropped=True)

    def close(self) -> None:
        """Closes the generators, unless another thread is in one of them."""
        for shard in () if self._is_used else self._live:
            shard.close()

    def next(self, *, dropped: bool = False) -> Any:
        """Returns a batch, or an end marker, from the next shard in turn."""
        if self._is_in_turn or not self._live:
            raise EndOfData("The generators have ended.")
        self._is_in_turn = True
        self._place %= len(self._live)
        self._is_used = True
        try:
            found = self._live[self._place].next(dropped)
        finally:
            self._is_used = False
        self._turns += 1
        if found[0][0] == BATCH:
            self._place += 1
        else:
            del self._live[self._place]
        self._is_in_turn = False
        return found


@seeds_its_own.register
def _(dataset: GeneratorShards) -> bool:
    return True


class _Shard:
    """Runs the generator of one shard, repeatedly if `repeats` is set."""

    def __init__(self, owner: GeneratorShards, key: int, index: int) -> None:
        self._owner, self._spec = owner, owner.spec
        self._size = owner.spec.batch_size or 1  # items of a batch
        self._index = index
        self._key = key
        self._stream = seeding.own_part(key), index
        self._round = 0
        self._generator: Iterator[Any] | None = None
        self._position = 0  # batches since the round began
        self._start = 0  # batches that the generator was told to skip
        # No new generator repeats what an iterator has given.
        self._chain = UNKNOWN if owner.spec.source.is_iterator else 0
        self._held: list[Held] = []  # random generators of the factory

    def skip(self, batches: int) -> bool:
        """Makes the generator skip batches; returns `False` if impossible."""
        if not self._spec.can_skip or not batches:
            return False
        self._position = self._start = batches
        self._chain = UNKNOWN
        return True

    def close(self) -> None:
        """Closes the generator, unless it is the user's own iterator."""
        if not self._spec.source.is_iterator:
            getattr(self._generator, "close", lambda: None)()

    def next(self, dropped: bool) -> Any:
        """Returns the next batch, or an end marker after the last batch."""
        items = self._take()
        if not items and self._spec.repeats and self._position:
            self._round, self._position = self._round + 1, 0
            self._generator = None
            items = self._take()
        before = self._chain
        if not items:
            return (np.array([_LAST, before, before]),)
        if before != UNKNOWN:
            for item in items:
                self._chain = _checksum(item, self._chain)
        first = self._position * self._size
        self._position += 1
        told = np.array([BATCH, before, self._chain])
        if dropped:
            return (told,)
        choice = self._spec.choice
        items = [choice.select(item) for item in items]
        if self._spec.batch_size is None:
            return told, choice.split(items[0])
        numbers = range(first, first + len(items))
        return told, choice.split(
            collate(items, numbers, self._owner.empty, self._spec.padded)
        )

    def _take(self) -> list[Any]:
        """Returns the items of the next batch; an empty list at the end."""
        spec = self._spec
        items: list[Any] = []
        if spec.source.is_iterator:
            items = self._owner.taken_at(self._position)
        # If an item is a batch, the worker copies it as it copies any batch.
        is_batch = spec.batch_size is None
        self._seed()
        try:
            if self._generator is None:
                self._generator = spec.source.make(
                    self._index,
                    spec.num_shards,
                    (*self._stream, self._round),
                    self._start * self._size,
                )
            count = -1
            while count < len(items) <= self._size:
                if items and not is_batch:  # an interrupt may have come before
                    items[-1] = copied(items[-1])
                count = len(items)
                # In C: an interrupt cannot come between the two.
                left = self._size - count
                items.extend(itertools.islice(self._generator, min(1, left)))
        except EndOfData:
            pass
        except Exception as error:
            exceptions.note(
                error,
                f"In batch {self._position} of shard {self._index} of "
                f"{spec.num_shards}.",
            )
            raise
        short = len(items) < self._size
        return [] if short and spec.drop_remainder else items

    def _seed(self) -> None:
        """Seeds the generators of NumPy, Python, torch and `factory`."""
        if self._owner.workers and not self._owner.use_multiprocessing:
            return  # the threads of a process share the global generators
        factory = self._spec.source.factory
        key = self._index, self._round, self._position
        seeding.reseed_globals(self._key, *key)
        if self._generator is None and getattr(factory, "reseeds", True):
            self._held = Search(factory).held
        # All parts of an iterable must have the same order, if they shuffle.
        shared = isinstance(factory, Passes)
        for held in self._held:
            held.reseed(self._key, *key[1 if shared else 0 :])


def _checksum(part: Any, before: int) -> int:
    """Extends the checksum `before` by the content of `part`."""
    if isinstance(part, Mapping):
        return _checksum(list(part.items()), before)
    if isinstance(part, (tuple, list)):
        for value in part:
            before = _checksum(value, before)
        return zlib.crc32(b"%d" % len(part), before)
    if isinstance(part, (np.ndarray, np.generic)):
        kind = f"{part.dtype.str}{part.shape}"
        before = zlib.crc32(kind.encode(), before)
        if part.dtype.hasobject:
            return before
        flat = np.asarray(part).reshape(-1)
        some = max(1, _CHECKED // max(1, flat.itemsize))
        is_short = flat.size <= 2 * some
        ends = flat if is_short else np.r_[flat[:some], flat[-some:]]
        raw = np.ascontiguousarray(ends).view(np.uint8)
        return zlib.crc32(raw.data, before)
    is_plain = isinstance(part, (int, float, complex, str, bytes, type(None)))
    text = repr(part) if is_plain else type(part).__name__
    return zlib.crc32(text.encode(), before)
