"""Datasets whose builds start threads of their own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from keras_fastdata import FastPyDataset, SampleDataset


class Pooled(FastPyDataset):
    """A batch is made by four threads that the build starts."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        def draw(part):
            drawn = self.rng_for(4 * index + part).integers(1000)
            return [self.epoch, drawn, len(self.empty(3))]

        with ThreadPoolExecutor(4) as pool:
            return np.array([*pool.map(draw, range(4))])


class DrawnInPool(FastPyDataset):
    """What a batch draws, one thread after another draws for it."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        drawn = []
        for _ in range(3):
            with ThreadPoolExecutor(1) as pool:
                drawn.append(pool.submit(self.rng.random).result())
                drawn.append(pool.submit(lambda: self.rng.random()).result())
        return np.array(drawn)


class PooledSamples(SampleDataset):
    """A sample is drawn by another thread than the one that asks for it."""

    num_samples = 12

    def get_sample(self, index):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: self.rng.random()).result()
