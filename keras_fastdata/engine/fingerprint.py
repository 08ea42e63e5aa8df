"""Whether batches in a directory are those of this dataset.

A fingerprint covers the dataset's class and those it inherits from, all its
attributes, and size and time of every file whose path they hold. A change of
any of these makes another one; so may a new version of Python or of a library,
and so does every run, where the dataset holds sets, or instances of a class of
`__main__`.
What `__getitem__` calls is beyond it, hence `cache_version`.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import os
import pathlib
import stat
import types
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from keras_fastdata.engine import build
from keras_fastdata.engine.cache import Cache, DiskCache, MemoryCache
from keras_fastdata.engine.seeding import PRIVATE
from keras_fastdata.engine.settings import Settings
from keras_fastdata.errors import LoaderError
from keras_fastdata.memory import payload

_LEFT_OUT = ("builtins", "keras", "keras_fastdata")  # modules of classes
_DEPTH = 4  # of attributes, lists, dicts in which paths are looked for


def open_cache(dataset: build.Dataset, settings: Settings) -> Cache:
    """The cache that the settings ask for.

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
    folder = f"{name}-{fingerprint(dataset, settings.cache_version)}"
    directory = pathlib.Path(settings.cache) / folder
    return DiskCache(name, directory, settings.cache_bytes)


def fingerprint(dataset: build.Dataset, version: str | int | None) -> str:
    """A name for all batches of a dataset, of 32 hexadecimal digits.

    Raises:
        LoaderError: What the dataset holds cannot be pickled.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr(version).encode())
    for kind in type(dataset).__mro__:
        digest.update(kind.__qualname__.encode())
        if kind.__module__.partition(".")[0] not in _LEFT_OUT:
            for name, value in sorted(vars(kind).items()):
                if name.startswith("__") and not callable(value):
                    continue  # Python's own, and not all of it there at once
                digest.update(f"|{name}|".encode())
                for part in _parts_of(value):
                    digest.update(part)
    state = dataset.__getstate__()
    if isinstance(state, dict):
        state = {k: v for k, v in state.items() if k != PRIVATE}
    try:
        pickled, buffers = payload.take_apart(state)
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
    for path in _paths([state], _DEPTH):
        try:
            found = os.stat(path)
        except (OSError, ValueError):
            continue
        if not stat.S_ISREG(found.st_mode):
            continue
        digest.update(f"{path}|{found.st_size}|{found.st_mtime_ns}|".encode())
    return digest.hexdigest()


def _parts_of(value: Any, depth: int = _DEPTH) -> Iterator[bytes]:
    """What tells whether an attribute of a class is another one."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, property):
        for function in (value.fget, value.fset):
            yield from _parts_of(function, depth)
    elif isinstance(value, types.FunctionType):
        yield from _parts_of(value.__code__, depth)
        if depth:
            yield from _parts_of(value.__defaults__, depth - 1)
            for cell in value.__closure__ or ():
                with contextlib.suppress(ValueError):  # not assigned yet
                    yield from _parts_of(cell.cell_contents, depth - 1)
    elif isinstance(value, types.CodeType):
        yield value.co_code
        yield repr((value.co_names, value.co_varnames)).encode()
        for constant in value.co_consts:
            yield from _parts_of(constant, depth)
    elif isinstance(value, (tuple, list)):
        yield f"{type(value).__name__} of {len(value)}".encode()
        if depth:
            for part in value:
                yield from _parts_of(part, depth - 1)
    elif isinstance(value, (set, frozenset)):
        yield repr(sorted(map(repr, value))).encode()
    elif isinstance(value, dict):
        if depth:
            for key in value:
                yield repr(key).encode()
                yield from _parts_of(value[key], depth - 1)
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype} {value.shape}".encode()
        yield value.tobytes()
    elif isinstance(value, (int, float, complex, str, bytes, type(None))):
        yield f"{type(value).__name__} {value!r}".encode()


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
