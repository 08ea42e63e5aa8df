"""State that builds keep in a worker's copy of the dataset, and lose there.

In processes `__getitem__` has a copy of the dataset: what it counts or collects
on `self` is seen by nobody else. That is how a worker keeps a file open, and no
news then; but a count is lost. What tells them apart is that a worker opens a
file once: an attribute is lost state if it changes again after a first build.

These are looked at: attributes that the training process gave a value other
than `None`; what is in short lists, dicts and sets among them; and the same of
objects of the user's own classes that they are. An entry that a dict gains, or
loses, is a cache's. Looking takes some 50 us, and is done ever more rarely.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_fastdata.building.modules import is_users
from keras_fastdata.building.seeding import PRIVATE

_MOST_ITEMS = 64  # of a container that is looked into
_MOST_OBJECTS = 32  # with attributes of their own that are looked into
_PLAIN = (bool, int, float, complex, str, bytes, np.generic, type(None))
_SEQUENCES = (list, collections.deque)

# A path, such as "stats.count", and the value there with what is in it.
_Seen = dict[str, tuple[Any, Any]]


class WorkerState:
    """Notices state that is lost.

    Args:
        attributes: Of the dataset, as the training process has made it.
    """

    def __init__(self, attributes: dict[str, Any]) -> None:
        self._builds = 0
        self._interval = 1
        self.begin(attributes)

    def begin(self, attributes: dict[str, Any]) -> None:
        """Starts again with the attributes of another state."""
        self._given = dict(_places(attributes))
        self._seen: _Seen | None = None
        self._next = self._builds + 1

    def is_due(self) -> bool:
        """Called after each build: whether to look now."""
        self._builds += 1
        return self._builds >= self._next

    def look(self, attributes: dict[str, Any]) -> list[str]:
        """The paths of attributes that have changed since the last look."""
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
    """Attributes, and those of the user's own objects among them."""
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
    """What is in a short container."""
    if isinstance(value, (*_SEQUENCES, dict, set)):
        if len(value) > _MOST_ITEMS:
            return len(value)
        return dict(value) if isinstance(value, dict) else list(value)
    return None


def _differs(before: tuple[Any, Any], value: Any, content: Any) -> bool:
    """Whether an attribute, or what is in it, is another one than before."""
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
