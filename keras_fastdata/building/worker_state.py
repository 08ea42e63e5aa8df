"""Detects changes that builds make to a worker's copy of the dataset.

In a worker process `__getitem__` has a copy of the dataset, and no other
process sees its changes. Opening a file there is right, but a count is lost.
A worker opens a file once: an attribute is lost state if it changes again
after the first build.

Checked are attributes to which the training process gave a value other than
`None`; the items of short lists, dicts and sets among these, and the positions
of iterators; and the same in objects of the user's own classes. Entries that a
dict gains or loses belong to a cache, and are ignored. One check takes some 50
us, and checks become rarer.
"""

from __future__ import annotations

import collections
import warnings
from collections.abc import Iterator, Sized
from typing import Any

import numpy as np

from keras_fastdata._call_stack import raise_of_handler
from keras_fastdata._modules import is_users
from keras_fastdata.building.seeding import PRIVATE

_MOST_ITEMS = 64  # of a container that is checked
_MOST_OBJECTS = 32  # whose attributes are checked
_PLAIN = (bool, int, float, complex, str, bytes, np.generic, type(None))
_SEQUENCES = (list, collections.deque)

# A path, such as "stats.count", to a value and the content of a container.
_Seen = dict[str, tuple[Any, Any]]


class LostStateMonitor:
    """Detects attribute changes that stay in one worker and are lost."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        self._builds = 0
        self._interval = 1
        self.begin(attributes)

    def begin(self, attributes: dict[str, Any]) -> None:
        """Starts to monitor `attributes`, and discards all earlier values."""
        self._given = dict(_places(attributes))
        self._seen: _Seen | None = None
        self._next = self._builds + 1

    def count_build(self) -> bool:
        """Counts a build; returns whether to look at attributes after it."""
        self._builds += 1
        return self._builds >= self._next

    def look(self, attributes: dict[str, Any]) -> list[str]:
        """Returns the paths of attributes that changed since the last call."""
        before, self._seen = self._seen, {}
        for path, value in _places(attributes):
            if self._given.get(path) is not None:
                self._seen[path] = value, _content(value)
        if before is None:
            self._next = self._builds + 1
            return []
        self._interval *= 2
        self._next = self._builds + self._interval
        return [
            path
            for path, (value, content) in self._seen.items()
            if path in before and _differs(before[path], value, content)
        ]


def _places(attributes: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields (path, value) of each attribute and each nested attribute."""
    waiting = [("", attributes)]
    for number in range(_MOST_OBJECTS):
        if number == len(waiting):
            return
        prefix, found = waiting[number]
        for name, value in list(found.items()):
            kind = type(value)
            if name == PRIVATE or kind.__module__.startswith("keras_fastdata."):
                continue
            yield f"{prefix}{name}", value
            if kind.__module__ != "builtins" and is_users(kind.__module__):
                inner = getattr(value, "__dict__", None)
                if isinstance(inner, dict):
                    waiting.append((f"{prefix}{name}.", inner))


def _content(value: Any) -> Any:
    """Returns a copy of a short container, or the length of a long container.

    Returns the position of an iterator, and `None` for other values.
    """
    if isinstance(value, (*_SEQUENCES, dict, set)):
        if len(value) > _MOST_ITEMS:
            return len(value)
        return dict(value) if isinstance(value, dict) else list(value)
    return _position_of(value) if _is_iterator(value) else None


def _is_iterator(value: Any) -> bool:
    """Returns whether a value is an iterator of Python's own."""
    is_pythons = type(value).__module__ in ("builtins", "itertools")
    return is_pythons and isinstance(value, Iterator)


def _position_of(value: Any) -> Any:
    """Returns where an iterator is, from what pickle would keep of it."""
    if isinstance(value, tuple):
        return tuple(map(_position_of, value))
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, Sized):
        return len(value)
    if not _is_iterator(value):
        return None
    with warnings.catch_warnings():  # itertools' will not be pickled some day
        warnings.simplefilter("ignore")
        try:
            return _position_of(value.__reduce__()[1:])
        except Exception as error:
            raise_of_handler(error)
            return None


def _differs(before: tuple[Any, Any], value: Any, content: Any) -> bool:
    """Returns whether an attribute or one of its items has changed."""
    former, contained = before
    if not _is_same(former, value):
        return True
    if isinstance(contained, dict) and isinstance(content, dict):
        return any(
            item is not None
            and key in content
            and not _is_same(item, content[key])
            for key, item in contained.items()
        )
    if isinstance(value, dict):
        return False
    if isinstance(contained, list) and isinstance(content, list):
        return len(contained) != len(content) or any(
            one is not None and not _is_same(one, other)
            for one, other in zip(contained, content, strict=True)
        )
    return bool(contained != content)


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return (
        isinstance(one, _PLAIN)
        and isinstance(other, _PLAIN)
        and bool(one == other)
    )
