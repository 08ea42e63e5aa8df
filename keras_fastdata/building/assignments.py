"""Collects what the code of a dataset assigns and edits.

Such variables differ between processes, and between two moments of a build: a
table that is made when it is first needed, a cache, a counter.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import cloudpickle

from keras_fastdata._modules import (
    has_no_module,
    has_with,
    is_main,
    is_users_class,
    names_in,
)
from keras_fastdata.building.code_names import CodeNames, Root, Target

# Methods that run where a class is called.
_MAKING = ("__new__", "__init__", "__post_init__", "__attrs_post_init__")
# Special methods that programs use to change an object.
_SET_ITEM = {"__setitem__", "__delitem__"}
_SET_ATTRIBUTE = {"__setattr__", "__delattr__", "__set__", "__delete__"}
_IN_PLACE = {
    f"__i{operator}__"
    for operator in (
        *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow"),
        *("and", "or", "xor", "lshift", "rshift"),
    )
}
_WITH = {"__enter__", "__exit__", "__aenter__", "__aexit__"}
_CHANGING = {"__setstate__", *_SET_ITEM, *_SET_ATTRIBUTE, *_IN_PLACE, *_WITH}
# Those that run where a class is made, as imports do, but not builds.
_MAKING_CLASS = {"__init_subclass__", "__set_name__", "__prepare__"}


class _FoundFunction(NamedTuple):
    """A function that was found."""

    function: types.FunctionType
    names: CodeNames
    kind: type | None  # its class, if it is a method


class Assignments:
    """Collects what functions assign and edit that builds may call.

    Builds call functions that a container holds, special methods, methods that
    replace those of a library's class, and what is named by code that builds
    run. Others are for the program: a method `set_strength`, or `__init__` of a
    class that builds do not name; and special methods that change an object,
    such as `__setitem__`, unless code that builds run has such a statement.

    Args:
        dataset: The `self` of the methods of its class.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._functions: list[_FoundFunction] = []
        # The names of functions in their modules, classes and objects, by id;
        # "" if something else holds a function.
        self._known_as: dict[int, set[str]] = {}
        self._variables: set[tuple[int, str]] = set()  # by the owner's id
        self._containers: set[int] = set()  # ids
        # What methods assign of their class and their object, by class, and
        # the containers of the object that they edit.
        self._of_methods: dict[type, set[Target]] = {}

    def name(self, function: types.FunctionType, name: str) -> None:
        """Notes the name of a function in its module or class.

        It may also be that of an attribute, and is "" if a container or the
        like holds the function.
        """
        self._known_as.setdefault(id(function), set()).add(name)

    def note(
        self,
        function: types.FunctionType,
        names: CodeNames,
        kind: type | None,
    ) -> None:
        """Notes that a function was found.

        Args:
            function: The function.
            names: The names that the function uses.
            kind: Its class, if it is a method.
        """
        self._functions.append(_FoundFunction(function, names, kind))

    def follow(self) -> None:
        """Follows the functions that builds may call. To be called once."""
        used: set[str] = set()
        waiting, left = self._functions, []
        while waiting:
            for found in waiting:
                if self._runs(found, used):
                    used |= names_in(found.function.__code__)
                    used |= _changing_methods(found)
                    self._take(found)
                else:
                    left.append(found)
            if len(left) == len(waiting):
                break
            waiting, left = left, []

    def _runs(self, found: _FoundFunction, used: set[str]) -> bool:
        """Returns whether builds may call a function, given the names used."""
        kind, function = found.kind, found.function
        bases = () if kind is None else kind.__mro__
        if kind is not None and function.__name__ in _MAKING:
            return any(one.__name__ in used for one in _with_subclasses(kind))
        if function.__name__ in _MAKING_CLASS:
            return False
        return any(
            name == ""
            or name in used
            or (is_special(name) and name not in _CHANGING)
            or any(name in vars(b) for b in bases if not is_users_class(b))
            for name in self._known_as.get(id(function), {""})
        )

    def _take(self, found: _FoundFunction) -> None:
        """Collects what a function assigns and edits."""
        function, names, kind = found
        for target in names.assigned:
            of_method = target.root in (Root.SELF, Root.CLASS)
            # No batch depends on what an object has before `__init__`.
            if of_method and kind and function.__name__ != "__init__":
                self._of_methods.setdefault(kind, set()).add(target)
            if target.root is Root.SELF and len(target.names) == 1:
                continue
            owner = self._owner_of(target, function, kind)
            if owner is not None:
                self._variables.add((id(owner), target.names[-1]))
        for target in names.edited:
            if (
                target.root is Root.SELF
                and kind is not None
                and not isinstance(self._dataset, kind)
            ):
                self._of_methods.setdefault(kind, set()).add(target)
            container = self._held_at(target, function, kind)
            if not isinstance(container, (types.NoneType, types.ModuleType)):
                self._containers.add(id(container))

    def is_assigned(self, owner: Any, name: str) -> bool:
        """Returns whether code assigns a variable.

        Args:
            owner: The object that has it: the globals of a module, a cell, a
                class or an object.
            name: The variable's name.
        """
        of_class = isinstance(owner, type) and (
            self._is_of_methods(owner, Target(Root.CLASS, (name,)))
        )
        return of_class or (id(owner), name) in self._variables

    def is_edited(self, owner: Any, name: str, value: Any) -> bool:
        """Returns whether methods assign or edit it, or code edits `value`.

        The arguments are those of `is_assigned`, and the variable's value.
        """
        of_self = self._is_of_methods(type(owner), Target(Root.SELF, (name,)))
        return of_self or id(value) in self._containers

    def _owner_of(
        self, target: Target, function: types.FunctionType, kind: type | None
    ) -> Any:
        """Returns what has a variable: a dict, a cell, a class or an object."""
        *owners, name = target.names or ("",)
        if target.root is Root.OUTER and not owners:
            return cells_of(function).get(name)
        held = Target(target.root, tuple(owners))
        owner = self._held_at(held, function, kind)
        return vars(owner) if isinstance(owner, types.ModuleType) else owner

    def _held_at(
        self, target: Target, function: types.FunctionType, kind: type | None
    ) -> Any:
        """Returns the object that code names, or `None` if it is not known."""
        names = target.names
        owner: Any = None
        if target.root is Root.GLOBAL:
            owner = function.__globals__
        elif target.root is Root.OUTER:
            with contextlib.suppress(KeyError, ValueError):  # not assigned yet
                owner = cells_of(function)[names[0]].cell_contents
            names = names[1:]
        elif target.root is Root.SELF and isinstance(self._dataset, kind or ()):
            owner = self._dataset
        elif target.root is Root.CLASS or target.root is Root.SELF:
            owner = kind
        for name in names:
            if owner is None:
                break
            owner = _part_of(owner, name)
        return owner

    def _is_of_methods(self, kind: type, target: Target) -> bool:
        return any(
            target in targets and (k in kind.__mro__ or kind in k.__mro__)
            for k, targets in self._of_methods.items()
        )


