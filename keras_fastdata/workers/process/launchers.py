"""Starts worker processes by three methods, and reads their exit codes.

    forkserver   a small process, or one with the packages needed, forks them
    spawn        each is a fresh interpreter, started by the trainer
    fork         each is a copy of the trainer itself

Runs in the training process. `multiprocessing` is not used: its workers
import `__main__` again, and outlive what ours must not.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import fcntl
import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

from keras_fastdata import _process_role
from keras_fastdata._modules import installed_imports
from keras_fastdata.errors import LoaderError
from keras_fastdata.memory import os_limits
from keras_fastdata.memory.arena import Segment
from keras_fastdata.memory.shared_state import write_shared_state
from keras_fastdata.workers import environment, stack_dump
from keras_fastdata.workers.base import Builds
from keras_fastdata.workers.process import (
    forkserver,
    imports,
    messages,
    worker_main,
)

_START_TIMEOUT_S = 60.0  # for an interpreter to start on a loaded machine
_NOTICE_WAIT_S = 1.0
_EXIT_LOOK_S = 0.05  # between two looks while another thread reads notices
_EXIT_TIMEOUT_S = 0.5  # for a process whose socket has closed to end
_FORKSERVERS = 4  # that may die one after the other before it is an error
_END_TIMEOUT_S = 5.0  # for the kernel to deliver SIGKILL
_IMPORT_TIMEOUT_S = 120.0  # for one package, before each worker imports it

_log = logging.getLogger("keras_fastdata")

_BOOTSTRAP = (
    "import sys; sys.path.extend(p for p in {path!r} if p not in sys.path); "
    "from keras_fastdata import _process_role; _process_role.become_worker(); "
    "import keras_fastdata.dataset; "
    "from keras_fastdata.workers.process import forkserver, worker_main; "
    "{function}({trainer}, {fds})"
)


class Child(Protocol):
    """A started worker process.

    Attributes:
        pid: Its process id, which is also its process group's.
        pidfd: Becomes readable when it has ended; owned by this object.
        forkserver: Process id of the fork server that forked it, if one did.
    """

    pid: int
    pidfd: int
    forkserver: int | None = None

    def exit_code(self, timeout_s: float) -> int | None:
        """Returns the exit code as in `Popen.returncode`, or `None` if unknown.

        To be called once `pidfd` is readable. Kills what it left running.
        """

    def abandon(self) -> None:
        """Declares that the exit code of the process is no longer needed."""
        return


class Launcher(Protocol):
    """The interface to start worker processes by one start method.

    Attributes:
        importing: The package that is imported before workers start, or "".
    """

    @property
    def importing(self) -> str:
        return ""

    def is_ready(self, surroundings: worker_main.Surroundings) -> bool:
        """Returns whether a worker can be started without a long wait.

        Where packages are imported first, a call begins the import.

        Args:
            surroundings: What the worker's environment will be.
        """
        return True

    def start(self, files: worker_main.Files) -> Child | None:
        """Starts a worker with copies of the given descriptors.

        Returns `None` if it cannot be started now; see `is_ready`.
        """

    def close(self) -> None:
        """Releases the fork server, if there is one. Idempotent."""
        return


def surroundings(
    worker_env: Mapping[str, str] | None,
) -> worker_main.Surroundings:
    """Returns the process-wide settings of a new worker."""
    environ = environment.of_worker(worker_env)
    return worker_main.Surroundings.of_this_process(environ)


def kill(worker: Child, number: int = signal.SIGKILL) -> bool:
    """Sends SIGKILL, or `number`, to a worker; returns False if forbidden."""
    try:
        signal.pidfd_send_signal(worker.pidfd, number)
    except PermissionError:
        return False
    except ProcessLookupError:
        pass
    return True


def make_launcher(
    start_method: str,
    worker_env: Mapping[str, str] | None,
    make_builder: Callable[[], Builds],
    segment: Segment,
    modules: Iterable[str] = (),
) -> Launcher:
    """Returns the launcher for a start method.

    Args:
        start_method: "forkserver", "spawn" or "fork".
        worker_env: Environment variables over the clean defaults.
        make_builder: Used by "fork" alone, whose workers need no pickle.
        segment: Used by "fork" alone, whose workers have it mapped already.
        modules: Used by "forkserver" alone; see `ForkserverLauncher`.
    """
    if start_method == "fork":
        return ForkLauncher(make_builder, segment)
    if start_method == "spawn":
        return SpawnLauncher(worker_env)
    return ForkserverLauncher(worker_env, modules)


# -- forkserver ----------------------------------------------------------------


class ForkserverLauncher(Launcher):
    """Starts workers through a fork server, and replaces a dead fork server.

    A fork server is shared by all loaders of the process whose workers are to
    be alike when they begin (see `_Key`), and ends with the last of them.

    Args:
        worker_env: Environment variables over the clean defaults.
        modules: The modules that the dataset refers to. The fork server
            imports the installed ones among them, and those that they import,
            if it can be forked after that.
    """

    def __init__(
        self,
        worker_env: Mapping[str, str] | None,
        modules: Iterable[str] = (),
    ) -> None:
        self._worker_env = tuple(sorted((worker_env or {}).items()))
        self._ended = 0  # of fork servers, since one has forked
        self._forkserver: _Forkserver | None = _join(self._plain_key())
        # While it starts.
        self._modules = installed_imports(modules)
        self._former: list[_Forkserver] = []  # which still have workers

    @property
    def importing(self) -> str:
        server = self._forkserver
        return server.importing if server is not None else ""

    def is_ready(self, surroundings: worker_main.Surroundings) -> bool:
        server, key = self._current(), self._key(surroundings)
        if server.key != key:
            self._former.append(server)
            server = self._forkserver = _join(key)
        try:
            return server.has_imported()
        except _ForkserverGoneError:
            self._leave_dead(server)
            return False

    def start(self, files: worker_main.Files) -> Child | None:
        server = self._current()
        while True:
            try:
                child = server.fork(files)
            except _ForkserverGoneError:
                if server.key.imports is not None and not server.has_forked:
                    server.refuse_all("it ends when it is to fork")
                self._leave_dead(server)
                if server.key.imports is not None:
                    return None  # `is_ready` finds another fork server
                server = self._current()
            except _ThreadsError:
                if server.key.imports is None:
                    raise
                server.refuse_all("a thread was started later")
                return None
            else:
                self._ended = 0
                return child

    def close(self) -> None:
        if self._forkserver is not None:
            self._former.append(self._forkserver)
            self._forkserver = None
        while self._former:
            _leave(self._former.pop())

    def _current(self) -> _Forkserver:
        if self._forkserver is None:
            raise LoaderError("The launcher is closed.")
        return self._forkserver

    def _leave_dead(self, server: _Forkserver) -> None:
        """Replaces a dead fork server with a fork server without packages.

        Raises the current exception if too many ended in a row.
        """
        self._ended += 1
        if self._ended > _FORKSERVERS:
            raise
        self._forkserver = _join(self._plain_key())
        _leave(server)

    def _plain_key(self) -> _Key:
        return _Key(self._worker_env, _rights())

    def _key(self, surroundings: worker_main.Surroundings) -> _Key:
        """Returns the key of the fork server to use for the next worker."""
        stamps = {
            top: imports.stamp_of(top)
            for top in {name.partition(".")[0] for name in self._modules}
        }
        names = [
            name
            for name in self._modules
            if stamps[name.partition(".")[0]] not in _refused
        ]
        key = self._plain_key()
        if not names:
            return key
        tops = dict.fromkeys(name.partition(".")[0] for name in names)
        wanted = imports.Imports(
            tuple(names), tuple(stamps[top] for top in tops), surroundings
        )
        return key._replace(imports=wanted)


class _ForkserverGoneError(LoaderError):
    """Raised when the fork server has ended or does not answer."""


class _ThreadsError(LoaderError):
    """Raised when the fork server has threads, which makes forks unsafe."""


_Rights = tuple[object, ...]
_OF_RIGHTS = ("Cap", "NoNewPrivs", "Seccomp")  # in /proc/*/status


class _Key(NamedTuple):
    """The properties that all workers of one fork server have at their start.

    Attributes:
        worker_env: Environment variables over the clean defaults.
        rights: User, groups and capabilities.
        imports: What it has imported, if more than this package.
    """

    worker_env: tuple[tuple[str, str], ...]
    rights: _Rights
    imports: imports.Imports | None = None


class _State(enum.Enum):
    """The state of a fork server."""

    IMPORTING = enum.auto()  # imports packages, or is not even forked yet
    READY = enum.auto()  # forks workers
    REFUSED = enum.auto()  # must fork no more, because of what it has imported
    GONE = enum.auto()  # has ended, or does not answer


# Packages that each worker imports itself.
_refused: set[imports.Stamp] = set()


class _Forkserver:
    """The training process's connection to one fork server.

    Attributes:
        key: What it is for.
        base: The fork server that it is a fork of, if any.
        state: See `_State`.
        importing: The module that is being imported, or "".
        users: How many launchers and other fork servers use it.
        has_forked: Whether it has forked a process.
    """

    def __init__(self, key: _Key, base: _Forkserver | None) -> None:
        self.key = key
        self.base = base
        self.users = 0
        self.importing = ""
        self.has_forked = False
        self.state = _State.READY
        self._lock = threading.RLock()
        self._exit_codes: dict[int, int] = {}
        self._abandoned: set[int] = set()
        self._answers: collections.deque[tuple[bytes, int, int, list[int]]] = (
            collections.deque()
        )
        self._socket, theirs = messages.socket_pair()
        self._child: Child | None = None
        self._exit_code: int | None = None
        self._theirs: socket.socket | None = theirs
        self._limit_s = math.inf  # by `time.monotonic`
        if base is None:
            with theirs:
                process = _python(
                    "forkserver.main",
                    environment.of_worker(dict(key.worker_env)),
                    [theirs.fileno()],
                )
            self._child = _DirectChild(process.pid, process)
        else:
            self.state = _State.IMPORTING

    def fork(self, files: worker_main.Files) -> Child:
        """Forks a new worker from the fork server."""
        return self.request(forkserver.FORK, files.all())

    def has_imported(self) -> bool:
        """Returns whether all imports have succeeded, without waiting.

        Raises:
            _ForkserverGoneError: It has ended, but not because of an import.
        """
        if self.state is _State.IMPORTING and self._lock.acquire(
            blocking=False
        ):
            try:
                self._follow_import()
            finally:
                self._lock.release()
        if self.state is _State.GONE:
            raise _ForkserverGoneError("It has ended.")
        return self.state is _State.READY

    def refuse_all(self, reason: str) -> None:
        """Has each further worker import the packages for itself."""
        self.importing = ""
        self._refuse(reason)

    def exit_code(self, pid: int, timeout_s: float) -> int | None:
        deadline = time.monotonic() + timeout_s
        while (code := self._exit_codes.pop(pid, None)) is None:
            if self.state is _State.GONE or time.monotonic() > deadline:
                return None
            # A thread that keeps the lock for long reads the notices itself.
            if not self._lock.acquire(timeout=_EXIT_LOOK_S):
                continue
            try:
                if pid not in self._exit_codes:
                    self._await_notice(deadline)
            except _ForkserverGoneError:
                return None
            finally:
                self._lock.release()
        return code

    def abandon(self, pid: int) -> None:
        # Needs no lock: `_read_notice` stores the code, and then looks here.
        self._abandoned.add(pid)
        if self._exit_codes.pop(pid, None) is not None:
            self._abandoned.discard(pid)

    def close(self) -> None:
        """Ends the fork server, which kills its remaining workers."""
        is_idle = self.state in (_State.READY, _State.GONE)
        self.state = _State.GONE
        # Not just closed: a process that the user forked holds it open too.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._theirs is not None:
            self._theirs.close()
        if self._child is None:
            return
        # It may be another user's by now, and not be killed.
        if not is_idle or not messages.wait_readable(
            self._child.pidfd, _END_TIMEOUT_S
        ):
            kill(self._child)
        if self._reap(_END_TIMEOUT_S) is None:
            self._child.abandon()
        os.close(self._child.pidfd)

    @property
    def pid(self) -> int:
        """The fork server's process id, or 0 before its start."""
        return 0 if self._child is None else self._child.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process of the fork server has ended."""
        child = self._child
        return child is not None and messages.wait_readable(child.pidfd, 0)

    def _follow_import(self) -> None:
        """Starts the imports, or handles the notices about their progress."""
        try:
            if self._child is None:
                self._begin_import()
            while self.state is _State.IMPORTING and self._read_notice(0):
                pass
        except _ForkserverGoneError:
            if self.state is not _State.REFUSED:
                self.state = _State.GONE  # maybe only its base was
                raise
        if self.state is _State.IMPORTING and (
            time.monotonic() > self._limit_s
        ):
            self._refuse(f"its import takes over {_IMPORT_TIMEOUT_S:g} s")
            assert self._child is not None
            kill(self._child)

    def _begin_import(self) -> None:
        assert self.base is not None
        assert self._theirs is not None
        fd = write_shared_state(self.key.imports)
        try:
            fds = [self._theirs.fileno(), fd]
            self._child = self.base.request(forkserver.DERIVE, fds)
        finally:
            os.close(fd)
        self._theirs.close()
        self._limit_s = time.monotonic() + _IMPORT_TIMEOUT_S

    def request(self, kind: bytes, fds: list[int]) -> Child:
        """Requests a fork, and returns the new process."""
        with self._lock:
            try:
                socket.send_fds(self._socket, [kind], fds)
            except OSError as error:
                raise self._is_gone() from error
            deadline = time.monotonic() + _START_TIMEOUT_S
            while not self._answers:
                self._await_notice(deadline)
            kind, pid, number, fds = self._answers.popleft()
            if kind == forkserver.FORKED:
                self.has_forked = True
                return _ForkserverChild(self, pid, fds[0])
            if number == forkserver.HAS_THREADS:
                raise _ThreadsError(
                    "No worker process can be forked: something starts "
                    "threads as soon as Python or NumPy is there, like "
                    "`OPENBLAS_NUM_THREADS` above 1 in `worker_env`, or a "
                    "`sitecustomize`. Leave it out, or pass "
                    "`start_method='spawn'`."
                )
            raise LoaderError(
                "A worker process could not be forked: "
                f"{os.strerror(number)}. Look at the limits on processes "
                "(`ulimit -u`), open files (`ulimit -n`) and memory, or lower "
                "`workers`."
            )

    def _await_notice(self, deadline: float) -> None:
        """Waits about 1 s for a notice; raises an error after `deadline`.

        It need not be for the caller. A dataset may be collected at any line
        here, in this thread, and its workers' end be waited for: that takes
        in notices too, so none may be left that its caller waits for.
        """
        if not self._read_notice(_NOTICE_WAIT_S) and (
            time.monotonic() > deadline
        ):
            raise self._is_gone()

    def _read_notice(self, wait_s: float) -> bool:
        """Handles one notice from the server; returns False on a timeout."""
        assert self._child is not None
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._child.pidfd, select.POLLIN)
        if not (ready := poll.poll(wait_s * 1000)):
            return False
        if self._socket.fileno() not in (fd for fd, _ in ready):
            raise self._is_gone()
        try:
            datagram, fds, flags, _ = socket.recv_fds(
                self._socket,
                forkserver.NOTICE.size + forkserver.MAX_TEXT_BYTES,
                1,
                socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT,
            )
        except BlockingIOError:
            return True
        except ConnectionResetError:
            # It was killed before it had read all of our requests.
            raise self._is_gone() from None
        if not datagram:
            raise self._is_gone()
        if flags & socket.MSG_CTRUNC:
            raise LoaderError(
                "This process has no file descriptor left for a worker. "
                "Raise the limit on open files (`ulimit -n`)."
            )
        kind, pid, number = forkserver.NOTICE.unpack_from(datagram)
        if kind == forkserver.ENDED:
            self._exit_codes[pid] = number
            if pid in self._abandoned:
                self._abandoned.discard(pid)
                self._exit_codes.pop(pid, None)
        elif kind == forkserver.IMPORTING:
            assert self.key.imports is not None
            self.importing = self.key.imports.names[pid]
            self._limit_s = time.monotonic() + _IMPORT_TIMEOUT_S
        elif kind == forkserver.READY:
            self.state, self.importing = _State.READY, ""
        elif kind == forkserver.FAILED:
            self._refuse(datagram[forkserver.NOTICE.size :].decode())
        else:
            self._answers.append((kind, pid, number, fds))
        return True

    def _reap(self, timeout_s: float) -> int | None:
        """Returns the fork server's exit code, or `None` if unknown."""
        if self._exit_code is None and self._child is not None:
            self._exit_code = self._child.exit_code(timeout_s)
        return self._exit_code

    def _is_gone(self) -> _ForkserverGoneError:
        was_importing = self.state is _State.IMPORTING
        self.state = _State.GONE
        code = self._reap(_EXIT_TIMEOUT_S)
        if was_importing and code is not None:
            self._refuse(f"its import ends the process (exit code {code})")
        return _ForkserverGoneError(
            f"The process that forks workers (pid {self.pid}) has "
            f"ended or does not answer; exit code {code}. "
            "Look at the limits on memory and stack (`ulimit -a`)."
        )

    def _refuse(self, reason: str) -> None:
        """Stops sharing the package being imported; each worker imports it.

        If none is being imported, this holds for all packages.
        """
        self.state = _State.REFUSED
        assert self.key.imports is not None
        top = self.importing.partition(".")[0]
        stamps = self.key.imports.stamps
        refused = [stamp for stamp in stamps if top in ("", stamp[0])]
        _refused.update(refused)
        self.importing = ""
        _log.warning(
            "Each worker process imports %s itself, which takes longer: the "
            "process that forks workers cannot do it for all of them, because "
            "%s.",
            " and ".join(f"`{name}`" for name, *_ in refused),
            reason,
        )


