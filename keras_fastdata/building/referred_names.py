"""Finds the variables that the code of a dataset refers to by name.

The search begins with the dataset's class and attributes, and goes on with the
user's functions, classes and objects that it finds there. It runs no code: a
code object lists the names that it uses.

What has a name comes first: attributes and variables. Then come the items of
containers, level by level. So a large list hides nothing but its own parts.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import dataclasses
import enum
import functools
import gc
import logging
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from keras_fastdata._call_stack import raise_of_handler
from keras_fastdata._modules import (
    is_users_class,
    is_users_code,
    is_users_module,
    loaded,
    modules_behind,
    names_in,
    packages_of,
)
from keras_fastdata.building.assignments import (
    Assignments,
    cells_of,
    is_by_value,
    is_pythons,
)
from keras_fastdata.building.attributes import (
    attributes_of,
    first_items,
    has_attributes,
    items_of,
    lasting_names,
    slots_of,
)
from keras_fastdata.building.cached_functions import calls_of, runs_of
from keras_fastdata.building.code_names import names_of
from keras_fastdata.building.held_modules import (
    HeldModules,
    count_among,
    names_known,
    sources_to_import,
)
from keras_fastdata.building.process_variables import ProcessVariables
from keras_fastdata.building.seeding import PRIVATE
from keras_fastdata.building.set_names import set_in_library
from keras_fastdata.building.variables import (
    CODE,
    CONTAINERS,
    MOST_ITEMS,
    SELF,
    CellName,
    Inside,
    ItemKey,
    Kept,
    PartKey,
    Path,
    Variable,
    is_key,
    is_users_object,
    last_name,
    part_at,
    parts_of,
)
from keras_fastdata.memory import keras_layers
from keras_fastdata.memory.class_refs import is_importable

_MOST_VISITS = 20_000  # classes, functions and objects that are searched
# Variables. Of further objects and containers, only the code is searched.
_MOST_FOUND = 5_000
_MOST_OTHERS = 100  # objects of each class of a library
_MOST_OWN_ITEMS = 100  # of a larger one in an attribute of the dataset
# Methods of a dataset that do not run in workers.
_RUN_HERE = ("__init__", "on_epoch_begin", "on_epoch_end")
_METHODS = (staticmethod, classmethod)
# What may change of a function.
_OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__")
_MAPPINGS: tuple[Any, ...] = (dict, types.MappingProxyType)
_BASES = (*_MAPPINGS, list, tuple, collections.deque, np.ndarray)
_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
_LEAVES = (str, bytes, int, float, complex, type(None), np.ndarray, np.generic)

_log = logging.getLogger("keras_fastdata")


def variables_of(dataset: Any) -> list[Variable]:
    """Returns the variables that a dataset's batches can depend on."""
    search = _VariableSearch(dataset)
    search.run()
    search.assignments.follow()
    return list(search.found())


def attributes_changed_by_builds(dataset: Any) -> set[str]:
    """Returns the attributes that the code of builds assigns or edits.

    A value of which such code changes a part counts as edited.
    """
    try:
        found = variables_of(dataset)
    except Exception as error:
        raise_of_handler(error)
        return set()  # objects of the user's may refuse to be looked into
    return {
        str(variable.path[1])
        for variable in found
        if (variable.is_assigned or variable.is_edited)
        and variable.path[:1] == (SELF,)
        and len(variable.path) > 1
    }


class _FoundVariable(NamedTuple):
    """A variable, and the object that has it."""

    variable: Variable
    owner: Any
    name: str


class _Waiting(NamedTuple):
    """An object or a container that is to be searched."""

    value: Any
    module: str
    path: Path
    kind: type | None  # the class whose code has led there


