"""Rows of Arrow tables: a table becomes NumPy arrays, column by column.

A column of a batch is one of these:

    an array of numbers            one row for each sample; lists of equal
                                   length are further axes
    an array of objects            strings, bytes, or `None` for a null
    a list of arrays               lists whose lengths differ
    a dict of columns              a column of structs
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from keras_fastdata._extras import import_extra
from keras_fastdata._recent import Recent
from keras_fastdata.sources.index import by_part
from keras_fastdata.sources.source import Column, Indices

_KEPT_PARTS = 4  # of a dataset, in each process


class ColumnRows:
    """Base class of sources with columns: a sample is a dict of its values.

    Attributes:
        columns: The names of the columns.
    """

    columns: Sequence[str]

    def get_columns(
        self, indices: Indices, names: Sequence[str]
    ) -> Mapping[str, Column]:
        """Returns the columns `names` of the rows `indices`."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> dict[str, Any]:
        found = self.get_columns(np.array([index]), self.columns)
        (row,) = rows_of(found, 1)
        return row


class ArrowTable(ColumnRows):
    """The rows of an Arrow table.

    Worker processes share the memory of the table.

    Args:
        table: A `pyarrow.Table`, or an object that exports one by
            `__arrow_c_stream__`, such as a polars frame.
    """

    def __init__(self, table: Any) -> None:
        # Of a table of many chunks, `take` takes a hundred times as long.
        self._table = _with_takeable(pyarrow().table(table)).combine_chunks()
        self.columns = checked_names(self._table.column_names)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def get_columns(
        self, indices: Indices, names: Sequence[str]
    ) -> Mapping[str, Column]:
        """Returns the columns `names` of the rows `indices`."""
        return columns_of(self._table.select(list(names)).take(indices))


class ArrowParts(ColumnRows):
    """The rows of a `pyarrow.dataset.Dataset`, which lie in files.

    A part is a row group of a Parquet file, or a whole file of another
    format. It is read as a whole, and each process keeps the latest few. In a
    random order over many parts, `sources.Parquet` is quicker.

    Args:
        dataset: A `pyarrow.dataset.Dataset`.

    Attributes:
        part_lengths: The number of rows of each part.

    Raises:
        ValueError: The dataset has a filter.
    """

    def __init__(self, dataset: Any) -> None:
        self.columns = checked_names(dataset.schema.names)
        self._schema = dataset.schema
        self._parts: list[Any] = []
        self.part_lengths: list[int] = []
        try:
            files = list(dataset.get_fragments())
        except ValueError as error:
            raise ValueError(
                "The rows of a filtered `pyarrow.dataset` have no numbers. "
                "Pass `source.to_table()`."
            ) from error
        for file in files:
            if hasattr(file, "split_by_row_group"):
                self._parts += file.split_by_row_group()
                self.part_lengths += [g.num_rows for g in file.row_groups]
            else:
                self._parts.append(file)
                self.part_lengths.append(file.count_rows())
        self._ends = np.cumsum(self.part_lengths, dtype=np.int64)
        self._kept: Recent[Any] = Recent(_KEPT_PARTS)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def get_columns(
        self, indices: Indices, names: Sequence[str]
    ) -> Mapping[str, Column]:
        """Returns the columns `names` of the rows `indices`."""
        found, order = [], []
        for part, places, within in by_part(self._ends, indices):
            read = functools.partial(self._read, part, list(names))
            table = self._kept.get((part, *names), read)
            found.append(table.take(within))
            order.append(places)
        rows = np.argsort(np.concatenate(order))
        return columns_of(pyarrow().concat_tables(found).take(rows))

    def _read(self, part: int, names: list[str]) -> Any:
        table = self._parts[part].to_table(self._schema, columns=names)
        return _with_takeable(table).combine_chunks()


def _with_takeable(table: Any) -> Any:
    """Converts the columns of whose types Arrow cannot take single rows."""
    import pyarrow as pa
    import pyarrow.compute as pc

    types = pa.types
    for place, field in enumerate(table.schema):
        column, made = table.column(place), None
        if types.is_run_end_encoded(field.type):
            chunks = map(pc.run_end_decode, column.chunks)
            made = pa.chunked_array(chunks, field.type.value_type)
        elif types.is_string_view(field.type):
            made = column.cast(pa.large_string())
        elif types.is_binary_view(field.type):
            made = column.cast(pa.large_binary())
        if made is not None:
            table = table.set_column(place, field.name, made)
    return table


def pyarrow() -> Any:
    """Imports pyarrow; raises an `ImportError` that names the extra."""
    use = "Arrow tables and polars frames are read with pyarrow"
    return import_extra("pyarrow", use, "tables")


