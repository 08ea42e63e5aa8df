"""The state of one walk through a dataset.

It belongs to the loader, which changes it behind its lock.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from keras_fastdata.engine.schedule import Schedule
from keras_fastdata.metrics.recorder import Span
from keras_fastdata.metrics.timing import Timing
from keras_fastdata.workers.base import BatchResult


class Pending(NamedTuple):
    """Where the batch of a request belongs, and when that was issued."""

    epoch: Epoch
    key: int
    queued_s: float


class Completed(NamedTuple):
    """A result that has come; its moment is 0 unless it was timed."""

    done: BatchResult
    queued_s: float


class Epoch:
    """How far one pass has come, and what lies ready for it.

    Attributes:
        shuffle: Whether the order is drawn.
        schedule: The order, once the first batch was asked for.
        number: The number of the epoch, from then on; or, of an epoch that has
            not begun, what it will be if nobody else begins one before.
        begun: Whether that number is its own.
        prefetches_next: Whether an epoch like this one is to follow.
        may_prefetch_next: Whether that may begin ahead of its time: not where
            epochs of different iterators take turns.
        next_epoch: That one, once requests of it may be out.
        position: Of the next batch to deliver.
        issued: Positions below this one have been asked for.
        waiting: The request ids of requests that are out, by position.
        ready: Batches that have come, by position.
        cached: Positions whose batches are to come from the cache. Some may
            not be in it yet, but be asked for by another epoch.
        peeked: Batches that were opened before their turn, by index.
        skipped: Batches left out, by index, each with its traceback.
        delivered: How many batches have been delivered.
        remembered: The first batches, by index, as long as they are kept.
        remembers: Whether the first batches are kept for a `rewind`.
        start: The position it began at; 0, unless an earlier run did.
        ended: Whether the last batch was delivered, or an error.
        said_its_end: Whether `EndOfData` was what ended it.
        is_from_cache: Whether the latest batch came from the cache.
        interval_s: How often there is to be a span; see `time_batches`.
        next_span_s: When there is to be another.
        depth: Batches known to be ready when one was last asked for.
        quiesce_s: How long workers were then waited for to rest.
        spans: Of timed batches that have been opened, by index.
        span: Of the batch delivered last.
    """

    def __init__(self, shuffle: bool) -> None:
        self.shuffle = shuffle
        self.schedule: Schedule | None = None
        self.number: int | None = None
        self.begun = False
        self.prefetches_next = False
        self.may_prefetch_next = True
        self.next_epoch: Epoch | None = None
        self.position = 0
        self.issued = 0
        self.waiting: dict[int, int] = {}
        self.ready: dict[int, Completed] = {}
        self.cached: set[int] = set()
        self.peeked: dict[int, Any] = {}
        self.skipped: dict[int, str] = {}
        self.delivered = 0
        self.remembered: dict[int, Any] = {}
        self.remembers = False
        self.start = 0
        self.ended = self.said_its_end = False
        self.is_from_cache = False
        self.interval_s: float | None = None
        self.next_span_s = 0.0
        self.depth = 0
        self.quiesce_s = 0.0
        self.spans: dict[int, Span] = {}
        self.span: Span | None = None

    def wants_span(self, timing: Timing) -> bool:
        """Whether to look at a batch that was built so."""
        interval_s = self.interval_s
        if interval_s is None:
            return False
        stored_s = timing.stored_s
        if stored_s >= self.next_span_s:
            self.next_span_s = stored_s + interval_s
            return True
        return stored_s - timing.began_s >= interval_s or timing.retries > 0

    def knows(self, position: int, index: int) -> bool:
        """Whether the batch there has come, or is left out."""
        return (
            position in self.ready
            or position in self.cached
            or index in self.peeked
            or index in self.skipped
        )

    def position_before(self, lag: int) -> int:
        """Where it stood before the latest `lag` deliveries."""
        return self._after_delivery(lag) if lag else self.position

    @property
    def latest(self) -> int | None:
        """Index of the batch delivered last; `None` before the first."""
        if self.schedule is None or not self.delivered:
            return None
        return self.schedule.index_at(self._after_delivery(0) - 1)

    def _after_delivery(self, lag: int) -> int:
        """The position just after the latest delivery but for `lag`.

        What was not delivered on the way was left out.
        """
        position = self.position
        if not self.skipped:
            return max(self.start, position - lag)
        assert self.schedule is not None
        while position > self.start:
            if self.schedule.index_at(position - 1) not in self.skipped:
                if not lag:
                    break
                lag -= 1
            position -= 1
        return position

    def discard_prefetched(self) -> None:
        """Forgets what was asked for, and what lies ready."""
        self.waiting.clear()
        self.ready.clear()
        self.cached.clear()
        self.issued = self.position

    @property
    def ahead(self) -> int:
        """Batches asked for and not delivered, also of the next epoch.

        One that is to be delivered again after a `rewind` is among them.
        """
        ahead = len(self.waiting) + len(self.ready)
        ahead += len(self.peeked) + len(self.remembered)
        return (
            ahead if self.next_epoch is None else ahead + self.next_epoch.ahead
        )

    @property
    def is_running_out(self) -> bool:
        """Whether most of those are still to come, as far as is known."""
        return len(self.waiting) > len(self.ready)


def span_of(
    epoch: Epoch, index: int, completed: Completed, opened_s: float, nbytes: int
) -> Span:
    """The story of a batch that was timed, but for its delivery."""
    done, timing = completed.done, completed.done.timing
    assert timing is not None
    assert epoch.number is not None
    began_s, built_s, stored_s, cpu_s, delay_s, retries = timing
    # By position: by name it takes twice as long, and there is one per batch.
    return Span(
        epoch.number,
        index,
        done.worker,
        retries,
        nbytes,
        epoch.depth,
        completed.queued_s,
        began_s,
        built_s,
        stored_s,
        0.0,
        opened_s,
        0.0,
        cpu_s,
        delay_s,
    )


def size_of(batch: Any) -> int:
    """Bytes of the arrays of a batch that takes no shared memory."""
    # Not `optree`, which takes ten times as long for the few there are.
    if isinstance(batch, tuple | list):
        return sum(map(size_of, batch))
    if isinstance(batch, dict):
        return sum(map(size_of, batch.values()))
    return int(getattr(batch, "nbytes", 0) or 0)
