"""Converts system errors such as EMFILE into errors that name the remedy."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from keras_fastdata.errors import LoaderError

_REMEDIES = {
    errno.EMFILE: "Raise the limit on open files (`ulimit -n`), or lower "
    "`workers`.",
    errno.ENFILE: "The whole system is out of open files (`fs.file-max`).",
    errno.EAGAIN: "Raise the limit on processes and threads (`ulimit -u`) or "
    "on address space (`ulimit -v`), or lower `workers`.",
    errno.ENOMEM: "Free memory, or raise the limit on address space "
    "(`ulimit -v unlimited`).",
    errno.ENOSPC: "Shared memory is full (`/dev/shm`, or the folder of "
    "temporary files). Enlarge it, or lower `workers` or `max_queue_size`.",
    errno.EROFS: "Shared memory cannot be written to (`/dev/shm`). Mount a "
    "tmpfs there that can, or use another `start_method` or threads.",
    errno.EFBIG: "Raise the limit on file size (`ulimit -f unlimited`), "
    "which counts for shared memory too, or use threads.",
}


@contextlib.contextmanager
def named(doing: str) -> Iterator[None]:
    """Raises a `LoaderError` with a remedy for an `OSError` about a limit."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0)
        if remedy is None:
            raise
        raise LoaderError(f"{doing}: {error.strerror}. {remedy}") from error


@contextlib.contextmanager
def allowed(call: str) -> Iterator[None]:
    """Converts a refused system call into an error that names the call."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM):
            raise
        raise LoaderError(
            f"The system refuses `{call}` ({error.strerror}), which worker "
            "processes need. Linux has it from 5.3 on; a container may forbid "
            "it by its seccomp profile. Allow `memfd_create` and `pidfd_open` "
            "there, or use threads (`use_multiprocessing=False`)."
        ) from error


def keep_standard_files() -> None:
    """Opens the null device in place of each closed standard stream.

    Otherwise the next file to be opened would receive printed text.
    """
    with contextlib.suppress(OSError):
        while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(fd, True)
        os.close(fd)


def open_files() -> int:
    """Returns the maximum number of open files for this process."""
    try:
        import resource
    except ImportError:  # not POSIX
        return 256
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if allowed == resource.RLIM_INFINITY else allowed
