"""Datasets that several test files share.

This module does not import Keras, so that a worker which imports it does not.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time

import numpy as np

from keras_fastdata import FastPyDataset


class Numbered(FastPyDataset):
    """Batch i is full of i."""

    def __init__(self, length=10, shape=(4, 3), **kwargs):
        super().__init__(**kwargs)
        self.length = length
        self.shape = shape

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        x = np.full(self.shape, index, "float32")
        return x, np.full((self.shape[0], 1), index, "float32")


class Ragged(Numbered):
    """Batch i is full of i; the last one is shorter."""

    def __init__(self, length=7, **kwargs):
        super().__init__(length, **kwargs)

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        rows = 4 if index < self.length - 1 else 3
        return x[:rows], y[:rows]


class Random(FastPyDataset):
    """Draws from every generator that is to be seeded per batch."""

    def __init__(self, length=8, **kwargs):
        super().__init__(**kwargs)
        self.length = length
        self.g = np.random.default_rng(0)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return (
            np.array([index]),
            self.rng.integers(2**60, size=2),
            np.random.randint(2**60, size=2),
            np.array([random.getrandbits(60)]),
            self.g.integers(2**60, size=2),
        )


class OwnRng(FastPyDataset):
    """Draws from `self.rng` alone, as threads must."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return np.array([index]), self.rng.integers(2**60, size=4)


class Deadly(Numbered):
    """Ends its process in `how` while building batch `at`, `times` times.

    The times are counted in a file, which outlives the process.
    """

    def __init__(self, counter, how="sigkill", at=3, times=1, **kwargs):
        super().__init__(**kwargs)
        self.counter = str(counter)
        self.how = how
        self.at = at
        self.times = times

    def __getitem__(self, index):
        if index == self.at and self.strike():
            self.die()
        return super().__getitem__(index)

    def strike(self):
        with open(self.counter, "a+") as file:
            file.write("x")
            file.flush()
            return file.tell() <= self.times

    def die(self):
        match self.how:
            case "sigkill":
                os.kill(os.getpid(), 9)  # SIGKILL, where it has a name
            case "sigsegv":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "sigabrt":
                os.abort()
            case "sigterm":
                os.kill(os.getpid(), signal.SIGTERM)
            case "exit0":
                os._exit(0)
            case "exit3":
                os._exit(3)
            case "sysexit":
                sys.exit(5)
        time.sleep(60)


class Nested(FastPyDataset):
    """Keeps its generators deep inside, as augmentation libraries do."""

    class Augmenter:
        def __init__(self):
            self.tools = {"flip": [np.random.RandomState(1)]}
            self.rng = random.Random(2)

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.augmenter = self.Augmenter()

    def __len__(self):
        return 4

    def __getitem__(self, index):
        flip = self.augmenter.tools["flip"][0]
        return np.array(
            [flip.randint(2**60), self.augmenter.rng.randrange(9**9)]
        )


class Lazy(FastPyDataset):
    """Makes its generator in the worker, when it first needs it."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if not hasattr(self, "g"):
            self.g = np.random.default_rng(0)
            self.g.integers(9)
        return self.g.integers(2**60, size=2)


class Foreign(FastPyDataset):
    """Has a generator of its own kind, seeded through `reseed`."""

    def __len__(self):
        return 6

    def reseed(self, seed_sequence):
        self.state = int(seed_sequence.generate_state(1)[0])

    def __getitem__(self, index):
        self.state = (self.state * 1103515245 + 12345) % 2**31
        return np.array([self.state])


class Shuffles(FastPyDataset):
    """Reshuffles its own index, by the commonest idiom there is."""

    def __init__(self, modern=False, **kwargs):
        super().__init__(**kwargs)
        self.order = np.arange(6)
        self.g = np.random.default_rng(5) if modern else None

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if self.g is not None:
            self.g.integers(9)
        return np.array([[self.order[index]]], "float32")

    def on_epoch_end(self):
        (self.g or np.random).shuffle(self.order)


class Inner(FastPyDataset):
    """Has an order and draws of its own."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return np.array([index, self.rng.integers(1000)])


class Outer(FastPyDataset):
    """Goes through another dataset for each of its batches."""

    def __init__(self, inner, **settings):
        super().__init__(**settings)
        self.inner = inner

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return np.stack(list(self.inner))


