"""Who builds the batches of a dataset."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Loss:
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
class Staff:
    """A set of workers, as it is at one moment.

    Attributes:
        kind: "inline", "thread" or "process".
        count: How many workers there are; 0 for inline.
        pids: Their processes, by index; empty unless they are processes.
        losses: The latest of those that were lost.
        shared_nbytes: Shared memory in use for batches.
    """

    kind: str
    count: int
    pids: dict[int, int] = dataclasses.field(default_factory=dict)
    losses: tuple[Loss, ...] = ()
    shared_nbytes: int = 0
