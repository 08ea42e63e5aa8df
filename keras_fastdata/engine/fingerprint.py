"""Computes the fingerprint that names a dataset's cache directory.

A fingerprint covers

- what the dataset's attributes hold, as it is pickled;
- the code of the dataset's class, and of each class and function among what
  it holds, unless they are of installed packages: methods, class attributes,
  defaults, variables around a function; and, of the global names in that code,
  also of those in modules, the plain values, functions and classes, and the
  classes of objects and the functions within them;
- the sources of the user's modules that this code imports itself, in which it
  may look for a name, or that what the dataset holds refers to, and of those
  that these import;
- plain values and arrays in global variables, and within global objects, that
  this code names (see outside_values.py);
- where such an object cannot be told from others, the source of the module
  whose code names the object, and of its imports;
- size and time of every file whose whole path is a `str`, `bytes` or path
  object anywhere in these.

It does not cover what is in folders, files whose path is put together from
parts, other global objects, and installed packages: hence `cache_version`.
"""

from __future__ import annotations

import array
import collections
import contextlib
import datetime
import enum
import functools
import gc
import inspect
import io
import logging
import numbers
import operator
import os
import pathlib
import pickle
import re
import stat
import sys
import threading
import types
import uuid
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np

from keras_fastdata._modules import (
    imports_in,
    is_main,
    is_users_class,
    names_in,
)
from keras_fastdata._unimported import FoundSource, sources_of
from keras_fastdata.building import interface
from keras_fastdata.building.attributes import (
    attributes_of,
    first_items,
    slot_values,
)
from keras_fastdata.building.code_names import modules_passed_on
from keras_fastdata.building.generator_wrappers import wrapper_of
from keras_fastdata.building.interface import Dataset
from keras_fastdata.building.seeding import PRIVATE
from keras_fastdata.building.variables import OPEN
from keras_fastdata.engine.cache import Cache, DiskCache, MemoryCache
from keras_fastdata.engine.library_objects import CODE_TYPES, content_of
from keras_fastdata.engine.settings import Settings
from keras_fastdata.engine.stable_pickle import Found, is_installed, pickle_of
from keras_fastdata.engine.state_dict import hash_of
from keras_fastdata.errors import LoaderError
from keras_fastdata.memory import class_refs

_LONGEST = 4096  # characters of a path
_MOST_OBJECTS = 1000  # within a global object
_DATA = (
    *(numbers.Number, str, bytes, type(None), np.ndarray, np.generic, np.dtype),
    *(tuple, list, dict, set, frozenset, range, slice, enum.Enum, os.PathLike),
    *(operator.attrgetter, operator.itemgetter, operator.methodcaller),
    *(re.Pattern, uuid.UUID, types.EllipsisType),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
    *(bytearray, collections.deque, array.array, types.MappingProxyType),
)
_ADDRESS = re.compile(" at 0x[0-9a-fA-F]+")
# Texts and numbers that Python keeps in each class.
_PYTHONS = {"__firstlineno__", "__module__", "__qualname__"}
# What somebody may have written in a class, and what counts of it.
_WRITTEN: dict[str, Callable[[Any], Any]] = {
    "__annotations__": lambda annotations: _texts_of(annotations),
    "__dataclass_fields__": lambda fields: [
        dict(field.metadata) for field in fields.values() if field.metadata
    ],
    "__doc__": lambda text: text,
    "__match_args__": lambda names: names,
    "__slots__": lambda names: names,
}
_PLAIN = (*_DATA, type, types.FunctionType)
# What cannot be pickled, as a rule, and has no content that batches depend on.
_WITHOUT_CONTENT = (
    *(type(threading.Lock()), type(threading.RLock())),
    *(threading.Condition, threading.Semaphore, threading.Event),
    *(types.GetSetDescriptorType, types.MemberDescriptorType),
    *(logging.Logger, logging.Handler, io.IOBase),
)
_TABLES = {"pandas", "polars", "pyarrow"}
# What code has in it that looks for a name in a module, or in its own one.
_IN_OWN_MODULE = {"eval", "exec", "globals"}
_IN_MODULES = {"getattr", "__dict__", "vars", *_IN_OWN_MODULE}


_NOT_IN_DIRECTORY = (
    "The cache of %s is in memory now, because `%s` has changed: the "
    "package cannot tell its value from others in another run. Keep it in an "
    "attribute of the dataset."
)

_log = logging.getLogger("keras_fastdata")


