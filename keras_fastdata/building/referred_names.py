"""Finds the variables that the code of a dataset refers to by name.

The search begins with the dataset's class and attributes, and goes on with the
user's functions, classes and objects that it finds there. It runs no code: a
code object lists the names that it uses.
"""

from __future__ import annotations

import abc
import argparse
import contextlib
import dataclasses
import dis
import enum
import functools
import itertools
import sys
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import cloudpickle
import numpy as np

from keras_fastdata._modules import (
    has_no_module,
    imports_in,
    is_users,
    is_users_class,
    is_users_code,
    names_in,
    nested_code,
)
from keras_fastdata.building.seeding import PRIVATE

_MOST_VISITS = 2000  # classes, functions and objects that are searched
_MOST_ITEMS = 100  # of a container that is searched
# Methods of a dataset that do not run in workers.
_RUN_HERE = ("__init__", "on_epoch_begin", "on_epoch_end")
# What may change of a function that travels by value.
_OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__")
_LEAVES = (str, bytes, int, float, complex, type(None), np.ndarray, np.generic)

ABSENT = object()  # the value of a name that has none


@dataclasses.dataclass(frozen=True)
class Variable:
    """A variable that the code of a dataset refers to."""

    # The variables of the module, class or object that has it.
    home: Mapping[str, Any]
    name: str  # the variable's name
    module: str  # the module that `home` belongs to
    path: str  # the path in that module, such as "SCALE" or "Config.SCALE"
    # Whether cloudpickle sends the variable along with its class or function.
    by_value: bool

    @property
    def value(self) -> Any:
        """The variable's current value, or `ABSENT` if it does not exist."""
        return self.home.get(self.name, ABSENT)


class _OneValue(Mapping[str, Any]):
    """A mapping that has the same value for every key."""

    def __iter__(self) -> Iterator[str]:
        return iter([""])

    def __len__(self) -> int:
        return 1


class _Size(_OneValue):
    """Maps every key to the number of names in `names`, to show additions.

    A name that is added may hide a variable of a class. Python itself may add
    names such as `__slotnames__` at any time.
    """

    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = names

    def __getitem__(self, name: str) -> Any:
        items = list(self._names.items())
        return sum(not _is_pythons(name, value) for name, value in items)


class _Attribute(_OneValue):
    """Maps every key to an attribute of a class or a function."""

    def __init__(self, owner: type | types.FunctionType, name: str) -> None:
        self._owner, self._name = owner, name

    def __getitem__(self, name: str) -> Any:
        return getattr(self._owner, self._name)


class _Registrations(_OneValue):
    """Maps every key to a number that grows when a class is registered.

    It is that of all abstract base classes.
    """

    def __getitem__(self, name: str) -> Any:
        return abc.get_cache_token()


