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

import contextlib
import logging
import os
import pathlib
import stat
import sys
import types
from collections.abc import Collection
from typing import Any

from keras_fastdata._call_stack import raise_of_handler
from keras_fastdata.building import interface
from keras_fastdata.building.interface import Dataset
from keras_fastdata.building.seeding import PRIVATE
from keras_fastdata.engine.cache import Cache, DiskCache, MemoryCache
from keras_fastdata.engine.covered_code import parts_of_code
from keras_fastdata.engine.covered_values import WITHOUT_CONTENT
from keras_fastdata.engine.settings import Settings
from keras_fastdata.engine.stable_pickle import Found, pickle_of
from keras_fastdata.engine.state_dict import hash_of
from keras_fastdata.errors import LoaderError

_LONGEST = 4096  # characters of a path


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
    except Exception as error:  # it holds a lock, or the like
        raise_of_handler(error)
        pickled = type(value).__qualname__.encode()
    return _digest_with([name.encode(), pickled], found)


def _digest_with(pickled: list[bytes], found: Found) -> bytes:
    """Returns a digest of pickles, and of the code and files found there."""
    parts = [_digest_of_code(code, found) for code in found.code]  # may grow
    parts += map(_file_at, found.texts)
    return hash_of([*pickled, *sorted(parts)])


def _digest_of_code(code: Any, found: Found) -> bytes:
    is_module = isinstance(code, types.ModuleType)
    name = code.__name__ if is_module else code.__qualname__
    digests = [name.encode()]
    for part in parts_of_code(code):
        try:
            digests.append(pickle_of(part, found))
        except Exception as error:
            raise_of_handler(error)
            digests.append(type(part).__qualname__.encode())
            home = sys.modules.get(code.__module__)
            if home is not None and not isinstance(part, WITHOUT_CONTENT):
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
