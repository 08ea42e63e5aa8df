"""Stores built batches for later epochs, in memory or in files.

Only plain batches are kept (see memory/layout.py). What is served is a view:
the arrays of a batch lie in memory that is never written again, or in a file
that is mapped, and cannot be written to.

A file is taken for a batch only if all of it is as it was written, which a
checksum tells. Nothing in it is code: what a batch looks like is JSON.

    | magic | size and checksum of the head | head: JSON | array | array ...
"""

from __future__ import annotations

import collections
import contextlib
import enum
import io
import json
import logging
import mmap
import os
import pathlib
import stat
import struct
import weakref
import zlib
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from keras_fastdata import _atomic_write
from keras_fastdata.memory import layout, os_limits
from keras_fastdata.memory.arena import aligned_empty, round_up
from keras_fastdata.metrics import ram

_MAGIC = b"keras_fastdata batch 1\n"
_SIZES = struct.Struct("<QI")  # bytes of the head, and their checksum

# On some versions of Python each mapping takes a descriptor, of which a process
# often has 1,024.
_MOST_OPEN = 128

_log = logging.getLogger("keras_fastdata")


class _Opened(NamedTuple):
    """The structure of a batch, and the buffers that hold its arrays."""

    described: layout.Layout
    buffers: list[Any]

    def assemble(self) -> Any:
        return self.described.assemble(self.buffers)


class _BoundedCache:
    """Base class of the caches, with an optional limit in bytes."""

    def __init__(self, name: str, most: int | None, used: int = 0) -> None:
        self.keeps_all = True  # whether every batch that was put was kept
        self._name = name
        self._most = most
        self._used = used
        self._is_full = False

    def _admit(self, batch: Any) -> tuple[Any, list[Any]] | None:
        """Counts a batch's bytes towards the limit, or refuses the batch.

        Returns:
            The structure and the arrays of the batch; `None` if it is refused.
        """
        arrays: list[npt.NDArray[Any]] = []
        description = layout.describe(batch, arrays)
        if description is None:
            self._refuse(
                "Not all batches",
                "some hold other things than arrays, each of them once, in "
                "tuples, lists and dicts",
            )
            return None
        nbytes = sum(array.nbytes for array in arrays)
        if self._is_full:
            return None
        if self._most is not None and self._used + nbytes > self._most:
            self._close(
                f"{self._used:,} bytes are in use, and `cache_bytes` is "
                f"{self._most:,}"
            )
            return None
        self._used += nbytes
        return description, arrays

    def _close(self, reason: str) -> None:
        """Stops the cache from storing further batches."""
        self._is_full = True
        self._refuse("No more batches", reason)

    def _refuse(self, which: str, reason: str) -> None:
        """Logs once that some batches are not cached."""
        if self.keeps_all:
            self.keeps_all = False
            _log.warning(
                "%s of %s are cached: %s. The others are built in every epoch.",
                which,
                self._name,
                reason,
            )


class MemoryCache(_BoundedCache):
    """Stores batches in memory, by default in up to half of the free memory."""

    def __init__(self, name: str, most: int | None) -> None:
        if most is None and (free := ram.free()) is not None:
            most = free // 2
        super().__init__(name, most)
        self._batches: dict[int, _Opened] = {}

    def holds(self, index: int) -> bool:
        """Returns whether the cache holds batch `index`."""
        return index in self._batches

    def get(self, index: int) -> Any:
        """Returns batch `index` with read-only arrays."""
        return self._batches[index].assemble()

    def put(self, index: int, batch: Any) -> None:
        """Stores a copy of a batch, unless the cache refuses the batch."""
        if index in self._batches or (plain := self._admit(batch)) is None:
            return
        description, arrays = plain
        buffers = []
        for array in arrays:
            flat = aligned_empty(array.nbytes, np.uint8)
            np.copyto(flat, _bytes_of(array))
            _lock(flat)
            buffers.append(flat)
        described = layout.Layout(layout.read_only(description))
        self._batches[index] = _Opened(described, buffers)

    def lose(self, index: int) -> None:
        """Drops batch `index`, because reading the batch has failed."""
        del self._batches[index]


class _CachedFile(enum.Enum):
    """The state of the file that stores one batch."""

    MISSING = enum.auto()  # or damaged: the batch is built, and written
    READABLE = enum.auto()  # the batch is in it
    FORBIDDEN = enum.auto()  # another user's: the batch is built every time


