"""The fork servers of the training process, and their users.

All launchers whose workers are to be alike when they begin share a fork server
(see `Key`). It ends with the last of them. But the fork server with packages
that was left last is kept for a minute: programs open one dataset after the
other, as in cross-validation, and each would wait for the imports.
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Iterator

from keras_fastdata import _process_role
from keras_fastdata.workers.process.forkserver_connection import (
    ForkserverConnection,
    ForkserverState,
)
from keras_fastdata.workers.process.inherited import Key

# The fork servers of this process. The lock is reentrant: a dataset may be
# collected, and so closed, while it is held.
_forkservers: dict[Key, ForkserverConnection] = {}


_forkservers_lock = threading.RLock()


# The fork server without users that waits for one. Those that it is a fork of
# wait with it, unless they have other users.
_kept: ForkserverConnection | None = None


# Those that somebody has left. Leaving waits for no lock: a dataset may be
# collected by a thread that holds the lock of another fork server.
_left: collections.deque[ForkserverConnection] = collections.deque()


def forkserver_pids() -> list[int]:
    """Returns the process ids of the fork servers of this process."""
    servers = list(_forkservers.values())
    return [server.pid for server in servers if server.pid]


def join(key: Key) -> ForkserverConnection:
    """Returns the fork server for a key, and counts the caller as a user."""
    kept = _kept
    if kept is not None and not kept.is_current:
        close_kept()
    try:
        with _forkservers_lock:
            found = _forkservers.get(key)
            if (
                found is None
                or found.state is ForkserverState.GONE
                or not found.is_current
            ):
                base = None if key.imports is None else _base_of(key)
                found = _forkservers[key] = ForkserverConnection(key, base)
            _use(found)
            return found
    finally:
        _close_left()


def _use(server: ForkserverConnection) -> None:
    """Counts one user more; what was kept for it is in use again."""
    global _kept
    was_kept = server.state is ForkserverState.KEPT
    server.add_user()
    if server is _kept:
        _kept = None
    if was_kept and server.base is not None:
        _use(server.base)


def _base_of(key: Key) -> ForkserverConnection:
    """Returns the fork server from which to fork a new fork server.

    It has the most of the packages that are wanted, and no others. The new
    fork server counts as one of its users.
    """
    wanted = key.imports
    assert wanted is not None
    bases = [
        server
        for other, server in _forkservers.items()
        if other.imports is not None
        and server.state in (ForkserverState.READY, ForkserverState.KEPT)
        and other._replace(imports=wanted) == key
        and other.imports.surroundings == wanted.surroundings
        and {*other.imports.names} < {*wanted.names}
        and {*other.imports.stamps} <= {*wanted.stamps}
        and server.is_current
    ]
    if not bases:
        return join(key._replace(imports=None))
    base = max(bases, key=_num_names)
    _use(base)
    return base


def _num_names(server: ForkserverConnection) -> int:
    return 0 if server.key.imports is None else len(server.key.imports.names)


def leave(held: ForkserverConnection) -> None:
    """Counts one user less; the fork server ends or is kept after its last."""
    _left.append(held)
    _close_left()


def close_kept() -> None:
    """Ends the fork servers that are kept, if there are any."""
    global _kept
    with _forkservers_lock:
        unused, _kept = _waiting(_kept), None
        _forget(unused)
    for server in unused:
        server.close()


def _close_at_exit() -> None:
    """Ends the fork servers that are kept, unless Python has no names left.

    An `atexit` handler may be the first to use processes. Then this runs last,
    and a fork server ends as it loses the connection.
    """
    if _forkservers_lock is not None:
        close_kept()


# After the datasets, whose finalizers are made later, and so run before.
weakref.finalize(_left, _close_at_exit)


def _close_left() -> None:
    """Closes unused fork servers, unless another thread is closing them."""
    unused: list[ForkserverConnection] = []
    while _left and _forkservers_lock.acquire(blocking=False):
        try:
            while _left:
                held = _left.popleft()
                if not held.drop_user():
                    unused += _keep_or_forget(held)
        finally:
            _forkservers_lock.release()
        while unused:
            unused.pop(0).close()


def _keep_or_forget(held: ForkserverConnection) -> list[ForkserverConnection]:
    """Returns the fork servers to close after the last user of one has left.

    What a fork server is a fork of ends, or is kept, with it, unless others use
    that too.
    """
    global _kept
    unused = [held]
    while (base := unused[-1].base) is not None and not base.drop_user():
        unused.append(base)
    before = _kept
    has_kept_fork = held in _with_bases(before)
    if (has_kept_fork or held.key.imports is not None) and all(
        server.keep() for server in unused
    ):
        if has_kept_fork:
            return []
        _kept = held
        unused = [each for each in _waiting(before) if each not in unused]
    _forget(unused)
    return unused


def _with_bases(
    server: ForkserverConnection | None,
) -> Iterator[ForkserverConnection]:
    """Yields a fork server, and those that it is a fork of."""
    while server is not None:
        yield server
        server = server.base


def _waiting(kept: ForkserverConnection | None) -> list[ForkserverConnection]:
    """Returns which of a kept fork server and its bases have no user."""
    return [
        server
        for server in _with_bases(kept)
        if server.state is ForkserverState.KEPT
    ]


def _forget(unused: list[ForkserverConnection]) -> None:
    for server in unused:
        if _forkservers.get(server.key) is server:
            del _forkservers[server.key]


def _after_fork() -> None:
    """Drops the parent's fork servers and lock in a forked child process."""
    global _forkservers_lock, _kept
    _forkservers_lock = threading.RLock()
    _kept = None
    _forkservers.clear()
    _left.clear()


_process_role.at_fork(after_in_child=_after_fork)
