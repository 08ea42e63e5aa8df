"""What a batch of a benchmark is: a function of its index, and no more.

Each workload is a small picklable callable, so that every loader can take it
to its own threads, processes or actors.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

SIZES = {
    "1 KB": 1024,
    "64 KB": 64 * 1024,
    "1.5 MB": 1536 * 1024,
    "38.5 MB": 64 * 224 * 224 * 3 * 4,
    "154 MB": 256 * 224 * 224 * 3 * 4,
}
STRUCTURES = ("array", "(x, y)", "nested")

Workload = Callable[[int], Any]
Empty = Callable[[tuple[int, ...], str], np.ndarray]
ROWS = 32


class Filled:
    """Batches that cost next to nothing to make: every value is the index.

    Args:
        nbytes: Size of a batch; a multiple of 512.
        structure: "array"; "(x, y)", where `y` has one column; or "nested",
            a dict in a dict.
    """

    def __init__(self, nbytes: int, structure: str = "(x, y)") -> None:
        self.nbytes = nbytes
        self.structure = structure

    def __call__(self, index: int) -> Any:
        return self._arrange(lambda shape: np.full(shape, index, "float32"))

    def in_place(self, index: int, empty: Empty) -> Any:
        """The same batch, in memory of the loader."""

        def fill(shape: tuple[int, ...]) -> np.ndarray:
            array = empty(shape, "float32")
            array.fill(index)
            return array

        return self._arrange(fill)

    def _arrange(
        self, make: Callable[[tuple[int, ...]], np.ndarray]
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray] | dict[str, Any]:
        columns = self.nbytes // 4 // ROWS
        if self.structure == "array":
            return make((ROWS, columns))
        if self.structure == "(x, y)":
            return make((ROWS, columns)), make((ROWS, 1))
        around = {
            name: make((ROWS, columns // 4)) for name in ("before", "after")
        }
        return {"image": make((ROWS, columns // 2)), "around": around}


class Indexed:
    """A workload as a dataset of so many batches; what it is, says its base."""

    def __init__(self, workload: Workload, batches: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.workload = workload
        self.batches = batches

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> Any:
        return self.workload(index)


class AtHand:
    """One batch of another workload, again and again."""

    def __init__(self, workload: Callable[[int], Any]) -> None:
        self.batch = workload(0)

    def __call__(self, index: int) -> Any:
        return self.batch


class Noise:
    """Random images: `np.random.rand(...).astype("float32")`."""

    def __init__(self, images: int) -> None:
        self.shape = images, 224, 224, 3

    def __call__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        x = np.random.rand(*self.shape).astype("float32")
        return x, np.zeros((self.shape[0], 1), "float32")

    def in_place(
        self, index: int, empty: Empty
    ) -> tuple[np.ndarray, np.ndarray]:
        """The same, but converted where the batch travels."""
        x = empty(self.shape, "float32")
        x[...] = np.random.rand(*self.shape)
        return x, np.zeros((self.shape[0], 1), "float32")


class Waiting:
    """Small batches that take time but no core, and name their process."""

    def __init__(self, build_s: float) -> None:
        self.build_s = build_s

    def __call__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        time.sleep(self.build_s)
        return np.full((ROWS, 8), os.getpid(), "float64"), np.zeros((ROWS, 1))


class Shares:
    """Batches that read a sixteenth of something large.

    `producers` batches in turn read the same share, so that every producer
    reads all of it, also where each n-th batch is always the same one's.
    """

    def __init__(self, whole: Any, producers: int) -> None:
        self.whole = whole
        self.producers = producers

    def __call__(self, index: int) -> np.ndarray:
        length = len(self.whole) // 16
        first = index // self.producers % 16 * length
        share = self.whole[first : first + length]
        if isinstance(share, np.ndarray):
            return share.sum(axis=0)
        return np.full((ROWS, 8), sum(map(len, share)))


def leaves(batch: Any) -> list[np.ndarray]:
    """The arrays of a batch, as they are nested."""
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        return [leaf for part in batch for leaf in leaves(part)]
    return [batch]


def touch(batch: Any) -> float:
    """The last value of the first array: what every consumer reads."""
    array = leaves(batch)[0]
    return float(array[(-1,) * array.ndim])
