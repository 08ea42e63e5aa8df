"""Reads the parts of the user's objects without running their code."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from keras_fastdata._call_stack import raise_of_handler
from keras_fastdata.building.seeding import PRIVATE

# Of a class of this package: the names of attributes that are not searched.
PASSING = "_fastdata_passing"
_TRIES = 3  # to read a container that another thread changes
_MOST_ITEMS = 1_000  # of a container
# What reads a container, whatever the methods of its class do.
_READERS: dict[Any, Callable[[Any], Iterable[Any]]] = {
    collections.OrderedDict: collections.OrderedDict.items,
    dict: dict.items,
    types.MappingProxyType: types.MappingProxyType.items,
    **{
        base: base.__iter__
        for base in (list, tuple, set, frozenset, collections.deque)
    },
}


def has_attributes(value: Any) -> bool:
    """Returns whether an object has a `__dict__`."""
    return bool(type(value).__dictoffset__) or isinstance(
        value, threading.local
    )


def attributes_of(value: Any) -> dict[str, Any]:
    """Returns an object's `__dict__` without calling its `__getattr__`.

    That of a `threading.local` is the calling thread's.
    """
    if not has_attributes(value):
        return {}
    is_local = isinstance(value, threading.local)
    read = (threading.local if is_local else object).__getattribute__
    try:
        found = read(value, "__dict__")
    except Exception as error:
        raise_of_handler(error)
        return {}
    return found if isinstance(found, dict) else {}


def lasting_names(value: Any, attributes: dict[str, Any]) -> list[str]:
    """Returns the names of an object's attributes, but for this package's own.

    Those are a dataset's `PRIVATE`, and what a class names in `PASSING`, such
    as the present pass over a stream.
    """
    passing = vars(type(value)).get(PASSING, ())
    return [
        name
        for name in list(attributes)
        if name != PRIVATE and name not in passing
    ]


@functools.lru_cache(maxsize=1024)
def slots_of(kind: Any) -> tuple[Any, ...]:
    """Returns the slots of a class, which read an object's attributes."""
    return tuple(
        slot
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for slot in vars(base).values()
        if isinstance(slot, types.MemberDescriptorType)
    )


def first_items(container: Iterable[Any]) -> list[Any]:
    """Returns the first items of a container, or none if it keeps changing."""
    return _first_of(iter, container)


def items_of(container: Any) -> list[Any]:
    """Returns what `first_items` does, without running methods of the user's.

    Of a mapping, these are pairs of keys and values. An object that is no
    container of Python has none.
    """
    for base, read in _READERS.items():
        if isinstance(container, base):
            return _first_of(read, container)
    return []


def _first_of(
    read: Callable[[Any], Iterable[Any]], container: Any
) -> list[Any]:
    for _ in range(_TRIES):
        try:
            return list(itertools.islice(read(container), _MOST_ITEMS))
        except RuntimeError:  # a thread changed its size
            continue
    return []


def slot_values(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the names and the values of an object's assigned slots."""
    kind: Any = type(value)
    for slot in slots_of(kind):
        with contextlib.suppress(AttributeError):  # not assigned
            yield slot.__name__, slot.__get__(value)


def is_gone(value: Any) -> bool:
    """Returns whether an object has no class, as the proxy of a dead object."""
    try:
        value.__class__  # noqa: B018 - `isinstance` asks for it
    except Exception as error:
        raise_of_handler(error)
        return True
    return False
