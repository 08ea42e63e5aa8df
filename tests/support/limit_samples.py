"""Datasets for the tests of limits; workers import this without Keras."""

from __future__ import annotations

import contextlib
import os
import resource
import time

import numpy as np
from samples import Numbered

from keras_fastdata import FastPyDataset


class Hungry(Numbered):
    """Asks for more memory than there can be, for the batch `at`."""

    def __init__(self, at=2, nbytes=1 << 45, **kwargs):
        super().__init__(**kwargs)
        self.at = at
        self.nbytes = nbytes

    def __getitem__(self, index):
        if index == self.at:
            return np.ones(self.nbytes, np.uint8)
        return super().__getitem__(index)


class Wide(Numbered):
    """Has two arrays of 40 kB in a batch."""

    def __getitem__(self, index):
        x = np.full((5000, 1), index, "float64")
        return x, np.zeros_like(x)


class Greedy(FastPyDataset):
    """Opens every descriptor its worker may have, then builds."""

    def __init__(self, length=6, **kwargs):
        super().__init__(**kwargs)
        self.length = length
        self.level = 0

    def __len__(self):
        return self.length

    def on_worker_start(self):
        self.files = []
        try:
            while True:
                self.files.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            pass

    def __getitem__(self, index):
        return np.array([index, self.level])


class Limited(Numbered):
    """Limits its own worker process when it starts."""

    def __init__(self, limit, value, **kwargs):
        super().__init__(**kwargs)
        self.limit = limit
        self.value = value

    def on_worker_start(self):
        _, hard = resource.getrlimit(self.limit)
        resource.setrlimit(self.limit, (self.value, hard))


class Pickled:
    """So many bytes, but no array."""

    def __init__(self, nbytes):
        self.content = bytes(nbytes)

    @property
    def nbytes(self):
        return len(self.content)


class Varied(FastPyDataset):
    """Batch i has sizes[i] bytes.

    Args:
        sizes: Those.
        where: They are built in "private" memory, in "place", or "pickled".
    """

    def __init__(self, sizes, where="private", **kwargs):
        super().__init__(**kwargs)
        self.sizes = sizes
        self.where = where

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, index):
        if self.where == "pickled":
            return Pickled(self.sizes[index])
        if self.where == "place":
            batch = self.empty(self.sizes[index], "uint8")
            batch[:] = index % 256
            return batch
        return np.full(self.sizes[index], index % 256, np.uint8)


class Staged(FastPyDataset):
    """Batches of given lengths in bytes; some wait at a gate when first built.

    The gate of batch `i` is a FIFO of that name in `folder`, which its
    builder opens, and so waits for whoever opens the other end.
    """

    def __init__(self, lengths, folder, **kwargs):
        super().__init__(**kwargs)
        self.lengths = lengths
        self.folder = str(folder)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        with contextlib.suppress(FileNotFoundError):
            open(os.path.join(self.folder, str(index)), "rb").close()
        return np.full(self.lengths[index], index, np.uint8)


class OfUser(FastPyDataset):
    """Batch i tells the user of whoever builds it; `stuck` never comes."""

    def __init__(self, stuck=-1, **kwargs):
        super().__init__(**kwargs)
        self.stuck = stuck

    def __len__(self):
        return 4

    def __getitem__(self, index):
        while index == self.stuck:
            time.sleep(60)
        return np.array([os.getuid(), os.getgid(), *os.getgroups()])
