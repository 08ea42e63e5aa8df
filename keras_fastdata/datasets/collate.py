"""Stacks samples along a new first axis into batches.

A sample is a nested structure (tuples, lists, mappings) of arrays and numbers.
A batch has the same structure. Each of its arrays has the samples along its
first axis.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from keras_fastdata._validation import fits, integer
from keras_fastdata.sources.source import Column

Empty = Callable[..., npt.NDArray[Any]]

# A length for each of the first axes, or "longest"; None leaves an axis alone.
Padding = Any

# The name of the mask, or the name of the mask of each part.
Mask = str | Mapping[Any, str]

_Lengths = npt.NDArray[np.int64]
_Shape = tuple[int, ...]

_TEXT = "OSTU"  # kinds of dtypes; arrays of these are not padded


class Padded:
    """The settings for padding samples of different shapes.

    `SampleDataset` describes the arguments.
    """

    def __init__(
        self,
        to: Padding,
        value: float,
        truncate: bool | int = False,
        multiple_of: Any = None,
        mask: Mask | None = None,
    ) -> None:
        self.to = _checked(to)
        self.value = value
        self.truncate = truncate
        self.multiple_of: tuple[int | None, ...] = ()
        self.mask = mask
        for name, given in ("truncate", truncate), ("mask", mask):
            if self.to is None and given is not None and given is not False:
                raise ValueError(
                    f"`{name}={given!r}` is for samples that are padded. Pass "
                    '`pad_to` too: "longest", or a length.'
                )
        if not isinstance(truncate, bool):
            self.truncate = integer(
                "truncate", truncate, least=1, or_else=", or True or False"
            )
        elif truncate and self.to == "longest":
            raise ValueError(
                '`truncate=True` cuts samples to `pad_to`, and "longest" is '
                "no length. Pass a length, such as `truncate=512`."
            )
        if not isinstance(mask, str | Mapping | None):
            raise TypeError(
                "`mask` must be a name, or a dict with a name for each part "
                f"that is padded. Received: {mask!r}"
            )
        if multiple_of is not None:
            if not _has_longest(self.to):
                raise ValueError(
                    "`pad_to_multiple_of` rounds up the length of "
                    f'`pad_to="longest"`. Received: pad_to={to!r}'
                )
            each = multiple_of
            self.multiple_of = tuple(
                None if n is None else integer("pad_to_multiple_of", n, least=1)
                for n in (each if isinstance(each, tuple) else (each,))
            )

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of `SampleDataset` for these settings."""
        return {
            "pad_to": self.to,
            "pad_value": self.value,
            "truncate": self.truncate,
            "pad_to_multiple_of": self.multiple_of or None,
            "mask": self.mask,
        }

    def of(self, keys: list[Any]) -> list[Padded]:
        """Returns a list with the padding for each sample part in `keys`."""
        to = self.to
        if isinstance(to, dict):
            if unknown := [key for key in to if key not in keys]:
                raise ValueError(
                    f"`pad_to` has {unknown}; a sample has {keys}."
                )
            return [self.like(to.get(key)) for key in keys]
        if isinstance(to, list):
            if len(to) != len(keys):
                raise ValueError(
                    f"`pad_to` is for {len(to)} parts of a sample, which "
                    f"has {keys}."
                )
            return [self.like(part) for part in to]
        return [self.like(to)] * len(keys)

    def like(self, to: Padding, mask: Mask | None = None) -> Padded:
        """Returns these settings with another `pad_to` and `mask`."""
        part = copy.copy(self)
        part.to, part.mask = to, mask
        return part

    def cuts(self, axes: int) -> tuple[slice, ...]:
        """Returns the slices that cut an array with so many axes."""
        if self.to is None or not self.truncate:
            return ()
        lengths = self.to if self.truncate is True else self.truncate
        if isinstance(lengths, int):
            lengths = (lengths,)
        return () if lengths == "longest" else tuple(map(slice, lengths))[:axes]

    def shape(self, shape: _Shape) -> tuple[_Shape, frozenset[int]]:
        """Returns a shape after padding, and which of its axes are padded."""
        to = self.to
        if to is None or not shape:
            return shape, frozenset()
        if to == "longest":
            multiples = (*self.multiple_of, *[None] * len(shape))
            rounded = [
                -(-have // n) * n if n else have
                for have, n in zip(shape, multiples, strict=False)
            ]
            return tuple(rounded), frozenset(range(len(shape)))
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
        padded = [wanted.get(n, have) for n, have in enumerate(shape)]
        return tuple(padded), frozenset(wanted)


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

    def leaf(part: Any, padded: Padded, where: str) -> _Stack:
        first = _as_array(part)
        if first.dtype.kind in _TEXT or (padded.to == "longest" and first.ndim):
            return _Gathered([], empty, padded, where)
        return _Column(first, len(indices), empty, padded, where)

    stack: _Stack | None = None
    count = 0
    try:
        for place, sample in enumerate(samples):
            count += 1
            if place == len(indices):
                break
            if stack is None:
                kinds = (tuple, list, Mapping)
                stack = _stack_like(sample, kinds, leaf, padded, "")
            stack.put(place, sample)
        if stack is not None and count == len(indices):
            return stack.batch()
    except _MisfitError as misfit:
        raise _named(misfit, indices) from None
    number = "more" if count > len(indices) else f"{count}"
    raise ValueError(
        f"The source was asked for {len(indices)} samples and gave {number}."
    )


def collate_columns(
    columns: Any,
    indices: Sequence[int] | npt.NDArray[Any],
    empty: Empty,
    padded: Padded,
) -> Any:
    """Pads columns as `collate` pads samples, and returns the batch.

    `columns` are nested in tuples and mappings. Each is an array with a row
    for each sample, or a list with an array for each sample. An array that
    needs no padding is returned itself.
    """

    def leaf(part: Any, padded: Padded, where: str) -> _Stack:
        return _Gathered(part, empty, padded, where)

    try:
        kinds = (tuple, Mapping)
        return _stack_like(columns, kinds, leaf, padded, "").batch()
    except _MisfitError as misfit:
        raise _named(misfit, indices) from None


def stack_padded(
    rows: Column, empty: Empty, padded: Padded, where: str = ""
) -> tuple[npt.NDArray[Any], _Lengths | None]:
    """Pads arrays and stacks them.

    Args:
        rows: At least one array: a list, or the rows of an array.
        empty: Makes the array that is returned.
        padded: How to pad and cut.
        where: Which part of a sample the arrays are, for error messages.

    Returns:
        The arrays along a new first axis; `rows` itself if that is an array
        which needs no padding. And how long the first axis of each array was,
        or `None` if arrays like these are not padded.
    """
    shapes, dtype = _common(rows, where)
    if dtype.kind in _TEXT:
        for place, shape in enumerate(shapes):
            _check_shape(place, shape, shapes[0], frozenset(), where)
        return np.stack([*rows]), None
    if cuts := padded.cuts(len(shapes[0])):
        rows = [row[cuts] for row in rows]
        shapes = [row.shape for row in rows]
    sizes = [*zip(*shapes, strict=True)]  # for each axis
    least, most = tuple(map(min, sizes)), tuple(map(max, sizes))
    is_longest = padded.to == "longest"
    shape, axes = padded.shape(most if is_longest else shapes[0])
    is_ragged = {least, most} != {shape}
    if is_ragged and not is_longest:
        for place, have in enumerate(shapes):
            _check_shape(place, have, shape, axes, where)
    lengths = np.array(sizes[0], np.int64) if axes else None
    if isinstance(rows, np.ndarray) and not is_ragged:
        return rows, lengths
    array = empty((len(rows), *shape), dtype)
    if is_ragged:
        _check_value(padded.value, dtype)
        array[:, least[0] :].fill(padded.value)
    if len(shape) == 1:
        for row, out, have in zip(rows, array, sizes[0], strict=True):
            out[:have] = row
    else:
        for row, out in zip(rows, array, strict=True):
            if row.shape != shape:
                out.fill(padded.value)
            out[tuple(map(slice, row.shape))] = row
    return array, lengths


class _MisfitError(Exception):
    """Raised if the sample at a place differs from the first sample."""

    def __init__(self, place: int, why: str) -> None:
        super().__init__(why)
        self.place = place


class _TooLongError(_MisfitError):
    """Raised if a sample is longer than the length to pad to."""


class _MaskedError(_MisfitError):
    """Raised if a sample has masked values."""


def _named(
    misfit: _MisfitError, indices: Sequence[int] | npt.NDArray[Any]
) -> ValueError:
    what = f"does not fit into a batch with sample {indices[0]}"
    if isinstance(misfit, _TooLongError):
        what = "is longer than `pad_to` allows"
    elif isinstance(misfit, _MaskedError):
        what = "has masked values, and a batch has no mask"
    return ValueError(f"Sample {indices[misfit.place]} {what}: {misfit}")


# Each of these classes collects one part of all samples. `put` adds the part of
# the sample at `place`, or raises `_MisfitError`. `batch` returns the part of
# the batch. Then `lengths` has the samples' lengths, if the part was padded.


class _Nested:
    """Stacks samples that are tuples, lists or dicts."""

    lengths: _Lengths | None = None

    def __init__(
        self,
        sample: Any,
        kinds: tuple[type, ...],
        leaf: _Leaf,
        padded: Padded,
        where: str,
    ) -> None:
        self._kind = type(sample)
        self._where = where
        self._keys = _keys(sample)
        is_mapping = issubclass(self._kind, Mapping)
        self._names = set(self._keys) if is_mapping else None
        self._mask = padded.mask
        each = padded.of(self._keys)
        if each and not is_mapping:
            # Of `(inputs, targets)`, the inputs get the mask.
            each[0], self._mask = each[0].like(each[0].to, padded.mask), None
        self._parts = [
            _stack_like(sample[key], kinds, leaf, pad, f"{where}[{key!r}]")
            for key, pad in zip(self._keys, each, strict=True)
        ]

    def put(self, place: int, part: Any) -> None:
        is_alike = type(part) is self._kind
        if not is_alike or (
            part.keys() != self._names
            if self._names is not None
            else len(part) != len(self._keys)
        ):
            hint = ""
            if is_alike and self._kind is list:
                hint = (
                    " A list is a structure: to stack or pad its items, make "
                    "it an array."
                )
            raise _MisfitError(
                place,
                f"{_called(self._where)} is {_outline(part)}, not "
                f"{self._kind.__name__} with {self._keys}.{hint}",
            )
        for key, stack in zip(self._keys, self._parts, strict=True):
            stack.put(place, part[key])

    def batch(self) -> Any:
        parts = [stack.batch() for stack in self._parts]
        if issubclass(self._kind, Mapping):
            batch = dict(zip(self._keys, parts, strict=True))
            return batch if self._mask is None else batch | self._masks(batch)
        if hasattr(self._kind, "_fields"):
            return self._kind(*parts)
        return self._kind(parts)

    def _masks(self, batch: dict[Any, Any]) -> dict[str, Any]:
        lengths = {
            key: stack.lengths
            for key, stack in zip(self._keys, self._parts, strict=True)
            if stack.lengths is not None
        }
        mask: Any = self._mask
        names = mask
        if isinstance(mask, str):
            first, *others = [*lengths, *([] if lengths else self._keys)]
            names = {first: mask}
            for key in others:
                if lengths and not np.array_equal(lengths[key], lengths[first]):
                    raise ValueError(
                        f"`mask={mask!r}` is one mask for all padded parts, "
                        f"and the lengths of {first!r} and {key!r} differ. "
                        f"Name the part: `mask={names}`."
                    )
        if unknown := [key for key in names if key not in lengths]:
            raise ValueError(
                f"`mask` is for {unknown}, which `pad_to` does not pad. It "
                f"pads: {[*lengths]}."
            )
        if taken := [name for name in names.values() if name in batch]:
            raise ValueError(
                f"`mask` is called {taken}, as a part of the samples is. Pass "
                "another name."
            )
        return {
            name: np.arange(batch[key].shape[1]) < lengths[key][:, None]
            for key, name in names.items()
        }


class _Nothing:
    """Combines parts that are `None`, such as missing targets, into `None`."""

    lengths: _Lengths | None = None

    def put(self, place: int, part: Any) -> None:
        if part is not None:
            raise _MisfitError(
                place, f"it has {_outline(part)} in place of None."
            )

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
        self._shape, self._axes = padded.shape(first.shape)
        if self._axes:
            _check_value(padded.value, first.dtype)
        self._array = empty((count, *self._shape), first.dtype)
        self._value = padded.value
        self._cuts = padded.cuts(first.ndim)
        self.lengths = (
            np.full(count, self._shape[0], np.int64) if self._axes else None
        )

    def put(self, place: int, part: Any) -> None:
        _check_mask(place, part, self._where)
        leaf = _as_array(part)
        dtype = self._array.dtype
        if leaf.dtype != dtype and not np.can_cast(leaf.dtype, dtype, "safe"):
            raise _MisfitError(
                place,
                f"{_called(self._where)} is {leaf.dtype}, not {dtype}. "
                "Return the same dtype from every sample.",
            )
        if self._cuts and leaf.ndim == len(self._shape):
            leaf = leaf[self._cuts]
        if leaf.shape == self._shape:
            self._array[place] = leaf
            return
        _check_shape(place, leaf.shape, self._shape, self._axes, self._where)
        row = self._array[place]
        row.fill(self._value)
        row[tuple(map(slice, leaf.shape))] = leaf
        if self.lengths is not None:
            self.lengths[place] = len(leaf)

    def batch(self) -> Any:
        return self._array


class _Gathered:
    """Collects ragged arrays or strings, pads them, and stacks them.

    `rows` may have them already; then `put` is not called.
    """

    lengths: _Lengths | None = None

    def __init__(
        self, rows: Any, empty: Empty, padded: Padded, where: str
    ) -> None:
        self._rows = rows
        self._empty = empty
        self._padded = padded
        self._where = where

    def put(self, place: int, part: Any) -> None:
        _check_mask(place, part, self._where)
        # `get_sample` may fill the same buffer again for the next sample.
        self._rows.append(_as_array(part).copy())

    def batch(self) -> Any:
        batch, self.lengths = stack_padded(
            self._rows, self._empty, self._padded, self._where
        )
        return batch


_Stack = _Nested | _Nothing | _Column | _Gathered
_Leaf = Callable[[Any, Padded, str], _Stack]


def _stack_like(
    sample: Any,
    kinds: tuple[type, ...],
    leaf: _Leaf,
    padded: Padded,
    where: str,
) -> _Stack:
    """Returns a stack for samples like this one.

    Objects of `kinds` are nested structures. `leaf` makes the stack of any
    other part.
    """
    if isinstance(sample, kinds):
        return _Nested(sample, kinds, leaf, padded, where)
    if padded.mask is not None:
        raise ValueError(
            "`mask` adds a part to inputs that are a dict, and these are "
            f"{_outline(sample)}. Return a dict from each sample, such as "
            '`{"tokens": ...}`; or leave out `mask`, and have the model find '
            "`pad_value`: `keras.layers.Masking`, or `mask_zero=True` of "
            "`keras.layers.Embedding`."
        )
    return _Nothing() if sample is None else leaf(sample, padded, where)


def _common(rows: Column, where: str) -> tuple[list[_Shape], np.dtype[Any]]:
    """Returns the shape of each array, and the dtype for all of them."""
    if isinstance(rows, np.ndarray):
        return [rows.shape[1:]] * len(rows), rows.dtype
    shapes = [row.shape for row in rows]
    dtypes = {row.dtype for row in rows}
    if len(set(map(len, shapes))) > 1:
        for place, row in enumerate(rows):
            if row.ndim != rows[0].ndim:
                why = f"has {row.ndim} axes, not {rows[0].ndim}."
                raise _MisfitError(place, f"{_called(where)} {why}")
    if len({dtype.kind in _TEXT for dtype in dtypes}) > 1:
        for place, row in enumerate(rows):
            if (row.dtype.kind in _TEXT) != (rows[0].dtype.kind in _TEXT):
                why = f"is {row.dtype}, not {rows[0].dtype}."
                raise _MisfitError(place, f"{_called(where)} {why}")
    return shapes, np.result_type(*dtypes)


def _check_mask(place: int, part: Any, where: str) -> None:
    """Raises `_MaskedError` if the batch would have what a mask hides."""
    if isinstance(part, np.ma.MaskedArray) and np.ma.is_masked(part):
        raise _MaskedError(
            place,
            f"{_called(where)} has {np.sum(part.mask)} of them. Fill "
            "them in `get_sample`, such as by `array.filled(0)`; return the "
            "mask as an input of its own if the model needs it.",
        )


def _check_shape(
    place: int, have: _Shape, wanted: _Shape, axes: frozenset[int], where: str
) -> None:
    """Raises `_MisfitError` if an array cannot be padded to a shape."""
    if len(have) != len(wanted) or any(
        have[axis] != wanted[axis]
        for axis in range(len(wanted))
        if axis not in axes
    ):
        raise _MisfitError(
            place,
            f"{_called(where)} has shape {have}, not {wanted}. Make samples "
            "alike, or pass `pad_to='longest'`, or the shape to pad to.",
        )
    if any(map(operator.gt, have, wanted)):
        raise _TooLongError(
            place,
            f"{_called(where)} has shape {have}, and is to become {wanted}. "
            "Pass `truncate=True` to cut it, or a larger `pad_to`, or "
            '`pad_to="longest"`.',
        )


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
    if type(leaf) is np.ndarray:
        return leaf
    if type(leaf) is float:
        return np.asarray(leaf, np.float32)
    if isinstance(leaf, (str, bytes)) and leaf[-1:] in ("\0", b"\0"):
        return np.asarray(leaf, object)
    return np.asarray(leaf)


def _has_longest(to: Padding) -> bool:
    if isinstance(to, dict):
        to = list(to.values())
    if isinstance(to, list):
        return any(map(_has_longest, to))
    return bool(to == "longest")


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
    if not fits(value, dtype):
        raise ValueError(
            f"`pad_value={value!r}` does not fit into samples of {dtype}."
        )


def _called(where: str) -> str:
    return f"its part {where}" if where else "it"


def _outline(part: Any) -> str:
    keys = _keys(part)
    name = type(part).__name__
    return f"{name} with {keys}" if keys else name
