"""Keeps what `on_worker_start` sets in the globals and classes of a script.

The functions of a script have globals of their own in a worker process, which
come with the dataset. So a newer dataset has the values of the trainer, and its
classes have the trainer's attributes again.
"""

from __future__ import annotations

import collections
import itertools
import sys
import types
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from keras_fastdata._call_stack import ignoring_errors
from keras_fastdata._modules import is_users_class
from keras_fastdata.building.attributes import (
    attributes_of,
    first_items,
    has_attributes,
    slot_values,
)
from keras_fastdata.memory.reducers import received_classes

_MOST_BYTES = 1 << 20  # of an array that is compared
_DEPTH = 3  # of containers and objects in each other
_MOST_ITEMS = 10_000  # in all of those together


class _Held(NamedTuple):
    """A value before `on_worker_start`, and what was in it."""

    value: Any
    parts: list[Any]
    # The items of a container or the attributes of an object, to some depth.
    items: dict[Any, _Held]


class _Edit(NamedTuple):
    """What `on_worker_start` has set."""

    home: int  # the globals or a class; see `_homes`
    # A name, then keys of dicts, indices of lists and names of attributes.
    path: tuple[Any, ...]
    value: Any


class WorkerGlobals:
    """Notes what `on_worker_start` of one dataset sets in globals and classes.

    Args:
        dataset: The dataset, before its `on_worker_start` runs.
    """

    def __init__(self, dataset: Any) -> None:
        self._names = _globals_of(dataset)
        # A newer dataset has the same classes, with the trainer's attributes.
        received = received_classes()
        self._classes = [one for one in received if isinstance(one, type)]
        left = iter(range(_MOST_ITEMS))
        self._before = [_held_in(home, left) for home in self._homes()]
        self._edits: list[_Edit] = []

    def _homes(self) -> list[Mapping[str, Any]]:
        return [self._names, *map(vars, self._classes)]

    def note(self) -> None:
        """Notes what has changed since this object was made."""
        for number, home in enumerate(self._homes()):
            found = _edits_of(self._before[number], home)
            self._edits += [_Edit(number, *edit) for edit in found]
        self._before.clear()

    @property
    def values(self) -> list[Any]:
        """What was set."""
        return [edit.value for edit in self._edits]

    def carry_to(self, dataset: Any) -> None:
        """Sets what was noted in the globals and classes of a newer dataset."""
        self._names = _globals_of(dataset)
        homes = self._homes()
        for number, (*path, last), value in self._edits:
            with ignoring_errors():  # it is not there any more
                owner: Any = homes[number]
                if number and not path:
                    type.__setattr__(self._classes[number - 1], last, value)
                    continue
                for key in path:
                    owner = _item(owner, key)
                _set_item(owner, last, value)


def _held_in(
    items: Mapping[Any, Any], left: Iterator[int], depth: int = _DEPTH
) -> dict[Any, _Held]:
    found = {}
    for key, value in first_items(items.items()):
        within = _items_of(value) if depth else {}
        # Those of containers that are too large are not told apart.
        if len(within) > sum(1 for _ in itertools.islice(left, len(within))):
            within = {}
        held = _held_in(within, left, depth - 1)
        found[key] = _Held(value, _parts_of(value), held)
    return found


def _edits_of(
    before: dict[Any, _Held], items: Mapping[Any, Any]
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields the path and the value of each item that is new."""
    for key, value in first_items(items.items()):
        held = before.get(key)
        if held is None or held.value is not value:
            yield (key,), value
        elif held.items and not _has_other_length(held, value):
            for path, new in _edits_of(held.items, _items_of(value)):
                yield (key, *path), new
        elif not _are_same(held.parts, _parts_of(value)):
            yield (key,), value


def _items_of(value: Any) -> Mapping[Any, Any]:
    """Returns the items of a dict or list, or the attributes of an object.

    The object is a function or of a class of the user's.
    """
    kind = type(value)
    if kind is dict:
        return dict(first_items(value.items()))
    if kind is list:
        return dict(enumerate(first_items(value)))
    is_open = kind in (types.SimpleNamespace, types.FunctionType)
    if not (is_open or is_users_class(kind)):
        return {}
    return {**attributes_of(value), **dict(slot_values(value))}


def _has_other_length(held: _Held, value: Any) -> bool:
    """Returns whether a list has another length now."""
    return type(value) is list and len(value) != len(held.items)


def _item(owner: Any, key: Any) -> Any:
    has_items = type(owner) in (dict, list, types.MappingProxyType)
    return (owner if has_items else _items_of(owner))[key]


def _set_item(owner: Any, key: Any, value: Any) -> None:
    """Sets an item or attribute, without running the user's code."""
    if type(owner) in (dict, list):
        owner[key] = value
    elif key in dict(slot_values(owner)) or not has_attributes(owner):
        object.__setattr__(owner, key, value)
    else:
        attributes_of(owner)[key] = value


def _globals_of(dataset: Any) -> dict[str, Any]:
    """Returns the globals of `on_worker_start`, unless a module has them."""
    function = getattr(type(dataset), "on_worker_start", None)
    if not isinstance(function, types.FunctionType):
        return {}
    names = function.__globals__
    module = sys.modules.get(str(names.get("__name__")))
    return {} if names is getattr(module, "__dict__", None) else names


def _parts_of(value: Any) -> list[Any]:
    """Returns what a value consists of, to be compared by identity."""
    if isinstance(value, np.ndarray):
        is_small = value.nbytes <= _MOST_BYTES and not value.dtype.hasobject
        return [zlib.crc32(value.tobytes())] if is_small else []
    parts = list(attributes_of(value).values())
    if type(value) in (list, tuple, set, collections.deque, dict):
        parts += first_items(value)
    if type(value) is dict:
        parts += first_items(value.values())
    return parts


def _are_same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(
        one is other or (type(one) is int is type(other) and one == other)
        for one, other in zip(some, others, strict=True)
    )
