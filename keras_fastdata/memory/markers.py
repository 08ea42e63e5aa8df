"""Pickles markers by the names that modules have for them.

Code compares a marker such as `MISSING = object()` by identity, in a module or
in a class. A marker has no content: its class has no base class, and the object
no attributes.
"""

from __future__ import annotations

import importlib
import operator
import struct
import sys
import types
from collections.abc import Iterator
from typing import Any

from keras_fastdata._call_stack import ignoring_errors
from keras_fastdata._modules import MADE_BY_CODE, is_main, modules_of_user

Place = tuple[str, str]  # a module, and a name in it

_POINTER = struct.calcsize("P")
_NO_BASES = 2  # classes in the `__mro__`: its own, and `object`


def is_marker(value: Any) -> bool:
    """Returns whether nothing but its identity tells an object from others."""
    kind: Any = type(value)
    if kind is object:
        return True
    return (
        len(kind.__mro__) == _NO_BASES
        and bool(kind.__flags__ & MADE_BY_CODE)
        and kind.__reduce__ is object.__reduce__
        and kind.__reduce_ex__ is object.__reduce_ex__
        and not _has_content(value)
    )


class MarkerPlaces:
    """Finds the names of markers in modules; looks through all at most once."""

    def __init__(self) -> None:
        self._of_users: dict[int, Place] | None = None

    def of(self, marker: Any) -> Place | None:
        """Returns the place of a marker.

        Its class is in the same module, or the module is the user's.
        """
        home = str(type(marker).__module__)
        for place, value in _variables_of(home):
            if value is marker:
                return place
        if self._of_users is None:
            self._of_users = {
                id(value): place
                for name in modules_of_user()
                for place, value in _variables_of(name)
                if is_marker(value)
            }
        return self._of_users.get(id(marker))


def marker_at(module: str, name: str, kind: Any) -> Any:
    """Returns the object that a module, or a class in it, has under a name.

    The program may have set it there: a module that has none of its class gets
    another one.
    """
    with ignoring_errors():  # the module cannot be imported
        found = operator.attrgetter(name)(importlib.import_module(module))
        if type(found) is kind:
            return found
    return object.__new__(kind)


def _variables_of(name: str) -> Iterator[tuple[Place, Any]]:
    """Yields the variables of a module, and of its classes.

    Not those of the script.
    """
    module = sys.modules.get(name)
    if not isinstance(module, types.ModuleType) or is_main(name):
        return
    for variable, value in list(vars(module).items()):
        yield (name, variable), value
        if isinstance(value, type) and value.__module__ == name:
            for key, part in list(vars(value).items()):
                yield (name, f"{variable}.{key}"), part


def _has_content(value: Any) -> bool:
    """Returns whether an object has attributes, or room for other content."""
    kind: Any = type(value)
    places = kind.__dictoffset__, kind.__weakrefoffset__
    own = sum(_POINTER for place in places if place > 0)
    if kind.__basicsize__ > object.__basicsize__ + own:
        return True  # slots, or what a class that is written in C has
    has_dict = bool(kind.__dictoffset__)
    return has_dict and bool(object.__getattribute__(value, "__dict__"))
