"""Reads the rows of Parquet files by index.

Row groups are decoded once, into files that all processes map:

    row groups -> Arrow, without compression -> a file of the storage -> arrays
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from keras_fastdata.sources.index import Arrays, Index, Kept, by_part
from keras_fastdata.sources.source import Column, Indices
from keras_fastdata.sources.storage import Paths, Storage

# Neighbouring row groups of a file form a part until they have this size:
# small parts cost more calls for each batch.
_PART_BYTES = 1 << 25
_HELD = 256  # parts that a process keeps mapped

_Reader = Callable[[Indices], Column]


class Parquet:
    """Rows of Parquet files, by index.

    Row groups are decoded when a row of theirs is first asked for. Their
    values are kept in the storage's cache, from where all processes and later
    epochs read them. With `SampleDataset(..., shuffle=True,
    shuffle_window=n)`, neighbouring batches need few row groups, so the first
    batch comes soon; without a window it may need all of them.

    Numbers, dates and lists of numbers become arrays. Text and bytes become
    arrays of objects. Fields of structs are columns of their own: "a.b".

    Args:
        paths: A path, a pattern such as "data/*.parquet", or a list of these.
            All files must have the same columns.
        columns: The names of the columns to read. `None`: all.
        fill_null: What replaces empty values (null): a value, or a dict of
            values by column. `None`: NaN for floats, otherwise an error.
        storage: Finds, reads and caches files. `None`: `Storage()`.

    Raises:
        FileNotFoundError: There is no such file.
        ImportError: pyarrow is missing.
        KeyError: There is no such column.
        ValueError: A file is damaged, or differs from the first; while rows
            are read: a value is null.

    Example:

    >>> import os, tempfile, pyarrow, pyarrow.parquet
    >>> from keras_fastdata import SampleDataset, sources
    >>> path = os.path.join(tempfile.mkdtemp(), "rows.parquet")
    >>> table = pyarrow.table({"x": [1.0, 2.0, 3.0], "y": [0, 1, 0]})
    >>> pyarrow.parquet.write_table(table, path)
    >>> source = sources.Parquet(path)
    >>> len(source), source.columns, source[1]
    (3, ['x', 'y'], {'x': np.float64(2.0), 'y': np.int64(1)})
    >>> source.get_columns([2, 0], ["x"])
    {'x': array([3., 1.])}
    """

    def __init__(
        self,
        paths: Paths,
        columns: Sequence[str] | None = None,
        *,
        fill_null: Any = None,
        storage: Storage | None = None,
    ) -> None:
        _require()
        self._index = Index(storage, paths, "Parquet", _scan)
        with self._index.storage.local(self._index.paths[0]) as local:
            self._kinds = _kinds(local)
        found = list(self._kinds)
        self.columns = list(found if columns is None else columns)
        if missing := [name for name in self.columns if name not in found]:
            raise KeyError(
                f"{self._index.paths[0]} has no column {missing[0]!r}. It has "
                f"{found}."
            )
        self._fill_null = fill_null
        self._parts = _parts(self._index)
        self.part_lengths = [part[2] for part in self._parts]
        self._ends = np.cumsum(self.part_lengths)
        self._mapped = Kept(_HELD)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"There is no row {index}; there are {len(self)}.")
        return self.__getitems__([index % len(self)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Returns the rows with the given indices, in their order."""
        columns = self.get_columns(np.asarray(indices, np.int64), self.columns)
        rows = zip(*columns.values(), strict=True)
        return [dict(zip(columns, row, strict=True)) for row in rows]

    def get_columns(
        self, indices: Indices, names: Sequence[str]
    ) -> dict[str, Column]:
        """Returns the columns `names` of the rows `indices`, in their order.

        A column of lists that differ in length is a list of arrays.
        """
        indices = np.asarray(indices, np.int64)
        if not len(indices):
            empty = _arrow_schema(self._kinds, names).empty_table()
            readers = self._readers_of(empty)
            return {name: readers[name](indices) for name in names}
        pieces = []
        for number, places, within in by_part(self._ends, indices):
            key = number, tuple(names)
            readers = self._mapped.get(key, functools.partial(self._open, *key))
            pieces.append((readers, places, within))
        return {
            name: _gathered(
                [readers[name](local) for readers, _, local in pieces],
                [places for _, places, _ in pieces],
            )
            for name in names
        }

    def _open(self, number: int, names: tuple[str, ...]) -> dict[str, _Reader]:
        import pyarrow as pa

        file, groups, _ = self._parts[number]
        self._index.check(file)
        key = f"{self._index.key(file)} {groups} {names} {self._fill_null!r}"
        make = functools.partial(self._write, file, groups, names)
        with (
            self._index.storage.entry(key, make) as path,
            pa.memory_map(path) as memory,
        ):
            # The table refers to the mapped memory, but not to the file.
            table = pa.ipc.open_file(memory).read_all()
        return self._readers_of(table)

    def _readers_of(self, table: Any) -> dict[str, _Reader]:
        return {
            name: _reader(_chunk(table, name), *self._kinds[name][1:])
            for name in table.column_names
        }

    def _write(
        self,
        file: int,
        groups: tuple[int, int],
        names: tuple[str, ...],
        target: str,
    ) -> None:
        """Decodes the row groups of a part into a file."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = self._index.paths[file]
        wanted = _arrow_schema(self._kinds, names)
        try:
            with self._index.storage.local(path) as local:
                table = pq.ParquetFile(local).read_row_groups(
                    range(*groups), list(names)
                )
            table = _flat(table).select(names).cast(wanted).combine_chunks()
            for place, name in enumerate(names):
                array = _filled(
                    _chunk(table, name), _for(name, self._fill_null)
                )
                table = table.set_column(place, name, array)
        except _NullError as error:
            raise ValueError(
                f"Column {name!r} of {path} has {error}. Pass "
                f"`fill_null={{{name!r}: value}}` with a value to put there, "
                "or leave out the column by `columns`."
            ) from None
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"Row groups {groups[0]} to {groups[1] - 1} of {path} cannot "
                f"be read as the columns of {self._index.paths[0]}: {error} "
                "Write the file again, or leave it out of `paths`."
            ) from error
        with pa.ipc.new_file(target, table.schema) as writer:
            writer.write_table(table)


class _NullError(Exception):
    """Says which empty values a column has that nothing replaces."""


def _require() -> None:
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"Parquet files are read with pyarrow, which cannot be imported "
            f"({error}). Run `pip install 'keras-fastdata[parquet]'`."
        ) from None


# The Arrow type that a column is kept as, whether it holds booleans, and the
# shape of a tensor.
_Kind = tuple[Any, bool, tuple[int, ...] | None]


def _kinds(local: str) -> dict[str, _Kind]:
    """Returns the kinds of the columns of a file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    found: dict[str, _Kind] = {}
    for field in _flat(pq.read_schema(local).empty_table()).schema:
        kind = leaf = field.type
        shape = None
        if isinstance(kind, pa.FixedShapeTensorType):
            shape = tuple(kind.shape)
        while getattr(leaf, "num_fields", 0) == 1:
            leaf = leaf.field(0).type
        found[field.name] = _plain_type(kind), leaf == pa.bool_(), shape
    return found