class _VariableSearch:
    """Collects the variables that code refers to directly or indirectly."""

    def __init__(self, dataset: Any) -> None:
        self.assignments = Assignments(dataset)
        self._process = ProcessVariables(dataset)
        self._found: list[_FoundVariable] = []
        self._dataset = dataset
        self._kind: type | None = None  # the class that is searched
        self._seen: dict[Any, Any] = {}  # by id; keeps the values alive
        self._others_of: collections.Counter[type] = collections.Counter()
        self._places: set[tuple[int, Path]] = set()
        self._held = HeldModules()
        self._imported: set[str] = set()  # modules that are not imported yet
        self._objects: collections.deque[_Waiting] = collections.deque()
        self._containers: collections.deque[_Waiting] = collections.deque()

    def run(self) -> None:
        """Searches the dataset, and all that was found there."""
        self.value(self._dataset, "", (SELF,))
        while waiting := self._objects or self._containers:
            is_items = waiting is self._containers
            value, module, path, self._kind = waiting.popleft()
            if len(self._found) >= _MOST_FOUND:
                path = ()
            search = self._items if is_items else self._object
            _search_in(search, value, module, path)
            while not self._objects and (found := self._held.unsearched()):
                for held, names in found:
                    self._module(held, names)

    def found(self) -> Iterator[Variable]:
        """Yields what was found, with what is known of assignments."""
        yield from self._process.of_others()
        for found in self._found:
            yield _completed(found, self.assignments)

    def value(self, value: Any, module: str = "", path: Path = ()) -> None:
        """Collects what a value refers to; `path` may be its own variable."""
        _search_in(self._search, value, module, path)

    def _search(self, value: Any, module: str, path: Path) -> None:
        place = _Waiting(value, module, path, self._kind)
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            if self._is_new(value, bool(path)):
                flat = value.reshape(-1)
                self._containers.append(place._replace(value=flat))
                if _has_users_attributes(value):
                    self._objects.append(place)
        elif isinstance(value, _LEAVES) and not _has_users_attributes(value):
            return
        elif isinstance(value, types.ModuleType):
            self._held.modules.append(value)
        elif isinstance(value, types.FunctionType):
            self.assignments.name(value, last_name(path))
            self._function(value, module, path)
        elif isinstance(value, type):
            self._class(value)
        elif type(value) in (*CONTAINERS, types.MappingProxyType):
            # One that holds nothing else is compared and sent whole.
            if not _holds_leaves(value) and self._is_new(value, bool(path)):
                self._containers.append(place)
        elif is_users_object(value):
            if self._is_new(value, bool(path)):
                self._objects.append(place)
        elif isinstance(value, _WEAK) and path[:1] == (SELF,):
            held = _reference(value)
            read = functools.partial(_read, held, _attribute, "data")
            self._note(read, value, "data", module, (*path, "data"))
        else:
            for number, part in enumerate(parts_of(value)):
                if path:
                    read = functools.partial(part_at, value, number)
                    there = (*path, Inside(number))
                    self._note(read, value, "", module, there)
                else:
                    self.value(part)
            if isinstance(value, functools._lru_cache_wrapper):
                self._results(value, module, path)
            if _may_hold_code(value) and self._is_new(value, bool(path)):
                self._others_of[type(value)] += 1
                if self._others_of[type(value)] <= _MOST_OTHERS:
                    self._objects.append(place)

    def _results(self, cached: Any, module: str, path: Path) -> None:
        """Collects what a cached function keeps, if it keeps few results."""
        self._add(runs_of(cached, module, path), cached)
        for call, kept in calls_of(cached):
            # Not by the call: the function may have made another result.
            there = (*path, Kept(call))
            self._note(_reference(kept), cached, "", module, there)

    def _is_new(self, value: Any, *more: Any) -> bool:
        key = (id(value), *more)
        if key in self._seen or len(self._seen) >= _MOST_VISITS:
            return False
        self._seen[key] = value
        return True

    def _items(self, value: Any, module: str, path: Path) -> None:
        items, is_object = _keyed_items(value), is_users_object(value)
        held = _reference(value) if is_object else lambda: value
        base: Any = next(kind for kind in _BASES if isinstance(value, kind))
        is_large = base.__len__(value) > MOST_ITEMS
        if is_large and path[:1] in ((), (SELF,)):
            del items[_MOST_OWN_ITEMS:]
        any_key = bool(path) and is_by_value(module, path)
        step = PartKey if is_large else ItemKey
        for key, item in items:
            there = (*path, step(key))
            if path and (any_key or is_key(key)):
                read = functools.partial(_read, held, base.__getitem__, key)
                self._note(read, value, "", module, there)
            else:
                self.value(item)
            if not _is_plain_key(key):
                # Workers cannot be told of a key of a module's.
                self.value(key, module, there if path[:1] == (SELF,) else ())

    def _object(self, value: Any, module: str, path: Path) -> None:
        if isinstance(value, _BASES) and not isinstance(value, np.ndarray):
            place = _Waiting(value, module, path, self._kind)
            self._containers.append(place)
        if not is_users_object(value):
            for name, part in _first_parts(value):
                is_named = bool(path and name) and not _is_librarys_own(part)
                self.value(part, module, (*path, name) * is_named)
            return
        self._class(type(value))
        attributes, held = attributes_of(value), _reference(value)
        is_ours = type(value).__module__.startswith("keras_fastdata.")
        given = _given_to(attributes)
        if path and path != (SELF,) and has_attributes(value) and not is_ours:
            self._note_size(attributes, path)
        for name in _names_in(value, attributes):
            if path and (not is_ours or name in given):
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

    def _class(self, kind: type) -> None:
        metaclass: type = type(kind)
        for base in (*kind.__mro__, *metaclass.__mro__):
            if is_users_class(base) and self._is_new(base):
                outer, self._kind = self._kind, base
                self._own_names(base, kind is type(self._dataset))
                self._kind = outer

    def _own_names(self, kind: type, is_dataset: bool) -> None:
        """Collects the variables of one class."""
        self._note_size(vars(kind))
        # With `exec`, the globals of its code may have no name.
        home = "" if kind.__module__ == "builtins" else kind.__module__
        top = tuple(kind.__qualname__.split("."))
        by_value = is_by_value(home, top)
        # Else another class has its name, as with `dataclass(slots=True)`.
        if is_named := by_value or is_importable(kind):
            read = functools.partial(getattr, kind, "__bases__")
            self._note(read, kind, "__bases__", home, (*top, "__bases__"))
        if isinstance(kind, abc.ABCMeta) and by_value:
            # A number that grows when any class is registered.
            self._add(Variable(abc.get_cache_token, (), home, True))
        for name, value in list(vars(kind).items()):
            if name in _RUN_HERE and is_dataset:
                continue
            if is_pythons(name, value) or not is_named:
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
            for part in _held_by(function):
                self.value(part)
            return
        if path != own or is_by_value(home, own) or is_importable(function):
            self._parts_of_function(function, module, path)
        attributes = function.__dict__
        self._note_size(attributes)
        for name in sorted(attributes.keys() - {"__wrapped__"}):
            read = functools.partial(attributes.__getitem__, name)
            self._note(read, function, name, module, (*path, name))
        code, package = function.__code__, variables.get("__package__")
        names, every = names_of(code, package), names_in(code)
        self._held.note(code, variables)
        self.assignments.note(function, names, self._kind)
        for read_there in self._process.of(code, variables):
            self._add(read_there)
        for name in names.variables:
            self._global(variables, name, home)
            self._module(variables.get(name), every)
        for name, parts in names.imported:
            self._module(sys.modules.get(name), every)
            self._imports(name, parts)

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
            read = functools.partial(getattr, function, name)
            self._add(Variable(read, (*path, name), module, by_value))
            self.value(read(), module, (*path, name))

    def _module(self, module: Any, names: frozenset[str]) -> None:
        """Collects a module's variables whose names are in `names`."""
        is_module = isinstance(module, types.ModuleType)
        if not is_module or not self._is_new(module, names):
            return
        if not is_users_module(module):
            for part, name in set_in_library(module, names):
                self._global(vars(part), name, part.__name__)
            return
        self._class(type(module))  # it may be the user's, with properties
        variables = vars(module)
        read = functools.partial(count_among, names, module)
        self._add(Variable(read, (), "", True))
        for name in names_known(module, names):
            self._global(variables, name, module.__name__)
            self._module(variables.get(name), names)
        if "__getattr__" in variables:  # it may import parts of a package
            self._imports(module.__name__, names - variables.keys())
            for part in modules_behind(module):
                self._module(part, names)

    def _global(self, variables: dict[str, Any], name: str, home: str) -> None:
        read = functools.partial(variables.__getitem__, name)
        self._note(read, variables, name, home, (name,))

    def _imports(self, module: str, parts: Iterable[str]) -> None:
        """Collects what modules use that builds or the program may import."""
        for found in sources_to_import(module, parts, self._imported):
            read = functools.partial(sys.modules.__contains__, found.name)
            self._add(Variable(read, (), "", True, is_edited=True))
            for name, _ in found.imports:
                self._module(sys.modules.get(name), names_in(found.code))

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
        if place in self._places:
            return
        self._places.add(place)
        variable = Variable(read, path, module, is_by_value(module, path))
        self._add(variable, owner, name)
        value = variable.value
        function = value.__func__ if isinstance(value, _METHODS) else value
        if type(function) is types.FunctionType and _names_functions(owner):
            self.assignments.name(function, name)
            self._function(function, module, path)
        # The function that names a module uses it under its names alone.
        elif len(path) > 1 or not isinstance(value, types.ModuleType):
            self.value(value, module, path)

    def _add(
        self, variable: Variable, owner: Any = None, name: str = ""
    ) -> None:
        self._found.append(_FoundVariable(variable, owner, name))


