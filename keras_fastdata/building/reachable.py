"""Finds the objects that a dataset refers to, directly or indirectly.

The search goes from the dataset's attributes through objects, slots, dicts,
lists, partials, bound methods and closures. Then it goes through the variables
that the user's classes and functions name. Each time, what has a name comes
before the items of containers, and these come level by level: a large list
hides nothing but its own parts. It evaluates no property, and does not search
large arrays.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import io
import itertools
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from keras_fastdata._call_stack import ignoring_errors
from keras_fastdata._modules import (
    imported_names,
    is_users_class,
    is_users_code,
    is_users_module,
    modules_behind,
    names_in,
)
from keras_fastdata.building.attributes import (
    attributes_of,
    first_items,
    is_gone,
    items_of,
    lasting_names,
    slot_values,
)
from keras_fastdata.building.code_names import modules_passed_on
from keras_fastdata.building.weak_references import is_weak, referent_of

_MOST_VISITED = 20_000  # objects of the dataset, and as many outside
_MOST_LOOKED_INTO = 100  # containers, also if they hold data alone
_MOST_DATA = 1_000  # objects in a container that holds data alone
_MOST_EXAMINED = 1_000_000  # objects in all containers that may hold data alone
_CONTAINERS = (
    *(dict, list, tuple, set, frozenset, collections.deque, np.ndarray),
)
_PLAIN_KEYS = {str, int, bytes, float, bool, type(None)}


def reaches(dataset: Any, part: Any) -> bool:
    """Returns whether a dataset refers to `part`, directly or indirectly."""
    return any(step.value is part for step in reachable(dataset))


class ReachStep(NamedTuple):
    """An object that the search found, with its path from the dataset."""

    name: str  # its part of the path
    value: Any  # the object
    before: Any  # the step before it; `None` for the dataset
    is_outside: bool  # whether the way to it leads through a global or a class
    crowd: int  # the number of items of the largest container on the way, or 0

    def way(self) -> list[ReachStep]:
        """Returns this step and all previous steps, from last to first."""
        found = [self]
        while found[-1].before is not None:
            found.append(found[-1].before)
        return found


def _num_items(value: Any) -> int:
    """Returns the number of items of a container, or 0 for other objects.

    Runs no method of the user's.
    """
    if isinstance(value, np.ndarray):
        return int(np.ndarray.size.__get__(value))
    bases: Any = _CONTAINERS
    for base in bases:
        if isinstance(value, base):
            return int(base.__len__(value))
    return 0


def reachable(
    dataset: Any, unset: list[tuple[Any, str]] | None = None
) -> Iterator[ReachStep]:
    """Yields the objects that a dataset refers to; global objects come last.

    Adds the variables and class attributes that are `None` to `unset`: each
    as a mapping, and its name there.
    """
    inside, outside = _WaitingSteps(), _WaitingSteps()
    seen = {id(dataset)}
    opened: set[tuple[int, bool]] = set()  # classes

    def meet(
        name: str, part: Any, before: ReachStep | None, is_out: bool
    ) -> None:
        if type(part) in _LEAF_TYPES or id(part) in seen:
            return
        seen.add(id(part))
        if is_gone(part):
            return
        if isinstance(part, types.ModuleType) and not is_users_module(part):
            return
        if not isinstance(part, _LEAVES) and not _is_leaf(type(part)):
            crowd = 0 if before is None else before.crowd
            crowd = max(crowd, _num_items(part))
            step = ReachStep(name, part, before, is_out, crowd)
            (outside if is_out else inside).add(step)

    def open_up(value: Any, step: ReachStep | None) -> None:
        is_out = step is not None and step.is_outside
        for name, part in parts_of(value):
            meet(name, part, step, is_out)
        kind = value if isinstance(value, type) else type(value)
        if not isinstance(value, (types.FunctionType, types.ModuleType)):
            if (id(kind), value is dataset) in opened:
                return  # all objects of a class name the same
            opened.add((id(kind), value is dataset))
        # The path of a global must not depend on the function that names it.
        for name, part, home, key in _named_by(value, value is dataset):
            if part is None and unset is not None and key != "__doc__":
                unset.append((home, key))
            meet(name, part, None, True)

    open_up(dataset, None)
    imgaug = sys.modules.get("imgaug.random")
    meet("imgaug", getattr(imgaug, "GLOBAL_RNG", None), None, True)
    for waiting in (inside, outside):
        for step in itertools.islice(waiting, _MOST_VISITED):
            yield step
            open_up(step.value, step)  # a generator may hold another one


class _WaitingSteps:
    """Yields the steps that were added, those of containers last.

    After the first containers, those that hold data alone are left out.
    """

    def __init__(self) -> None:
        self._named: collections.deque[ReachStep] = collections.deque()
        self._containers: collections.deque[ReachStep] = collections.deque()
        self._kinds: set[type] = set()  # of the objects that were added
        self._left = _MOST_EXAMINED  # objects in containers

    def add(self, step: ReachStep) -> None:
        if isinstance(step.value, _CONTAINERS):
            self._containers.append(step)
        else:
            self._named.append(step)
            self._kinds.add(type(step.value))

    def __iter__(self) -> Iterator[ReachStep]:
        count = 0
        while self._named or self._containers:
            if self._named:
                yield self._named.popleft()
                continue
            step = self._containers.popleft()
            count += 1
            is_first = count <= _MOST_LOOKED_INTO
            if is_first or not self._holds_data(step.value):
                yield step

    def _holds_data(self, container: Any) -> bool:
        """Returns whether a container has only numbers, texts and the like.

        In containers within as well, and in objects of the user's classes among
        those that were added, whose code was searched. Returns False if there
        are too many to examine.
        """
        waiting = [container]
        for value in waiting:  # grows
            kind: Any = type(value)
            if kind is dict:
                items = [*dict.keys(value), *dict.values(value)]
            elif kind in (list, tuple, set, frozenset):
                items = first_items(value)
            elif self._is_searched(kind):
                items = [part for _, part in parts_of(value)]
            else:
                break
            waiting += [item for item in items if type(item) not in _LEAF_TYPES]
            if len(waiting) > min(_MOST_DATA, self._left):
                break
        else:
            self._left -= len(waiting)
            return True
        self._left -= len(waiting)
        return False

    def _is_searched(self, kind: type) -> bool:
        is_known = kind in self._kinds and is_users_class(kind)
        return is_known and not _may_seed(kind)


@functools.lru_cache(maxsize=1024)
def _may_seed(kind: type) -> bool:
    """Returns whether a class may have a method that seeds its objects."""
    return any("seed" in name for base in kind.__mro__ for name in vars(base))


def parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields (name, object) for each object that `value` contains."""
    items: Any = ()
    if isinstance(value, dict):
        for number, (key, item) in enumerate(items_of(value)):
            name = _key_name(key, number)
            if type(key) not in _PLAIN_KEYS:
                yield f"{{{name}}}", key
            yield f"[{name}]", item
    elif isinstance(value, (list, tuple, collections.deque)):
        items = items_of(value)
    elif isinstance(value, (set, frozenset)):
        # The order of a set depends on addresses.
        for item in sorted(items_of(value), key=_class_name):
            yield "{}", item
    elif isinstance(value, np.ndarray):
        if value.dtype == object:
            items = first_items(value.flat)
    elif isinstance(value, types.FunctionType):
        yield ".__defaults__", value.__defaults__
        yield ".__kwdefaults__", value.__kwdefaults__
        names = value.__code__.co_freevars
        for name, cell in zip(names, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not assigned yet
                yield f" -> {name}", cell.cell_contents
    elif isinstance(value, functools.partial):
        yield ".func", value.func
        yield ".args", value.args
        yield ".keywords", value.keywords
    elif isinstance(value, types.MethodType):
        yield ".__func__", value.__func__
        yield "", value.__self__
    elif isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType)):
        yield ".__self__", value.__self__
    elif is_weak(value):
        if (referent := referent_of(value)) is not None:
            yield "()", referent
    elif isinstance(value, _OF_PYTHON):
        # There is no other access to everything that these keep.
        items = first_items(gc.get_referents(value))
    for number, item in enumerate(items):
        yield f"[{number}]", item
    if isinstance(value, (type, types.ModuleType)):
        return
    # Sorted: the order of attributes may differ in a worker.
    attributes = attributes_of(value)
    found = lasting_names(value, attributes)
    for name in sorted(name for name in found if isinstance(name, str)):
        yield f".{name}", attributes.get(name)
    for name, part in slot_values(value):
        yield f".{name}", part