class Cell(_OneValue):
    """Maps every key to the content of a closure cell."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def __getitem__(self, name: str) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError:  # not assigned yet
            raise KeyError(name) from None


def variables_of(dataset: Any, *, is_here: bool = False) -> list[Variable]:
    """Returns the variables that a dataset's batches can depend on.

    Leaves out variables that the code assigns, such as a module's `_is_ready`.

    Args:
        dataset: The dataset.
        is_here: Whether builds run in this process. What they may assign to
            `self`, or around a function, is then left out as well.
    """
    search = _VariableSearch(type(dataset))
    search.value(dataset)
    search.search_held_modules()
    found = [v for v in search.found if v.name not in search.assigned]
    if is_here:
        found = [
            v
            for v in found
            if not (isinstance(v.home, Cell) and v.path in search.rebound)
            and ("." not in v.path or v.name not in search.own)
        ]
    return found


class _VariableSearch:
    """Collects the variables that code refers to directly or indirectly."""

    def __init__(self, dataset: type) -> None:
        self._dataset = dataset
        self.found: list[Variable] = []
        self.assigned: set[str] = set()  # names that the code assigns
        self.own: set[str] = set()  # names that the code assigns to `self`
        self.rebound: set[str] = set()  # outer variables that it assigns
        self._seen: dict[Any, Any] = {}  # by id; keeps the values alive
        self._places: set[tuple[int, str]] = set()
        self._modules: list[types.ModuleType] = []  # held as objects
        self._names: frozenset[str] = frozenset()  # all that the code uses

    def value(self, value: Any, module: str = "", path: str = "") -> None:
        """Collects the variables that a value refers to.

        `path` is the value's variable in `module`, or "" if it has none.
        """
        if isinstance(value, _LEAVES):
            return
        if isinstance(value, types.ModuleType):
            self._modules.append(value)
        elif isinstance(value, types.FunctionType):
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

    def search_held_modules(self) -> None:
        """Collects the variables of modules that are held as objects.

        Such a module is an attribute of the dataset, or an item of a list. Any
        code that was searched may use it under a name of its own.
        """
        for module in self._modules:  # grows meanwhile
            self._module(module, self._names)

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
        if path:
            self._note_size(attributes)
        for name, part in list(attributes.items()):
            if name == PRIVATE:
                continue
            if path:
                self._note(attributes, name, module, f"{path}.{name}")
            else:
                self.value(part)

    def _class(self, kind: type) -> None:
        metaclass: type = type(kind)
        for base in (*kind.__mro__, *metaclass.__mro__):
            if not is_users_class(base) or not self._is_new(base):
                continue
            self._note_size(vars(base))
            home = base.__module__
            if home == "builtins":  # the globals of its code have no name
                home = ""
            path = f"{base.__qualname__}.__bases__"
            self._note(_Attribute(base, "__bases__"), "", home, path)
            if isinstance(base, abc.ABCMeta) and _is_by_value(home, path):
                self.found.append(
                    Variable(_Registrations(), "", home, path, True)
                )
            for name, value in list(vars(base).items()):
                if name in _RUN_HERE and kind is self._dataset:
                    continue
                if _is_pythons(name, value):
                    self.value(value)
                else:
                    path = f"{base.__qualname__}.{name}"
                    self._note(vars(base), name, home, path)

    def _function(self, function: types.FunctionType) -> None:
        if not self._is_new(function):
            return
        self.value(getattr(function, "__wrapped__", None))
        self.value(function.__defaults__)
        self.value(function.__kwdefaults__)
        variables = function.__globals__
        home = str(variables.get("__name__"))
        is_nested = home == "__main__" or "<locals>" in function.__qualname__
        free = function.__code__.co_freevars
        for name, cell in zip(free, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not assigned yet
                self.value(cell.cell_contents)
            if is_nested and self._is_new(cell):
                self.found.append(Variable(Cell(cell), "", home, name, True))
        if _is_by_value(home, function.__qualname__):
            self.found += [
                Variable(_Attribute(function, name), "", home, "", True)
                for name in _OF_FUNCTIONS
            ]
        if not is_users_code(home):
            return
        attributes = function.__dict__
        if _is_by_value(home, function.__qualname__):
            self._note_size(attributes)
        for name in list(attributes):
            if name != "__wrapped__":
                path = f"{function.__qualname__}.{name}"
                self._note(attributes, name, home, path)
        code, package = function.__code__, variables.get("__package__")
        names, every = _names_in(code, package), names_in(code)
        self._names |= every
        self.assigned |= names.assigned
        self.own |= names.own
        self.rebound |= names.rebound
        for name in names.variables:
            self._note(variables, name, home, name)
            self._module(variables.get(name), every)
        for name in names.imported:
            self._module(sys.modules.get(name), every)

    def _module(self, module: Any, names: frozenset[str]) -> None:
        """Collects a module's variables whose names are in `names`."""
        if not isinstance(module, types.ModuleType):
            return
        if not is_users(module.__name__) or not self._is_new(module, names):
            return
        variables = vars(module)
        for name in names & variables.keys():
            self._note(variables, name, module.__name__, name)
            self._module(variables.get(name), names)

    def _note_size(self, names: Mapping[str, Any]) -> None:
        self.found.append(Variable(_Size(names), "", "", "", True))

    def _note(
        self, home: Mapping[str, Any], name: str, module: str, path: str
    ) -> None:
        place = id(home), path
        if place in self._places or len(self.found) >= _MOST_VISITS:
            return
        self._places.add(place)
        by_value = _is_by_value(module, path)
        self.found.append(Variable(home, name, module, path, by_value))
        value = home.get(name, ABSENT)
        # The function that names a module uses it under its names alone.
        if "." in path or not isinstance(value, types.ModuleType):
            self.value(value, module, path)


