"""Tells which values can be sent by themselves, and compares values.

A value is plain if it consists of basic types alone, and is small.
"""

from __future__ import annotations

import array
import builtins
import collections
import datetime
import decimal
import enum
import fractions
import ipaddress
import itertools
import operator
import pathlib
import re
import types
import uuid
import weakref
import zoneinfo
from collections.abc import Iterable
from typing import Any

import numpy as np

from keras_fastdata._call_stack import raise_of_handler
from keras_fastdata._modules import is_users_class
from keras_fastdata.building.assignments import is_by_value
from keras_fastdata.building.attributes import first_items, items_of
from keras_fastdata.building.variables import NAMESPACES
from keras_fastdata.engine.sent_digest import (
    checksum_of,
    content_of_tensor,
    size_of,
)
from keras_fastdata.memory.keras_layers import is_tracked
from keras_fastdata.memory.tensors import as_plain_tensor

_MOST_ITEMS = 1000  # of a plain value, in all; so many bytes are one
_BYTES_PER_ITEM = 64
_MOST_BYTES = 1 << 20  # of an array
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
# Immutable objects, also of subclasses such as `pandas.Timestamp`.
_VALUES = (
    *(np.generic, np.dtype, pathlib.PurePath, range, slice, re.Pattern),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
    *(zoneinfo.ZoneInfo, decimal.Decimal, fractions.Fraction, uuid.UUID),
    *(ipaddress.IPv4Address, ipaddress.IPv6Address),
    *(operator.attrgetter, operator.itemgetter, operator.methodcaller),
)
_WITH_TYPES = {module.__name__: module for module in (builtins, np)}
CONTAINERS = (list, tuple, set, frozenset, collections.deque)
MAPPINGS = (
    dict,
    collections.OrderedDict,
    collections.defaultdict,
    collections.Counter,
)
# Containers that a program can edit.
_COMPARED = (
    *(list, set, collections.deque, types.MappingProxyType),
    *(*MAPPINGS, *NAMESPACES),
)
_SUBCLASSED: tuple[Any, ...] = (list, set, collections.deque, dict)


def is_plain(value: Any) -> bool:
    """Returns whether a value is small and consists of basic types only."""
    waiting = [value]
    size = 0
    for item in waiting:
        kind = type(item)
        if kind in CONTAINERS:
            waiting += item
        elif kind in MAPPINGS:
            factory = getattr(item, "default_factory", None)
            if factory is not None and not isinstance(factory, type):
                return False  # a function, which may not be picklable
            waiting += [*item, *item.values()]
        elif kind in NAMESPACES:
            waiting += vars(item).values()
        elif kind in (str, bytes):
            size += len(item) // _BYTES_PER_ITEM
        elif kind in _SCALARS or isinstance(item, _VALUES) or _is_type(item):
            pass
        elif is_by_value(kind.__module__, tuple(kind.__qualname__.split("."))):
            return False
        elif is_named_tuple(item):
            waiting += item
        elif not isinstance(item, enum.Enum):
            return False
        if len(waiting) + size > _MOST_ITEMS:
            return False
    return True


def _is_type(value: Any) -> bool:
    """Returns whether a value is a class of Python or NumPy."""
    return (
        type(value) is type
        and value.__module__ in _WITH_TYPES
        and getattr(_WITH_TYPES[value.__module__], value.__name__, 0) is value
    )


def is_named_tuple(value: Any) -> bool:
    """Returns whether a value is a named tuple."""
    return isinstance(value, tuple) and hasattr(type(value), "_fields")


def _is_small_array(value: Any) -> bool:
    """Returns whether a value is an array of numbers or texts of at most 1 MiB.

    Records may have objects in them, and subclasses more than an array.
    """
    if type(value) in (bytearray, array.array):
        return size_of(value) <= _MOST_BYTES
    return (
        type(value) is np.ndarray
        and value.dtype.kind in "biufcSUmM"
        and value.nbytes <= _MOST_BYTES
    )


def can_be_sent(value: Any) -> bool:
    """Returns whether a value is plain, or a small array."""
    return is_plain(value) or _is_small_array(value)


def content_of(value: Any, most_bytes: int | None = None) -> Any:
    """Returns a summary of a container or array, to detect in-place changes.

    Of an array of over `most_bytes`, only a sample counts; see `checksum_of`.
    Returns `None` for other values.
    """
    kind = type(value)
    if kind in _COMPARED:
        if is_plain(value):
            return repr(value)
        if kind in NAMESPACES:
            value = vars(value)
        items = first_items(value)
        if isinstance(value, (dict, types.MappingProxyType)):
            items += first_items(value.values())
        return Items(len(value), items)
    for base in _SUBCLASSED:
        if isinstance(value, base) and (
            is_users_class(kind) or is_tracked(kind)
        ):
            items = items_of(value)
            if base is dict:
                items = [*itertools.chain.from_iterable(items)]
            return Items(base.__len__(value), items)
    if isinstance(value, np.ndarray) and value.dtype.kind == "T":
        return value.shape, first_items(value.flat)  # new texts each time
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return Items(value.size, first_items(value.flat))
    if (tensor := as_plain_tensor(value)) is not None:
        return content_of_tensor(
            tensor, lambda memory: checksum_of(memory, most_bytes)
        )
    is_array = isinstance(
        value, (np.ndarray, array.array, bytearray, memoryview)
    )
    return checksum_of(value, most_bytes) if is_array else None


def text_of(value: Any) -> str | None:
    """Returns a text that tells a plain value or an array from others."""
    if is_plain(value):
        return repr(value)
    if isinstance(value, (np.ndarray, array.array)):
        found = content_of(value)
        return None if isinstance(found, Items) else repr(found)
    return None


class Items:
    """The first items of a container, compared by identity.

    Holds them by weak references, if possible. A weak reference to another
    object at the same address is another one.
    """

    def __init__(self, count: int, items: Iterable[Any]) -> None:
        self._count = count
        self._held = list(map(weakly, items))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Items)
            and self._count == other._count
            and all(map(operator.is_, self._held, other._held))
        )

    def __len__(self) -> int:
        return self._count

    __hash__ = None  # type: ignore[assignment]


def weakly(value: Any) -> Any:
    """Returns a weak reference to an object, or the object itself."""
    try:
        return weakref.ref(value)
    except TypeError:
        return value


def is_equal(one: Any, other: Any) -> bool:
    """Returns whether values have the same types, order and items.

    The values are plain, or small arrays.
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, (float, complex)):
        return repr(one) == repr(other)  # NaN is not equal to itself
    if isinstance(one, np.ndarray):
        if (one.dtype.str, one.shape) != (other.dtype.str, other.shape):
            return False
        return bool(one.tobytes() == other.tobytes())
    try:
        if one != other:
            return False
    except Exception as error:  # a container has an array in place of a list
        raise_of_handler(error)
        return False
    # 1 and 1.0 are equal in containers, and so are dicts of another order and
    # times in two zones.
    return type(one) in (str, bytes) or repr(one) == repr(other)