def _key_name(key: Any, number: int) -> str:
    """Names a dict key in the same way in all processes."""
    with ignoring_errors():
        name = repr(key)
        if " at 0x" not in name:
            return name[:100]
    return f"{type(key).__qualname__} {number}"


def _class_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _named_by(
    value: Any, is_dataset: bool
) -> Iterator[tuple[str, Any, Any, str]]:
    """Yields what a user's class, function or module refers to by name.

    Each with its path, and with the variables that have it, and its name there.
    """
    if isinstance(value, types.FunctionType):
        if is_users_code(str(value.__globals__.get("__name__"))):
            names, around = names_in(value.__code__), value.__globals__
            yield from _globals_of(around, names)
            package = around.get("__package__")
            for name in imported_names(value.__code__, package):
                if name in sys.modules:
                    found = {name: sys.modules[name]}
                    yield from _globals_of(found, names | {name})
            for module in modules_passed_on(value.__code__, around):
                name = module.__name__
                yield name, module, sys.modules, name
        return
    if isinstance(value, types.ModuleType):
        own = first_items(vars(value))
        names = frozenset(name for name in own if not name.startswith("__"))
        yield from _globals_of(vars(value), names)
        return
    kind = value if isinstance(value, type) else type(value)
    metaclass: type = type(kind)
    for base in (*kind.__mro__, *metaclass.__mro__):
        if is_users_class(base):
            for name in sorted(vars(base)):
                # A worker does not construct the dataset.
                is_run = not is_dataset or name not in ("__init__", "__new__")
                if is_run and name != "__dict__":
                    part = vars(base).get(name)
                    inner = _function_in(part)
                    path = f"{base.__qualname__}.{name}"
                    if isinstance(part, property) and part.fset is not None:
                        yield f"{path}.setter", part.fset, vars(base), name
                    part = part if inner is None else inner
                    yield path, part, vars(base), name


