"""Stores an object in an anonymous file that all workers map into memory.

The training process writes the file. Each worker maps it privately
(copy-on-write): N workers share one copy of the arrays, and a worker's writes
are its own. A state that was sent to workers is never overwritten, because a
worker would see such a write in pages that it has not written to. So a later
state of the object is appended, and refers to the arrays that did not change:

    | table  pickle  array  array | table  pickle  array | ...
                       ^------------------'
"""

from __future__ import annotations

import contextlib
import errno
import io
import mmap
import os
import pickle
import struct
import tempfile
from typing import Any, NamedTuple

import numpy as np

from keras_fastdata._call_stack import raise_of_handler
from keras_fastdata.memory import os_limits, reducers
from keras_fastdata.memory.arena import address_of, round_up
from keras_fastdata.memory.leases import Bytes
from keras_fastdata.memory.module_variables import (
    ModuleVariables,
    WithVariables,
)
from keras_fastdata.memory.shared_arrays import SharedArrays

_HEADER = struct.Struct("<QQ")  # bytes of the pickle, number of buffers
_EXTENT = struct.Struct("<QQ")  # start in the file, number of bytes
_COMPARED = 1 << 20  # bytes at a time
_IN_MEMORY = "/dev/shm"  # a file system in memory, where there is one
_SPARE = 1 << 24  # bytes of old states that may stay; or half a state


class _Extent(NamedTuple):
    start: int
    nbytes: int


class SharedState:
    """Stores an object and its later states in an anonymous file.

    Attributes:
        fd: Descriptor of the file.
        start: The position of the latest state in the file.
        modules: The modules that the first state refers to.

    Args:
        obj: The object.
        pickling: The context in which it is pickled, by code of the user's.

    Raises:
        LoaderError: There is not enough memory, or a limit is too low.
        Exception: Whatever pickling raises for an object it cannot pickle.
    """

    def __init__(
        self,
        obj: Any,
        pickling: contextlib.AbstractContextManager[
            None
        ] = contextlib.nullcontext(),  # noqa: B008
    ) -> None:
        self.fd, self._end = -1, 0
        self.modules: set[str] = set()
        with pickling:
            parts = pickle_in_parts(obj, self.modules)
        self._write(*parts)

    def renew(self, obj: Any) -> None:
        """Stores the object's state if it has changed."""
        pickled, buffers = pickle_in_parts(obj)
        found = [self._find(buffer) for buffer in buffers]
        if found == self._extents and self._holds(self._pickle, pickled):
            return
        live = pickled.nbytes + sum(buffer.nbytes for buffer in buffers)
        fresh = live - sum(extent.nbytes for extent in found if extent)
        if self._end + fresh > live + max(live // 2, _SPARE):
            self._write(pickled, buffers)
        else:
            self._append(pickled, buffers, found)

    def close(self) -> None:
        """Closes the file; existing mappings stay valid. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def _find(self, buffer: memoryview) -> _Extent | None:
        """Returns a buffer's position in the file, or `None` if not stored."""
        extent = self._places.get(place_of(buffer))
        if extent is not None and self._holds(extent, buffer):
            return extent
        return None

    def _holds(self, extent: _Extent, buffer: memoryview) -> bool:
        """Returns whether a part of the file has the same bytes as a buffer."""
        if extent.nbytes != buffer.nbytes:
            return False
        scratch = memoryview(bytearray(min(buffer.nbytes, _COMPARED)))
        for at in range(0, buffer.nbytes, _COMPARED):
            here = buffer[at : at + _COMPARED]
            there = scratch[: here.nbytes]
            if not _read_at(self.fd, there, extent.start + at):
                return False
            if not np.array_equal(_bytes_of(here), _bytes_of(there)):
                return False
        return True

    def _write(self, pickled: memoryview, buffers: list[memoryview]) -> None:
        """Writes a state into a new file."""
        with os_limits.named("The dataset could not be put in shared memory"):
            fd = anonymous_file("keras_fastdata-dataset")
        old, self.fd = self.fd, fd
        old_end, self._end = self._end, 0
        try:
            self._append(pickled, buffers, [None] * len(buffers))
        except BaseException:
            os.close(fd)
            self.fd, self._end = old, old_end
            raise
        if old >= 0:
            os.close(old)

    def _append(
        self,
        pickled: memoryview,
        buffers: list[memoryview],
        found: list[_Extent | None],
    ) -> None:
        start = round_up(self._end, mmap.PAGESIZE)
        table = start + _HEADER.size + _EXTENT.size * len(buffers)
        end = table + pickled.nbytes
        extents, fresh = [], []
        for buffer, extent in zip(buffers, found, strict=True):
            if extent is None:
                extent = _Extent(round_up(end), buffer.nbytes)
                end = extent.start + extent.nbytes
                fresh.append((extent, buffer))
            extents.append(extent)
        head = _HEADER.pack(pickled.nbytes, len(buffers))
        head += b"".join(_EXTENT.pack(*extent) for extent in extents)
        with os_limits.named("The dataset could not be put in shared memory"):
            os.truncate(self.fd, end)
            _write_at(self.fd, memoryview(head), start)
            _write_at(self.fd, pickled, table)
            for extent, buffer in fresh:
                _write_at(self.fd, buffer, extent.start)
        self.start, self._end = start, end
        self._pickle = _Extent(table, pickled.nbytes)
        self._extents = extents
        self._places = {
            place_of(buffer): extent
            for buffer, extent in zip(buffers, extents, strict=True)
        }


def write_shared_state(obj: Any) -> int:
    """Pickles `obj` into an anonymous file; returns the file's descriptor."""
    return SharedState(obj).fd


def can_be_written(obj: Any) -> bool:
    """Returns whether `write_shared_state` can pickle `obj`."""
    try:
        pickle_in_parts(obj)
    except Exception as error:
        raise_of_handler(error)
        # Pickling runs the user's code, which may raise anything.
        return False
    return True


def read_shared_state(fd: int, start: int = 0) -> Any:
    """Rebuilds an object; its arrays use a private mapping of the file."""
    view = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY))
    pickled, count = _HEADER.unpack_from(view, start)
    extents_at = start + _HEADER.size
    pickled_at = extents_at + _EXTENT.size * count
    extents = _EXTENT.iter_unpack(view[extents_at:pickled_at])
    buffers = [view[at : at + nbytes] for at, nbytes in extents]
    return pickle.loads(
        view[pickled_at : pickled_at + pickled], buffers=buffers
    )


