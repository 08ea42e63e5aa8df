"""Computes a digest of what travels to workers with a dataset.

cloudpickle sends functions and classes of `__main__` along, with the globals
that they use. The digest is that of such a pickle, so that whatever would be
sent is looked at: code, numbers, texts and arrays. Of the largest arrays only a
sample is read, and of other objects only the identity: tables, models and large
containers are not read, and no method of the user's runs.
"""

from __future__ import annotations

import array
import collections
import enum
import functools
import hashlib
import logging
import mmap
import types
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from keras_fastdata._call_stack import raise_of_handler
from keras_fastdata._modules import is_users_class
from keras_fastdata.building.attributes import (
    attributes_of,
    items_of,
    lasting_names,
    slot_values,
)
from keras_fastdata.building.variables import OPEN
from keras_fastdata.memory import checksum, keras_layers, rebuilt_classes
from keras_fastdata.memory.limited_stream import LimitedStream, LimitError
from keras_fastdata.memory.reducers import Pickler
from keras_fastdata.memory.shared_arrays import owner_of
from keras_fastdata.memory.tensors import array_of, as_plain_tensor

_MOST_ITEMS = 1_000  # of a container that is looked at
_MOST_OWN_ITEMS = 100  # of a larger one in an attribute of the dataset
_MOST_CHARACTERS = 100  # of a text that is pickled
MOST_BYTES = 1 << 26  # of arrays that are read whole
_MOST_SAMPLED = 1 << 16  # items of a larger array
_BYTES_OF_SAMPLE = 1 << 20  # at most, of these items
_COST_OF_SAMPLE = 1 << 22  # bytes that could be read whole in the same time
_FEW_BYTES = 1_000  # of an array whose identity does not count
_FEW_IN_FILE = 1 << 20  # bytes of a map that may be read

_TEXTS = (str, bytes)
_SCALARS = (int, float, complex, types.NoneType, np.generic)
_CONTAINERS = {
    *(list, tuple, dict, set, frozenset),
    *(collections.deque, collections.OrderedDict, collections.defaultdict),
    collections.Counter,
}
# Objects that pickle takes apart without a method of the user's.
_TAKEN_APART = (
    *(type, types.FunctionType, types.CodeType, types.CellType),
    *(types.MethodType, types.BuiltinFunctionType, types.ModuleType),
    types.MethodWrapperType,
    *(types.MappingProxyType, functools.partial, functools.partialmethod),
    *(property, staticmethod, classmethod),
    *(*_SCALARS, types.EllipsisType, slice, range, np.dtype),
    *(rebuilt_classes.MemberMaker, enum.member, enum.nonmember),
)
# Objects whose attributes are looked at.
_OPEN = (
    *(*OPEN, np.vectorize),
    *(functools.cached_property, functools.singledispatchmethod),
)

_log = logging.getLogger("keras_fastdata")


class Digest(NamedTuple):
    """A digest of what travels with a dataset."""

    content: bytes
    is_whole: bool  # whether no limit was reached


def digest_of(dataset: Any) -> Digest | None:
    """Returns the digest; `None` if something cannot be pickled.

    It is that of the data and the code, up to a limit for each.
    """
    data = _SentPickler(None)
    try:
        is_whole = not data.is_cut_short(dataset)
        if not is_whole:  # there may be more code
            data = _SentPickler(None, has_data=False)
            data.is_cut_short(dataset)
        # Globals may hold the dataset.
        code = _SentPickler(dataset)
        is_whole &= not code.is_cut_short(data.code)
    except Exception as error:
        raise_of_handler(error)
        # Objects of the user's may refuse to be looked into.
        _log.debug("What travels with a dataset:", exc_info=True)
        return None
    return Digest(data.digest + code.digest, is_whole)


