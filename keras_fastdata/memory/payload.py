"""An object laid out in an anonymous file, for any number of workers to map.

The training process writes it once. Each worker maps it privately
(copy-on-write), so that N workers share one copy of the arrays, may write to
theirs, and nobody sees it. The file is never written again: pages that a
worker has not touched would follow such a write.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import struct
from typing import Any

from keras_fastdata.memory import handles, limits
from keras_fastdata.memory.arena import ALIGNMENT, memfd

_HEADER = struct.Struct("<QQ")  # bytes of the pickle, number of buffers
_EXTENT = struct.Struct("<QQ")  # start in the file, number of bytes


def write_payload(obj: Any) -> int:
    """Pickles `obj` into a fresh anonymous file.

    Returns:
        Its descriptor, which the caller owns.

    Raises:
        Exception: Whatever pickling raises for what it cannot pickle.
    """
    buffers: list[memoryview] = []
    stream = io.BytesIO()
    handles.Pickler(
        stream, protocol=5, buffer_callback=lambda b: buffers.append(b.raw())
    ).dump(obj)
    pickled = stream.getbuffer()
    table = _HEADER.size + _EXTENT.size * len(buffers)
    end = table + len(pickled)
    extents = []
    for buffer in buffers:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        extents.append((start, buffer.nbytes))
        end = start + buffer.nbytes
    # Not around the pickling: an error in there is the user's.
    with limits.named("The dataset could not be put in shared memory"):
        fd = memfd("keras_fastdata-dataset")
        try:
            os.ftruncate(fd, end)
            head = _HEADER.pack(len(pickled), len(buffers))
            head += b"".join(_EXTENT.pack(*extent) for extent in extents)
            _write_at(fd, memoryview(head), 0)
            _write_at(fd, pickled, table)
            for (start, _), buffer in zip(extents, buffers, strict=True):
                _write_at(fd, buffer, start)
        except BaseException:
            os.close(fd)
            raise
    return fd


def can_be_written(obj: Any) -> bool:
    """Whether `write_payload` would take `obj`."""
    try:
        handles.Pickler(
            io.BytesIO(), protocol=5, buffer_callback=lambda _: None
        ).dump(obj)
    except Exception:
        # Pickling runs the user's `__reduce__` and `__getstate__`: anything.
        return False
    return True


def read_payload(fd: int) -> Any:
    """Rebuilds the object; its arrays lie in a private mapping of the file."""
    view = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY))
    pickled, count = _HEADER.unpack_from(view)
    table = _HEADER.size + _EXTENT.size * count
    extents = _EXTENT.iter_unpack(view[_HEADER.size : table])
    buffers = [view[start : start + nbytes] for start, nbytes in extents]
    return pickle.loads(view[table : table + pickled], buffers=buffers)


def _write_at(fd: int, view: memoryview, offset: int) -> None:
    while view.nbytes:
        written = os.pwrite(fd, view, offset)
        offset += written
        view = view[written:]
