"""Stacks samples along a new first axis into batches.

A sample is a nested structure (tuples, lists, mappings) of arrays and numbers.
A batch has the same structure. Each of its arrays has the samples along its
first axis.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Empty = Callable[..., npt.NDArray[Any]]

# A length for each of the first axes, or "longest"; None leaves an axis alone.
Padding = Any


class Padded:
    """The settings for padding samples of different shapes."""

    def __init__(self, to: Padding, value: float) -> None:
        self.to = _checked(to)
        self.value = value

    def of(self, keys: list[Any]) -> list[Padded]:
        """Returns a list with the padding for each sample part in `keys`."""
        if isinstance(self.to, dict):
            if unknown := [key for key in self.to if key not in keys]:
                raise ValueError(
                    f"`pad_to` has {unknown}; a sample has {keys}."
                )
            return [Padded(self.to.get(key), self.value) for key in keys]
        if isinstance(self.to, list):
            if len(self.to) != len(keys):
                raise ValueError(
                    f"`pad_to` is for {len(self.to)} parts of a sample, which "
                    f"has {keys}."
                )
            return [Padded(part, self.value) for part in self.to]
        return [self] * len(keys)


def collate(
    samples: Iterable[Any],
    indices: Sequence[int] | npt.NDArray[Any],
    empty: Empty,
    padded: Padded,
) -> Any:
    """Stacks samples into one batch of the same structure.

    Raises `ValueError` if the samples do not fit together.

    Each sample is requested after the one before was copied, unless "longest"
    needs them all.

    `indices` are the samples' numbers, for error messages. `empty` makes the
    arrays of the batch.
    """
    stack: _Stack | None = None
    count = 0
    for place, sample in enumerate(samples):
        count += 1
        if place == len(indices):
            break
        if stack is None:
            stack = _stack_like(sample, len(indices), empty, padded, "")
        try:
            stack.put(place, sample)
        except _MisfitError as misfit:
            what = f"does not fit into a batch with sample {indices[0]}"
            if isinstance(misfit, _TooLongError):
                what = "is longer than `pad_to` allows"
            raise ValueError(
                f"Sample {indices[place]} {what}: {misfit}"
            ) from None
    if stack is None or count != len(indices):
        number = "more" if count > len(indices) else f"{count}"
        raise ValueError(
            f"The source was asked for {len(indices)} samples and gave "
            f"{number}."
        )
    return stack.batch()


class _MisfitError(Exception):
    """Raised if a sample differs in structure from the first sample."""


class _TooLongError(_MisfitError):
    """Raised if a sample is longer than the length to pad to."""


# Each of these classes collects one part of all samples. `put` adds the part of
# the sample at `place`, or raises `_MisfitError`. `batch` returns the part of
# the batch.


class _Nested:
    """Stacks samples that are tuples, lists or dicts."""

    def __init__(
        self, sample: Any, count: int, empty: Empty, padded: Padded, where: str
    ) -> None:
        self._kind = type(sample)
        self._where = where
        self._keys = _keys(sample)
        self._parts = [
            _stack_like(sample[key], count, empty, pad, f"{where}[{key!r}]")
            for key, pad in zip(self._keys, padded.of(self._keys), strict=True)
        ]

    def put(self, place: int, part: Any) -> None:
        is_alike = type(part) is self._kind
        if not is_alike or set(_keys(part)) != set(self._keys):
            hint = ""
            if is_alike and self._kind is list:
                hint = (
                    " A list is a structure: to stack or pad its items, make "
                    "it an array."
                )
            raise _MisfitError(
                f"{_called(self._where)} is {_outline(part)}, not "
                f"{self._kind.__name__} with {self._keys}.{hint}"
            )
        for key, stack in zip(self._keys, self._parts, strict=True):
            stack.put(place, part[key])

    def batch(self) -> Any:
        parts = [stack.batch() for stack in self._parts]
        if issubclass(self._kind, Mapping):
            return dict(zip(self._keys, parts, strict=True))
        if hasattr(self._kind, "_fields"):
            return self._kind(*parts)
        return self._kind(parts)


class _Nothing:
    """Combines parts that are `None`, such as missing targets, into `None`."""

    def put(self, place: int, part: Any) -> None:
        if part is not None:
            raise _MisfitError(f"it has {_outline(part)} in place of None.")

    def batch(self) -> None:
        return None


class _Column:
    """Stacks numbers or arrays of a shape that is known in advance.

    `put` copies each of them into the batch.
    """

    def __init__(
        self, first: Any, count: int, empty: Empty, padded: Padded, where: str
    ) -> None:
        self._where = where
        self._shape, self._padded_axes = _padded_shape(first.shape, padded.to)
        if self._padded_axes:
            _check_value(padded.value, first.dtype)
        self._array = empty((count, *self._shape), first.dtype)
        self._value = padded.value

    def put(self, place: int, part: Any) -> None:
        leaf = _as_array(part)
        dtype = self._array.dtype
        if leaf.dtype != dtype and not np.can_cast(leaf.dtype, dtype, "safe"):
            raise _MisfitError(
                f"{_called(self._where)} is {leaf.dtype}, not {dtype}. "
                "Return the same dtype from every sample."
            )
        if leaf.shape == self._shape:
            self._array[place] = leaf
            return
        pairs = list(enumerate(zip(leaf.shape, self._shape, strict=False)))
        if leaf.ndim != len(self._shape) or any(
            have != wanted
            for axis, (have, wanted) in pairs
            if axis not in self._padded_axes
        ):
            raise _MisfitError(
                f"{_called(self._where)} has shape {leaf.shape}, not "
                f"{self._shape}. Make samples alike, or pass "
                "`pad_to='longest'`, or the shape to pad to."
            )
        if any(have > most for _, (have, most) in pairs):
            raise _TooLongError(
                f"{_called(self._where)} has shape {leaf.shape}, and is to "
                f"become {self._shape}. Pass a larger `pad_to`, or "
                '`pad_to="longest"`; or cut samples to that length.'
            )
        self._array[place] = self._value
        self._array[place][tuple(map(slice, leaf.shape))] = leaf

    def batch(self) -> Any:
        return self._array


class _Gathered:
    """Collects ragged arrays or strings, pads them, and stacks them."""

    def __init__(
        self, count: int, empty: Empty, padded: Padded, where: str
    ) -> None:
        self._leaves: list[Any] = []
        self._count = count
        self._empty = empty
        self._padded = padded
        self._where = where

    def put(self, place: int, part: Any) -> None:
        leaf = _as_array(part)
        first = self._leaves[0] if self._leaves else leaf
        if leaf.ndim != first.ndim:
            raise _MisfitError(
                f"{_called(self._where)} has {leaf.ndim} axes, not "
                f"{first.ndim}."
            )
        if (leaf.dtype.kind in "OSTU") != (first.dtype.kind in "OSTU"):
            raise _MisfitError(
                f"{_called(self._where)} is {leaf.dtype}, not {first.dtype}."
            )
        # `get_sample` may fill the same buffer again for the next sample.
        self._leaves.append(leaf.copy())

    def batch(self) -> Any:
        leaves, self._leaves = self._leaves, []
        dtype = np.result_type(*leaves)
        if dtype.kind in "OSTU":
            return np.stack(leaves)
        shape = tuple(np.max([leaf.shape for leaf in leaves], axis=0))
        if any(leaf.shape != shape for leaf in leaves):
            _check_value(self._padded.value, dtype)
        array = self._empty((self._count, *map(int, shape)), dtype)
        for row, leaf in zip(array, leaves, strict=True):
            if leaf.shape != shape:
                row[...] = self._padded.value
            row[tuple(map(slice, leaf.shape))] = leaf
        return array


_Stack = _Nested | _Nothing | _Column | _Gathered


def _stack_like(
    sample: Any, count: int, empty: Empty, padded: Padded, where: str
) -> _Stack:
    if isinstance(sample, (tuple, list, Mapping)):
        return _Nested(sample, count, empty, padded, where)
    if sample is None:
        return _Nothing()
    first = _as_array(sample)
    if first.dtype.kind in "OSTU" or (padded.to == "longest" and first.ndim):
        return _Gathered(count, empty, padded, where)
    return _Column(first, count, empty, padded, where)


def _keys(sample: Any) -> list[Any]:
    if isinstance(sample, Mapping):
        return list(sample)
    if isinstance(sample, (tuple, list)):
        return list(range(len(sample)))
    return []


def _as_array(leaf: Any) -> npt.NDArray[Any]:
    """Converts a leaf to an array; Python floats become float32.

    NumPy's string arrays drop zeros at the end of a string. A string that
    ends in a zero becomes an array of objects, and so does its batch.
    """
    if type(leaf) is float:
        return np.asarray(leaf, np.float32)
    if isinstance(leaf, (str, bytes)) and leaf[-1:] in ("\0", b"\0"):
        return np.asarray(leaf, object)
    return np.asarray(leaf)


def _padded_shape(
    shape: tuple[int, ...], to: Padding
) -> tuple[tuple[int, ...], set[int]]:
    """Returns the shape after padding, and the axes that are padded."""
    if to is None or to == "longest" or not shape:
        return shape, set()
    if isinstance(to, (dict, list)):
        raise ValueError(
            f"`pad_to` has {to!r} for an array of shape {shape}; pass one "
            "length, or a tuple of lengths."
        )
    lengths = (to,) if isinstance(to, int) else to
    if len(lengths) > len(shape):
        raise ValueError(
            f"`pad_to` gives {len(lengths)} lengths for an array of shape "
            f"{shape}."
        )
    wanted = {n: most for n, most in enumerate(lengths) if most is not None}
    return tuple(wanted.get(n, have) for n, have in enumerate(shape)), {*wanted}


def _checked(to: Any) -> Padding:
    """Validates and normalizes the argument `pad_to`."""
    if to is None or (isinstance(to, str) and to == "longest"):
        return to
    if isinstance(to, Mapping):
        return {key: _checked(part) for key, part in to.items()}
    if isinstance(to, (tuple, list)):
        parts = [_checked(part) for part in to]
        lengths = all(part is None or isinstance(part, int) for part in parts)
        return tuple(parts) if lengths and isinstance(to, tuple) else parts
    try:
        length = operator.index(to)
    except TypeError:
        length = -1
    if length < 0:
        raise ValueError(
            '`pad_to` must be "longest", a length, a tuple of lengths, or a '
            f"structure of these like that of a sample. Received: {to!r}"
        )
    return length


def _check_value(value: float, dtype: np.dtype[Any]) -> None:
    """Raises `ValueError` if arrays of a dtype cannot hold a pad value."""
    try:
        filled: Any = np.asarray(value, dtype)
        fits = bool(filled == value)
        fits = fits or bool(value != value and filled != filled)  # NaN
        if np.issubdtype(dtype, np.inexact):  # rounding is no surprise
            fits = fits or bool(np.isfinite(filled))
    except (OverflowError, ValueError):
        fits = False
    if not fits:
        raise ValueError(
            f"`pad_value={value!r}` does not fit into samples of {dtype}."
        )


def _called(where: str) -> str:
    return f"its part {where}" if where else "it"


def _outline(part: Any) -> str:
    keys = _keys(part)
    name = type(part).__name__
    return f"{name} with {keys}" if keys else name
