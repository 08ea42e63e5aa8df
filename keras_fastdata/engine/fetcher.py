"""Fetches the batch at the next position of an epoch.

A batch is looked for in this order: peeked, cached, skipped, ready, on its way.
One that is nowhere is requested.

Each method but `wait` is a step under the lock, and waits for nothing. Where a
batch is still to come, the step ends with `Outcome.PENDING`; the consumer calls
`wait` without the lock, and takes the step again. Between two steps, a `Fetch`
knows what is waited for:

    NEW --first step--> LOOKING
    LOOKING --requested--> AWAITING --skipped--> LOOKING, at the next position
    LOOKING --ready, if workers are to pause--> PAUSING --paused--> LOOKING
    LOOKING, AWAITING --threads may not build it--> DRAINING
    DRAINING --no worker builds--> BUILDING --built--> LOOKING
    all --delivered, raised, or interrupted--> ENDED
"""

from __future__ import annotations

import dataclasses
import enum
import threading
import time
import weakref
from typing import Any

from keras_fastdata.engine.autotune import SettingsInEffect
from keras_fastdata.engine.epoch import Completed, Epoch, Finish
from keras_fastdata.engine.planner import EpochPlanner
from keras_fastdata.engine.pool_factory import PoolFactory
from keras_fastdata.engine.pool_handle import PoolHandle
from keras_fastdata.engine.position import Position
from keras_fastdata.engine.prefetcher import Prefetcher
from keras_fastdata.engine.results import Outcome, Results
from keras_fastdata.engine.told_state import StateLostError
from keras_fastdata.engine.waiting import BatchWait
from keras_fastdata.workers.base import BatchRequest, WorkerPool
from keras_fastdata.workers.inline import InlinePool

_LOOK_S = 0.005  # between two looks at workers whose batches are here
_QUIESCE_S = 1.0  # for workers to finish what they are at


class Phase(enum.IntEnum):
    """The phase of a `Fetch`; the values are indices into `_NEXT`."""

    NEW = 0  # no step was taken
    LOOKING = 1  # the batch at the epoch's position is looked for
    AWAITING = 2  # the batch was requested from the workers
    PAUSING = 3  # the batch is here; the pause of the workers is awaited
    DRAINING = 4  # the caller builds the batch, once no worker builds any more
    BUILDING = 5  # the caller builds the batch
    ENDED = 6  # the consumer has the batch or an error, or was interrupted


# Faster than attributes of the enum, which are looked up for every batch.
NEW, LOOKING, AWAITING, PAUSING, DRAINING, BUILDING, ENDED = Phase

_NEXT = (
    (ENDED, LOOKING),
    (ENDED, LOOKING, AWAITING, PAUSING, DRAINING),
    (ENDED, LOOKING, DRAINING),
    (ENDED, LOOKING),
    (ENDED, DRAINING, BUILDING),
    (ENDED, DRAINING, BUILDING, LOOKING),
    (),
)
_IN_CALLER = (DRAINING, BUILDING)


@dataclasses.dataclass(slots=True, weakref_slot=True, eq=False)
class Fetch:
    """The progress of one request for a batch, kept while the caller waits."""

    # Whether the workers pause until the next one is asked for.
    pause_after: bool
    # Whether to collect results even if the batch is here and more of them lie
    # ready than are out.
    is_thorough: bool
    phase: Phase = NEW
    workers: WorkerPool | None = None  # the workers at the latest step
    # The batches that a peek has got so far, by index.
    peeked: dict[int, Any] = dataclasses.field(default_factory=dict)
    here_s: float = 0.0  # the time when the batch came, if `PAUSING`
    # The caller as a worker, if `DRAINING` or `BUILDING`.
    inline: InlinePool | None = None
    thread: int = 0  # the caller's thread, likewise
    # Shows the user what is waited for; `None` before the first wait.
    wait: BatchWait | None = None

    def __enter__(self) -> Fetch:
        return self

    def __exit__(self, *_: object) -> None:
        self.move(ENDED)
        if self.wait is not None:
            self.wait.end()

    def move(self, phase: Phase) -> None:
        """Changes the phase; no other method changes it."""
        assert phase in _NEXT[self.phase], (self.phase, phase)
        self.phase = phase

    def begin_step(self, workers: WorkerPool) -> None:
        """Starts a fetch step, and stores the current workers."""
        self.workers = workers
        if self.phase is NEW:
            self.move(LOOKING)

    def build_here(self, pool: InlinePool) -> None:
        """Assigns the build of the batch to the calling thread."""
        self.inline, self.thread = pool, threading.get_ident()
        self.move(DRAINING)


