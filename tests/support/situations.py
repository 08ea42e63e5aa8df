"""Datasets that training waits for, each for another reason.

This module does not import Keras, so that a worker which imports it does not.
"""

from __future__ import annotations

import os
import time

import numpy as np

from keras_fastdata import FastPyDataset

BATCH = np.ones((4, 3), "float32"), np.ones((4, 1), "float32")


def burn(seconds):
    """Computes in Python for so much CPU time."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        sum(range(200))


class Batches(FastPyDataset):
    """Small batches, each at hand."""

    def __init__(self, length=40, **kwargs):
        super().__init__(**kwargs)
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.spend_time(index)
        return BATCH

    def spend_time(self, index):
        """What a batch costs."""


class Sleeping(Batches):
    """Waits for something, as for a disk."""

    def __init__(self, seconds, **kwargs):
        super().__init__(**kwargs)
        self.seconds = seconds

    def spend_time(self, index):
        time.sleep(self.seconds)


class Reshuffling(Sleeping):
    """Begins no epoch before its hook has run."""

    def on_epoch_end(self):
        self.order = np.random.permutation(self.length)


class Burning(Sleeping):
    """Computes in Python."""

    def spend_time(self, index):
        burn(self.seconds)


class Strided(Batches):
    """Hands out a view that is slow to copy."""

    def __init__(self, side=2048, **kwargs):
        super().__init__(**kwargs)
        self.array = np.ones((side, 16 * side), "uint8")

    def __getitem__(self, index):
        return self.array[:, ::16].T, np.ones((len(self.array), 1), "float32")


class Straggling(Batches):
    """Every 13th batch takes its time."""

    def spend_time(self, index):
        time.sleep(0.3 if index % 13 == 12 else 0.001)


class Dying(Batches):
    """Its worker dies over every fourth batch, the first time."""

    def __init__(self, folder, **kwargs):
        super().__init__(**kwargs)
        self.folder = str(folder)
        self.epochs_begun = 0

    def on_epoch_begin(self):
        self.epochs_begun += 1

    def spend_time(self, index):
        mark = f"{self.folder}/{self.epochs_begun}-{index}"
        if index % 4 == 3 and not os.path.exists(mark):
            open(mark, "w").close()
            os._exit(3)