def open_cache(
    dataset: Dataset,
    settings: Settings,
    built: Collection[str],
    before: dict[str, bytes],
    outside: list[tuple[str, Any]],
    replaced: str,
) -> Cache:
    """Opens the cache that the settings specify.

    For `built`, `before` and `outside`, see `fingerprint`. A directory is not
    used if the variable `replaced` has another object of a library than before.

    Raises:
        LoaderError: The dataset has an epoch hook or `reseed`.
    """
    name = type(dataset).__name__
    for hook in (*interface.EPOCH_HOOKS, "reseed"):
        if interface.overrides(dataset, hook):
            raise LoaderError(
                f"`cache` keeps batches by index for all epochs to come, and "
                f"{name}.{hook} may give an index another batch. Leave out "
                "`cache`; or leave shuffling to `shuffle=True`, and the method "
                "out."
            )
    if settings.cache == "memory":
        return MemoryCache(name, settings.cache_bytes)
    assert settings.cache is not None
    if replaced:
        _log.warning(_NOT_IN_DIRECTORY, name, replaced)
        return MemoryCache(name, settings.cache_bytes)
    state = fingerprint(dataset, settings.cache_version, built, before, outside)
    directory = pathlib.Path(settings.cache) / f"{name}-{state}"
    return DiskCache(name, directory, settings.cache_bytes)


def fingerprint(
    dataset: Dataset,
    version: str | int | None,
    built: Collection[str] = (),
    before: dict[str, bytes] | None = None,
    outside: Collection[tuple[str, Any]] = (),
) -> str:
    """Returns a hexadecimal hash of a dataset's data and code.

    Args:
        dataset: The dataset.
        version: The argument `cache_version`.
        built: Attributes that builds have set. They do not count.
        before: What attributes were, before any build; filled when empty.
        outside: Names and plain values of global variables, also of those
            within objects.
    """
    parts = [repr(version).encode(), _digest_of(dataset, type(dataset))]
    state = dataset.__getstate__()
    if not isinstance(state, dict):
        state = {"": state}
    before = {} if before is None else before
    found = {
        name: before.get(name, b"")
        if name in built
        else _digest_of(dataset, value)
        for name, value in sorted(state.items())
        if name != PRIVATE
    }
    if not before:
        before.update(found)
    parts += [f"|{k}|".encode() + value for k, value in found.items() if value]
    parts += sorted(map(_digest_of_outside, outside))
    return hash_of(parts).hex()


def _digest_of(dataset: Dataset, value: Any) -> bytes:
    """Returns a digest of `value`, an attribute or the class of a dataset."""
    buffers: list[Any] = []
    found = Found()
    try:
        pickled = pickle_of(value, found, buffers.append)
        raw = [buffer.raw() for buffer in buffers]
    except Exception as error:
        raise LoaderError(
            f"What {type(dataset).__name__} holds cannot be compared with what "
            "made the batches in the directory `cache`, because it cannot be "
            f"pickled ({error}). Make it in `on_worker_start`, leave it out in "
            '`__getstate__`, or pass `cache="memory"`.'
        ) from error
    return _digest_with([pickled, *raw], found)


def _digest_of_outside(named: tuple[str, Any]) -> bytes:
    """Returns a digest of a variable's name and value, if it is pickled."""
    name, value = named
    found = Found()
    try:
        pickled = pickle_of(value, found)
    except Exception:  # it holds a lock, or the like
        pickled = type(value).__qualname__.encode()
    return _digest_with([name.encode(), pickled], found)


def _digest_with(pickled: list[bytes], found: Found) -> bytes:
    """Returns a digest of pickles, and of the code and files found there."""
    parts = [_digest_of_code(code, found) for code in found.code]  # may grow
    parts += map(_file_at, found.texts)
    return hash_of([*pickled, *sorted(parts)])


def _digest_of_code(code: Any, found: Found) -> bytes:
    parts: Iterator[Any]
    if isinstance(code, types.ModuleType):
        name = code.__name__
        is_script = is_main(name)
        parts = _script(code) if is_script else _sources_of(name, (), set())
    else:
        name = code.__qualname__
        is_class = isinstance(code, type)
        parts = _of_class(code) if is_class else _of_function(code)
    digests = [name.encode()]
    for part in parts:
        try:
            digests.append(pickle_of(part, found))
        except Exception:
            digests.append(type(part).__qualname__.encode())
            home = sys.modules.get(code.__module__)
            if home is not None and not isinstance(part, _WITHOUT_CONTENT):
                # What made this part is in the source.
                digests.append(pickle_of(home, found))
    return hash_of(digests)


