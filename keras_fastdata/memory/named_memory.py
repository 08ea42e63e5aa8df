"""Creates and opens shared memory by name.

This is the memory of `multiprocessing.shared_memory`, without its process that
removes names, and without its object, which cannot be closed while arrays over
the memory are alive. A mapping here lives as long as the last array over it. On
POSIX a name stays until it is removed, so remove it as soon as both sides have
the memory. On Windows a name ends with the last mapping.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import secrets
from multiprocessing import shared_memory
from typing import Any

_posixshmem: Any = None
with contextlib.suppress(ImportError):
    _posixshmem = importlib.import_module("_posixshmem")


def new_prefix() -> str:
    """Returns a new, random prefix for the names of shared memory."""
    # macOS allows 30 characters, with the task id.
    return f"kfd_{secrets.token_hex(4)}_"


def create(name: str, nbytes: int) -> mmap.mmap:
    """Creates memory under a new name, and maps it.

    Raises:
        OSError: There is not enough memory, or a limit is too low.
    """
    if _posixshmem is None:
        tag = _tag(name, nbytes)
        return mmap.mmap(-1, nbytes, tagname=tag)  # type: ignore[call-arg]
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR
    fd = _posixshmem.shm_open(f"/{name}", flags, mode=0o600)
    try:
        os.ftruncate(fd, nbytes)
        if hasattr(os, "posix_fallocate"):
            # Where memory is full, this fails. Writing would kill the process.
            os.posix_fallocate(fd, 0, nbytes)
        return mmap.mmap(fd, nbytes)
    except BaseException:
        remove(name)
        raise
    finally:
        os.close(fd)


def attach(name: str, nbytes: int) -> mmap.mmap:
    """Maps memory that another process has created.

    Raises:
        FileNotFoundError: The memory has gone with that process.
        OSError: A limit is too low.
    """
    if _posixshmem is None:
        tag = _tag(name, nbytes)
        # Without this, `mmap` would create memory if it is gone.
        existing = shared_memory.SharedMemory(tag)
        try:
            return mmap.mmap(-1, nbytes, tagname=tag)  # type: ignore[call-arg]
        finally:
            existing.close()
    fd = _posixshmem.shm_open(f"/{name}", os.O_RDWR, mode=0o600)
    try:
        return mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)


def remove(name: str) -> None:
    """Removes a name if it exists; existing mappings stay valid."""
    if _posixshmem is not None:
        with contextlib.suppress(FileNotFoundError):
            _posixshmem.shm_unlink(f"/{name}")


def _tag(name: str, nbytes: int) -> str:
    """Returns the name to use on Windows, which also contains the size."""
    return f"{name}_{nbytes:x}"