def _completed(found: _FoundVariable, assigned: Assignments) -> Variable:
    """Returns a variable with what is known of assignments."""
    variable, owner, name = found
    return dataclasses.replace(
        variable,
        is_assigned=variable.is_assigned or assigned.is_assigned(owner, name),
        is_edited=variable.is_edited
        or assigned.is_edited(owner, name, variable.value),
    )


def _held_by(function: types.FunctionType) -> Iterator[Any]:
    """Yields the outer variables and the default values of a function."""
    for cell in cells_of(function).values():
        with contextlib.suppress(ValueError):  # not assigned yet
            yield cell.cell_contents
    yield from (function.__defaults__, function.__kwdefaults__)


def _first_parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the attributes of an object of a library, with their names.

    And the items of a set, and what an object of C refers to, with "" as names.
    """
    attributes = attributes_of(value)
    for name in first_items(attributes):
        yield str(name), attributes.get(name)
    for item in (*_items_of_set(value), *_held_by_c(value)):
        yield "", item


def _held_by_c(value: Any) -> list[Any]:
    """Returns the functions and the user's objects in an object of C."""
    kinds = (types.FunctionType, types.MethodType)
    return [
        part
        for part in gc.get_referents(value)
        if type(part) in kinds or is_users_class(type(part))
    ]


