"""The base class of the datasets whose batches consist of samples.

Positions number the samples of an epoch; batch k begins at position
`k * batch_size`. An order (`datasets/order.py`) knows the sample at a position.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar, overload

import numpy as np
import numpy.typing as npt

from keras_fastdata._call_stack import ignoring_errors
from keras_fastdata._dataset_internals import answer, version_of
from keras_fastdata._validation import boolean, integer, optional_integer
from keras_fastdata.building import build, build_context, seeding
from keras_fastdata.dataset import FastPyDataset
from keras_fastdata.datasets import order as orders
from keras_fastdata.datasets.order import Order, Sampler
from keras_fastdata.sources.source import Indices

_T = TypeVar("_T")

# The arguments that decide which samples come, and in which order.
ORDER_ARGUMENTS = frozenset(
    {
        *("shuffle", "shuffle_window", "sampler", "samples_per_epoch"),
        *("replacement", "bucket_by", "bucket_batches"),
    }
)


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
        sampler: Sampler | npt.ArrayLike | Mapping[Any, float] | str | None,
        shuffle_window: int | None = None,
        replacement: bool = True,
        samples_per_epoch: int | None = None,
        bucket_by: Callable[[Any], int] | npt.ArrayLike | str | None = None,
        bucket_batches: int = 100,
        **kwargs: Any,
    ) -> None:
        batch_size = integer("batch_size", batch_size, least=1)
        shuffles = shuffle is not None and boolean("shuffle", shuffle)
        sampling = Sampling(
            shuffles,
            _checked_sampler(sampler),
            window=optional_integer("shuffle_window", shuffle_window, least=1),
            replaces=boolean("replacement", replacement),
            per_epoch=optional_integer(
                "samples_per_epoch", samples_per_epoch, least=1
            ),
            bucket_by=copy.copy(bucket_by)
            if isinstance(bucket_by, (list, np.ndarray))
            else bucket_by,
            bucket_batches=integer("bucket_batches", bucket_batches, least=1),
        )
        decides = shuffle is not None or sampler is not None
        super().__init__(shuffle=False if decides else None, **kwargs)
        self.batch_size = batch_size
        self.drop_remainder = bool(drop_remainder)
        self._fastdata_order = sampling

    @overridable_property
    def num_samples(self) -> int:
        """The number of samples."""
        raise NotImplementedError(
            f"{type(self).__name__} must define the property `num_samples`."
        )

    def __len__(self) -> int:
        length = self._fastdata_order.order_of(self).length(self.num_samples)
        whole, rest = divmod(length, self.batch_size)
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
        count, order = self.num_samples, self._fastdata_order.order_of(self)
        start = index * self.batch_size
        stop = min(start + self.batch_size, order.length(count))
        return order.at(np.arange(start, stop), epoch_of(self, count))


@dataclasses.dataclass(eq=False)
class Sampling:
    """The arguments that decide on the order of samples, and that order.

    `SampleDataset` describes the arguments.

    Attributes:
        subset: The samples that belong to the dataset; `None` for all.
        given: An order that the arguments do not describe, or `None`.
        order: The dataset's version that the order was made for, which a
            worker does not know; the order; and a weak reference to the
            dataset. `None` before its first use.
        transform: The latest function of `transform`, and whether it takes
            `rng`. For a method, its function, which does not refer to the
            dataset. Pickles and copies leave it out.
    """

    # Made from the rest, and anew for each version of the dataset.
    _fastdata_passing = ("order", "transform")

    shuffles: bool
    sampler: Any  # a function, weights, weights of classes, or "balanced"
    window: int | None = None
    replaces: bool = True
    per_epoch: int | None = None
    bucket_by: Any = None
    bucket_batches: int = 100
    subset: range | Indices | None = None
    given: Order | None = None
    order: tuple[Any, Order, Callable[[], Any]] | None = None
    transform: tuple[Any, bool] = (None, False)

    def __post_init__(self) -> None:
        if self.shuffles and self.sampler is not None:
            raise ValueError(
                "`sampler` draws the samples of an epoch in an order of its "
                "own; leave out `shuffle`."
            )
        if not self.replaces and not isinstance(self.sampler, np.ndarray):
            raise ValueError(
                "`replacement=False` needs `sampler`, an array of weights."
            )
        if self.window is None:
            return
        if not self.shuffles or self.per_epoch is not None:
            raise ValueError(
                "`shuffle_window` says how far `shuffle=True` moves samples. "
                "It needs `shuffle=True`, and no `sampler` or "
                "`samples_per_epoch`."
            )

    def __getstate__(self) -> dict[str, Any]:
        order, dataset = None, self.order and self.order[2]()
        # A dataset that has changed since goes to workers with a new order. An
        # error comes where the dataset is used.
        with ignoring_errors():
            order = dataset and (None, self.order_of(dataset), _nothing)
        return {**vars(self), "order": order, "transform": (None, False)}

    def order_of(self, dataset: SampledDataset) -> Order:
        """Returns the order of a dataset's samples; the first call makes it."""
        if self.given is not None:
            return self.given
        version = version_of(dataset)
        if self.order is None or self.order[0] is not version:
            self.order = version, self._whole(dataset), weakref.ref(dataset)
        return self.order[1]

    def give(self, order: Order) -> None:
        """Sets an order that the arguments do not describe."""
        self.given = order

    def of(self, samples: range | Indices) -> Sampling:
        """Returns the same arguments for some of the dataset's samples."""
        whole = self.subset
        if isinstance(whole, range) and isinstance(samples, range):
            samples = whole[samples.start : samples.stop : samples.step]
        elif whole is not None:
            samples = orders.pick(whole, np.asarray(samples, np.int64))
        return dataclasses.replace(self, subset=samples, order=None)

    def copied(self) -> Sampling:
        """Returns the same arguments for another dataset of these samples."""
        return dataclasses.replace(self, order=None, transform=(None, False))

    def _whole(self, dataset: SampledDataset) -> Order:
        order = self._make(dataset)
        if self.bucket_by is not None:
            lengths = _lengths_of(dataset, self.bucket_by)
            order = orders.Bucketed(
                order,
                self._part(lengths),
                dataset.batch_size,
                self.bucket_batches,
                order.is_random,
            )
        return (
            order if self.subset is None else orders.Subset(order, self.subset)
        )

    def _part(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Returns the values that belong to the samples of the subset."""
        if isinstance(self.subset, range):
            subset = self.subset
            return values[subset.start : subset.stop : subset.step]
        return values if self.subset is None else values[self.subset]

    def _make(self, dataset: SampledDataset) -> Order:
        if isinstance(self.sampler, (str, dict)):
            labels = _checked_labels(labels_of(dataset))
            if isinstance(self.sampler, dict):
                _check_classes(self.sampler, labels)
            labels = self._part(labels)
            if not len(labels):
                return orders.InOrder()
            return _by_class(labels, self.sampler, self.per_epoch)
        if callable(self.sampler):
            return orders.Sampled(self.sampler, self.per_epoch)
        if self.sampler is not None and self.replaces:
            return orders.Weighted(self._part(self.sampler), self.per_epoch)
        if self.sampler is not None:
            return orders.WeightedOnce(self._part(self.sampler), self.per_epoch)
        if self.window is not None:
            lengths = np.asarray(part_lengths_of(dataset), np.int64)
            if self.subset is not None:
                parts = self._part(np.repeat(np.arange(len(lengths)), lengths))
                # Where the subset jumps to and fro, parts are shorter.
                cuts = np.flatnonzero(np.diff(parts)) + 1
                lengths = np.diff(np.concatenate([[0], cuts, [len(parts)]]))
            return orders.ShuffledInWindows(lengths, self.window)
        kind = orders.Shuffled if self.shuffles else orders.InOrder
        return kind(self.per_epoch)


def _nothing() -> None:
    """Stands for the reference to a dataset that a pickle leaves out."""


def epoch_of(dataset: FastPyDataset, count: int) -> orders.OrderEpoch:
    """Returns the dataset's current epoch, for an order of `count` things."""
    return orders.OrderEpoch(
        count, version_of(dataset), functools.partial(_ask, dataset)
    )


def _ask(dataset: FastPyDataset, name: str) -> Any:
    """Returns a value of the dataset, from which its order is drawn."""
    value, context = answer(dataset, name), build_context.current_context()
    if context is not None and context.asked == f"self.{name}":
        context.note_asked(
            "an order of samples that is drawn in each epoch (without "
            "`shuffle` and `sampler`, `fit` shuffles whole batches)"
        )
    return value


PASS_WEIGHTS = "Pass weights: `sampler=1 / np.bincount(labels)[labels]`."


@functools.singledispatch
def labels_of(dataset: Any) -> Any:
    """Returns the label of each sample, for a `sampler` that is about classes.

    A class that knows its labels registers a function.
    """
    raise ValueError(
        f"This {type(dataset).__name__} does not know the labels of its "
        f"samples, which `sampler` is about. {PASS_WEIGHTS}"
    )


@functools.singledispatch
def part_lengths_of(dataset: Any) -> Any:
    """Returns the lengths of runs of samples that are best read together.

    A class that knows such parts registers a function.
    """
    raise ValueError(
        f"`shuffle_window` is for a source of parts that are best read "
        f"together, and this {type(dataset).__name__} has none. Leave it out."
    )


def _by_class(
    labels: npt.NDArray[Any],
    sampler: str | dict[Any, float],
    per_epoch: int | None,
) -> Order:
    """Returns an order in which classes come as often as their weights say."""
    classes, numbers = np.unique(labels, return_inverse=True)
    members = np.argsort(numbers, kind="stable")
    groups = np.split(members, np.cumsum(np.bincount(numbers))[:-1])
    weights = dict.fromkeys(classes.tolist(), 1.0)
    if isinstance(sampler, dict):
        weights = {name: sampler.get(name, 1.0) for name in weights}
    chosen = [
        (group, weight)
        for group, weight in zip(groups, weights.values(), strict=True)
        if weight
    ]
    length = len(labels) if per_epoch is None else per_epoch
    return orders.Mixed(
        [group for group, _ in chosen],
        [weight for _, weight in chosen],
        length,
        shuffles=True,
        count=len(labels),
    )


def _check_classes(sampler: dict[Any, float], labels: npt.NDArray[Any]) -> None:
    classes = np.unique(labels).tolist()
    if unknown := sampler.keys() - set(classes):
        raise ValueError(
            f"`sampler` has weights for {sorted(unknown)}, and the labels "
            f"are {classes}."
        )


def _checked_labels(labels: Any) -> npt.NDArray[Any]:
    found = np.asarray(labels)
    if found.ndim != 1:
        raise ValueError(
            "`sampler` needs one label for each sample. The labels are an "
            f"array of shape {found.shape}; pass weights instead."
        )
    _check_nulls("sampler", "label", found)
    return found


def _check_nulls(argument: str, what: str, values: npt.NDArray[Any]) -> None:
    """Raises `ValueError` if a column of objects has a null."""
    if values.dtype.kind == "O":
        rows = [row for row, value in enumerate(values) if value is None]
        if rows:
            raise ValueError(
                f"`{argument}` needs the {what} of each sample, and row "
                f"{rows[0]} has none (null). Fill the nulls in the table, or "
                "drop these rows."
            )


def _lengths_of(dataset: SampledDataset, by: Any) -> npt.NDArray[Any]:
    """Returns the length of each sample, as `bucket_by` says."""
    if isinstance(by, str):
        by = column_of(dataset, by)
        if by.dtype.kind == "O":
            _check_nulls("bucket_by", "length", by)
            by = [len(row) for row in by]
    if callable(by):
        # A transform may draw. The order must be the same after a resume.
        by = build.run_seeded(
            dataset,
            lambda: [by(sample) for sample in samples_of(dataset)],
            (answer(dataset, "seed"), seeding.LENGTHS),
            epoch=0,
        )
    found = np.empty(0, object)
    with contextlib.suppress(ValueError):  # of lists of different lengths
        found = np.asarray(by)
    if found.ndim != 1 or found.dtype.kind not in "iuf":
        raise ValueError(
            "`bucket_by` must be a length for each sample, or a function that "
            f"returns the length of a sample. Received: {by!r}"
        )
    return found


@functools.singledispatch
def column_of(dataset: Any, name: str) -> npt.NDArray[Any]:
    """Returns a whole column of a dataset's source.

    Lists of different lengths come in an array of objects. A class whose
    source can have columns registers a function.
    """
    raise ValueError(
        f"`bucket_by` names a column, {name!r}, and the samples of this "
        f"{type(dataset).__name__} are no rows of a table. Pass an array with "
        "a length for each sample, or a function of a sample."
    )


@functools.singledispatch
def samples_of(dataset: Any) -> Iterator[Any]:
    """Yields all samples of a dataset, to learn their lengths.

    A class that has samples one by one registers a function.
    """
    raise ValueError(
        f"{type(dataset).__name__} has rows, not samples. Pass `bucket_by` an "
        "array with a length for each row."
    )


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
        draws = takes_rng(transform)
        order.transform = function, draws
    return transform(*parts, rng=dataset.rng) if draws else transform(*parts)


def takes_rng(function: Callable[..., Any]) -> bool:
    """Returns whether a user's function has a parameter `rng`."""
    try:
        return "rng" in inspect.signature(function).parameters
    except ValueError:
        return False  # a function written in C may have no signature


@functools.singledispatch
def sample_of(dataset: Any, index: int) -> Any:
    """Returns a sample of a dataset, as it is in a batch.

    Each class of datasets with samples registers a function.
    """
    raise NotImplementedError(f"{type(dataset).__name__} has no samples.")


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


def _checked_sampler(sampler: Any) -> Any:
    """Checks and normalizes the argument `sampler`."""
    if sampler is None or callable(sampler):
        return sampler
    wanted = (
        "`sampler` must be an array with a weight of at least 0 for each "
        'sample, a function, "balanced", or a dict with a weight for each '
        "class."
    )
    is_dict = isinstance(sampler, Mapping)
    if isinstance(sampler, str) and sampler == "balanced":
        return sampler
    try:
        values = list(sampler.values()) if is_dict else sampler
        found = np.array(values, np.float64)
    except (TypeError, ValueError):
        raise TypeError(
            f"{wanted} Received: {sampler!r} (of type {type(sampler).__name__})"
        ) from None
    if found.ndim != 1:
        raise ValueError(f"{wanted} Received an array of shape {found.shape}.")
    if not 0 < found.sum() < np.inf or found.min() < 0:
        raise ValueError(
            "The weights of `sampler` must be finite, at least 0, and not all "
            f"0. Received: {found}"
        )
    if is_dict:
        return dict(zip(sampler, found.tolist(), strict=True))
    return found
