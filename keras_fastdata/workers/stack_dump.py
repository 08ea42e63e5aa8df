"""Reads the Python stacks of a stuck worker from outside.

A worker process gives `faulthandler` an anonymous file and a signal to write
its Python stacks on. That handler is C code that needs neither the GIL nor the
interpreter's cooperation, so it also answers from a deadlock or from deep
inside an extension. The training process holds the same file.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import threading
import time
import traceback

from keras_fastdata import _call_stack
from keras_fastdata.workers.exceptions import PACKAGE

# The highest numbers of the real-time range are the least likely to be used.
_SIGNAL = signal.SIGRTMAX - 2 if hasattr(signal, "SIGRTMAX") else 0

_ANSWER_TIMEOUT_S = 1.0
_QUIET_S = 0.05  # without a further line, after which the answer is complete
_MAX_BYTES = 64 * 1024

_BOOTSTRAP = '  File "<string>", line 1 in <module>'
_THREAD_BEGINS = re.compile(
    r'threading\.py", line \d+ in (run|_bootstrap|_bootstrap_inner)$'
)


def enable(fd: int) -> None:
    """Makes this process write its Python stacks to `fd` on a signal."""
    faulthandler.register(_SIGNAL, file=fd, all_threads=True)
    # System calls of C libraries that do not expect signals go on.
    signal.siginterrupt(_SIGNAL, False)


def request(pid: int, pidfd: int, fd: int) -> str:
    """Returns a process's Python stacks, or why they are unavailable."""
    state = status_of(pid)
    match state.get("State", "")[:1]:
        case "T" | "t":
            return "It has been stopped (SIGSTOP, or a debugger)."
        case "D":
            return (
                "It is in an uninterruptible system call "
                f"({_kernel_function(pid)}), such as on a file system that "
                "does not answer."
            )
    caught = int(state.get("SigCgt", "0"), 16)
    if not caught >> (_SIGNAL - 1) & 1:
        return "Its stack cannot be had: it has not got that far, or ended."
    start = seen = os.fstat(fd).st_size
    try:
        signal.pidfd_send_signal(pidfd, _SIGNAL)
    except ProcessLookupError:
        pass
    except PermissionError:
        return "Its stack cannot be had: it runs as another user."
    began = changed = time.monotonic()
    while (now := time.monotonic()) - began < _ANSWER_TIMEOUT_S:
        size = os.fstat(fd).st_size
        if size != seen:
            seen, changed = size, now
        elif size > start and now - changed > _QUIET_S:
            break
        time.sleep(_QUIET_S / 5)
    written = os.pread(fd, min(seen - start, _MAX_BYTES), start)
    return users_part(written.decode("utf-8", "replace")) or (
        "It does not answer, so its stack cannot be had."
    )


def users_part(dump: str) -> str:
    """Returns the lines of a stack dump that show the user's code."""
    threads: list[list[str]] = []
    for line in dump.splitlines():
        if not line.startswith(" "):
            if line:
                threads.append([line])
        elif (
            threads
            and PACKAGE not in line
            and line != _BOOTSTRAP
            and not _THREAD_BEGINS.search(line)
        ):
            threads[-1].append(line)
    return "\n".join(
        line for thread in threads if len(thread) > 1 for line in thread
    )


def of_thread(ident: int) -> str:
    """Returns the Python stack of a thread of this process."""
    stack = _call_stack.stack_of(ident)
    if not stack:
        why = "it has ended" if _call_stack.has_gil() else "Python has no GIL"
        return f"Its stack cannot be had: {why}."
    summary = traceback.StackSummary.from_list(
        [(call.file, call.line, call.function, None) for call in stack[::-1]]
    )
    # The first lines are how a thread begins.
    return "".join(
        line
        for line in summary.format()
        if PACKAGE not in line and threading.__file__ not in line
    ).rstrip()


def status_of(pid: int | str) -> dict[str, str]:
    """Returns the fields of /proc/<pid>/status; `pid` may be "self"."""
    with (
        contextlib.suppress(OSError),
        open(f"/proc/{pid}/status", errors="replace") as file,
    ):
        pairs = (line.partition(":") for line in file)
        return {name: value.strip() for name, _, value in pairs}
    return {}


def _kernel_function(pid: int) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan") as file:
        return file.read() or "unknown"
    return "unknown"
