"""Datasets written for Keras, as people have them."""

from __future__ import annotations

import keras
import numpy as np


class Old(keras.utils.PyDataset):
    """Draws from NumPy's global generator."""

    def __init__(self, length=9, **kwargs):
        super().__init__(**kwargs)
        self.length = length
        self.name = "old"

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return np.full((2, 1), index), np.random.randint(2**40, size=(2, 1))


class Shuffled(Old):
    """Draws an order at the end of an epoch."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.on_epoch_end()

    def on_epoch_end(self):
        self.order = np.random.permutation(self.length)

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x * 0 + self.order[index], y


class Endless(Old):
    @property
    def num_batches(self):
        return None


class Plain:
    """Knows nothing of Keras."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return np.full((2, 1), index), np.zeros((2, 1))


class Level:
    """Its level is a class attribute, a property or a slot."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return np.full((2, 1), 10 * self.level + index), np.zeros((2, 1))


class OfClass(Level):
    level = 0


class Property(Level):
    _level = 0

    @property
    def level(self):
        return self._level

    @level.setter
    def level(self, level):
        self._level = level


class Slot:
    __slots__ = ("level",)
    __len__, __getitem__ = Level.__len__, Level.__getitem__

    def __init__(self):
        self.level = 0
