"""Defines `Record`, the measurements of one `fit`, `evaluate` or `predict`."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from keras_fastdata.health.step_clock import Step
from keras_fastdata.health.summary import HealthSummary
from keras_fastdata.metrics.pool_stats import WorkerLoss
from keras_fastdata.metrics.recorder import Skipped, Slow, Span


@dataclasses.dataclass(frozen=True)
class Record:
    """The measurements of one `fit`, `evaluate` or `predict`.

    Attributes:
        dataset: Class name of the dataset; empty if none was seen.
        settings: The dataset's constructor arguments, as they took effect.
        backend: Keras's backend.
        began: The date and time of the beginning.
        began_s: The beginning, by `time.monotonic`.
        ended_s: The end, by `time.monotonic`.
        summary: The figures of all epochs.
        spans: The latest batches, in the order of their delivery, of shape
            `(n, len(Span._fields))`.
        steps: The latest steps, in order.
        lost: The latest losses of workers.
        pids: The process ids of the workers at the end, by index.
        skipped: The batches that were left out.
        stacks: How often each folded stack was met in slow builds.
        slowest: The batches of the last epoch that took longest to build.
        datasets: The description of each dataset, by its use.
        machine: The CPU and the versions of what was used, by name.
    """

    dataset: str
    settings: dict[str, Any]
    backend: str
    began: datetime.datetime
    began_s: float
    ended_s: float
    summary: HealthSummary
    spans: npt.NDArray[np.float64]
    steps: tuple[Step, ...]
    lost: tuple[WorkerLoss, ...]
    pids: dict[int, int]
    skipped: tuple[Skipped, ...]
    slowest: tuple[Slow, ...]
    stacks: dict[str, int] = dataclasses.field(default_factory=dict)
    datasets: dict[str, str] = dataclasses.field(default_factory=dict)
    machine: dict[str, str] = dataclasses.field(default_factory=dict)

    def column(self, name: str) -> npt.NDArray[np.float64]:
        """Returns the field `name` of all spans as an array of shape `(n,)`."""
        column: npt.NDArray[np.float64] = self.spans[:, _COLUMNS[name]]
        return column


_COLUMNS = {name: place for place, name in enumerate(Span._fields)}
