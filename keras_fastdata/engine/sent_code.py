"""Computes a digest of the code that travels to workers with a dataset.

cloudpickle sends functions and classes of `__main__` along, with the globals
that they use. The digest is that of such a pickle, so that whatever would be
sent is looked at. The numbers, texts and arrays in the dataset's own attributes
do not count; those that globals and classes hold do. Of large arrays only a
sample is read, of other objects only the identity: tables, models and large
containers are not read, and no method of the user's runs.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import hashlib
import io
import logging
import types
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_fastdata._modules import is_users_class
from keras_fastdata.building.attributes import attributes_of, slots_of
from keras_fastdata.building.seeding import PRIVATE
from keras_fastdata.memory import rebuilt_classes
from keras_fastdata.memory.reducers import Pickler

_MOST_ITEMS = 1_000  # of a container that is looked at
_MOST_CHARACTERS = 10_000  # of a text
_MOST_BYTES = 1 << 20  # of an array that is read whole
_FEW_BYTES = 1_000  # of an array whose content is pickled
_MOST_SAMPLED = 1 << 16  # items of a larger array
_MOST_PICKLED = 1 << 20  # bytes of the whole pickle

_TEXTS = (str, bytes, bytearray)
_SCALARS = (int, float, complex, types.NoneType, np.generic)
_CONTAINERS = {
    *(list, tuple, dict, set, frozenset),
    *(collections.deque, collections.OrderedDict, collections.defaultdict),
}
# Objects that pickle takes apart without a method of the user's.
_TAKEN_APART = (
    *(type, types.FunctionType, types.CodeType, types.CellType),
    *(types.MethodType, types.BuiltinFunctionType, types.ModuleType),
    *(types.MappingProxyType, functools.partial, functools.partialmethod),
    *(property, staticmethod, classmethod),
    *(*_SCALARS, types.EllipsisType, slice, range, np.dtype),
    rebuilt_classes.MemberMaker,
)
# Objects whose attributes are looked at.
_OPEN = (
    *(types.SimpleNamespace, argparse.Namespace, np.vectorize),
    *(collections.UserList, collections.UserDict, collections.ChainMap),
    *(functools.cached_property, functools.singledispatchmethod),
)

_log = logging.getLogger("keras_fastdata")


def digest_of(dataset: Any) -> bytes | None:
    """Returns the digest; `None` if the code is large or cannot be pickled."""
    stream = _Digest()
    try:
        objects = _CodePickler(stream)
        objects.dump(dataset)
        # Their globals may hold the dataset.
        code = [obj for _, obj in objects.code.values()]
        _CodePickler(stream, dataset).dump(code)
    except Exception:
        # Objects of the user's may refuse to be looked into.
        _log.debug("The code of a dataset:", exc_info=True)
        return None
    return stream.hash.digest()


def checksum_of(array: np.ndarray[Any, Any]) -> tuple[Any, ...] | None:
    """Returns a checksum of an array, or of a sample of a large one.

    Returns `None` for an array of objects, and a large one that is not in one
    piece.
    """
    if array.dtype.hasobject:
        return None
    if array.nbytes > _MOST_BYTES:
        if not array.flags.c_contiguous:
            return None
        flat = array.reshape(-1)
        array = flat[:: max(1, flat.size // _MOST_SAMPLED)]
    return array.shape, zlib.crc32(array.tobytes())


class _Digest(io.RawIOBase):
    """Computes the digest of what is written, up to a limit."""

    def __init__(self) -> None:
        super().__init__()
        self.hash = hashlib.blake2b(digest_size=16)
        self._left = _MOST_PICKLED

    def write(self, content: Any) -> int:
        self._left -= len(content)
        if self._left < 0:
            raise OverflowError(f"more than {_MOST_PICKLED} bytes")
        self.hash.update(content)
        return len(content)


class _CodePickler(Pickler):
    """Pickles code, and the identity of everything else.

    Args:
        stream: Gets the pickle.
        dataset: If it is given, the code itself is pickled and the data that
            the code refers to, but not the dataset. Otherwise only collects the
            dataset's classes and functions in `code`.
    """

    def __init__(self, stream: _Digest, dataset: Any = None) -> None:
        super().__init__(stream, protocol=5)
        self.code: dict[int, tuple[int, Any]] = {}  # by id, each numbered
        self._dataset = dataset

    def persistent_id(self, obj: Any) -> Any:
        kind = type(obj)
        if self._dataset is None:
            if isinstance(obj, (type, types.FunctionType)):
                new = len(self.code), obj
                return self.code.setdefault(id(obj), new)[0]
        elif obj is self._dataset:
            return _identity(obj)
        if kind in _TEXTS:
            return _identity(obj) if len(obj) > _MOST_CHARACTERS else None
        if kind in _CONTAINERS:
            return _identity(obj) if len(obj) > _MOST_ITEMS else None
        if isinstance(obj, np.ndarray):
            if obj.nbytes <= _FEW_BYTES:
                return None
            is_data = self._dataset is None or kind is not np.ndarray
            return _identity(obj), None if is_data else checksum_of(obj)
        if isinstance(obj, _TAKEN_APART) or _is_open(kind):
            return None
        return _identity(obj)

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if not isinstance(obj, _TAKEN_APART) and _is_open(kind):
            parts = [
                (name, value)
                for name, value in _parts_of(obj)
                if self._dataset is not None or not _is_data(value)
            ]
            items: Any = ()
            if isinstance(obj, dict):
                items = list(dict.items(obj))[:_MOST_ITEMS]
            elif isinstance(obj, (list, tuple)):
                items = list(obj)[:_MOST_ITEMS]
            return _nothing, (kind, parts, items)
        return super().reducer_override(obj)


def _parts_of(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yields an object's attributes, with their names."""
    for name, value in list(attributes_of(obj).items()):
        if name != PRIVATE:
            yield name, value
    kind: Any = type(obj)
    for slot in slots_of(kind):
        with contextlib.suppress(AttributeError):  # not assigned
            yield slot.__name__, slot.__get__(obj)


def _is_data(value: Any) -> bool:
    """Returns whether a value has no code in it: numbers, texts and arrays.

    Whoever edits an object's data in place calls `mark_changed`.
    """
    kind = type(value)
    if kind in _CONTAINERS:
        if len(value) > _MOST_ITEMS:
            return True
        parts = list(value)
        if isinstance(value, dict):
            parts += value.values()
        return all(map(_is_data, parts))
    if isinstance(value, np.ndarray):
        return not value.dtype.hasobject
    return kind in _TEXTS or isinstance(value, _SCALARS)


def _is_open(kind: type) -> bool:
    return (
        issubclass(kind, _OPEN)
        or is_users_class(kind)
        or kind.__module__.startswith("keras_fastdata.")
    )


def _identity(obj: Any) -> tuple[int, int]:
    return id(obj), len(obj) if type(obj) in _CONTAINERS else 0


def _nothing(*_: Any) -> None:
    """Stands for an object's class in a pickle that nobody loads."""
