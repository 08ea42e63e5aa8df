"""Datasets that use the memory of portable workers in every way.

This module does not import Keras, so that a worker which imports it does not.
"""

from __future__ import annotations

import gc
import os
import signal
import time

import numpy as np

from keras_fastdata import FastPyDataset
from keras_fastdata.workers import worker_loop

LARGE = 200_000  # elements; more than is copied on delivery


class Sized(FastPyDataset):
    """Batch i is an array of `sizes[i]` times i."""

    def __init__(self, sizes, **kwargs):
        super().__init__(**kwargs)
        self.sizes = sizes

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, index):
        return np.full(self.sizes[index], index, "float32")


class InPlace(FastPyDataset):
    """Batch i has arrays from `self.empty`, of i + 1 times the size."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        size = LARGE * (index + 1)
        first, second = self.empty(size), self.empty(2 * size)
        third = np.full(size, index, "float32")
        first.fill(index)
        second.fill(index + 100)
        return first, third, second


class Keeps(FastPyDataset):
    """Fills one array from `self.empty` for every batch."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if not hasattr(self, "kept"):
            self.kept = self.empty(LARGE)
        self.kept.fill(index)
        return self.kept


class Pickled(FastPyDataset):
    """Batch i has large arrays in a set and an object, so it is pickled."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        arrays = [np.full(LARGE * n, index, "float32") for n in (1, 3, 9)]
        return {"arrays": tuple(arrays), "also": {index}, 5: bytes(300_000)}


class Large(FastPyDataset):
    """Batch i is the sum of the table; the table is large."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table = np.zeros(1 << 21)

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return np.array([self.table[0], self.table[-1], index])


class TellsProcess(FastPyDataset):
    """Batch i is the worker's process id; batches take `pause_s`."""

    def __init__(self, length=8, pause_s=0.0, **kwargs):
        super().__init__(**kwargs)
        self.length = length
        self.pause_s = pause_s

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        time.sleep(self.pause_s)
        return np.array([os.getpid()])


class Dies(FastPyDataset):
    """Ends its first worker, or builds large and small random batches.

    Args:
        deaths: A file that is written before the death; `None` for no death.
        at: When the worker ends: "start", "build" (of batch 3), or "write"
            (while batch 3 is written into memory from `self.empty`).
        how: "terminate", or the status for `os._exit`.
    """

    def __init__(self, deaths=None, at="", how="", length=8, **kwargs):
        super().__init__(**kwargs)
        self.deaths, self.at, self.how = deaths, at, how
        self.length = length

    def __len__(self):
        return self.length

    def on_worker_start(self):
        self._die_at("start")

    def __getitem__(self, index):
        if index == 3:
            self._die_at("build")
        large = self.empty((3, LARGE), "float64")
        for row in large:
            row[:] = self.rng.random(LARGE)
            if index == 3:
                self._die_at("write")
        return large, self.rng.random(LARGE), self.rng.random(index)

    def _die_at(self, place):
        if place != self.at or self.deaths.exists():
            return
        self.deaths.write_text(place)
        if self.how == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        os._exit(int(self.how))


class EndsItsResults(FastPyDataset):
    """Batch 3 closes the pipe of results once, and does not end."""

    def __init__(self, pid, **kwargs):
        super().__init__(**kwargs)
        self.pid = pid

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index == 3 and not self.pid.exists():
            self.pid.write_text(str(os.getpid()))
            for each in gc.get_objects():
                if isinstance(each, worker_loop.WorkerLoop):
                    each._results.pipe.close()
            time.sleep(600)
        return np.array([index])


class FailsToStart(FastPyDataset):
    """Raises in `on_worker_start`, with a long text."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return np.array([index])

    def on_worker_start(self):
        raise KeyError("no such file " + "x" * 500_000)
