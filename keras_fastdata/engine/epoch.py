"""Tracks the progress of one epoch: requested, ready, delivered batches.

    PLANNED --activate--> ACTIVE --finish(why)--> FINISHED --rewind--> ACTIVE
    PLANNED --finish(ABANDONED)--> FINISHED
    all --unplan--> PLANNED

`Loader`, `Fetcher`, `Prefetcher` and `Results` change it behind the loader's
lock, through methods and in its dicts of batches. `BatchIterator` sets, without
the lock, what its one consumer wants.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

from keras_fastdata.engine.acknowledgements import (
    Acknowledgements,
    DeliveredBatch,
)
from keras_fastdata.engine.schedule import Schedule
from keras_fastdata.metrics.recorder import Span
from keras_fastdata.metrics.timing import Timing
from keras_fastdata.workers.base import BatchResult


class EpochState(enum.Enum):
    """The state of an epoch: planned, active or finished."""

    PLANNED = enum.auto()  # its number is what it will be, if no other begins
    ACTIVE = enum.auto()  # its number is its own; batches are asked for
    FINISHED = enum.auto()  # it delivers nothing any more, unless rewound


_NEXT = {
    EpochState.PLANNED: tuple(EpochState),
    EpochState.ACTIVE: (EpochState.FINISHED, EpochState.PLANNED),
    EpochState.FINISHED: (EpochState.ACTIVE, EpochState.PLANNED),
}


class Finish(enum.Enum):
    """The reason why an epoch finished."""

    EXHAUSTED = enum.auto()  # all batches of its schedule were delivered
    END_OF_DATA = enum.auto()  # the dataset raised `EndOfData`
    FAILED = enum.auto()  # an error was raised to the consumer
    ABANDONED = enum.auto()  # nobody holds its iterator any more


class Pending(NamedTuple):
    """A request for a batch whose result has not arrived."""

    epoch: Epoch
    key: int
    queued_s: float
    is_taken_over: bool = False  # whether another epoch has made the request


class Completed(NamedTuple):
    """A result that has arrived, with the time of the request."""

    done: BatchResult
    queued_s: float  # the time of the request; 0 if it was not timed


class SpanSampling:
    """Chooses the batches whose times are recorded."""

    def __init__(self) -> None:
        self.interval_s: float | None = None  # see `set_interval`
        self._next_s = 0.0  # when the next batch gets a span

    def set_interval(self, interval_s: float | None) -> None:
        """Sets the seconds between recorded spans; `None` disables spans."""
        self.interval_s = interval_s

    def takes(self, timing: Timing) -> bool:
        """Returns whether to record the times of a batch.

        Starts the interval again if it has passed since the last record.
        """
        interval_s = self.interval_s
        if interval_s is None:
            return False
        stored_s = timing.stored_s
        if stored_s >= self._next_s:
            self._next_s = stored_s + interval_s
            return True
        return stored_s - timing.began_s >= interval_s or timing.retries > 0


class Epoch:
    """Tracks the progress of one epoch, and stores the ready batches."""

    def __init__(self, shuffle: bool) -> None:
        self.shuffle = shuffle  # whether the order is drawn
        self.schedule: Schedule | None = None  # from the first request on
        self.number: int | None = None  # see `EpochState.PLANNED`
        self.state = EpochState.PLANNED
        self.finished_by: Finish | None = None
        # Whether an epoch like this one follows, and whether its batches may be
        # requested early: not if epochs of different iterators take turns.
        self.prefetches_next = False
        self.may_prefetch_next = True
        self.next_epoch: Epoch | None = None  # if it may have requests
        self.start = 0  # more than 0 if an earlier run had the first batches
        self.total: int | None = None  # see `start_at`
        self.position = 0  # of the next batch to deliver
        self.issued = 0  # positions below this one have been requested
        self.waiting: dict[int, int] = {}  # request ids by position
        self.ready: dict[int, Completed] = {}  # by position
        # Positions whose batches come from the cache. A batch may not be there
        # yet, if another epoch has requested it.
        self.cached: set[int] = set()
        self.peeked: dict[int, Any] = {}  # opened before their turn, by index
        self.skipped: dict[int, str] = {}  # tracebacks by index
        self.retried: set[int] = set()  # indices, see `retries`
        self.delivered = 0  # batches
        self.acknowledgements = Acknowledgements()
        self.remembers = 0  # how many first batches are kept for a `rewind`
        self.remembered: dict[int, Any] = {}  # these batches, by index
        self.is_from_cache = False  # the latest batch
        self.sampling = SpanSampling()
        self.is_quiet = False  # whether long waits are not shown
        self.depth = 0  # batches that were ready at the latest request
        self.quiesce_s = 0.0  # how long the workers took to pause for it
        self.spans: dict[int, Span] = {}  # of opened batches, by index
        self.span: Span | None = None  # of the batch delivered last

    @property
    def has_begun(self) -> bool:
        """Whether the epoch has begun; its number is then final."""
        return self.state is not EpochState.PLANNED

    @property
    def is_finished(self) -> bool:
        """Whether the epoch delivers no more batches."""
        return self.state is EpochState.FINISHED

    @property
    def is_delivered(self) -> bool:
        """Whether no batch follows, as far as is known."""
        schedule = self.schedule
        return schedule is not None and not schedule.holds(self.position)

    # -- its states ----------------------------------------------------------

    def _move_to(self, state: EpochState, why: Finish | None = None) -> None:
        """Changes `state` and `finished_by`; no other method changes them."""
        assert state in _NEXT[self.state], (self.state, state)
        self.state, self.finished_by = state, why

    def plan(self, number: int, schedule: Schedule | None = None) -> None:
        """Sets the epoch's number and schedule."""
        self.number, self.schedule = number, schedule

    def plan_by_index(self, other: Epoch) -> None:
        """Plans this epoch like another one, in the order of the indices."""
        assert other.number is not None
        assert other.schedule is not None
        self.plan(other.number, other.schedule.by_index())

    def forget_order(self) -> None:
        """Clears the epoch's order and the record of skipped batches."""
        self.schedule = None
        self.skipped.clear()

    def activate(self) -> None:
        """Begins the epoch, and makes its number final."""
        self._move_to(EpochState.ACTIVE)

    def start_at(self, position: int, total: int | None = None) -> None:
        """Sets the position of the first batch to deliver.

        `total` is the length of the epoch, over all shards; `None`: that of
        the dataset.
        """
        self.start = self.position = self.issued = position
        self.total = total
        if total is not None:
            self.forget_order()

    def finish(self, why: Finish) -> None:
        """Finishes the epoch; a second call does not change the reason."""
        self.remembered = {}
        if not self.is_finished:
            self._move_to(EpochState.FINISHED, why)

    def silence(self, is_quiet: bool) -> None:
        """Sets whether to hide messages about long waits for a batch."""
        self.is_quiet = is_quiet

    def note_change(self) -> None:
        """Drops what the epoch has from before a change of the dataset.

        The order stays, if the epoch has passed its first position.
        """
        self.remembered.clear()
        if self.position == self.start:
            self.forget_order()

    def unplan(self) -> None:
        """Undoes `plan` and `activate`, so that the epoch can begin again.

        It must not have delivered a batch. If a resumed epoch has no batch
        left, its object is reused so; likewise after a state was loaded.
        """
        self.start_at(0)
        self.forget_order()
        self.number = None
        self._move_to(EpochState.PLANNED)

    def rewind(self) -> None:
        """Moves back to the first batch, and reuses remembered batches."""
        self.peeked.update(self.remembered)
        self.forget_first()
        self.acknowledgements.clear()
        self.position, self.delivered = self.start, 0
        if self.is_finished:
            self._move_to(EpochState.ACTIVE)

    # -- the batch that is asked for -----------------------------------------

    def begin_request(self) -> None:
        """Resets `quiesce_s` and `is_from_cache` before a request."""
        self.quiesce_s = 0.0
        self.is_from_cache = False

    def note_depth(self) -> None:
        """Updates `depth`, the number of ready batches."""
        self.depth = len(self.ready) if self.position in self.ready else 0
        if self.depth and self.next_epoch is not None:
            self.depth += len(self.next_epoch.ready)

    def note_quiesce(self, seconds: float) -> None:
        """Increases `quiesce_s` by the time that the workers took to pause."""
        self.quiesce_s += seconds

    def note_cached(self) -> None:
        """Notes that the requested batch comes from the cache."""
        self.is_from_cache = True
        self.depth = 1

    def pass_position(self) -> None:
        """Moves to the position of the next batch."""
        self.position += 1

    def retries(self, index: int) -> bool:
        """Returns whether to build a batch again that could not be opened.

        It is built again once: a signal handler may have raised the error.
        """
        is_first = index not in self.retried
        self.retried.add(index)
        return is_first

    def note_delivery(self, index: int, batch: Any) -> None:
        """Counts a batch, passes its position, and keeps it for a while."""
        self.acknowledgements.count(
            DeliveredBatch(
                batch, self.is_from_cache, self.position, self.delivered
            )
        )
        self.pass_position()
        self.span = self.spans.pop(index, None)
        if self.remembers:
            if self.span is not None:
                self.spans[index] = self.span
            if self.delivered < self.remembers:
                self.remembered[index] = batch
            else:
                self.forget_first()
        self.delivered += 1

    def redeliver(self) -> Any:
        """Returns a batch that was counted, but that no consumer has got."""
        delivery = self.acknowledgements.redeliver()
        self.is_from_cache = delivery.is_from_cache
        # The error may have come before the count's end.
        self.position = max(self.position, delivery.position + 1)
        self.delivered = max(self.delivered, delivery.delivered + 1)
        return delivery.batch

    def remember_first(self, count: int) -> None:
        """Keeps the first `count` delivered batches for `rewind`.

        Drops them when a further batch is delivered.
        """
        self.remembers = count

    def forget_first(self) -> None:
        """Drops the batches that were kept for a `rewind`."""
        self.remembered, self.remembers = {}, 0

    # -- what is asked for ahead of time -------------------------------------

    def note_issued(self) -> None:
        """Increments the number of requested positions."""
        self.issued += 1

    def issue_again_from(self, position: int) -> None:
        """Marks `position` and all later positions as not requested."""
        self.issued = min(self.issued, position)

    def note_built_here(self) -> None:
        """Notes that the batch at the current position was built inline."""
        self.issued = max(self.issued, self.position + 1)

    def set_prefetching(self, prefetches_next: bool) -> None:
        """Sets whether to prefetch batches of the next epoch."""
        self.prefetches_next = prefetches_next

    def forbid_prefetching(self) -> None:
        """Forbids prefetching batches of the next epoch."""
        self.may_prefetch_next = False

    def prepare_next(self) -> Epoch:
        """Returns the next epoch, and creates its object if necessary."""
        if self.next_epoch is None:
            self.next_epoch = Epoch(self.shuffle)
            self.next_epoch.may_prefetch_next = self.may_prefetch_next
        return self.next_epoch

    def release_next(self) -> None:
        """Drops the reference to the next epoch."""
        self.next_epoch = None

    def peeking(self) -> Epoch:
        """Returns a new, unshuffled epoch for fetching batches early."""
        ahead = Epoch(shuffle=False)
        ahead.skipped, ahead.spans = self.skipped, self.spans
        ahead.is_quiet = self.is_quiet
        return ahead

    def keep_peeked(self, indices: set[int | None]) -> None:
        """Drops the early batches of other indices."""
        for index in self.peeked.keys() - indices:
            del self.peeked[index]
            self.spans.pop(index, None)

    def knows(self, position: int, index: int) -> bool:
        """Returns whether a batch is here already, cached, or to be skipped."""
        return (
            position in self.ready
            or position in self.cached
            or index in self.peeked
            or index in self.skipped
        )

    def position_before(self, lag: int) -> int:
        """Returns the position `lag` batches ago; requeued ones are to come."""
        lag += self.acknowledgements.requeued_before(self.position)
        return self._after_delivery(lag) if lag else self.position

    @property
    def latest(self) -> int | None:
        """The index of the latest batch; `None` before the first batch."""
        if self.schedule is None or not self.delivered:
            return None
        return self.schedule.index_at(self._after_delivery(0) - 1)

    def _after_delivery(self, lag: int) -> int:
        """Returns the position after all but the last `lag` deliveries."""
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
        """Drops all requests and all ready batches."""
        self.waiting.clear()
        self.ready.clear()
        self.cached.clear()
        self.issued = self.position

    @property
    def ahead(self) -> int:
        """The number of batches requested or stored, with the next epoch's."""
        ahead = len(self.waiting) + len(self.ready)
        ahead += len(self.peeked) + len(self.remembered)
        if self.next_epoch is not None:
            ahead += self.next_epoch.ahead
        return ahead