class DiskCache(_BoundedCache):
    """Stores batches in files, with the same methods as `MemoryCache`.

    If the directory cannot be made, nothing is cached, and a warning is logged.
    """

    def __init__(
        self, name: str, directory: pathlib.Path, most: int | None
    ) -> None:
        # What was kept of other states of the dataset lies beside it.
        self._states = f"{name}-*"
        self._directory = directory
        for state in directory.parent.glob(self._states):
            _atomic_write.remove_abandoned(state)
        super().__init__(name, most, self._size())
        self._open: collections.OrderedDict[int, _Opened] = (
            collections.OrderedDict()
        )
        self._files: dict[int, _CachedFile] = {}  # by index, once looked for
        self._has_told = False
        self._make_directory()

    def holds(self, index: int) -> bool:
        if (file := self._files.get(index)) is None:
            file = self._files[index] = self._look_for(index)
        return file is _CachedFile.READABLE

    def get(self, index: int) -> Any:
        if index not in self._open:
            self._keep_open(index, is_trusted=True)
        return self._open[index].assemble()

    def put(self, index: int, batch: Any) -> None:
        missing = _CachedFile.MISSING
        if self._files.get(index, missing) is not missing:
            return
        if (plain := self._admit(batch)) is None:
            return
        path = self._path(index)
        try:
            _write(path, *plain)
            self._keep_open(index, is_trusted=True)
        except Exception as error:
            self._close(f"{path} cannot be written ({error})")
        else:
            self._files[index] = _CachedFile.READABLE

    def lose(self, index: int) -> None:
        self._files[index] = _CachedFile.MISSING
        self._open.pop(index, None)
        if not self._directory.exists():  # somebody has removed it
            self._files = dict.fromkeys(self._files, _CachedFile.MISSING)
            self._open.clear()
            self._used = self._size()
            self._make_directory()

    def _make_directory(self) -> None:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._close(f"the directory cannot be made ({error})")

    def _size(self) -> int:
        """Returns the size in bytes of the batches of all states."""
        states = self._directory.parent.glob(self._states)
        return sum(map(_size_of, states))

    def _look_for(self, index: int) -> _CachedFile:
        try:
            self._keep_open(index, is_trusted=False)
        except (FileNotFoundError, NotADirectoryError):
            return _CachedFile.MISSING
        except PermissionError as error:
            if not self._has_told:
                self._has_told = True
                _log.warning(
                    "%s. This and any other file there that this user may not "
                    "read is left as it is, and its batch is built in every "
                    "epoch. Let this user read the directory, or pass another "
                    "one as `cache`.",
                    error,
                )
            return _CachedFile.FORBIDDEN
        except (OSError, ValueError) as error:
            _log.warning(
                "%s is not a batch that was cached, or is damaged (%s); it is "
                "built again.",
                self._path(index),
                error,
            )
            return _CachedFile.MISSING
        return _CachedFile.READABLE

    def _keep_open(self, index: int, *, is_trusted: bool) -> None:
        """Opens a batch file; checks the arrays unless `is_trusted`."""
        self._open[index] = _read(self._path(index), is_trusted)
        if len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)

    def _path(self, index: int) -> pathlib.Path:
        return self._directory / f"{index}.batch"


Cache = MemoryCache | DiskCache


def _lock(array: npt.NDArray[Any]) -> None:
    """Makes an array read-only, and also the arrays that own its memory."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner.flags.writeable = False
        owner = owner.base


def _bytes_of(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Returns the bytes of an array in memory order."""
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        array = np.ascontiguousarray(array)
    return array.ravel("K").view(np.uint8)


def _size_of(directory: pathlib.Path) -> int:
    """Returns the total size in bytes of the batch files in a directory."""
    size = 0
    for path in directory.glob("*.batch"):
        with contextlib.suppress(OSError):
            size += path.stat().st_size
    return size


def _write(
    path: pathlib.Path, description: Any, arrays: list[npt.NDArray[Any]]
) -> None:
    """Writes the file of a batch atomically."""
    parts = [_bytes_of(array) for array in arrays]
    head = json.dumps(
        {
            "layout": layout.as_json(description),
            "arrays": [[p.nbytes, zlib.crc32(p.data)] for p in parts],
        }
    ).encode()
    with _atomic_write.replacing(path) as file:
        file.write(_MAGIC + _SIZES.pack(len(head), zlib.crc32(head)))
        file.write(head)
        for part in parts:
            file.write(bytes(round_up(file.tell()) - file.tell()))
            file.write(part.data)


def _read(path: pathlib.Path, is_trusted: bool) -> _Opened:
    """Opens the file of a batch; raises `ValueError` for a damaged file."""
    with os_limits.named("A cached batch could not be opened"):
        file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115
    with file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no regular file")
        if not found.st_size:
            raise ValueError("it is empty")
        view = _map(file)
    try:
        return _opened(view, is_trusted)
    except Exception as error:  # whatever somebody has put there
        raise ValueError(str(error) or type(error).__name__) from error


def _opened(view: memoryview, is_trusted: bool) -> _Opened:
    """Decodes a batch; raises an exception of any type for damaged data."""
    start = len(_MAGIC) + _SIZES.size
    if view[: len(_MAGIC)] != _MAGIC or view.nbytes < start:
        raise ValueError("it begins with something else")
    size, checksum = _SIZES.unpack_from(view, len(_MAGIC))
    head = view[start : start + size]
    if zlib.crc32(head) != checksum:
        raise ValueError("its head has another checksum")
    known = json.loads(bytes(head))
    described = layout.Layout(layout.from_json(known["layout"]))
    if described.sizes != [nbytes for nbytes, _ in known["arrays"]]:
        raise ValueError("its arrays have other shapes")
    at, buffers = start + size, []
    for nbytes, checksum in known["arrays"]:
        at = round_up(at)
        buffer = view[at : at + nbytes]
        fits = buffer.nbytes == nbytes
        if not fits or not (is_trusted or zlib.crc32(buffer) == checksum):
            raise ValueError("an array has another checksum")
        buffers.append(buffer)
        at += nbytes
    opened = _Opened(described, buffers)
    opened.assemble()  # raises if the buffers do not fit
    return opened


def _open_at_once(path: str, flags: int) -> int:
    """Opens a file in non-blocking mode, in case the file is a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


_mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()  # of all caches


def _map(file: io.BufferedReader) -> memoryview:
    """Maps a file into memory, or reads it if too many files are mapped."""
    if len(_mapped) < os_limits.open_files() // 4:
        with contextlib.suppress(OSError):
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            _mapped.add(mapped)
            return memoryview(mapped)
    size = os.fstat(file.fileno()).st_size
    read = aligned_empty(size, np.uint8)
    read = read[: file.readinto(read.data)]
    _lock(read)
    return read.data
