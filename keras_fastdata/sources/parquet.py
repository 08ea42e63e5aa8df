"""Reads the rows of Parquet files by index.

Row groups are decoded once, into files that all processes map:

    row groups -> Arrow, without compression -> a file of the storage -> arrays
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from keras_fastdata._extras import import_extra
from keras_fastdata._recent import Recent
from keras_fastdata.sources.arrow import (
    ColumnRows,
    checked_names,
    columns_of,
    rows_of,
)
from keras_fastdata.sources.index import Arrays, Index, by_part
from keras_fastdata.sources.source import Column, Indices
from keras_fastdata.sources.storage import Paths, Storage

# Neighbouring row groups of a file form a part until they have this size:
# small parts cost more calls for each batch.
_PART_BYTES = 1 << 25
_HELD = 256  # parts that a process keeps mapped


class Parquet(ColumnRows):
    """Rows of Parquet files, by index.

    Row groups are decoded when a row of theirs is first asked for. Their
    values are kept in the storage's cache, from where all processes and later
    epochs read them. With `SampleDataset(..., shuffle=True,
    shuffle_window=n)`, neighbouring batches need few row groups, so the first
    batch comes soon; without a window it may need all of them.

    Columns become arrays as those of an Arrow table do: numbers, lists of
    numbers, text, bytes, and structs, which are dicts.

    Args:
        paths: A path, a pattern such as "data/*.parquet", or a list of these.
            All files must have the same columns.
        columns: The names of the columns to read. `None`: all.
        fill_null: What replaces empty values (null) of numbers and text: a
            value, or a dict of values by column. `None`: NaN for floats;
            others are `None`, which no batch can have.
        storage: Finds, reads and caches files. `None`: `Storage()`.

    Raises:
        FileNotFoundError: There is no such file.
        ImportError: pyarrow is missing.
        KeyError: There is no such column.
        ValueError: A file is damaged, or differs from the first.

    Example:

    >>> import os, tempfile, pyarrow, pyarrow.parquet
    >>> from keras_fastdata import sources
    >>> path = os.path.join(tempfile.mkdtemp(), "rows.parquet")
    >>> table = pyarrow.table({"x": [1.0, 2.0, 3.0], "y": ["a", "b", "c"]})
    >>> pyarrow.parquet.write_table(table, path)
    >>> source = sources.Parquet(path)
    >>> len(source), source.columns, source[1]
    (3, ['x', 'y'], {'x': 2.0, 'y': 'b'})
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
        import_extra(
            "pyarrow.parquet", "Parquet files are read with pyarrow", "parquet"
        )
        self._index = Index(storage, paths, "Parquet", _scan)
        first = self._index.paths[0]
        with self._index.storage.local(first) as local:
            self._schema = _schema(local)
        found = self._schema.names
        self.columns = checked_names(found if columns is None else columns)
        if missing := [name for name in self.columns if name not in found]:
            raise KeyError(
                f"{first} has no column {missing[0]!r}. It has {found}."
            )
        self._fill_null = fill_null
        self._parts = _parts(self._index)
        self.part_lengths = [part.rows for part in self._parts]
        self._ends = np.cumsum(self.part_lengths, dtype=np.int64)
        self._mapped: Recent[Any] = Recent(_HELD)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"There is no row {index}; there are {len(self)}.")
        return self.__getitems__([index % len(self)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Returns the rows with the given indices, in their order."""
        columns = self.get_columns(np.asarray(indices, np.int64), self.columns)
        return rows_of(columns, len(indices))

    def get_columns(
        self, indices: Indices, names: Sequence[str]
    ) -> dict[str, Column]:
        """Returns the columns `names` of the rows `indices`, in their order."""
        import pyarrow as pa

        pieces = []
        for part, places, within in by_part(self._ends, indices):
            key = part, tuple(names)
            mapped = self._mapped.get(key, functools.partial(self._map, *key))
            pieces.append((mapped, places, within))
        found: dict[str, Column] = {}
        others = []
        for name in names:
            if pieces and all(
                name in mapped.readers for mapped, _, _ in pieces
            ):
                rows = [mapped.readers[name](at) for mapped, _, at in pieces]
                found[name] = _joined(rows, [at for _, at, _ in pieces])
            else:
                others.append(name)
        if others:
            tables = [
                mapped.table.select(others).take(within)
                for mapped, _, within in pieces
            ] or [_of_names(self._schema, others).empty_table()]
            table = pa.concat_tables(tables)
            if len(pieces) > 1:
                order = np.concatenate([places for _, places, _ in pieces])
                table = table.take(np.argsort(order))
            found |= columns_of(table)
        return {name: found[name] for name in names}

    def _map(self, part: int, names: tuple[str, ...]) -> _Mapped:
        """Returns columns of a part, which are decoded if needed."""
        import pyarrow as pa

        file, begin, end, _ = self._parts[part]
        self._index.check(file)
        key = f"{self._index.key(file)} {begin} {end} {names}"
        make = functools.partial(self._write, file, range(begin, end), names)
        with (
            self._index.storage.entry(
                f"{key} {self._fill_null!r}", make
            ) as path,
            pa.memory_map(path) as memory,
        ):
            # The table refers to the mapped memory, but not to the file.
            table = pa.ipc.open_file(memory).read_all()
        made = {name: _reader(table.column(name)) for name in names}
        return _Mapped(table, {n: read for n, read in made.items() if read})

    def _write(
        self, file: int, groups: range, names: tuple[str, ...], target: str
    ) -> None:
        """Decodes row groups into a file."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = self._index.paths[file]
        # A file that cannot be fetched is no damaged one.
        with self._index.storage.local(path) as local:
            try:
                table = pq.ParquetFile(local).read_row_groups(groups, names)
                schema = _of_names(self._schema, names)
                table = table.select(names).cast(schema)
            except (
                *(OSError, KeyError, TypeError, ValueError),
                NotImplementedError,  # of a cast that Arrow lacks
            ) as error:
                first = self._index.paths[0]
                raise ValueError(
                    f"Row groups {groups[0]} to {groups[-1]} of {path} cannot "
                    f"be read as the columns of {first}: {error} Write the "
                    "file again, or leave it out of `paths`."
                ) from error
        table = self._filled(table).combine_chunks()
        with pa.ipc.new_file(target, table.schema) as writer:
            writer.write_table(table)

    def _filled(self, table: Any) -> Any:
        """Returns a table whose empty values are replaced."""
        fill = self._fill_null
        for place, name in enumerate(table.column_names):
            value = fill.get(name) if isinstance(fill, Mapping) else fill
            column = _filled(name, table.column(name), value)
            table = table.set_column(place, name, column)
        return table


class _RowGroups(NamedTuple):
    """Neighbouring row groups, from `begin` to before `end`."""

    file: int
    begin: int
    end: int
    rows: int


class _Mapped(NamedTuple):
    """A part in memory, and quicker ways to read columns of numbers."""

    table: Any
    readers: dict[str, Callable[[Indices], Column]]


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


def _parts(index: Index) -> list[_RowGroups]:
    """Joins small row groups of each file."""
    rows, sizes = (index.arrays[name].tolist() for name in ("rows", "bytes"))
    groups = zip(rows, sizes, strict=True)
    parts = []
    for file, count in enumerate(index.counts.tolist()):
        begin = held = nbytes = 0
        for end in range(1, count + 1):
            more, size = next(groups)
            held, nbytes = held + more, nbytes + size
            if nbytes >= _PART_BYTES or end == count:
                if held:
                    parts.append(_RowGroups(file, begin, end, held))
                begin, held, nbytes = end, 0, 0
    return parts


def _schema(local: str) -> Any:
    """Returns the schema of a file, in which categories are their values."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    return pa.schema(
        (each.name, each.type.value_type)
        if pa.types.is_dictionary(each.type)
        else (each.name, each.type)
        for each in pq.read_schema(local)
    )


def _of_names(schema: Any, names: Sequence[str]) -> Any:
    import pyarrow as pa

    return pa.schema([schema.field(name) for name in names])


def _filled(name: str, column: Any, value: Any) -> Any:
    """Replaces the empty values of a column."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if value is None and pa.types.is_floating(column.type):
        value = np.nan
    if value is None or not column.null_count:
        return column
    try:
        scalar = pa.scalar(value, column.type)
        if pa.types.is_integer(column.type):
            pa.scalar(value).cast(column.type)  # 1.5 would become 1
        return pc.fill_null(column, scalar)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ValueError(
            f"`fill_null={value!r}` cannot replace the empty values (null) of "
            f"column {name!r}, whose type is {column.type}: {error}. Pass a "
            "dict with a value for each column that has nulls, or leave the "
            "column out with `columns=`."
        ) from error


def _reader(column: Any) -> Callable[[Indices], Column] | None:
    """Returns a function that reads rows of numbers, or of lists of them.

    That takes a tenth of Arrow's time. Returns `None` for other columns.
    """
    import pyarrow as pa

    types = pa.types
    if column.num_chunks != 1 or column.null_count:
        return None
    array = values = column.chunk(0)
    is_list = types.is_list(array.type) or types.is_large_list(array.type)
    if is_list or types.is_fixed_size_list(array.type):
        values = array.values
    is_number = types.is_integer(values.type) or types.is_floating(values.type)
    if not is_number or values.null_count:
        return None
    view = values.to_numpy(zero_copy_only=True)
    if is_list:
        return functools.partial(_lists, array.offsets.to_numpy(), view)
    if array is not values:
        view = view.reshape(len(array), array.type.list_size)
    return functools.partial(np.take, view, axis=0)


def _lists(
    offsets: npt.NDArray[Any], values: npt.NDArray[Any], indices: Indices
) -> Column:
    """Returns lists, as one array if they have one length."""
    starts, ends = offsets[indices], offsets[indices + 1]
    lengths = np.unique(ends - starts)
    if len(lengths) == 1:
        rows: npt.NDArray[Any] = values[starts[:, None] + np.arange(lengths[0])]
        return rows
    pairs = zip(starts.tolist(), ends.tolist(), strict=True)
    return [values[start:end].copy() for start, end in pairs]


def _joined(found: list[Column], places: list[Indices]) -> Column:
    """Joins rows of several parts; those of `found[n]` go to `places[n]`."""
    if len(found) == 1:
        return found[0]
    rows: list[Any] = [None] * sum(map(len, places))
    first = found[0]
    if isinstance(first, np.ndarray) and all(
        isinstance(each, np.ndarray) and each.shape[1:] == first.shape[1:]
        for each in found
    ):
        joined = np.empty((len(rows), *first.shape[1:]), first.dtype)
        for each, where in zip(found, places, strict=True):
            joined[where] = each
        return joined
    for each, where in zip(found, places, strict=True):
        for place, row in zip(where.tolist(), each, strict=True):
            rows[place] = row
    return rows
