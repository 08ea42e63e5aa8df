"""Orders: which sample of an epoch stands at which position.

An order is a function of seed, epoch and position alone. So any worker can
compute any batch, an epoch can be resumed anywhere, and the same samples come
for any number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from keras_fastdata._recent import Recent
from keras_fastdata.building.permutation import Permutation
from keras_fastdata.sources.source import Indices

Sampler = Callable[[np.random.Generator, int], npt.ArrayLike]

_DRAWN = 4096  # positions whose random numbers are drawn together
_KEPT = 4  # results: of this epoch and the next one, and two windows of each
_LONGEST_TURN = 1 << 14  # positions that exchange their groups
_LEAST_SHARE = 1e-200  # of a group; the time of a use must be finite
_LONGEST_MIX = 1 << 53  # positions, which floating point numbers tell apart

# First elements of this package's keys for `rng_for`; users' are smaller.
_WEIGHTS = 1 << 62
_SAMPLER = _WEIGHTS + 1
SAMPLE = _WEIGHTS + 2
GENERATOR_KEY = _WEIGHTS + 3
_CYCLE = _WEIGHTS + 4
_WINDOW = _WEIGHTS + 5
_PARTS = _WEIGHTS + 6
_TURN = _WEIGHTS + 7
_GROUP = _WEIGHTS + 8
_BUCKETS = _WEIGHTS + 9


class OrderEpoch:
    """What the order of an epoch is drawn from.

    Args:
        count: The number of samples.
        version: Changes whenever the dataset changes.
        ask: Returns a value of the dataset by name, such as "epoch". A dataset
            whose batches do not ask for anything can be cached.
    """

    def __init__(
        self, count: int, version: Hashable, ask: Callable[[str], Any]
    ) -> None:
        self.count = count
        self._version = version
        self._ask = ask

    def of(self, count: int) -> OrderEpoch:
        """Returns the same epoch of another number of samples."""
        return OrderEpoch(count, self._version, self._ask)

    @property
    def key(self) -> Hashable:
        """What all that is drawn depends on."""
        return self._version, self._ask("seed"), self._ask("epoch"), self.count

    def key_of(self, order: Order) -> Hashable:
        """What all that an order makes depends on.

        An order that is not random asks for nothing, so that it can be cached.
        """
        return self.key if order.is_random else self.count

    def rng_for(self, *key: int) -> np.random.Generator:
        """Returns the random generator for a key of integers."""
        generator: np.random.Generator = self._ask("rng_for")(*key)
        return generator

    def permutation(self) -> Permutation:
        """Returns the epoch's order of all samples."""
        order: Permutation = self._ask("epoch_order")(self.count)
        return order

    def permutation_for(self, length: int, *key: int) -> Permutation:
        """Returns another permutation of this epoch, chosen by `key`."""
        seeds: Any = self.rng_for(*key).bit_generator.seed_seq
        return Permutation(length, seeds)


class Order(Protocol):
    """Which sample has which position in an epoch."""

    @property
    def draws_again(self) -> bool:
        """Whether a sample can come more than once in an epoch."""

    @property
    def is_random(self) -> bool:
        """Whether the order differs between epochs."""

    def length(self, count: int) -> int:
        """Returns the positions of an epoch, where there are `count` samples.

        Raises:
            ValueError: The order does not fit so many samples.
        """

    def at(self, positions: Indices, epoch: OrderEpoch) -> Indices:
        """Returns the samples at positions that increase one by one."""


def pick(samples: range | Indices, places: Indices) -> Indices:
    """Returns the samples at some places of a list of samples."""
    if isinstance(samples, range):
        return samples.start + samples.step * places
    return samples[places]


def _by_block(
    positions: Indices, size: int, take: Callable[[int, Indices], Indices]
) -> Indices:
    """Returns what stands at positions of an order that is made in blocks.

    A block is `size` positions. `take(number, places)` returns what stands at
    some places of block `number`, along the last axis.
    """
    if not len(positions):
        return positions
    numbers, places = np.divmod(positions, size)
    if numbers[0] == numbers[-1]:
        return take(int(numbers[0]), places)
    found = [take(int(n), places[numbers == n]) for n in np.unique(numbers)]
    return np.concatenate(found, axis=-1)


