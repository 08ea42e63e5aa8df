"""Batches of named columns: which are read, how they are stacked, what is y."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from keras_fastdata.datasets.collate import Empty, Padded, collate_columns
from keras_fastdata.sources.arrow import array_of
from keras_fastdata.sources.source import Column

_REMEDY = (
    "Convert it in the table, leave it out with `columns=`, or pass a "
    "`transform=` that does so"
)


class ColumnChoice(NamedTuple):
    """The arguments `columns` and `label`."""

    columns: str | list[str] | None
    label: str | list[str] | None

    @staticmethod
    def of(columns: Any, label: Any) -> ColumnChoice:
        """Checks the arguments; raises `TypeError` for unsuitable ones."""
        return ColumnChoice(_names("columns", columns), _names("label", label))

    def read(self, available: Iterable[str], makes: bool = False) -> list[str]:
        """Returns the names to read of those that there are.

        With `makes`, a `transform` may make a label that is not there.

        Raises:
            ValueError: There is no such name.
        """
        available = list(available)
        columns, labels = _listed(self.columns), _listed(self.label)
        if makes:
            labels = [name for name in labels if name in available]
        for argument, names in ("columns", columns), ("label", labels):
            if unknown := [name for name in names if name not in available]:
                raise _unknown(argument, unknown, available)
        if self.columns is None:
            return available
        return list(dict.fromkeys(columns + labels))

    def select(self, sample: Any, makes: bool = False) -> Any:
        """Returns a sample of the source with the chosen parts alone.

        `makes` is as in `read`.
        """
        if self == (None, None):
            return sample
        if not isinstance(sample, Mapping):
            raise TypeError(
                "`columns` and `label` need samples with named parts. The "
                f"source has a {type(sample).__name__}; give the sample names "
                "in a `transform`, or leave these arguments out."
            )
        return {name: sample[name] for name in self.read(sample, makes)}

    def split(self, batch: Any, complete: bool = True) -> Any:
        """Splits a batch of named parts into inputs and targets.

        Where it is not complete, a part that it lacks is `None`.
        """
        if self == (None, None) or not isinstance(batch, Mapping):
            return batch
        labels, columns = _listed(self.label), _listed(self.columns)
        if not complete:
            batch = dict.fromkeys(labels) | dict(batch)
            if isinstance(self.columns, str):
                batch = dict.fromkeys(columns) | batch
        if unknown := [name for name in labels if name not in batch]:
            raise _unknown("label", unknown, batch)
        x: Any = {
            name: part
            for name, part in batch.items()
            if name not in labels or name in columns
        }
        if isinstance(self.columns, str) and list(x) == columns:
            (x,) = x.values()
        if self.label is None:
            return x
        if isinstance(self.label, str):
            return x, batch[self.label]
        return x, {name: batch[name] for name in labels}


def stack_columns(
    columns: Mapping[str, Column],
    indices: npt.NDArray[Any],
    empty: Empty,
    padded: Padded,
) -> dict[str, Any]:
    """Returns the columns of a batch, of which each becomes one array.

    Raises:
        ValueError: A column has nulls, lists of different lengths, or values
            that are neither numbers nor strings.
    """
    pads = padded.of(list(columns))
    done: dict[str, Any] = {}  # those that are not padded
    rest: dict[str, Any] = {}
    for (name, column), pad in zip(columns.items(), pads, strict=True):
        if isinstance(column, Mapping):
            done[name] = stack_columns(column, indices, empty, pad)
            continue
        column = _usable(name, column, indices)
        is_text = not isinstance(column, list) and column.dtype.kind in "OSU"
        (done if is_text else rest)[name] = column
    to = padded.to
    if isinstance(to, dict):
        to = {name: part for name, part in to.items() if name in rest}
    rest = collate_columns(rest, indices, empty, padded.like(to, padded.mask))
    return {name: done.get(name, rest.get(name)) for name in columns} | rest


def _usable(name: str, column: Any, indices: npt.NDArray[Any]) -> Any:
    """Returns a column as numbers and strings that a batch can have."""
    if isinstance(column, list):
        for index, row in zip(indices, column, strict=True):
            if row.dtype.kind == "O" and any(v is None for v in row.flat):
                raise _null(name, index)
        return [_usable(name, row, indices) for row in column]
    if column.dtype.kind == "O":
        column = _texts(name, column, indices)
    if column.dtype == np.float64:
        return column.astype(np.float32)
    if column.dtype.kind in "mMV":
        remedy = _REMEDY
        if seconds := {"m": "timedelta64[s]", "M": "datetime64[s]"}.get(
            column.dtype.kind
        ):
            row = f"row[{name!r}].astype('{seconds}').astype('int64')"
            remedy += f", such as `{row}`"
        raise ValueError(
            f"Column {name!r} is {column.dtype}, which no model takes. "
            f"{remedy}."
        )
    return column


def _texts(
    name: str, column: npt.NDArray[Any], indices: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """Converts a column of objects to an array of strings, or of bytes."""
    values = column.ravel().tolist()
    for place, value in enumerate(values):
        if value is None:
            raise _null(name, indices[place * len(column) // len(values)])
    kinds = {type(value) for value in values}
    if len(kinds) != 1 or not kinds <= {str, bytes}:
        listed = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(
            f"Column {name!r} has values of type {listed}, and a batch has "
            f"numbers or strings. {_REMEDY}."
        )
    # NumPy's string arrays drop zeros at the end of a string.
    if any(value[-1:] in ("\0", b"\0") for value in values):
        return column
    return np.array(values).reshape(column.shape)


def _null(name: str, row: int) -> ValueError:
    return ValueError(
        f"Column {name!r} has no value (null) in row {row}. Fill the nulls in "
        "the table (those of Parquet files with `fill_null=`) or drop these "
        "rows, leave the column out with `columns=`, or pass a `transform=`, "
        "which gets None."
    )


def tidied(sample: Any) -> Any:
    """Converts a row, whose lists become arrays, and paths strings.

    A list of numbers or strings in a row is one value, as in a table.
    """
    if isinstance(sample, (tuple, np.ndarray)):
        return sample  # the usual kinds, without asking abstract classes
    if isinstance(sample, Mapping):
        return {name: _tidied_part(part) for name, part in sample.items()}
    return os.fspath(sample) if isinstance(sample, os.PathLike) else sample


def _tidied_part(part: Any) -> Any:
    if not isinstance(part, list):
        return tidied(part)
    if not part:
        return np.zeros(0, bool)  # other samples may have numbers of any kind
    first: Any = part
    while isinstance(first, list) and first:
        first = first[0]
    if not isinstance(first, (bool, int, float, str, bytes)):
        return part
    try:
        array = array_of(part)
    except ValueError:  # lists of different lengths
        return part
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _unknown(
    argument: str, unknown: list[str], available: Iterable[str]
) -> ValueError:
    available = list(available)
    near = difflib.get_close_matches(unknown[0], map(str, available), 1)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(
        f"`{argument}` has {', '.join(map(repr, unknown))}; the names are "
        f"{', '.join(map(repr, available))}.{meant}"
    )


def _names(argument: str, value: Any) -> str | list[str] | None:
    if value is None or isinstance(value, str):
        return value
    names = list(value) if isinstance(value, Sequence) else [value]
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"`{argument}` must be a name, or a list of names. Received: "
            f"{value!r}"
        )
    return names


def _listed(names: str | list[str] | None) -> list[str]:
    return [names] if isinstance(names, str) else names or []
