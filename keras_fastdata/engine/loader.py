"""The loader of one dataset: what is built ahead, and in which order it comes.

    BatchIterator.__next__ -> Loader.deliver -> Prefetcher -> WorkerPool.submit
                           <- Epoch.ready    <- Prefetcher <- WorkerPool.collect

Everything happens in the thread that asks for a batch; there is no thread of
the loader's own. Workers run on by themselves between two calls, as far as the
lookahead has given them requests.

One lock guards it all, and is held for moments only: to look at what has come
and to ask for more (which may pickle the dataset, or start a worker). Nobody
holds it who waits for a batch or for a worker's end, nor while a batch is
built in the caller or an epoch hook runs. So `close` and `state` are answered
at once, from any thread, and from a signal handler, whatever it interrupts;
and after every wait the state is looked at anew.

    READY --a call--> CALLED --its end--> READY
                      CALLED --other settings, or `close` in a handler-->
    INVALID, or a call that was broken off: the workers are ended, and the
    next call starts new ones

Where another epoch is known to follow, its first requests go out behind the
last ones of the present epoch. Its batches wait. It begins when its iterator is
asked for the first of them.

Invariant: an epoch delivers position 0, 1, 2 ... of its schedule, each once.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from keras_fastdata.building import build
from keras_fastdata.engine import pickling_errors, pool_factory, state_dict
from keras_fastdata.engine.autotune import AutoTuner
from keras_fastdata.engine.cache import Cache
from keras_fastdata.engine.epoch import (
    Completed,
    Epoch,
    Finish,
    size_of,
    span_of,
)
from keras_fastdata.engine.fingerprint import open_cache
from keras_fastdata.engine.outside_state import OutsideState
from keras_fastdata.engine.prefetcher import Prefetcher
from keras_fastdata.engine.schedule import Schedule, plan_epoch
from keras_fastdata.engine.settings import Settings
from keras_fastdata.engine.sharding import Shard, shard_of
from keras_fastdata.errors import DatasetPicklingError, EndOfData, LoaderError
from keras_fastdata.metrics import formatting
from keras_fastdata.metrics.pool_stats import PoolStats
from keras_fastdata.metrics.timing import Timing
from keras_fastdata.workers import exceptions, log_forwarding
from keras_fastdata.workers.base import BatchRequest, LocalResult, WorkerPool
from keras_fastdata.workers.inline import InlinePool
from keras_fastdata.workers.signals import DeferredSignals

# Between two looks at what else there is to do. Another thread may have taken
# the batch in, or ended the workers.
_WAIT_S = 0.05
_LOOK_S = 0.005  # between two looks at workers whose batches are here
_QUIESCE_S = 1.0  # for workers to finish what they are at


END = object()  # what `Loader.deliver` returns after the last batch
_SKIPPED = object()  # stands for a batch that is left out
_AGAIN = object()  # stands for one to be built again, in the caller
_GONE = object()  # stands for one that is not in the cache any more
_NOT_YET = object()  # stands for one that is to be waited for
_MOST_SKIPPED = 0.1  # of an epoch's batches; one is always allowed

_log = logging.getLogger("keras_fastdata")


class _PoolState(enum.Enum):
    """Whether what the workers hold is to be relied on."""

    READY = enum.auto()  # yes
    CALLED = enum.auto()  # not before the call under way, or broken off, ends
    INVALID = enum.auto()  # no: they are to be ended when that call does


class _Fetch:
    """A batch that an iterator has asked for, through all waits for it.

    Attributes:
        pause_after: Whether the workers shall rest until the next is asked for.
        thorough: Whether to look what has come even if the batch is here and
            there are more where it was.
        began: Whether the dataset has been brought to the workers as it was
            when the batch was asked for.
        awaited: The position that is waited for.
        came_s: When the batch was here, while workers are waited for to rest.
        here: What builds it in the caller, if nobody else can.
        waits_for: Those that build it.
    """

    __slots__ = (
        "awaited",
        "began",
        "came_s",
        "here",
        "pause_after",
        "thorough",
        "waits_for",
    )

    def __init__(self, pause_after: bool, thorough: bool) -> None:
        self.pause_after = pause_after
        self.thorough = thorough
        self.began = False
        self.awaited = -1
        self.came_s: float | None = None
        self.here: InlinePool | None = None
        self.waits_for: WorkerPool | None = None


class _EpochRef(weakref.ref[Any]):
    """A weak reference to who walks through the dataset."""

    __slots__ = ("epoch",)
    epoch: Epoch


class Loader:
    """Feeds the iterators over one dataset from one pool of workers.

    Args:
        dataset: Held weakly: the dataset owns the loader.
        settings: The constructor arguments.
    """

    def __init__(self, dataset: build.Dataset, settings: Settings) -> None:
        self.epoch = 0  # the next one to begin
        self._auto = _auto(settings, dataset)
        self._settings = settings if self._auto is None else self._auto.settings
        self._name = type(dataset).__name__
        self._dataset = weakref.ref(dataset)
        self._drawn_seed = settings.seed
        self._lock: Any = threading.RLock()
        self._hook_lock: Any = threading.RLock()  # while an epoch hook runs
        self._ending: Any = threading.RLock()  # while workers are ended
        self._pid = self._lock_pid = os.getpid()
        self._pool = _PoolState.READY
        self._workers: WorkerPool | None = None
        self._receiver = log_forwarding.Receiver()  # of what they log
        self._outside = OutsideState()  # that they were told of
        self._finalizer: weakref.finalize[Any, Any] | None = None
        # Workers that nobody uses any more, and what would end them at exit.
        self._dismissed: collections.deque[
            tuple[WorkerPool, weakref.finalize[Any, Any] | None]
        ] = collections.deque()
        self._prefetcher = Prefetcher(self._settings, self._auto)
        self._iterators: set[_EpochRef] = set()
        self._peeks: list[Epoch] = []  # through which batches are peeked at
        self._dropped: collections.deque[weakref.ref[Any]] = collections.deque()
        self._hooks: list[tuple[str, int]] = []  # that have run
        self._digest: tuple[int, str] | None = None  # after so many of them
        self._attributes = frozenset(vars(dataset))  # which no build has set
        self._latest: Epoch | None = None  # that a batch was delivered from
        # The epoch that has begun last, if none of its batches was delivered;
        # and the epoch and resumed state that there were before.
        self._beginning: tuple[Epoch, int, state_dict.State | None] | None = (
            None
        )
        self._resume: state_dict.State | None = (
            None  # where the next one begins
        )
        self._is_restored = False  # and Keras has begun no epoch since
        self.within_epoch = False  # of Keras's
        self._cache: Cache | None = None  # made when it is needed
        self.built: set[str] = set()  # attributes that builds have set
        self._before: dict[str, bytes] = {}  # what attributes were before
        self._shard = Shard()  # known last
        self._look_s = 0.0  # when to look after the workers in any case
        self._changed = False
        self._shutdown = (
            pool_factory.ShutdownFlag()
        )  # asked for at the interpreter's end

    @property
    def seed(self) -> int:
        """The base seed; drawn when first needed, not at construction.

        `keras.utils.set_random_seed` may be called in between.
        """
        dataset = self._dataset()
        if self._drawn_seed is None and dataset is not None:
            self.shard(dataset)  # which may decide it
        if self._drawn_seed is None:
            self._drawn_seed = random.getrandbits(63)
        return self._drawn_seed

    def run_hook(
        self,
        dataset: build.Dataset,
        name: str,
        hook: Callable[[], Any] | None = None,
    ) -> Any:
        """Runs `on_epoch_begin` or `on_epoch_end`, seeded by its number.

        It may raise after it has changed the dataset.

        Args:
            dataset: The dataset.
            name: Which of the two.
            hook: What to call, if not the method of that name.

        Returns:
            What the hook returns.
        """
        self._own_lock()
        with self._hook_lock:
            number = len(self._hooks)
            self._hooks.append((name, self.epoch))
            around = build.current_context()
            try:
                return build.run_hook(
                    dataset,
                    hook or getattr(dataset, name),
                    self.seed,
                    number,
                    self.epoch,
                )
            except BaseException:
                if around is None:
                    build.forget_context(dataset)
                raise
            finally:
                self._changed = True

    def called_by_hand(
        self, dataset: build.Dataset, name: str, hook: Callable[[], Any]
    ) -> Any:
        """Runs a hook that the user's own loop calls, as Keras's would be.

        One that the resumed epoch has begun with has run already.
        """
        skips = self.skips_hook(name, starting=False)
        result = None if skips else self.run_hook(dataset, name, hook)
        self.note_hook(name)
        return result

    def note_hook(self, name: str) -> None:
        """Told that an epoch hook is over, whether it ran or was skipped."""
        self.within_epoch = name == "on_epoch_begin"

    # -- where it stands ----------------------------------------------------

    def state(
        self,
        dataset: build.Dataset,
        epoch: Epoch | None = None,
        lag: int = 0,
    ) -> state_dict.State:
        """Says where an epoch, or the latest one, is.

        While an epoch begins, that is where the one before has ended.

        Args:
            dataset: The dataset.
            epoch: The epoch.
            lag: How many of its batches are not to count.
        """
        self._own_lock()
        with self._hook_lock:  # what a hook does is not to be seen in part
            resumed, place = self._place(epoch, lag)
            if resumed is not None:
                return resumed
            number, position, shuffle, next_epoch = place
            return state_dict.State(
                self.seed,
                number,
                position,
                build.length_of(dataset),
                shuffle,
                self.within_epoch,
                tuple(self._hooks),
                self._digest_of(dataset),
                next_epoch,
            )

    def _place(
        self, epoch: Epoch | None, lag: int
    ) -> tuple[
        state_dict.State | None, tuple[int, int, bool | None, int | None]
    ]:
        """What is to be resumed; or a place in an epoch.

        That place is the epoch, the position in it, its order, and the number
        of the next epoch where that is not the one behind it.
        """
        try:
            with self._own_lock():
                number, resumed = self.epoch, self._resume
                if epoch is None:
                    epoch, beginning = self._latest, self._beginning
                    if beginning is not None and self._is_open(beginning[0]):
                        _, number, resumed = beginning
                place: tuple[int, int, bool | None, int | None]
                place = number, 0, None, None
                if (
                    epoch is not None
                    and epoch.has_begun
                    and (lag or not epoch.is_finished)
                ):
                    assert epoch.number is not None
                    assert epoch.schedule is not None
                    position = epoch.position_before(lag)
                    # Nothing tells whether the end has been asked for.
                    if position == epoch.schedule.num_batches:
                        return resumed, (number, 0, epoch.shuffle, None)
                    position *= epoch.schedule.shard.count
                    follows = None if number == epoch.number + 1 else number
                    place = epoch.number, position, epoch.shuffle, follows
                return resumed, place
        finally:
            self._end_if_invalid()

    def _digest_of(self, dataset: build.Dataset) -> str:
        count = len(self._hooks)
        if self._digest is None or self._digest[0] != count:
            found = (
                state_dict.digest(dataset, self._attributes) if count else ""
            )
            self._digest = count, found
        return self._digest[1]

    def restore(self, dataset: build.Dataset, state: state_dict.State) -> None:
        """Has the next epoch begin where another dataset stood.

        Raises:
            ValueError: It is another dataset.
            LoaderError: Its epoch hooks do not do what they did.
        """
        self._own_lock()
        with self._hook_lock:
            seed = self._settings.seed
            if seed is None and self._hooks:
                seed = self._drawn_seed
            hooks = tuple(self._hooks)
            self.shard(dataset).position(state.position)
            state.check(self._name, seed, hooks, self._settings.seed is None)
            known = self._drawn_seed == state.seed
            self._drawn_seed = state.seed
            for name, epoch in state.hooks[len(hooks) :]:
                self.epoch = epoch
                self.run_hook(dataset, name)
            state.check_length(self._name, build.length_of(dataset))
            state.check_digest(self._name, self._digest_of(dataset))
            if state.within and not state.position:
                # It was at the end of an epoch.
                self.epoch = state.epoch
                if build.overrides(dataset, "on_epoch_end"):
                    self.run_hook(dataset, "on_epoch_end")
                state = dataclasses.replace(state, within=False)
            self._changed = True
            # Workers are made with the seed.
            pool = _PoolState.CALLED if known else _PoolState.INVALID
            self._call(self._go_to, state, pool)
            self._is_restored = bool(self._hooks)
            self.within_epoch = state.within

    def set_epoch(self, dataset: build.Dataset, epoch: int) -> None:
        """Has the next epoch begin that epoch."""
        if epoch == self.epoch and self._resume is None:
            return
        state = state_dict.State(
            self.seed,
            epoch,
            0,
            build.length_of(dataset),
            shuffle=None,
            hooks=tuple(self._hooks),
            digest=self._digest_of(dataset),
        )
        self._call(self._go_to, state, _PoolState.CALLED)

    def _go_to(self, state: state_dict.State, pool: _PoolState) -> None:
        self.epoch, self._resume = state.epoch, state
        self._beginning = None
        for epoch in self._epochs():
            if epoch.next_epoch is not None:
                self._forget_ahead(epoch.next_epoch)
                epoch.release_next()
            if not epoch.delivered:
                self._forget_ahead(epoch)
                epoch.reset()
        self._pool = pool

    def skips_hook(self, name: str, *, starting: bool) -> bool:
        """Whether a hook that Keras calls has run already.

        Args:
            name: Its name.
            starting: Whether Keras is only about to begin its first epoch.
        """
        if not self._is_restored:
            return False
        if starting:
            return True
        self._is_restored = False
        return name == "on_epoch_begin" and self.within_epoch

    @property
    def name(self) -> str:
        """The class name of its dataset."""
        return self._name

    @property
    def settings(self) -> Settings:
        """The constructor arguments of its dataset, as they are in effect."""
        return self._settings

    def pool_stats(self) -> PoolStats | None:
        """Who the workers are; `None` before there are any."""
        workers, auto = self._workers, self._auto
        if workers is None:
            return None
        pool_stats = workers.pool_stats()
        if auto is not None:
            pool_stats = dataclasses.replace(
                pool_stats, decisions=auto.decisions
            )
        if self._shard.count > 1:
            pool_stats = dataclasses.replace(pool_stats, shard=str(self._shard))
        return pool_stats

    def shard(self, dataset: build.Dataset) -> Shard:
        """Which batches are this process's, as things are now."""
        shard = shard_of(self._settings.shard, dataset)
        if shard != self._shard:
            self._shard = shard
            if shard.count > 1:
                if self._settings.seed is None:
                    self._drawn_seed = 0  # the same one in all processes
                found = self._settings.shard == "auto"
                level = logging.WARNING if found else logging.INFO
                _log.log(level, "%s has %s.", self._name, shard)
        return shard

    def length(self, dataset: build.Dataset) -> int | None:
        """How many batches of an epoch are this process's."""
        return self.shard(dataset).length(build.length_of(dataset))

    def mark_changed(self) -> None:
        """Has every batch not yet delivered built from the dataset anew."""
        self._changed = True

    def reconfigure(self, settings: Settings) -> None:
        """Goes on with other settings, and other workers if need be."""
        dataset = self._dataset()
        auto = None if dataset is None else _auto(settings, dataset)
        self._call(self._replace, settings, auto, nests=True)

    def _replace(self, settings: Settings, auto: AutoTuner | None) -> None:
        self._auto = auto
        if settings.seed is not None:
            self._drawn_seed = settings.seed
        self._apply_settings(settings if auto is None else auto.settings)

    def _apply_settings(self, settings: Settings) -> None:
        """Has other workers build what has not been delivered."""
        self._settings = settings
        self._prefetcher.apply_settings(settings, self._auto)
        self._pool = _PoolState.INVALID

    def close(self) -> None:
        """Ends the workers and returns when they are gone. Idempotent.

        A later pass starts new ones. A signal handler may have interrupted a
        call of this thread's; then that call ends them, when it goes on.
        A worker cannot: it would wait for itself.
        """
        dataset = self._dataset()
        if dataset is not None and build.is_in_worker(dataset):
            return
        lock = self._own_lock()
        if self._pid != os.getpid():
            return
        if lock._is_owned():
            self._pool = _PoolState.INVALID
            return
        with lock:
            if self._pool is _PoolState.CALLED:  # it was broken off
                build.forget_context(dataset)
            self._dismiss()
        self._end_dismissed()

    # -- one at a time ------------------------------------------------------

    def _own_lock(self) -> Any:
        """This process's lock: one that was forked may never be released."""
        if self._lock_pid != os.getpid():
            self._lock = threading.RLock()
            self._hook_lock = threading.RLock()
            self._ending = threading.RLock()
            self._lock_pid = os.getpid()
        return self._lock

    def _call(
        self, step: Callable[..., Any], *args: Any, nests: bool = False
    ) -> Any:
        """Runs a step with the lock, while the workers are to be relied on.

        Args:
            step: Must not wait.
            *args: For it.
            nests: Whether it may run amid another of this thread's, which a
                signal handler has interrupted.
        """
        lock = self._own_lock()
        if lock._is_owned():
            if nests:
                return step(*args)
            raise LoaderError(
                f"{self._name} was asked for a batch while this thread was "
                "about to hand one out: by a signal handler, or by a method "
                "that counts, pickles or logs. Ask for it elsewhere."
            )
        try:
            while True:
                with lock:
                    if self._pid != os.getpid():
                        self._forget_the_parents()
                    if self._pool is not _PoolState.READY:
                        build.forget_context(self._dataset())
                        self._dismiss()
                    if not self._dismissed:
                        self._pool = _PoolState.CALLED
                        result = step(*args)
                        self._end_call()
                        return result
                self._end_dismissed()
        finally:
            self._end_if_invalid()

    def _end_call(self) -> None:
        if self._pool is _PoolState.CALLED:
            self._pool = _PoolState.READY

    def _end_if_invalid(self) -> None:
        """Ends the workers, if the call that is over has left them invalid."""
        if self._pool is not _PoolState.INVALID and not self._dismissed:
            return
        lock = self._own_lock()
        if not lock._is_owned():
            with lock:
                if self._pool is _PoolState.INVALID:
                    self._dismiss()
            self._end_dismissed()

    def _wait(self, request: _Fetch) -> None:
        """Waits for a batch, or a while; in the caller, builds it.

        An interrupt meanwhile, when it is likeliest, costs nothing.
        """
        assert request.waits_for is not None
        try:
            request.waits_for.wait(_WAIT_S)
        except BaseException:
            build.forget_context(self._dataset())
            raise
        self._go_on()

    def _go_on(self) -> None:
        """Ends a daemon thread that is here when the interpreter ends.

        Silently: nobody hears of a SystemExit that ends a thread.

        Raises:
            LoaderError: It is an `atexit` handler that asks.
        """
        if not self._shutdown.is_asked:
            return
        if threading.current_thread() is not threading.main_thread():
            raise SystemExit
        raise LoaderError(
            f"{self._name} has ended its workers, as the interpreter ends: "
            "this `atexit` handler was registered before they started, so it "
            "runs after. Register it when they have, or use `workers=0`."
        )

    # -- what an iterator calls ---------------------------------------------

    def register(self, opened: object, epoch: Epoch) -> None:
        """Keeps an epoch in mind for as long as that object lives."""
        # The callback is C code, for the reason given in memory/arena.py.
        reference = _EpochRef(opened, self._dropped.append)
        reference.epoch = epoch
        self._iterators.add(reference)

    def deliver(
        self, epoch: Epoch, dataset: build.Dataset, pause_after: bool = False
    ) -> Any:
        """The next batch; of the next epoch, where a resumed one has none."""
        request = _Fetch(pause_after, self._is_time_to_look())
        counts = epoch.delivered > 0 and not pause_after
        if self._auto is not None:
            self._auto.ask()
        epoch.begin_request()
        self._go_on()
        while True:
            batch = self._call(self._deliver, epoch, dataset, request, counts)
            if batch is not _NOT_YET:
                return batch
            self._wait(request)

    def _deliver(
        self,
        epoch: Epoch,
        dataset: build.Dataset,
        request: _Fetch,
        counts: bool,
    ) -> Any:
        """The next batch, or `_NOT_YET`."""
        batch = self._next(epoch, dataset, request)
        if batch is END and epoch.start and not epoch.delivered:
            epoch.restart()
            batch = self._next(epoch, dataset, request)
        if self._auto is not None and batch is not _NOT_YET:
            counts = counts and batch is not END and not epoch.is_from_cache
            if self._auto.deliver(counts=counts):
                self._apply_settings(self._auto.settings)
        return batch

    @property
    def lends_read_only(self) -> bool:
        """Whether batches are views of what nobody may write to."""
        return self._settings.kind == "ray"

    @property
    def resumes(self) -> bool:
        """Whether the next epoch is to begin elsewhere."""
        return self._resume is not None

    def rest(self, dataset: build.Dataset) -> int | None:
        """How many batches a resumed epoch is to have; `None` if all."""
        state, length = self._resume, self.length(dataset)
        if state is None or not state.position or length is None:
            return None
        return length - self.shard(dataset).position(state.position)

    def _next(
        self, epoch: Epoch, dataset: build.Dataset, request: _Fetch
    ) -> Any:
        """The next batch; `END`, or `_NOT_YET`."""
        if epoch.is_finished:
            return END
        workers, schedule = self._prepare(epoch, dataset, request)
        request.waits_for = workers
        if not request.pause_after:
            workers.resume()
        while (index := schedule.index_at(epoch.position)) is not None:
            if epoch.position in epoch.cached and not _holds(
                self._cache, index
            ):
                epoch.cached.discard(epoch.position)  # but on its way to it
            if request.pause_after and not self._is_quiesced(
                workers, epoch, schedule, index, request
            ):
                return _NOT_YET
            if epoch.issued <= epoch.position:
                self._fill(workers, epoch, schedule)
            batch = self._fetch(workers, epoch, schedule, index, request)
            if batch is _AGAIN:
                batch = self._build_here(workers, epoch, index, request)
            if batch is _NOT_YET:
                return _NOT_YET
            if batch is _GONE:
                continue
            if batch is END:
                break
            epoch.pass_position()
            if batch is _SKIPPED:
                continue
            self._note_delivery(epoch, index, batch)
            if request.thorough or self._prefetcher.should_fill(epoch):
                self._fill(workers, epoch, schedule)
            return batch
        workers.resume()
        self._finish(epoch, Finish.EXHAUSTED)
        return END

    def _fetch(
        self,
        workers: WorkerPool,
        epoch: Epoch,
        schedule: Schedule,
        index: int,
        request: _Fetch,
    ) -> Any:
        """The next batch, at `index`, or what stands for it."""
        if request.here is not None:
            return self._built_here(workers, epoch, index, request)
        if index in epoch.peeked:
            return epoch.peeked.pop(index)
        if epoch.position in epoch.cached:
            return self._from_cache(epoch, index)
        if index in epoch.skipped:
            return _SKIPPED
        position = epoch.position
        if (
            request.thorough
            or position not in epoch.ready
            or epoch.is_running_out
        ):
            self._prefetcher.drain_results(workers)
        if request.awaited != position:
            epoch.note_depth()
        if position not in epoch.ready:
            request.awaited = position
            if self._prefetcher.should_fill(epoch):
                self._fill(workers, epoch, schedule)
            self._ask_for(workers, epoch, position, index)
        if position not in epoch.ready:
            return _NOT_YET
        return self._open(epoch, epoch.ready.pop(position), index)

    def _note_delivery(self, epoch: Epoch, index: int, batch: Any) -> None:
        epoch.note_delivery(index, batch)
        self._latest, self._beginning = epoch, None

    def peek(
        self, epoch: Epoch, dataset: build.Dataset, count: int
    ) -> list[Any]:
        ahead = epoch.peeking()
        self._peeks.append(ahead)
        try:
            request = _Fetch(pause_after=False, thorough=True)
            found: list[Any] = []
            while not self._call(
                self._peek, epoch, dataset, ahead, count, found, request
            ):
                self._wait(request)
            return found
        finally:
            self._peeks.remove(ahead)

    def _peek(
        self,
        epoch: Epoch,
        dataset: build.Dataset,
        ahead: Epoch,
        count: int,
        found: list[Any],
        request: _Fetch,
    ) -> bool:
        """Peeks at what is here; returns whether that is all."""
        workers, schedule = self._prepare(epoch, dataset, request)
        request.waits_for = workers
        workers.resume()
        assert epoch.number is not None
        ahead.plan(epoch.number, schedule)
        ahead.time_batches(epoch.interval_s)
        while len(found) < count and schedule.holds(ahead.position):
            if request.here is None:
                self._ask_ahead(workers, ahead, schedule, count)
            index = ahead.position
            batch: Any = _GONE
            if request.here is not None:
                batch = self._built_here(workers, ahead, index, request)
            elif _holds(self._cache, index):
                batch = self._from_cache(ahead, index)
            if batch is _GONE:
                if index not in ahead.ready:
                    self._prefetcher.drain_results(workers)
                    self._ask_for(workers, ahead, index, index)
                if index not in ahead.ready:
                    return False
                batch = self._open(ahead, ahead.ready.pop(index), index)
            if batch is _AGAIN:
                batch = self._build_here(workers, ahead, index, request)
            if batch is _NOT_YET:
                return False
            if batch is END:
                break
            ahead.pass_position()
            if batch is not _SKIPPED:
                epoch.peeked[index] = batch
                found.append(batch)
        self._make_room(epoch, schedule, count)
        return True

    def _ask_ahead(
        self, workers: WorkerPool, ahead: Epoch, schedule: Schedule, count: int
    ) -> None:
        """Asks for the batches to be peeked at, as far as there is room."""
        for index in range(ahead.position, count):
            if (
                schedule.holds(index)
                and index not in ahead.ready
                and index not in ahead.waiting
                and not _holds(self._cache, index)
                and not self._prefetcher.issue(workers, ahead, index, key=index)
            ):
                return

    def _make_room(self, epoch: Epoch, schedule: Schedule, count: int) -> None:
        """Drops peeked batches that would leave little room in the queue.

        They are built again when their turn comes, unless it comes first.
        """
        if not self._prefetcher.leaves_little(len(epoch.peeked)):
            return
        first = {schedule.index_at(epoch.position + n) for n in range(count)}
        for index in epoch.peeked.keys() - first:
            del epoch.peeked[index]
            epoch.spans.pop(index, None)

    def rewind(self, epoch: Epoch) -> None:
        self._call(self._rewind, epoch)

    def _rewind(self, epoch: Epoch) -> None:
        if epoch.is_finished or epoch.delivered > len(epoch.remembered):
            self._forget_ahead(epoch)
            epoch.issue_again_from(epoch.start)
        epoch.rewind()

    # -- the way of a batch -------------------------------------------------

    def _prepare(
        self, epoch: Epoch, dataset: build.Dataset, request: _Fetch
    ) -> tuple[WorkerPool, Schedule]:
        """Makes workers, dataset and epoch ready for the next request."""
        while self._dropped:
            reference = self._dropped.popleft()
            assert isinstance(reference, _EpochRef)
            self._iterators.discard(reference)
            epochs = [reference.epoch, reference.epoch.next_epoch]
            for abandoned in filter(None, epochs):
                self._cache_ready(abandoned)
                self._finish(abandoned, Finish.ABANDONED)
        # Not after a wait: asking for the length may itself be a change.
        if not request.began:
            if not epoch.has_begun and self._outside.has_changed():
                self._changed = True
            if self._changed:
                self._change()
        request.began = True
        if not epoch.has_begun:
            self.shard(dataset)  # which may decide the seed
        if self._cache is None and self._settings.cache is not None:
            self._cache = open_cache(
                dataset, self._settings, self.built, self._before
            )
        if self._workers is None:
            with DeferredSignals():
                self._workers = self._start_pool(dataset)
        if not epoch.has_begun:
            self._begin(epoch, dataset, self._workers)
        schedule = epoch.schedule
        if schedule is None:
            shard = self.shard(dataset)
            schedule = self._plan(epoch, build.length_of(dataset), shard)
        return self._workers, schedule

    def _begin(
        self, epoch: Epoch, dataset: build.Dataset, workers: WorkerPool
    ) -> None:
        """Begins an epoch, for whose number no other can be prepared now."""
        foretold = epoch.schedule
        if foretold is None or foretold.total != build.length_of(dataset):
            self._forget_ahead(epoch)
            epoch.plan(self.epoch)
        elif any(a.done.is_lost for a in epoch.ready.values()):
            # The epoch before had no worker restarts left. This one has.
            self._forget_ahead(epoch)
        beginning = epoch, self.epoch, self._resume
        next_epoch = None
        if self._resume is not None:
            self._begin_at(epoch, self._resume, dataset)
            next_epoch = self._resume.next_epoch
        self._beginning = beginning
        self._resume = None
        epoch.activate()
        self.epoch = self.epoch + 1 if next_epoch is None else next_epoch
        workers.begin_epoch()
        for other in self._epochs():
            if not other.has_begun and other.schedule is not None:
                self._forget_ahead(other)
                other.drop_schedule()
                other.forbid_prefetching()

    def _begin_at(
        self, epoch: Epoch, state: state_dict.State, dataset: build.Dataset
    ) -> None:
        """Begins an epoch where an earlier run has left it."""
        if state.shuffle not in (None, epoch.shuffle):
            raise ValueError(
                f"The state is of an epoch with shuffle={state.shuffle}, and "
                f"this one of {self._name} has shuffle={epoch.shuffle}. Pass "
                "the same `shuffle`, to the dataset or to `fit`."
            )
        epoch.start_at(self.shard(dataset).position(state.position))

    def _plan(
        self, epoch: Epoch, num_batches: int | None, shard: Shard
    ) -> Schedule:
        assert epoch.number is not None
        schedule = plan_epoch(
            num_batches,
            shuffle=epoch.shuffle,
            seed=self.seed,
            epoch=epoch.number,
            shard=shard,
        )
        epoch.plan(epoch.number, schedule)
        return schedule

    def _fill(
        self, workers: WorkerPool, epoch: Epoch, schedule: Schedule
    ) -> None:
        """Issues requests, also of the next epoch where there is room.

        That is taken to be as long; whether it is shows when it begins.
        """
        if (
            not self._prefetcher.fill(workers, epoch, schedule, self._cache)
            or not epoch.prefetches_next
            or not epoch.may_prefetch_next
            or self._settings.kind == "inline"
        ):
            return
        next_epoch = epoch.prepare_next()
        next_epoch.time_batches(epoch.interval_s)
        if next_epoch.schedule is None:
            next_epoch.plan(self.epoch)
            self._plan(next_epoch, schedule.total, schedule.shard)
        self._prefetcher.fill_next(workers, epoch, next_epoch, self._cache)

    def _is_time_to_look(self) -> bool:
        """Whether to look after the workers, however well they keep up."""
        now_s = time.monotonic()
        if now_s < self._look_s:
            return False
        self._look_s = now_s + _LOOK_S
        return True

    def _ask_for(
        self, workers: WorkerPool, epoch: Epoch, key: int, index: int
    ) -> None:
        """Sees to it that the batch a consumer waits for is out, or here.

        The rule for every wait for room: it can make room. Batches that are
        out come, and those that lie ready, whoever they are for, are given
        up. The rest of what takes room is bounded: what the consumer holds
        (see `Arena.crowded`), and what workers keep. Where there is none yet,
        the caller waits, and asks again.
        """
        while key not in epoch.ready and key not in epoch.waiting:
            if self._prefetcher.issue(workers, epoch, index, key=key):
                return
            if not self._prefetcher.make_room({*self._epochs(), epoch}):
                return
            self._prefetcher.drain_results(workers)

    def _is_quiesced(
        self,
        workers: WorkerPool,
        epoch: Epoch,
        schedule: Schedule,
        index: int,
        request: _Fetch,
    ) -> bool:
        """Whether the workers rest, and the next batch, at `index`, is here.

        They are to rest once it has come, and what they are at is waited for,
        for a moment: it is for a measurement. Where they rest already and the
        batch is here, they go on resting.
        """
        if not epoch.knows(epoch.position, index):
            workers.resume()
        if request.came_s is None:
            self._fill(workers, epoch, schedule)
        self._prefetcher.drain_results(workers)
        if not epoch.knows(epoch.position, index):
            self._ask_for(workers, epoch, epoch.position, index)
        if not epoch.knows(epoch.position, index):
            return False
        workers.pause()
        now_s = time.monotonic()
        if request.came_s is None:
            request.came_s = now_s
        waited_s = now_s - request.came_s
        if workers.busy and waited_s <= _QUIESCE_S:
            return False
        epoch.note_quiesce(waited_s)
        request.came_s = None
        return True

    def _open(self, epoch: Epoch, completed: Completed, index: int) -> Any:
        """The batch at `index`, or `_SKIPPED`; `END` if there is none."""
        done = completed.done
        try:
            try:
                timing = done.timing
                if self._auto is not None:
                    self._auto.opened(timing, done.worker)
                if timing is None or not epoch.wants_span(timing):
                    batch = done.open()
                else:
                    began_s = time.monotonic()
                    batch = done.open()
                    opened_s = time.monotonic() - began_s
                    nbytes = done.nbytes or size_of(batch)
                    epoch.spans[index] = span_of(
                        epoch, index, completed, opened_s, nbytes
                    )
                if self._cache is not None:
                    self._cache.put(index, batch)
                return batch
            except build.GlobalRngUsedError:
                return _AGAIN
            except Exception as error:
                if _is_the_end(epoch, error):
                    self._finish(epoch, Finish.END_OF_DATA)
                    return END
                if (
                    self._settings.on_error == "raise"
                    or not done.by_dataset
                    or isinstance(error, LoaderError)
                ):
                    raise
                self._skip(epoch, index, error)
                return _SKIPPED
        except Exception:
            # The user's own: the epoch is over, the workers are as they were.
            self._finish(epoch, Finish.FAILED)
            self._end_call()
            raise

    def _build_here(
        self, workers: WorkerPool, epoch: Epoch, index: int, request: _Fetch
    ) -> Any:
        """Has a batch built again in the caller, while nobody else builds.

        Whatever threads have built meanwhile is as doubtful, and given up.
        """
        assert epoch.number is not None
        for other in {*self._epochs(), epoch}:
            self._forget_ahead(other)
        workers.resume()  # cancelled requests are answered at once
        builder = build.Builder(
            functools.partial(pool_factory.alive, self._dataset),
            self.seed,
            cached=self._settings.cache is not None,
            observer=self._auto,
        )
        request.here = InlinePool(builder, self._name)
        request.here.submit(BatchRequest(0, epoch.number, index))
        return self._built_here(workers, epoch, index, request)

    def _built_here(
        self, workers: WorkerPool, epoch: Epoch, index: int, request: _Fetch
    ) -> Any:
        """The batch that is built in the caller, once it is."""
        assert request.here is not None
        self._prefetcher.drain_results(workers)
        if workers.busy:
            return _NOT_YET
        built = request.here.collect()
        if not built:
            request.waits_for = request.here
            return _NOT_YET
        request.here = None
        batch = self._open(epoch, Completed(built[0], 0.0), index)
        epoch.note_built_here()
        if self._auto is not None and self._auto.settings != self._settings:
            self._apply_settings(self._auto.settings)
        return batch

    def _from_cache(self, epoch: Epoch, index: int) -> Any:
        """A batch that an earlier epoch has built, or `_GONE`."""
        assert self._cache is not None
        epoch.cached.discard(epoch.position)
        began_s = time.monotonic()
        try:
            batch = self._cache.get(index)
        except (OSError, ValueError) as error:
            _log.warning(
                "Batch %d of %s cannot be had from the cache any more (%s); "
                "it is built again.",
                index,
                self._name,
                str(error),  # and not its frames, for whoever keeps records
            )
            self._cache.lose(index)
            return _GONE
        epoch.note_cached()
        timing = Timing(began_s, began_s, began_s, 0.0, 0.0)
        if epoch.wants_span(timing):
            built = LocalResult(0, 0, timing=timing)
            opened_s = time.monotonic() - began_s
            epoch.spans[index] = span_of(
                epoch,
                index,
                Completed(built, began_s),
                opened_s,
                size_of(batch),
            )
        return batch

    def _skip(self, epoch: Epoch, index: int, error: Exception) -> None:
        """Leaves a batch out, unless there have been too many.

        Raises:
            LoaderError: More than a tenth of the epoch's batches.
        """
        epoch.skipped[index] = exceptions.text_of(error)
        _log.warning(
            "Batch %d of epoch %d of %s is skipped (`on_error='skip'`):\n%s",
            index,
            epoch.number,
            self._name,
            epoch.skipped[index].rstrip(),
        )
        assert epoch.schedule is not None
        length = epoch.schedule.num_batches
        of = f"{length} batches"
        if length is None:
            length = epoch.delivered + len(epoch.skipped)
            of = f"the first {length} batches"
        if len(epoch.skipped) > max(1, int(_MOST_SKIPPED * length)):
            listed = formatting.listed(sorted(epoch.skipped), most=10)
            raise LoaderError(
                f"{len(epoch.skipped)} of {of} of {self._name} have raised "
                f"({listed}), more than the tenth that "
                f"`on_error='skip'` leaves out. The error of batch {index} is "
                "the cause of this one."
            ) from error

    # -- dropping what was built ahead --------------------------------------

    def _cache_ready(self, epoch: Epoch) -> None:
        """Caches what lies ready for an epoch that nobody goes on with."""
        while self._cache is not None and epoch.ready:
            assert epoch.schedule is not None
            position, completed = epoch.ready.popitem()
            index = epoch.schedule.index_at(position)
            assert index is not None
            # Whoever asks for it again hears what is wrong with it.
            with contextlib.suppress(Exception):
                self._cache.put(index, completed.done.open())

    def _forget_ahead(self, epoch: Epoch) -> None:
        self._prefetcher.forget(self._workers, epoch)

    def _finish(self, epoch: Epoch, why: Finish) -> None:
        """Ends an epoch and frees all it holds."""
        self._forget_ahead(epoch)
        epoch.finish(why)
        if self._beginning is not None and self._beginning[0] is epoch:
            self._beginning = None

    def _change(self) -> None:
        """Brings the workers to the dataset's present state."""
        for epoch in self._epochs():
            self._forget_ahead(epoch)
            epoch.remembered.clear()
            if epoch.position == epoch.start:
                epoch.drop_schedule()
                epoch.drop_skipped()
        self._changed = False
        self._cache = None  # it is of the state before
        if self._workers is not None:
            self._look_outside()
            try:
                with pickling_errors.explained(self._dataset):
                    self._workers.change()
            except DatasetPicklingError as error:
                if self._auto is None or not self._auto.cannot_be_had(error):
                    raise
                self._apply_settings(self._auto.settings)
                self._dismiss()
                self._pool = _PoolState.CALLED

    def _epochs(self) -> list[Epoch]:
        # A copy: another thread may make an iterator meanwhile.
        epochs = [r.epoch for r in list(self._iterators)] + self._peeks
        next_epoch = [w.next_epoch for w in epochs if w.next_epoch is not None]
        return [epoch for epoch in epochs + next_epoch if not epoch.is_finished]

    def _is_open(self, epoch: Epoch) -> bool:
        """Whether somebody still may ask for its batches."""
        return any(
            r.epoch is epoch and r() is not None for r in list(self._iterators)
        )

    # -- workers ------------------------------------------------------------

    def _start_pool(self, dataset: build.Dataset) -> WorkerPool:
        """Workers as the settings have them, or such as can be had."""
        try:
            workers = self._create_pool()
        except (LoaderError, OSError) as error:
            if self._auto is None or not self._auto.cannot_be_had(error):
                raise
            self._settings = self._auto.settings
            self._prefetcher.apply_settings(self._settings, self._auto)
            workers = self._create_pool()
        self._finalizer = pool_factory.finalize_with(
            dataset, workers, self._own_lock(), self._shutdown
        )
        return workers

    def _create_pool(self) -> WorkerPool:
        self._look_outside()
        return pool_factory.create_pool(
            self._dataset,
            self._name,
            self._settings,
            self.seed,
            self._auto,
            self._receiver,
            self._outside,
        )

    def _look_outside(self) -> None:
        """Takes note of the state that workers elsewhere are to have."""
        settings = self._settings
        self._outside.look(
            self._dataset() if settings.kind in ("process", "ray") else None,
            is_shared=settings.start_method == "fork",
        )

    def _dismiss(self) -> None:
        """Has nobody use the workers any more; epochs go on with new ones."""
        with DeferredSignals():
            workers, self._workers = self._workers, None
            finalizer, self._finalizer = self._finalizer, None
            for epoch in self._epochs():
                epoch.discard_prefetched()
            self._prefetcher.clear()
            self._pool = _PoolState.READY
            if workers is not None:
                self._dismissed.append((workers, finalizer))

    def _end_dismissed(self) -> None:
        """Ends workers that nobody uses, and returns when they are gone."""
        self._own_lock()
        with self._ending:
            while self._dismissed:
                workers, finalizer = dismissed = self._dismissed[0]
                with DeferredSignals():
                    workers.close()
                    if finalizer is not None:
                        finalizer.detach()
                    with contextlib.suppress(ValueError):
                        self._dismissed.remove(dismissed)

    def _forget_the_parents(self) -> None:
        """In a forked child: the workers are the parent's; touch nothing.

        Not even to forget them: some would tell the parent's friends.
        """
        self._pid = os.getpid()
        ready = [list(epoch.ready.values()) for epoch in self._epochs()]
        dismissed = list(self._dismissed)
        _the_parents.append((self._workers, ready, dismissed))
        self._workers = None
        self._pool = _PoolState.READY
        self._dismissed.clear()
        for finalizer in (self._finalizer, *(f for _, f in dismissed)):
            if finalizer is not None:
                finalizer.detach()
        self._finalizer = None
        for epoch in self._epochs():
            epoch.discard_prefetched()
        self._prefetcher.clear()


# What a forked child must not finalize.
_the_parents: list[Any] = []


def _auto(settings: Settings, dataset: build.Dataset) -> AutoTuner | None:
    return AutoTuner(settings, dataset) if settings.workers == "auto" else None


def _is_the_end(epoch: Epoch, error: Exception) -> bool:
    """Whether this ends an epoch whose length nobody knew."""
    assert epoch.schedule is not None
    return isinstance(error, EndOfData) and epoch.schedule.num_batches is None


def _holds(cache: Cache | None, index: int) -> bool:
    return cache is not None and cache.holds(index)
