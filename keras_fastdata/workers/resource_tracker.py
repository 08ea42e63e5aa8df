"""Has worker processes use the resource tracker of the training process.

The resource tracker of `multiprocessing` is a process that removes shared
memory and locks once all processes that know it have ended. The children of
`multiprocessing` get the tracker of their parent. If a worker started its own
one, this tracker would end with the worker, and remove shared memory of the
training process that the worker has only opened.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from multiprocessing import resource_tracker
from typing import Any

from keras_fastdata.memory import os_limits
from keras_fastdata.workers.low_descriptors import moved
from keras_fastdata.workers.worker_process import NOT_FOR_US

_tracker: Any = resource_tracker._resource_tracker  # noqa: SLF001


def descriptors() -> list[int]:
    """Returns the descriptor to pass to a worker, if the system has trackers.

    Starts the tracker of this process, unless it runs. What a job or a
    terminal sends to all of its processes does not end the tracker.
    """
    if os.name != "posix":
        return []
    os_limits.keep_standard_files()
    with _blocked(NOT_FOR_US):
        return [_tracker.getfd()]


def adopt(inherited: list[int]) -> None:
    """Has this process use the tracker whose descriptor it was passed."""
    for fd in inherited:
        os.set_inheritable(fd, False)  # `multiprocessing` passes it on itself
        _tracker._fd = moved(fd)  # noqa: SLF001


@contextlib.contextmanager
def _blocked(signals: tuple[signal.Signals, ...]) -> Iterator[None]:
    """Blocks signals in this thread, and for ever in what the block starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
