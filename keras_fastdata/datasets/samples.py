"""`SampleDataset` builds batches from the results of `get_sample`.

sample_indices(batch) -> get_sample(i), get_sample(j), ... -> collate

A source with columns gives a batch at once, unless a function needs the
samples:

sample_indices(batch) -> get_columns([i, j, ...]) -> stack_columns
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from keras_fastdata._dataset_internals import answer
from keras_fastdata.building import build_context
from keras_fastdata.dataset import FastPyDataset
from keras_fastdata.datasets.collate import Mask, Padded, Padding
from keras_fastdata.datasets.collate import collate as collate_samples
from keras_fastdata.datasets.columns import ColumnChoice, stack_columns, tidied
from keras_fastdata.datasets.iterables import is_torch_iterable
from keras_fastdata.datasets.order import SAMPLE, Sampler
from keras_fastdata.datasets.sampling import (
    SampledDataset,
    column_of,
    for_iterables,
    labels_of,
    overridable_property,
    part_lengths_of,
    sample_of,
    samples_of,
    take_transform,
    takes_rng,
    transformed,
)
from keras_fastdata.sources.arrow import objects, rows_of
from keras_fastdata.sources.tables import as_source
from keras_fastdata.workers import exceptions


class _SampleRng:
    """The property `rng`, which gives each sample its random generator.

    It has no `__set__`, so that a dataset may have an attribute `rng`.
    """

    def __get__(
        self, dataset: SampleDataset | None, owner: type[SampleDataset]
    ) -> Any:
        if dataset is None:
            return self
        part = (build_context.current_context() or _by_hand).part
        if part is None and (
            helped := build_context.context_for(dataset, "rng")
        ):
            part = helped.part
        if part is None:
            return FastPyDataset.rng.__get__(dataset, owner)
        return part.rng(answer(dataset, "rng_for"))


class _ByHand(threading.local):
    """Stores each thread's sample context for calls outside of a build."""

    part: build_context.SampleContext | None = None


_by_hand = _ByHand()
_AT_ONCE = 1024  # samples that are read together to learn their lengths


