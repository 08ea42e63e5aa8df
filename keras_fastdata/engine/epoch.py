"""The progress of one epoch: which batches were delivered, and are ready.

    PLANNED --activate--> ACTIVE --finish(why)--> FINISHED
    ACTIVE --reset--> PLANNED
    FINISHED --rewind--> ACTIVE, or --restart--> PLANNED

Methods change it. The loader calls them, and so do its prefetcher and its
iterators, behind the loader's lock.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, NamedTuple

from keras_fastdata.engine.schedule import Schedule
from keras_fastdata.metrics.recorder import Span
from keras_fastdata.metrics.timing import Timing
from keras_fastdata.workers.base import BatchResult


class EpochState(enum.Enum):
    """Whether an epoch has begun, and whether it is over."""

    PLANNED = enum.auto()  # its number is what it will be, if no other begins
    ACTIVE = enum.auto()  # its number is its own; batches are asked for
    FINISHED = enum.auto()  # it delivers nothing any more, unless rewound


class Finish(enum.Enum):
    """Why an epoch is finished."""

    EXHAUSTED = enum.auto()  # all batches of its schedule were delivered
    END_OF_DATA = enum.auto()  # the dataset raised `EndOfData`
    FAILED = enum.auto()  # an error was raised to the consumer
    ABANDONED = enum.auto()  # nobody holds its iterator any more


class Pending(NamedTuple):
    """A request that is out: its epoch, its position, and its time."""

    epoch: Epoch
    key: int
    queued_s: float


class Completed(NamedTuple):
    """A result that has come; `queued_s` is 0 unless it was timed."""

    done: BatchResult
    queued_s: float


class Epoch:
    """Holds the progress of one epoch, and its ready batches.

    Attributes:
        shuffle: Whether the order is drawn.
        schedule: The order, once the first batch was asked for.
        number: The number of the epoch; see `EpochState.PLANNED`.
        state: Where it stands.
        finished_by: Why it is finished; `None` if it is not.
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
        remembers: How many of the first batches are kept for a `rewind`.
        start: The position it began at; 0, unless an earlier run did.
        is_from_cache: Whether the latest batch came from the cache.
        interval_s: How often there is to be a span; see `time_batches`.
        next_span_s: When there is to be another.
        depth: Batches known to be ready when one was last asked for.
        quiesce_s: Seconds until the workers rested, for the latest batch.
        spans: Of timed batches that have been opened, by index.
        span: Of the batch delivered last.
    """

    def __init__(self, shuffle: bool) -> None:
        self.shuffle = shuffle
        self.schedule: Schedule | None = None
        self.number: int | None = None
        self.state = EpochState.PLANNED
        self.finished_by: Finish | None = None
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
        self.remembers = 0
        self.start = 0
        self.is_from_cache = False
        self.interval_s: float | None = None
        self.next_span_s = 0.0
        self.depth = 0
        self.quiesce_s = 0.0
        self.spans: dict[int, Span] = {}
        self.span: Span | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the epoch has begun, so that its number is final."""
        return self.state is not EpochState.PLANNED

    @property
    def is_finished(self) -> bool:
        """Whether the epoch delivers no more batches."""
        return self.state is EpochState.FINISHED

    # -- its states ----------------------------------------------------------

    def _move_to(self, state: EpochState, why: Finish | None = None) -> None:
        """Changes the state; nothing else does."""
        self.state, self.finished_by = state, why

    def plan(self, number: int, schedule: Schedule | None = None) -> None:
        """Sets the number of the epoch, and its order if that is known."""
        self.number, self.schedule = number, schedule

    def forget_order(self) -> None:
        """Forgets the order and the skipped batches: the length may differ."""
        self.schedule = None
        self.skipped.clear()

    def activate(self) -> None:
        """Begins the epoch; its number is final now."""
        self._move_to(EpochState.ACTIVE)

    def start_at(self, position: int) -> None:
        """Leaves out the batches before a position: an earlier run had them."""
        self.start = self.position = self.issued = position

    def finish(self, why: Finish) -> None:
        """Ends the epoch; the first reason counts."""
        self.remembered = {}
        if not self.is_finished:
            self._move_to(EpochState.FINISHED, why)

    def note_change(self) -> None:
        """Forgets what depends on the state of the dataset."""
        self.remembered.clear()
        if self.position == self.start:
            self.forget_order()

    def reset(self) -> None:
        """Undoes `plan` and `activate`; nothing was delivered yet."""
        self._move_to(EpochState.PLANNED)
        self.number = self.schedule = None

    def restart(self) -> None:
        """Makes this object the next epoch: the resumed one had no batches."""
        self.start_at(0)
        self.forget_order()
        self._move_to(EpochState.PLANNED)

    def rewind(self) -> None:
        """Starts over; batches that were remembered are delivered again."""
        self.peeked.update(self.remembered)
        self.forget_first()
        self.position, self.delivered = self.start, 0
        if self.is_finished:
            self._move_to(EpochState.ACTIVE)

    # -- the batch that is asked for -----------------------------------------

    def begin_request(self) -> None:
        """Resets what is known of the latest batch, before the next one."""
        self.quiesce_s = 0.0
        self.is_from_cache = False

    def note_depth(self) -> None:
        """Stores how many batches are ready; 0 if the requested one is not."""
        self.depth = len(self.ready) if self.position in self.ready else 0
        if self.depth and self.next_epoch is not None:
            self.depth += len(self.next_epoch.ready)

    def note_quiesce(self, seconds: float) -> None:
        """Adds the seconds that the workers took to pause."""
        self.quiesce_s += seconds

    def note_cached(self) -> None:
        """Notes that the requested batch comes from the cache."""
        self.is_from_cache = True
        self.depth = 1

    def pass_position(self) -> None:
        """Goes on to the next position."""
        self.position += 1

    def note_delivery(self, index: int, batch: Any) -> None:
        """Counts a batch that was delivered."""
        self.span = self.spans.pop(index, None)
        if self.remembers:
            if self.span is not None:
                self.spans[index] = self.span
            if self.delivered < self.remembers:
                self.remembered[index] = batch
            else:
                self.forget_first()
        self.delivered += 1

    def remember_first(self, count: int) -> None:
        """Keeps the first batches for a `rewind`, until there is one more."""
        self.remembers = count

    def forget_first(self) -> None:
        """Drops the first batches, and keeps no others."""
        self.remembered, self.remembers = {}, 0

    def add_peeked(self, index: int, batch: Any) -> None:
        """Keeps a batch that was built before its turn."""
        self.peeked[index] = batch

    def drop_peeked(self, indices: Iterable[int]) -> None:
        """Drops peeked batches; they are built again."""
        for index in indices:
            del self.peeked[index]
            self.spans.pop(index, None)

    # -- what is asked for ahead of time -------------------------------------

    def note_issued(self) -> None:
        """Counts one more position that was asked for."""
        self.issued += 1

    def issue_again_from(self, position: int) -> None:
        """Requests positions from this one on again, if they were."""
        self.issued = min(self.issued, position)

    def note_built_here(self) -> None:
        """Notes that the caller has built the batch at `position`."""
        self.issued = max(self.issued, self.position + 1)

    def time_batches(self, interval_s: float | None) -> None:
        """Sets how often a span is recorded; `None`: never."""
        self.interval_s = interval_s

    def set_prefetching(self, prefetches_next: bool) -> None:
        """Sets whether another epoch with the same `shuffle` follows."""
        self.prefetches_next = prefetches_next

    def forbid_prefetching(self) -> None:
        """Stops prefetching the epoch after this one."""
        self.may_prefetch_next = False

    def prepare_next(self) -> Epoch:
        """Returns the next epoch; makes it if there is none."""
        if self.next_epoch is None:
            self.next_epoch = Epoch(self.shuffle)
            self.next_epoch.may_prefetch_next = self.may_prefetch_next
        return self.next_epoch

    def release_next(self) -> None:
        """Forgets the next epoch, which has an iterator of its own now."""
        self.next_epoch = None

    def peeking(self) -> Epoch:
        """Returns an epoch that goes through the same batches by index."""
        ahead = Epoch(shuffle=False)
        ahead.skipped, ahead.spans = self.skipped, self.spans
        return ahead

    def wants_span(self, timing: Timing) -> bool:
        """Returns whether to record a span for a batch with this timing."""
        interval_s = self.interval_s
        if interval_s is None:
            return False
        stored_s = timing.stored_s
        if stored_s >= self.next_span_s:
            self.next_span_s = stored_s + interval_s
            return True
        return stored_s - timing.began_s >= interval_s or timing.retries > 0

    def knows(self, position: int, index: int) -> bool:
        """Returns whether the batch at a position has come, or is left out."""
        return (
            position in self.ready
            or position in self.cached
            or index in self.peeked
            or index in self.skipped
        )

    def position_before(self, lag: int) -> int:
        """Returns the position before the latest `lag` deliveries."""
        return self._after_delivery(lag) if lag else self.position

    @property
    def latest(self) -> int | None:
        """The index of the latest batch; `None` before the first one."""
        if self.schedule is None or not self.delivered:
            return None
        return self.schedule.index_at(self._after_delivery(0) - 1)

    def _after_delivery(self, lag: int) -> int:
        """Returns the position behind the latest delivery but `lag`.

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
        """Forgets all requests and all ready batches."""
        self.waiting.clear()
        self.ready.clear()
        self.cached.clear()
        self.issued = self.position

    @property
    def ahead(self) -> int:
        """How many batches are requested and not delivered.

        One that is to be delivered again after a `rewind` is among them.
        """
        ahead = len(self.waiting) + len(self.ready)
        ahead += len(self.peeked) + len(self.remembered)
        return (
            ahead if self.next_epoch is None else ahead + self.next_epoch.ahead
        )

    @property
    def is_running_out(self) -> bool:
        """Whether more requests are out than batches are ready."""
        return len(self.waiting) > len(self.ready)


def span_of(
    epoch: Epoch, index: int, completed: Completed, opened_s: float, nbytes: int
) -> Span:
    """Returns the span of a timed batch, without its delivery."""
    done, timing = completed.done, completed.done.timing
    assert timing is not None
    assert epoch.number is not None
    began_s, built_s, stored_s, cpu_s, delay_s, retries, _ = timing
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
    """Returns the bytes of the arrays of a batch."""
    # Not `optree`, which takes ten times as long for the few there are.
    if isinstance(batch, tuple | list):
        return sum(map(size_of, batch))
    if isinstance(batch, dict):
        return sum(map(size_of, batch.values()))
    return int(getattr(batch, "nbytes", 0) or 0)