class _ForkserverChild(Child):
    def __init__(self, owner: _Forkserver, pid: int, pidfd: int) -> None:
        self._owner = owner
        self.pid = pid
        self.pidfd = pidfd
        self.forkserver = owner.pid

    def exit_code(self, timeout_s: float) -> int | None:
        return self._owner.exit_code(self.pid, timeout_s)

    def abandon(self) -> None:
        self._owner.abandon(self.pid)


def _rights() -> _Rights:
    """Returns the user, groups and capabilities that children inherit."""
    status = stack_dump.status_of("thread-self")
    rest = [(k, v) for k, v in status.items() if k.startswith(_OF_RIGHTS)]
    groups = tuple(sorted(os.getgroups()))
    return os.getresuid(), os.getresgid(), groups, *sorted(rest)


# The fork servers of this process. The lock is reentrant: a dataset may be
# collected, and so closed, while it is held.
_forkservers: dict[_Key, _Forkserver] = {}
_forkservers_lock = threading.RLock()
# Those that somebody has left. Leaving waits for no lock: a dataset may be
# collected by a thread that holds the lock of another fork server.
_left: collections.deque[_Forkserver] = collections.deque()


def forkserver_pids() -> list[int]:
    """Returns the process ids of the fork servers of this process."""
    servers = list(_forkservers.values())
    return [server.pid for server in servers if server.pid]


