"""Builds one batch: seeds random generators, then calls `__getitem__`.

The same `Builder` runs inline, in threads and in worker processes, so that a
batch has the same bytes wherever it is built.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from keras_fastdata._call_stack import ignoring_errors
from keras_fastdata.building import (
    build_context,
    held_generators,
    interface,
    seeding,
)
from keras_fastdata.building.build_context import Context, Empty
from keras_fastdata.building.generator_wrappers import HasSeedMethod
from keras_fastdata.building.global_rng import preserved_globals
from keras_fastdata.building.interface import Dataset
from keras_fastdata.building.own_state import OwnState, carry_attributes
from keras_fastdata.building.rng_monitor import GlobalRngMonitor, positions
from keras_fastdata.building.worker_state import (
    LostStateMonitor,
    log_lost_state,
)
from keras_fastdata.errors import LoaderError
from keras_fastdata.memory.arena import aligned_empty

_log = logging.getLogger("keras_fastdata")

_Result = TypeVar("_Result")


class Observer(Protocol):
    """Receives reports about the random generators that builds use."""

    @property
    def observes(self) -> bool:
        """Whether to report the random generators of the next build."""

    def on_global_rng(self, what: str) -> None:
        """Receives a description of random generators that builds use."""


class Generators:
    """Stores the random generators that were found in one dataset.

    In the training process the dataset owns this object: a builder must not
    keep parts of the dataset alive. `firsts`: see `Search`.
    """

    def __init__(self, firsts: held_generators.Firsts | None = None) -> None:
        self.firsts = firsts
        self._search: held_generators.Search | None = None
        self._is_sure = False  # whether builds were found to add none
        self._is_edited = False  # whether builds have added or replaced some
        self._epoch: int | None = None  # of the latest build without workers

    def held(self, dataset: Dataset) -> list[held_generators.Held]:
        """Returns the dataset's random generators; caches the search result."""
        if held_generators.seeds_its_own(dataset):
            return []
        if self._search is None or not self._search.fits(dataset):
            self._search = held_generators.Search(dataset, self.firsts)
        return self._search.held

    def search_after_build(self, dataset: Dataset) -> bool:
        """Searches again; returns whether a build drew from what it added.

        Searches again only after the first build, if an attribute was
        replaced, and if a container or a global may have gained a generator.
        """
        search = self._search
        if search is None or (
            self._is_sure and search.fits(dataset) and not search.has_gained()
        ):
            return False
        self._is_sure = True
        self._search = held_generators.Search(
            dataset, search.firsts, is_first=False
        )
        self._is_edited |= not search.finds_same(self._search)
        return search.lacks(self._search)

    def note_epoch(self, epoch: int) -> None:
        """Drops the search result in a new epoch if builds change generators.

        The program may have put back what was there before these builds.
        """
        if self._epoch != epoch and self._is_edited:
            self.forget()
        self._epoch = epoch

    def forget(self) -> None:
        """Drops the search result, so that the next build searches again."""
        self._search, self._is_sure = None, False


