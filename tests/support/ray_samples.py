"""Datasets for Ray actors; this module does not import Keras."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import random
import signal
import sys
import time
import warnings

import numpy as np

from keras_fastdata import FastPyDataset


class Drawn(FastPyDataset):
    """Batches of every generator that is seeded; their index comes last."""

    def __init__(self, length=12, size=4, **kwargs):
        kwargs = {"seed": 7, **kwargs}
        super().__init__(**kwargs)
        self.length = length
        self.size = size

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        x = self.rng.random((4, self.size), "float32")
        x[:, 0] += np.float32(np.random.rand() + random.random())
        return x, np.full((4, 1), index, "float32")


SCALE = 1


class Scaled(Drawn):
    """Depends on a variable of its module."""

    def __getitem__(self, index):
        return (np.full((1, 1), SCALE),)


class Gated(Drawn):
    """Batches that wait while there is a file `shut`; it says who does."""

    def __init__(self, directory, gated=(), **kwargs):
        super().__init__(**kwargs)
        self.directory = pathlib.Path(directory)
        self.gated = set(gated)

    def __getitem__(self, index):
        shut = self.directory / "shut"
        if shut.exists():
            (self.directory / f"at-{index}-{os.getpid()}").touch()
        while index in self.gated and shut.exists():
            time.sleep(0.01)
        return super().__getitem__(index)


class Killed(Drawn):
    """Its worker is killed in the middle of one batch, so many times."""

    def __init__(self, directory, at=5, times=1, **kwargs):
        super().__init__(**kwargs)
        self.directory = pathlib.Path(directory)
        self.at, self.times = at, times

    def __getitem__(self, index):
        if index == self.at and _first(self.directory, self.times):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Stuck(Killed):
    """It sleeps there instead."""

    def __getitem__(self, index):
        if index == self.at and _first(self.directory, self.times):
            sleep_for_ever()
        return Drawn.__getitem__(self, index)


def sleep_for_ever():
    while True:
        time.sleep(3600)


def _first(directory, times):
    """Whether this is one of the first so many calls, in any process."""
    for number in range(times):
        with contextlib.suppress(FileExistsError):
            (directory / f"call-{number}").touch(exist_ok=False)
            return True
    return False


class BadSampleError(Exception):
    def __init__(self, path, line):
        super().__init__(f"{path}:{line}")
        self.path, self.line = path, line


class Bad(Drawn):
    """One batch cannot be built."""

    def __getitem__(self, index):
        if index == 3:
            raise BadSampleError("a.csv", 17)
        return super().__getitem__(index)


class Unloadable(Drawn):
    def on_worker_start(self):
        raise FileNotFoundError("no index.bin here")


class Kinds(Drawn):
    """Every batch is large and small, in either order of memory, nested."""

    def __getitem__(self, index):
        large = self.empty((64, 1024), "float32")
        large[:] = index
        return {
            "large": large,
            "fortran": np.asfortranarray(np.full((300, 200), index, "f8")),
            "strided": np.arange(100_000)[::2] + index,
            "small": np.full(3, index),
            "none": np.empty((0, 3), "uint8"),
            "name": f"batch {index}",
        }


class Unpicklable(Drawn):
    """An array, a function that only cloudpickle takes, another array."""

    def __getitem__(self, index):
        return np.full(9, index), lambda: index, np.full(20_000, -index)


class WorkerLocation(Drawn):
    """Batches say where they were built."""

    def __getitem__(self, index):
        return np.array([os.getpid(), self.worker_index, index])


class Told(Drawn):
    def __getitem__(self, index):
        logging.getLogger("mine").info("at %d", index)
        warnings.warn("a bad pixel", UserWarning, stacklevel=1)
        return super().__getitem__(index)


class Opened(Drawn):
    """Opens a file in each worker, and closes it."""

    def __init__(self, directory, **kwargs):
        super().__init__(**kwargs)
        self.directory = pathlib.Path(directory)

    def on_worker_start(self):
        name = f"worker-{self.worker_index}"
        self.file = (self.directory / name).open("w")

    def on_worker_stop(self):
        self.file.write("closed")
        self.file.close()


class Unstarted(Opened):
    """No worker starts; one that stops says so."""

    def on_worker_start(self):
        raise FileNotFoundError("no index.bin here")

    def on_worker_stop(self):
        (self.directory / "stopped").touch()


class Reshuffled(Drawn):
    """A large array that stays, and an index that is shuffled."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table = np.arange(400_000.0)
        self.order = np.arange(4 * self.length)

    def __getitem__(self, index):
        mine = self.order[4 * index : 4 * index + 4]
        return self.table[mine], mine

    def on_epoch_end(self):
        np.random.shuffle(self.order)


class Scratch(Drawn):
    """Writes to an array of its own."""

    def __init__(self, nbytes, **kwargs):
        super().__init__(**kwargs)
        self.scratch = np.zeros(nbytes, "uint8")

    def __getitem__(self, index):
        self.scratch[:] = index
        return self.scratch[:8].copy()


class Variables(Drawn):
    """What the worker's environment says."""

    def __getitem__(self, index):
        names = "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "MINE"
        found = {name: os.environ.get(name) for name in names}
        return {**found, "hash": hash("a name")}


class Modules(Drawn):
    """What the worker has imported."""

    def __getitem__(self, index):
        return {"modules": sorted({n.partition(".")[0] for n in sys.modules})}


def numbers(shard_index, num_shards):
    for number in range(shard_index, 24, num_shards):
        yield np.full((2,), number, "float32")