def _arrow_schema(kinds: dict[str, _Kind], names: Sequence[str]) -> Any:
    import pyarrow as pa

    return pa.schema([(name, kinds[name][0]) for name in names])


def _reader(
    array: Any, is_bool: bool, shape: tuple[int, ...] | None
) -> _Reader:
    """Returns a function that reads elements of an Arrow array."""
    import pyarrow as pa

    is_list = pa.types.is_large_list(array.type)
    leaf = array.values if is_list else array
    inner: tuple[int, ...] = ()
    while pa.types.is_fixed_size_list(leaf.type):
        inner += (leaf.type.list_size,)
        leaf = leaf.values
    if not pa.types.is_primitive(leaf.type):
        return functools.partial(_objects, array)
    values = leaf.to_numpy(zero_copy_only=True)
    values = values.view(bool) if is_bool else values
    count = len(array.values if is_list else array)
    values = values.reshape(count, *(shape or inner))
    if not is_list:
        return functools.partial(np.take, values, axis=0)
    return functools.partial(_lists, array.offsets.to_numpy(), values)


def _lists(
    offsets: npt.NDArray[np.int64], values: npt.NDArray[Any], indices: Indices
) -> Column:
    """Returns rows of a column of lists of equal or different lengths."""
    starts, ends = offsets[indices], offsets[indices + 1]
    lengths = np.unique(ends - starts)
    if len(lengths) == 1:
        rows: npt.NDArray[Any] = values[starts[:, None] + np.arange(lengths[0])]
        return rows
    pairs = zip(starts.tolist(), ends.tolist(), strict=True)
    return [values[start:end].copy() for start, end in pairs]


def _objects(array: Any, indices: Indices) -> Column:
    """Returns text, bytes or nested lists."""
    import pyarrow as pa

    found = array.take(pa.array(indices))
    if not hasattr(array, "values"):
        texts: npt.NDArray[Any] = found.to_numpy(zero_copy_only=False)
        return texts
    leaf = array
    while hasattr(leaf, "values"):
        leaf = leaf.values
    dtype = leaf.type.to_pandas_dtype()
    try:
        return [np.asarray(row, dtype) for row in found.to_pylist()]
    except ValueError:
        raise ValueError(
            f"A column of type {array.type} has a row whose inner lists "
            "differ in length, which is no array. Leave out the column by "
            "`columns`, or write it with lists of equal length."
        ) from None


