"""Checks whether the system has what worker processes on Linux need."""

from __future__ import annotations

import errno
import importlib.util
import os
import select
import signal
import socket
from collections.abc import Callable

_REFUSALS = {errno.ENOSYS, errno.EPERM, errno.EPROTONOSUPPORT, errno.EINVAL}


def lacking() -> list[str]:
    """Returns the system calls and modules that are missing or refused."""
    missing = [name for name, found in _FOUND.items() if not found()]
    return missing or [name for name, tried in _TRIED.items() if not tried()]


_FOUND: dict[str, Callable[[], bool]] = {
    "fork": lambda: hasattr(os, "fork"),
    "memfd_create": lambda: hasattr(os, "memfd_create"),
    "pidfd_open": lambda: hasattr(os, "pidfd_open"),
    "pidfd_send_signal": lambda: hasattr(signal, "pidfd_send_signal"),
    "epoll": lambda: hasattr(select, "epoll"),
    "poll": lambda: hasattr(select, "poll"),
    "SOCK_SEQPACKET": lambda: (
        hasattr(socket, "AF_UNIX") and hasattr(socket, "SOCK_SEQPACKET")
    ),
    "SIGKILL": lambda: hasattr(signal, "SIGKILL"),
    "fcntl": lambda: _can_import("fcntl"),
    "resource": lambda: _can_import("resource"),
}


def _can_import(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # None in `sys.modules`
        return False


def _tried(make: Callable[[], int]) -> bool:
    """Returns whether the system permits a call, even if the call fails."""
    try:
        os.close(make())
    except OSError as error:
        return error.errno not in _REFUSALS
    return True


def _socket_pair() -> int:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    other.close()
    return one.detach()


_TRIED: dict[str, Callable[[], bool]] = {
    "memfd_create": lambda: _tried(lambda: os.memfd_create("keras_fastdata")),
    "pidfd_open": lambda: _tried(lambda: os.pidfd_open(os.getpid())),
    "SOCK_SEQPACKET": lambda: _tried(_socket_pair),
}
