"""The dataset that `demo` trains on; workers import it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from keras_fastdata.dataset import FastPyDataset

BATCHES = 30
READ_S = 0.06
_SIDE, _ROWS = 32, 32


class Pictures(FastPyDataset):
    """Pictures of stripes in four directions, with noise, and the direction."""

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> Any:
        time.sleep(READ_S)  # as if the pictures were read over a network
        labels = self.rng.integers(0, 4, _ROWS)
        angles = (labels * np.pi / 4)[:, None, None]
        row, column = np.indices((_SIDE, _SIDE))
        along = row * np.sin(angles) + column * np.cos(angles)
        x = self.empty((_ROWS, _SIDE, _SIDE, 1), "float32")
        self.rng.standard_normal(dtype="float32", out=x)
        x[..., 0] += np.sin(along + self.rng.uniform(0, 6, (_ROWS, 1, 1)))
        return x, labels
