"""Joins a Ray cluster, and leaves it.

The cluster is shared by all loaders of the process, and by the user: one that
the user has joined (`ray.init`) is used and never left. Otherwise the first
loader joins, or starts a Ray of its own on this machine, and the last one to
end its workers leaves.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

from keras_fastdata import _process_role
from keras_fastdata.errors import LoaderError
from keras_fastdata.workers.ray.options import Options


class _Membership:
    """Records how the loaders of this process share one Ray session."""

    def __init__(self) -> None:
        self.users = 0  # how many loaders do
        self.pid = os.getpid()  # the process that this is said of
        # The session that was joined for them; `None` if the user's.
        self.joined: tuple[Any, ...] | None = None
        self.is_own = False  # whether that is a Ray that was started for them
        # Guards the three. Reentrant, because a dataset may be collected, and
        # so closed, while it is held.
        self.lock = threading.RLock()


_membership = _Membership()
_is_inherited = False


def _after_fork() -> None:
    """Resets the state in a forked child, which cannot use the parent's Ray."""
    global _membership, _is_inherited
    _membership = _Membership()
    ray: Any = sys.modules.get("ray")
    _is_inherited = ray is not None and ray.is_initialized()


_process_role.at_fork(after_in_child=_after_fork)


class Session:
    """One loader's use of Ray, from `join` until `leave`."""

    def __init__(self, member: _Membership) -> None:
        self._member: _Membership | None = member
        # Tells it from one that the user joined later.
        self.identity = _identity()

    @property
    def is_on(self) -> bool:
        """Whether this process is still connected to the same Ray session."""
        return self.identity == _identity()

    @property
    def is_shared(self) -> bool:
        """Whether Ray can keep running after this process disconnects."""
        return self._member is None or not self._member.is_own

    def leave(self, *, stay: bool = False) -> None:
        """Ends the loader's use of Ray. Idempotent.

        The last loader disconnects, unless it is to `stay`.
        """
        member, self._member = self._member, None
        if member is None or member.pid != os.getpid():
            return
        with member.lock:
            member.users -= 1
            joined = member.joined
            if stay or member.users or joined is None:
                return
            member.joined = None
            if joined == _identity():
                import ray

                ray.shutdown()


def join(options: Options) -> Session:
    """Connects this process to Ray, unless it is already connected.

    Raises:
        LoaderError: Ray is not installed, or the cluster not to be reached.
    """
    try:
        import ray
    except ImportError as error:
        raise LoaderError(
            "`executor='ray'` needs Ray: pip install 'keras-fastdata[ray]'."
        ) from error
    if _is_inherited:
        raise LoaderError(
            "This process was forked from one that had joined Ray, and cannot "
            "use it. Start it afresh (`subprocess`, or `multiprocessing` with "
            "'spawn')."
        )
    member = _membership
    with member.lock:
        if not ray.is_initialized():
            _init(options)
            member.joined = _identity()
            member.is_own = _has_started_it()
        elif member.joined != _identity():
            member.joined = None  # the user has joined another one
        member.users += 1
        return Session(member)


def _has_started_it() -> bool:
    """Returns whether this process has started the Ray head node."""
    import ray

    try:
        node = ray._private.worker._global_node
        return bool(node is not None and node.is_head())
    except AttributeError:
        return False  # nothing public tells


def _identity() -> tuple[Any, ...] | None:
    """Returns the Ray node and job ids, or `None` if not connected to Ray."""
    import ray

    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()


def _init(options: Options) -> None:
    """Calls `ray.init`, and raises a `LoaderError` if that fails."""
    import ray

    address = options.init.get("address") or os.environ.get("RAY_ADDRESS")
    if address and ":" in address:
        _probe(address, options.timeout_s)
    arguments: dict[str, Any] = {"logging_level": logging.WARNING}
    if address in (None, "", "local"):
        arguments["include_dashboard"] = False
        with contextlib.suppress(OSError):
            # Ray makes it, and the token in it, readable for all.
            os.makedirs(os.path.expanduser("~/.ray"), 0o700, exist_ok=True)
    arguments.update(options.init)
    try:
        with _no_statistics(), _on_loopback():
            try:
                ray.init(**arguments)
            except OSError as error:
                if not _is_unwritable_token(error):
                    raise
                # A process that has no token and can keep none needs none
                # later for another cluster: it may stay.
                os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
                ray.init(**arguments)
    except Exception as error:
        # Ray raises ConnectionError, RuntimeError, TimeoutError, ValueError
        # and others here.
        where = f"the cluster at {address}" if address else "Ray"
        raise LoaderError(
            f"{where[0].upper()}{where[1:]} could not be joined: {error}"
        ) from error


def _probe(address: str, timeout_s: float) -> None:
    """Checks, within a time limit, that a Ray cluster answers at `address`.

    Where nobody listens, or somebody else does, Ray tries for minutes.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout_s).close()
    except (OSError, ValueError) as error:
        raise LoaderError(
            f"Nobody answers at {address!r}, where the Ray cluster was to be "
            f"({error}). `ray start --head` prints the address of a cluster; "
            "without one (no 'address' in `ray_options`, no RAY_ADDRESS) a "
            "Ray of its own is started on this machine."
        ) from error
    code = f"import ray; ray.init(address={address!r}, log_to_driver=False)"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LoaderError(
            f"Something listens at {address!r}, but no Ray cluster could be "
            f"joined there within {timeout_s:g} s (`ray_options['timeout_s']`)."
        ) from None
    if done.returncode:
        said = done.stderr.strip().rpartition("\n")[2]
        raise LoaderError(
            f"The Ray cluster at {address!r} could not be joined: {said}"
        )


@contextlib.contextmanager
def _no_statistics() -> Iterator[None]:
    """Disables Ray's usage reports if Ray starts in the `with` block."""
    name = "RAY_USAGE_STATS_ENABLED"
    if name in os.environ:
        yield
        return
    os.environ[name] = "0"
    try:
        yield
    finally:
        os.environ.pop(name, None)


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Makes Ray listen on loopback only, if it starts in the `with` block.

    This is what Ray does on macOS and Windows. `_node_ip_address="127.0.0.1"`
    does not do it: `ray.init` replaces that by the address of the network.
    """
    constants: Any = sys.modules.get("ray._private.ray_constants")
    if constants is None:
        yield  # another Ray than those that are known
        return
    was = getattr(constants, "ENABLE_RAY_CLUSTER", None)
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = was


def _is_unwritable_token(error: OSError) -> bool:
    """Returns whether Ray failed because it could not write its token file."""
    path = os.path.expanduser("~/.ray/auth_token")
    return path.startswith(str(error.filename))


def is_alive(node: str) -> bool:
    """Returns whether a node is still part of the cluster."""
    import ray

    return any(n["NodeID"] == node and n["Alive"] for n in ray.nodes())


def store_nbytes() -> int:
    """Returns the size of this node's object store."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    for node in ray.nodes():
        if node["NodeID"] == here:
            return int(node["Resources"].get("object_store_memory", 0))
    return 0


def cores() -> float:
    """Returns the number of CPU cores in the cluster."""
    import ray

    return float(ray.cluster_resources().get("CPU", 0.0))


@functools.cache
def machine() -> str:
    """Returns an identifier of this machine and its process id namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