class InOrder:
    """Samples in the order of the source.

    An epoch of more samples than there are begins again.
    """

    is_random = False

    def __init__(self, per_epoch: int | None = None) -> None:
        self._per_epoch = per_epoch

    @property
    def draws_again(self) -> bool:
        return self._per_epoch is not None

    def length(self, count: int) -> int:
        per_epoch = self._per_epoch
        return per_epoch if per_epoch is not None and count else count

    def at(self, positions: Indices, epoch: OrderEpoch) -> Indices:
        return positions % max(1, epoch.count)


class Shuffled(InOrder):
    """Samples in a new random order in each epoch.

    An epoch of more samples than there are goes on with another order.
    """

    is_random = True

    def __init__(self, per_epoch: int | None = None) -> None:
        super().__init__(per_epoch)
        self._orders: Recent[Permutation] = Recent(_KEPT)

    def at(self, positions: Indices, epoch: OrderEpoch) -> Indices:
        return _by_block(
            positions,
            max(1, epoch.count),
            lambda cycle, places: self._order(epoch, cycle).at(places),
        )

    def _order(self, epoch: OrderEpoch, cycle: int) -> Permutation:
        if not cycle:
            return epoch.permutation()
        return self._orders.get(
            (epoch.key, cycle),
            lambda: epoch.permutation_for(epoch.count, _CYCLE, cycle),
        )


class ShuffledInWindows:
    """Parts in random order, and samples shuffled within windows of these.

    A part is a run of samples that are best read together. The samples of a
    window are those of a few parts.
    """

    draws_again = False
    is_random = True

    def __init__(
        self, part_lengths: Sequence[int] | Indices, window: int
    ) -> None:
        self._lengths = np.asarray(part_lengths, np.int64)
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._window = window
        self._orders: Recent[Indices] = Recent(_KEPT)

    def length(self, count: int) -> int:
        if count != self._lengths.sum():
            raise ValueError(
                f"The parts of the source have {self._lengths.sum()} samples "
                f"together, and there are {count}."
            )
        return count

    def at(self, positions: Indices, epoch: OrderEpoch) -> Indices:
        return _by_block(
            positions,
            self._window,
            lambda window, places: self._samples_of(window, epoch)[places],
        )

    def _samples_of(self, window: int, epoch: OrderEpoch) -> Indices:
        return self._orders.get(
            (epoch.key, window), lambda: self._shuffled(window, epoch)
        )

    def _shuffled(self, window: int, epoch: OrderEpoch) -> Indices:
        parts = self._parts(epoch)
        ends = np.cumsum(self._lengths[parts])
        start = window * self._window
        stop = min(start + self._window, epoch.count)
        shuffled = epoch.rng_for(_WINDOW, window).permutation(stop - start)
        positions = start + shuffled.astype(np.int64)
        places = np.searchsorted(ends, positions, "right")
        left = ends[places] - positions  # from the end of the part
        chosen = parts[places]
        found: Indices = self._starts[chosen] + self._lengths[chosen] - left
        return found

    def _parts(self, epoch: OrderEpoch) -> Indices:
        shuffled = epoch.rng_for(_PARTS).permutation(len(self._lengths))
        return shuffled.astype(np.int64)