class Builder:
    """Builds batches of one dataset.

    Args:
        dataset: Returns the dataset. May hold a weak reference, so that the
            builder does not keep the dataset alive.
        seed: The base seed.
        threads: How many threads build at the same time. They share the
            global generators with each other and with the program, so these
            are not seeded. 0: only the caller builds.
        private: Whether this is a worker process, so that the global
            generators need not be restored.
        cached: Whether batches must be the same in every epoch.
        observer: Is told of batches that draw from generators that threads
            share. A thread raises `GlobalRngUsedError` for such a batch.
        glance: Is called in threads before and after each build, with the
            number of the epoch.
        after_build: Is called in worker processes after each build.
        firsts: In worker processes, how random generators were found first.
    """

    def __init__(
        self,
        dataset: Callable[[], Dataset],
        seed: int,
        *,
        threads: int = 0,
        private: bool = False,
        cached: bool = False,
        observer: Observer | None = None,
        glance: Callable[[int], None] = lambda epoch: None,
        after_build: Callable[[Dataset], None] = lambda dataset: None,
        firsts: held_generators.Firsts | None = None,
    ) -> None:
        self._cached = cached
        self._observer = observer
        self._glance = glance
        self._after_build = after_build
        self._dataset = dataset
        self._seed = seed
        self._threads = threads
        self._private = private
        self._own_generators = Generators(firsts)
        self._rng_monitor: GlobalRngMonitor | None = None
        if threads:
            self._rng_monitor = GlobalRngMonitor(warns=observer is None)
        self._former: list[Dataset] = []
        self._worker_index = 0
        self._started: OwnState | None = None
        self._worker_state: LostStateMonitor | None = None

    @property
    def dataset(self) -> Dataset:
        """The dataset whose batches are built."""
        return self._dataset()

    def start(self, worker_index: int) -> None:
        """Runs the dataset's `on_worker_start` at the start of a worker.

        Seeds the random generators before, in all workers alike; but not in
        threads.
        """
        dataset, self._worker_index = self.dataset, worker_index
        self._generators.forget()  # another may have taken its place
        with build_context.Building(self._context(worker_index)):
            if self._private:
                self._start_and_note(dataset)
            elif self._threads or not _has_start(dataset):
                dataset.on_worker_start()
            else:
                with preserved_globals(), _Preserved(self._held()):
                    self._seed_start()
                    dataset.on_worker_start()

    def _start_and_note(self, dataset: Dataset) -> None:
        if _has_start(dataset):
            self._seed_start()
        started = OwnState(dataset)
        dataset.on_worker_start()
        started.note(dataset)
        self._started = started
        given = started.given_attributes(dataset)
        self._worker_state = LostStateMonitor(given)

    def _seed_start(self) -> None:
        _seed_all(self._held(), self._seed, seeding.START)
        self._generators.forget()  # `on_worker_start` may make others

    def forget(self, thread: int) -> None:
        """Removes the build context of a worker thread that is abandoned."""
        build_context.forget_thread(thread)

    def stop(self, worker_index: int) -> None:
        """Runs the dataset's `on_worker_stop` at the end of a worker."""
        dataset = self.dataset
        with build_context.Building(self._context(worker_index)):
            try:
                dataset.on_worker_stop()
            except Exception:
                # The pool is closing; nobody waits for a result.
                _log.exception(
                    "%s.on_worker_stop raised in worker %d",
                    type(dataset).__name__,
                    worker_index,
                )

    def build(
        self,
        epoch: int,
        index: int,
        worker_index: int,
        empty: Empty = aligned_empty,
    ) -> Any:
        """Builds the batch at `index`, and returns the result of `__getitem__`.

        Raises:
            LoaderError: The batch depends on the epoch, and would be cached.
            GlobalRngUsedError: A thread may have drawn from shared generators.
        """
        build_context.count_build()
        context = self._context(worker_index, epoch, index, empty)
        with build_context.Building(context):
            if self._rng_monitor is not None:
                self._glance(epoch)
                self._rng_monitor.begin()
                try:
                    return self._made(context)
                finally:
                    self._glance(epoch)
                    self._rng_monitor.end(type(self.dataset).__name__)
            if self._private:
                batch = self._seeded(context)
                self._after_build(self.dataset)
                state = self._worker_state
                if state is not None and state.count_build():
                    self._look_for_lost_state(state, batch)
                return batch
            self._generators.note_epoch(epoch)
            with preserved_globals(), _Preserved(self._held()):
                return self._observed(context)

    def _observed(self, context: Context) -> Any:
        """Builds a batch, and reports which random generators were used."""
        observer = self._observer
        if observer is None or not observer.observes:
            return self._seeded(context)
        tell = observer.on_global_rng
        if interface.overrides(self.dataset, "reseed"):
            tell("what `reseed` seeds")
        elif any(not held.is_outside for held in self._held()):
            tell("the random generators that the dataset holds")
        else:
            self._reseed(context.epoch, context.index)
            torch = seeding.loaded_torch()
            before, states = positions(torch), self._states()
            try:
                batch = self._made(context)
                if self._generators.search_after_build(self.dataset):
                    tell("the random generators that the dataset holds")
                elif not _draws_from_new(torch):
                    return batch
                context.rewind_rng()
            finally:
                if before != positions(torch):
                    tell("`np.random` and `random`")
                elif states != self._states():
                    tell("the random generators of its module")
                if context.is_lent:
                    tell("what its own threads ask for")
        return self._seeded(context)

    def _seeded(self, context: Context) -> Any:
        """Seeds all random generators, and builds the batch.

        If a build draws from generators that it creates, or from torch's after
        it has imported torch, it is repeated with these seeded.
        """
        torch = seeding.loaded_torch()
        self._reseed(context.epoch, context.index)
        batch = self._made(context)
        draws = self._generators.search_after_build(self.dataset)
        if draws or _draws_from_new(torch):
            del batch
            context.rewind_rng()
            self._reseed(context.epoch, context.index)
            batch = self._made(context)
        return batch

    def _made(self, context: Context) -> Any:
        dataset, index = self.dataset, context.index
        if not self._cached:
            return _item(dataset, index)
        for last in (False, True):
            context.note_asked("")
            before = self._states()
            batch = _item(dataset, index)
            after = self._states()
            names = {**before, **after}
            drawn_from = (n for n in names if before.get(n) != after.get(n))
            used = next(drawn_from, "")
            if context.asked:
                used = context.asked
            if not used:
                return batch
            if context.asked or last:
                break
            # Another thread may have drawn: build once more, to be sure.
        raise LoaderError(
            f"`cache` keeps batches for all epochs to come, and batch {index} "
            f"of {interface.name_of(dataset)} may differ from epoch to epoch: "
            f"it used {used}. Leave out `cache`; or draw from a generator of "
            "its own, such as `np.random.default_rng(index)`."
        )

    def _states(self) -> dict[str, Any]:
        """Returns the states of the random generators; {} in worker threads."""
        if self._threads:
            return {}
        states = seeding.global_states()
        for held in self._held():
            # Keys of a dict may look the same, so several may have one name.
            named = states.setdefault(f"the generator `{held.name}`", [])
            named.append(held.generator.state())
        return states

    def adopt(self, newer: Builder) -> None:
        """Replaces the worker's dataset with a newer version.

        What `on_worker_start` set is kept, unless it depends on the former
        state: then it runs again. Attributes that builds set are dropped,
        because they may come from the former state.
        """
        former, dataset, started = self.dataset, newer.dataset, self._started
        if started is not None and started.must_repeat:
            self.stop(self._worker_index)
            self._started = started = None
        carry_attributes(former, dataset, started.own if started else set())
        if hasattr(type(former), "__del__"):
            self._former.append(former)  # `__del__` would end shared parts
        self._dataset = newer._dataset
        self._own_generators.firsts = newer._own_generators.firsts
        self.change()
        if started is None:
            self.start(self._worker_index)
            return
        started.globals.carry_to(dataset)
        if self._worker_state is not None:
            self._worker_state.begin(started.given_attributes(dataset))

    def _look_for_lost_state(self, state: LostStateMonitor, batch: Any) -> None:
        """Warns once if builds change this worker's copy of the dataset."""
        paths: list[str] = []
        with ignoring_errors():  # objects may refuse to be looked at
            paths = state.look(vars(self.dataset), batch)
        if not paths:
            return
        self._worker_state = None
        log_lost_state(type(self.dataset).__name__, paths)

    def change(self) -> None:
        """Notes a change of the dataset, and drops its random generators."""
        self._generators.forget()

    def _reseed(self, epoch: int, index: int) -> None:
        seed, dataset = self._seed, self.dataset
        for held in self._held():
            held.reseed(seed, seeding.ATTRIBUTES, epoch, index)
        seeding.reseed_globals(seed, seeding.GLOBALS, epoch, index)
        if interface.overrides(dataset, "reseed"):
            dataset.reseed(seeding.sequence(seed, seeding.USER, epoch, index))

    def _held(self) -> list[held_generators.Held]:
        return self._generators.held(self.dataset)

    @property
    def _generators(self) -> Generators:
        if self._private:
            return self._own_generators
        found: Generators = vars(self.dataset)[seeding.PRIVATE].generators
        return found

    def _context(
        self,
        worker_index: int,
        epoch: int = 0,
        index: int = 0,
        empty: Empty = aligned_empty,
    ) -> Context:
        return Context(
            self._seed,
            epoch,
            index,
            worker_index,
            empty,
            self.dataset,
            self._threads,
            self._private,
        )