class SampleDataset(SampledDataset):
    """Builds batches from samples that are selected by index.

    Pass `source`, or write `get_sample(self, index)` and the property
    `num_samples`. A sample is a batch without its first axis: arrays and
    numbers, nested in tuples, lists and dicts. They are copied once, into the
    memory that the batch travels in. Python floats become float32.

    A table gives its columns: a Hugging Face `Dataset` in any format, a pandas
    or polars frame, an Arrow table or `pyarrow.dataset`, a NumPy array with
    named fields. Without `transform`, `collate` and `get_sample`, the rows of a
    batch are read at once. Columns keep their dtype, except that float64
    becomes float32, as where `fit` gets a frame. Lists of equal length become
    an axis. `pad_to` fills up others, and takes the names of columns. Strings
    become arrays of strings, and categories the values that they name. Nulls,
    and values that are neither numbers nor strings, are an error that names
    the column. In a row that is a dict, a list is an array too.

    Args:
        source: A table; or an object with `__len__` and `__getitem__`: a
            list, an array, an h5py or zarr array, a PyTorch dataset, a Grain
            source. If it has `__getitems__` (which takes a list of indices
            and returns a list of samples), that is called once for a whole
            batch. An iterable belongs to `GeneratorDataset`.
        batch_size: Samples in a batch, at least 1. Defaults to 32.
        transform: A function that gets one sample of `source` and returns
            the sample for the batch. Of a table this is a dict of the columns
            that are read, with the label. A null is `None`, and a float64 a
            Python float. If it has a parameter `rng`, it receives the
            sample's own NumPy generator. A subclass may define a method
            `transform` instead. A subclass with a `get_sample` of its own
            calls it there.
        columns: The name of a column: the inputs are this column, as one
            array. A list of names: the inputs are a dict of these columns.
            `None`: a dict of all columns but the label. Also for samples that
            are dicts.
        label: The name of the column with the targets, or a list of names
            for a dict of targets. The batch is then `(inputs, targets)`. The
            inputs have this column as well if `columns` names it. After a
            `transform` that returns no dict, the argument has no effect.
            `None`: the batch has inputs only.
        collate: A function that gets the list of a batch's samples and
            returns the batch, in place of stacking them; `label` and `pad_to`
            are then its own affair. If it has a parameter `rng`, it receives
            the batch's own NumPy generator. A subclass may define a method
            `collate` instead.
        drop_remainder: Whether to leave out a smaller last batch. Defaults
            to `False`.
        pad_to: The length to which axes of samples are padded, at their end.
            "longest": the longest in the batch. An integer or a tuple: the
            lengths of the first axes of every array; `None` in a tuple leaves
            an axis as it is. Or a structure of these like that of a sample.
            A longer sample is an error. `None`: shapes must be equal.
        pad_value: The value that fills the padding. Defaults to 0.
        truncate: `True`: what is longer than the length in `pad_to` is cut, at
            the end. An integer: the first axis of parts that are padded is cut
            to that length, also with "longest". Defaults to `False`.
        pad_to_multiple_of: With "longest": an integer to a multiple of which
            the first axis is padded, so that fewer different shapes occur. Or
            a tuple for the first axes. `None`: no multiple.
        mask: The name of a boolean array that inputs get, if they are a dict
            and padded: shape `(samples, length)`, `True` where there is data
            along the first axis of a sample, `False` where there is padding.
            Or a dict with such a name for each part. `None`: no mask. A sample
            `(x, y)` has the inputs `x`. The share of padding in a batch is
            `1 - mask.mean()`.
        shuffle: `True`: samples come in a new random order every epoch.
            `False`: in order. In both cases `fit(shuffle=)` has no effect.
            `None`: in order, and `fit(shuffle=True)`, Keras's default,
            shuffles whole batches.
        sampler: Draws the samples of an epoch, in place of `shuffle`.
            An array with a weight of at least 0 for each sample: samples are
            drawn in proportion to the weights.
            "balanced": all classes come equally often, to within one or two
            samples from the epoch's beginning to any place in it, and all
            samples of a class equally often. A dict with a weight of at least
            0 for each class: classes come in proportion to these; a class
            that is not in it has 1. Both are for datasets that know their
            labels, as `ArrayDataset` and `ImageFileDataset` do.
            A function `sampler(rng, n)` that returns n indices, drawn from
            the NumPy generator `rng`, where n is the number of samples in an
            epoch. Each process that builds batches calls it in each epoch;
            all must get the same result. A method of the dataset may read
            `self.epoch`: so a curriculum begins with the easy samples.
        samples_per_epoch: The number of samples in an epoch, at least 1. If
            it is more than there are, samples come again, each equally often
            to within one. If it is less, an epoch has the first ones of its
            order. `None`: each sample comes once; with a `sampler`, as many
            come as there are.
        replacement: With an array of weights: whether a sample can be drawn
            again. `False`: an epoch has each sample with a weight above 0
            once, or `samples_per_epoch` of them, and heavy ones come early.
            Defaults to `True`.
        shuffle_window: With `shuffle=True`, and a source of parts that are
            best read together, such as `sources.Parquet`: how many samples
            are shuffled together, at least 1. Parts come in random order, and
            each window of so many samples is shuffled. `None`: all samples
            are shuffled together.
        bucket_by: The length of each sample: an array of numbers, which is
            copied, or a function of a sample, which is called once for each, or
            the name of a column, of lengths or of lists. A batch then has
            samples of similar length, so that less is padded. `None`: lengths
            do not matter.
        bucket_batches: With `bucket_by`: how many batches are sorted by length
            together, at least 1. A larger number means less padding, a
            smaller number means a more random order. Defaults to 100.
        **kwargs: Arguments of `FastPyDataset`.

    Raises:
        TypeError: An argument is unknown or of the wrong type.
        ValueError: An argument is out of range; while batches are fetched:
            samples do not fit together.

    In `get_sample`, `self.rng` belongs to the sample: its draws depend on
    seed, epoch and the sample's index, and not on the sample's batch.
    `np.random` and `random` are seeded for each batch, except in threads.

    Example:

    >>> import numpy as np
    >>> from keras_fastdata import SampleDataset
    >>> class Noisy(SampleDataset):
    ...     num_samples = 10
    ...     def get_sample(self, index):
    ...         return index + self.rng.normal(0, 0.1, size=3), index % 2
    >>> with Noisy(batch_size=4, shuffle=True, seed=1) as dataset:
    ...     [x.shape for x, y in dataset]
    [(4, 3), (4, 3), (2, 3)]
    >>> ragged = [np.array([1, 2, 3]), np.array([4, 5])]
    >>> SampleDataset(ragged, pad_to="longest")[0]
    array([[1, 2, 3],
           [4, 5, 0]])
    >>> SampleDataset(
    ...     [{"tokens": row} for row in ragged],
    ...     pad_to="longest", mask="padding_mask",
    ... )[0]["padding_mask"]
    array([[ True,  True,  True],
           [ True,  True, False]])
    >>> table = np.array([(1.5, 0), (2.5, 1)], [("size", "f8"), ("kind", "i8")])
    >>> SampleDataset(table, columns="size", label="kind")[0]
    (array([1.5, 2.5], dtype=float32), array([0, 1]))
    """

    rng = _SampleRng()
    # The argument `collate`, a method of a subclass, or `None`.
    collate: Callable[..., Any] | None = None

    def __init__(
        self,
        source: Any = None,
        batch_size: int = 32,
        *,
        transform: Callable[..., Any] | None = None,
        columns: str | Sequence[str] | None = None,
        label: str | Sequence[str] | None = None,
        collate: Callable[..., Any] | None = None,
        drop_remainder: bool = False,
        pad_to: Padding = None,
        pad_value: float = 0,
        truncate: bool | int = False,
        pad_to_multiple_of: int | tuple[int | None, ...] | None = None,
        mask: Mask | None = None,
        shuffle: bool | None = None,
        sampler: Sampler | npt.ArrayLike | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            batch_size,
            drop_remainder=drop_remainder,
            shuffle=shuffle,
            sampler=sampler,
            **kwargs,
        )
        self._fastdata_choice = ColumnChoice.of(columns, label)
        self._fastdata_padded = Padded(
            pad_to, pad_value, truncate, pad_to_multiple_of, mask
        )
        take_transform(self, transform)
        _take_collate(self, collate)
        if transform is not None and not _is_inherited(self, "get_sample"):
            raise TypeError(
                f"{type(self).__name__} has a `get_sample` of its own, so that "
                "`transform` would not be called. Call it in `get_sample`."
            )
        source = _checked_source(self, source)
        self.source = source
        if hasattr(source, "get_columns") and _is_inherited(self, "get_sample"):
            choice = self._fastdata_choice
            choice.read(source.columns, self.transform is not None)

    @overridable_property
    def num_samples(self) -> int:
        """The number of samples in an epoch; `len(source)` by default."""
        return len(_source_of(self, "num_samples"))

    def get_sample(self, index: int) -> Any:
        """Returns the sample at `index`, from 0 to `num_samples - 1`."""
        source = _source_of(self, "get_sample(self, index)")
        if hasattr(source, "get_columns"):
            (row,) = rows_of(_columns_of(self, np.array([index])), 1)
            return _finished(self, row)
        return _finished(self, source[index])

    def __getitem__(self, index: int) -> Any:
        indices = self.sample_indices(index)
        first = index * self.batch_size
        padded, empty = self._fastdata_padded, answer(self, "empty")
        if self.collate is not None:
            samples = list(_samples_of(self, indices, first))
            rng = {"rng": self.rng} if takes_rng(self.collate) else {}
            return self.collate(samples, **rng)
        batch: Any
        if _gives_columns(self) and self.transform is None:
            columns = _columns_of(self, indices)
            batch = stack_columns(columns, indices, empty, padded)
        else:
            samples_of = _samples_of(self, indices, first)
            batch = collate_samples(samples_of, indices, empty, padded)
        return self._fastdata_choice.split(batch)