def _is_by_value(module: str, path: str) -> bool:
    """Returns whether cloudpickle sends what has a path in a module."""
    return (
        module == "__main__"
        or "<locals>" in path
        or has_no_module(module)
        or module in cloudpickle.list_registry_pickle_by_value()
    )


def _is_pythons(name: str, value: Any) -> bool:
    """Returns whether Python itself could have set a class attribute."""
    is_special = name.startswith("__") and name.endswith("__")
    return is_special and not isinstance(value, types.FunctionType)


def _is_users_object(value: Any) -> bool:
    """Returns whether the user or this package defines an object's class.

    Namespaces also count, whose attributes are variables as well.
    """
    if isinstance(value, weakref.ref):
        return False
    kind = type(value)
    if kind in (types.SimpleNamespace, argparse.Namespace):
        return True
    return is_users_class(kind) or kind.__module__.startswith("keras_fastdata.")


def _parts_of(value: Any) -> list[Any]:
    """Returns the objects inside a wrapper such as `partial` or `property`."""
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
    """The names that a function and its nested functions use."""

    variables: frozenset[str]  # variables that it reads
    imported: frozenset[str]  # modules that it imports
    # Globals that it assigns, and attributes of classes and modules.
    assigned: frozenset[str]
    own: frozenset[str]  # attributes of `self` that it assigns
    rebound: frozenset[str]  # variables of outer functions that it assigns


class _Top(enum.Enum):
    """What an instruction has put on top of Python's stack."""

    SELF = enum.auto()
    OUTER = enum.auto()  # a global, an outer variable, or a part of one
    TYPE = enum.auto()  # the function `type`, then with its argument
    OTHER = enum.auto()


def _top_of(name: str, operation: str) -> _Top:
    """Returns what an instruction loads that names a local variable."""
    if name == "self":
        return _Top.SELF
    is_outer = name == "cls" or operation.endswith("DEREF")
    return _Top.OUTER if is_outer else _Top.OTHER


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType, package: str | None) -> _Names:
    variables: set[str] = set()
    assigned: set[str] = set()
    own: set[str] = set()
    rebound: set[str] = set()
    top = copied = _Top.OTHER
    for step in itertools.chain(*map(dis.get_instructions, nested_code(code))):
        name, operation = step.argval, step.opname
        if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
            variables.add(name)
            top = _Top.TYPE if name == "type" else _Top.OUTER
        elif operation == "STORE_DEREF":
            rebound.add(name)
        elif operation.endswith("DEREF") or "LOAD_FAST" in operation:
            # In Python 3.13 one instruction may load two names.
            name = name[-1] if type(name) is tuple else name
            # A call of `type` comes with its argument.
            is_of_type = top is _Top.TYPE and name in ("self", "cls")
            top = _Top.TYPE if is_of_type else _top_of(name, operation)
        elif operation in ("LOAD_ATTR", "LOAD_METHOD"):
            is_outer = top is _Top.OUTER or name == "__class__"
            top = _Top.OUTER if is_outer else _Top.OTHER
        elif operation.startswith("CALL"):
            top = _Top.OUTER if top is _Top.TYPE else _Top.OTHER
        elif operation == "COPY":
            copied = top  # of `x.count += 1`
        elif operation == "SWAP":
            top = copied
        elif operation == "STORE_GLOBAL" or (
            operation == "STORE_ATTR" and top is _Top.OUTER
        ):
            assigned.add(name)
        elif operation == "STORE_ATTR" and top is _Top.SELF:
            own.add(name)
    imported = {name for name, _ in imports_in(code, package)}
    return _Names(
        *map(frozenset, (variables, imported, assigned, own, rebound))
    )