def _file_at(path: str | bytes) -> bytes:
    """Returns a file's path, size and mtime, or `b""` if there is no file.

    A relative path leads to another file if the program runs elsewhere.
    """
    with contextlib.suppress(OSError, ValueError):
        if 0 < len(path) <= _LONGEST:
            found = os.stat(path)
            if stat.S_ISREG(found.st_mode):
                about = f"|{found.st_size}|{found.st_mtime_ns}|"
                whole = path if os.path.isabs(path) else os.path.abspath(path)
                return os.fsencode(whole) + about.encode()
    return b""


def _of_class(kind: type) -> Iterator[Any]:
    """Yields the parts of a class that a fingerprint covers."""
    yield from kind.__bases__
    if not is_installed(type(kind).__module__):
        yield type(kind)
    for name, value in sorted(vars(kind).items()):
        is_code = callable(value) or hasattr(type(value), "__get__")
        if name in _WRITTEN:
            value = _WRITTEN[name](value)
        elif name.startswith("__") and (
            name in _PYTHONS
            or not (is_code or isinstance(value, (str, int, float)))
            or isinstance(value, types.GetSetDescriptorType)
        ):
            continue  # Python's own, and not all of it there at once
        if value or name not in _WRITTEN:
            yield name
            yield from _inside(value)


def _texts_of(annotations: dict[str, Any]) -> dict[str, str]:
    """Returns annotations as texts that are the same in each run."""
    return {
        name: _ADDRESS.sub("", repr(value))
        for name, value in annotations.items()
    }


def _of_function(function: types.FunctionType) -> Iterator[Any]:
    """Yields the parts of a function that a fingerprint covers."""
    code, around = function.__code__, function.__globals__
    kind: Any = type(function)
    if kind is not types.FunctionType:
        yield _Untold()  # a wrapper that claims to be the function
    yield from _of_code(code)
    yield function.__defaults__
    yield function.__kwdefaults__
    if function.__annotations__:
        yield _texts_of(function.__annotations__)
    for name, value in sorted(function.__dict__.items()):
        yield name
        yield from _of_global(value)
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not assigned yet
            yield from _inside(cell.cell_contents)
    names = sorted(names_in(code))
    for name in names:
        for known, value in _named(name, around.get(name), names, set()):
            parts = _of_global(value)
            if parts:
                yield known
                yield from parts
    yield from _imported_by(code, around.get("__package__"))
    yield from _found_by_name(names, around)
    yield from modules_passed_on(code, around)


def _found_by_name(
    names: list[str], around: dict[str, Any]
) -> Iterator[types.ModuleType | type]:
    """Yields the modules and classes in which code may look for a name.

    As in `getattr(transforms, self.name)`: the source of the whole module then
    counts.
    """
    if not _IN_MODULES.isdisjoint(names):
        values = [around[name] for name in names if name in around]
        if not _IN_OWN_MODULE.isdisjoint(names):
            values.append(sys.modules.get(around.get("__name__", "")))
        yield from (
            value
            for value in values
            if isinstance(value, types.ModuleType)
            and not is_installed(value.__name__)
        )
    if "__subclasses__" in names:
        for name in names:
            for _, value in _named(name, around.get(name), names, set()):
                if isinstance(value, type):
                    yield from sorted(
                        type.__subclasses__(value), key=lambda c: c.__qualname__
                    )


def _of_global(value: Any) -> tuple[Any, ...]:
    """Returns the parts of a global variable that a fingerprint covers.

    Of an object these are its class, those of the user's objects within, and
    the functions there: what else it holds may differ from run to run.
    """
    if isinstance(value, (*_PLAIN, functools.partial, staticmethod)):
        return _inside(value)
    if isinstance(value, types.ModuleType):
        return (value.__name__,)
    return type(value), *_code_within([value])


def is_data(value: Any) -> bool:
    """Returns whether a value is data that can be pickled, as a rule."""
    return isinstance(value, _DATA)


def is_table(value: Any) -> bool:
    """Returns whether a value is a table, or the like, of a library."""
    return type(value).__module__.partition(".")[0] in _TABLES


def covers(value: Any) -> bool:
    """Returns whether a fingerprint tells a variable's value from others.

    The attributes of a user's object are variables themselves.
    """
    is_code = isinstance(
        value,
        (types.ModuleType, types.MethodType, functools.partial, np.ufunc),
    )
    if isinstance(value, types.BuiltinFunctionType):  # a method, or a function
        is_code = isinstance(value.__self__, (types.ModuleType, type(None)))
    return is_code or isinstance(value, _PLAIN) or is_users_class(type(value))