def _join(key: _Key) -> _Forkserver:
    """Returns the fork server for a key, and counts the caller as a user."""
    try:
        with _forkservers_lock:
            found = _forkservers.get(key)
            if found is None or found.state is _State.GONE:
                base = None if key.imports is None else _base_of(key)
                found = _forkservers[key] = _Forkserver(key, base)
            found.users += 1
            return found
    finally:
        _close_left()


def _base_of(key: _Key) -> _Forkserver:
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
        and server.state is _State.READY
        and other._replace(imports=wanted) == key
        and other.imports.surroundings == wanted.surroundings
        and {*other.imports.names} < {*wanted.names}
        and {*other.imports.stamps} <= {*wanted.stamps}
    ]
    if not bases:
        return _join(key._replace(imports=None))
    base = max(bases, key=_num_names)
    base.users += 1
    return base


def _num_names(server: _Forkserver) -> int:
    return 0 if server.key.imports is None else len(server.key.imports.names)


def _leave(held: _Forkserver) -> None:
    _left.append(held)
    _close_left()


def _close_left() -> None:
    """Closes unused fork servers, unless another thread is closing them."""
    unused: list[_Forkserver] = []
    while _left and _forkservers_lock.acquire(blocking=False):
        try:
            while _left:
                held = _left.popleft()
                held.users -= 1
                if not held.users:
                    unused.append(held)
                    if _forkservers.get(held.key) is held:
                        del _forkservers[held.key]
        finally:
            _forkservers_lock.release()
        while unused:
            held = unused.pop()
            held.close()
            if held.base is not None:
                _left.append(held.base)


