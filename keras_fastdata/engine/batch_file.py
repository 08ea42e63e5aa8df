"""Writes a batch into a file, and opens such a file.

Only plain batches can be written (see memory/layout.py). The arrays of a batch
that was opened are views of the mapped file, and cannot be written to.

A file is taken for a batch only if all of it is as it was written, which a
checksum tells. Nothing in it is code: what a batch looks like is JSON.

    | magic | size and checksum of the head | head: JSON | array | array ...
"""

from __future__ import annotations

import contextlib
import io
import json
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

_MAGIC = b"keras_fastdata batch 1\n"
_SIZES = struct.Struct("<QI")  # bytes of the head, and their checksum


class OpenBatch(NamedTuple):
    """The structure of a batch, and the buffers that hold its arrays."""

    described: layout.Layout
    buffers: list[Any]
    writer: str = ""  # of the file

    def assemble(self) -> Any:
        return self.described.assemble(self.buffers)


def write(
    path: pathlib.Path,
    description: Any,
    arrays: list[npt.NDArray[Any]],
    writer: str,
) -> None:
    """Writes the file of a batch atomically.

    `writer` is a text by which to tell batches of different writers apart.
    """
    parts = [bytes_of(array) for array in arrays]
    head = json.dumps(
        {
            "layout": layout.as_json(description),
            "arrays": [[p.nbytes, zlib.crc32(p.data)] for p in parts],
            "writer": writer,
        }
    ).encode()
    with _atomic_write.replacing(path) as file:
        file.write(_MAGIC + _SIZES.pack(len(head), zlib.crc32(head)))
        file.write(head)
        for part in parts:
            file.write(bytes(round_up(file.tell()) - file.tell()))
            file.write(part.data)


def read(path: pathlib.Path, is_trusted: bool) -> OpenBatch:
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


def _opened(view: memoryview, is_trusted: bool) -> OpenBatch:
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
    opened = OpenBatch(described, buffers, str(known.get("writer", "")))
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
    lock(read)
    return read.data


def lock(array: npt.NDArray[Any]) -> None:
    """Makes an array read-only, and also the arrays that own its memory."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner.flags.writeable = False
        owner = owner.base


def bytes_of(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Returns the bytes of an array in memory order."""
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        array = np.ascontiguousarray(array)
    return array.ravel("K").view(np.uint8)