def is_special(name: str) -> bool:
    """Returns whether a name is one of Python's, such as `__len__`."""
    return name.startswith("__") and name.endswith("__")


def is_pythons(name: str, value: Any) -> bool:
    """Returns whether Python itself could have set a class attribute."""
    is_function = isinstance(
        value, (types.FunctionType, staticmethod, classmethod)
    )
    return is_special(name) and not is_function


def _changing_methods(found: _FoundFunction) -> set[str]:
    """Returns the special methods that the statements of a function may call.

    Items that are set in a local variable do not count: they are in the batch.
    """
    called: set[str] = set()
    names = found.names
    if names.edited:
        called |= _SET_ITEM
    if names.assigned:
        called |= _SET_ATTRIBUTE
    if names.edited or names.assigned:
        called |= _IN_PLACE
    if has_with(found.function.__code__):
        called |= _WITH
    return called


def _with_subclasses(kind: type) -> Iterator[type]:
    """Yields a class and all classes that are derived from it."""
    yield kind
    found: list[type] = type.__subclasses__(kind)
    for derived in found:
        yield from _with_subclasses(derived)


def is_by_value(module: str, path: tuple[Any, ...] = ()) -> bool:
    """Returns whether cloudpickle sends what has a path in a module."""
    return (
        is_main(module)
        or "<locals>" in path
        or has_no_module(module)
        or module in cloudpickle.list_registry_pickle_by_value()
    )


def cells_of(function: types.FunctionType) -> dict[str, types.CellType]:
    """Returns the variables of outer functions that a function uses."""
    free, cells = function.__code__.co_freevars, function.__closure__ or ()
    return dict(zip(free, cells, strict=True))


def _part_of(owner: Any, name: str) -> Any:
    """Returns a variable or an attribute, or `None` if there is none."""
    if isinstance(owner, types.ModuleType):
        owner = vars(owner)
    if isinstance(owner, dict):
        return owner.get(name)
    return inspect.getattr_static(owner, name, None)