def _after_fork() -> None:
    """Drops the parent's fork servers and lock in a forked child process."""
    global _forkservers_lock
    _forkservers_lock = threading.RLock()
    _forkservers.clear()
    _left.clear()


_process_role.at_fork(after_in_child=_after_fork)


# -- spawn ---------------------------------------------------------------------


class SpawnLauncher(Launcher):
    """Starts each worker as a new Python interpreter."""

    def __init__(self, worker_env: Mapping[str, str] | None) -> None:
        self._worker_env = worker_env

    def start(self, files: worker_main.Files) -> Child:
        env = environment.of_worker(self._worker_env)
        process = _python("worker_main.spawned", env, files.all())
        return _DirectChild(process.pid, process)


# -- fork ----------------------------------------------------------------------


class ForkLauncher(Launcher):
    """Forks the training process, so that the dataset need not be pickled."""

    def __init__(
        self, make_builder: Callable[[], Builds], segment: Segment
    ) -> None:
        self._make_builder = make_builder
        self._segment = segment
        warnings.warn(
            "`start_method='fork'` copies a process in which TensorFlow, JAX "
            "or PyTorch may run threads; a worker that touches one of them "
            "can deadlock. Prefer the default, unless the dataset cannot be "
            "pickled.",
            RuntimeWarning,
            stacklevel=2,
        )

    def start(self, files: worker_main.Files) -> Child:
        for stream in (sys.stdout, sys.stderr):
            # What is in their buffers would be written by the child as well.
            with contextlib.suppress(AttributeError, OSError, ValueError):
                stream.flush()
        with _own_pidfd() as trainer, warnings.catch_warnings():
            # Python 3.12 and JAX warn of what the warning above has said.
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", RuntimeWarning)
            pid = os.fork()
            if not pid:
                worker_main.run_and_leave(
                    lambda: worker_main.forked(
                        trainer, files, self._make_builder, self._segment
                    )
                )
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        return _DirectChild(pid, None)


