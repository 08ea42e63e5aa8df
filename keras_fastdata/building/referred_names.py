"""Finds the variables that the code of a dataset refers to by name.

The search begins with the dataset's class and attributes, and goes on with the
user's functions, classes and objects that it finds there. It runs no code: a
code object lists the names that it uses.
"""

from __future__ import annotations

import abc
import argparse
import collections
import contextlib
import dataclasses
import enum
import functools
import gc
import logging
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from keras_fastdata._modules import (
    is_users,
    is_users_class,
    is_users_code,
    names_in,
)
from keras_fastdata.building.assignments import (
    Assignments,
    cells_of,
    is_by_value,
)
from keras_fastdata.building.attributes import (
    attributes_of,
    first_items,
    has_attributes,
    slots_of,
)
from keras_fastdata.building.code_names import names_of
from keras_fastdata.building.seeding import PRIVATE

_MOST_VISITS = 20_000  # classes, functions and objects that are searched
_MOST_FOUND = 5_000  # variables
_MOST_OTHERS = 200  # objects of libraries
_MOST_ITEMS = 1_000  # of a container in a variable that is searched
_MOST_OWN_ITEMS = 100  # of a larger one in an attribute of the dataset
# Methods of a dataset that do not run in workers.
_RUN_HERE = ("__init__", "on_epoch_begin", "on_epoch_end")
# What may change of a function that travels by value.
_OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__")
_LEAVES = (str, bytes, int, float, complex, type(None), np.ndarray, np.generic)
_CONTAINERS = (list, tuple, dict, collections.deque)
_MOST_RESULTS = 8  # of a cached function
NAMESPACES = (argparse.Namespace, types.SimpleNamespace)
# Objects of Python's whose attributes are variables as well.
OPEN = (
    *NAMESPACES,
    *(collections.UserDict, collections.UserList, collections.ChainMap),
)
_CODE = (enum.Enum, type)
_KEYS = (str, bytes, int, float, type(None), *_CODE)

_log = logging.getLogger("keras_fastdata")

SELF = "self"  # begins the path to what the dataset itself holds
ABSENT = object()  # the value of a variable that has none


class ItemKey(NamedTuple):
    """The key or the index of an item in a container."""

    key: Any


class CellName(NamedTuple):
    """The name of an outer variable of a function."""

    name: str


class Inside(NamedTuple):
    """A part that has no name: of a partial function or a bound method."""

    number: int


class Kept(NamedTuple):
    """What a cached function keeps of a call. Workers have other results.

    It has two fields, or it would be equal to `ItemKey(call)`.
    """

    call: Any  # a tuple, as in `calls_of`; else a number of the result
    is_count: bool = False  # whether it is how often the function has run


Step = str | ItemKey | CellName | Inside | Kept
Path = tuple[Step, ...]  # such as ("Config", "SCALE")


@dataclasses.dataclass(frozen=True)
class Variable:
    """A variable that the code of a dataset refers to."""

    read: Callable[[], Any]
    path: Path  # the path to the variable in its module; empty if it has none
    module: str  # the module's name
    # Whether cloudpickle sends the variable along with its class or function.
    by_value: bool
    is_assigned: bool = False  # whether the code that was searched assigns it
    is_edited: bool = False  # whether that code edits the container in it

    @property
    def value(self) -> Any:
        """The variable's current value, or `ABSENT` if it does not exist."""
        try:
            return self.read()
        except (AttributeError, LookupError, ValueError):
            return ABSENT

    @property
    def has_items(self) -> bool:
        """Whether the items of the container in it are variables as well.

        So are the attributes of a namespace.
        """
        value = self.value
        if type(value) in NAMESPACES:
            value = vars(value)
        return type(value) in _CONTAINERS and len(value) <= _MOST_ITEMS

    @property
    def is_kept(self) -> bool:
        """Whether it belongs to the results that a cached function keeps."""
        return any(isinstance(step, Kept) for step in self.path)

    @property
    def can_be_compared(self) -> bool:
        """Whether a worker can find the same call of each cached function."""
        calls = [step.call for step in self.path if isinstance(step, Kept)]
        return all(isinstance(call, tuple) for call in calls)

    @property
    def name(self) -> str:
        """The variable's path as Python code, such as "TABLE['a'].size"."""
        return name_of(self.module, self.path)


