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
import threading
import types
from typing import Any

import numpy as np

from keras_fastdata._call_stack import ignoring_errors
from keras_fastdata._modules import is_users_class, is_users_code
from keras_fastdata.building.attributes import attributes_of, slot_values
from keras_fastdata.building.interface import overrides
from keras_fastdata.building.reachable import may_refer, parts_of, reachable
from keras_fastdata.building.seeding import PRIVATE
from keras_fastdata.building.worker_globals import WorkerGlobals
from keras_fastdata.building.worker_state import seen_in
from keras_fastdata.memory.class_refs import is_importable
from keras_fastdata.memory.shared_arrays import owner_of

_MOST_SEARCHED = 20_000  # objects that `on_worker_start` has made
# What refers to no state by itself.
_FIXED = (
    *(tuple, frozenset, np.dtype, enum.Enum, re.Pattern, pathlib.PurePath),
    *(type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType),
)


class OwnState:
    """What `on_worker_start` makes in a worker process.

    Args:
        dataset: The dataset, before its `on_worker_start` runs.

    Attributes:
        own: The names of the attributes that it has set.
        globals: What it has set in globals and classes.
        must_repeat: Whether it must run again for a newer state.
    """

    def __init__(self, dataset: Any) -> None:
        self.own: set[str] = set()
        self.globals = WorkerGlobals(dataset)
        self.must_repeat = False
        self._attributes = dict(vars(dataset))
        self._given: list[Any] = []  # the dataset, and what it refers to
        # Those of them that are datasets, the dataset itself first.
        self._datasets: list[Any] = []
        self._seen: dict[tuple[int, str], Any] = {}
        if overrides(dataset, "on_worker_start"):
            reached = (step.value for step in reachable(dataset))
            self._given = [dataset, *reached]
            self._datasets = [
                one for one in self._given if PRIVATE in attributes_of(one)
            ]
            with ignoring_errors():  # objects may refuse to be looked at
                self._seen = _state_of(self._datasets)

    def note(self, dataset: Any) -> None:
        """Notes what has changed since this object was made."""
        self.globals.note()
        before, now = self._attributes, vars(dataset)
        self.own = {
            name
            for name, value in now.items()
            if name not in before or before[name] is not value
        }
        if self._given:
            made = [now[name] for name in self.own]
            with ignoring_errors():
                self.must_repeat = self._has_edited() or self._is_held_by(
                    [*made, *self.globals.values]
                )
        self._attributes, self._given, self._datasets = {}, [], []

    def given_attributes(self, dataset: Any) -> dict[str, Any]:
        """Returns the attributes that the training process has set."""
        attributes = vars(dataset).items()
        return {k: v for k, v in attributes if k not in self.own}

    def _has_edited(self) -> bool:
        """Returns whether a part of an attribute has changed.

        Or an attribute of another dataset that the dataset combines.
        """
        now = _state_of(self._datasets)
        return any(
            self._seen.get(place) != now.get(place)
            for place in self._seen.keys() | now.keys()
            if place[0] or place[1].partition(".")[0] not in self.own
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


def carry_attributes(former: Any, dataset: Any, own: set[str]) -> None:
    """Gives a newer dataset the attributes of the former one that are `own`."""
    mine, theirs = vars(former), vars(dataset)
    for name in mine.keys() - theirs.keys() - own:
        del mine[name]
    mine.update((k, v) for k, v in theirs.items() if k not in own)
    # Parts of the new state refer to `dataset`, and the worker's own attributes
    # to former datasets: all of them share one `__dict__`.
    object.__setattr__(dataset, "__dict__", mine)


def _state_of(datasets: list[Any]) -> dict[tuple[int, str], Any]:
    """Returns what is to be seen of datasets, also of slots and locals.

    By the number of the dataset, and the path there.
    """
    state = {}
    for number, dataset in enumerate(datasets):
        found = {**vars(dataset), **dict(slot_values(dataset))}
        for name, value in list(found.items()):
            if isinstance(value, threading.local):
                found[f"{name}.local"] = dict(attributes_of(value))
        for path, seen in seen_in(found).items():
            state[number, path] = seen
    return state


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
