"""Datasets of numbers, which change between epochs or come in parts.

This module does not import Keras, so that a worker which imports it does not.
"""

from __future__ import annotations

import numpy as np

from keras_fastdata import FastPyDataset, SampleDataset


class Parts:
    """Fifty numbers, in parts."""

    part_lengths = [10, 1, 19, 20]

    def __len__(self):
        return 50

    def __getitem__(self, index):
        return index


class Growing(SampleDataset):
    """Begins with easy samples, and has all of them from epoch 4 on."""

    num_samples = 40

    def __init__(self, **kwargs):
        super().__init__(sampler=self.easy_first, **kwargs)

    def easy_first(self, rng, count):
        hardest = min(count, 10 * (self.epoch + 1))
        return rng.integers(hardest, size=count)

    def get_sample(self, index):
        return index


class Longer(SampleDataset):
    """Gives numbers, and more of them after each epoch."""

    num_samples = 7

    def get_sample(self, index):
        return index

    def on_epoch_end(self):
        self.num_samples += 3
        self.batch_size += 1


def remainder(number):
    """Returns the bucket of a number."""
    return number % 4


class Hooked(FastPyDataset):
    """Four batches of what its hooks have counted."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.began = self.ended = self.started = 0

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return np.asarray([index, self.began, self.started])

    def on_epoch_begin(self):
        self.began += 1

    def on_worker_start(self):
        self.started += 1


class Shuffles(Hooked):
    """Four batches, in an order that a hook draws, and what it has counted."""

    order = (0, 1, 2, 3)

    def __getitem__(self, index):
        return np.asarray([self.order[index], self.began])

    def on_epoch_end(self):
        self.order = tuple(self.rng.permutation(4).tolist())


class Batches(FastPyDataset):
    """Batches of one number."""

    def __init__(self, *bounds, **kwargs):
        super().__init__(**kwargs)
        self.numbers = range(*bounds)

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        return np.asarray([self.numbers[index]])
