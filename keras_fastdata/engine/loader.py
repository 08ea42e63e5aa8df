"""Delivers batches to the iterators of one dataset.

    BatchIterator -> Loader -> Fetcher -> Prefetcher -> WorkerPool.submit
                               Fetcher <- Epoch.ready <- WorkerPool.collect

Everything happens in the thread that asks for a batch; the loader has no
thread of its own. Between two calls workers build what they were asked for.

Each step runs under the lock of the `PoolHandle`, and waits for nothing. Where
the batch is still to come, the thread waits without the lock, and takes the
step again.

Where another epoch is known to follow, its first requests go out behind the
last ones of the present epoch. Its batches wait. It begins when its iterator is
asked for the first of them.

Invariant: an epoch delivers position 0, 1, 2 ... of its schedule, each once.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, NamedTuple

from keras_fastdata.building import interface
from keras_fastdata.building.interface import Dataset
from keras_fastdata.engine.autotune import SettingsInEffect
from keras_fastdata.engine.checkpoint import Checkpoint
from keras_fastdata.engine.epoch import Epoch, Finish
from keras_fastdata.engine.fallback import Fallback
from keras_fastdata.engine.fetcher import NEW, Fetch, Fetcher
from keras_fastdata.engine.hook_replay import Changes, HookReplay
from keras_fastdata.engine.open_epochs import OpenEpochs
from keras_fastdata.engine.outside_state import Change
from keras_fastdata.engine.pausing import Pausing
from keras_fastdata.engine.planner import EpochPlanner
from keras_fastdata.engine.pool_factory import PoolFactory
from keras_fastdata.engine.pool_handle import PoolHandle
from keras_fastdata.engine.position import Position
from keras_fastdata.engine.prefetcher import Prefetcher
from keras_fastdata.engine.results import Outcome, Results
from keras_fastdata.engine.schedule import Schedule
from keras_fastdata.engine.settings import Settings
from keras_fastdata.engine.sharding import Shard
from keras_fastdata.engine.slow_builds import SlowBuilds
from keras_fastdata.metrics.pool_stats import PoolStats
from keras_fastdata.workers.base import WorkerPool


class Description(NamedTuple):
    """Describes a dataset: settings, order, structure, shard and seed."""

    settings: Settings  # the constructor arguments that are currently in effect
    # The order of the latest epoch; `None` if it is unknown, or if the dataset
    # has changed since.
    schedule: Schedule | None = None
    # The dtypes and shapes of a batch; empty before one was delivered.
    structure: str = ""
    shard: Shard = Shard()
    # The base seed; `None` before it is given, loaded or drawn.
    seed: int | None = None


class Loader:
    """Delivers batches from one worker pool to the iterators of a dataset.

    Args:
        dataset: Held weakly: the dataset owns the loader.
        settings: The constructor arguments.
    """

    def __init__(self, dataset: Dataset, settings: Settings) -> None:
        name = interface.name_of(dataset)
        self._dataset = reference = weakref.ref(dataset)
        self.changes = Changes()  # the changes that the workers do not have yet
        self._in_effect = SettingsInEffect(settings, dataset)
        self._planner = EpochPlanner(reference, name, settings)
        self._epochs = OpenEpochs()
        self._position = Position(self._epochs)
        self._prefetcher = Prefetcher(self._in_effect, self._epochs)
        self.factory = PoolFactory(
            reference, name, self._in_effect, self._planner, self._position
        )
        self._pool = PoolHandle(reference, name, self._prefetcher)
        self._slow = SlowBuilds(self._prefetcher)
        self.pausing = Pausing(self._pool, self._prefetcher)
        self.hooks = HookReplay(
            dataset, self._planner, self._position, self.changes
        )
        self.checkpoint = Checkpoint(
            self._planner,
            self._position,
            self._prefetcher,
            self._pool,
            self.hooks,
            self._in_effect,
        )
        self._fallback = Fallback(
            self._in_effect,
            self._prefetcher,
            self.factory,
            self._pool,
            self.changes,
        )
        self._fetcher = Fetcher(
            Results(name, self._in_effect, self.factory),
            self._in_effect,
            self._planner,
            self._position,
            self._prefetcher,
            self._pool,
            self.factory,
        )

    # -- what it is ----------------------------------------------------------

    @property
    def name(self) -> str:
        """The class name of the dataset."""
        return self._pool.name

    @property
    def dataset(self) -> Dataset | None:
        """The dataset, or `None` if it was garbage-collected."""
        return self._dataset()

    @property
    def epoch(self) -> int:
        """The number of the epoch that begins next."""
        return self._position.next_epoch

    @property
    def seed(self) -> int:
        """The base seed of the dataset."""
        return self._planner.seed

    @property
    def settings(self) -> Settings:
        """The constructor arguments that are currently in effect."""
        return self._in_effect.now

    def length(self, dataset: Dataset) -> int | None:
        """Returns the number of batches per epoch in this process's shard."""
        shard = self._planner.take_shard(dataset)
        return shard.length(interface.length_of(dataset))

    @property
    def stacks(self) -> dict[str, int]:
        """The number of times that each call stack was seen in slow builds."""
        return dict(self._fetcher.results.stacks)

    def pool_stats(self) -> PoolStats | None:
        """Returns statistics of the workers, or `None` if there are none."""
        workers, auto = self._pool.workers, self._in_effect.auto
        if workers is None:
            return None
        return dataclasses.replace(
            workers.pool_stats(),
            decisions=auto.decisions if auto is not None else (),
            shard=str(self._planner.shard),
            stacks=self.stacks,
        )

    def description(self) -> Description:
        """Returns a description of the dataset without waiting for a lock."""
        return Description(
            self.settings,
            None if self.changes.are_new else self._position.latest_schedule,
            self._fetcher.results.structure,
            self._planner.shard,
            self._planner.known_seed,
        )

    # -- changes -------------------------------------------------------------

    def reconfigure(self, dataset: Dataset, settings: Settings) -> None:
        """Replaces the settings and the workers."""
        self._pool.run(self._reconfigure, dataset, settings, nests=True)

    def _reconfigure(self, dataset: Dataset, settings: Settings) -> None:
        self._in_effect.replace(settings, dataset)
        self._planner.take_settings(settings)
        self._fetcher.apply_settings()

    def close(self) -> None:
        """Ends the workers and waits for their end (idempotent)."""
        self._pool.close()

    # -- what an iterator calls ----------------------------------------------

    def register(self, iterator: object, epoch: Epoch) -> None:
        """Registers an epoch until its iterator is garbage-collected."""
        self._epochs.register(iterator, epoch)

    def request(self, epoch: Epoch, dataset: Dataset) -> None:
        """Begins an epoch, and requests its first batches."""
        with self._fetcher.begin(False) as fetch:
            prepare, fill = self._prepare, self._fetcher.fill
            self._fallback.run(
                lambda: fill(prepare(epoch, dataset, fetch), epoch)
            )

    def deliver(
        self, epoch: Epoch, dataset: Dataset, pause_after: bool = False
    ) -> Any:
        """Returns the next batch, or `Outcome.END` after the last batch.

        If a resumed epoch has no batch left, the next epoch begins.
        """
        counts = epoch.delivered > 0 and not pause_after
        if self._in_effect.auto is not None:
            self._in_effect.auto.ask()
        epoch.begin_request()
        self._pool.check_shutdown(builds=not self.settings.workers)
        with self._fetcher.begin(pause_after) as fetch:
            run, args = self._fallback.run, (epoch, dataset, fetch, counts)
            while (batch := run(self._deliver, *args)) is Outcome.PENDING:
                self._fetcher.wait(fetch, epoch)
            return batch

    def _deliver(
        self, epoch: Epoch, dataset: Dataset, fetch: Fetch, counts: bool
    ) -> Any:
        batch = self._next(epoch, dataset, fetch)
        if batch is Outcome.END and epoch.start and not epoch.delivered:
            epoch.unplan()
            batch = self._next(epoch, dataset, fetch)
        auto = self._in_effect.auto
        if auto is not None and batch is not Outcome.PENDING:
            is_built = batch is not Outcome.END and not epoch.is_from_cache
            if auto.deliver(counts=counts and is_built):
                self._fetcher.apply_settings()
        return batch

    def _next(self, epoch: Epoch, dataset: Dataset, fetch: Fetch) -> Any:
        if epoch.acknowledgements.has_requeued:
            self._position.note_delivery(epoch)
            return epoch.redeliver()
        if epoch.is_finished:
            return Outcome.END
        workers = self._prepare(epoch, dataset, fetch)
        return self._fetcher.next(workers, epoch, fetch)

    def peek(
        self, epoch: Epoch, dataset: Dataset, count: int
    ) -> dict[int, Any]:
        """Returns batches 0 to `count` - 1 early; the epoch reuses them later.

        Returns:
            The batches by index; fewer than `count` if there are no more.
        """
        ahead = epoch.peeking()
        with (
            self._epochs.peeking(ahead),
            self._fetcher.begin(False, is_thorough=True) as fetch,
        ):
            args = epoch, dataset, ahead, count, fetch
            run = self._fallback.run
            while (peeked := run(self._peek, *args)) is Outcome.PENDING:
                self._fetcher.wait(fetch, ahead)
            assert isinstance(peeked, dict)
            return peeked

    def _peek(
        self,
        epoch: Epoch,
        dataset: Dataset,
        ahead: Epoch,
        count: int,
        fetch: Fetch,
    ) -> Any:
        workers = self._prepare(epoch, dataset, fetch)
        ahead.plan_by_index(epoch)
        ahead.sampling.set_interval(epoch.sampling.interval_s)
        return self._fetcher.peek(workers, epoch, ahead, count, fetch)

    def note_unseen_change(self) -> None:
        """Empties a directory that is the cache, and uses it no more."""
        self._fetcher.results.note_unseen_change()

    def rewind(self, epoch: Epoch) -> None:
        """Restarts an epoch in the same order."""
        self._pool.run(self._rewind, epoch)

    def _rewind(self, epoch: Epoch) -> None:
        if epoch.is_finished or epoch.delivered > len(epoch.remembered):
            self._prefetcher.forget(self._pool.workers, epoch)
            epoch.issue_again_from(epoch.start)
        epoch.rewind()
        self.factory.note_peek(self._pool.workers)

    # -- before a batch ------------------------------------------------------

    def _prepare(
        self, epoch: Epoch, dataset: Dataset, fetch: Fetch
    ) -> WorkerPool:
        """Prepares the workers and the epoch for the next request."""
        if self._epochs.has_dropped:
            for abandoned in self._epochs.take_dropped():
                self._fetcher.results.store_ready(abandoned)
                self._fetcher.finish(abandoned, Finish.ABANDONED)
        # Not after a wait: asking for the length may itself be a change.
        if fetch.phase is NEW:
            is_due = self.changes.take_expected() or not epoch.delivered
            is_marked = self.changes.are_new
            change = self.factory.notice_changes(dataset, is_due, is_marked)
            if change or is_marked:
                self._change(change)
        if not epoch.has_begun:
            self._planner.take_shard(dataset)
            if self.factory.has_seed_changed():
                self._pool.replace()
        self._fetcher.results.open_cache(dataset, self.changes.built)
        workers = self._pool.ensure(dataset, self._fallback.create_pool)
        if not epoch.has_begun:
            self._begin(epoch, dataset, workers)
        self._planner.ensure_order(epoch, dataset)
        self._slow.withdraw(workers, fetch)
        return workers

    def _change(self, outside: Change) -> None:
        """Sends the changed dataset to the workers."""
        self._prefetcher.note_change(self._pool.workers)
        if self.changes.are_new or outside >= Change.BY_PROGRAM:
            self.changes.mark()
            self._fetcher.results.note_change()
        self.changes.mark_sent()
        if self._pool.workers is not None:
            anew = outside is Change.IN_MODULES
            self._fallback.change(self._pool.workers, anew=anew)

    def _begin(
        self, epoch: Epoch, dataset: Dataset, workers: WorkerPool
    ) -> None:
        """Begins an epoch, and drops invalid prefetched batches."""
        if self._position.begin_again():
            self._prefetcher.unplan(workers)
        foretold = epoch.schedule
        if (
            foretold is None
            or foretold.total != interface.length_of(dataset)
            or foretold.shard != self._planner.shard
        ):
            self._prefetcher.forget(self._pool.workers, epoch)
            epoch.plan(self.epoch)
        elif any(a.done.is_lost for a in epoch.ready.values()):
            # The epoch before had no worker restarts left. This one has.
            self._prefetcher.forget(self._pool.workers, epoch)
        state = self._position.resumed
        if state is not None:
            state.check_order(self.name, epoch.shuffle)
            self._planner.start(epoch, state)
        # While `self.epoch` is its number: the length may depend on that.
        self._planner.ensure_order(epoch, dataset)
        self._position.begin(epoch)
        workers.renew_restarts()
        for other in self._epochs:
            if not other.has_begun and other.schedule is not None:
                self._prefetcher.forget(self._pool.workers, other)
                other.forget_order()
                other.forbid_prefetching()
