"""Gives variables other values for the time of an import.

A module is imported in a worker when the worker may have been told of other
modules already. Meanwhile these have the values that the module saw in the
trainer.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from keras_fastdata._call_stack import ignoring_errors
from keras_fastdata.building.variables import ABSENT, Path
from keras_fastdata.engine.giving import give
from keras_fastdata.engine.variable_parts import (
    fill,
    part_of,
    set_part,
    twin_of,
)

Place = tuple[str, Path]  # a module, and a path in it


class ShownValues:
    """The variables that have other values for the time of an import."""

    def __init__(self) -> None:
        # Of variables that imports change: what imports alone have made of
        # them, before this worker was told of them.
        self._alone: dict[Place, _FormerContent] = {}
        # What variables had before the import that is under way, in the order
        # of changes; `None` if none is.
        self._own: dict[Place, _FormerContent] | None = None

    def keep_alone(self, place: Place) -> None:
        """Notes what a variable has, before this worker is told of it."""
        if place not in self._alone:
            with ignoring_errors():
                self._alone[place] = _FormerContent(place)

    def show_alone(self) -> None:
        """Begins an import: variables have what imports alone make of them."""
        if self._own is None:
            self._own = {}
            for place, content in list(self._alone.items()):
                self._save(place)
                content.put_back()

    def show(self, name: str, key: str, value: Any, *, stays: bool) -> None:
        """Gives a module's variable a value, if the module is there.

        `stays` is whether the variable has the value after the import, too.
        """
        if name in sys.modules:
            if not stays:
                self._save((name, (key,)))
            give(sys.modules[name], (key,), value, is_whole=True)

    def end(self) -> None:
        """Ends the import: variables have what they had before."""
        own, self._own = self._own or {}, None
        for place in own.keys() & self._alone.keys():
            del self._alone[place]
            self.keep_alone(place)
        for content in reversed(own.values()):
            content.put_back()

    def _save(self, place: Place) -> None:
        if self._own is not None and place not in self._own:
            with ignoring_errors():  # the user's class may refuse
                self._own[place] = _FormerContent(place)


class _FormerContent:
    """What a variable has, though others may hold the object and edit it."""

    def __init__(self, place: Place) -> None:
        self._name, self._path = place
        self._value = part_of(self._owner(), self._path[-1])
        self._twin = twin_of(self._value)

    def put_back(self) -> None:
        """Gives the variable this value with this content."""
        if self._value is ABSENT:
            return
        with ignoring_errors():  # the user's class may refuse
            if self._twin is not None:
                fill(self._value, self._twin)
            owner, last = self._owner(), self._path[-1]
            if part_of(owner, last) is not self._value:
                set_part(owner, last, self._value)

    def _owner(self) -> Any:
        return functools.reduce(
            part_of, self._path[:-1], sys.modules[self._name]
        )
