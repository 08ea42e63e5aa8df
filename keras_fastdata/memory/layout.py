"""Describes plain batches, which are arrays in tuples, lists and dicts.

Most batches are plain, and a dataset's batches mostly have the same structure.
The description of a structure can be compared and hashed. It is pickled once
and unpickled once, and recognized from then on. Other batches are pickled.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

# Limits, so that batches of ever new shapes do not fill the memory.
_MOST = 256  # layouts that are remembered
_LARGEST = 16 * 1024  # bytes of a layout that is remembered

# Kinds of dtypes in a cache file: numbers, times, strings, raw bytes.
_KINDS = "biufcmMSUV"
_EXTENSION = 2  # `isbuiltin` of a dtype that a package registered

# First byte of a packed layout; a pickle begins with another byte.
_MARK = b"\0"


class Leaf(NamedTuple):
    """Describes one array of a batch."""

    shape: tuple[int, ...]
    dtype: Any  # the name of its dtype; for an extension type, the dtype itself
    order: Literal["C", "F"]  # the order of its bytes
    writeable: bool  # whether the delivered array is writeable


class Layout:
    """Rebuilds batches of one structure from the buffers of their arrays.

    Raises:
        ValueError: An array holds objects, so that its bytes would be used as
            addresses.
    """

    def __init__(self, description: Any) -> None:
        # The arrays, in the order of the structure.
        self.leaves: list[Leaf] = []
        self._assemble = _assembler(description, self.leaves)
        self._dtypes = [data_type(leaf.dtype) for leaf in self.leaves]

    @property
    def sizes(self) -> list[int]:
        """The number of bytes of each array."""
        return [
            math.prod(leaf.shape) * dtype.itemsize
            for leaf, dtype in zip(self.leaves, self._dtypes, strict=True)
        ]

    def assemble(
        self, buffers: Sequence[Any], starts: Sequence[int] | None = None
    ) -> Any:
        """Assembles a batch from one buffer for each array.

        `starts` says where each array begins in its buffer; by default at 0.
        """
        arrays = []
        for (shape, _, order, writeable), dtype, buffer, start in zip(
            self.leaves,
            self._dtypes,
            buffers,
            starts or (0,) * len(buffers),
            strict=True,
        ):
            array = np.ndarray(shape, dtype, buffer, start, None, order)
            if not writeable:
                array.flags.writeable = False
            arrays.append(array)
        return self._assemble(iter(arrays))


def describe(batch: Any, arrays: list[npt.NDArray[Any]]) -> Any:
    """Describes a batch, or returns `None` if the batch must be pickled.

    The batch's arrays are appended to `arrays`, in order.
    """
    seen: set[int] = set()
    try:
        return _describe(batch, arrays, seen)
    except _NotPlainError:
        arrays.clear()
        return None


def pack(description: Any) -> bytes:
    """Serializes a description; equal descriptions mostly give equal bytes."""
    found = _packed.get(description)
    if found is None:
        found = _MARK + pickle.dumps(description, protocol=5)
        if len(found) <= _LARGEST:
            _remember(_packed, description, found)
    return found


def unpack(packed: bytes) -> Layout | None:
    """Rebuilds a layout from `pack`'s result; `None` for a pickled batch."""
    found = _layouts.get(packed)
    if found is None and packed.startswith(_MARK):
        found = Layout(pickle.loads(packed[len(_MARK) :]))
        if len(packed) <= _LARGEST:
            _remember(_layouts, packed, found)
    return found


def read_only(description: Any) -> Any:
    """Returns a copy of a description that marks all arrays as read-only."""
    if isinstance(description, Leaf):
        return description._replace(writeable=False)
    kind, *keys, parts = description
    return kind, *keys, tuple(map(read_only, parts))


def data_type(dtype: Any) -> np.dtype[Any]:
    """Returns a `np.dtype`; raises `ValueError` for a dtype of objects."""
    found: np.dtype[Any] = np.dtype(dtype)
    if found.hasobject:
        raise ValueError(f"an array of type {found}")
    return found


def as_json(description: Any) -> Any:
    """Converts a description to values that JSON can represent."""
    if isinstance(description, Leaf):
        dtype = np.dtype(description.dtype)
        by_name = dtype.isbuiltin == _EXTENSION
        return {
            "shape": description.shape,
            "dtype": {"name": dtype.name} if by_name else dtype.str,
            "order": description.order,
        }
    kind, *keys, parts = description
    return [kind.__name__, *keys, list(map(as_json, parts))]


