"""Records the times of batches, from the request to the delivery.

A recorder gets the batches that are delivered for the thread of one `fit`,
whichever thread fetches them (with `steps_per_execution`, one of TensorFlow's).
Without a recorder nothing is measured.

The latest spans are kept in a ring; of all others only sums and distributions
remain. Of batches that follow each other closely, one is measured in every
`Recorder.interval_s`, and stands for those between. Batches that took longer
than that to build, or were built again, are all measured.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from keras_fastdata.metrics.pool_stats import PoolStats
from keras_fastdata.metrics.quantiles import Distribution
from keras_fastdata.metrics.sampling import NoSampler, Sampler

_BLOCK = 512  # spans that are taken in at a time
_SLOWEST = 32  # batches remembered for how long they took
_ENOUGH = 10  # batches that tell what handing over takes
SPANS_KEPT = 8192


class Span(NamedTuple):
    """The times and sizes of one batch; the clock is `time.monotonic`."""

    epoch: int  # the dataset's own count, from 0
    batch: int  # the index in the dataset
    worker: int  # index of the worker that built it; 0 in the calling thread
    retries: int  # workers that died over it, or were replaced, before
    nbytes: int  # bytes of the arrays
    depth: int  # batches that lay ready when this one was asked for
    queued_s: float  # when the request was issued
    began_s: float  # when `__getitem__` was called
    built_s: float  # when `__getitem__` returned
    stored_s: float  # when the arrays lay in shared memory
    delivered_s: float  # when the batch was handed to Keras
    opened_s: float  # how long the trainer took to make arrays of the result
    waited_s: float  # how long the trainer waited for the batch
    cpu_s: float  # CPU time of building and storing it; NaN if it was not asked
    delay_s: float  # time of the same without a core to run on; likewise


_DEPTH = Span._fields.index("depth")
_BEGAN = Span._fields.index("began_s")
_STORED = Span._fields.index("stored_s")
_DELIVERED = Span._fields.index("delivered_s")
_WAITED = Span._fields.index("waited_s")
_RETRIES = Span._fields.index("retries")


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A batch that was skipped because building it raised an exception.

    Attributes:
        dataset: Class name of the dataset.
        index: The batch's index.
        traceback: The traceback, as text.
    """

    dataset: str
    index: int
    traceback: str


class Slow(NamedTuple):
    """A batch that took long to build."""

    build_s: float
    batch: int
    waited_s: float


class BatchSource(Protocol):
    """The part of a loader's interface that a recorder uses."""

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> Any: ...

    @property
    def dataset(self) -> Any: ...

    @property
    def stacks(self) -> dict[str, int]: ...

    def pool_stats(self) -> PoolStats | None: ...


class WorkersWithin(BatchSource, Protocol):
    """The workers that a dataset has of its own, and waits for in its builds.

    The waits would else be taken for builds in the caller. The thread that
    fetches the batches calls these methods.
    """

    def time_batches(self, interval_s: float | None) -> None:
        """Sets how often times are recorded; see `BatchIterator`."""

    def finish_fetch(self, pauses: bool) -> None:
        """Pauses the workers after a fetch, or resumes them."""

    def quiesce_s(self) -> float:
        """Returns how long the workers took to pause after the latest fetch."""

    def span_of(self, epoch: int, index: int | None) -> Span | None:
        """Returns the times of a recent batch, if it was measured."""