def _take_collate(
    dataset: SampleDataset, function: Callable[..., Any] | None
) -> None:
    if function is not None and not callable(function):
        raise TypeError(f"`collate` must be a function. Received: {function!r}")
    if function is not None:
        dataset.collate = function


def _gives_columns(dataset: SampleDataset) -> bool:
    """Returns whether the source gives whole batches, column by column."""
    return hasattr(dataset.source, "get_columns") and _is_inherited(
        dataset, "get_sample"
    )


def _columns_of(
    dataset: SampleDataset, indices: npt.NDArray[np.int64]
) -> Mapping[str, Any]:
    source = dataset.source
    makes = dataset.transform is not None
    names = dataset._fastdata_choice.read(source.columns, makes)
    columns: Mapping[str, Any] = source.get_columns(indices, names)
    return columns


def _fetched(
    dataset: SampleDataset, indices: npt.NDArray[np.int64]
) -> Sequence[Any] | None:
    """Returns the source's samples if it gives them together, else `None`."""
    if not _is_inherited(dataset, "get_sample"):
        return None
    if _gives_columns(dataset):
        return rows_of(_columns_of(dataset, indices), len(indices))
    together = getattr(dataset.source, "__getitems__", None)
    if together is None:
        return None
    found: Sequence[Any] = together(indices.tolist())
    if len(found) != len(indices):
        more = len(found) > len(indices)
        raise ValueError(
            f"The source was asked for {len(indices)} samples and gave "
            f"{'more' if more else len(found)}."
        )
    return found