def from_json(found: Any) -> Any:
    """Rebuilds a description of read-only arrays from `as_json`'s result.

    The values may come from an untrusted file: only dtypes that `as_json`
    writes are accepted, and no negative lengths. Raises `ValueError`,
    `KeyError` or `TypeError` for anything else.
    """
    if isinstance(found, dict):
        lengths = found["shape"]
        if any(type(length) is not int or length < 0 for length in lengths):
            raise ValueError(f"an array of shape {lengths}")
        order: Literal["C", "F"] = "F" if found["order"] == "F" else "C"
        dtype = _type_from_json(found["dtype"])
        return Leaf(tuple(lengths), dtype, order, writeable=False)
    name, *keys, parts = found
    kind = {"tuple": tuple, "list": list, "dict": dict}[name]
    return kind, *map(tuple, keys), tuple(map(from_json, parts))


def _type_from_json(found: Any) -> Any:
    if isinstance(found, dict):
        import ml_dtypes

        name = found["name"]
        scalar = getattr(ml_dtypes, name)
        if isinstance(scalar, type) and issubclass(scalar, np.generic):
            dtype = np.dtype(scalar)
            if dtype.isbuiltin == _EXTENSION and dtype.name == name:
                return dtype
    elif isinstance(found, str):
        dtype = np.dtype(found)
        if dtype.kind in _KINDS and dtype.str == found:
            return found
    raise ValueError(f"an array of type {found}")


class _NotPlainError(Exception):
    """Raised for a batch that `describe` cannot describe."""


_names: dict[np.dtype[Any], Any] = {}
_packed: dict[Any, bytes] = {}
_layouts: dict[bytes, Layout] = {}


def _remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    if len(known) >= _MOST:
        known.clear()
    known[key] = value


def _describe(
    value: Any, arrays: list[npt.NDArray[Any]], seen: set[int]
) -> Any:
    kind = type(value)
    # An object that occurs twice must stay one object: only pickle does that.
    if id(value) in seen:
        raise _NotPlainError
    if kind is np.ndarray or kind is np.memmap:
        seen.add(id(value))
        plain = value if kind is np.ndarray else value.view(np.ndarray)
        arrays.append(plain)
        return _leaf(plain)
    if kind is tuple:
        return tuple, tuple([_describe(v, arrays, seen) for v in value])
    seen.add(id(value))
    if kind is list:
        return list, tuple([_describe(v, arrays, seen) for v in value])
    if kind is dict and all(type(key) is str for key in value):
        parts = [_describe(v, arrays, seen) for v in value.values()]
        return dict, tuple(value), tuple(parts)
    raise _NotPlainError


def _leaf(array: npt.NDArray[Any]) -> Leaf:
    dtype, flags = array.dtype, array.flags
    name = _names.get(dtype)
    if name is None:
        name = _name(dtype)
        _remember(_names, dtype, name)
    if not array.nbytes:
        raise _NotPlainError
    if flags.c_contiguous:
        return Leaf(array.shape, name, "C", flags.writeable)
    if flags.f_contiguous:
        return Leaf(array.shape, name, "F", flags.writeable)
    # A copy is made, which may be written to.
    return Leaf(array.shape, name, "C", True)


def _name(dtype: np.dtype[Any]) -> Any:
    """Returns `dtype.str`, or `dtype` itself if it is an extension dtype."""
    # Structured dtypes may compare equal although they differ.
    if dtype.hasobject or dtype.kind == "T" or dtype.names:
        raise _NotPlainError
    return dtype if is_extension(dtype) else dtype.str


def is_extension(dtype: np.dtype[Any]) -> bool:
    """Returns whether `dtype.str` is not enough to identify the dtype."""
    return dtype.kind == "V" or dtype.isbuiltin == _EXTENSION


def _assembler(
    description: Any, leaves: list[Leaf]
) -> Callable[[Iterator[Any]], Any]:
    """Returns a function that builds the nested batch from its arrays."""
    if isinstance(description, Leaf):
        leaves.append(description)
        return next
    kind, *keys, parts = description
    makers = [_assembler(part, leaves) for part in parts]
    if kind is dict:
        (names,) = keys
        return lambda arrays: {
            name: make(arrays) for name, make in zip(names, makers, strict=True)
        }
    return lambda arrays: kind([make(arrays) for make in makers])