def _code_within(waiting: list[Any]) -> Iterator[Any]:
    """Yields the functions and the user's classes that objects hold.

    Yields a `_Untold` if there is something that cannot be told from others.
    """
    seen: set[int] = set()
    for value in waiting:
        if id(value) in seen or len(seen) == _MOST_OBJECTS:
            continue
        seen.add(id(value))
        if isinstance(value, types.MethodType):
            waiting += value.__func__, value.__self__
        elif isinstance(value, weakref.ref):
            waiting.append(value())
        elif isinstance(value, (*CODE_TYPES, functools.partial)):
            is_told = not isinstance(value, types.FunctionType) or (
                not is_installed(value.__module__)
                or class_refs.is_importable(value)
            )
            yield value if is_told else _Untold()
            if isinstance(value, np.ufunc):
                waiting += gc.get_referents(value)  # of `np.frompyfunc`
        elif isinstance(value, dict):
            waiting += first_items(value.values())
        elif isinstance(value, (list, tuple)):
            waiting += first_items(value)
        elif is_users_class(type(value)) or isinstance(value, OPEN):
            yield type(value)
            waiting += attributes_of(value).values()
            waiting += (held for _, held in slot_values(value))
        elif not (
            isinstance(value, (*_DATA, *_WITHOUT_CONTENT))
            or is_table(value)
            or wrapper_of(value) is not None
        ):
            waiting += attributes_of(value).values()
            is_local = isinstance(value, threading.local)  # pickled as empty
            if is_local or content_of(value) is None:
                yield _Untold()


class _Untold:
    """Stands for an object that cannot be told from others of its class."""

    def __reduce__(self) -> str:
        raise pickle.PicklingError("an object that cannot be told from others")


def _named(
    known: str, value: Any, names: list[str], seen: set[int]
) -> Iterator[tuple[str, Any]]:
    """Yields (name, value) of a variable, or of each in a user's module."""
    if not isinstance(value, types.ModuleType) or is_installed(value.__name__):
        yield known, value
    elif id(value) not in seen:
        seen.add(id(value))
        held = vars(value)
        for name in (*names, "__getattr__"):
            if name in held:
                yield from _named(f"{known}.{name}", held[name], names, seen)


def _imported_by(code: types.CodeType, package: str | None) -> Iterator[Any]:
    """Yields the names and sources of user modules that a function imports."""
    seen: set[str] = set()
    for module, names in imports_in(code, package):
        yield from _sources_of(module, names, seen)


def _script(main: types.ModuleType) -> Iterator[str | bytes]:
    """Yields the source of a script and of its imports; a notebook has none."""
    with contextlib.suppress(OSError, AttributeError, SyntaxError, ValueError):
        text = pathlib.Path(str(main.__file__)).read_bytes()
        yield text
        seen: set[str] = set()
        script = FoundSource(main.__name__, text, main.__package__)
        for module, names in script.imports:
            yield from _sources_of(module, names, seen)


def _sources_of(
    module: str, names: tuple[str, ...], seen: set[str]
) -> Iterator[str | bytes]:
    """Yields the name and source of a user's module and of its imports."""
    for found in sources_of(module, names, seen, but=()):
        yield found.name
        yield found.text


def _of_code(code: types.CodeType) -> Iterator[Any]:
    """Yields the parts of a code object that a fingerprint covers."""
    yield code.co_code
    yield code.co_names
    yield code.co_varnames
    takes = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    more = code.co_exceptiontable, takes, code.co_kwonlyargcount
    if any(more):
        yield more
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _of_code(constant)
        else:
            yield constant


def _inside(value: Any) -> tuple[Any, ...]:
    """Returns the objects in a wrapper such as `partial`, or just `value`."""
    if isinstance(value, (staticmethod, classmethod)):
        return (type(value), value.__func__)
    if isinstance(value, property):
        return value.fget, value.fset
    if isinstance(value, functools.cached_property):
        return (value.func,)
    if isinstance(value, (functools.partial, functools.partialmethod)):
        return value.func, value.args, value.keywords
    if isinstance(value, functools._lru_cache_wrapper):
        return (value.__wrapped__,)
    if isinstance(value, types.MappingProxyType):
        return (dict(value),)
    return (value,)