def builder_in_worker(
    dataset: Dataset,
    seed: int,
    cached: bool,
    firsts: held_generators.Firsts,
    after_build: Callable[[Dataset], None] = lambda dataset: None,
) -> Builder:
    """Returns a worker process's `Builder`, which keeps `dataset` alive."""
    return Builder(
        lambda: dataset,
        seed,
        private=True,
        cached=cached,
        after_build=after_build,
        firsts=firsts,
    )


def _has_start(dataset: Dataset) -> bool:
    return interface.overrides(dataset, "on_worker_start")


def _draws_from_new(before: Any) -> bool:
    """Returns whether torch was imported since, and drawn from."""
    torch = seeding.loaded_torch()
    return torch is not before and not seeding.is_fresh_torch(
        torch.default_generator
    )


def _item(dataset: Dataset, index: int) -> Any:
    """Calls `__getitem__`; raises `TypeError` for a coroutine or generator."""
    batch = dataset[index]
    if not isinstance(batch, (types.GeneratorType, types.CoroutineType)):
        return batch
    batch.close()
    name = type(dataset).__name__
    if isinstance(batch, types.CoroutineType):
        code, kind, cause = batch.cr_code, "coroutine", "an `async def`"
        way_out = "Use `def` there, and `asyncio.run` for what it awaits."
    else:
        code, kind, cause = batch.gi_code, "generator", "a `yield`"
        way_out = (
            "Use `return` there; a generator of batches is for "
            "`GeneratorDataset`."
        )
    raise TypeError(
        f"{name}.__getitem__ returned a {kind} in place of batch {index}: "
        f"there is {cause} in {code.co_qualname} ({code.co_filename}, line "
        f"{code.co_firstlineno}). {way_out}"
    )


