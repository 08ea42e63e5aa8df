"""Keeps what `on_worker_start` sets in the globals and classes of a script.

The functions of a script have globals of their own in a worker process, which
come with the dataset. So a newer dataset has the values of the trainer, and its
classes have the trainer's attributes again.
"""

from __future__ import annotations

import sys
import types
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_fastdata.building.attributes import attributes_of, first_items
from keras_fastdata.memory.reducers import received_classes

_MOST_BYTES = 1 << 20  # of an array that is compared


class WorkerGlobals:
    """Notes what `on_worker_start` of one dataset sets in globals and classes.

    Args:
        dataset: The dataset, before its `on_worker_start` runs.
    """

    def __init__(self, dataset: Any) -> None:
        self._names = _globals_of(dataset)
        # A newer dataset has the same classes, with the trainer's attributes.
        self._classes = received_classes()
        self._before = [_contents(home) for home in self._homes()]
        self._own: list[dict[str, Any]] = []

    def _homes(self) -> list[Mapping[str, Any]]:
        return [self._names, *map(vars, self._classes)]

    def note(self) -> None:
        """Notes what has changed since this object was made."""
        for home, before in zip(self._homes(), self._before, strict=True):
            own = {
                name: value
                for name, (value, parts) in _contents(home).items()
                if name not in before
                or before[name][0] is not value
                or not _are_same(before[name][1], parts)
            }
            self._own.append(own)
        self._before.clear()

    def carry_to(self, dataset: Any) -> None:
        """Sets what was noted in the globals and classes of a newer dataset."""
        of_globals, *of_classes = self._own
        _globals_of(dataset).update(of_globals)
        for one, own in zip(self._classes, of_classes, strict=True):
            for name, value in own.items():
                type.__setattr__(one, name, value)


def _contents(names: Mapping[str, Any]) -> dict[str, tuple[Any, list[Any]]]:
    """Returns the value of each name, and what the value consists of."""
    return {name: (value, _parts_of(value)) for name, value in names.items()}


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
    if isinstance(value, (list, tuple, set, dict)):
        parts += first_items(value)
    if isinstance(value, dict):
        parts += first_items(value.values())
    return parts


def _are_same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(
        one is other or (type(one) is int is type(other) and one == other)
        for one, other in zip(some, others, strict=True)
    )