def _finished(dataset: SampleDataset, sample: Any) -> Any:
    """Returns a sample of the source as `columns` and `transform` make it."""
    if sample is None:
        raise ValueError(
            "The source gave None for a sample. Grain's `MapDataset.filter` "
            "does so: leave out samples before, or pass "
            "`source.to_iter_dataset()` to `GeneratorDataset`."
        )
    if not hasattr(dataset.source, "get_columns"):
        makes = dataset.transform is not None
        sample = dataset._fastdata_choice.select(sample, makes)
    if dataset.transform is not None:
        sample = transformed(dataset, sample)
    return tidied(sample)


def _samples_of(
    dataset: SampleDataset, indices: npt.NDArray[np.int64], first: int
) -> Iterator[Any]:
    """Yields the samples with the given indices.

    The first of them is at position `first` of the epoch.
    """
    fetched = _fetched(dataset, indices)
    if fetched is not None and dataset.transform is None:
        yield from (_finished(dataset, sample) for sample in fetched)
        return
    draws_again = dataset._fastdata_order.order_of(dataset).draws_again
    for place, index in enumerate(indices.tolist()):
        # A sample that is drawn twice gets another generator each time.
        drawn = (first + place,) if draws_again else ()
        context = build_context.current_context() or _by_hand
        # `get_sample` may call that of another dataset.
        outer = context.part
        context.part = build_context.SampleContext((SAMPLE, index, *drawn))
        try:
            if fetched is None:
                sample = dataset.get_sample(index)
            else:
                sample = _finished(dataset, fetched[place])
        except Exception as error:
            exceptions.note(error, f"In sample {index}.")
            raise
        finally:
            context.part = outer
        yield sample


@samples_of.register
def _(dataset: SampleDataset) -> Iterator[Any]:
    count = dataset.num_samples
    if not _gives_columns(dataset):
        yield from map(dataset.get_sample, range(count))
        return
    for first in range(0, count, _AT_ONCE):
        indices = np.arange(first, min(first + _AT_ONCE, count))
        rows = rows_of(_columns_of(dataset, indices), len(indices))
        yield from (_finished(dataset, row) for row in rows)


@sample_of.register
def _(dataset: SampleDataset, index: int) -> Any:
    sample = dataset.get_sample(index)
    # A function `collate` gets the samples with their labels in them.
    if dataset.collate is not None:
        return sample
    return dataset._fastdata_choice.split(sample)


@labels_of.register
def _(dataset: SampleDataset) -> Any:
    label = dataset._fastdata_choice.label
    if isinstance(label, str) and _gives_columns(dataset):
        return column_of(dataset, label)
    return labels_of.dispatch(object)(dataset)


