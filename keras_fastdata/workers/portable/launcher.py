"""Starts a worker as a new interpreter that inherits files and pipes.

`multiprocessing` is not used: its workers import `__main__` again, cannot have
environment variables of their own, and get a Ctrl-C that is for the trainer.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
from collections.abc import Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any

from keras_fastdata.workers import environment, resource_tracker

_KILL = 9  # SIGKILL on POSIX; on Windows, the exit status

_BOOTSTRAP = (
    "import sys; sys.path.extend(p for p in {path!r} if p not in sys.path); "
    "from keras_fastdata import _process_role; _process_role.become_worker(); "
    "import keras_fastdata.dataset; "
    "from keras_fastdata.workers import resource_tracker; "
    "resource_tracker.adopt({tracker}); "
    "from keras_fastdata.workers.portable import worker_main; "
    "worker_main.run({trainer}, {files}, {pipes})"
)

_msvcrt: Any = None
with contextlib.suppress(ImportError):
    _msvcrt = importlib.import_module("msvcrt")


def start(
    environ: dict[str, str], files: Sequence[int], pipes: Sequence[Connection]
) -> subprocess.Popen[bytes]:
    """Starts a worker that inherits the given descriptors and pipe ends."""
    handles = [_handle_of(fd) for fd in files]
    ends = [end.fileno() for end in pipes]
    tracker = resource_tracker.descriptors()
    code = _BOOTSTRAP.format(
        path=environment.import_paths(),
        trainer=os.getpid(),
        files=handles,
        pipes=ends,
        tracker=tracker,
    )
    how: dict[str, Any] = {}
    if _msvcrt is None:
        how["pass_fds"] = [*handles, *ends, *tracker]
    else:
        for handle in (*handles, *ends):
            os.set_handle_inheritable(handle, True)  # type: ignore[attr-defined]
        how["startupinfo"] = subprocess.STARTUPINFO(  # type: ignore[attr-defined]
            lpAttributeList={"handle_list": [*handles, *ends]}
        )
    # Ctrl-C in the terminal is for the trainer.
    if hasattr(os, "killpg"):
        how["process_group"] = 0
    elif hasattr(subprocess, "CREATE_NEW_PROCESS_GROUP"):
        how["creationflags"] = subprocess.CREATE_NEW_PROCESS_GROUP
    return subprocess.Popen(
        [*environment.interpreter(), code],
        env=environ,
        stdin=subprocess.DEVNULL,
        **how,
    )


def inherited_file(handle: int) -> int:
    """Opens a file that this worker has inherited; returns a descriptor."""
    if _msvcrt is not None:
        fd: int = _msvcrt.open_osfhandle(handle, os.O_RDWR)
        return fd
    os.set_inheritable(handle, False)
    return handle


def inherited_pipe(handle: int, *, writes: bool) -> Connection:
    """Opens one end of a pipe that this worker has inherited."""
    kind: Any = getattr(connection, "PipeConnection", Connection)
    if _msvcrt is None:
        os.set_inheritable(handle, False)
    end: Connection = kind(handle, readable=not writes, writable=writes)
    return end


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a worker and, where process groups exist, its child processes."""
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, _KILL)
        elif process.poll() is None:
            os.kill(process.pid, _KILL)


def end_this_worker(status: int) -> None:
    """Ends this process and, if process groups exist, its child processes."""
    if hasattr(os, "killpg"):
        os.killpg(0, _KILL)
    os._exit(status)


def _handle_of(fd: int) -> int:
    """Returns the handle that a child process inherits for a descriptor."""
    handle: int = fd if _msvcrt is None else _msvcrt.get_osfhandle(fd)
    return handle
