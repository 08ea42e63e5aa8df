"""Names the cache directory of a dataset by its content.

A fingerprint covers

- what the dataset's attributes hold, as it is pickled;
- the code of the dataset's class, and of each class and function among what
  it holds, unless they are of installed packages: methods, class attributes,
  defaults, variables around a function; and, of the global names in that code,
  also of those in modules, the plain values, functions and classes;
- size and time of every file whose whole path is a `str`, `bytes` or path
  object anywhere in these.

It does not cover what is in folders, files whose path is put together from
parts, global objects, and installed packages: hence `cache_version`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import pathlib
import stat
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np

from keras_fastdata.building import build
from keras_fastdata.building.modules import is_users, names_in
from keras_fastdata.building.seeding import PRIVATE
from keras_fastdata.engine.cache import Cache, DiskCache, MemoryCache
from keras_fastdata.engine.settings import Settings
from keras_fastdata.errors import LoaderError
from keras_fastdata.memory import class_refs, reducers

_OURS = ("keras", "keras_fastdata")  # packages whose code is left out
_LONGEST = 4096  # characters of a path
_PLAIN = (
    *(int, float, complex, str, bytes, type(None), np.ndarray, np.generic),
    *(tuple, list, dict, set, frozenset, os.PathLike),
)


def open_cache(
    dataset: build.Dataset,
    settings: Settings,
    built: Collection[str],
    before: dict[str, bytes],
) -> Cache:
    """Opens the cache that the settings ask for.

    Args:
        dataset: The dataset.
        settings: Its settings.
        built: See `fingerprint`.
        before: See `fingerprint`.

    Raises:
        LoaderError: The dataset changes between epochs.
    """
    name = type(dataset).__name__
    for hook in ("on_epoch_begin", "on_epoch_end", "reseed"):
        if build.overrides(dataset, hook):
            raise LoaderError(
                f"`cache` keeps batches by index for all epochs to come, and "
                f"{name}.{hook} may give an index another batch. Leave out "
                "`cache`; or leave shuffling to `shuffle=True`, and the method "
                "out."
            )
    if settings.cache == "memory":
        return MemoryCache(name, settings.cache_bytes)
    assert settings.cache is not None
    state = fingerprint(dataset, settings.cache_version, built, before)
    directory = pathlib.Path(settings.cache) / f"{name}-{state}"
    return DiskCache(name, directory, settings.cache_bytes)


def fingerprint(
    dataset: build.Dataset,
    version: str | int | None,
    built: Collection[str] = (),
    before: dict[str, bytes] | None = None,
) -> str:
    """Returns a name for all batches of a dataset: 32 hexadecimal digits.

    Args:
        dataset: The dataset.
        version: Whatever else is to tell.
        built: Attributes that builds have set. They do not count.
        before: What attributes were, before any build; filled when empty.

    Raises:
        LoaderError: What the dataset holds cannot be pickled.
    """
    whole = hashlib.blake2b(digest_size=16)
    whole.update(repr(version).encode())
    whole.update(_digest_of(dataset, type(dataset)))
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
    for name, digest in found.items():
        if digest:
            whole.update(f"|{name}|".encode() + digest)
    return whole.hexdigest()


def _digest_of(dataset: build.Dataset, value: Any) -> bytes:
    """Returns bytes that differ if an attribute or the class has changed."""
    digest = hashlib.blake2b(digest_size=16)
    buffers: list[memoryview] = []
    found = _Found()
    try:
        pickled = _pickled(
            value, found, lambda buffer: buffers.append(buffer.raw())
        )
    except Exception as error:
        raise LoaderError(
            f"What {type(dataset).__name__} holds cannot be compared with what "
            "made the batches in the directory `cache`, because it cannot be "
            f"pickled ({error}). Make it in `on_worker_start`, leave it out in "
            '`__getstate__`, or pass `cache="memory"`.'
        ) from error
    digest.update(pickled)
    for buffer in buffers:
        digest.update(buffer)
    parts = [_digest_of_code(code, found) for code in found.code]  # may grow
    parts += map(_file_at, found.texts)
    for part in sorted(parts):
        digest.update(part)
    return digest.digest()


def _digest_of_code(code: Any, found: _Found) -> bytes:
    digest = hashlib.blake2b(code.__qualname__.encode(), digest_size=16)
    parts = _of_class if isinstance(code, type) else _of_function
    for part in parts(code):
        try:
            digest.update(_pickled(part, found))
        except Exception:  # a lock, a slot
            digest.update(type(part).__qualname__.encode())
    return digest.digest()


def _file_at(path: str | bytes) -> bytes:
    """Returns path, size and time of a file; empty if there is none."""
    if not 0 < len(path) <= _LONGEST:
        return b""
    try:
        found = os.stat(path)
        name = os.fsencode(path)
    except (OSError, ValueError):
        return b""
    if not stat.S_ISREG(found.st_mode):
        return b""
    return name + f"|{found.st_size}|{found.st_mtime_ns}|".encode()


class _Found:
    """Collects what pickles refer to: classes, functions, and texts.

    Attributes:
        texts: All that may be a path.
        code: Classes and functions that are not installed.
        known: All classes and functions, by id, and what stands for each.
    """

    def __init__(self) -> None:
        self.texts: dict[str | bytes, None] = {}
        self.code: list[Any] = []
        self.known: dict[int, tuple[Any, list[str] | None]] = {}


def _pickled(
    value: Any, found: _Found, keep: Callable[[Any], None] | None = None
) -> bytes:
    """Pickles a value, to hash the bytes.

    Args:
        value: Anything.
        found: Takes what is met.
        keep: Takes the bytes of arrays; `None`: they are in the pickle.
    """
    stream = io.BytesIO()
    _FingerprintPickler(stream, found, keep).dump(value)
    return stream.getvalue()


class _FingerprintPickler(reducers.Pickler):
    """Pickles equal objects to equal bytes in every run.

    Sets are put in order. Classes and functions that are not installed are
    there by name.
    """

    def __init__(
        self,
        stream: io.BytesIO,
        found: _Found,
        keep: Callable[[Any], None] | None,
    ) -> None:
        super().__init__(stream, protocol=5, buffer_callback=keep)
        self._found = found

    def persistent_id(self, obj: Any) -> Any:
        """Returns what replaces an object in the pickle, or `None`."""
        kind = type(obj)
        if kind is int or kind is float:
            return None
        if kind is str or kind is bytes:
            self._found.texts[obj] = None
        elif kind is set or kind is frozenset:
            return [kind.__name__, *sorted(obj, key=repr)]
        elif isinstance(obj, (type, types.FunctionType)):
            known = self._found.known
            if id(obj) not in known:
                by_name = _is_installed(obj.__module__)
                by_name = by_name and class_refs.is_importable(obj)
                known[id(obj)] = obj, None if by_name else [obj.__qualname__]
                if not by_name:
                    self._found.code.append(obj)
            return known[id(obj)][1]
        else:
            for text in _texts_in(obj):
                self._found.texts[text] = None
        return None


def _texts_in(obj: Any) -> Iterator[str | bytes]:
    """Yields the texts that paths, arrays and tables contain."""
    package = type(obj).__module__.partition(".")[0]
    values: Any = ()
    if isinstance(obj, os.PathLike):
        values = (os.fspath(obj),)
    elif isinstance(obj, np.ndarray):
        if obj.dtype.kind in "STU":
            values = obj.reshape(-1).tolist()
    elif package == "keras_fastdata":
        if type(obj).__name__ == "SharedList":
            values = obj
    elif package == "pandas" and hasattr(obj, "to_numpy"):
        values = np.asarray(obj).reshape(-1)  # texts may be Arrow's
        values = values.tolist() if values.dtype.kind == "O" else ()
    for value in values:
        if isinstance(value, (str, bytes)):
            yield value
        elif isinstance(value, os.PathLike):
            yield os.fspath(value)


def _of_class(kind: type) -> Iterator[Any]:
    """Yields the parts of a class, which a fingerprint compares."""
    yield from kind.__bases__
    for name, value in sorted(vars(kind).items()):
        if name.startswith("__") and not callable(value):
            continue  # Python's own, and not all of it there at once
        yield name
        yield from _inside(value)


def _of_function(function: types.FunctionType) -> Iterator[Any]:
    """Yields the parts of a function, which a fingerprint compares."""
    code, around = function.__code__, function.__globals__
    yield from _of_code(code)
    yield function.__defaults__
    yield function.__kwdefaults__
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not assigned yet
            yield from _inside(cell.cell_contents)
    names = sorted(names_in(code))
    for name in names:
        value = around.get(name)
        found = {name: value}
        if isinstance(value, types.ModuleType):
            if _is_installed(value.__name__):
                continue
            held = vars(value)
            found = {f"{name}.{n}": held[n] for n in names if n in held}
        for known, value in found.items():
            if isinstance(value, (*_PLAIN, type, types.FunctionType)) or (
                hasattr(value, "__wrapped__")
            ):
                yield known
                yield from _inside(value)


def _of_code(code: types.CodeType) -> Iterator[Any]:
    """Yields the instructions of code, without lines and file names."""
    yield code.co_code
    yield code.co_names
    yield code.co_varnames
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _of_code(constant)
        else:
            yield constant


def _inside(value: Any) -> tuple[Any, ...]:
    """Returns what an object wraps, or the object itself."""
    if isinstance(value, (staticmethod, classmethod)):
        return (type(value), value.__func__)
    if isinstance(value, property):
        return value.fget, value.fset
    if isinstance(value, functools.cached_property):
        return (value.func,)
    if isinstance(value, (functools.partial, functools.partialmethod)):
        return value.func, value.args, value.keywords
    if callable(value) and hasattr(value, "__wrapped__"):
        return value.__wrapped__, getattr(value, "__closure__", None)
    return (value,)


def _is_installed(module: str | None) -> bool:
    """Returns whether a module comes with Python or a package.

    One that is not known is the user's.
    """
    if module is None:
        return False
    package = module.partition(".")[0]
    return package in _OURS or not is_users(module, if_unknown=True)
