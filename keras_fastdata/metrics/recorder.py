"""Records the times of every batch, from its request to its delivery.

A `fit` runs in one thread, and so do its callbacks. A recorder listens to the
batches that are delivered for that thread, whichever thread fetches them (with
`steps_per_execution`, one of TensorFlow's). Without a recorder nobody measures.

Bounded: the latest spans are kept in a ring; of all others only sums and
distributions remain.

Cheap: of batches that follow each other closely, one is looked at in every
`Recorder.interval_s`, and stands for those between. Those that took longer to
build than that, or were built again, are all looked at.
"""

from __future__ import annotations

import dataclasses
import heapq
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
SPANS_KEPT = 8192


class Span(NamedTuple):
    """The times and sizes of one batch.

    Moments are those of `time.monotonic`, in seconds.

    Attributes:
        epoch: The dataset's own count, from 0.
        batch: Its index in the dataset.
        worker: Index of the worker that built it; 0 in the calling thread.
        retries: Workers that died over it, or were replaced, before.
        nbytes: Of its arrays.
        depth: Batches that lay ready when this one was asked for.
        queued_s: When its request was issued.
        began_s: When `__getitem__` was called.
        built_s: When it had returned.
        stored_s: When the arrays lay in shared memory.
        delivered_s: When it was handed to Keras.
        opened_s: How long making arrays of it took there.
        waited_s: How long it was waited for.
        cpu_s: CPU time of building and storing it; NaN if it was not asked.
        delay_s: Time of the same without a core to run on; likewise.
    """

    epoch: int
    batch: int
    worker: int
    retries: int
    nbytes: int
    depth: int
    queued_s: float
    began_s: float
    built_s: float
    stored_s: float
    delivered_s: float
    opened_s: float
    waited_s: float
    cpu_s: float
    delay_s: float


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
        traceback: What was raised, as text.
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
    def name(self) -> str:
        """The class name of the dataset."""
        ...

    @property
    def settings(self) -> Any:
        """The dataset's settings, an `engine.settings.Settings`."""
        ...

    @property
    def num_batches(self) -> int | None:
        """The number of batches of the latest epoch; `None` if unknown."""
        ...

    def pool_stats(self) -> PoolStats | None:
        """Returns the state of the workers; `None` before workers exist."""
        ...


class _PendingBatch(NamedTuple):
    """A measured batch that is not yet part of the statistics.

    Attributes:
        span: The times of the batch.
        delivered_s: When it was delivered.
        waited_s: How long `fit` waited for it.
        place: Its place among all batches, from 1.
    """

    span: Span
    delivered_s: float
    waited_s: float
    place: int


