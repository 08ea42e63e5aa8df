"""What people hold, as sources: `as_source` finds out what an object is.

Nothing is imported to find out: an object of a library that has not been
loaded cannot exist.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from keras_fastdata.sources.arrow import (
    ArrowParts,
    ArrowTable,
    ColumnRows,
    array_of,
    checked_names,
    column_of,
    columns_of,
    objects,
    pyarrow,
    stacked,
)
from keras_fastdata.sources.source import Column, Indices


def as_source(held: Any) -> Any:
    """Returns a source of the samples in an object.

    A table becomes a source with columns. An object that is a source already
    is returned as it is, and so is one that cannot become a source.

    Raises:
        TypeError: The object holds several tables, or none yet.
    """
    if is_a(held, "datasets", "Dataset"):
        # Only a function of the user's own decides what a sample is.
        is_custom = held.format["type"] == "custom"
        return held if is_custom else HuggingFaceTable(held)
    if is_a(held, "pandas", "DataFrame"):
        return ArrayTable(_arrays_of(held))
    if hasattr(held, "iloc") and not hasattr(held, "columns"):
        return held.to_numpy()  # a pandas column is indexed by label
    if is_a(held, "pyarrow.dataset", "Dataset"):
        return ArrowParts(held)
    if is_a(held, "polars", "DataFrame"):
        _check_polars(held)
        # Arrow itself cannot take rows of the newest types of strings.
        oldest = sys.modules["polars"].CompatLevel.oldest()
        pyarrow()  # says how to install it
        return ArrowTable(held.to_arrow(compat_level=oldest))
    if is_a(held, "pyarrow", "Array") or is_a(held, "pyarrow", "ChunkedArray"):
        return held.to_numpy(zero_copy_only=False)
    if is_a(held, "polars", "Series"):
        return held.to_numpy()
    if hasattr(held, "__arrow_c_stream__"):
        return ArrowTable(held)
    if is_a(held, "polars", "LazyFrame"):
        raise TypeError(
            "A polars LazyFrame has no rows yet. Pass `source.collect()`."
        )
    if is_a(held, "datasets", "DatasetDict"):
        first = next(iter(held), "train")
        raise TypeError(
            f"A DatasetDict is several datasets: {', '.join(held)}. Pass one "
            f"of them, such as `source[{first!r}]`."
        )
    if isinstance(held, np.ndarray) and held.dtype.names:
        return ArrayTable({name: held[name] for name in held.dtype.names})
    if is_a(held, "h5py", "Dataset") or is_a(held, "zarr", "Array"):
        return ArrayRows(held)
    return held


def _check_polars(frame: Any) -> None:
    """Raises `TypeError` for columns that Arrow cannot have."""
    for name, kind in frame.schema.items():
        if str(kind) in ("Int128", "UInt128"):
            raise TypeError(
                f"Column {name!r} has numbers of 128 bits, which no array can "
                f"have. Pass `frame.cast({{{name!r}: pl.Int64}})`."
            )
        if str(kind) == "Object":  # which polars gives away as addresses
            raise TypeError(
                f"Column {name!r} has Python objects (polars' type Object), "
                "which cannot be read as a table. Convert the column, or pass "
                f"`frame.drop({name!r})`."
            )


def is_a(held: Any, module: str, name: str) -> bool:
    """Returns whether an object is of the class `name` of a loaded module."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(held, kind)


