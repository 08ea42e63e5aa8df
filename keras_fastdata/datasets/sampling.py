"""Computes the order of samples in an epoch, one batch at a time.

Positions number the samples of an epoch; batch k begins at position
`k * batch_size`. The sample at a position depends only on seed, epoch and
position.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

import numpy as np
import numpy.typing as npt

from keras_fastdata._dataset_internals import answer, version_of
from keras_fastdata._validation import boolean, integer
from keras_fastdata.building.permutation import Permutation
from keras_fastdata.dataset import FastPyDataset

Indices = npt.NDArray[np.int64]
Sampler = Callable[[np.random.Generator, int], npt.ArrayLike]
_T = TypeVar("_T")

_DRAWN = 4096  # positions whose random numbers are drawn together
_EPOCHS_KEPT = 2  # the present epoch, and the next one

# First elements of this package's keys for `rng_for`; users' are smaller.
_WEIGHTS = 1 << 62
_SAMPLER = _WEIGHTS + 1
SAMPLE = _WEIGHTS + 2
GENERATOR_KEY = _WEIGHTS + 3


class overridable_property(Generic[_T]):  # noqa: N801 - a decorator
    """A property that an instance attribute of the same name overrides."""

    def __init__(self, compute: Callable[[Any], _T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, owner: None, kind: type) -> overridable_property[_T]: ...

    @overload
    def __get__(self, owner: Any, kind: type) -> _T: ...

    def __get__(self, owner: Any, kind: type) -> Any:
        return self if owner is None else self._compute(owner)


class SampledDataset(FastPyDataset):
    """Base class of the datasets whose batches consist of samples.

    `SampleDataset` describes the arguments.
    """

    # The `transform` argument, a method of a subclass, or `None`.
    transform: Callable[..., Any] | None = None

    def __init__(
        self,
        batch_size: int,
        *,
        drop_remainder: bool,
        shuffle: bool | None,
        sampler: Sampler | npt.ArrayLike | None,
        **kwargs: Any,
    ) -> None:
        order = None if shuffle is None and sampler is None else False
        super().__init__(shuffle=order, **kwargs)
        self.batch_size = integer("batch_size", batch_size, least=1)
        self.drop_remainder = bool(drop_remainder)
        shuffles = shuffle is not None and boolean("shuffle", shuffle)
        if shuffles and sampler is not None:
            raise ValueError(
                "`sampler` draws the samples of an epoch in an order of its "
                "own; leave out `shuffle`."
            )
        self._fastdata_order = _Order(shuffles)
        if callable(sampler):
            self._fastdata_order.sampler = sampler
        elif sampler is not None:
            self._fastdata_order.shares = _cumulated(sampler)

    @overridable_property
    def num_samples(self) -> int:
        """The number of samples in an epoch."""
        raise NotImplementedError(
            f"{type(self).__name__} must define the property `num_samples`."
        )

    def __len__(self) -> int:
        whole, rest = divmod(self.num_samples, self.batch_size)
        return whole + bool(rest and not self.drop_remainder)

    def sample_indices(self, index: int) -> Indices:
        """Returns the sample indices of batch `index` in the current epoch.

        Args:
            index: The batch, from 0.

        Returns:
            An int64 array of shape `(n,)`, with n at most `batch_size`.

        Raises:
            IndexError: There is no such batch.
        """
        if not 0 <= index < len(self):
            raise IndexError(
                f"There is no batch {index}; {type(self).__name__} has "
                f"{len(self)}."
            )
        start = index * self.batch_size
        stop = min(start + self.batch_size, self.num_samples)
        positions = np.arange(start, stop, dtype=np.int64)
        order = self._fastdata_order
        if order.sampler is not None:
            return _sampled(self, order.sampler)[positions]
        if order.shares is not None:
            return _drawn_by_weight(self, positions, order.shares)
        if order.shuffles:
            whole: Permutation = answer(self, "epoch_order")(self.num_samples)
            return whole.at(positions)
        return positions

    def __getstate__(self) -> dict[str, Any]:
        return {
            **vars(self),
            "_fastdata_order": copy.copy(self._fastdata_order),
        }


@dataclasses.dataclass(eq=False)
class _Order:
    """Stores a dataset's sampling settings, and how to call `transform`.

    Pickles and copies leave out `drawn` and `transform`.
    """

    shuffles: bool
    sampler: Sampler | None = None
    shares: npt.NDArray[np.float64] | None = None  # cumulated weights
    # What `sampler` drew, by epoch, and for which version, seed and length.
    drawn: tuple[Any, dict[int, Indices]] = (None, {})
    # The latest function, and whether it takes `rng`. For a method, its
    # function, which does not refer to the dataset.
    transform: tuple[Any, bool] = (None, False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "drawn": (None, {}), "transform": (None, False)}

    @property
    def draws_again(self) -> bool:
        """Whether a sample can occur more than once in an epoch."""
        return self.sampler is not None or self.shares is not None


def take_transform(
    dataset: SampledDataset, transform: Callable[..., Any] | None
) -> None:
    """Sets `dataset.transform`; raises `TypeError` if it is not callable."""
    if transform is not None:
        dataset.transform = transform
    if dataset.transform is not None and not callable(dataset.transform):
        raise TypeError(
            f"`transform` must be a function. Received: {dataset.transform!r}"
        )


def transformed(dataset: SampledDataset, *parts: Any) -> Any:
    """Calls `dataset.transform` with `parts`, and returns the result."""
    transform, order = dataset.transform, dataset._fastdata_order
    assert transform is not None
    function = getattr(transform, "__func__", transform)
    known, draws = order.transform
    if known is not function:
        try:
            draws = "rng" in inspect.signature(transform).parameters
        except ValueError:
            draws = False  # a function written in C may have no signature
        order.transform = function, draws
    return transform(*parts, rng=dataset.rng) if draws else transform(*parts)


def _drawn_by_weight(
    dataset: SampledDataset, positions: Indices, shares: npt.NDArray[np.float64]
) -> Indices:
    if len(shares) != dataset.num_samples:
        raise ValueError(
            f"`sampler` has {len(shares)} weights for {dataset.num_samples} "
            "samples; pass one for each."
        )
    rng_for = answer(dataset, "rng_for")
    blocks = np.unique(positions // _DRAWN)
    numbers = np.concatenate(
        [rng_for(_WEIGHTS, int(b)).random(_DRAWN) for b in blocks]
    )
    found = numbers[positions - blocks[0] * _DRAWN]
    return np.asarray(np.searchsorted(shares, found, "right"), np.int64)


def _sampled(dataset: SampledDataset, sampler: Sampler) -> Indices:
    epoch, order = answer(dataset, "epoch"), dataset._fastdata_order
    count = dataset.num_samples
    # A thread may still build for the seed before that of a loaded state.
    version = version_of(dataset), answer(dataset, "seed"), count
    drawn_for, drawn = order.drawn
    if drawn_for != version:
        drawn = {}
    if epoch in drawn:
        return drawn[epoch]
    found = np.asarray(sampler(answer(dataset, "rng_for")(_SAMPLER), count))
    if found.shape != (count,) or found.dtype.kind not in "iu":
        raise ValueError(
            f"`sampler` must return {count} indices, the number of samples. It "
            f"returned an array of shape {found.shape} and dtype {found.dtype}."
        )
    if count and not 0 <= found.min() <= found.max() < count:
        raise ValueError(
            f"`sampler` returned indices from {found.min()} to {found.max()}; "
            f"there are {count} samples, from 0 on."
        )
    drawn = {**drawn, epoch: found.astype(np.int64)}
    kept = sorted(drawn)[-_EPOCHS_KEPT:]
    # One assignment, because threads share the dataset.
    order.drawn = version, {e: drawn[e] for e in kept}
    return drawn[epoch]


def for_iterables(name: str, source: Any, batching: str) -> str:
    """Returns a hint for an error message if `source` is iterable, else "".

    `source` was passed as the argument `name`. The hint shows the further
    arguments `batching`.
    """
    if hasattr(source, "__next__"):
        hint = "Pass the function that makes it, without calling it: "
        name = "function"
    elif hasattr(source, "as_numpy_iterator"):  # a tf.data.Dataset
        hint = "`fit` takes it as it is; for threads of this package pass "
    elif hasattr(source, "__iter__"):
        hint = "For an iterable, use "
    else:
        return ""
    return f" {hint}`GeneratorDataset({name}{batching})`."


def _cumulated(weights: Any) -> npt.NDArray[np.float64]:
    """Returns the cumulative sums of weights, scaled to end at 1."""
    wanted = (
        "`sampler` must be a function or an array of weights, one for each "
        "sample."
    )
    try:
        found = np.asarray(weights, np.float64)
    except (TypeError, ValueError):
        raise TypeError(
            f"{wanted} Received: {weights!r} (of type "
            f"{type(weights).__name__}). For classes that come equally often "
            "pass `sampler=1 / np.bincount(labels)[labels]`."
        ) from None
    if found.ndim != 1:
        raise ValueError(f"{wanted} Received an array of shape {found.shape}.")
    sums: npt.NDArray[np.float64] = np.cumsum(found)
    if not len(sums) or not 0 < sums[-1] < np.inf or found.min() < 0:
        raise ValueError(
            "The weights of `sampler` must be finite, at least 0, and not all "
            f"0. Received: {found}"
        )
    sums /= sums[-1]
    return sums
