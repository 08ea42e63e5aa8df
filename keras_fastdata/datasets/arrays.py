"""Builds batches from the rows of arrays, in memory or in a file."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from keras_fastdata._dataset_internals import answer
from keras_fastdata.building.build_context import Empty
from keras_fastdata.datasets.order import Sampler
from keras_fastdata.datasets.sampling import (
    PASS_WEIGHTS,
    SampledDataset,
    labels_of,
    overridable_property,
    sample_of,
    take_transform,
    transformed,
)
from keras_fastdata.datasets.windows import Windows
from keras_fastdata.memory.ownership import map_leaves
from keras_fastdata.sources.source import Indices

_PARTS = ("x", "y", "sample_weight")  # of a batch


class ArrayDataset(SampledDataset):
    """Builds batches from the rows of arrays.

    Worker processes share arrays in memory; none makes a copy. From a file
    only the rows of a batch are read, in the order of the file.

    Args:
        x: Inputs: an array, a memory map, an h5py or zarr dataset, a pandas
            object; or a nested structure (tuples, lists, dicts) of these, all
            of the same length, the number of samples.
        y: Targets, of the same kinds as `x`, or `None`.
        sample_weight: A weight for each sample, of the same kinds, or `None`.
        batch_size: Samples in a batch, at least 1. Defaults to 32.
        transform: A function that gets the rows of a batch and returns the
            batch: `transform(x)`, `transform(x, y)` or
            `transform(x, y, sample_weight)`. It may write to its arguments.
            If it has a parameter `rng`, it receives the batch's own NumPy
            generator. A subclass may define a method `transform` instead.
        drop_remainder: Whether to leave out a smaller last batch. Defaults
            to `False`.
        shuffle: As in `SampleDataset`. `True`: a new random order of all
            samples every epoch. `False`: the order of the arrays. `None`: the
            order of the arrays, and `fit(shuffle=True)` shuffles whole
            batches, which suits files.
        sampler: As in `SampleDataset`. Labels are `y`.
        **kwargs: `samples_per_epoch`, `replacement`, `bucket_by` and
            `bucket_batches` as in `SampleDataset`, and the arguments of
            `FastPyDataset`.

    Attributes:
        x: The inputs. You may assign others, also of another length if you
            assign `y` and `sample_weight` before the next epoch, too.
        y: The targets, or `None`.
        sample_weight: The weights, or `None`.

    Raises:
        TypeError: An argument is unknown or of the wrong type.
        ValueError: An argument is out of range, or lengths differ.

    Example:

    >>> import numpy as np
    >>> from keras_fastdata import ArrayDataset
    >>> x, y = np.arange(10.0).reshape(5, 2), np.arange(5)
    >>> with ArrayDataset(x, y, batch_size=2) as dataset:
    ...     [targets.tolist() for _, targets in dataset]
    [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        batch_size: int = 32,
        transform: Callable[..., Any] | None = None,
        *,
        drop_remainder: bool = False,
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
        take_transform(self, transform)
        given = zip(_PARTS, (x, y, sample_weight), strict=True)
        self.arrays = _arrays_of(_usable_part(*one) for one in given)
        _count_of(self.arrays)

    x = overridable_property(lambda self: _part_of(self, 0))
    y = overridable_property(lambda self: _part_of(self, 1))
    sample_weight = overridable_property(lambda self: _part_of(self, 2))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _PARTS and "arrays" in vars(self):
            is_own = getattr(type(self), name) is vars(ArrayDataset)[name]
            if is_own:  # no property of a subclass
                self.arrays = _replaced(self.arrays, name, value)
                if name not in vars(self):
                    return
        super().__setattr__(name, value)

    @overridable_property
    def num_samples(self) -> int:
        """The number of rows of the arrays."""
        return _count_of(self.arrays)

    def __getitem__(self, index: int) -> Any:
        return _batch_of(
            self, self.sample_indices(index), answer(self, "empty")
        )


def _usable_part(name: str, part: Any) -> Any:
    """Returns an argument with arrays whose rows can be indexed."""
    if part is None:
        if name == "x":
            raise TypeError("`x` must be arrays. Received: None")
        return None
    return map_leaves(functools.partial(_usable, name=name), part)


def _part_of(dataset: ArrayDataset, place: int) -> Any:
    arrays = dataset.arrays
    return arrays[place] if place < len(arrays) else None


def _replaced(
    arrays: tuple[Any, ...], name: str, value: Any
) -> tuple[Any, ...]:
    """Returns the arrays with another part under a name; `None` removes it."""
    parts = [*arrays, None, None][: len(_PARTS)]
    parts[_PARTS.index(name)] = _usable_part(name, value)
    return _arrays_of(parts)


def _arrays_of(parts: Iterable[Any]) -> tuple[Any, ...]:
    """Returns `x`, `y` and `sample_weight`, without those that are `None`."""
    x, y, sample_weight = parts
    if sample_weight is not None and y is None:
        raise ValueError("`sample_weight` needs `y`.")
    return tuple(part for part in (x, y, sample_weight) if part is not None)


def _count_of(arrays: tuple[Any, ...]) -> int:
    """Returns how many rows all arrays have."""
    lengths: dict[int, str] = {}  # to the argument that has it first
    for name, part in zip(_PARTS, arrays, strict=False):
        leaves: list[Any] = []
        map_leaves(leaves.append, part)
        for leaf in leaves:
            lengths.setdefault(leaf.shape[0], name)
    if len(lengths) != 1:
        listed = ", ".join(
            f"{count} in `{name}`" for count, name in lengths.items()
        )
        raise ValueError(
            "All arrays must have the same number of samples. Received: "
            f"{listed or 'no array'}."
        )
    return next(iter(lengths))


def _batch_of(dataset: ArrayDataset, indices: Indices, empty: Empty) -> Any:
    batch = [
        map_leaves(lambda leaf: _rows(leaf, indices, empty), part)
        for part in dataset.arrays
    ]
    if dataset.transform is not None:
        return transformed(dataset, *batch)
    if len(batch) == 1 and not isinstance(batch[0], (tuple, list)):
        return batch[0]
    # In a tuple, Keras would take the second of two inputs for targets.
    return tuple(batch)


@sample_of.register
def _(dataset: ArrayDataset, index: int) -> Any:
    batch = _batch_of(dataset, np.asarray([index]), np.empty)
    return map_leaves(lambda leaf: leaf[0], batch)


@labels_of.register
def _(dataset: ArrayDataset) -> Any:
    if len(dataset.arrays) < 2 or not hasattr(dataset.arrays[1], "shape"):
        raise ValueError(
            f"`sampler` is about classes, and this {type(dataset).__name__} "
            f"has no `y` with one label for each row. {PASS_WEIGHTS}"
        )
    return dataset.arrays[1]


def _rows(array: Any, indices: Indices, empty: Empty) -> npt.NDArray[Any]:
    """Returns a copy of an array's rows at `indices`."""
    count = array.shape[0]
    if not 0 <= indices.min() <= indices.max() < count:
        raise IndexError(
            f"`sample_indices` has samples from {indices.min()} to "
            f"{indices.max()}; there are {count}."
        )
    if isinstance(array, Windows):
        return array.rows(indices, empty)
    if _is_sparse(array):
        return array[indices]  # type: ignore[no-any-return]
    if not isinstance(array, np.ndarray):
        return _read(array, indices, empty)
    plain = type(array) in (np.ndarray, np.memmap)
    if not plain or array.dtype.hasobject or array.dtype.kind == "T":
        return array[indices]
    run = _run_of(indices)
    if run is None and not (array.flags.c_contiguous and array.flags.aligned):
        # `np.take` would first make a contiguous copy of the whole array.
        return array[indices]
    rows = empty((len(indices), *array.shape[1:]), array.dtype)
    if run is not None:
        rows[...] = array[run]
    else:
        # The indices were checked above. With mode="raise", NumPy would copy
        # once more.
        np.take(array, indices, axis=0, out=rows, mode="clip")
    return rows


def _read(array: Any, indices: Indices, empty: Empty) -> npt.NDArray[Any]:
    """Reads the rows at `indices` from an object such as an h5py dataset.

    Reads them in ascending order, and returns them in the order of `indices`.
    """
    if (run := _run_of(indices)) is not None:
        return np.asarray(array[run])
    ascending, places = np.unique(indices, return_inverse=True)
    found = np.asarray(array[ascending])
    if np.array_equal(places, np.arange(len(found))):
        return found
    rows = empty((len(indices), *found.shape[1:]), found.dtype)
    np.take(found, places, axis=0, out=rows, mode="clip")
    return rows


def _run_of(indices: Indices) -> slice | None:
    """Returns a slice if the indices are consecutive, otherwise `None`."""
    first, last = int(indices[0]), int(indices[-1])
    if last - first + 1 != len(indices) or (np.diff(indices) != 1).any():
        return None
    return slice(first, last + 1)


def _usable(leaf: Any, name: str) -> Any:
    """Converts an input to an object whose rows can be indexed."""
    if _is_sparse(leaf):
        return leaf.tocsr()  # the format whose rows can be indexed
    if hasattr(leaf, "to_numpy"):
        is_table = hasattr(leaf, "columns")
        leaf = leaf.to_numpy()
        if is_table and leaf.dtype.kind not in "biufc":
            raise TypeError(
                f"`{name}` is a table whose columns are not all numbers. Pass "
                "it to `SampleDataset(table, label=...)`, which has an array "
                "for each column, or pass those that are numbers."
            )
    elif not isinstance(leaf, np.ndarray) and (
        # A number, a string or a tensor; but not a dataset in a file.
        not hasattr(leaf, "shape") or hasattr(leaf, "device")
    ):
        leaf = np.asarray(leaf)
    if not leaf.shape:
        raise TypeError(
            f"`{name}` must be arrays with one row for each sample. Received "
            f"{leaf!r}, which has no rows."
        )
    return leaf


def _is_sparse(leaf: Any) -> bool:
    """Returns whether an array is a SciPy sparse matrix."""
    return hasattr(leaf, "tocsr")