@dataclasses.dataclass(eq=False)
class Fetcher:
    """Fetches the batches of one dataset."""

    results: Results
    _in_effect: SettingsInEffect
    _planner: EpochPlanner
    _position: Position
    _prefetcher: Prefetcher
    _pool: PoolHandle
    _factory: PoolFactory
    _look_s: float = 0.0  # when the next fetch is thorough in any case
    # The fetches whose callers build, beside those that were given up.
    _inline: weakref.WeakSet[Fetch] = dataclasses.field(
        default_factory=weakref.WeakSet
    )

    def begin(self, pause_after: bool, is_thorough: bool = False) -> Fetch:
        """Returns a new `Fetch` for a request.

        Every few milliseconds, `is_thorough` is set even if not asked for.
        """
        now_s = time.monotonic()
        if now_s >= self._look_s:
            self._look_s = now_s + _LOOK_S
            is_thorough = True
        return Fetch(pause_after, is_thorough)

    def wait(self, fetch: Fetch, epoch: Epoch) -> None:
        """Waits briefly for a batch; shows a notice if the wait is long."""
        builds = fetch.phase is BUILDING
        workers = fetch.inline if builds else fetch.workers
        assert workers is not None
        fetch.wait = fetch.wait or BatchWait(self._pool.name, epoch)
        self._pool.wait(workers, builds=builds)
        self._pool.check_shutdown(builds=not self._in_effect.now.workers)
        fetch.wait.look(workers, self.results.cache is not None)

    # -- the next batch ------------------------------------------------------

    def next(self, workers: WorkerPool, epoch: Epoch, fetch: Fetch) -> Any:
        """Returns the next batch, or `Outcome.PENDING` or `Outcome.END`."""
        prefetcher, schedule = self._prefetcher, epoch.schedule
        assert schedule is not None
        fetch.begin_step(workers)
        if self._inline and self._must_wait(fetch):
            return Outcome.PENDING
        if not fetch.pause_after:
            workers.resume()
        while (index := schedule.index_at(epoch.position)) is not None:
            if fetch.phase in _IN_CALLER:
                batch = self._built_here(workers, epoch, index, fetch)
            else:
                if epoch.cached:
                    self.results.check_cached(epoch, index)
                if fetch.pause_after and not self._quiesce(
                    workers, epoch, index, fetch
                ):
                    return Outcome.PENDING
                if epoch.issued <= epoch.position:
                    self.fill(workers, epoch)
                batch = self._fetch(workers, epoch, index, fetch)
            if batch is Outcome.PENDING:
                if fetch.phase is AWAITING and prefetcher.should_fill(epoch):
                    self.fill(workers, epoch)
                return batch
            if batch is Outcome.CACHE_MISS:
                continue
            if batch is Outcome.END:
                self.finish(epoch, Finish.END_OF_DATA)
                self._factory.note_delivery(epoch, workers)
                break
            if batch is Outcome.SKIPPED:
                epoch.pass_position()
                fetch.move(LOOKING)  # for the next one
                continue
            epoch.note_delivery(index, batch)
            if not self.results.structure:
                self.results.note_structure(batch)
            self._position.note_delivery(epoch)
            self._factory.note_delivery(epoch, workers)
            if prefetcher.should_fill(epoch, fetch.is_thorough):
                self.fill(workers, epoch)
            return batch
        workers.resume()
        self.finish(epoch, Finish.EXHAUSTED)
        return Outcome.END

    def peek(
        self,
        workers: WorkerPool,
        epoch: Epoch,
        ahead: Epoch,
        count: int,
        fetch: Fetch,
    ) -> Any:
        """Fetches batches 0 to `count` - 1 early, and stores them for `epoch`.

        `ahead` is an epoch that goes through the dataset by index.

        Returns:
            The batches by index, or `PENDING`.
        """
        fetch.begin_step(workers)
        if self._must_wait(fetch):
            return Outcome.PENDING
        workers.resume()
        schedule, peeked = epoch.schedule, fetch.peeked
        assert schedule is not None
        while len(peeked) < count and schedule.holds(ahead.position):
            index = ahead.position
            with self._position.noting_failure(epoch, ahead):
                if fetch.phase in _IN_CALLER:
                    batch = self._built_here(workers, ahead, index, fetch)
                else:
                    self._ask_ahead(workers, ahead, count)
                    batch = self._fetch(workers, ahead, index, fetch)
            if batch is Outcome.PENDING:
                return batch
            if batch is Outcome.CACHE_MISS:
                continue
            if batch is Outcome.END:
                self.finish(ahead, Finish.END_OF_DATA)
                break
            ahead.pass_position()
            fetch.move(LOOKING)  # for the next one
            if batch is not Outcome.SKIPPED:
                peeked[index] = epoch.peeked[index] = batch
        if self._prefetcher.leaves_little(len(epoch.peeked)):
            # What is dropped is built again when its turn comes.
            start = epoch.position
            first = {schedule.index_at(start + n) for n in range(count)}
            epoch.keep_peeked(first)
        self._factory.note_peek(workers)
        return peeked

    def _must_wait(self, fetch: Fetch) -> bool:
        """Returns whether to wait, because another thread rebuilds a batch.

        Workers would draw from the generators that this build has seeded.
        """
        return fetch.phase not in _IN_CALLER and any(
            other.phase in _IN_CALLER and other.thread != threading.get_ident()
            for other in self._inline
        )

    def finish(self, epoch: Epoch, why: Finish) -> None:
        """Finishes an epoch, and drops its requests and results."""
        self._prefetcher.forget(self._pool.workers, epoch)
        epoch.finish(why)
        self._position.note_finish(epoch)

    def apply_settings(self) -> None:
        """Applies the current settings, and marks the workers as invalid."""
        self._in_effect.adopt()
        self._prefetcher.apply_settings()
        self._pool.invalidate()

    def fill(self, workers: WorkerPool, epoch: Epoch) -> None:
        """Requests batches of `epoch` and, if possible, of the next epoch."""
        cache = self.results.cache
        if (
            (epoch.remembers and not self._factory.builds_before_epoch)
            or not self._prefetcher.fill(workers, epoch, cache)
            or not epoch.prefetches_next
            or not epoch.may_prefetch_next
            or not self._in_effect.now.builds_next_epoch
        ):
            return
        next_epoch = epoch.prepare_next()
        next_epoch.sampling.set_interval(epoch.sampling.interval_s)
        schedule = epoch.schedule
        if next_epoch.schedule is None and schedule is not None:
            next_epoch.plan(self._position.next_epoch)
            # If its length differs, that shows when it begins.
            self._planner.plan(next_epoch, schedule.total, schedule.shard)
        self._prefetcher.fill_next(workers, epoch, next_epoch, cache)

    def _fetch(
        self, workers: WorkerPool, epoch: Epoch, index: int, fetch: Fetch
    ) -> Any:
        """Returns the current batch, or an `Outcome` if there is no batch."""
        if index in epoch.peeked:
            return epoch.peeked.pop(index)
        position = epoch.position
        if position in epoch.cached:
            return self.results.take_cached(epoch, index)
        if index in epoch.skipped:
            return Outcome.SKIPPED
        is_running_out = len(epoch.waiting) > len(epoch.ready)
        if fetch.is_thorough or is_running_out or position not in epoch.ready:
            self._prefetcher.drain_results(workers)
        if fetch.phase is LOOKING:
            epoch.note_depth()
        if position not in epoch.ready:
            if fetch.phase is LOOKING:
                fetch.move(AWAITING)
            self._prefetcher.require(workers, epoch, position, index)
            if position not in epoch.ready:
                return Outcome.PENDING
        batch = self._open(epoch, epoch.ready.pop(position), index)
        if batch is Outcome.RETRY_INLINE:
            return self._build_here(workers, epoch, index, fetch)
        return batch

    def _ask_ahead(self, workers: WorkerPool, ahead: Epoch, count: int) -> None:
        """Requests the batches that `peek` needs, until the queue is full."""
        assert ahead.schedule is not None
        for index in range(ahead.position, count):
            if not ahead.schedule.holds(index):
                return
            if self.results.is_cached(index):
                ahead.cached.add(index)
                continue
            self.results.check_cached(ahead, index)
            if (
                index not in ahead.ready
                and index not in ahead.waiting
                and not self._prefetcher.issue(workers, ahead, index, key=index)
            ):
                return

    def _quiesce(
        self, workers: WorkerPool, epoch: Epoch, index: int, fetch: Fetch
    ) -> bool:
        """Pauses the workers as soon as batch `index` is ready.

        The batches that they build are awaited too, for up to `_QUIESCE_S`.

        Returns:
            `False` if the batch, or the pause of the workers, is awaited.
        """
        position = epoch.position
        if not epoch.knows(position, index):
            workers.resume()
        if fetch.phase is not PAUSING:
            self.fill(workers, epoch)
        self._prefetcher.drain_results(workers)
        if not epoch.knows(position, index):
            self._prefetcher.require(workers, epoch, position, index)
        if not epoch.knows(position, index):
            return False
        workers.pause()
        now_s = time.monotonic()
        if fetch.phase is not PAUSING:
            fetch.move(PAUSING)
            fetch.here_s = now_s
        waited_s = now_s - fetch.here_s
        if workers.busy and waited_s <= _QUIESCE_S:
            return False
        epoch.note_quiesce(waited_s)
        fetch.move(LOOKING)
        return True

    def _open(self, epoch: Epoch, completed: Completed, index: int) -> Any:
        """Returns the batch in a result, or an `Outcome` if there is none."""
        has_failed = completed.done.by_dataset or completed.done.is_lost
        try:
            return self.results.open(epoch, completed, index)
        except StateLostError:
            raise
        except Exception:
            if has_failed or not epoch.retries(index):  # the epoch is over
                self.finish(epoch, Finish.FAILED)
                self._pool.confirm()
            raise

    def _build_here(
        self, workers: WorkerPool, epoch: Epoch, index: int, fetch: Fetch
    ) -> Any:
        """Rebuilds a batch in the calling thread, once no worker is building.

        What threads have built meanwhile is as doubtful, and is dropped.
        """
        assert epoch.number is not None
        self._prefetcher.forget_all(workers)
        self._prefetcher.forget(workers, epoch)
        workers.resume()  # cancelled requests are answered at once
        pool = self._factory.create_inline()
        pool.submit(BatchRequest(0, epoch.number, index))
        fetch.build_here(pool)
        self._inline.add(fetch)
        return self._built_here(workers, epoch, index, fetch)

    def _built_here(
        self, workers: WorkerPool, epoch: Epoch, index: int, fetch: Fetch
    ) -> Any:
        """Returns the inline-built batch, or an `Outcome` if there is none."""
        assert fetch.inline is not None
        self._prefetcher.drain_results(workers)
        fetch.move(DRAINING if (is_busy := workers.busy) else BUILDING)
        if is_busy or not (built := fetch.inline.collect()):
            return Outcome.PENDING
        fetch.move(LOOKING)
        if fetch.pause_after:
            workers.pause()
        batch = self._open(epoch, Completed(built[0], 0.0), index)
        epoch.note_built_here()
        if self._in_effect.are_outdated:
            self.apply_settings()
        return batch
