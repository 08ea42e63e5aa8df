"""Batches of samples, of which the user writes how to get one.

sample_indices(batch) -> get_sample(i), get_sample(j), ... -> collate
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from keras_fastdata._dataset_internals import answer
from keras_fastdata.building import build
from keras_fastdata.dataset import FastPyDataset
from keras_fastdata.datasets.collate import Padded, Padding, collate
from keras_fastdata.datasets.sampling import (
    SAMPLE,
    SampledDataset,
    Sampler,
    for_iterables,
    overridable_property,
)
from keras_fastdata.workers import exceptions


class _SampleRng:
    """`self.rng`: that of the sample being got, or else the batch's.

    Without `__set__`, as that of `FastPyDataset`, so that a dataset may have
    an attribute of that name.
    """

    def __get__(
        self, dataset: SampleDataset | None, owner: type[SampleDataset]
    ) -> Any:
        if dataset is None:
            return self
        part = (build.current_context() or _by_hand).part
        if part is None and (helped := build.context_for(dataset, "rng")):
            part = helped.part
        if part is None:
            return FastPyDataset.rng.__get__(dataset, owner)
        return part.rng(answer(dataset, "rng_for"))


class _ByHand(threading.local):
    """Of a batch that a thread asks for by hand: the sample being got."""

    part: build.SampleContext | None = None


_by_hand = _ByHand()


class SampleDataset(SampledDataset):
    """Batches of samples, from anything that has samples by number.

    Pass `source`, or write `get_sample(self, index)` and the property
    `num_samples`. A sample is what a batch of one would be, without the first
    axis: arrays and numbers, nested in tuples, lists and dicts. They are
    copied once, straight into the memory in which the batch travels. Python's
    floats become float32.

    Args:
        source: Anything with `__len__` and `__getitem__`: a list, an array,
            an h5py or zarr dataset, a PyTorch or Hugging Face dataset, a
            Grain source. Where it has `__getitems__` (a list of indices in,
            a list of samples out), it is asked for whole batches.
        batch_size: Samples in a batch, at least 1. Defaults to 32.
        drop_remainder: Whether to leave out a last batch that would be
            smaller. Defaults to `False`.
        pad_to: What samples of different shapes are padded to, at the end of
            an axis. "longest": the longest in the batch. An integer or tuple:
            the length of the first axes of every array, where `None` leaves
            an axis as it is. Or a structure of these like that of a sample.
            A longer sample is an error. `None`: shapes must be equal.
        pad_value: What the rest is filled with. Defaults to 0.
        shuffle: `True`: samples come in a new random order every epoch.
            `False`: in their own. Either way `fit(shuffle=)` adds nothing.
            `None`: in their own, and `fit(shuffle=True)`, Keras's default,
            has whole batches come in another order.
        sampler: Draws the samples of an epoch, in place of `shuffle`. An array
            of weights, one for each sample, at least 0: as many samples as
            there are, drawn with replacement in proportion. Or a function
            `sampler(rng, num_samples)` that returns as many indices, drawn
            from the NumPy generator `rng`. Each process that builds calls it
            in each epoch; it must return the same in all.
        **kwargs: Those of `FastPyDataset`.

    Raises:
        TypeError: An argument is unknown or of the wrong type.
        ValueError: An argument is out of range; while batches are fetched:
            samples do not fit together.

    In `get_sample`, `self.rng` is the sample's own: what it draws depends on
    seed, epoch and the sample's index, not on the batch the sample lands in.
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
    """

    rng = _SampleRng()

    def __init__(
        self,
        source: Any = None,
        batch_size: int = 32,
        *,
        drop_remainder: bool = False,
        pad_to: Padding = None,
        pad_value: float = 0,
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
        if hasattr(source, "iloc") and hasattr(source, "to_numpy"):
            source = _column_of(source)
        _check_source(self, source, self.batch_size)
        self.source = source
        self._fastdata_padded = Padded(pad_to, pad_value)

    @overridable_property
    def num_samples(self) -> int:
        """Samples in an epoch; `len(source)` unless it is overridden."""
        return len(_source_of(self, "num_samples"))

    def get_sample(self, index: int) -> Any:
        """Returns sample `index`, from 0 to `num_samples - 1`."""
        return _source_of(self, "get_sample(self, index)")[index]

    def __getitem__(self, index: int) -> Any:
        indices = self.sample_indices(index)
        first = index * self.batch_size
        samples = _samples_of(self, indices, first)
        empty = answer(self, "empty")
        return collate(samples, indices, empty, self._fastdata_padded)


def _samples_of(
    dataset: SampleDataset, indices: npt.NDArray[np.int64], first: int
) -> Iterator[Any]:
    """Gets samples, of which the first is at position `first`."""
    together = getattr(dataset.source, "__getitems__", None)
    if together is not None and _is_inherited(dataset, "get_sample"):
        yield from together(indices.tolist())
        return
    draws_again = dataset._fastdata_order.draws_again
    for place, index in enumerate(indices.tolist()):
        # One that is drawn twice has another generator each time.
        drawn = (first + place,) if draws_again else ()
        context = build.current_context() or _by_hand
        # A sample may be made of those of another such dataset.
        outer = context.part
        context.part = build.SampleContext((SAMPLE, index, *drawn))
        try:
            sample = dataset.get_sample(index)
        except Exception as error:
            exceptions.note(error, f"In sample {index}.")
            raise
        finally:
            context.part = outer
        yield sample


def _source_of(dataset: SampleDataset, missing: str) -> Any:
    if dataset.source is None:
        raise NotImplementedError(
            f"{type(dataset).__name__} must define `{missing}`, or be given "
            "a `source`."
        )
    return dataset.source


def _is_inherited(dataset: SampleDataset, name: str) -> bool:
    return getattr(type(dataset), name) is getattr(SampleDataset, name)


def _column_of(table: Any) -> Any:
    """A column of pandas's by position, as a sample's number is meant."""
    if hasattr(table, "columns"):
        raise TypeError(
            "`source` must hold samples by number, and a DataFrame has columns "
            "by name. Pass it to `ArrayDataset`, or one column of it."
        )
    return table.to_numpy()


def _check_source(dataset: SampleDataset, source: Any, batch_size: int) -> None:
    """Refuses what has no samples by number."""
    if source is None:
        return
    kind = type(source).__name__
    if isinstance(source, (str, bytes)):
        raise TypeError(
            f"`source` must hold samples. Received {source!r}: a path? Open "
            "the file, or write `get_sample`."
        )
    if isinstance(source, Mapping) and len(source) and 0 not in source:
        raise TypeError(
            f"`source` must hold samples by number, from 0 on. A {kind} has "
            "them by key. Pass a list of its values; a dict of arrays is for "
            "`ArrayDataset`."
        )
    hint = for_iterables("source", source, f", batch_size={batch_size}")
    lacks = ""
    if not hasattr(source, "__getitem__"):
        lacks = "__getitem__"
    elif not hasattr(source, "__len__") and _is_inherited(
        dataset, "num_samples"
    ):
        lacks = "__len__"
        hint = hint or " Override the property `num_samples`."
    if lacks:
        raise TypeError(
            "`source` must have samples by number: `__getitem__` and "
            f"`__len__`. Received an object of type {kind}, which has no "
            f"`{lacks}`.{hint}"
        )