def pickle_in_parts(
    obj: Any, modules: set[str] | None = None
) -> tuple[memoryview, list[memoryview]]:
    """Returns the pickle of an object, and its out-of-band buffers.

    Adds the names of the modules that the pickle refers to to `modules`.
    """
    arrays, variables = SharedArrays(), ModuleVariables()
    parts, pickler = _pickled(obj, modules, arrays, variables)
    shares = arrays.find_spans(pickler.memo.copy)
    if variables.found:
        obj = WithVariables(obj, variables.found)
    if shares or variables.found:
        parts, _ = _pickled(obj, modules, arrays)
    return parts


def _pickled(
    obj: Any,
    modules: set[str] | None,
    arrays: SharedArrays,
    variables: ModuleVariables | None = None,
) -> tuple[tuple[memoryview, list[memoryview]], reducers.Pickler]:
    buffers: list[memoryview] = []
    stream = io.BytesIO()
    pickler = reducers.Pickler(
        stream, protocol=5, buffer_callback=lambda b: buffers.append(b.raw())
    )
    pickler.observe(modules, arrays, variables)
    pickler.dump(obj)
    return (stream.getbuffer(), buffers), pickler


def place_of(buffer: memoryview) -> tuple[int, int]:
    """Returns the address and length of a buffer."""
    if not buffer.nbytes:
        return 0, 0
    return address_of(_bytes_of(buffer)), buffer.nbytes


def _bytes_of(view: memoryview) -> Bytes:
    return np.frombuffer(view, np.uint8)


def _write_at(fd: int, view: memoryview, offset: int) -> None:
    os.lseek(fd, offset, os.SEEK_SET)
    while view.nbytes:
        written = os.write(fd, view)
        view = view[written:]


def _read_at(fd: int, view: memoryview, offset: int) -> bool:
    """Fills `view` from a file; returns False if the file is too short."""
    os.lseek(fd, offset, os.SEEK_SET)
    with io.FileIO(fd, closefd=False) as file:
        while view.nbytes:
            read = file.readinto(view)
            if not read:
                return False
            view = view[read:]
    return True


def anonymous_file(name: str) -> int:
    """Creates a file without a path, and returns the file's descriptor.

    Where the system has no such files, it is a temporary file. The system
    deletes the file with the last process that has it open.

    Args:
        name: What tools show for the file, where they can.
    """
    if hasattr(os, "memfd_create"):
        try:
            return os.memfd_create(name, os.MFD_CLOEXEC)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EPERM):
                raise
    folder = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None
    with tempfile.TemporaryFile(prefix=name, dir=folder) as file:
        return os.dup(file.fileno())
