"""Datasets for `workers="auto"`; this module does not import Keras."""

from __future__ import annotations

import os
import random
import threading
import time

import auto_config
import numpy as np

from keras_fastdata import FastPyDataset


class Waits(FastPyDataset):
    """A batch waits for a while; it is of `self.rng` and of its index."""

    def __init__(self, length=60, pause_s=0.006, **kwargs):
        super().__init__(**kwargs)
        self.length = length
        self.pause_s = pause_s

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        time.sleep(self.pause_s)
        return self.draw(index), np.full((4, 1), index, "float32")

    def draw(self, index):
        return self.rng.random((4, 3), "float32")


class Draws(Waits):
    """It draws from the global generators, from batch `since` on."""

    def __init__(self, since=0, **kwargs):
        super().__init__(**kwargs)
        self.since = since

    def draw(self, index):
        drawn = super().draw(index)
        if index >= self.since:
            drawn = np.float32(np.random.rand(4, 3) + random.random())
        return drawn


BUILDS = []  # of `Notes`: whether in the main thread, and if it begins


class Notes(Draws):
    """It notes when a build begins and ends, and takes longer for callers."""

    def __getitem__(self, index):
        here = threading.current_thread() is threading.main_thread()
        BUILDS.append((here, True))
        batch = super().__getitem__(index)
        time.sleep(0.02 * here)
        BUILDS.append((here, False))
        return batch


class Holds(Waits):
    """It draws from a generator of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.generator = np.random.default_rng(3)

    def draw(self, index):
        return self.generator.random((4, 3), "float32")


class Reseeds(Waits):
    """It has something of its own to seed."""

    def reseed(self, seed_sequence):
        self.drawn = seed_sequence.generate_state(12)

    def draw(self, index):
        return np.float32(self.drawn.reshape(4, 3) / 2**32)


class Opens(Waits):
    """Each worker opens something that only it can use."""

    def on_worker_start(self):
        self.opened = threading.Lock()

    def draw(self, index):
        with self.opened:
            return super().draw(index)


class Closes(Waits):
    """Each worker closes something when it ends."""

    def on_worker_stop(self):
        pass


class Raises(Waits):
    """A batch draws and raises."""

    def draw(self, index):
        if index == 30:
            raise ValueError(f"drew {np.random.rand()}")
        return super().draw(index)


class Computes(Waits):
    """Python code."""

    def __getitem__(self, index):
        return np.full((4, 3), sum(range(100_000)) + index)


class StaysHere(Draws):
    """It cannot be sent to a process."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.frames = (n for n in range(3))


class RefusesToLoad(Waits):
    """No other process can load it."""

    def __setstate__(self, state):
        raise RuntimeError("of another process")


class DiesWhenLoaded(Waits):
    """Each process that loads it dies."""

    def __setstate__(self, state):
        os._exit(3)


class RefusesToStart(Waits):
    """No worker of any kind can start."""

    def on_worker_start(self):
        raise ValueError("no licence")


class Scales(FastPyDataset):
    """A batch is its index, and the factor of a function of a module."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return np.array([index, auto_config.scale(1)])


class ScalesByResult(Scales):
    """The factor is that of an object which a cached function returns.

    The first batches have a given factor instead.
    """

    def __init__(self, factor=1, first=0, **kwargs):
        super().__init__(**kwargs)
        self.factor, self.first = factor, first

    def __getitem__(self, index):
        factor = (
            self.factor
            if index < self.first
            else auto_config.get_scaler().apply(1)
        )
        return np.array([index, factor])


class ScalesLate(Scales):
    """Each worker imports the module with its first batch."""

    def __getitem__(self, index):
        import auto_config_late

        return np.array([index, auto_config_late.scale(1)])


KINDS = {
    kind.__name__: kind
    for kind in (Waits, Draws, Holds, Reseeds, Opens, Computes, StaysHere)
}