def checked_names(names: Iterable[Any]) -> list[str]:
    """Returns the names of columns; raises an error for unsuitable names."""
    names = list(names)
    if others := [name for name in names if not isinstance(name, str)]:
        raise TypeError(
            "The columns of a table must be named by strings, and this one "
            f"has {others[:3]}. Name them, or pass `table.to_numpy()` to "
            "`ArrayDataset`."
        )
    if twice := [
        n for n, count in collections.Counter(names).items() if count > 1
    ]:
        raise ValueError(
            f"The table has several columns with the name {twice[0]!r}. Give "
            "each its own name."
        )
    return names


def columns_of(table: Any) -> dict[str, Column]:
    """Converts an Arrow table to columns of a batch, by name."""
    return {
        name: column_of(column.combine_chunks())
        for name, column in zip(table.column_names, table.columns, strict=True)
    }


def column_of(array: Any) -> Any:
    """Converts an Arrow array to a column."""
    types = pyarrow().types
    if isinstance(array, pyarrow().ChunkedArray):  # of more than 2 GiB
        return objects(array.to_pylist())
    kind = array.type
    if types.is_dictionary(kind):
        array = array.dictionary_decode()
        kind = array.type
    is_tensor = isinstance(kind, pyarrow().FixedShapeTensorType)
    if is_tensor and not array.null_count:
        return column_of(array.storage).reshape(len(array), *kind.shape)
    if isinstance(kind, pyarrow().BaseExtensionType):
        return column_of(array.storage)
    if array.null_count:
        return objects(array.to_pylist())
    if types.is_fixed_size_list(kind):
        values = column_of(array.flatten())
        lengths = np.full(len(array), kind.list_size)
        return grouped(values, lengths)
    if types.is_list(kind) or types.is_large_list(kind):
        lengths = np.diff(array.offsets.to_numpy())
        return grouped(column_of(array.flatten()), lengths)
    if types.is_struct(kind):
        return {
            kind.field(place).name: column_of(part)
            for place, part in enumerate(array.flatten())
        }
    if types.is_decimal(kind):
        array = array.cast(pyarrow().float64())
    elif not (types.is_primitive(kind) or types.is_boolean(kind)):
        return objects(array.to_pylist())
    found = array.to_numpy(zero_copy_only=False)
    # A read-only array is Arrow's; a transform may write to its argument.
    return found if found.flags.writeable else found.copy()


def objects(values: Sequence[Any]) -> npt.NDArray[Any]:
    """Returns an array of objects with one axis."""
    array = np.empty(len(values), object)
    for place, value in enumerate(values):  # which may be lists
        array[place] = value
    return array


def array_of(values: Any) -> npt.NDArray[Any]:
    """Returns a list as an array; an array of objects if items would change.

    NumPy makes strings of numbers that stand beside strings, and drops zeros
    at the end of a string.
    """
    array = np.asarray(values)
    if array is values or array.dtype.kind not in "SU":
        return array
    items = np.array(values, object)
    return array if (items == array.astype(object)).all() else items


def stacked(values: Any) -> Any:
    """Returns the column of samples that may be arrays of different shapes."""
    if isinstance(values, np.ndarray) and values.dtype.kind != "O":
        return values
    if not all(isinstance(value, np.ndarray) for value in values):
        return objects(values)
    alike = len({(value.shape, value.dtype) for value in values}) == 1
    return np.stack(values) if alike else list(values)


def grouped(values: Any, lengths: npt.NDArray[Any]) -> Any:
    """Returns the column of lists whose values follow one another.

    `lengths` are the lengths of the lists.
    """
    if isinstance(values, dict):
        rows = rows_of(values, int(lengths.sum()))
        return objects([rows[a:b] for a, b in _bounds(lengths)])
    if isinstance(values, np.ndarray) and (lengths == lengths[:1]).all():
        size = int(lengths[0]) if len(lengths) else 0
        return values.reshape(len(lengths), size, *values.shape[1:])
    parts = [values[begin:end] for begin, end in _bounds(lengths)]
    if isinstance(values, np.ndarray):
        return parts
    # Lists of lists: a sample is an array where its lists are of one length.
    made = [stacked(part) for part in parts]
    if any(isinstance(each, list) for each in made):
        return objects(parts)
    return made


def _bounds(lengths: npt.NDArray[Any]) -> Iterable[tuple[int, int]]:
    ends = np.cumsum(lengths).tolist()
    return zip([0, *ends], ends, strict=False)


def rows_of(columns: Mapping[str, Column], count: int) -> list[dict[str, Any]]:
    """Returns the samples of a batch of columns, each a dict of its values.

    A float64 becomes a Python float, and an array of these float32, so that
    a batch of samples has the dtypes of a batch of columns.
    """
    parts = {name: _values(column, count) for name, column in columns.items()}
    return [
        {name: part[row] for name, part in parts.items()}
        for row in range(count)
    ]


def _values(column: Any, count: int) -> Any:
    if isinstance(column, dict):
        return rows_of(column, count)
    if isinstance(column, list):
        return [_values(each, 2) for each in column]
    if column.dtype != np.float64:
        return column
    return column.tolist() if column.ndim == 1 else column.astype(np.float32)
