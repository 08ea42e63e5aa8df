"""Whether batches in a directory are those of this dataset.

A fingerprint covers the dataset's class and those it inherits from, all its
attributes, and size and time of every file whose path they hold. A change of
any of these makes another one; so may a new version of Python or of a library.
What `__getitem__` calls is beyond it, hence `cache_version`.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import pathlib
import types
import weakref
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

import numpy as np

from keras_fastdata.engine import build, pickling
from keras_fastdata.engine.cache import Cache, DiskCache, MemoryCache
from keras_fastdata.engine.seeding import PRIVATE
from keras_fastdata.engine.settings import Settings
from keras_fastdata.errors import LoaderError
from keras_fastdata.memory import payload

_DEPTH = 4  # of attributes, lists, dicts in which paths are looked for


def open_cache(dataset: build.Dataset, settings: Settings) -> Cache:
    """The cache that the settings ask for.

    Raises:
        LoaderError: The dataset changes between epochs.
    """
    name = type(dataset).__name__
    for hook in ("on_epoch_begin", "on_epoch_end"):
        if build.overrides(dataset, hook):
            raise LoaderError(
                f"`cache` keeps batches by index for all epochs to come, and "
                f"{name}.{hook} may give an index another batch. Leave out "
                "`cache`; or leave shuffling to `shuffle=True`, and the hook "
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
        DatasetPicklingError: Some attribute cannot be pickled.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr(version).encode())
    for kind in type(dataset).__mro__:
        digest.update(kind.__qualname__.encode())
        digest.update(_source_of(kind))
    state = dict(dataset.__getstate__() or {})  # type: ignore[call-overload]
    state.pop(PRIVATE, None)
    with pickling.explained(weakref.ref(dataset)):
        pickled, buffers = payload.take_apart(state)
    digest.update(pickled)
    for buffer in buffers:
        digest.update(buffer)
    for path in _paths(state.values(), _DEPTH):
        try:
            found = os.stat(path)
        except (OSError, ValueError):
            continue
        digest.update(f"{path}|{found.st_size}|{found.st_mtime_ns}|".encode())
    return digest.hexdigest()


def _source_of(kind: type) -> bytes:
    """What a class is made of."""
    home = kind.__module__.partition(".")[0]
    if home in ("builtins", "keras", "keras_fastdata"):
        return b""
    try:
        return inspect.getsource(kind).encode()
    except (OSError, TypeError):
        return b"".join(_code_of(vars(kind).values()))


def _code_of(values: Iterable[Any]) -> Iterator[bytes]:
    """The code of functions whose source is gone."""
    for value in values:
        code = getattr(value, "__code__", value)
        if isinstance(code, types.CodeType):
            yield code.co_code
            yield repr(code.co_names).encode()
            yield from _code_of(code.co_consts)
        elif isinstance(value, (int, float, str, bytes)):
            yield repr(value).encode()


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
        elif not depth or isinstance(value, (range, bytes, memoryview)):
            continue
        elif isinstance(value, dict):
            yield from _paths(value.values(), depth - 1)
        elif isinstance(value, (Sequence, Set)):  # `SharedList` is one too
            yield from _paths(value, depth - 1)
        else:
            for name in ("filename", "name"):  # of open files
                if isinstance(found := getattr(value, name, None), str):
                    yield found
            attributes = getattr(value, "__dict__", {})
            yield from _paths(attributes.values(), depth - 1)