def _items_of_set(value: Any) -> list[Any]:
    return items_of(value) if isinstance(value, (set, frozenset)) else []


def _may_hold_code(value: Any) -> bool:
    """Returns whether an object may hold the user's functions or objects."""
    home = str(type(value).__module__).partition(".")[0]
    if home not in sys.stdlib_module_names and home != "keras_fastdata":
        return True
    if isinstance(value, _BASES):  # such as an `OrderedDict`
        return not _holds_leaves(value)
    return any(not isinstance(item, _LEAVES) for item in _items_of_set(value))


def _is_librarys_own(part: Any) -> bool:
    """Returns whether a library keeps none of the user's objects in a part."""
    if type(part) not in CONTAINERS:
        return False
    items = first_items(part.values() if isinstance(part, dict) else part)
    for item in list(items):
        items += item if type(item) is tuple else ()
    return not any(map(is_users_object, items))


def _search_in(
    search: Callable[[Any, str, Path], None],
    value: Any,
    module: str,
    path: Path,
) -> None:
    try:
        for part in _hidden_in(value):
            search(part, module, ())  # only for its code
        search(value, module, path)
    except Exception as error:
        raise_of_handler(error)
        # Objects of the user's may refuse to be looked into.
        _log.debug("State outside of a dataset:", exc_info=True)


