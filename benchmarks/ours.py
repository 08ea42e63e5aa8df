"""The workloads as datasets of keras_fastdata."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_fastdata import FastPyDataset


class Ours(FastPyDataset):
    """Returns what the workload returns."""

    def __init__(
        self, workload: Callable[[int], Any], batches: int, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.workload = workload
        self.batches = batches

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> Any:
        return self.workload(index)


class InPlace(Ours):
    """Has the workload build in shared memory."""

    def __getitem__(self, index: int) -> Any:
        return self.workload.in_place(index, self.empty)