def numbers(batches):
    """The index that each batch of `Numbered` was built for."""
    return [int(y.flat[0]) for _, y in batches]


def equal(one, other):
    """Whether two nested batches have the same bytes."""
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(equal, one, other))
    one, other = np.asarray(one), np.asarray(other)
    return one.dtype == other.dtype and np.array_equal(one, other)


class KeepsItsBuffer(FastPyDataset):
    """Builds in an array that it keeps, and may use for the next batch too."""

    def __init__(self, length, reuse, **kwargs):
        super().__init__(**kwargs)
        self.length = length
        self.reuse = reuse
        self.buffer = None

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if self.buffer is None or not self.reuse:
            self.buffer = self.empty((64, 1024), "float32")
        self.buffer[:] = index
        return self.buffer


class Sized(FastPyDataset):
    """Batch i has sizes[i] bytes; the first is 7 and the last is 9."""

    def __init__(self, sizes, **kwargs):
        super().__init__(**kwargs)
        self.sizes = sizes

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, index):
        batch = np.zeros(self.sizes[index], np.uint8)
        batch[-1:] = 9
        batch[:1] = 7
        return batch


class Leveled(FastPyDataset):
    """Batches that show the dataset's state at the time they were built."""

    def __init__(self, length=10, **kwargs):
        super().__init__(**kwargs)
        self.length = length
        self.level = 0
        self.table = {"level": 0}
        self.array = np.zeros(1)
        self.built = 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.built += 1
        level = getattr(self, "level", -1)
        state = [level, self.table["level"], self.array[-1]]
        return np.array(state), np.array([index])


class OpensFiles(FastPyDataset):
    """Reads from a file that each worker opens for itself."""

    def __init__(self, path, log=None, **kwargs):
        super().__init__(**kwargs)
        self.path = str(path)
        self.log = log and str(log)
        self.separator = " "
        self.file = None

    def __len__(self):
        return 4

    def note(self, event):
        if self.log:
            with open(self.log, "a") as log:
                log.write(event + "\n")

    def on_worker_start(self):
        self.file = open(self.path)  # noqa: SIM115 - closed on_worker_stop
        self.note("start")

    def on_worker_stop(self):
        self.file.close()
        self.note("stop")

    def __getitem__(self, index):
        self.file.seek(0)
        return self.separator.join(self.file.read().split())


class ShufflesByRng(Shuffles):
    """Reshuffles its index with `self.rng`."""

    def on_epoch_end(self):
        self.rng.shuffle(self.order)


class Holds(FastPyDataset):
    """Has a `thing`, and makes its batches of it."""

    def __init__(self, thing, use, **kwargs):
        super().__init__(**kwargs)
        self.thing = thing
        self.use = use

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return np.asarray(self.use(self.thing, index))


def hold(lock, index):
    """Takes a lock and gives it back."""
    with lock:
        return 1


def row(array, index):
    """One row of an array."""
    return array[index]


def rest_of(file, index):
    """What a file has left to read."""
    position = file.tell()
    text = file.read()
    file.seek(position)
    return text


class MapsAFile(FastPyDataset):
    """Batch i is a part of a file, as the memory map gives it."""

    def __init__(self, path, **kwargs):
        super().__init__(**kwargs)
        self.path = path

    def __len__(self):
        return 4

    def __getitem__(self, index):
        rows = np.memmap(self.path, "float32", "r", shape=(4, 100, 100))
        return rows[index], {"also": [rows[index], {index}]}


class LetsAChildReturn(Numbered):
    """Forks in batch 2; the child returns, or raises, where it is."""

    def __init__(self, raises=False, **kwargs):
        super().__init__(**kwargs)
        self.raises = raises

    def __getitem__(self, index):
        if index == 2:
            child = os.fork()
            if not child and self.raises:
                raise RuntimeError("raised in the child")
            if not child:
                return super().__getitem__(index + 50)
            os.waitpid(child, 0)
        return super().__getitem__(index)


def h5_item(thing, index):
    """An item of an HDF5 dataset, or of the dataset "x" of a file."""
    return thing["x"][index] if hasattr(thing, "filename") else thing[index]


def refused(function=lambda value: value):
    """Returns a function with the same results that pickle refuses."""
    generator = (function(value) for value in ())

    def called(value):
        assert generator is not None
        return function(value)

    return called