class BatchStats:
    """Statistics of the batches of one epoch or validation.

    The waits are known of all batches. All else is known of those that were
    measured, each of which counts for those that it stands for.

    Attributes:
        batches: How many were delivered.
        nbytes: Bytes of their arrays.
        build: Distribution of the seconds that `__getitem__` took.
        wait: Distribution of the seconds that batches were waited for.
        wait_s: The sum of those, as of the latest `flush`.
        build_s, store_s, open_s, depth: Sums over batches.
        asked_s: Time of building and storing the batches whose CPU time was
            read.
        asked_cpu_s, asked_delay_s: CPU time of these, and waits for a core.
        first_wait_s: The wait for the first batch.
        hook_s: Time in `on_epoch_begin` and `on_epoch_end`.
        retried: How many batches were built again.
        retried_wait_s: The waits for these.
        ready_wait: The waits for batches that had been built when they were
            asked for, while they were handed over.
        slowest: The batches that took longest to build.
    """

    def __init__(self) -> None:
        self.batches = self.nbytes = self.retried = 0
        self.build, self.wait = Distribution(), Distribution()
        self.ready_wait = Distribution()
        self.build_s = self.store_s = self.open_s = self.depth = 0.0
        self.asked_s = self.asked_cpu_s = self.asked_delay_s = 0.0
        self.wait_s = self.first_wait_s = self.hook_s = 0.0
        self.retried_wait_s = 0.0
        self.slowest: list[Slow] = []

    @property
    def cpu_s(self) -> float:
        """The CPU time of all builds, estimated from the measured builds."""
        return self.asked_cpu_s * self._asked_of

    @property
    def delay_s(self) -> float:
        """The estimated total time that builds waited for a core."""
        return self.asked_delay_s * self._asked_of

    @property
    def blocked_s(self) -> float:
        """The total time that builds waited for something other than a core."""
        busy_s = self.cpu_s + self.delay_s
        return max(0.0, self.build_s + self.store_s - busy_s)

    @property
    def take_s(self) -> float:
        """The usual time to hand over a batch; NaN if too few lay ready.

        On a busy machine a few take far longer, for they wait for a core.
        """
        if self.ready_wait.count < _ENOUGH:
            return math.nan
        return self.ready_wait.quantile(0.5)

    @property
    def _asked_of(self) -> float:
        took_s = self.build_s + self.store_s
        return took_s / self.asked_s if self.asked_s > 0 else 0.0

    def add_spans(
        self, spans: npt.NDArray[np.float64], times: npt.NDArray[np.int64]
    ) -> None:
        """Adds the spans of measured batches to the statistics.

        The shape of `spans` is `(n, len(Span._fields))`.

        `times` says how many batches each span stands for.
        """
        column = dict(zip(Span._fields, spans.T, strict=True))
        if not self.batches:
            self.first_wait_s = float(column["waited_s"][0])
        build = column["built_s"] - column["began_s"]
        self.batches += int(times.sum())
        self.nbytes += int(column["nbytes"] @ times)
        self.build.add(build, times)
        self.wait.add(column["waited_s"], times)
        self.build_s += float(build @ times)
        took = column["stored_s"] - column["began_s"]
        asked = ~np.isnan(column["cpu_s"])
        self.asked_s += float(took[asked] @ times[asked])
        self.asked_cpu_s += float(column["cpu_s"][asked] @ times[asked])
        self.asked_delay_s += float(column["delay_s"][asked] @ times[asked])
        self.store_s += float((took - build) @ times)
        self.open_s += float(column["opened_s"] @ times)
        self.depth += float(column["depth"] @ times)
        again = column["retries"] > 0
        self.retried += int(again.sum())
        self.retried_wait_s += float(column["waited_s"][again].sum())
        asked_s = column["delivered_s"] - column["waited_s"]
        ready = column["stored_s"] <= asked_s
        self.ready_wait.add(column["waited_s"][ready], times[ready])
        waits, batches = column["waited_s"], column["batch"]
        longest = [
            Slow(float(build[i]), int(batches[i]), float(waits[i]))
            for i in np.argsort(build)[-_SLOWEST:]
        ]
        self.slowest = heapq.nlargest(_SLOWEST, self.slowest + longest)


