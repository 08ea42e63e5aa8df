"""What befalls the workers in `chaos` and `soak`."""

from __future__ import annotations

import collections
import contextlib
import os
import random
import signal
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from typing import Any

from keras_fastdata.workers.process.forkservers import forkserver_pids


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    found = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += [int(child) for child in file.read().split()]
    return found


def forkservers() -> list[int]:
    """The processes that fork this one's workers."""
    return forkserver_pids()


def workers() -> list[int]:
    """The worker processes of this one, and what else it has started.

    But for the resource tracker of `multiprocessing`, which is there to stay.
    """
    servers = forkservers()
    parents = [os.getpid(), *servers]
    found = [child for parent in parents for child in children(parent)]
    tracker: Any = resource_tracker._resource_tracker
    return [child for child in found if child not in (*servers, tracker._pid)]


class Trouble(threading.Thread):
    """Sends signals to random processes of ours, again and again.

    Args:
        seed: Of the choices.
        pause_s: Seconds from one to the next, on the average.
        kinds: What to do, each with a weight: the name of a signal for a
            worker, or "forkserver" to kill the fork server.
        spread: 0 keeps the pace; 1 varies it from none to twice as long.

    Attributes:
        done: How often each has been done.
    """

    def __init__(
        self,
        seed: int,
        pause_s: float,
        kinds: dict[str, float],
        spread: float = 1.0,
    ) -> None:
        super().__init__(name="trouble", daemon=True)
        self.done: collections.Counter[str] = collections.Counter()
        self._rng = random.Random(seed)
        self._pause_s = pause_s
        self._spread = spread
        self._kinds = kinds
        self._over = threading.Event()

    def __enter__(self) -> Trouble:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        while not self._over.wait(self._pause()):
            names = list(self._kinds)
            kind = self._rng.choices(names, list(self._kinds.values()))[0]
            find: Callable[[], list[int]] = workers
            number = getattr(signal, kind, signal.SIGKILL)
            if kind == "forkserver":
                find = forkservers
            if found := find():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._rng.choice(found), number)
                    self.done[kind] += 1

    def _pause(self) -> float:
        spread = self._pause_s * self._spread
        return self._rng.uniform(self._pause_s - spread, self._pause_s + spread)