def name_of(module: str, path: Path) -> str:
    """Returns a path in a module as Python code."""
    name = module
    for step in path:
        if isinstance(step, ItemKey):
            name += f"[{step.key!r}]"
        elif isinstance(step, Kept):
            name += "()" if step.call == () else "(...)"
        elif not isinstance(step, Inside):
            name += f".{step if isinstance(step, str) else step.name}"
    return name


def variables_of(dataset: Any) -> list[Variable]:
    """Returns the variables that a dataset's batches can depend on."""
    search = _VariableSearch(dataset)
    search.value(dataset, "", (SELF,))
    search.search_held_modules()
    search.assignments.follow()
    return list(search.found())


class _FoundVariable(NamedTuple):
    """A variable, and the object that has it."""

    variable: Variable
    owner: Any
    name: str


class _VariableSearch:
    """Collects the variables that code refers to directly or indirectly."""

    def __init__(self, dataset: Any) -> None:
        self.assignments = Assignments(dataset)
        self._found: list[_FoundVariable] = []
        self._dataset = type(dataset)
        self._kind: type | None = None  # the class that is searched
        self._seen: dict[Any, Any] = {}  # by id; keeps the values alive
        self._left = _MOST_OTHERS
        self._places: set[tuple[int, Path]] = set()
        self._modules: list[types.ModuleType] = []  # held as objects
        self._names: frozenset[str] = frozenset()  # all that the code uses

    def found(self) -> Iterator[Variable]:
        """Yields what was found, with what is known of assignments."""
        assigned = self.assignments
        for variable, owner, name in self._found:
            yield dataclasses.replace(
                variable,
                is_assigned=variable.is_assigned
                or assigned.is_assigned(owner, name),
                is_edited=assigned.is_edited(owner, name, variable.value),
            )

    def value(self, value: Any, module: str = "", path: Path = ()) -> None:
        """Collects the variables that a value refers to.

        `path` is the value's variable in `module`, or empty if it has none.
        """
        try:
            self._search(value, module, path)
        except Exception:
            # Objects of the user's may refuse to be looked into.
            _log.debug("State outside of a dataset:", exc_info=True)

    def _search(self, value: Any, module: str, path: Path) -> None:
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            if self._is_new(value, bool(path)):
                self._items(value.reshape(-1), module, path)
        elif isinstance(value, _LEAVES):
            return
        elif isinstance(value, types.ModuleType):
            self._modules.append(value)
        elif isinstance(value, types.FunctionType):
            self.assignments.name(value, "")
            self._function(value, module, path)
        elif isinstance(value, type):
            self._class(value)
        elif type(value) in _CONTAINERS:
            if self._is_new(value, bool(path)):
                self._items(value, module, path)
        elif _is_users_object(value):
            self._object(value, module, path)
        else:
            for number, part in enumerate(_parts_of(value)):
                if path:
                    read = functools.partial(part_at, value, number)
                    there = (*path, Inside(number))
                    self._note(read, value, "", module, there)
                else:
                    self.value(part)
            if isinstance(value, functools._lru_cache_wrapper):
                self._results(value, module, path)
            self._others(value, module, path)

    def _results(self, cached: Any, module: str, path: Path) -> None:
        """Collects what a cached function keeps, if it keeps few results."""
        self._add(_runs_of(cached, module, path), cached)
        for call, kept in calls_of(cached):
            # Not by the call: the function may have made another result.
            there = (*path, Kept(call))
            self._note(_reference(kept), cached, "", module, there)

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

    def _others(self, value: Any, module: str, path: Path) -> None:
        """Searches an object of a library, which may hold one of the user's."""
        home = str(type(value).__module__).partition(".")[0]
        if home in sys.stdlib_module_names or home == "keras_fastdata":
            return
        if self._left and self._is_new(value, bool(path)):
            self._left -= 1
            attributes = attributes_of(value)
            for name in first_items(attributes):
                part = attributes.get(name)
                # What a library keeps in containers is its own.
                is_named = bool(path) and type(part) not in _CONTAINERS
                self.value(part, module, (*path, str(name)) * is_named)

    def _items(self, value: Any, module: str, path: Path) -> None:
        is_mapping = isinstance(value, dict)
        items = first_items(
            dict.items(value) if is_mapping else enumerate(value)
        )
        if len(value) > _MOST_ITEMS and path[:1] in ((), (SELF,)):
            del items[_MOST_OWN_ITEMS:]
        # One that holds nothing else is compared and sent whole.
        are_leaves = all(
            isinstance(item, _LEAVES)
            and not isinstance(item, np.ndarray)
            and not (is_mapping and _names_code(key))
            for key, item in items
        )
        any_key = bool(path) and is_by_value(module, path)
        for key, item in items:
            is_key = any_key or _is_key(key)
            if path and not are_leaves and is_key:
                read = functools.partial(operator.getitem, value, key)
                self._note(read, value, "", module, (*path, ItemKey(key)))
            else:
                self.value(item)

    def _object(self, value: Any, module: str, path: Path) -> None:
        if not self._is_new(value, bool(path)):
            return
        self._class(type(value))
        attributes, held = attributes_of(value), _reference(value)
        # Builds change the attributes of this package's datasets.
        is_ours = type(value).__module__.startswith("keras_fastdata.")
        if path and path != (SELF,) and has_attributes(value) and not is_ours:
            self._note_size(attributes, path)
        for name in list(attributes):
            if name == PRIVATE:
                continue
            if path and not is_ours:
                read = functools.partial(_read, held, _attribute, name)
                self._note(read, value, name, module, (*path, name))
            else:
                part = attributes.get(name)
                self.value(part, module, (*path, name) if path else ())
        kind: Any = type(value)
        for slot in slots_of(kind):
            read = functools.partial(_read, held, slot.__get__)
            if path:
                name = slot.__name__
                self._note(read, value, name, module, (*path, name))
            else:
                with contextlib.suppress(AttributeError):  # not assigned
                    self.value(read())
        if isinstance(value, (list, tuple)):
            self._items(value, module, path)
        if isinstance(value, dict):
            for key in first_items(dict.keys(value)):
                read = functools.partial(_read, held, dict.__getitem__, key)
                if path and _is_key(key):
                    there = (*path, ItemKey(key))
                    self._note(read, value, "", module, there)

    def _class(self, kind: type) -> None:
        metaclass: type = type(kind)
        for base in (*kind.__mro__, *metaclass.__mro__):
            if is_users_class(base) and self._is_new(base):
                outer, self._kind = self._kind, base
                self._own_names(base, kind is self._dataset)
                self._kind = outer

    def _own_names(self, kind: type, is_dataset: bool) -> None:
        """Collects the variables of one class."""
        self._note_size(vars(kind))
        home = kind.__module__
        if home == "builtins":  # the globals of its code have no name
            home = ""
        top = tuple(kind.__qualname__.split("."))
        read = functools.partial(getattr, kind, "__bases__")
        self._note(read, kind, "__bases__", home, (*top, "__bases__"))
        by_value = is_by_value(home, top)
        if isinstance(kind, abc.ABCMeta) and by_value:
            # A number that grows when any class is registered.
            self._add(Variable(abc.get_cache_token, (), home, True))
        for name, value in list(vars(kind).items()):
            if name in _RUN_HERE and is_dataset:
                continue
            if _is_pythons(name, value):
                self.value(value)
            else:
                read = functools.partial(vars(kind).__getitem__, name)
                self._note(read, kind, name, home, (*top, name))

    def _function(
        self, function: types.FunctionType, module: str, path: Path
    ) -> None:
        if not self._is_new(function):
            return
        self.value(getattr(function, "__wrapped__", None))
        variables = function.__globals__
        home = str(variables.get("__name__"))
        own = tuple(function.__qualname__.split("."))
        if not path or is_by_value(module, path):
            module, path = home, own
        if not is_users_code(home):
            # Its variables are the library's, but it may hold what is not.
            for cell in cells_of(function).values():
                with contextlib.suppress(ValueError):  # not assigned yet
                    self.value(cell.cell_contents)
            self.value(function.__defaults__)
            self.value(function.__kwdefaults__)
            return
        self._parts_of_function(function, module, path)
        attributes = function.__dict__
        self._note_size(attributes)
        for name in list(attributes):
            if name != "__wrapped__":
                read = functools.partial(attributes.__getitem__, name)
                self._note(read, function, name, module, (*path, name))
        code, package = function.__code__, variables.get("__package__")
        names, every = names_of(code, package), names_in(code)
        self._names |= every
        self.assignments.note(function, names, self._kind)
        for name in names.variables:
            read = functools.partial(variables.__getitem__, name)
            self._note(read, variables, name, home, (name,))
            self._module(variables.get(name), every)
        for name in names.imported:
            self._module(sys.modules.get(name), every)

    def _parts_of_function(
        self, function: types.FunctionType, module: str, path: Path
    ) -> None:
        """Collects the outer variables and the default values of a function."""
        by_value = is_by_value(module, path)
        for name, cell in cells_of(function).items():
            there = (*path, CellName(name))
            with contextlib.suppress(ValueError):  # not assigned yet
                self.value(cell.cell_contents, module, there)
            if self._is_new(cell):
                read = functools.partial(getattr, cell, "cell_contents")
                self._add(Variable(read, there, module, by_value), cell, name)
        for name in _OF_FUNCTIONS:
            if by_value or name != "__code__":
                read = functools.partial(getattr, function, name)
                self._add(Variable(read, (*path, name), module, by_value))
                self.value(read(), module, (*path, name))

    def _module(self, module: Any, names: frozenset[str]) -> None:
        """Collects a module's variables whose names are in `names`."""
        if not isinstance(module, types.ModuleType):
            return
        if not is_users(module.__name__) or not self._is_new(module, names):
            return
        variables = vars(module)
        read = functools.partial(_count_among, names, variables)
        self._add(Variable(read, (), "", True))
        for name in names & variables.keys():
            read = functools.partial(variables.__getitem__, name)
            self._note(read, variables, name, module.__name__, (name,))
            self._module(variables.get(name), names)

    def _note_size(self, names: Mapping[str, Any], path: Path = ()) -> None:
        read = functools.partial(_count_of, names)
        is_own = path[:1] == (SELF,)
        self._add(Variable(read, (SELF,) if is_own else (), "", True))

    def _note(
        self,
        read: Callable[[], Any],
        owner: Any,
        name: str,
        module: str,
        path: Path,
    ) -> None:
        place = id(owner), path
        if place in self._places or len(self._found) >= _MOST_FOUND:
            return
        self._places.add(place)
        variable = Variable(read, path, module, is_by_value(module, path))
        self._add(variable, owner, name)
        value = variable.value
        function = value
        if isinstance(value, (staticmethod, classmethod)):
            function = value.__func__
        if isinstance(function, types.FunctionType) and (
            isinstance(owner, type)
            or (isinstance(owner, dict) and "__name__" in owner)
        ):
            self.assignments.name(function, name)
            self._function(function, module, path)
        # The function that names a module uses it under its names alone.
        elif len(path) > 1 or not isinstance(value, types.ModuleType):
            self.value(value, module, path)

    def _add(
        self, variable: Variable, owner: Any = None, name: str = ""
    ) -> None:
        self._found.append(_FoundVariable(variable, owner, name))


