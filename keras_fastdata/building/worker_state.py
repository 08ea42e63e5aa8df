"""Detects changes that builds make to a worker's copy of the dataset.

In a worker process `__getitem__` has a copy of the dataset, and no other
process sees its changes. Opening a file there is right, but a count is lost.
A worker opens a file once: an attribute is lost state if it changes again
after the first build.

Checked are attributes to which the training process gave a value other than
`None`; some items of containers and arrays among these, and the positions of
iterators; and the same in objects of the user's own classes. Checks become
rarer.

Not lost is what a worker keeps for itself: entries that a dict gains or loses,
and numbers that are written over `None`, 0 or NaN, belong to a cache. An array
with the shape of a batch, or of a sample, is a buffer that each build fills.
"""

from __future__ import annotations

import collections
import itertools
import logging
import warnings
from collections.abc import Iterator, Mapping, Sized
from typing import Any, NamedTuple

import numpy as np

from keras_fastdata._call_stack import raise_of_handler
from keras_fastdata._modules import is_users
from keras_fastdata.building.attributes import attributes_of, items_of
from keras_fastdata.building.seeding import PRIVATE
from keras_fastdata.memory import checksum
from keras_fastdata.memory.tensors import array_of, as_plain_tensor
from keras_fastdata.workers.base import ONCE

_log = logging.getLogger("keras_fastdata")

# Items of a container that are checked, and of an array; of those of an
# attribute, of those in these, and so on.
_MOST_ITEMS = 64, 8, 4, 4
_MOST_NUMBERS = 1024, 32, 16, 16
_MOST_OBJECTS = 32  # whose attributes are checked
_PLAIN = (bool, int, float, complex, str, bytes, np.generic, type(None))
_CONTAINERS = (list, tuple, collections.deque, dict, set)


class _Seen(NamedTuple):
    """What was seen of a value, and in it, by index or key."""

    told: Any  # see `_told`
    parts: dict[Any, _Seen]