def run_seeded(
    dataset: Dataset,
    function: Callable[[], _Result],
    stream: tuple[int, ...],
    epoch: int,
) -> _Result:
    """Runs a function of the user's with seeded random generators.

    So a shuffle of an index in `on_epoch_end` can be repeated. `stream` is the
    seed, and the key of the random streams. The caller's global generators are
    restored.
    """
    rng = seeding.generator(*stream, 2)
    context = Context(stream[0], epoch, 0, None, dataset=dataset, _rng=[rng])
    found = held_generators.Search(dataset).held
    around = build_context.current_context()
    try:
        with (
            build_context.Building(context),
            preserved_globals(),
            _Preserved(found, outside=True),
        ):
            _seed_all(found, *stream)
            return function()
    except BaseException:
        if around is None:
            build_context.forget_context(dataset)
        raise


def _seed_all(found: list[held_generators.Held], seed: int, *key: int) -> None:
    """Seeds the generators that were found, and the global ones."""
    for held in found:
        held.reseed(seed, *key, 1)
    seeding.reseed_globals(seed, *key, 0)


class _Preserved:
    """Restores random generators, but not objects that have only `seed`.

    So the training process has the same generators after builds without
    workers as after builds in processes. Besides, a signal handler may build a
    batch of the dataset while another batch of the same dataset is built.

    Args:
        found: The random generators of a dataset.
        outside: Whether to restore only those in globals or class attributes.
    """

    def __init__(
        self, found: list[held_generators.Held], *, outside: bool = False
    ) -> None:
        self._found = [
            held.generator
            for held in found
            if held.is_outside
            or (not outside and not isinstance(held.generator, HasSeedMethod))
        ]

    def __enter__(self) -> None:
        self._states = [one.state() for one in self._found]

    def __exit__(self, *_: object) -> None:
        for one, state in zip(self._found, self._states, strict=True):
            one.restore(state)