def checksum_of(
    values: Any, most_bytes: int | None = None
) -> tuple[Any, ...] | None:
    """Returns dtype, shape and a checksum of an array.

    The checksum is that of a sample if the array has more than `most_bytes`,
    which is 64 MiB unless it is given. Returns `None` for an array of objects,
    and for one of over 1 MiB in a file that is mapped into memory.
    """
    if most_bytes is None:
        most_bytes = MOST_BYTES
    if isinstance(values, memoryview):
        values = np.asarray(values)
    if not isinstance(values, np.ndarray):  # a bytearray, or of `array`
        itemsize = getattr(values, "itemsize", 1)
        step = _step_through(len(values), itemsize, most_bytes)
        return len(values), _crc32(values, step)
    if isinstance(values, np.ma.MaskedArray):
        # A view: the array itself would keep a fill value that it lacks.
        rest = repr(values.view().fill_value), values.hardmask
        mask = np.asarray(values.mask)
        return checksum_of(values.data, most_bytes), checksum_of(mask), *rest
    # What is written to a map of another mode is in the file.
    is_in_file = isinstance(values, np.memmap) and values.mode != "c"
    if values.dtype.hasobject or is_in_file:
        return None
    values, kind = values.view(np.ndarray), dtype_text(values.dtype)
    shape = values.shape
    if values.nbytes > _FEW_IN_FILE:
        if isinstance(owner_of(values).base, mmap.mmap):
            return None
        step = _step_through(values.size, values.itemsize, most_bytes)
        if step == 1:
            return kind, shape, checksum.of(values)
        flat = values.reshape(-1) if values.flags.c_contiguous else values.flat
        values = flat[::step]
    return kind, shape, zlib.crc32(values.tobytes())


def size_of(value: Any) -> int:
    """Returns the bytes of an array or a tensor, and 0 of anything else."""
    if isinstance(value, (bytearray, array.array)):
        return len(value) * getattr(value, "itemsize", 1)
    if (
        isinstance(value, (np.ndarray, memoryview))
        or as_plain_tensor(value) is not None
    ):
        size: int = value.nbytes
        return size
    return 0


def content_of_tensor(
    tensor: Any, checksum: Callable[[Any], Any] = checksum_of
) -> tuple[Any, ...]:
    """Returns dtype, shape, `requires_grad` and a checksum of a tensor.

    In place of a checksum, a tensor that is more than numbers in memory has the
    number of the edits that PyTorch has counted.
    """
    memory = array_of(tensor.detach())
    kind = str(tensor.dtype), tensor.requires_grad
    if memory is not None:
        return *kind, checksum(memory)
    is_counted = not tensor.is_inference()
    edits = tensor._version if is_counted else None  # noqa: SLF001
    return *kind, tuple(tensor.shape), edits


def _crc32(values: Any, step: int) -> int:
    """Returns the checksum of items of a bytearray, or of an array of Python.

    It copies them: the program could not resize what lends its memory.
    """
    found, span = 0, step * _MOST_SAMPLED
    for start in range(0, len(values), span):
        piece = values[start : start + span : step]
        found = zlib.crc32(bytes(piece), found)
    return found


