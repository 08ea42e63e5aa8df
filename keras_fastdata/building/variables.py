"""Variables that code refers to, and the paths that lead to them."""

from __future__ import annotations

import argparse
import collections
import configparser
import dataclasses
import enum
import functools
import gc
import threading
import types
from collections.abc import Callable
from typing import Any, NamedTuple, get_origin

import numpy as np

from keras_fastdata._modules import is_users_class
from keras_fastdata.building.weak_references import is_weak, referent_of

MOST_ITEMS = 1_000  # of a container whose items are variables
CONTAINERS = (list, tuple, dict, collections.deque)
NAMESPACES = (argparse.Namespace, types.SimpleNamespace)
# Objects of Python's whose attributes are variables as well.
OPEN = (
    *NAMESPACES,
    *(collections.UserDict, collections.UserList, collections.ChainMap),
    *(threading.Event, configparser.RawConfigParser),
)
CODE = (enum.Enum, type)
# Objects of C. Nothing else tells what they keep.
_OF_C: tuple[type, ...] = (
    type({}.keys()),
    type({}.values()),
    type({}.items()),
    np.ufunc,  # that of `np.frompyfunc` has a function
    type(functools.cmp_to_key(len)),  # type: ignore[arg-type]
)
_NO_OWNER = (types.ModuleType, types.NoneType, type)  # of functions of C
_KEYS = (str, bytes, int, float, type(None), *CODE)

SELF = "self"  # begins the path to what the dataset itself holds
ABSENT = object()  # the value of a variable that has none


class ItemKey(NamedTuple):
    """The key or the index of an item in a container."""

    key: Any


@dataclasses.dataclass(frozen=True)
class PartKey:
    """The key or the index of an item in a container that is sent whole."""

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


Step = str | ItemKey | PartKey | CellName | Inside | Kept
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
        return type(value) in CONTAINERS and len(value) <= MOST_ITEMS

    @property
    def is_kept(self) -> bool:
        """Whether it belongs to the results that a cached function keeps."""
        return any(isinstance(step, Kept) for step in self.path)

    @property
    def is_told(self) -> bool:
        """Whether workers are told of it by itself, if at all."""
        return not any(isinstance(step, PartKey) for step in self.path)

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
        if isinstance(step, (ItemKey, PartKey)):
            name += f"[{step.key!r}]"
        elif isinstance(step, Kept):
            name += "()" if step.call == () else "(...)"
        elif not isinstance(step, Inside):
            name += f".{step if isinstance(step, str) else step.name}"
    return name


def last_name(path: Path) -> str:
    """Returns the name with which a path ends; "" if it ends otherwise."""
    last = path[-1] if path else ""
    return last if isinstance(last, str) else ""


def is_key(value: Any) -> bool:
    """Returns whether a path may have an item with this key."""
    if type(value) is tuple:
        return all(map(is_key, value))
    return isinstance(value, _KEYS)


def is_users_object(value: Any) -> bool:
    """Returns whether the user or this package defines an object's class.

    Namespaces also count, whose attributes are variables as well.
    """
    if is_weak(value):
        return False
    kind = type(value)
    if isinstance(value, OPEN):
        return True
    return is_users_class(kind) or kind.__module__.startswith("keras_fastdata.")


def part_at(value: Any, number: int) -> Any:
    """Returns the object that the step `Inside(number)` leads to."""
    return parts_of(value)[number]


def parts_of(value: Any) -> list[Any]:
    """Returns the objects inside a wrapper such as `partial` or `property`.

    Of a container, these are not its items.
    """
    if is_weak(value):
        return [part for part in [referent_of(value)] if part is not None]
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType)):
        owner = value.__self__
        return [] if isinstance(owner, _NO_OWNER) else [owner]
    if isinstance(value, functools.cached_property):
        return [value.func]
    if isinstance(value, collections.defaultdict):
        return [value.default_factory]
    if isinstance(value, _OF_C):
        # The `mapping` of a view is another object each time.
        return gc.get_referents(value)
    if isinstance(value, (functools.partial, functools.partialmethod)):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, functools._lru_cache_wrapper):
        return [value.__wrapped__]
    if isinstance(value, dataclasses.Field):
        return [value.metadata]
    if (generic := get_origin(value)) is not None:  # of `Box[int]`
        return [generic, *getattr(value, "__metadata__", ())]
    return []