class BatchStats:
    """Statistics of the batches of one epoch or validation.

    Waits are those of all batches; all else is known of those that were
    looked at, each of which counts for those that it stands for.

    Attributes:
        batches: How many were delivered.
        nbytes: Of their arrays.
        build: Distribution of the seconds `__getitem__` took.
        wait: Distribution of the seconds batches were waited for.
        wait_s: The sum of those, as of the latest `flush`.
        build_s, store_s, open_s, depth: Sums over batches.
        asked_s: What building and storing took of those batches whose CPU
            time was asked for.
        asked_cpu_s, asked_delay_s: CPU time of these, and waits for a core.
        first_wait_s: The wait for the first batch.
        hook_s: Time in `on_epoch_begin` and `on_epoch_end`.
        retried_wait_s: The waits for batches that had to be built again.
        retried: How many batches that were.
        ready: How many batches had been built when they were waited for.
        ready_wait_s: The waits for these, which handing over took.
        slowest: The batches that took longest to build.
    """

    def __init__(self) -> None:
        self.batches = 0
        self.nbytes = 0
        self.build = Distribution()
        self.wait = Distribution()
        self.build_s = 0.0
        self.asked_s = self.asked_cpu_s = self.asked_delay_s = 0.0
        self.store_s = self.open_s = self.wait_s = self.depth = 0.0
        self.first_wait_s = self.hook_s = 0.0
        self.retried_wait_s = 0.0
        self.retried = 0
        self.ready, self.ready_wait_s = 0, 0.0
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
    def _asked_of(self) -> float:
        took_s = self.build_s + self.store_s
        return took_s / self.asked_s if self.asked_s > 0 else 0.0

    def add_spans(
        self,
        spans: npt.NDArray[np.float64],
        times: npt.NDArray[np.int64],
    ) -> None:
        """Adds measured batches; each can represent several delivered batches.

        Args:
            spans: Of shape `(n, len(Span._fields))`.
            times: How many batches each of them stands for: `(n,)`.
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
        self.ready += int(times[ready].sum())
        self.ready_wait_s += float(column["waited_s"][ready] @ times[ready])
        longest = np.argsort(build)[-_SLOWEST:]
        self.slowest = heapq.nlargest(
            _SLOWEST,
            self.slowest
            + [
                Slow(
                    float(build[i]),
                    int(column["batch"][i]),
                    float(column["waited_s"][i]),
                )
                for i in longest
            ],
        )


class Recorder:
    """Records the batches that are delivered for one thread.

    Args:
        interval_s: Of batches and steps that take less than this, one is
            looked at in this time; 0 for every single one.
        on_source: Called when batches come from another loader than before,
            with the stacks that were met before the running call of Keras.
        on_spans: Called with spans as they are taken in, in order.

    Attributes:
        interval_s: The argument.
        waited_s: Time spent in the iterators of our datasets, in all.
        excluded_s: Time that belongs to no training step: a validation that is
            being set up.
        quiesced_s: Time until workers rested, for a measurement.
        batches: Batches that those delivered.
        skipped: Batches that they left out, the latest 1,000 of them.
        skips: How many that were.
        predicts: Whether it listens to a `predict`, which has no probe.
        sampler: What decides which steps are measured by themselves.
        source_id: Where the batches of this epoch come from, once it is
            known; see `claim_source`.
        batch_stats: Of the present epoch or validation; see `begin`.
    """

    def __init__(
        self,
        interval_s: float = 0.0,
        *,
        on_source: Callable[[BatchSource, dict[str, int]], None] | None = None,
        on_spans: Callable[[npt.NDArray[np.float64]], None] | None = None,
    ) -> None:
        self.interval_s = interval_s
        self.waited_s = 0.0
        self.excluded_s = 0.0
        self.quiesced_s = 0.0
        self.batches = 0
        self.skipped: list[Skipped] = []
        self.skips = 0
        self._on_source = on_source
        self._source: weakref.ref[BatchSource] | None = None
        self.source_id: object = None
        self.predicts = False
        self.sampler: Sampler = NoSampler()
        self._on_spans = on_spans or _nobody
        self.batch_stats = BatchStats()
        self._pending: list[_PendingBatch] = []
        self._seen = 0  # of the batches, those that spans stand for
        self._waited_before_s = 0.0  # the epoch began
        self._ring = np.empty((SPANS_KEPT, len(Span._fields)))
        self._rung = 0  # spans ever written to the ring

    def begin(
        self,
        *,
        predicts: bool = False,
        sampler: Sampler | None = None,
    ) -> None:
        """Starts new statistics, for the next epoch or validation.

        Args:
            predicts: Whether it is of a `predict`, which has no probe.
            sampler: What decides which steps are measured by themselves.
        """
        self.predicts = predicts
        self.sampler = sampler or NoSampler()
        self.flush()
        self.batch_stats = BatchStats()
        self._seen = self.batches
        self._waited_before_s = self.waited_s
        self.source_id = None

    def claim_source(self, source_id: object) -> bool:
        """Makes `source_id` the source of this epoch's batches, if none is yet.

        Returns whether it is the source. Batches of other sources belong to
        an evaluation in a callback, for example.
        """
        if self.source_id is None:
            self.source_id = source_id
        return self.source_id is source_id

    def expect(self, source_id: object) -> None:
        """Sets the source of this epoch's batches; see `claim_source`."""
        self.source_id = source_id

    def exclude(self, seconds: float) -> None:
        """Adds time that does not count as part of any training step."""
        self.excluded_s += seconds

    def add_quiesce(self, seconds: float) -> None:
        """Adds time spent until all workers were idle, for a measurement."""
        self.quiesced_s += seconds

    @property
    def source(self) -> BatchSource | None:
        """The loader of the latest batches, or `None` if there is none."""
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
        """Records a batch that has been delivered.

        Args:
            span: Its story; `None` if it was not looked at.
            waited_s: How long it was waited for.
            delivered_s: When that wait was over, by `time.monotonic`. `None`:
                now.
        """
        self.batches += 1
        self.waited_s += waited_s
        if span is not None:
            if delivered_s is None:
                delivered_s = time.monotonic()
            self._pending.append(
                _PendingBatch(span, delivered_s, waited_s, self.batches)
            )
            if len(self._pending) >= 2 * _BLOCK:
                # The later ones tell how many lay ready before them; the
                # engine knows only of those that it has collected.
                self._add_spans(_BLOCK)

    def add_hook(self, seconds: float) -> None:
        """Adds the time of a call of `on_epoch_begin` or `on_epoch_end`."""
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
            # A few quick ones, of which none was looked at: like the last.
            count = self.batches - self._seen
            span = self._ring[(self._rung - 1) % SPANS_KEPT].copy()
            span[_RETRIES] = 0
            span[_WAITED] = self.batch_stats.wait_s / count
            self._seen = self.batches
            self.batch_stats.add_spans(span[np.newaxis], np.array([count]))

    def _add_spans(self, count: int, *, last: bool = False) -> None:
        seen = self._pending
        spans = np.array([one.span for one in seen])
        spans[:, _DELIVERED] = [one.delivered_s for one in seen]
        spans[:, _WAITED] = [one.waited_s for one in seen]
        places = np.array([one.place for one in seen])
        depths = np.maximum(spans[:, _DEPTH], _depths(spans, places))
        if (source := self.source) is not None:
            # Of those that were not looked at, some came later than assumed.
            depths = np.minimum(depths, source.settings.lookahead)
        spans[:, _DEPTH] = depths
        spans, places = spans[:count], places[:count]
        del self._pending[:count]
        took_s = spans[:, _STORED] - spans[:, _BEGAN]
        times = _times(
            took_s < self.interval_s,
            places,
            self._seen,
            self.batches if last else int(places[-1]),
        )
        self._seen += int(times.sum())
        self.batch_stats.add_spans(spans, times)
        places = np.arange(self._rung, self._rung + len(spans)) % SPANS_KEPT
        self._ring[places] = spans
        self._rung += len(spans)
        self._on_spans(spans)

    def spans(self) -> npt.NDArray[np.float64]:
        """Returns the latest spans, oldest first: `(n, len(Span._fields))`."""
        self.flush()
        if self._rung <= SPANS_KEPT:
            return self._ring[: self._rung].copy()
        return np.roll(self._ring, -(self._rung % SPANS_KEPT), axis=0)


