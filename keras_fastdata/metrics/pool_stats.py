"""Who builds the batches of a dataset."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class WorkerLoss:
    """A worker that died, or was replaced.

    Attributes:
        at_s: When that was noticed, by `time.monotonic`.
        worker: Its index.
        pid: Its process.
    """

    at_s: float
    worker: int
    pid: int


@dataclasses.dataclass(frozen=True)
class TuningDecision:
    """What `workers="auto"` has decided.

    Attributes:
        batches: How many batches had been delivered.
        place: Where batches are built from then on, such as "2 processes".
        settled: Whether it is to stay, or was only a trial.
        reason: In a sentence or two.
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
    """A set of workers, as it is at one moment.

    Attributes:
        kind: "inline", "thread", "process" or "ray".
        count: How many workers there are; 0 for inline.
        pids: Their processes, by index, as far as they are of this machine.
        losses: The latest of those that were lost.
        shared_nbytes: Shared memory in use for batches.
        decisions: What `workers="auto"` has decided so far.
        shard: Which batches are this process's; empty if all are.
        cores: Those of the cluster they are on; `None` if on this machine.
    """

    kind: str
    count: int
    pids: dict[int, int] = dataclasses.field(default_factory=dict)
    losses: tuple[WorkerLoss, ...] = ()
    shared_nbytes: int = 0
    decisions: tuple[TuningDecision, ...] = ()
    shard: str = ""
    cores: float | None = None