def _hidden_in(value: Any) -> list[Any]:
    """Returns what a weak reference or container of these refers to.

    And what is in an object that claims to be a function, as a decorator of
    `wrapt` makes one.
    """
    is_wrapper = isinstance(value, types.FunctionType)
    if is_wrapper and type(value) is not types.FunctionType:
        return _held_by_c(value)
    if isinstance(value, weakref.ref):
        return [value()]
    if isinstance(value, _WEAK):
        return [*value.keys(), *value.values()]
    return []


def _keyed_items(container: Any) -> list[tuple[Any, Any]]:
    """Returns the first items of a container, with their keys or indices."""
    is_array = isinstance(container, np.ndarray)
    items = (first_items if is_array else items_of)(container)
    is_mapping = isinstance(container, _MAPPINGS)
    return items if is_mapping else [*enumerate(items)]


def _holds_leaves(container: Any) -> bool:
    """Returns whether a container holds numbers, texts and the like alone."""
    return all(
        isinstance(item, _LEAVES)
        and not isinstance(item, np.ndarray)
        and not _has_users_attributes(item)
        and _is_plain_key(key)
        for key, item in _keyed_items(container)
    )


def _is_plain_key(key: Any) -> bool:
    """Returns whether a key has no part to look at, nor any object in it.

    Classes and members of enums are not plain.
    """
    if type(key) is tuple:
        return all(map(_is_plain_key, key))
    is_data = isinstance(key, _LEAVES) and not _has_users_attributes(key)
    return is_data and not isinstance(key, CODE)


def _has_users_attributes(value: Any) -> bool:
    """Returns whether an object of a user's class has attributes of its own."""
    is_open = has_attributes(value) and not isinstance(value, enum.Enum)
    return is_open and is_users_object(value)


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


def _names_in(value: Any, attributes: dict[str, Any]) -> list[str]:
    """Returns the names of an object's attributes, but for private ones.

    Those are of this package, or containers in which a layer of Keras keeps
    what it collects, such as its losses.
    """
    names = lasting_names(value, attributes)
    kind: Any = type(value)
    keras = loaded("keras") if "keras" in packages_of(kind) else None
    private = keras_layers.collected_by(keras, value) if keras else ()
    return [name for name in names if name not in private]


def _given_to(attributes: dict[str, Any]) -> set[str]:
    """Returns the names of the attributes that a dataset was given.

    Builds change the private attributes of this package's datasets.
    """
    if PRIVATE not in attributes:
        return set()
    return {name for name in attributes if not name.startswith("_")}


def _names_functions(owner: Any) -> bool:
    """Returns whether an object is a class, or the variables of a module."""
    is_module = isinstance(owner, dict) and "__name__" in owner
    return is_module or isinstance(owner, type)


def _attribute(value: Any, name: str) -> Any:
    return attributes_of(value)[name]


def _count_of(names: Mapping[str, Any]) -> int:
    """Returns the number of names, to show additions.

    A name that is added may hide a variable of a class. Python itself may add
    names such as `__slotnames__` at any time.
    """
    items = list(names.items())
    return sum(not is_pythons(name, value) for name, value in items)
