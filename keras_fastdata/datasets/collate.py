"""Samples stacked into batches, each copied once, to where it travels.

A sample is a nested structure (tuples, lists, dicts) of arrays and numbers. A
batch has the same structure, with one array in place of each of these, which
has the samples along its first axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Empty = Callable[..., npt.NDArray[Any]]

# A length for each of the first axes, or "longest"; None leaves an axis alone.
Padding = Any


class Padded:
    """What ragged samples are made alike by.

    Args:
        to: `None`: samples must be alike. "longest": every axis is as long as
            the longest in the batch. An integer: the length of the first axis
            of everything that has one. A tuple of integers and `None`: of the
            first axes. Or a structure of these like that of a sample.
        value: What fills the rest.
    """

    def __init__(self, to: Padding, value: float) -> None:
        self.to = to
        self.value = value

    def of(self, key: Any) -> Padded:
        """That of a part of the sample."""
        if isinstance(self.to, dict):
            return Padded(self.to.get(key), self.value)
        if isinstance(self.to, list) or (
            isinstance(self.to, tuple) and not _is_a_length(self.to)
        ):
            return Padded(self.to[key], self.value)
        return self


def collate(
    samples: Iterable[Any],
    indices: Sequence[int] | npt.NDArray[Any],
    empty: Empty,
    padded: Padded,
) -> Any:
    """Stacks samples.

    Args:
        samples: As many as there are indices, at least one. Each is asked for
            when the one before has been copied, unless "longest" needs all.
        indices: What they are called in errors.
        empty: Makes the arrays of the batch.
        padded: What is done about samples of different shapes.

    Raises:
        ValueError: Samples do not fit together.
    """
    stack: _Stack | None = None
    for place, sample in enumerate(samples):
        if stack is None:
            stack = _stack_like(sample, len(indices), empty, padded, "")
        try:
            stack.put(place, sample)
        except _MisfitError as misfit:
            raise ValueError(
                f"Sample {indices[place]} does not fit into a batch with "
                f"sample {indices[0]}: {misfit}"
            ) from None
    assert stack is not None
    return stack.batch()


class _MisfitError(Exception):
    """A sample is not like the first of its batch."""


class _Stack:
    """The batch of one part of a sample."""

    def put(self, place: int, part: Any) -> None:
        raise NotImplementedError

    def batch(self) -> Any:
        raise NotImplementedError


class _Nested(_Stack):
    """Of a tuple, list or dict."""

    def __init__(
        self,
        sample: Any,
        where: str,
        stack_of: Callable[[Any, Any], _Stack],
    ) -> None:
        self._kind = type(sample)
        self._where = where
        self._keys = _keys(sample)
        self._parts = [stack_of(key, sample[key]) for key in self._keys]

    def put(self, place: int, part: Any) -> None:
        if type(part) is not self._kind or _keys(part) != self._keys:
            raise _MisfitError(
                f"{_called(self._where)} is {_outline(part)}, not "
                f"{self._kind.__name__} with {self._keys}."
            )
        for key, stack in zip(self._keys, self._parts, strict=True):
            stack.put(place, part[key])

    def batch(self) -> Any:
        parts = [stack.batch() for stack in self._parts]
        if issubclass(self._kind, dict):
            return dict(zip(self._keys, parts, strict=True))
        if hasattr(self._kind, "_fields"):
            return self._kind(*parts)
        return self._kind(parts)


class _Nothing(_Stack):
    """Of `None`, such as the targets of a sample that has none."""

    def put(self, place: int, part: Any) -> None:
        if part is not None:
            raise _MisfitError(f"it has {_outline(part)} in place of None.")

    def batch(self) -> None:
        return None


class _Column(_Stack):
    """Of an array or a number: one array that is filled row by row."""

    def __init__(
        self,
        first: npt.NDArray[Any],
        count: int,
        empty: Empty,
        padded: Padded,
        where: str,
    ) -> None:
        self._where = where
        self._shape, self._pads = _padded_shape(first.shape, padded.to)
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
        if not self._pads or leaf.ndim != len(self._shape):
            raise _MisfitError(
                f"{_called(self._where)} has shape {leaf.shape}, not "
                f"{self._shape}. Make samples alike, or pass "
                "`pad_to='longest'`, or the shape to pad to."
            )
        if any(
            have > most
            for have, most in zip(leaf.shape, self._shape, strict=True)
        ):
            raise _MisfitError(
                f"{_called(self._where)} has shape {leaf.shape}, which is "
                f"more than `pad_to` allows, {self._shape}."
            )
        self._array[place] = self._value
        self._array[place][tuple(map(slice, leaf.shape))] = leaf

    def batch(self) -> Any:
        return self._array


class _Gathered(_Stack):
    """Of what is stacked only when all are there: words, ragged arrays."""

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
        if self._leaves and leaf.ndim != self._leaves[0].ndim:
            raise _MisfitError(
                f"{_called(self._where)} has {leaf.ndim} axes, not "
                f"{self._leaves[0].ndim}."
            )
        self._leaves.append(leaf)

    def batch(self) -> Any:
        leaves, self._leaves = self._leaves, []
        dtype = np.result_type(*leaves)
        if dtype.kind in "OSTU":
            return np.stack(leaves)
        shape = tuple(np.max([leaf.shape for leaf in leaves], axis=0))
        array = self._empty((self._count, *map(int, shape)), dtype)
        for row, leaf in zip(array, leaves, strict=True):
            if leaf.shape != shape:
                row[...] = self._padded.value
            row[tuple(map(slice, leaf.shape))] = leaf
        return array


def _stack_like(
    sample: Any, count: int, empty: Empty, padded: Padded, where: str
) -> _Stack:
    if isinstance(sample, (tuple, list, dict)):
        return _Nested(
            sample,
            where,
            lambda key, part: _stack_like(
                part, count, empty, padded.of(key), f"{where}[{key!r}]"
            ),
        )
    if sample is None:
        return _Nothing()
    first = _as_array(sample)
    if first.dtype.kind in "OSTU" or (padded.to == "longest" and first.ndim):
        return _Gathered(count, empty, padded, where)
    return _Column(first, count, empty, padded, where)


def _keys(sample: Any) -> list[Any]:
    if isinstance(sample, dict):
        return list(sample)
    if isinstance(sample, (tuple, list)):
        return list(range(len(sample)))
    return []


def _as_array(leaf: Any) -> npt.NDArray[Any]:
    """A leaf as NumPy knows it; Python's floats are Keras's, not doubles."""
    if type(leaf) is float:
        return np.asarray(leaf, np.float32)
    return np.asarray(leaf)


def _padded_shape(
    shape: tuple[int, ...], to: Padding
) -> tuple[tuple[int, ...], bool]:
    """The shape that samples are padded to, and whether they are at all."""
    if to is None or to == "longest" or not shape:
        return shape, False
    lengths = (to,) if isinstance(to, int) else tuple(to)
    if len(lengths) > len(shape):
        raise ValueError(
            f"`pad_to` gives {len(lengths)} lengths for an array of shape "
            f"{shape}."
        )
    leading = [
        have if wanted is None else wanted
        for have, wanted in zip(shape, lengths, strict=False)
    ]
    return (*leading, *shape[len(lengths) :]), True


def _is_a_length(to: tuple[Any, ...]) -> bool:
    """Whether it is meant for one array, rather than for a tuple of them."""
    return all(part is None or isinstance(part, int) for part in to)


def _called(where: str) -> str:
    return f"its part {where}" if where else "it"


def _outline(part: Any) -> str:
    keys = _keys(part)
    name = type(part).__name__
    return f"{name} with {keys}" if keys else name
