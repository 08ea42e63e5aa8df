"""How often a thread that wants Python's lock (the GIL) has to wait for it.

A thread that sleeps for a moment, again and again, must take the lock to go
on. Where others compute in Python, it gets it late: after
`sys.getswitchinterval()`, when they are asked to let go.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import weakref

from keras_fastdata.metrics.recorder import Recorder
from keras_fastdata.metrics.timing import RunDelay, pause_s

_IDLE_S = 5.0  # without a batch, after which nobody needs to know any more


class GilProbe:
    """Watches the lock while batches flow, from a thread of its own.

    Args:
        recorder: Tells whether they do; held weakly.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = weakref.ref(recorder)
        self._over = threading.Event()
        self._looks = self._late = 0
        self._thread: threading.Thread | None = None

    def watch(self) -> None:
        """Begins to watch, unless it does already."""
        if self._thread is None or not self._thread.is_alive():
            self._over.clear()
            self._thread = threading.Thread(
                target=self._run, name="keras_fastdata-gil-probe", daemon=True
            )
            self._thread.start()

    def take(self) -> float:
        """The share of looks since the last call that found the lock held.

        NaN where there was none.
        """
        looks, late = self._looks, self._late
        self._looks = self._late = 0
        return late / looks if looks else math.nan

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        run_delay = RunDelay()
        try:
            batches = -1
            delay_s, began_s = run_delay.read(), time.monotonic()
            since_s = began_s  # of the latest batch
            while True:
                sleep_s = pause_s(self._looks)
                over = self._over.wait(sleep_s)
                woke_s, recorder = time.monotonic(), self._recorder()
                if over or recorder is None:
                    return
                if recorder.batches != batches:
                    batches, since_s = recorder.batches, woke_s
                elif woke_s - since_s > _IDLE_S:
                    return
                del recorder
                late_s = woke_s - began_s - sleep_s
                before_s, delay_s = delay_s, run_delay.read()
                began_s = time.monotonic()
                # Waiting for a core is not waiting for the lock.
                late_s -= delay_s - before_s
                self._looks += 1
                self._late += late_s > sys.getswitchinterval() / 10
        finally:
            run_delay.close()
