"""CPU time and memory of a process together with all it has started."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

import psutil


def family(pid: int | None = None) -> list[psutil.Process]:
    """A process and its descendants."""
    head = psutil.Process(pid)
    return [head, *head.children(recursive=True)]


def cpu_s() -> float:
    """CPU seconds of this family so far, ended children included."""
    total = 0.0
    for process in family():
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
            total += times.children_user + times.children_system
    return total


def pss_mb(processes: list[psutil.Process] | None = None) -> float:
    """Proportional set size, in MB: memory shared by n counts 1/n for each."""
    return _memory_mb("pss", processes or family())


def private_mb(processes: list[psutil.Process]) -> float:
    """What these processes share with nobody, in MB."""
    return _memory_mb("uss", processes)


def _memory_mb(kind: str, processes: list[psutil.Process]) -> float:
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            total += getattr(process.memory_full_info(), kind)
    return total / 1e6


class Watch(threading.Thread):
    """Samples the memory of this family while the main thread goes on.

    Attributes:
        peak_mb: The largest PSS so far.
        samples: How many have been taken.
    """

    def __init__(self, pause_s: float = 0.05) -> None:
        super().__init__(daemon=True)
        self.peak_mb = 0.0
        self.samples = 0
        self._pause_s = pause_s
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(self._pause_s):
            self.peak_mb = max(self.peak_mb, pss_mb())
            self.samples += 1

    def end(self) -> None:
        self._over.set()
        self.join()


def kill_session(pid: int) -> None:
    """Kills a process that leads a session, its descendants, and the session.

    Resource trackers are spared: they end by themselves, once they have
    removed the shared memory and semaphores that the others have left.
    """
    doomed = []
    with contextlib.suppress(psutil.NoSuchProcess):
        doomed = family(pid)
    for process in {*doomed, *filter(_in_session(pid), psutil.process_iter())}:
        with contextlib.suppress(psutil.Error):
            if not any(
                "resource_tracker" in part for part in process.cmdline()
            ):
                process.kill()


def _in_session(pid: int) -> Callable[[psutil.Process], bool]:
    def is_in_it(process: psutil.Process) -> bool:
        try:
            return os.getsid(process.pid) == pid
        except OSError:
            return False

    return is_in_it
