"""The workloads as datasets of keras_fastdata."""

from __future__ import annotations

from typing import Any

from benchmarks.workloads import Indexed
from keras_fastdata import FastPyDataset


class Ours(Indexed, FastPyDataset):
    """Returns what the workload returns."""


class InPlace(Ours):
    """Has the workload build in shared memory."""

    def __getitem__(self, index: int) -> Any:
        return self.workload.in_place(index, self.empty)
