"""Tells whether what `on_worker_start` makes depends on the dataset's state.

A worker process keeps it when it receives a newer state of the dataset: files
are opened once. But an object that refers to a part of the former state would
not see the newer one, and an edit of a part is lost with the part. Then
`on_worker_start` must run again.

So it must if it has made an object of a class of the script, or kept a function
of the script: these refer to variables that come with the dataset.
"""

from __future__ import annotations

import enum
import pathlib
import re
import types
from collections.abc import Iterable
from typing import Any

import numpy as np

from keras_fastdata._modules import is_users_class, is_users_code
from keras_fastdata.building.reachable import may_refer, parts_of, reachable
from keras_fastdata.building.worker_state import seen_in
from keras_fastdata.memory.class_refs import is_importable
from keras_fastdata.memory.shared_arrays import owner_of

_MOST_SEARCHED = 20_000  # objects that `on_worker_start` has made
# What refers to no state by itself.
_FIXED = (
    *(tuple, frozenset, np.dtype, enum.Enum, re.Pattern, pathlib.PurePath),
    *(type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType),
)


class StartMonitor:
    """Compares a worker's dataset before and after `on_worker_start`.

    Args:
        dataset: The dataset, before its `on_worker_start` runs.
    """

    def __init__(self, dataset: Any) -> None:
        self._seen = seen_in(vars(dataset))
        self._given = [dataset, *(step.value for step in reachable(dataset))]

    def depends_on_state(
        self, dataset: Any, own: set[str], others: Iterable[Any]
    ) -> bool:
        """Returns whether what was made depends on the state before.

        Args:
            dataset: The dataset now.
            own: The names of the attributes that were set.
            others: Values that were set elsewhere.
        """
        made = [vars(dataset)[name] for name in own]
        return self._has_edited(dataset, own) or self._is_held_by(
            [*made, *others]
        )

    def _has_edited(self, dataset: Any, own: set[str]) -> bool:
        """Returns whether a part of an attribute has changed."""
        now = seen_in(vars(dataset))
        return any(
            self._seen.get(path) != now.get(path)
            for path in self._seen.keys() | now.keys()
            if path.partition(".")[0] not in own
        )

    def _is_held_by(self, made: list[Any]) -> bool:
        """Returns whether any of these refers to the former state."""
        given = set(map(_id_of, self._given))
        waiting, known = made, set()
        for value in waiting:  # grows
            if id(value) in known or not _may_hold(value):
                continue
            known.add(id(value))
            is_fixed = isinstance(value, _FIXED)
            if _is_of_script(value) or (
                not is_fixed and _id_of(value) in given
            ):
                return True
            if len(waiting) < _MOST_SEARCHED:
                waiting += [part for _, part in parts_of(value)]
        return False


def _id_of(value: Any) -> int:
    """Returns an object's id; views of an array have the same."""
    return id(owner_of(value) if isinstance(value, np.ndarray) else value)


def _may_hold(value: Any) -> bool:
    is_code = isinstance(value, (type, types.ModuleType))
    return not is_code and (isinstance(value, np.ndarray) or may_refer(value))


def _is_of_script(value: Any) -> bool:
    """Returns whether a function, or an object's class, is sent by value."""
    if isinstance(value, types.FunctionType):
        return is_users_code(value.__module__) and not is_importable(value)
    return is_users_class(type(value)) and not is_importable(type(value))