def _is_key(value: Any) -> bool:
    """Returns whether a path may have an item with this key."""
    if type(value) is tuple:
        return all(map(_is_key, value))
    return isinstance(value, _KEYS)


def _names_code(key: Any) -> bool:
    """Returns whether a key is, or has in it, a class or a member of an enum.

    These are not plain.
    """
    if type(key) is tuple:
        return any(map(_names_code, key))
    return isinstance(key, _CODE)


def _reference(value: Any) -> Callable[[], Any]:
    """Returns a weak reference to an object, or a strong one if it must be.

    What is found is kept by the dataset, which must not keep itself.
    """
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def _read(held: Callable[[], Any], read: Callable[..., Any], *key: Any) -> Any:
    """Calls `read` with the object that is referred to, and a key of it."""
    if (value := held()) is None:
        raise LookupError("the object was collected")
    return read(value, *key)


def _attribute(value: Any, name: str) -> Any:
    return attributes_of(value)[name]


def part_at(value: Any, number: int) -> Any:
    """Returns the object that the step `Inside(number)` leads to."""
    return _parts_of(value)[number]


def _count_of(names: Mapping[str, Any]) -> int:
    """Returns the number of names, to show additions.

    A name that is added may hide a variable of a class. Python itself may add
    names such as `__slotnames__` at any time.
    """
    items = list(names.items())
    return sum(not _is_pythons(name, value) for name, value in items)


