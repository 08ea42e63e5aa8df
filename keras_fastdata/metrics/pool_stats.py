"""Describes the workers of a dataset at one moment."""

from __future__ import annotations

import dataclasses

from keras_fastdata.metrics.worker_kinds import WorkerKind


@dataclasses.dataclass(frozen=True)
class WorkerLoss:
    """The death or the replacement of a worker.

    Attributes:
        at_s: When the loss was noticed, by `time.monotonic`.
        worker: The worker's index.
        pid: The worker's process id.
    """

    at_s: float
    worker: int
    pid: int


@dataclasses.dataclass(frozen=True)
class TuningDecision:
    """A decision of `workers="auto"` about the workers to use.

    Attributes:
        batches: How many batches had been delivered.
        place: Where batches are built from then on, such as "2 processes".
        settled: Whether the decision is final, or a trial.
        reason: The reason, in a sentence or two.
    """

    batches: int
    place: str
    settled: bool
    reason: str

    def __str__(self) -> str:
        return (
            f"workers='auto' is at {self.place} since batch {self.batches}: "
            f"{self.reason}"
        )


@dataclasses.dataclass(frozen=True)
class PoolStats:
    """The state of a pool of workers at one moment."""

    kind: WorkerKind
    count: int  # the number of workers; 0 for inline
    # Process ids of workers on this machine, by worker index.
    pids: dict[int, int] = dataclasses.field(default_factory=dict)
    losses: tuple[WorkerLoss, ...] = ()  # the latest losses of workers
    shared_nbytes: int = 0  # bytes of shared memory in use for batches
    # The decisions of `workers="auto"` so far.
    decisions: tuple[TuningDecision, ...] = ()
    # The shard of this process, in words; empty without a shard.
    shard: str = ""
    # Cores of the Ray cluster; `None` for workers of this machine.
    cores: float | None = None
    # How often each folded stack was met in slow builds, since the dataset has
    # been in use; see `metrics.stack_sampler`.
    stacks: dict[str, int] = dataclasses.field(default_factory=dict)
    starting: int = 0  # how many workers have not loaded the dataset yet
    importing: str = ""  # the module being imported for new workers