class ArrayRows:
    """The rows of an array in a file, which are read together."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __len__(self) -> int:
        return int(self._array.shape[0])

    def __getitem__(self, index: int) -> Any:
        return self._array[index]

    def __getitems__(self, indices: list[int]) -> npt.NDArray[Any]:
        """Returns the rows `indices`, read in the order of the file."""
        ascending, places = np.unique(indices, return_inverse=True)
        found: npt.NDArray[Any] = np.asarray(self._array[ascending])
        return found[places]


class ArrayTable(ColumnRows):
    """The rows of a table that has an array for each column.

    Args:
        arrays: At least one column by name, all of the same length: arrays of
            NumPy, of Arrow, or of pandas.
    """

    def __init__(self, arrays: Mapping[Any, Any]) -> None:
        self.columns = checked_names(arrays)
        self._arrays = dict(arrays)

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values()), ()))

    def get_columns(
        self, indices: Indices, names: Sequence[str]
    ) -> Mapping[str, Column]:
        """Returns the columns `names` of the rows `indices`."""
        arrays = ((name, self._arrays[name]) for name in names)
        return {
            name: column_of(array.take(indices))
            if hasattr(array, "null_count")
            else _of_pandas(array[indices])
            for name, array in arrays
        }


def _arrays_of(frame: Any) -> dict[Any, Any]:
    """Returns the columns of a pandas frame, which give rows quicker.

    Worker processes share Arrow's arrays, and then need not import pandas.
    """
    checked_names(frame.columns)  # a dict would lose one of two
    arrow = sys.modules.get("pyarrow")
    found = {}
    for name, column in frame.items():
        found[name] = column.array
        if isinstance(column.dtype, np.dtype) and column.dtype.kind != "O":
            found[name] = column.to_numpy()
        elif arrow is not None:
            with contextlib.suppress(arrow.ArrowException, OverflowError):
                made = arrow.array(column)
                chunked = isinstance(made, arrow.ChunkedArray)
                found[name] = made.combine_chunks() if chunked else made
    return found


def _of_pandas(taken: Any) -> Any:
    """Converts an array of NumPy, or of pandas, to a column."""
    if isinstance(taken, np.ndarray):
        return taken  # NaN is a number here
    absent = taken.isna()
    if absent.any():
        values = taken.astype(object).tolist()
        return objects(
            [None if no else v for v, no in zip(values, absent, strict=True)]
        )
    found = np.asarray(taken)
    if found.dtype.kind == "O" and all(
        isinstance(value, (list, tuple, np.ndarray)) for value in found
    ):
        return stacked([array_of(value) for value in found])
    return found


class HuggingFaceTable(ColumnRows):
    """The rows of a `datasets.Dataset`, whatever format it has.

    Numbers, strings and lists are read as Arrow. What the library decodes,
    such as images, is read in its format "numpy".
    """

    def __init__(self, dataset: Any) -> None:
        shown = dataset.format
        names = dataset.column_names
        if not shown["output_all_columns"]:
            names = shown["columns"] or names
        self.columns = list(names)
        self._plain = {
            name for name in names if _is_plain(dataset.features[name])
        }
        self._dataset = dataset
        self._readers: dict[Any, Any] = {}

    def __len__(self) -> int:
        return len(self._dataset)

    def get_columns(
        self, indices: Indices, names: Sequence[str]
    ) -> Mapping[str, Column]:
        """Returns the columns `names` of the rows `indices`."""
        plain = [name for name in names if name in self._plain]
        other = [name for name in names if name not in self._plain]
        rows = indices.tolist()
        found: dict[str, Any] = {}
        if plain:
            found |= columns_of(self._reader("arrow", plain)[rows])
        if other:
            decoded = self._reader("numpy", other)[rows]
            found |= {name: stacked(decoded[name]) for name in other}
        return {name: found[name] for name in names}

    def _reader(self, kind: str, names: list[str]) -> Any:
        """Returns the dataset in a format, which takes long to make."""
        key = kind, tuple(names)
        if key not in self._readers:
            self._readers[key] = self._dataset.with_format(kind, columns=names)
        return self._readers[key]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_readers": {}}


def _is_plain(feature: Any) -> bool:
    """Returns whether a feature's values need no decoding."""
    if isinstance(feature, dict):
        return all(map(_is_plain, feature.values()))
    while hasattr(feature, "feature"):  # of a list
        feature = feature.feature
    name = type(feature).__name__
    return name in ("Value", "ClassLabel") or name.startswith("Array")