def _count_among(names: frozenset[str], variables: dict[str, Any]) -> int:
    """Returns how many of the names a module has, to show additions."""
    return len(names & variables.keys())


def _is_pythons(name: str, value: Any) -> bool:
    """Returns whether Python itself could have set a class attribute."""
    is_special = name.startswith("__") and name.endswith("__")
    return is_special and not isinstance(value, types.FunctionType)


def _runs_of(cached: Any, module: str, path: Path) -> Variable:
    """Returns how often a cached function with few results has run.

    It is a variable that builds may assign.
    """

    def read() -> int:
        info = cached.cache_info()
        return int(info.misses) if info.currsize <= _MOST_RESULTS else -1

    there = (*path, Kept(0, is_count=True))
    return Variable(
        read, there, module, is_by_value(module, path), is_assigned=True
    )


def calls_of(cached: Any) -> list[tuple[Any, Any]]:
    """Returns the few calls that a cached function keeps, with their results.

    Only results that are containers or objects of the user's classes count. A
    function with more results caches data.

    Returns:
        Pairs of a call and its result. The call is a tuple that is the same in
        each process, or a number if that cannot be.
    """
    if cached.cache_info().currsize > _MOST_RESULTS:
        return []
    parts = [
        part for part in gc.get_referents(cached) if part is not vars(cached)
    ]
    # The dict from calls to results; where results are limited in number, it
    # holds them in links, and each call and its result are parts in a row.
    own = [part for part in parts if type(part) is dict]
    pairs: list[tuple[Any, Any]] = []
    if cached.cache_parameters()["maxsize"] is None:
        pairs += (pair for each in own for pair in each.items())
    else:
        own = [each for each in own if all(map(_is_link, each.values()))]
        calls = {id(call) for each in own for call in each}
        left = iter(parts)
        pairs += ((part, next(left)) for part in left if id(part) in calls)
    return [
        (_portable(call, number), result)
        for number, (call, result) in enumerate(pairs)
        if type(result) in _CONTAINERS or _is_users_object(result)
    ]


def _portable(call: Any, number: int) -> Any:
    """Returns a call as a tuple that is the same in each process, or `number`.

    A call is the argument itself, or a tuple of arguments, with a mark before
    those that have a keyword.
    """
    parts = call if type(call) is tuple else (call,)
    marked = tuple("=" if type(part) is object else part for part in parts)
    return marked if all(map(_is_key, marked)) else number


def _is_link(value: Any) -> bool:
    """Returns whether a cache of limited size keeps a result in an object."""
    return type(value).__name__ == "_lru_list_elem"


def _is_users_object(value: Any) -> bool:
    """Returns whether the user or this package defines an object's class.

    Namespaces also count, whose attributes are variables as well.
    """
    if isinstance(value, weakref.ref):
        return False
    kind = type(value)
    if isinstance(value, OPEN):
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