def _globals_of(
    found: dict[str, Any], names: frozenset[str]
) -> Iterator[tuple[str, Any, Any, str]]:
    for name in sorted(names & found.keys()):
        part = found.get(name)
        if not isinstance(part, types.ModuleType):
            yield f"{found.get('__name__')}:{name}", part, found, name
        elif is_users_module(part):
            # `__getattr__` gives the names that are missing.
            wanted = names | {"__getattr__"}
            for each in (part, *modules_behind(part)):
                home = vars(each)
                for inner in sorted(wanted & home.keys()):
                    yield f"{each.__name__}:{inner}", home[inner], home, inner


def may_refer(value: Any) -> bool:
    """Returns whether an object is or may refer to a random generator."""
    return (
        type(value) not in _LEAF_TYPES
        and not is_gone(value)
        and not isinstance(value, (*_LEAVES, np.ndarray))
        and not _is_leaf(type(value))
    )


def _is_leaf(kind: type) -> bool:
    """Returns whether the search skips the instances of a class."""
    if kind.__name__ in ("Tensor", "Parameter"):
        return kind.__module__.startswith("torch")
    if kind.__name__ == "RngPool":  # Grain gives each element a seed
        return kind.__module__.startswith("grain.")
    return kind.__module__.partition(".")[0] in _OPAQUE


# Packages whose objects hold no random generators: arrays, tables and the like.
_OPAQUE = {
    *("tensorflow", "jax", "jaxlib", "pandas", "polars", "pyarrow", "h5py"),
    # File systems and connections, which threads of their own change.
    *(
        "fsspec",
        "s3fs",
        "gcsfs",
        "aiobotocore",
        "botocore",
        "aiohttp",
        "asyncio",
    ),
}
_LEAF_TYPES = {
    *(str, bytes, bytearray, int, float, complex, bool),
    *(type(None), type(...), slice, range),
}
# Objects of Python itself that keep others.
_OF_PYTHON = (
    functools._lru_cache_wrapper,
    types.MappingProxyType,
    *(property, staticmethod, classmethod),
    *(enumerate, filter, map, reversed, zip),
    *(kind for kind in vars(itertools).values() if isinstance(kind, type)),
)
_LEAVES = (
    types.CodeType,
    types.GeneratorType,
    np.generic,
    np.dtype,
    memoryview,
    io.IOBase,
    threading.Thread,
)


def _function_in(part: Any) -> Any:
    """Returns the function in a method or descriptor; `None` if none is there.

    Runs no `__getattr__` of the user's, which may raise any exception.
    """
    held = attributes_of(part)
    if "func" in held:
        return held["func"]
    if isinstance(part, property):
        return part.fget
    if isinstance(part, (staticmethod, classmethod, types.MethodType)):
        return part.__func__
    if isinstance(part, (functools.partial, functools.partialmethod)):
        return part.func
    return None
