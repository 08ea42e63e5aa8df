"""Keeps a worker's own files away from low descriptor numbers.

A dataset may have the number of a file that the program has opened by
`os.open`. A worker does not have that file. If the worker had a file of its own
under the number, such as a connection, the dataset would write there. So the
worker's files have high numbers, and whoever reads or writes under a low one
gets an `OSError`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

_FIRST = 128  # of the worker's own
_SHARE = 4  # the low numbers are at most such a part of those allowed


def move_away(fds: Iterable[int]) -> list[int]:
    """Moves descriptors to high numbers, and occupies the low ones.

    Returns the descriptors that take the place of `fds`. These stay as they are
    on systems without `O_PATH`, or if few descriptors are allowed.
    """
    fds = [moved(fd) for fd in fds]
    if _has_room():
        nothing = os.open("/", os.O_PATH | os.O_CLOEXEC)
        while nothing < _FIRST:  # each one takes the lowest number that is free
            nothing = os.dup(nothing)
        os.close(nothing)
    return fds


def moved(fd: int) -> int:
    """Moves a descriptor to a high number, which it returns.

    Without room for it, the descriptor stays as it is.
    """
    if not _has_room():
        return fd
    import fcntl

    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST)
    os.close(fd)
    return high


def _has_room() -> bool:
    """Returns whether the system has, and allows, high numbers."""
    if not hasattr(os, "O_PATH"):
        return False
    import resource

    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return not 0 <= allowed < _FIRST * _SHARE