class _DirectChild(Child):
    """A worker that is a direct child process of the training process."""

    def __init__(
        self, pid: int, process: subprocess.Popen[bytes] | None
    ) -> None:
        self.pid = pid
        self.pidfd = _pidfd_of(pid)
        self._process = process

    def exit_code(self, timeout_s: float) -> int | None:
        if not messages.wait_readable(self.pidfd, timeout_s):
            return None
        # The group first: once reaped, its number may be another's.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        # Not Popen.wait: it makes 0 of a status that is lost.
        code = None
        with contextlib.suppress(ChildProcessError):
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if self._process is not None:
            self._process.returncode = code or 0
        return code


# -- shared --------------------------------------------------------------------


def _python(
    function: str, env: dict[str, str], fds: list[int]
) -> subprocess.Popen[bytes]:
    """Starts a new interpreter that runs a function of this package.

    The function gets a pidfd of this process, and descriptors like `fds`.
    """
    interpreter = environment.interpreter()
    with _own_pidfd() as pidfd, _above_stdio([pidfd, *fds]) as passed:
        code = _BOOTSTRAP.format(
            path=environment.import_paths(),
            function=function,
            trainer=passed[0],
            fds=passed[1:],
        )
        return subprocess.Popen(
            [*interpreter, code],
            env=env,
            stdin=subprocess.DEVNULL,
            pass_fds=passed,
            process_group=0,  # Ctrl-C in the terminal is for the trainer
        )


def _pidfd_of(pid: int) -> int:
    """Opens a descriptor that becomes readable when a process ends."""
    with os_limits.allowed("pidfd_open"):
        return os.pidfd_open(pid)


@contextlib.contextmanager
def _own_pidfd() -> Iterator[int]:
    """Yields a descriptor that becomes readable when this process ends."""
    pidfd = _pidfd_of(os.getpid())
    try:
        yield pidfd
    finally:
        os.close(pidfd)


@contextlib.contextmanager
def _above_stdio(fds: list[int]) -> Iterator[list[int]]:
    """Duplicates descriptors to numbers above 2, and yields the copies.

    A trainer without standard input gives out descriptor 0 like any other.
    """
    high: list[int] = []
    try:
        for fd in fds:
            high.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3))
        yield high
    finally:
        for fd in high:
            os.close(fd)
