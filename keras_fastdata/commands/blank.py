"""The dataset whose batches `doctor` moves; workers import it."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_fastdata.dataset import FastPyDataset


class Blank(FastPyDataset):
    """Batch `index` has that number in each of its bytes.

    Args:
        batches: The number of batches.
        nbytes: The bytes of a batch.
        **kwargs: The arguments of `FastPyDataset`.
    """

    def __init__(self, batches: int, nbytes: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.batches, self.nbytes = batches, nbytes

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> Any:
        return np.full(self.nbytes, index, "uint8")
