"""Datasets to profile. Without a main guard, and none is needed."""

from __future__ import annotations

import os
import time

import numpy as np

from keras_fastdata import FastPyDataset


class Sleeping(FastPyDataset):
    """Waits, as for a disk."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        time.sleep(0.03)
        return np.zeros((4, 4), "float32"), np.zeros(4, "float32")


class Looping(FastPyDataset):
    """Runs Python code, which holds the GIL."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        total = 0
        for number in range(400_000):
            total += number & 3
        return np.full((4, 4), total, "float32"), np.zeros(4, "float32")


class Quick(FastPyDataset):
    """Has nothing to do."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return np.zeros((4, 4), "float32"), np.zeros(4, "float32")


class Chatty(Quick):
    """Prints, in Python and past it."""

    def __getitem__(self, index):
        print("building", index)
        os.write(1, b"past Python\n")
        return super().__getitem__(index)


class Endless(Quick):
    """Has no end."""

    num_batches = None


class Empty(Quick):
    """Has no batch."""

    def __len__(self):
        return 0


class Generating(Quick):
    """Holds what cannot be pickled."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.generator = (number for number in range(3))


class Broken(Quick):
    """Raises for one batch."""

    def __getitem__(self, index):
        if index == 2:
            raise ValueError("no such image")
        return super().__getitem__(index)


class Announced(Quick):
    """Says when it builds, and takes its time."""

    def __getitem__(self, index):
        with open("building", "w"):
            time.sleep(60)


class Demanding(Quick):
    """Wants an argument."""

    def __init__(self, folder, **kwargs):
        super().__init__(**kwargs)
        self.folder = folder


quick = Quick(workers=3)
number = 3


def make():
    """A factory."""
    return Quick(max_queue_size=7)


def make_nothing():
    """A factory that forgot to return."""


def make_error():
    """A factory that raises."""
    raise RuntimeError("in the factory")
