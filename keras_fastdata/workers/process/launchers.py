"""Starts worker processes by three methods.

    forkserver   a small process, or one with the packages needed, forks them
    spawn        each is a fresh interpreter, started by the trainer
    fork         each is a copy of the trainer itself

Runs in the training process.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from keras_fastdata._modules import installed_imports
from keras_fastdata.errors import LoaderError
from keras_fastdata.memory.arena import Segment
from keras_fastdata.workers import (
    environment,
    resource_tracker,
    worker_process,
)
from keras_fastdata.workers.base import Builds
from keras_fastdata.workers.process import (
    imports,
    packages,
    worker_main,
)
from keras_fastdata.workers.process.children import (
    STARTING,
    Child,
    DirectChild,
    own_pidfd,
    start_python,
)
from keras_fastdata.workers.process.forkserver_connection import (
    ForkserverConnection,
    ForkserverGoneError,
    ThreadsError,
    is_refused,
)
from keras_fastdata.workers.process.forkservers import join, leave
from keras_fastdata.workers.process.inherited import (
    Key,
    key_of_this_process,
)

_FORKSERVERS = 4  # that may die one after the other before it is an error


class Launcher(Protocol):
    """The interface to start worker processes by one start method.

    Attributes:
        importing: The package being imported for new workers now, or "".
    """

    @property
    def importing(self) -> str:
        return ""

    def is_ready(self, surroundings: worker_process.Surroundings) -> bool:
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
) -> worker_process.Surroundings:
    """Returns the process-wide settings of a new worker."""
    environ = environment.of_worker(worker_env)
    return worker_process.Surroundings.of_this_process(environ)


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


class ForkserverLauncher(Launcher):
    """Starts workers through a fork server, and replaces a dead fork server.

    A fork server is shared by all loaders of the process whose workers are to
    be alike when they begin (see `Key`), and ends with the last of them.

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
        self._forkserver: ForkserverConnection | None = join(self._plain_key())
        # While it starts.
        self._modules = installed_imports(modules)
        # Which still have workers.
        self._former: list[ForkserverConnection] = []

    @property
    def importing(self) -> str:
        server = self._forkserver
        return server.importing if server is not None else ""

    def is_ready(self, surroundings: worker_process.Surroundings) -> bool:
        server, key = self._current(), self._key(surroundings)
        if server.key != key:
            self._former.append(server)
            server = self._forkserver = join(key)
        try:
            return server.has_imported()
        except ForkserverGoneError:
            self._leave_dead(server)
            return False

    def start(self, files: worker_main.Files) -> Child | None:
        server = self._current()
        while True:
            try:
                child = server.fork(files)
            except ForkserverGoneError:
                if server.key.imports is not None and not server.has_forked:
                    server.refuse_all("it ends when it is to fork")
                self._leave_dead(server)
                if server.key.imports is not None:
                    return None  # `is_ready` finds another fork server
                server = self._current()
            except ThreadsError:
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
            leave(self._former.pop())

    def _current(self) -> ForkserverConnection:
        if self._forkserver is None:
            raise LoaderError("The launcher is closed.")
        return self._forkserver

    def _leave_dead(self, server: ForkserverConnection) -> None:
        """Replaces a dead fork server with a fork server without packages.

        Raises the current exception if too many ended in a row.
        """
        self._ended += 1
        if self._ended > _FORKSERVERS:
            raise
        self._forkserver = join(self._plain_key())
        leave(server)

    def _plain_key(self) -> Key:
        return key_of_this_process(self._worker_env)

    def _key(self, surroundings: worker_process.Surroundings) -> Key:
        """Returns the key of the fork server to use for the next worker."""
        stamps = {
            top: packages.stamp_of(top)
            for top in {name.partition(".")[0] for name in self._modules}
        }
        names = [
            name
            for name in self._modules
            if not is_refused(stamps[name.partition(".")[0]])
        ]
        key = self._plain_key()
        if not names:
            return key
        tops = dict.fromkeys(name.partition(".")[0] for name in names)
        wanted = imports.Imports(
            tuple(names), tuple(stamps[top] for top in tops), surroundings
        )
        return key._replace(imports=wanted)


class SpawnLauncher(Launcher):
    """Starts each worker as a new Python interpreter."""

    def __init__(self, worker_env: Mapping[str, str] | None) -> None:
        self._worker_env = worker_env

    def start(self, files: worker_main.Files) -> Child:
        env = environment.of_worker(self._worker_env)
        process = start_python("worker_main.spawned", env, files.all())
        return DirectChild(process.pid, process)


class ForkLauncher(Launcher):
    """Forks the training process, so that the dataset need not be pickled."""

    def __init__(
        self, make_builder: Callable[[], Builds], segment: Segment
    ) -> None:
        if not os.path.isdir("/proc/self/fd"):
            raise LoaderError(
                "`start_method='fork'` needs /proc, where each worker finds "
                "the open files that it opens again. Mount /proc, or use "
                "another start method."
            )
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
        resource_tracker.descriptors()  # the fork inherits what runs
        with (
            STARTING,
            own_pidfd() as trainer,
            warnings.catch_warnings(),
        ):
            # Python 3.12 and JAX warn of what the warning above has said.
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", RuntimeWarning)
            pid = os.fork()
            if not pid:
                worker_process.run_and_leave(
                    lambda: worker_main.forked(
                        trainer, files, self._make_builder, self._segment
                    )
                )
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        return DirectChild(pid, None)
