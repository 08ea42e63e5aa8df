"""Stacking samples into batches: `SampleDataset` and `np.stack`.

    python -m benchmarks.samples [options of python -m benchmarks]

256 samples of 150 KB, which lie ready in memory, make a batch of 38.5 MB.
"np.stack" is a `FastPyDataset` that returns `np.stack` of a list of them;
"fastdata" is a `SampleDataset`, which copies each to where its batch travels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks import harness, peers
from benchmarks.meter import again_and_again, measure_loop
from keras_fastdata import FastPyDataset, SampleDataset

FIGURES = harness.THROUGHPUT
TIMEOUT_S = 60.0
SAMPLES = 1024
BATCH = 256
SHAPE = (224, 224, 3)
PLACES = {
    "inline": {"workers": 0},
    "1 process": {"workers": 1, "use_multiprocessing": True},
    "2 processes": {"workers": 2, "use_multiprocessing": True},
}


class Stacked(FastPyDataset):
    """What one writes by hand."""

    def __init__(self, source: list[np.ndarray], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.source = source

    def __len__(self) -> int:
        return len(self.source) // BATCH

    def __getitem__(self, index: int) -> np.ndarray:
        first = index * BATCH
        return np.stack([self.source[first + n] for n in range(BATCH)])


def cases() -> Iterator[harness.Case]:
    return harness.combine(place=tuple(PLACES), loader=("fastdata", "np.stack"))


def measure(case: harness.Case, seconds: float) -> dict[str, float]:
    rows = np.random.default_rng(0).integers(0, 256, (SAMPLES, *SHAPE), "uint8")
    source = list(rows)
    place: dict[str, Any] = PLACES[case["place"]]
    made = (
        SampleDataset(source, BATCH, **place)
        if case["loader"] == "fastdata"
        else Stacked(source, **place)
    )
    with made as dataset:
        return measure_loop(again_and_again(dataset), seconds, peers.AHEAD)


if __name__ == "__main__":
    harness.main(["samples"])