class Recorder:
    """Records the batches for the Keras calls of one thread.

    Args:
        interval_s: Of batches and steps that take less than this, one is
            measured in this time; 0 for every single one.
        on_source: Called when batches come from another loader than before,
            with the stacks that were met before the running call of Keras.
        on_spans: Called with each block of spans, in order.
    """

    def __init__(
        self,
        interval_s: float = 0.0,
        *,
        on_source: Callable[[BatchSource, dict[str, int]], None] | None = None,
        on_spans: Callable[[npt.NDArray[np.float64]], None] | None = None,
    ) -> None:
        self.interval_s = interval_s
        # Time spent in the iterators of our datasets, in all.
        self.waited_s = 0.0
        # Time that belongs to no training step: a validation that is being set
        # up.
        self.excluded_s = 0.0
        self.quiesced_s = 0.0  # time until workers paused, for a measurement
        self.batches = 0  # how many batches were delivered
        # The latest 1,000 batches that were left out.
        self.skipped: list[Skipped] = []
        self.skips = 0  # how many batches were left out
        self._on_source = on_source
        self._source: weakref.ref[BatchSource] | None = None
        # Where the batches of this epoch come from, once it is known; see
        # `claim_source`.
        self.source_id: object = None
        self.predicts = False  # whether this is a `predict`, which has no probe
        # Decides which steps are measured by themselves.
        self.sampler: Sampler = NoSampler()
        self._on_spans = on_spans
        # Of the present epoch or validation; see `begin`.
        self.batch_stats = BatchStats()
        # Measured batches that are not in the statistics yet: the span, the
        # time of delivery, the wait, and the place among all batches, from 1.
        self._pending: list[tuple[Span, float, float, int]] = []
        self._seen = 0  # of the batches, those that spans stand for
        self._waited_before_s = 0.0  # the epoch began
        self._ring = np.empty((SPANS_KEPT, len(Span._fields)))
        self._rung = 0  # spans ever written to the ring

    def begin(
        self, *, predicts: bool = False, sampler: Sampler | None = None
    ) -> None:
        """Starts new statistics, for the next epoch or validation."""
        self.predicts = predicts
        self.sampler = sampler or NoSampler()
        self.flush()
        self.batch_stats = BatchStats()
        self._seen = self.batches
        self._waited_before_s = self.waited_s
        self.source_id = None

    def claim_source(self, source_id: object) -> bool:
        """Sets the source of this epoch's batches, unless a source is set.

        Returns whether it is the source. Batches of other sources belong to
        an evaluation in a callback, for example.
        """
        if self.source_id is None:
            self.source_id = source_id
        return self.source_id is source_id

    def expect(self, source_id: object) -> None:
        """Sets the source whose batches are recorded in this epoch."""
        self.source_id = source_id

    def exclude(self, seconds: float) -> None:
        """Excludes `seconds` from the time of training steps."""
        self.excluded_s += seconds

    def add_quiesce(self, seconds: float) -> None:
        """Adds the seconds that a measurement waited for workers to pause."""
        self.quiesced_s += seconds

    @property
    def source(self) -> BatchSource | None:
        """The loader of the latest batches; `None` before the first batch."""
        return None if self._source is None else self._source()

    def attach_source(
        self, source: BatchSource, stacks_before: dict[str, int]
    ) -> None:
        """Sets the loader that the next batches come from.

        Args:
            source: The loader.
            stacks_before: The stacks that were met in its slow builds before
                the running call of Keras.
        """
        reference = weakref.ref(source)  # the same one every time
        if reference is not self._source:
            self._source = reference
            if self._on_source is not None:
                self._on_source(source, stacks_before)

    def add(
        self,
        span: Span | None,
        waited_s: float,
        delivered_s: float | None = None,
    ) -> None:
        """Records a batch that was delivered after a wait of `waited_s`.

        The span is `None` if the batch was not measured. `delivered_s` is now
        by default.
        """
        self.batches += 1
        self.waited_s += waited_s
        if span is not None:
            if delivered_s is None:
                delivered_s = time.monotonic()
            self._pending.append((span, delivered_s, waited_s, self.batches))
            if len(self._pending) >= 2 * _BLOCK:
                # The later ones tell how many lay ready before them; the
                # engine knows only of those that it has collected.
                self._add_spans(_BLOCK)

    def add_hook(self, seconds: float) -> None:
        """Adds the duration of one `on_epoch_begin` or `on_epoch_end` call."""
        self.waited_s += seconds
        self.batch_stats.hook_s += seconds

    def skip(self, batch: Skipped) -> None:
        """Records a batch that was skipped."""
        self.skips += 1
        self.skipped.append(batch)
        del self.skipped[:-_MOST_SKIPPED]

    def flush(self) -> None:
        """Adds the pending batches to the statistics."""
        waited_s = self.waited_s - self._waited_before_s
        self.batch_stats.wait_s = max(0.0, waited_s - self.batch_stats.hook_s)
        if self._pending:
            self._add_spans(len(self._pending), last=True)
        elif self.batches > self._seen and self._rung:
            # A few quick ones, of which none was measured: like the last.
            count = self.batches - self._seen
            span = self._ring[(self._rung - 1) % SPANS_KEPT].copy()
            span[_RETRIES] = 0
            span[_WAITED] = self.batch_stats.wait_s / count
            self._seen = self.batches
            self.batch_stats.add_spans(span[np.newaxis], np.array([count]))

    def _add_spans(self, count: int, *, last: bool = False) -> None:
        measured, delivered_s, waited_s, at = zip(*self._pending, strict=True)
        spans, places = np.array(measured), np.array(at)
        spans[:, _DELIVERED], spans[:, _WAITED] = delivered_s, waited_s
        depths = np.maximum(spans[:, _DEPTH], _depths(spans, places))
        if (source := self.source) is not None:
            # Of those that were not measured, some came later than assumed.
            depths = np.minimum(depths, source.settings.lookahead)
        spans[:, _DEPTH] = depths
        spans, places = spans[:count], places[:count]
        del self._pending[:count]
        is_short = spans[:, _STORED] - spans[:, _BEGAN] < self.interval_s
        until = self.batches if last else int(places[-1])
        times = _times(is_short, places, self._seen, until)
        self._seen += int(times.sum())
        self.batch_stats.add_spans(spans, times)
        places = np.arange(self._rung, self._rung + len(spans)) % SPANS_KEPT
        self._ring[places] = spans
        self._rung += len(spans)
        if self._on_spans is not None:
            self._on_spans(spans)

    def spans(self) -> npt.NDArray[np.float64]:
        """Returns the latest spans as an array, oldest span first.

        Its shape is `(n, len(Span._fields))`.
        """
        self.flush()
        if self._rung <= SPANS_KEPT:
            return self._ring[: self._rung].copy()
        return np.roll(self._ring, -(self._rung % SPANS_KEPT), axis=0)


