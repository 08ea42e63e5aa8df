"""Takes the batches of all shards in turn, for a `GeneratorDataset`.

An interrupt may come at any line. What it leaves in `TurnState.TAKING` is made
anew, and goes on by the count of batches delivered.
"""

from __future__ import annotations

import collections
import enum
import itertools
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from keras_fastdata._dataset_internals import iterate_alone
from keras_fastdata.datasets.generator_shards import (
    BATCH,
    UNKNOWN,
    GeneratorShards,
)
from keras_fastdata.datasets.generator_workers import GeneratorWorkers
from keras_fastdata.engine.batch_iterator import BatchIterator
from keras_fastdata.errors import EndOfData, LoaderError

# Batches that are kept with `restart=False`: `fit` asks again for its first
# batches if a hook changed the dataset after Keras had looked at them.
_ASKED_FOR_AGAIN = 2
# Batches whose checksums are kept; Keras takes far fewer ahead.
_SUMMED = 1000

# A dataset's seed and epoch, and the index of a batch.
Place = tuple[tuple[int, int], int]


class _Delivered(NamedTuple):
    """A batch that may be asked for again."""

    place: Place
    batch: Any
    counted: int  # batches of its pass so far, with this one
    is_epoch: bool  # whether an epoch of the dataset itself has asked for it


class TurnState(enum.Enum):
    """Whether it is known which shard is next: only in `BETWEEN`.

    BETWEEN -> TAKING -> BETWEEN; TAKING -> FAILED
    """

    BETWEEN = enum.auto()  # a batch was delivered, and no other is being taken
    TAKING = enum.auto()  # a batch is being taken, or an interrupt came then
    FAILED = enum.auto()  # a generator has raised an exception


class Turns:
    """One pass over the data of all shards, in round-robin order."""

    def __init__(
        self,
        shards: list[GeneratorShards],
        key: int,
        measured: GeneratorWorkers | None,
        count: int,
    ) -> None:
        """Begins a pass, and leaves out the first `count` batches."""
        self._shards, self.key = shards, key
        self.count = count  # batches that were delivered, or left out
        self.place: Place | None = None  # of the next batch
        self.state = TurnState.TAKING  # the batches to leave out
        self.latest: collections.deque[_Delivered] = collections.deque(
            maxlen=_ASKED_FOR_AGAIN
        )
        self._rounds: list[Iterator[Any]] = []
        # The batch that follows the first so many, if a worker has given it.
        self._taken: tuple[int, list[Any]] = count, []
        spec = shards[0].spec
        skipped = count if spec.num_shards == 1 and spec.can_skip else 0
        # The checksum of all batches so far; `None` if any was skipped.
        self.checksum: int | None = None if skipped else 0
        self.checksums: dict[Place, int | None] = {}  # the latest, by place
        # Checksums so far, by shard. What is skipped may have been read before.
        self._chains: dict[int, int] = {0: UNKNOWN} if skipped else {}
        for one in shards:
            one.begin_pass(key, skipped)
            self._rounds.append(iterate_alone(one))
        for worker, each in enumerate(self._rounds):
            if len(self._rounds) > 1 and isinstance(each, BatchIterator):
                if measured is not None:
                    measured.begin_wait(worker, each)
                each.request()  # or it would begin only at its first turn
        self._live = list(range(spec.num_shards))
        self._turn = 0  # position in `_live`
        for _ in range(skipped, count):
            self.next(measured)
            self._taken[1].clear()

    def take_again(self, place: Place) -> _Delivered | None:
        """Returns what was delivered at `place`, if that is kept."""
        for known in self.latest:
            if known.place == place:
                # An interrupt may have come before it was counted.
                self.count = max(self.count, known.counted)
                return known
        return None

    def move_undelivered(
        self, place: Place, count_delivered: Callable[[int], int]
    ) -> None:
        """Moves what an epoch has built in vain to the next epoch's `place`.

        An interrupt may come between the build and the delivery of a batch.
        """
        before = self.latest[-1].place[0] if self.latest else place[0]
        if before == place[0]:
            return
        delivered, moved = count_delivered(before[1]), []
        for known in self.latest:
            is_of_epoch = known.is_epoch and known.place[0] == before
            if is_of_epoch and known.place[1] >= delivered:
                known = known._replace(place=place)
                place = place[0], place[1] + 1
            moved.append(known)
        self.latest = collections.deque(moved, maxlen=_ASKED_FOR_AGAIN)

    def begin_batch(self, place: Place) -> None:
        """Notes that the batch at `place` is being taken."""
        self.place, self.state = place, TurnState.TAKING

    def note_error(self) -> None:
        """Notes an exception, if a generator has raised it.

        Else a signal handler has raised it, while a batch was waited for.
        """
        for each in self._rounds:
            if not isinstance(each, BatchIterator) or each.has_failed:
                self.state = TurnState.FAILED

    def end_batch(self, batch: Any, *, keeps: bool, is_epoch: bool) -> None:
        """Counts a batch, and moves to the place of the next one.

        With `keeps`, the batch can be asked for again.
        """
        assert self.place is not None
        count, (epoch, index) = self.count + 1, self.place
        if keeps:
            self.latest.append(_Delivered(self.place, batch, count, is_epoch))
        self.count = count
        self._shards[0].forget_before(count)
        self.place = place = epoch, index + 1
        self.checksums[place] = self.checksum
        if len(self.checksums) > _SUMMED:
            del self.checksums[next(iter(self.checksums))]
        self.state = TurnState.BETWEEN

    def next(self, measured: GeneratorWorkers | None) -> Any:
        """Returns the next batch; raises `EndOfData` after the last batch."""
        if self._taken[0] != self.count:
            self._taken = self.count, []
        _, taken = self._taken
        while self._live:
            self._turn %= len(self._live)
            shard = self._live[self._turn]
            # That worker's shards take the same turns: this shard is next.
            worker = shard % len(self._rounds)
            shards = self._rounds[worker]
            if measured is not None:
                measured.begin_wait(worker, shards)
            if not taken:
                # In C: an interrupt cannot come between the two.
                taken.extend(itertools.islice(shards, 1))
            if not taken:
                raise StopIteration
            (what, before, after), *batch = taken[0]
            known = self._chains.get(shard, 0)
            if UNKNOWN not in (before, known) and before != known:
                raise LoaderError(
                    f"The generator of shard {shard} cannot be replayed: the "
                    "worker that had it was lost, and a new generator did not "
                    "give the same batches again. Let its items depend on "
                    "nothing random but the parameter `rng`; or add a "
                    "parameter `start` to the factory."
                )
            self._chains[shard] = int(after)
            if what == BATCH:
                if after == UNKNOWN:
                    self.checksum = None
                elif self.checksum is not None:
                    told = b"%d" % after
                    self.checksum = zlib.crc32(told, self.checksum)
                self._turn += 1
                return batch[0]
            del self._live[self._turn]
            taken.clear()
        raise EndOfData("All generators have ended.")
