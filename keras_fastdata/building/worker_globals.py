"""Keeps what `on_worker_start` sets in the globals and classes of a script.

The functions of a script have globals of their own in a worker process, which
come with the dataset. So a newer dataset has the values of the trainer, and its
classes have the trainer's attributes again.
"""

from __future__ import annotations

import contextlib
import sys
import types
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from keras_fastdata._modules import is_users_class
from keras_fastdata.building.attributes import attributes_of, first_items
from keras_fastdata.memory.reducers import received_classes

_MOST_BYTES = 1 << 20  # of an array that is compared
_DEPTH = 3  # of dicts and objects in each other


class _Held(NamedTuple):
    """A value before `on_worker_start`, and what was in it."""

    value: Any
    parts: list[Any]
    # The items of a dict or the attributes of an object, down to some depth.
    items: dict[Any, _Held]


class _Edit(NamedTuple):
    """What `on_worker_start` has set."""

    home: int  # the globals or a class; see `_homes`
    path: tuple[Any, ...]  # a name, then keys of dicts and names of attributes
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
        self._before = [_held_in(home, _DEPTH) for home in self._homes()]
        self._edits: list[_Edit] = []

    def _homes(self) -> list[Mapping[str, Any]]:
        return [self._names, *map(vars, self._classes)]

    def note(self) -> None:
        """Notes what has changed since this object was made."""
        for number, home in enumerate(self._homes()):
            found = _edits_of(self._before[number], home)
            self._edits += [_Edit(number, *edit) for edit in found]
        self._before.clear()

    def carry_to(self, dataset: Any) -> None:
        """Sets what was noted in the globals and classes of a newer dataset."""
        self._names = _globals_of(dataset)
        homes = self._homes()
        for number, (*path, last), value in self._edits:
            with contextlib.suppress(Exception):  # it is not there any more
                if number and not path:
                    type.__setattr__(self._classes[number - 1], last, value)
                    continue
                items: Any = homes[number]
                for key in path:
                    items = _items_of(items[key])
                items[last] = value


def _held_in(items: Mapping[Any, Any], depth: int) -> dict[Any, _Held]:
    return {
        key: _Held(
            value,
            _parts_of(value),
            _held_in(_items_of(value), depth - 1) if depth else {},
        )
        for key, value in first_items(items.items())
    }


def _edits_of(
    before: dict[Any, _Held], items: Mapping[Any, Any]
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields the path and the value of each item that is new."""
    for key, value in first_items(items.items()):
        held = before.get(key)
        if held is None or held.value is not value:
            yield (key,), value
        elif held.items:
            for path, new in _edits_of(held.items, _items_of(value)):
                yield (key, *path), new
        elif not _are_same(held.parts, _parts_of(value)):
            yield (key,), value


def _items_of(value: Any) -> dict[Any, Any]:
    """Returns a dict itself, or the attributes of an object of the user's."""
    if type(value) is dict:
        return value
    kind = type(value)
    is_open = kind is types.SimpleNamespace or is_users_class(kind)
    return attributes_of(value) if is_open else {}


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
    if type(value) in (list, tuple, set, dict):
        parts += first_items(value)
    if type(value) is dict:
        parts += first_items(value.values())
    return parts


def _are_same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(
        one is other or (type(one) is int is type(other) and one == other)
        for one, other in zip(some, others, strict=True)
    )
