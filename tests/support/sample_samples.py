"""Datasets of samples, for workers that do not import Keras."""

from __future__ import annotations

import numpy as np

from keras_fastdata import SampleDataset


class Counted(SampleDataset):
    """So many samples."""

    def __init__(self, samples, **kwargs):
        super().__init__(**kwargs)
        self.samples = samples

    @property
    def num_samples(self):
        return self.samples


class Squares(Counted):
    def get_sample(self, index):
        row = np.full(3, index / 2)
        return {"square": index**2, "row": row}, index % 2 == 0


class Doubling(Counted):
    def get_sample(self, index):
        x = self.rng.random(3, dtype="float32")
        return x, 2 * x.sum()


class Drawing(Counted):
    """Its index, and what it draws."""

    def get_sample(self, index):
        return np.array([index, *self.rng.integers(2**60, size=2)])


class Failing(Counted):
    def get_sample(self, index):
        if index == 6:
            raise KeyError("no such thing")
        return index


def halves(rng, count):
    """The first half of the samples, twice."""
    return rng.permutation([*range(count // 2)] * 2)


class Rotated(SampleDataset):
    """The numbers up to `count`, from `first` on, then those before."""

    def __init__(self, count, **kwargs):
        self.first = 0
        kwargs["sampler"] = self.rotate
        super().__init__(range(count), **kwargs)

    def rotate(self, rng, count):
        return (np.arange(count) + self.first) % count
