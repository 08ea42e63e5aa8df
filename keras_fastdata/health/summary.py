"""`HealthSummary`: the result of `LoaderHealth.summary()`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from keras_fastdata.health.verdict import Verdict
from keras_fastdata.metrics import formatting
from keras_fastdata.metrics.pool_stats import PoolStats, TuningDecision

_MOST_ROWS = 12  # of a table; of more epochs, the first and the last
_COLUMNS = (
    "epoch",
    "wall",
    "data wait",
    "verdict",
    "batches/s",
    "build p50",
    "p95",
    "queue",
    "busy",
)


@dataclasses.dataclass(frozen=True)
class EpochHealth:
    """The figures of an epoch of training, an evaluation or a prediction.

    Attributes:
        phase: "train", "validation", "evaluate" or "predict".
        epoch: Keras's number of the epoch, from 0.
        batches: The number of delivered batches.
        verdict: Why the epoch took longer than its steps.
        data_wait: The share of `wall_s` that free data would have saved.
        wall_s: Duration in seconds, without validation, and without steps
            that compiled.
        free_s: The duration to expect with free data.
        step_s: The time that one step needs by itself; NaN if unknown.
        build_s_p50: Median time of `__getitem__`, in seconds.
        build_s_p95: The time that 95% of the calls did not exceed.
        wait_s_p95: The time that 95% of the waits for a batch did not exceed.
        queue_depth_mean: How many batches were ready when one was requested,
            on average.
        worker_utilization: The share of the time that workers built batches.
        nbytes: Bytes of the arrays of all batches.
        restarts: How many workers died or were replaced.
        skipped: Batches left out by `on_error="skip"`.
        retried: Batches that were built again after a worker was lost.
        cores: Cores that this process may use.
        busy_cores: How many of these were busy, on average; `None` if
            unknown.
        workers_nbytes: Memory of the worker processes (PSS, which divides
            shared memory among them); `None` if it was not measured.
        shared_nbytes: Bytes of shared memory for batches.
    """

    phase: str
    epoch: int
    batches: int
    verdict: Verdict
    data_wait: float
    wall_s: float
    free_s: float
    step_s: float
    build_s_p50: float
    build_s_p95: float
    wait_s_p95: float
    queue_depth_mean: float
    worker_utilization: float
    nbytes: int
    restarts: int
    skipped: int
    retried: int
    cores: float
    busy_cores: float | None
    workers_nbytes: int | None
    shared_nbytes: int

    @property
    def batches_per_s(self) -> float:
        """Batches delivered per second of wall time."""
        return self.batches / self.wall_s if self.wall_s > 0 else math.nan

    @property
    def name(self) -> str:
        """A name such as "epoch 3", counted from 1 as Keras displays it."""
        if self.phase in ("train", "validation"):
            what = "epoch" if self.phase == "train" else "validation"
            return f"{what} {self.epoch + 1}"
        return self.phase


@dataclasses.dataclass(frozen=True)
class HealthSummary:
    """The figures of one `fit`, `evaluate` or `predict`.

    Attributes:
        verdict: The verdict that cost most time; `None` if no batch of a
            `FastPyDataset` was delivered.
        data_wait: The share of `wall_s` that free data would have saved.
        wall_s: Duration of all epochs, in seconds.
        epochs: The epochs, without validations.
        validations: The validations of a `fit`.
        decisions: The decisions of `workers="auto"`; in a `fit`, for the
            training data.
        shard: The shard of the training data that this process used, in
            words; empty without a shard.
    """

    verdict: Verdict | None
    data_wait: float
    wall_s: float
    epochs: tuple[EpochHealth, ...]
    validations: tuple[EpochHealth, ...] = ()
    decisions: tuple[TuningDecision, ...] = ()
    shard: str = ""

    @property
    def free_s(self) -> float:
        """The duration of all epochs to expect with free data, in seconds."""
        return self.wall_s * (1.0 - self.data_wait)

    @property
    def phases(self) -> list[EpochHealth]:
        """Epochs, each followed by its validation."""
        phases = [*self.epochs, *self.validations]
        return sorted(phases, key=lambda phase: phase.epoch)

    def __str__(self) -> str:
        if self.verdict is None:
            return "LoaderHealth: no batch of a FastPyDataset was seen."
        verdict = self.verdict
        parts = [f"{verdict.kind}: {verdict.evidence}", verdict.advice]
        if len(self.epochs) > 1:
            parts.insert(0, _table(self.epochs))
        if self.shard:
            parts.append(f"This process has {self.shard}.")
        if self.decisions:
            parts.append(str(self.decisions[-1]))
        return "\n".join(parts)


def summarize(
    epochs: list[EpochHealth],
    validations: list[EpochHealth],
    pool_stats: PoolStats | None = None,
) -> HealthSummary:
    """Returns the summary of some epochs."""
    wall_s = sum(e.wall_s for e in epochs)
    free_s = sum(e.wall_s * (1 - e.data_wait) for e in epochs)
    return HealthSummary(
        verdict=_primary(epochs),
        data_wait=1 - free_s / wall_s if wall_s > 0 else 0.0,
        wall_s=wall_s,
        epochs=tuple(epochs),
        validations=tuple(validations),
        decisions=() if pool_stats is None else pool_stats.decisions,
        shard="" if pool_stats is None else pool_stats.shard,
    )


def _primary(epochs: list[EpochHealth]) -> Verdict | None:
    """Returns the worst verdict of the kind that cost most time."""
    lost: dict[str, float] = {}
    for epoch in epochs:
        kind = epoch.verdict.kind
        lost_s = epoch.wall_s * epoch.data_wait
        lost[kind] = lost.get(kind, 0.0) + lost_s
    if not lost:
        return None
    worst = max(lost, key=lambda kind: lost[kind])
    of_that_kind = [e for e in epochs if e.verdict.kind == worst]
    return max(of_that_kind, key=lambda e: e.wall_s * e.data_wait).verdict


def abridged(
    phases: Sequence[EpochHealth],
) -> list[EpochHealth | None]:
    """Returns the first and the last epochs, with `None` in between."""
    if len(phases) <= _MOST_ROWS:
        return list(phases)
    half = _MOST_ROWS // 2
    return [*phases[:half], None, *phases[-half:]]


def _table(epochs: Sequence[EpochHealth]) -> str:
    """Returns a plain table, at most 80 columns wide."""
    rest = ("",) * (len(_COLUMNS) - 1)
    rows = [_COLUMNS] + [
        ("...", *rest) if epoch is None else _row(epoch)
        for epoch in abridged(epochs)
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place == 3 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _row(epoch: EpochHealth) -> tuple[str, ...]:
    rate = epoch.batches_per_s
    return (
        str(epoch.epoch + 1),
        formatting.duration(epoch.wall_s),
        formatting.share(epoch.data_wait),
        str(epoch.verdict.kind),
        f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}",
        formatting.duration(epoch.build_s_p50),
        formatting.duration(epoch.build_s_p95),
        f"{epoch.queue_depth_mean:.1f}",
        formatting.share(epoch.worker_utilization),
    )