def _depths(
    spans: npt.NDArray[np.float64], places: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Returns how many batches were ready when each batch was requested.

    The spans are in the order of delivery, with their places among all batches.
    """
    asked_s = spans[:, _DELIVERED] - spans[:, _WAITED]
    stored_s = np.sort(spans[:, _STORED])
    stored = np.searchsorted(stored_s, asked_s, side="right")
    # The place of the first one that was not there yet.
    first = np.append(places, places[-1] + 1)[stored]
    return np.maximum(first - places, 0)


def _times(
    short: npt.NDArray[np.bool_],
    places: npt.NDArray[np.int64],
    before: int,
    until: int,
) -> npt.NDArray[np.int64]:
    """Returns how many batches each measured batch represents.

    One that took long stands for itself. Others stand for those before them
    that were not measured, and the last of them for those after it.

    Args:
        short: Which batches did not take long.
        places: Where each is among all batches.
        before: The place of the latest batch that is accounted for.
        until: The place of the last batch to account for.
    """
    times = np.ones(len(places), np.int64)
    standing = np.flatnonzero(short)
    if not len(standing):
        standing = np.array([len(places) - 1])
    # Those that were not measured, up to each.
    unseen = places - before - np.arange(1, len(places) + 1)
    unseen = unseen[standing]
    unseen[-1] = until - before - len(places)
    times[standing] += np.diff(unseen, prepend=0)
    return times


_MOST_SKIPPED = 1000  # remembered in full; all are counted

# By thread; the last one hears. Another one begins where a callback of a fit
# that is measured calls `evaluate` with a callback that measures that.
_attached: dict[int, list[weakref.ref[Recorder]]] = {}


def attach(recorder: Recorder) -> None:
    """Makes `recorder` record the batches for the calling thread."""
    present = _attached.setdefault(threading.get_ident(), [])
    present.append(weakref.ref(recorder))


def detach(recorder: Recorder) -> None:
    """Undoes `attach`: the recorder records no more batches. Idempotent."""
    thread = threading.get_ident()
    present = _attached.get(thread, [])
    present[:] = [r for r in present if r() not in (recorder, None)]
    if not present:
        _attached.pop(thread, None)


def current_for(thread: int) -> Recorder | None:
    """Returns the recorder attached to a thread, or `None` if there is none."""
    present = _attached.get(thread)
    if not present:
        return None
    # As a rule it is there; whoever was broken off may be gone.
    found = present[-1]()
    if found is None:
        living = (reference() for reference in reversed(present))
        found = next((one for one in living if one is not None), None)
    return found
