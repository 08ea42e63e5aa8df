"""The settings of a worker process, and its end.

The training process describes the settings; the worker applies them.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import gc
import importlib.machinery
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from keras_fastdata._modules import current_folder, import_folders, spec_of
from keras_fastdata.workers import exceptions, log_forwarding, stack_dump

# What a whole job, or a terminal, is sent. It is for the trainer to answer;
# the fork server and the workers end when it does.
NOT_FOR_US = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGBREAK")
    if hasattr(signal, name)
)
_ACTIONS = {
    # Printing to a terminal that others have (`stty tostop`) stops nobody.
    "SIGTTOU": signal.SIG_IGN,
    # To read from it fails: it would stop a worker, which waits for ever.
    "SIGTTIN": signal.SIG_IGN,
    "SIGCHLD": signal.SIG_DFL,
    "SIGTERM": signal.SIG_DFL,
}
_OOM_SCORE = 500  # of 1000: the kernel picks a worker before the trainer


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """The process-wide settings that workers copy from the training process.

    Attributes:
        environ: Environment variables, complete.
        folder: Working directory; "" to stay.
        path: `sys.path`.
        argv: `sys.argv`.
        umask: File mode creation mask.
        authkey: The key with which processes of `multiprocessing` know one
            another, as of a `Manager`.
        limits: Python's limits of recursion and of a field in a CSV file.
        script: The module's name and the file of `__main__`, or `None`.
            `multiprocessing` imports it where a build starts a process.
    """

    environ: tuple[tuple[str, str], ...]
    folder: str
    path: tuple[Any, ...]
    argv: tuple[str, ...]
    umask: int
    authkey: bytes = dataclasses.field(repr=False)
    limits: tuple[int, int]
    script: tuple[str | None, str | None]

    @staticmethod
    def of_this_process(environ: Mapping[str, str]) -> Surroundings:
        """Returns this process's settings, but with the given environment."""
        return Surroundings(
            tuple(sorted(environ.items())),
            current_folder(),
            tuple(import_folders()),
            tuple(getattr(sys, "argv", [])),
            _umask(),
            bytes(multiprocessing.current_process().authkey),
            (sys.getrecursionlimit(), csv.field_size_limit()),
            _script(),
        )

    def apply(self) -> None:
        """Applies the settings, unless the fork server has applied them.

        What the packages that it has imported then changed is kept.
        """
        global _applied
        if self == _applied:
            return
        _applied = self
        os.environ.clear()
        os.environ.update(self.environ)
        if self.folder:
            with contextlib.suppress(OSError):
                os.chdir(self.folder)
        sys.path[:] = self.path
        sys.argv[:] = self.argv
        os.umask(self.umask)
        multiprocessing.current_process().authkey = self.authkey
        recursion, field_size = self.limits
        sys.setrecursionlimit(recursion)
        csv.field_size_limit(field_size)
        _show_script(*self.script)


_applied: Surroundings | None = None  # to this process, or to its fork server


@dataclasses.dataclass(frozen=True)
class WorkerStart:
    """The settings that a worker receives before it loads the dataset.

    Attributes:
        worker: Index of the worker.
        dataset: The dataset's class name, for messages.
        version: Version of the dataset's state.
        state: Where in its file that state begins.
        stride: Bytes from slot to slot.
        surroundings: Environment, folder and paths.
        logging_config: How to log and warn.
    """

    worker: int
    dataset: str
    version: int
    state: int
    stride: int
    surroundings: Surroundings
    logging_config: log_forwarding.LoggingConfig = dataclasses.field(
        default_factory=log_forwarding.LoggingConfig.of_this_process
    )


def set_up(start: WorkerStart) -> None:
    """Sets up a worker's environment, paths, signals and streams."""
    start.surroundings.apply()
    start.logging_config.apply()
    # A handler that does nothing, rather than SIG_IGN: a program that the
    # worker starts gets the default action back, as exec resets handlers.
    for number in NOT_FOR_US:
        signal.signal(number, lambda *_: None)
    for name, action in _ACTIONS.items():
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), action)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with (
        contextlib.suppress(OSError),
        open("/proc/self/oom_score_adj", "w") as f,
    ):
        f.write(str(_OOM_SCORE))
    # When a worker wakes, it does not push the training thread off its core:
    # their turns get longer, and the caches stay warm.
    with contextlib.suppress(OSError, AttributeError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    sys.breakpointhook = exceptions.no_breakpoint
    # A fork has the trainer's; nobody could tell whom a line is for.
    with contextlib.suppress(OSError):
        sys.stdin = open(os.devnull)  # noqa: SIM115
        os.dup2(sys.stdin.fileno(), 0)
    gc.freeze()


def run_finalizers() -> None:
    """Ends the pools, and removes the locks, that builds have left open.

    `multiprocessing` does so at the end of its own processes.
    """
    util: Any = multiprocessing.util
    util._run_finalizers(0)  # noqa: SLF001


def run_and_leave(run: Callable[[], int]) -> NoReturn:
    """Calls `run`, and then ends the process, even if `run` raises."""
    status = 1
    try:
        status = run()
    except SystemExit as request:
        status = _status_of(request)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        leave(status)


def leave(status: int) -> NoReturn:
    """Ends the process without running exit handlers."""
    flush()
    os._exit(status)


def flush() -> None:
    """Flushes Python's buffers of standard output and standard error."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _script() -> tuple[str | None, str | None]:
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if isinstance(file, str):
        file = os.path.join(current_folder(), file)
    return getattr(spec_of(main), "name", None), file


def _show_script(name: str | None, file: str | None) -> None:
    """Has processes of `multiprocessing` import the script of the trainer."""
    main: Any = sys.modules["__main__"]
    if name is not None:
        main.__spec__ = importlib.machinery.ModuleSpec(name, None)
    if file is not None:
        main.__file__ = file


def _umask() -> int:
    """Returns the file mode creation mask of this process."""
    told = stack_dump.status_of("self").get("Umask")
    if told is not None:
        return int(told, 8)
    # Without /proc it is read by setting it. What another thread makes in
    # between is for this user alone.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _status_of(request: SystemExit) -> int:
    if request.code is None:
        return 0
    if not isinstance(request.code, int):
        print(request.code, file=sys.stderr)
    return request.code & 0xFF if isinstance(request.code, int) else 1