def _gathered(found: list[Column], places: list[Indices]) -> Column:
    """Joins rows of several parts; those of `found[n]` go to `places[n]`."""
    if len(found) == 1:
        return found[0]
    count = sum(map(len, places))
    first = found[0]
    shapes = {getattr(rows, "shape", (0,))[1:] for rows in found}
    if len(shapes) == 1 and not isinstance(first, list):
        joined = np.empty((count, *first.shape[1:]), first.dtype)
        for rows, where in zip(found, places, strict=True):
            joined[where] = rows
        return joined
    listed: list[Any] = [None] * count
    for rows, where in zip(found, places, strict=True):
        for place, row in zip(where.tolist(), rows, strict=True):
            listed[place] = row
    return listed


def _scan(local: str, path: str) -> Arrays:
    """Returns the rows and the decoded bytes of each row group."""
    import pyarrow.parquet as pq

    try:
        found = pq.read_metadata(local)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"The footer of {path} cannot be read: {error} The file is "
            "damaged, not complete, or no Parquet file. Write it again, or "
            "leave it out of `paths`."
        ) from error
    groups = [found.row_group(n) for n in range(found.num_row_groups)]
    return {
        "rows": np.array([g.num_rows for g in groups], np.int64),
        "bytes": np.array([g.total_byte_size for g in groups], np.int64),
    }


def _parts(index: Index) -> list[tuple[int, tuple[int, int], int]]:
    """Joins small row groups.

    Returns for each part its file, its first row group and the one after its
    last, and its number of rows.
    """
    rows, sizes = (index.arrays[name].tolist() for name in ("rows", "bytes"))
    parts = []
    place = 0
    for file, count in enumerate(index.counts.tolist()):
        begin, held, size = 0, 0, 0
        for group in range(count):
            held += rows[place]
            size += sizes[place]
            place += 1
            if size >= _PART_BYTES or group == count - 1:
                if held:
                    parts.append((file, (begin, group + 1), held))
                begin, held, size = group + 1, 0, 0
    return parts


def _flat(table: Any) -> Any:
    """Makes each field of a struct a column."""
    import pyarrow as pa

    while any(pa.types.is_struct(kind) for kind in table.schema.types):
        table = table.flatten()
    return table


def _plain_type(kind: Any) -> Any:
    """Returns the Arrow type that values of a type are kept as."""
    import pyarrow as pa

    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return _plain_type(kind.storage_type)
    if types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if types.is_boolean(kind):
        return pa.uint8()  # booleans are bits, which NumPy cannot map
    if types.is_decimal(kind):
        return pa.float64()
    if types.is_date(kind):
        return pa.timestamp("ms" if types.is_date64(kind) else "s")
    if types.is_time(kind):  # of day
        return pa.int32() if kind.bit_width == 32 else pa.int64()
    if types.is_string(kind) or types.is_string_view(kind):
        return pa.large_string()
    if types.is_binary(kind) or types.is_binary_view(kind):
        return pa.large_binary()
    if types.is_fixed_size_list(kind):
        return pa.list_(_plain_type(kind.value_type), kind.list_size)
    if types.is_list(kind) or types.is_large_list(kind):
        return pa.large_list(_plain_type(kind.value_type))
    return kind


def _chunk(table: Any, name: str) -> Any:
    """Returns a column as one Arrow array."""
    import pyarrow as pa

    column = table.column(name)
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.array([], column.type)


def _for(name: str, fill: Any) -> Any:
    return fill.get(name) if isinstance(fill, Mapping) else fill


def _filled(array: Any, fill: Any) -> Any:
    """Replaces empty values, also those within lists."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    if array.null_count:
        if fill is None and pa.types.is_floating(kind):
            fill = np.nan
        if fill is None:
            raise _NullError(
                f"{array.null_count} empty values (null) of type {kind}"
            )
        fill = int(fill) if isinstance(fill, bool) else fill
        array = pc.if_else(array.is_valid(), array, pa.scalar(fill, kind))
    if not hasattr(array, "values"):
        return array
    values = _filled(array.values, None if np.ndim(fill) else fill)
    if values is array.values:
        return array
    if pa.types.is_fixed_size_list(kind):
        return type(array).from_arrays(values, kind.list_size)
    return type(array).from_arrays(array.offsets, values)