def _step_through(count: int, itemsize: int, most_bytes: int) -> int:
    """Returns the distance between the items of a sample; 1 if all are read."""
    if count * itemsize <= most_bytes:
        return 1
    most = min(_MOST_SAMPLED, max(1, _BYTES_OF_SAMPLE // itemsize))
    return checksum.step_through(count, most)


def dtype_text(dtype: np.dtype[Any]) -> str:
    """Returns a text that tells a dtype from others, with names of fields.

    A program may change the dtype of an array, and the names, in place.
    """
    return dtype.str if dtype.names is None else str(dtype)


class _SentPickler(Pickler):
    """Pickles small data and code, and the identity of everything else.

    Args:
        dataset: If it is given, pickles code and what the code refers to, but
            not this dataset. Otherwise only numbers the functions and classes.
        has_data: Whether to pickle data; if not, only collects code.
    """

    def __init__(self, dataset: Any, *, has_data: bool = True) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        super().__init__(LimitedStream(self._hash.update), protocol=5)
        self._code: dict[int, tuple[int, Any]] = {}  # by id, each numbered
        self._dataset = dataset
        self._has_data = has_data
        # Objects to look into, by id, each numbered; and those of them that
        # are still to be pickled, one after the other: they may be chained.
        self._opened: dict[int, tuple[int, Any]] = {}
        self._waiting: collections.deque[Any] = collections.deque()
        self._left = MOST_BYTES  # of arrays to read
        # Arrays with attributes, and Keras's containers, by id.
        self._looked_into: set[int] = set()

    @property
    def code(self) -> list[Any]:
        """The functions and classes that were numbered."""
        return [obj for _, obj in self._code.values()]

    @property
    def digest(self) -> bytes:
        """The digest of what was pickled."""
        return self._hash.digest()

    def is_cut_short(self, obj: Any) -> bool:
        """Pickles an object; returns whether the limit was reached."""
        try:
            self.dump(obj)
            while self._waiting:
                self.dump(self._content_of(self._waiting.popleft()))
        except LimitError:
            return True
        return False

    def persistent_id(self, obj: Any) -> Any:
        kind = type(obj)
        if self._dataset is None:
            if isinstance(obj, (type, types.FunctionType)):
                return _number_of(obj, self._code)
        elif obj is self._dataset:
            return _identity(obj)
        if kind in _TEXTS:
            is_long = len(obj) > _MOST_CHARACTERS
            return (kind.__name__, hash(obj)) if is_long else None
        if kind in _CONTAINERS:
            if len(obj) <= _MOST_ITEMS:
                return None
            items = items_of(obj)
            if self._dataset is None:
                del items[_MOST_OWN_ITEMS:]
            return _identity(obj), items
        if keras_layers.is_tracked(kind):
            return _identity(obj), self._once(items_of, obj)
        if kind is array.array or kind is bytearray:
            return _identity(obj), checksum_of(obj)
        if kind is memoryview:
            return _identity(obj), self._checksum_of(obj)
        if isinstance(obj, np.ndarray):
            is_small = obj.nbytes <= _FEW_BYTES
            has_few_objects = is_small and obj.dtype.hasobject
            is_users = is_users_class(kind)
            if has_few_objects and not is_users:
                return None
            return (
                None if is_small else _identity(obj),
                dtype_text(obj.dtype),
                obj.view(np.ndarray)
                if has_few_objects
                else self._checksum_of(obj),
                self._once(_parts_of, obj) if is_users else None,
            )
        if (tensor := as_plain_tensor(obj)) is not None:
            return _identity(obj), content_of_tensor(tensor, self._checksum_of)
        if isinstance(obj, _TAKEN_APART):
            return None
        if not _is_open(kind):
            return _identity(obj)
        if id(obj) not in self._opened:
            self._waiting.append(obj)
        return "object", _number_of(obj, self._opened)

    def _content_of(self, obj: Any) -> tuple[Any, ...]:
        """Returns the class, the attributes and the items of an object."""
        parts = [
            (name, value)
            for name, value in _parts_of(obj)
            if self._has_data or not _is_data(value)
        ]
        return type(obj), parts, items_of(obj)

    def _once(
        self, parts_in: Callable[[Any], Iterable[Any]], obj: Any
    ) -> list[Any] | None:
        """Returns the parts of an object at the first time, and then `None`.

        A part may lead to the object again.
        """
        if id(obj) in self._looked_into:
            return None
        self._looked_into.add(id(obj))
        return [*parts_in(obj)]

    def _checksum_of(self, values: Any) -> tuple[Any, ...] | None:
        """Returns an array's checksum, as long as not too much was read."""
        if self._left <= 0:
            return None
        found = checksum_of(values, self._left)
        is_whole = values.nbytes <= self._left
        self._left -= values.nbytes if is_whole else _COST_OF_SAMPLE
        return found


def _parts_of(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yields an object's attributes, with their names."""
    attributes = dict(attributes_of(obj))
    for name in lasting_names(obj, attributes):
        yield name, attributes[name]
    yield from slot_values(obj)


def _is_data(value: Any) -> bool:
    """Returns whether a value has no code in it: numbers, texts and arrays."""
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
    return kind in (*_TEXTS, bytearray) or isinstance(value, _SCALARS)


def _is_open(kind: type) -> bool:
    return (
        issubclass(kind, _OPEN)
        or is_users_class(kind)
        or kind.__module__.startswith("keras_fastdata.")
    )


def _number_of(obj: Any, numbered: dict[int, tuple[int, Any]]) -> int:
    """Returns an object's number among those met; keeps the object alive."""
    return numbered.setdefault(id(obj), (len(numbered), obj))[0]


def _identity(obj: Any) -> tuple[int, int]:
    return id(obj), len(obj) if type(obj) in _CONTAINERS else 0
