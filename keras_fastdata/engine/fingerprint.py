"""Whether batches in a directory are those of this dataset.

A fingerprint covers the dataset's class and those it inherits from, all its
attributes, and size and time of every file whose path they hold. A change of
any of these makes another one; so may a new version of Python or of a library.
What `__getitem__` calls is beyond it, hence `cache_version`.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import io
import os
import pathlib
import pickletools
import stat
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np

from keras_fastdata.engine import build
from keras_fastdata.engine.cache import Cache, DiskCache, MemoryCache
from keras_fastdata.engine.seeding import PRIVATE
from keras_fastdata.engine.settings import Settings
from keras_fastdata.errors import LoaderError
from keras_fastdata.memory import classes, handles

_LEFT_OUT = ("builtins", "keras", "keras_fastdata")  # modules of classes
_DEPTH = 4  # of attributes, lists, dicts in which paths are looked for


def open_cache(
    dataset: build.Dataset,
    settings: Settings,
    built: Collection[str],
    before: dict[str, bytes],
) -> Cache:
    """The cache that the settings ask for.

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
    """A name for all batches of a dataset, of 32 hexadecimal digits.

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
    for kind in type(dataset).__mro__:
        whole.update(kind.__qualname__.encode())
        for part in _parts_of_class(kind, _DEPTH):
            whole.update(part)
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
    """What tells whether an attribute of a dataset is another one."""
    digest = hashlib.blake2b(digest_size=16)
    buffers: list[memoryview] = []
    stream = io.BytesIO()
    try:
        _Pickler(
            stream,
            protocol=5,
            buffer_callback=lambda buffer: buffers.append(buffer.raw()),
        ).dump(_ordered(value, _DEPTH))
    except Exception as error:
        raise LoaderError(
            f"What {type(dataset).__name__} holds cannot be compared with what "
            "made the batches in the directory `cache`, because it cannot be "
            f"pickled ({error}). Make it in `on_worker_start`, leave it out in "
            '`__getstate__`, or pass `cache="memory"`.'
        ) from error
    pickled = stream.getvalue()
    digest.update(pickled)
    for buffer in buffers:
        digest.update(buffer)
    paths = list(_paths([value], _DEPTH))
    if handles.__name__.encode() in pickled:
        # What is to be opened again, a file, a memory map, is there as a path.
        opcodes = pickletools.genops(pickled)
        paths += [text for _, text, _ in opcodes if isinstance(text, str)]
    for path in dict.fromkeys(paths):
        try:
            found = os.stat(path)
        except (OSError, ValueError):
            continue
        if stat.S_ISREG(found.st_mode):
            seen = f"{path}|{found.st_size}|{found.st_mtime_ns}|"
            digest.update(seen.encode("utf-8", "surrogateescape"))
    return digest.digest()


class _Pickler(handles.Pickler):
    """Gives what is equal the same pickle in every run."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and not classes.is_importable(obj):
            # cloudpickle sends it with a number of its own.
            told = b"".join(_parts_of_class(obj, _DEPTH))
            return _class_of_a_script, (obj.__qualname__, told)
        return super().reducer_override(obj)


def _class_of_a_script(qualname: str, parts: bytes) -> None:
    """Stands for a class in pickles that nobody loads."""


def _ordered(value: Any, depth: int) -> Any:
    """The same with lists for sets, whose order is another in every run."""
    if not depth:
        return value
    if isinstance(value, (set, frozenset)):
        return [type(value).__name__, *sorted(value, key=repr)]
    if type(value) is dict:
        return {k: _ordered(v, depth - 1) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_ordered(v, depth - 1) for v in value)
    return value


def _parts_of_class(kind: type, depth: int) -> Iterator[bytes]:
    """What tells whether a class is another one, but for those above it."""
    if kind.__module__.partition(".")[0] in _LEFT_OUT:
        return
    for name, value in sorted(vars(kind).items()):
        if name.startswith("__") and not callable(value):
            continue  # Python's own, and not all of it there at once
        yield f"|{name}|".encode()
        yield from _parts_of(value, depth)


