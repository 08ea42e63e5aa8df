"""Datasets whose builds are counted, for workers that do not import Keras."""

from __future__ import annotations

import os
import random

import numpy as np

from keras_fastdata import FastPyDataset


class Noted(FastPyDataset):
    """Batch i is full of i; every build leaves a line in a file."""

    def __init__(self, notes, length=8, start=0, **kwargs):
        super().__init__(**kwargs)
        self.notes = str(notes)
        self.length = length
        self.start = start

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        with open(self.notes, "a") as file:
            file.write(f"{index}\n")
        value = self.start + index
        x = {
            "c": np.full((4, 3), value, "float32"),
            "fortran": np.full((2, 3), value, order="F").T.copy("A"),
            "scalar": np.array(value, "int16"),
        }
        return x, [np.full((4, 1), value, "uint8")]


START = 0  # of `StartsOutside`


class Counter:
    def __init__(self):
        self.count = 0

    def add(self):
        self.count += 1


counter = Counter()


class StartsOutside(Noted):
    """Takes its start from a variable of this module, and counts builds."""

    def __getitem__(self, index):
        counter.add()
        x, y = super().__getitem__(index)
        x["scalar"] += START
        return x, y


class ReadsFolder(Noted):
    """Takes its start from a file in a folder, which no digest tells of."""

    def __init__(self, notes, folder, since=0, **kwargs):
        super().__init__(notes, **kwargs)
        self.folder = str(folder)
        self.since = since  # the first batch that depends on the file

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        with open(os.path.join(self.folder, "number")) as file:
            x["scalar"] += int(file.read()) if index >= self.since else 0
        return x, y


class NotedPairs(Noted):
    """Batches that a model takes."""

    def __getitem__(self, index):
        super().__getitem__(index)
        return np.full((4, 1), index, "float32"), np.ones((4, 1), "float32")


class Trainable(FastPyDataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        x = rng.normal(size=(8, 3)).astype("float32")
        return x, x.sum(1, keepdims=True)


class Varying(FastPyDataset):
    """Uses what differs from epoch to epoch."""

    def __init__(self, what, **kwargs):
        super().__init__(**kwargs)
        self.what = what
        self.own = np.random.default_rng(0)

    def __len__(self):
        return 3

    def __getitem__(self, index):
        match self.what:
            case "self.rng":
                self.rng.random()
            case "self.rng_for":
                self.rng_for(index)
            case "self.epoch_order":
                self.epoch_order(5)
            case "self.epoch":
                self.epoch  # noqa: B018 - asking is enough
            case "np.random":
                np.random.random()
            case "random":
                random.random()
            case "the generator `self.own`":
                self.own.random()
        return np.array([index])


class Hooked(Trainable):
    def on_epoch_end(self):
        pass


class Worded(FastPyDataset):
    """Has batches that are no arrays."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return np.array([f"word {index}"], object)


class Reseeded(Trainable):
    def reseed(self, seed_sequence):
        pass


class Mixed(FastPyDataset):
    """Of which one batch has an array twice."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.builds = []

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.builds.append(index)
        x = np.full(3, index)
        return (x, x) if index == 1 else (x, -x)


def scaled_by(factor):
    """A class whose batches depend on a variable around it."""

    class Scaled(FastPyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return np.array([index * factor])

    return Scaled


class Attributed(FastPyDataset):
    """A class whose batches depend on an attribute of it."""

    factor = 1

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return np.array([index * self.factor])


class DrawsMuch(FastPyDataset):
    """Draws until the generator's position is what it was."""

    def __init__(self, what, **kwargs):
        super().__init__(**kwargs)
        self.what = what

    def __len__(self):
        return 2

    def __getitem__(self, index):
        if self.what == "np.random":
            return np.random.rand(64, 39)
        return np.array([random.random() for _ in range(312)])


class Opens(Noted):
    """Has what cannot be pickled, once a worker has started."""

    def on_worker_start(self):
        self.lock = (index for index in range(3))  # a generator

    def __getitem__(self, index):
        if self.table is None:
            self.table = [index]
        return super().__getitem__(index)

    table = None