class Weighted:
    """Samples drawn with replacement, in proportion to weights."""

    draws_again = True
    is_random = True

    def __init__(
        self, weights: npt.NDArray[np.float64], per_epoch: int | None
    ) -> None:
        self._shares = np.cumsum(weights)
        if len(weights):
            _check_weight(self._shares[-1])
            self._shares /= self._shares[-1]
        self._per_epoch = per_epoch

    def length(self, count: int) -> int:
        _check_count("weights", len(self._shares), count)
        return (
            count if self._per_epoch is None or not count else self._per_epoch
        )

    def at(self, positions: Indices, epoch: OrderEpoch) -> Indices:
        blocks = np.unique(positions // _DRAWN)
        numbers = np.concatenate(
            [epoch.rng_for(_WEIGHTS, int(b)).random(_DRAWN) for b in blocks]
        )
        found = numbers[positions - blocks[0] * _DRAWN]
        return np.asarray(
            np.searchsorted(self._shares, found, "right"), np.int64
        )


class WeightedOnce:
    """Samples drawn without replacement, in proportion to weights.

    Each sample waits a random time, which is exponential with its weight as
    the rate. They come in the order of these times. So each is drawn with a
    probability in proportion to the weights of those that are left.
    """

    draws_again = False
    is_random = True

    def __init__(
        self, weights: npt.NDArray[np.float64], per_epoch: int | None
    ) -> None:
        self._weights = weights
        self._most = int(np.count_nonzero(weights))
        self._per_epoch = self._most if per_epoch is None else per_epoch
        if self._per_epoch > self._most:
            raise ValueError(
                f"`samples_per_epoch` is {per_epoch}; without replacement "
                f"there are {self._most} samples with a weight above 0."
            )
        self._orders: Recent[Indices] = Recent(_KEPT)

    def length(self, count: int) -> int:
        _check_count("weights", len(self._weights), count)
        return self._per_epoch

    def at(self, positions: Indices, epoch: OrderEpoch) -> Indices:
        order = self._orders.get(epoch.key, lambda: self._drawn(epoch))
        return order[positions]

    def _drawn(self, epoch: OrderEpoch) -> Indices:
        waits = epoch.rng_for(_WEIGHTS).exponential(size=len(self._weights))
        with np.errstate(divide="ignore"):
            waits /= self._weights
        order = np.argsort(waits, kind="stable")
        return order[: self._per_epoch].astype(np.int64)


class Sampled:
    """The indices that a user's function returns."""

    draws_again = True
    is_random = True

    def __init__(self, sampler: Sampler, per_epoch: int | None) -> None:
        self._sampler = sampler
        self._per_epoch = per_epoch
        self._drawn: Recent[Indices] = Recent(_KEPT)

    def length(self, count: int) -> int:
        return count if self._per_epoch is None else self._per_epoch

    def at(self, positions: Indices, epoch: OrderEpoch) -> Indices:
        drawn = self._drawn.get(epoch.key, lambda: self._draw(epoch))
        return drawn[positions]

    def _draw(self, epoch: OrderEpoch) -> Indices:
        wanted, count = self.length(epoch.count), epoch.count
        rng = epoch.rng_for(_SAMPLER)
        found = np.asarray(self._sampler(rng, wanted))
        if found.shape != (wanted,) or found.dtype.kind not in "iu":
            asked = "`samples_per_epoch`"
            asked = "the number of samples" if wanted == count else asked
            raise ValueError(
                f"`sampler` must return {wanted} indices, {asked}. It returned "
                f"an array of shape {found.shape} and dtype {found.dtype}."
            )
        if wanted and not 0 <= found.min() <= found.max() < count:
            raise ValueError(
                f"`sampler` returned indices from {found.min()} to "
                f"{found.max()}; there are {count} samples, from 0 on."
            )
        return found.astype(np.int64)


class Mixed:
    """Samples of several groups, in exact proportion to weights.

    With shares w of 1, group k has its use j at the time `(j + 0.5) / w[k]`.
    The uses of all groups in the order of these times are the epoch: of any n
    positions from the first one on, `n * w[k]` are of group k, to within one or
    two. A group that comes to its end begins again, in another order.

    Where the order is random, neighbouring positions exchange their groups:
    those of one turn, in which each group comes at least once.

    Args:
        groups: The indices of each group, of which none is empty.
        weights: A weight above 0 for each group.
        stop: "first": the epoch ends before the first sample that would come
            twice. "all": it ends when each sample has come. Or the number of
            samples.
        shuffles: Whether the order is random.
        count: The number of samples, of which groups may leave some out.
    """

    draws_again = True

    def __init__(
        self,
        groups: Sequence[range | Indices],
        weights: Sequence[float],
        stop: str | int,
        shuffles: bool,
        count: int,
    ) -> None:
        _check_weight(len(groups))
        self._groups = list(groups)
        self._sizes = np.asarray([len(group) for group in groups], np.int64)
        self._count = count
        found = np.asarray(weights, np.float64)
        # A power of two changes no digit, and the sum becomes finite.
        found = np.ldexp(found, -np.frexp(found.max())[1])
        self._shares: npt.NDArray[Any] = np.maximum(
            found / found.sum(), _LEAST_SHARE
        )
        self.is_random = shuffles
        self._turn = min(int(np.ceil(1 / self._shares.min())), _LONGEST_TURN)
        self._span = max(1, _DRAWN // self._turn) * self._turn
        self._spans: Recent[Indices] = Recent(_KEPT)
        self._orders: Recent[Permutation] = Recent(2 * len(groups))
        self._length = self._stop(stop) if isinstance(stop, str) else stop

    def length(self, count: int) -> int:
        _check_count("labels", self._count, count)
        return self._length

    def at(self, positions: Indices, epoch: OrderEpoch) -> Indices:
        groups, uses = _by_block(
            positions,
            self._span,
            lambda span, places: self._uses_of(span, epoch)[:, places],
        )
        found = np.empty(len(positions), np.int64)
        for group in np.unique(groups):
            mine = groups == group
            found[mine] = self._samples_of(int(group), uses[mine], epoch)
        return found

    def _stop(self, stop: str) -> int:
        # Of each group, the first use that would be one too many, or the last
        # use that is needed.
        uses = self._sizes if stop == "first" else self._sizes - 1
        times = self._times(np.arange(len(self._groups)), uses)
        # Of uses at the same time, the first, or the last, as they are ordered.
        in_order = np.argsort(times, kind="stable")
        group = int(in_order[0 if stop == "first" else -1])
        if times[group] > _LONGEST_MIX:
            raise ValueError(
                f"An epoch of {times[group]:.0e} samples would be needed until "
                f"number {group} of `datasets`, whose share is "
                f"{self._shares[group]:.0e}, has come to its end. Raise its "
                "weight, or pass a number as `stop`."
            )
        before = int(self._uses_before(times[group], group).sum())
        return before if stop == "first" else before + 1

    def _times(self, groups: Indices, uses: Indices) -> Any:
        return (uses + 0.5) / self._shares[groups]

    def _uses_before(self, time: float, group: int) -> Indices:
        """Counts each group's uses before the time of a use of `group`.

        Of uses at the same time, those of the group with the lowest number
        come first.
        """
        groups = np.arange(len(self._groups))
        uses = np.floor(time * self._shares + 0.5).astype(np.int64)
        # The estimate may be one off, where rounding decides.
        uses = np.maximum(uses - 1, 0)
        for _ in range(3):
            times = self._times(groups, uses)
            comes_before = (times < time) | ((times == time) & (groups < group))
            uses += comes_before
        return uses

    def _uses_of(self, span: int, epoch: OrderEpoch) -> Indices:
        """Returns the groups of a run of positions, and which uses these are.

        The result has the shape `(2, n)`.
        """
        return self._spans.get(
            (epoch.key_of(self), span), lambda: self._compute_uses(span, epoch)
        )

    def _compute_uses(self, span: int, epoch: OrderEpoch) -> Indices:
        low = span * self._span
        high = min(low + self._span, self._length)
        count = len(self._groups)
        # Each group has at most one use more, or less, than its share.
        begin = self._uses_before(max(0.0, low - count), -1)
        end = self._uses_before(float(high + count), count)
        groups = np.repeat(np.arange(count), end - begin)
        first = np.cumsum(end - begin) - (end - begin)
        uses = np.arange(len(groups)) - np.repeat(first - begin, end - begin)
        order = np.lexsort((groups, self._times(groups, uses)))
        order = order[low - int(begin.sum()) : high - int(begin.sum())]
        groups, uses = groups[order], uses[order]
        if self.is_random:
            drawn = epoch.rng_for(_TURN, span).random(high - low)
            turns = np.arange(high - low) // self._turn
            shuffled = groups[np.lexsort((drawn, turns))]
            # The uses of each group stay in order.
            ascending = uses[np.argsort(groups, kind="stable")]
            uses[np.argsort(shuffled, kind="stable")] = ascending
            groups = shuffled
        return np.stack([groups, uses])

    def _samples_of(
        self, group: int, uses: Indices, epoch: OrderEpoch
    ) -> Indices:
        members = self._groups[group]
        cycles, places = np.divmod(uses, len(members))
        if self.is_random:
            shuffled = np.empty(len(uses), np.int64)
            for cycle in np.unique(cycles):
                mine = cycles == cycle
                order = self._order(group, int(cycle), epoch)
                shuffled[mine] = order.at(places[mine])
            places = shuffled
        return pick(members, places)

    def _order(self, group: int, cycle: int, epoch: OrderEpoch) -> Permutation:
        return self._orders.get(
            (epoch.key, group, cycle),
            lambda: epoch.permutation_for(
                len(self._groups[group]), _GROUP, group, cycle
            ),
        )


class Subset:
    """Another order, of some of the samples.

    Args:
        order: The order of the places in `samples`.
        samples: The indices of the samples.
    """

    def __init__(self, order: Order, samples: range | Indices) -> None:
        self._order = order
        self._samples = samples
        self._most = 0
        if len(samples):
            ends = samples[:: max(1, len(samples) - 1)]
            is_range = isinstance(samples, range)
            self._most = int(np.max(ends if is_range else samples)) + 1

    @property
    def draws_again(self) -> bool:
        return self._order.draws_again

    @property
    def is_random(self) -> bool:
        return self._order.is_random

    def length(self, count: int) -> int:
        if self._most > count:
            raise ValueError(
                f"This part of a dataset has sample {self._most - 1}, and the "
                f"dataset has {count} samples."
            )
        return self._order.length(len(self._samples))

    def at(self, positions: Indices, epoch: OrderEpoch) -> Indices:
        places = self._order.at(positions, epoch.of(len(self._samples)))
        return pick(self._samples, places)


class Bucketed:
    """Another order, with samples of similar length in the same batch.

    The samples of a window, which are some batches, are sorted by their length
    and divided into batches. These come in random order.

    Args:
        order: The order in which samples come to windows.
        lengths: The length of each sample.
        batch_size: Samples in a batch.
        batches: Batches in a window.
        shuffles: Whether the batches of a window come in random order.
    """

    def __init__(
        self,
        order: Order,
        lengths: npt.NDArray[Any],
        batch_size: int,
        batches: int,
        shuffles: bool,
    ) -> None:
        self._order = order
        self._lengths = lengths
        self._batch_size = batch_size
        self._window = batches * batch_size
        self.is_random = shuffles
        self._sorted: Recent[Indices] = Recent(_KEPT)

    @property
    def draws_again(self) -> bool:
        return self._order.draws_again

    def length(self, count: int) -> int:
        _check_count("lengths in `bucket_by`", len(self._lengths), count)
        return self._order.length(count)

    def at(self, positions: Indices, epoch: OrderEpoch) -> Indices:
        return _by_block(
            positions,
            self._window,
            lambda window, places: self._samples_of(window, epoch)[places],
        )

    def _samples_of(self, window: int, epoch: OrderEpoch) -> Indices:
        return self._sorted.get(
            (epoch.key_of(self), window), lambda: self._sort(window, epoch)
        )

    def _sort(self, window: int, epoch: OrderEpoch) -> Indices:
        start = window * self._window
        stop = min(start + self._window, self.length(epoch.count))
        samples = self._order.at(np.arange(start, stop), epoch)
        # The last batch of the epoch may be smaller. It has any lengths, for
        # it may be dropped.
        rest = len(samples) % self._batch_size
        sorted_, last = np.split(samples, [len(samples) - rest])
        ascending = np.argsort(self._lengths[sorted_], kind="stable")
        batches = sorted_[ascending].reshape(-1, self._batch_size)
        if self.is_random:
            batches = epoch.rng_for(_BUCKETS, window).permutation(batches)
        return np.concatenate([batches.ravel(), last])


def _check_weight(most: float) -> None:
    if not most:
        raise ValueError(
            "All samples of this part of a dataset have the weight 0 in "
            "`sampler`, so that none can be drawn."
        )


def _check_count(what: str, have: int, count: int) -> None:
    if have != count:
        raise ValueError(
            f"There are {have} {what} for {count} samples; pass one for each."
        )