def _parts_of(value: Any, depth: int) -> Iterator[bytes]:
    """What tells whether an attribute of a class is another one."""
    if isinstance(value, (int, float, complex, str, bytes, type(None))):
        yield f"{type(value).__name__} {value!r}".encode()
    elif isinstance(value, types.CodeType):
        yield value.co_code
        yield repr((value.co_names, value.co_varnames)).encode()
        for constant in value.co_consts:
            yield from _parts_of(constant, depth)
    elif isinstance(value, types.FunctionType):
        yield from _parts_of(value.__code__, depth)
        if depth:
            yield from _parts_of(value.__defaults__, depth - 1)
            yield from _parts_of(value.__kwdefaults__, depth - 1)
            for cell in value.__closure__ or ():
                with contextlib.suppress(ValueError):  # not assigned yet
                    yield from _parts_of(cell.cell_contents, depth - 1)
    elif isinstance(value, (set, frozenset)):
        yield repr(sorted(map(repr, value))).encode()
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield f"{value.dtype} {value.shape}".encode()
        yield value.tobytes()
    elif isinstance(value, type):
        yield value.__qualname__.encode()
        # Others are somebody else's, of which the name will do.
        if depth and ("." in value.__qualname__ or _is_a_scripts(value)):
            yield from _parts_of_class(value, depth - 1)
    elif not depth:
        yield type(value).__qualname__.encode()
    elif isinstance(value, (tuple, list)):
        yield f"{type(value).__name__} of {len(value)}".encode()
        for part in value:
            yield from _parts_of(part, depth - 1)
    elif isinstance(value, dict):
        for key in value:
            yield repr(key).encode()
            yield from _parts_of(value[key], depth - 1)
    elif (inner := _inside(value)) is not None:
        yield type(value).__qualname__.encode()
        for part in inner:
            yield from _parts_of(part, depth)
    else:
        yield type(value).__qualname__.encode()
        with contextlib.suppress(Exception):  # locks, slots and the like
            stream = io.BytesIO()
            _Pickler(stream, protocol=5).dump(value)
            yield stream.getvalue()


def _is_a_scripts(kind: type) -> bool:
    return kind.__module__ == "__main__"


def _inside(value: Any) -> tuple[Any, ...] | None:
    """The functions, and so on, that are wrapped in something."""
    if isinstance(value, (staticmethod, classmethod)):
        return (value.__func__,)
    if isinstance(value, property):
        return value.fget, value.fset
    if isinstance(value, functools.cached_property):
        return (value.func,)
    if isinstance(value, (functools.partial, functools.partialmethod)):
        return value.func, value.args, value.keywords
    if callable(value) and hasattr(value, "__wrapped__"):
        return (value.__wrapped__,)
    return None


def _paths(values: Iterable[Any], depth: int) -> Iterator[str]:
    """Everything that may be the path of a file."""
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, os.PathLike):
            yield os.fspath(value)
        elif isinstance(value, np.memmap):
            if value.filename is not None:
                yield os.fspath(value.filename)
        elif isinstance(value, np.ndarray):
            if value.dtype.kind in "OU":
                yield from _paths(value.reshape(-1).tolist(), 0)
        elif not depth:
            continue
        elif isinstance(value, dict):
            yield from _paths([*value, *value.values()], depth - 1)
        elif isinstance(
            value, (list, tuple, set, frozenset, collections.deque)
        ) or type(value).__module__.startswith("keras_fastdata.shared_list"):
            yield from _paths(value, depth - 1)
        else:
            for name in ("filename", "name"):  # of open files
                if isinstance(found := getattr(value, name, None), str):
                    yield found
            attributes = getattr(value, "__dict__", {})
            yield from _paths(attributes.values(), depth - 1)
