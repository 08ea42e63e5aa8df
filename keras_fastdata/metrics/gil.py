"""Measures how often a thread has to wait for the GIL (Python's lock).

A probe thread sleeps for a moment, again and again. After each sleep it needs
the lock. If other threads run Python code, it gets the lock late: they are
asked to release it only after `sys.getswitchinterval()`.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import weakref

from keras_fastdata._call_stack import has_gil
from keras_fastdata.metrics.recorder import Recorder
from keras_fastdata.metrics.timing import RunDelay, pause_s

_IDLE_S = 5.0  # without a batch, after which the probe ends


class GilProbe:
    """Measures how often threads wait for the GIL, by a thread of its own."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = weakref.ref(recorder)
        self._over = threading.Event()
        self._looks = self._late = 0
        self._thread: threading.Thread | None = None

    def watch(self) -> None:
        """Starts the probe's thread, unless it runs or Python has no GIL."""
        if has_gil() and (self._thread is None or not self._thread.is_alive()):
            self._over.clear()
            self._thread = threading.Thread(
                target=self._run, name="keras_fastdata-gil-probe", daemon=True
            )
            self._thread.start()

    def take(self) -> float:
        """Returns the share of probes since the last call that had to wait.

        Only the probes since the previous call count; NaN without such probes.
        0 if Python runs without the GIL.
        """
        if not has_gil():
            return 0.0
        looks, late = self._looks, self._late
        self._looks = self._late = 0
        return late / looks if looks else math.nan

    def close(self) -> None:
        """Stops the probe's thread. Idempotent."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        run_delay = RunDelay()
        try:
            batches = -1
            delay_s, began_s = run_delay.read(), time.monotonic()
            since_s = began_s  # when the latest batch was noticed
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
                # Time without a core is not time without the lock.
                late_s -= delay_s - before_s
                self._looks += 1
                self._late += late_s > sys.getswitchinterval() / 10
        finally:
            run_delay.close()