@column_of.register
def _(dataset: SampleDataset, name: str) -> npt.NDArray[Any]:
    if not _gives_columns(dataset):
        found: npt.NDArray[Any] = column_of.dispatch(object)(dataset, name)
        return found
    ColumnChoice.of(name, None).read(dataset.source.columns)
    parts = []
    for start in range(0, len(dataset.source), _AT_ONCE):
        stop = min(start + _AT_ONCE, len(dataset.source))
        columns = dataset.source.get_columns(np.arange(start, stop), [name])
        column: Any = columns[name]
        is_flat = isinstance(column, np.ndarray) and column.ndim == 1
        parts.append(column if is_flat else objects(list(column)))
    return np.concatenate(parts) if parts else np.empty(0)


@part_lengths_of.register
def _(dataset: SampleDataset) -> Any:
    lengths = getattr(dataset.source, "part_lengths", None)
    if lengths is None:
        return part_lengths_of.dispatch(object)(dataset)
    return lengths


def _source_of(dataset: SampleDataset, missing: str) -> Any:
    if dataset.source is None:
        raise NotImplementedError(
            f"{type(dataset).__name__} must define `{missing}`, or be given "
            "a `source`."
        )
    return dataset.source


def _is_inherited(dataset: SampleDataset, name: str) -> bool:
    return getattr(type(dataset), name) is getattr(SampleDataset, name)


def _checked_source(dataset: SampleDataset, source: Any) -> Any:
    """Checks the source; raises `TypeError` if it cannot be indexed."""
    if source is None:
        return None
    source = as_source(source)
    if hasattr(source, "iloc") and hasattr(source, "columns"):
        raise TypeError(
            f"`source` is a {type(source).__name__} of another library than "
            "pandas. Make it a pandas or Arrow table, such as by "
            "`.to_pandas()`, or pass its arrays to `ArrayDataset`."
        )
    kind = type(source).__name__
    if isinstance(source, (str, bytes)):
        raise TypeError(
            f"`source` must hold samples. Received {source!r}: a path? Open "
            "the file, or write `get_sample`."
        )
    if isinstance(source, Mapping) and len(source) and 0 not in source:
        raise TypeError(
            f"`source` must hold samples numbered from 0. A {kind} has them "
            "by key. Pass a list of its values; pass a dict of arrays to "
            "`ArrayDataset`."
        )
    batching = f", batch_size={dataset.batch_size}"
    if _holds_columns(dataset, source):
        raise TypeError(
            f"`SampleDataset` takes each array of the {kind} for one sample. "
            "The arrays have as many rows, but not as many axes. If each row "
            f"is a sample, use `ArrayDataset(*source{batching})`."
        )
    for name, value in dataset._fastdata_choice._asdict().items():
        batching += f", {name}={value!r}" if value is not None else ""
    hint = for_iterables("source", source, batching)
    lacks = ""
    if not hasattr(source, "__getitem__") or is_torch_iterable(source):
        lacks = "__getitem__"
    elif not hasattr(source, "__len__") and _is_inherited(
        dataset, "num_samples"
    ):
        lacks = "__len__"
        hint = hint or " Override the property `num_samples`."
    if lacks:
        raise TypeError(
            "`source` must hold numbered samples: `__getitem__` and "
            f"`__len__`. Received an object of type {kind}, which has no "
            f"`{lacks}`.{hint}"
        )
    return source


def _holds_columns(dataset: SampleDataset, source: Any) -> bool:
    """Returns whether the source is like `(x, y)`, and cannot be batched."""
    uses_samples = (
        dataset.transform is not None
        or dataset.collate is not None
        or dataset._fastdata_padded.to is not None
        or not _is_inherited(dataset, "get_sample")
    )
    if uses_samples or not isinstance(source, (tuple, list)):
        return False
    if not all(isinstance(each, np.ndarray) and each.ndim for each in source):
        return False
    rows, axes = {len(a) for a in source}, {a.ndim for a in source}
    return len(rows) == 1 and len(axes) > 1
