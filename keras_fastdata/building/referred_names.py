"""The variables that the code of a dataset refers to, found by their names.

The search begins with the dataset's class and attributes, and goes on with the
functions, classes and objects of the user's that it meets there. What a name
stands for is known without running anything: code has a list of its names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import functools
import sys
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import cloudpickle
import numpy as np

from keras_fastdata.building.modules import is_users
from keras_fastdata.building.seeding import PRIVATE

_MOST_VISITS = 2000  # classes, functions and objects that are looked into
_MOST_ITEMS = 100  # of a container that is looked into
# Methods that never run in a worker.
_RUN_HERE = ("__init__", "on_epoch_begin", "on_epoch_end")
_LEAVES = (str, bytes, int, float, complex, type(None), np.ndarray, np.generic)

ABSENT = object()  # stands for the value of a name that is none


@dataclasses.dataclass(frozen=True)
class Variable:
    """A name that code refers to.

    Attributes:
        home: What it is a name in: of a module, a class or an object.
        name: The name.
        module: The module of that.
        path: From there, such as "SCALE" or "Config.SCALE".
        by_value: Whether it travels with the class or function whose it is.
    """

    home: Mapping[str, Any]
    name: str
    module: str
    path: str
    by_value: bool

    @property
    def value(self) -> Any:
        return self.home.get(self.name, ABSENT)


class _Cell(Mapping[str, Any]):
    """A variable of an enclosing function; it has one key, whatever that is."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def __getitem__(self, name: str) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError:  # not assigned yet
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter([""])

    def __len__(self) -> int:
        return 1


def variables_of(dataset: Any) -> list[Variable]:
    """Those that batches of a dataset may depend on.

    But none that the code assigns, such as a module's own `_is_ready`.
    """
    search = _VariableSearch()
    search.value(dataset)
    return [v for v in search.found if v.name not in search.assigned]


class _VariableSearch:
    """Follows names.

    Attributes:
        found: The variables.
        assigned: Names that code assigns.
    """

    def __init__(self) -> None:
        self.found: list[Variable] = []
        self.assigned: set[str] = set()
        self._seen: dict[Any, Any] = {}  # with the value, whose id is in use
        self._places: set[tuple[str, str]] = set()

    def value(self, value: Any, module: str = "", path: str = "") -> None:
        """Looks into a value, which may be that of `module.path`."""
        if isinstance(value, (*_LEAVES, types.ModuleType)):
            return
        if isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, (list, tuple, dict)):
            if len(value) <= _MOST_ITEMS and self._is_new(value):
                items = value.values() if isinstance(value, dict) else value
                for item in list(items):
                    self.value(item)
        elif _is_users_object(value):
            self._object(value, module, path)
        else:
            for part in _parts_of(value):
                self.value(part)

    def _is_new(self, value: Any, *more: Any) -> bool:
        key = (id(value), *more)
        if key in self._seen or len(self._seen) >= _MOST_VISITS:
            return False
        self._seen[key] = value
        return True

    def _object(self, value: Any, module: str, path: str) -> None:
        if not self._is_new(value, bool(path)):
            return
        self._class(type(value))
        attributes = getattr(value, "__dict__", None)
        if not isinstance(attributes, dict):
            return
        for name, part in list(attributes.items()):
            if name == PRIVATE:
                continue
            if path:
                self._note(attributes, name, module, f"{path}.{name}")
            else:
                self.value(part)

    def _class(self, kind: type) -> None:
        for base in kind.__mro__:
            if not is_users(base.__module__) or not self._is_new(base):
                continue
            for name, value in list(vars(base).items()):
                if name in _RUN_HERE:
                    continue
                if name.startswith("__") and name.endswith("__"):
                    self.value(value)
                else:
                    path = f"{base.__qualname__}.{name}"
                    self._note(vars(base), name, base.__module__, path)

    def _function(self, function: types.FunctionType) -> None:
        if not self._is_new(function):
            return
        self.value(getattr(function, "__wrapped__", None))
        variables = function.__globals__
        home = str(variables.get("__name__"))
        is_nested = home == "__main__" or "<locals>" in function.__qualname__
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # not assigned yet
                self.value(cell.cell_contents)
            if is_nested and self._is_new(cell):
                self.found.append(Variable(_Cell(cell), "", home, "", True))
        if not is_users(home):
            return
        names = _names_in(function.__code__)
        self.assigned |= names.assigned
        for name in names.variables:
            if name in variables:
                self._note(variables, name, home, name)
                self._module(variables[name], names.all)
        for name in names.imported:
            self._module(sys.modules.get(name), names.all)

    def _module(self, module: Any, names: frozenset[str]) -> None:
        """Looks in a module for names that follow that of the module."""
        if not isinstance(module, types.ModuleType):
            return
        if not is_users(module.__name__) or not self._is_new(module, names):
            return
        variables = vars(module)
        for name in names & variables.keys():
            self._note(variables, name, module.__name__, name)
            self._module(variables[name], names)

    def _note(
        self, home: Mapping[str, Any], name: str, module: str, path: str
    ) -> None:
        if (module, path) in self._places or len(self.found) >= _MOST_VISITS:
            return
        self._places.add((module, path))
        by_value = (
            module == "__main__"
            or "<locals>" in path
            or module in cloudpickle.list_registry_pickle_by_value()
        )
        self.found.append(Variable(home, name, module, path, by_value))
        self.value(home[name], module, path)


def _is_users_object(value: Any) -> bool:
    """Whether it has attributes of the user's; of ours it may as well."""
    module = type(value).__module__
    if module == "builtins" or isinstance(value, weakref.ref):
        return False
    return is_users(module) or module.startswith("keras_fastdata.")


def _parts_of(value: Any) -> list[Any]:
    """The functions, and so on, that are wrapped in something of Python's."""
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.cached_property):
        return [value.func]
    if isinstance(value, (functools.partial, functools.partialmethod)):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, functools._lru_cache_wrapper):
        return [value.__wrapped__]
    return []


@dataclasses.dataclass(frozen=True)
class _Names:
    """Names in code, and in code inside it.

    Attributes:
        variables: Of variables that it reads.
        imported: Of modules that it imports.
        all: These, and those of attributes.
        assigned: Of variables and attributes that it assigns, but for those
            of `self`.
    """

    variables: frozenset[str]
    imported: frozenset[str]
    all: frozenset[str]
    assigned: frozenset[str]


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> _Names:
    variables, imported, assigned = set(), set(), set()
    names = frozenset(code.co_names)
    loaded: Any = None
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            variables.add(step.argval)
        elif step.opname == "IMPORT_NAME":
            imported.add(step.argval)
        elif step.opname == "STORE_GLOBAL" or (
            step.opname == "STORE_ATTR" and loaded != "self"
        ):
            assigned.add(step.argval)
        # Two at once, in Python 3.13.
        loaded = step.argval[-1:] if type(step.argval) is tuple else step.argval
        loaded = loaded[0] if type(loaded) is tuple and loaded else loaded
    inner = [
        _names_in(constant)
        for constant in code.co_consts
        if isinstance(constant, types.CodeType)
    ]
    return _Names(
        frozenset(variables).union(*(n.variables for n in inner)),
        frozenset(imported).union(*(n.imported for n in inner)),
        names.union(*(n.all for n in inner)),
        frozenset(assigned).union(*(n.assigned for n in inner)),
    )