def _depths(
    spans: npt.NDArray[np.float64], places: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Returns how many batches were ready when each batch was requested.

    Args:
        spans: Of batches in the order of their delivery.
        places: Where each of them is among all batches.
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
    """Returns, for each measured batch, how many batches it stands for.

    One that took long stands for itself. Others stand for those before them
    that were not looked at, and the last of them for those after it.

    Args:
        short: Which did not take long.
        places: Where each is among all batches.
        before: The place of the latest that is accounted for.
        until: The place of the last to account for.
    """
    times = np.ones(len(places), np.int64)
    standing = np.flatnonzero(short)
    if not len(standing):
        standing = np.array([len(places) - 1])
    # Those that were not looked at, up to each.
    unseen = places - before - np.arange(1, len(places) + 1)
    unseen = unseen[standing]
    unseen[-1] = until - before - len(places)
    times[standing] += np.diff(unseen, prepend=0)
    return times


def _nobody(spans: npt.NDArray[np.float64]) -> None:
    """Ignores the spans."""


_MOST_SKIPPED = 1000  # remembered in full; all are counted

# By thread; the last one hears. Another one begins where a callback of a fit
# that is measured calls `evaluate` with a callback that measures that.
_attached: dict[int, list[weakref.ref[Recorder]]] = {}


def attach(recorder: Recorder) -> None:
    """Makes `recorder` receive the batches of the calling thread."""
    present = _attached.setdefault(threading.get_ident(), [])
    present.append(weakref.ref(recorder))


def detach(recorder: Recorder) -> None:
    """Undoes `attach`: the recorder receives no more batches. Idempotent."""
    thread = threading.get_ident()
    present = _attached.get(thread, [])
    present[:] = [r for r in present if r() not in (recorder, None)]
    if not present:
        _attached.pop(thread, None)


def current_for(thread: int) -> Recorder | None:
    """Returns the recorder that receives the batches of a thread.

    `thread` is a `threading.get_ident`. Returns `None` without a recorder.
    """
    present = _attached.get(thread)
    if not present:
        return None
    # As a rule it is there; whoever was broken off may be gone.
    found = present[-1]()
    if found is None:
        living = (reference() for reference in reversed(present))
        found = next((one for one in living if one is not None), None)
    return found
