"""Keeps objects that a pickle and a variable of a module have in common.

A worker imports the user's modules, and so makes the objects in their variables
anew. If the dataset refers to such an object too (`from config import cfg`, or
`self.rng = augment.rng`), it would be another one there: what code draws from
one, or changes in one, would not be seen in the other. So the worker's module
gets the object that came with the dataset.
"""

from __future__ import annotations

import enum
import sys
import types
from typing import Any

import numpy as np

from keras_fastdata import _process_role
from keras_fastdata._call_stack import ignoring_errors
from keras_fastdata._modules import is_main, modules_of_user

# These cannot be changed, or travel by the name of their module.
_NO_STATE = (
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType),
    *(type(None), bool, int, float, complex, str, bytes, tuple, frozenset),
    *(np.generic, enum.Enum),
)
# A pickler shows objects of other types alone to `reducer_override`.
_CONTAINERS = (dict, list, set, bytearray)

Shared = dict[tuple[str, str], Any]  # the objects, by module and name


class ModuleVariables:
    """Finds the objects of a pickle that variables of modules hold, too.

    Attributes:
        found: These objects.
    """

    def __init__(self) -> None:
        self.found: Shared = {}
        # The values, and the variables that hold each of them, by its id.
        self._known: dict[int, tuple[Any, list[tuple[str, str]]]] = {}
        for module in modules_of_user():
            loaded = sys.modules.get(module)
            if is_main(module) or not isinstance(loaded, types.ModuleType):
                continue
            for name, value in list(vars(loaded).items()):
                if not (name.startswith("__") or isinstance(value, _NO_STATE)):
                    known = self._known.setdefault(id(value), (value, []))
                    known[1].append((module, name))

    def look(self, value: Any) -> None:
        """Notes an object that is pickled, and containers in its attributes."""
        if id(value) in self._known:
            self.note(value)
        if isinstance(value, _NO_STATE) or not type(value).__dictoffset__:
            return
        with ignoring_errors():  # the user's class may raise anything
            attributes = object.__getattribute__(value, "__dict__")
            if type(attributes) is dict:
                self.look_in(attributes)

    def look_in(self, values: dict[str, Any]) -> None:
        """Notes the containers among the values of a dict."""
        for value in list(values.values()):
            if type(value) in _CONTAINERS and id(value) in self._known:
                self.note(value)

    def note(self, value: Any) -> None:
        """Notes a value of a variable."""
        _, variables = self._known[id(value)]
        self.found.update(dict.fromkeys(variables, value))


class WithVariables:
    """Pickles an object, and variables of modules that its parts belong to."""

    def __init__(self, obj: Any, shared: Shared) -> None:
        self._parts = obj, shared

    def __reduce__(self) -> tuple[Any, ...]:
        return _given, self._parts


def _given(obj: Any, shared: Shared) -> Any:
    """Gives a worker's modules their variables; returns the object."""
    if not _process_role.is_worker():
        return obj
    for (module, name), value in shared.items():
        loaded = sys.modules.get(module)
        if isinstance(loaded, types.ModuleType):
            vars(loaded)[name] = value
    return obj