class LostStateMonitor:
    """Detects attribute changes that stay in one worker and are lost."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        self._builds = 0
        self._interval = 1
        self._batch = _Shapes()
        self.begin(attributes)

    def begin(self, attributes: dict[str, Any]) -> None:
        """Starts to monitor `attributes`, and discards all earlier values."""
        self._given = dict(_places(attributes))
        # By path, such as "stats.count".
        self._seen: dict[str, _Seen] | None = None
        self._next = self._builds + 1

    def count_build(self) -> bool:
        """Counts a build; returns whether to look at attributes after it."""
        self._builds += 1
        return self._builds >= self._next

    def look(self, attributes: dict[str, Any], batch: Any = None) -> list[str]:
        """Returns the paths of attributes that changed since the last call.

        `batch` is what was built last.
        """
        self._batch.add(batch)
        before, self._seen = self._seen, {}
        for path, value in _places(attributes):
            if self._given.get(path) is not None:
                is_buffer = self._batch.has(value)
                self._seen[path] = (
                    _Seen(_told(value), {}) if is_buffer else _seen(value)
                )
        if before is None:
            self._next = self._builds + 1
            return []
        self._interval *= 2
        self._next = self._builds + self._interval
        return [
            path
            for path, seen in self._seen.items()
            if path in before and _differs(before[path], seen)
        ]


class _Shapes:
    """The shapes of the arrays in batches."""

    def __init__(self) -> None:
        # The length of the largest batch, by the shape of one sample.
        self._length: dict[tuple[int, ...], int] = {}
        # Those of a sample, and of what is in it.
        self._inside: set[tuple[int, ...]] = set()

    def add(self, batch: Any) -> None:
        """Adds the shapes of a batch, which may be nested."""
        waiting = [batch]
        for part in waiting:  # grows
            if isinstance(part, Mapping):
                waiting += part.values()
            elif isinstance(part, (tuple, list)):
                waiting += part
            elif (array := _array_of(part)) is not None and array.ndim:
                shape = array.shape
                length = self._length.get(shape[1:], 0)
                self._length[shape[1:]] = max(length, shape[0])
                self._inside |= {shape[axis:] for axis in range(1, len(shape))}

    def has(self, value: Any) -> bool:
        """Returns whether a value is an array with the shape of a batch.

        Or of a sample of one.
        """
        if type(value) is not np.ndarray or not value.ndim:
            return False
        is_batch = len(value) <= self._length.get(value.shape[1:], -1)
        return is_batch or value.shape in self._inside


def log_lost_state(kind: str, paths: list[str]) -> None:
    """Warns that `__getitem__` of a class changes these attributes."""
    _log.warning(
        "%s.__getitem__ changes %s in worker processes. Each has a copy of the "
        "dataset, so the change is lost: neither the training process nor "
        "another worker sees it. If batches depend on it, they differ from run "
        "to run: then copy an array before you edit it, shuffle in "
        "`on_epoch_end`, return other values with the batch, or build in this "
        "process (`use_multiprocessing=False`).",
        kind,
        ", ".join(f"`self.{path}`" for path in paths),
        extra={ONCE: "lost state"},
    )


def seen_in(attributes: dict[str, Any]) -> dict[str, Any]:
    """Returns what is to be seen of attributes, by path, for a comparison."""
    return {path: _seen(value) for path, value in _places(attributes)}


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


def _seen(value: Any, depth: int = 0) -> _Seen:
    """Returns what is to be seen of a value, its parts, and theirs."""
    told = _told(value)
    if isinstance(value, _PLAIN) or depth == len(_MOST_ITEMS):
        return _Seen(told, {})
    array = _array_of(value)
    if array is not None:
        found = _numbers_in(array, _MOST_NUMBERS[depth])
    elif depth and is_users(type(value).__module__):
        found = _attributes_of(value, _MOST_ITEMS[depth])
    else:
        found = _items_in(value, _MOST_ITEMS[depth])
    return _Seen(told, {key: _seen(part, depth + 1) for key, part in found})


def _told(value: Any) -> Any:
    """Returns what tells a value from others, but does not keep its memory.

    Containers and arrays differ only if something in them differs.
    """
    if isinstance(value, _PLAIN):
        is_text = isinstance(value, (str, bytes))
        return (str, hash(value)) if is_text else value
    if (array := _array_of(value)) is not None:
        return np.ndarray, array.shape
    if isinstance(value, _CONTAINERS):
        return type(value), 0
    return type(value), id(value)


def _array_of(value: Any) -> np.ndarray[Any, Any] | None:
    """Returns an array, or the memory of a tensor, or `None`."""
    if type(value) is np.ndarray:
        return value
    tensor = as_plain_tensor(value)
    return None if tensor is None else array_of(tensor.detach())


def _numbers_in(
    array: np.ndarray[Any, Any], most: int
) -> Iterator[tuple[Any, Any]]:
    """Yields some items of an array; `None` in place of 0 and NaN."""
    step = checksum.step_through(array.size, most)
    flat = array.reshape(-1) if array.flags.c_contiguous else array.flat
    for number, item in enumerate(flat[::step].tolist()):
        is_empty = isinstance(item, _PLAIN) and not (item and item == item)
        yield number, None if is_empty else item


def _attributes_of(value: Any, most: int) -> Iterator[tuple[Any, Any]]:
    """Yields some attributes of an object of the user's own class."""
    yield from list(itertools.islice(attributes_of(value).items(), most))


def _items_in(value: Any, most: int) -> Iterator[tuple[Any, Any]]:
    """Yields some items of a container, and the position of an iterator.

    Also the length, but that of a dict does not count.
    """
    if isinstance(value, dict):
        yield from items_of(value)[:most]
    elif isinstance(value, _CONTAINERS):
        # A class of the user's may have other methods.
        base: Any = next(one for one in _CONTAINERS if isinstance(value, one))
        count = base.__len__(value)
        yield "length", count
        if base in (list, tuple):
            step = slice(None, None, checksum.step_through(count, most))
            yield from enumerate(base.__getitem__(value, step))
        elif count <= most:
            yield from enumerate(items_of(value))
    elif _is_iterator(value):
        yield "position", repr(_position_of(value))


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


def _differs(before: _Seen, now: _Seen) -> bool:
    """Returns whether a value, or a part of it, has changed."""
    if before.told is None:
        return False
    is_same = before.told is now.told or bool(before.told == now.told)
    return not is_same or any(
        key in now.parts and _differs(part, now.parts[key])
        for key, part in before.parts.items()
    )
