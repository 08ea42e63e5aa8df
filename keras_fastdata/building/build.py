"""Builds one batch: seeds random generators, then calls `__getitem__`.

The same `Builder` runs inline, in threads and in worker processes, so that a
batch has the same bytes wherever it is built.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import random
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from keras_fastdata import _call_stack, _process_role
from keras_fastdata._validation import integer
from keras_fastdata.building import global_rng, held_generators, seeding
from keras_fastdata.building.global_rng import preserved_globals
from keras_fastdata.building.permutation import Permutation
from keras_fastdata.building.worker_globals import WorkerGlobals
from keras_fastdata.building.worker_state import LostStateMonitor
from keras_fastdata.errors import LoaderError
from keras_fastdata.memory.arena import aligned_empty
from keras_fastdata.workers.base import ONCE

_MANY = 64  # datasets consumed by one thread: the dead ones are dropped

_log = logging.getLogger("keras_fastdata")

Empty = Callable[..., npt.NDArray[Any]]
_Method = TypeVar("_Method", bound=Callable[..., Any])
_Result = TypeVar("_Result")


class Dataset(Protocol):
    """Declares the dataset methods that the engine calls."""

    def __getitem__(self, index: int, /) -> Any: ...

    def reseed(self, seed_sequence: np.random.SeedSequence, /) -> None: ...

    def on_worker_start(self) -> None: ...

    def on_worker_stop(self) -> None: ...

    def on_epoch_begin(self) -> None: ...

    def on_epoch_end(self) -> None: ...

    @property
    def num_batches(self) -> int | None: ...


class SampleContext:
    """Holds the random generator of one sample during `get_sample`."""

    def __init__(self, key: tuple[int, ...]) -> None:
        self._key = key
        self._rng: np.random.Generator | None = None

    def rng(
        self, rng_for: Callable[..., np.random.Generator]
    ) -> np.random.Generator:
        """Returns the sample's random generator; the first call creates it."""
        with _making:
            if self._rng is None:
                self._rng = rng_for(*self._key)
            return self._rng


def set_name(dataset: Dataset, name: str) -> None:
    """Has a dataset go by the name of the function that made it."""
    vars(dataset)["_fastdata_name"] = name


def name_of(dataset: Dataset) -> str:
    """Returns the name of a dataset's class, or of the function it is from."""
    name: str = vars(dataset).get("_fastdata_name", type(dataset).__name__)
    return name


def length_of(dataset: Dataset) -> int | None:
    """Returns the number of batches in an epoch, or `None` if unknown."""
    try:
        found = dataset.num_batches
    except NotImplementedError:  # means endless in Keras's `__iter__` too
        found = None
    name = f"{type(dataset).__name__}.num_batches"
    return None if found is None else checked_length(name, found)


def checked_length(name: str, length: Any) -> int:
    """Validates a number of batches, and returns the number as an `int`."""
    if isinstance(length, float):
        raise TypeError(
            f"`{name}` must be an integer. Received: {length!r} (of type "
            f"{type(length).__name__}). Divide with `//`, or round with "
            "`math.ceil`."
        )
    return integer(name, length, least=0)


@dataclasses.dataclass
class Context:
    """Stores the seed, epoch, index and random generator of a batch build."""

    seed: int
    epoch: int
    index: int
    # The worker that builds the batch; `None` outside of workers.
    worker_index: int | None
    empty: Empty = aligned_empty
    dataset: Dataset | None = None
    # How many threads of this process may build batches of the dataset at once;
    # 0 if only the caller does.
    threads: int = 0
    # Whether this process builds one batch at a time, as worker processes do.
    is_private: bool = False
    # What was last read that depends on the epoch, such as "self.rng".
    asked: str = ""
    # Whether a thread other than the building one read a value.
    is_lent: bool = False
    # The sample that `get_sample` is called for, or `None`.
    part: SampleContext | None = None
    # The batch in whose build, and thread, this one is built.
    outer: Context | None = None
    _rng: np.random.Generator | None = None
    _holds: tuple[int, bool] | None = None

    def note_asked(self, what: str) -> None:
        """Records what a build reads that depends on the epoch, in words."""
        self.asked = what

    def holds(self, dataset: Any) -> bool:
        """Returns whether the dataset of this batch refers to `dataset`."""
        if self._holds is None or self._holds[0] != id(dataset):
            found = held_generators.reaches(self.dataset, dataset)
            self._holds = id(dataset), found
        return self._holds[1]

    def rewind_rng(self) -> None:
        """Resets `rng` to the start of its random stream."""
        self._rng = None

    @property
    def rng(self) -> np.random.Generator:
        """The random generator of this batch."""
        if self._rng is None:
            with _making:
                self._rng = self._rng or seeding.generator(
                    self.seed, seeding.BATCH, self.epoch, self.index
                )
        return self._rng

    def rng_for(self, *key: int) -> np.random.Generator:
        return seeding.generator(self.seed, seeding.PART, self.epoch, *key)

    def epoch_order(self, length: int) -> Permutation:
        return _epoch_order(self.seed, self.epoch, length)


@functools.lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, length: int) -> Permutation:
    return Permutation(length, seeding.sequence(seed, seeding.PARTS, epoch))


_DEFAULT_HOOKS: set[Callable[..., Any]] = set()


def default_hook(method: _Method) -> _Method:
    """Marks a method of a base class as an empty default implementation."""
    _DEFAULT_HOOKS.add(method)
    return method


def is_default_hook(method: Callable[..., Any]) -> bool:
    """Returns whether a method was decorated with `default_hook`."""
    return method in _DEFAULT_HOOKS


# On a hook that calls that of other datasets: a function that returns them.
FORWARDS = "_fastdata_forwards"


def overrides(dataset: Dataset, name: str) -> bool:
    """Returns whether a dataset overrides the empty default method `name`."""
    method = getattr(type(dataset), name)
    # Not `getattr`: a mock has any attribute.
    if within := getattr(method, "__dict__", {}).get(FORWARDS):
        return any(overrides(each, name) for each in within(dataset))
    return name in vars(dataset) or not is_default_hook(method)


EPOCH_HOOKS = ("on_epoch_begin", "on_epoch_end")

# On a method whose calls the loader notices.
NOTICED = "_fastdata_notices"


def has_unnoticed_hook(dataset: Dataset) -> bool:
    """Returns whether the user may call an epoch hook that nobody notices.

    Such a hook was set on the dataset, or on its class after the class was
    made, or it is no plain function.
    """
    return any(
        overrides(dataset, name)
        and (
            name in vars(dataset)
            or not hasattr(getattr(type(dataset), name), NOTICED)
        )
        for name in EPOCH_HOOKS
    )


class _Current(threading.local):
    """Stores each thread's build context and the datasets that it consumes."""

    context: Context | None = None  # the innermost batch that it is building

    def __init__(self) -> None:
        # The datasets whose batches the thread consumes, by id. A dict of weak
        # references takes a quarter of the time of a `WeakValueDictionary`.
        self.consumed: dict[int, weakref.ref[Dataset]] = {}


_current = _Current()
_building_in: dict[int, Context] = {}  # `_current.context` of other threads
_making: Any = threading.RLock()  # held while a generator is made
_builds_begun = 0  # threads may count two builds as one


def current_context() -> Context | None:
    """Returns the calling thread's build context; `None` outside of builds."""
    return _current.context


def builds_begun() -> int:
    """Returns a number that grows whenever this process begins a build."""
    return _builds_begun


def _and_outer(context: Context | None) -> Iterator[Context]:
    """Yields a context and then its outer contexts, innermost first."""
    while context is not None:
        yield context
        context = context.outer


def is_building() -> bool:
    """Returns whether the calling thread runs a build or a worker hook."""
    context = _current.context
    return context is not None and context.worker_index is not None


def is_built_for(dataset: Dataset) -> bool:
    """Returns whether the calling thread is building a batch of `dataset`.

    A thread that `__getitem__` started does not count: nothing tells it from
    other threads of the program.
    """
    return any(c.dataset is dataset for c in _and_outer(_current.context))


def is_in_worker(dataset: Dataset) -> bool:
    """Returns whether the calling thread is a worker of `dataset`."""
    return any(
        c.dataset is dataset and c.worker_index is not None
        for c in _and_outer(_current.context)
    )


def context_for(dataset: Dataset, name: str) -> Context | None:
    """Returns the build context to which the calling thread belongs, if any.

    A thread that `__getitem__` started works on the batch of the dataset whose
    attribute it reads, if only one batch is possible.

    Raises:
        LoaderError: The thread may belong to several batches.
    """
    if _current.context is not None:
        return _current.context
    building = _helped(dataset)
    if not building:
        return None
    if len(building) > 1 or building[0].threads > 1:
        kind = type(dataset).__name__
        raise LoaderError(
            f"A thread that {kind}.__getitem__ seems to have started asks "
            f"for `self.{name}`, while worker threads may be building "
            "several batches: the thread may belong to any of them. Ask for "
            "it in `__getitem__` itself and hand it to the thread, or build "
            "in processes (`use_multiprocessing=True`)."
        )
    building[0].is_lent = True
    return building[0]


def _helped(dataset: Dataset) -> list[Context]:
    """Returns the contexts of all builds that could have started this thread.

    They build batches of the dataset, or of a dataset that refers to it. A
    thread that consumes a dataset's batches does not work on them. A worker
    process builds only one batch at a time.
    """
    if not _building_in or _consumes(dataset):
        return []
    building = list(_building_in.values())
    own = [
        next((c for c in found if c.is_private or c.dataset is dataset), None)
        for found in map(_and_outer, building)
    ]
    if any(context is not None for context in own) and _indexes(dataset):
        return []
    return [context for context in own if context is not None] or [
        context
        for context in building
        if context.holds(dataset) and not _consumes(context.dataset)
    ]


def _indexes(dataset: Dataset) -> bool:
    """Returns whether the calling thread itself evaluates `dataset[index]`.

    The thread may be any thread of the program.
    """
    function: Any = getattr(type(dataset), "__getitem__", None)
    codes: set[Any] = set()
    while function is not None:
        codes.add(getattr(function, "__code__", None))
        function = getattr(function, "__wrapped__", None)
    return _call_stack.runs_any(codes - {None})


def consume(dataset: Dataset) -> None:
    """Records that the calling thread consumes batches of a dataset."""
    consumed = _current.consumed
    if len(consumed) > _MANY and id(dataset) not in consumed:
        for key in [k for k, found in consumed.items() if found() is None]:
            del consumed[key]
    consumed[id(dataset)] = weakref.ref(dataset)


def _consumes(dataset: Dataset | None) -> bool:
    found = _current.consumed.get(id(dataset))
    return (
        found is not None and found() is dataset
    ) or threading.current_thread() is threading.main_thread()


def forget_context(dataset: Dataset | None) -> None:
    """Removes build contexts that remain after a build was interrupted.

    A KeyboardInterrupt may come between any two lines, also between those that
    clean up.
    """
    outer = _and_outer(_current.context)
    context = next((c for c in outer if c.dataset is not dataset), None)
    _enter(context)
    for thread, other in list(_building_in.items()):
        if other.dataset is dataset and not other.threads:
            _building_in.pop(thread, None)
    if context is None:
        global_rng.release_interrupted()


def _enter(context: Context | None) -> None:
    """Sets or clears the calling thread's build context."""
    _current.context = context
    if context is None:
        _building_in.pop(threading.get_ident(), None)
    else:
        _building_in[threading.get_ident()] = context


def _after_fork() -> None:
    """Drops the state of threads that do not exist in the forked child."""
    global _making
    _building_in.clear()
    if not _making._is_owned():
        _making = threading.RLock()
    _enter(_current.context)


_process_role.at_fork(after_in_child=_after_fork)


class _Building:
    """Sets the calling thread's build context during a `with` block.

    It is a class because `contextlib.contextmanager` sets attributes on an
    exception that passes through, and some exceptions forbid that.
    """

    def __init__(self, context: Context) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._context.outer = _current.context
        _enter(self._context)

    def __exit__(self, *_: object) -> None:
        _enter(self._context.outer)


class Observer(Protocol):
    """Receives reports about the random generators that builds use."""

    @property
    def observes(self) -> bool:
        """Whether to report the random generators of the next build."""

    def on_global_rng(self, what: str) -> None:
        """Receives a description of random generators that builds use."""


class GlobalRngUsedError(LoaderError):
    """Raised if a build in a thread possibly used shared random generators.

    The batch is then built again, while no other thread builds.
    """


class Generators:
    """Stores the random generators that were found in one dataset.

    In the training process the dataset owns this object: a builder must not
    keep parts of the dataset alive.
    """

    def __init__(self) -> None:
        self._search: held_generators.Search | None = None
        self._is_sure = False  # whether builds were found to add none

    def held(self, dataset: Dataset) -> list[held_generators.Held]:
        """Returns the dataset's random generators; caches the search result."""
        if held_generators.seeds_its_own(dataset):
            return []
        if self._search is None or not self._search.fits(dataset):
            self._search = held_generators.Search(dataset)
        return self._search.held

    def search_after_build(self, dataset: Dataset) -> bool:
        """Searches again; returns whether a build added a random generator.

        Searches again only after the first build, if an attribute was
        replaced, and if a container or a global may have gained a generator.
        """
        search = self._search
        if search is None or (
            self._is_sure and search.fits(dataset) and not search.has_gained()
        ):
            return False
        self._is_sure = True
        self._search = held_generators.Search(dataset)
        return search.lacks(self._search)

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
    ) -> None:
        self._cached = cached
        self._observer = observer
        self._glance = glance
        self._dataset = dataset
        self._seed = seed
        self._threads = threads
        self._private = private
        self._own_generators = Generators()
        self._rng_monitor: GlobalRngMonitor | None = None
        if threads:
            self._rng_monitor = GlobalRngMonitor(warns=observer is None)
        self._former: list[Dataset] = []
        self._own: set[str] = set()
        self._globals: WorkerGlobals | None = None
        self._worker_state: LostStateMonitor | None = None

    @property
    def dataset(self) -> Dataset:
        """The dataset whose batches are built."""
        return self._dataset()

    def start(self, worker_index: int) -> None:
        """Runs the dataset's `on_worker_start` at the start of a worker."""
        dataset = self.dataset
        given = dict(vars(dataset))
        if self._private:
            self._globals = WorkerGlobals(dataset)
        with _Building(self._context(worker_index)):
            dataset.on_worker_start()
        if self._globals is not None:
            self._globals.note()
        self._own = {
            name
            for name, value in vars(dataset).items()
            if name not in given or given[name] is not value
        }
        if self._private:
            self._worker_state = LostStateMonitor(self._given_attributes())

    def forget(self, thread: int) -> None:
        """Removes the build context of a worker thread that is abandoned."""
        _building_in.pop(thread, None)

    def stop(self, worker_index: int) -> None:
        """Runs the dataset's `on_worker_stop` at the end of a worker."""
        dataset = self.dataset
        with _Building(self._context(worker_index)):
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
        global _builds_begun
        _builds_begun += 1
        context = self._context(worker_index, epoch, index, empty)
        with _Building(context):
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
                state = self._worker_state
                if state is not None and state.count_build():
                    self._look_for_lost_state(state)
                return batch
            with preserved_globals(), _Preserved(self._held()):
                return self._observed(context)

    def _observed(self, context: Context) -> Any:
        """Builds a batch, and reports which random generators were used."""
        observer = self._observer
        if observer is None or not observer.observes:
            return self._seeded(context)
        tell = observer.on_global_rng
        if overrides(self.dataset, "reseed"):
            tell("what `reseed` seeds")
        elif any(not held.is_outside for held in self._held()):
            tell("the random generators that the dataset holds")
        else:
            self._reseed(context.epoch, context.index)
            torch = seeding.loaded_torch()
            positions, states = _positions(torch), self._states()
            try:
                batch = self._made(context)
                if self._generators.search_after_build(self.dataset):
                    tell("the random generators that the dataset holds")
                elif seeding.loaded_torch() is torch:
                    return batch
                context.rewind_rng()
            finally:
                if positions != _positions(torch):
                    tell("`np.random` and `random`")
                elif states != self._states():
                    tell("the random generators of its module")
                if context.is_lent:
                    tell("what its own threads ask for")
        return self._seeded(context)

    def _seeded(self, context: Context) -> Any:
        """Seeds all random generators, and builds the batch.

        If a build creates generators or imports torch, it is repeated with
        these seeded.
        """
        torch = seeding.loaded_torch()
        self._reseed(context.epoch, context.index)
        batch = self._made(context)
        makes_some = self._generators.search_after_build(self.dataset)
        if makes_some or seeding.loaded_torch() is not torch:
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
            context.asked = ""
            before = self._states()
            batch = _item(dataset, index)
            after = self._states()
            drawn_from = (n for n, s in before.items() if s != after[n])
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
            f"of {name_of(dataset)} differs from epoch to epoch: it "
            f"used {used}. Leave out `cache`; or draw from a generator of its "
            "own, such as `np.random.default_rng(index)`."
        )

    def _states(self) -> dict[str, Any]:
        """Returns the states of the random generators; {} in worker threads."""
        if self._threads:
            return {}
        return {
            **seeding.global_states(),
            "a random generator that the dataset holds": [
                held.generator.state() for held in self._held()
            ],
        }

    def adopt(self, newer: Builder) -> None:
        """Replaces the worker's dataset with a newer version.

        What `on_worker_start` set is kept. Attributes that builds set are
        dropped, because they may come from the former state.
        """
        former, dataset = self.dataset, newer.dataset
        mine, theirs = vars(former), vars(dataset)
        for name in mine.keys() - theirs.keys() - self._own:
            del mine[name]
        mine.update((k, v) for k, v in theirs.items() if k not in self._own)
        # Parts of the new state refer to `dataset`, and the worker's own
        # attributes to former datasets: all of them share one `__dict__`.
        object.__setattr__(dataset, "__dict__", mine)
        if hasattr(type(former), "__del__"):
            self._former.append(former)  # `__del__` would end shared parts
        self._dataset = newer._dataset
        if self._globals is not None:
            self._globals.carry_to(dataset)
        self.change()
        if self._worker_state is not None:
            self._worker_state.begin(self._given_attributes())

    def _given_attributes(self) -> dict[str, Any]:
        """Returns the dataset attributes set by the training process."""
        attributes = vars(self.dataset).items()
        return {k: v for k, v in attributes if k not in self._own}

    def _look_for_lost_state(self, state: LostStateMonitor) -> None:
        """Warns once if builds change this worker's copy of the dataset."""
        paths = state.look(vars(self.dataset))
        if not paths:
            return
        self._worker_state = None
        _log.warning(
            "%s.__getitem__ changes %s in worker processes. Each has "
            "a copy of the dataset, so the change is lost: neither the "
            "training process nor another worker sees it. Return the value "
            "with the batch, or build in this process "
            "(`use_multiprocessing=False`).",
            type(self.dataset).__name__,
            ", ".join(f"`self.{path}`" for path in paths),
            extra={ONCE: "lost state"},
        )

    def change(self) -> None:
        """Notes a change of the dataset, and drops its random generators."""
        self._generators.forget()

    def _reseed(self, epoch: int, index: int) -> None:
        seed, dataset = self._seed, self.dataset
        for held in self._held():
            held.reseed(seed, seeding.ATTRIBUTES, epoch, index)
        seeding.reseed_globals(seed, seeding.GLOBALS, epoch, index)
        if overrides(dataset, "reseed"):
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


def builder_in_worker(dataset: Dataset, seed: int, cached: bool) -> Builder:
    """Returns a worker process's `Builder`, which keeps `dataset` alive."""
    return Builder(lambda: dataset, seed, private=True, cached=cached)


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


def run_hook(
    dataset: Dataset,
    hook: Callable[[], _Result],
    seed: int,
    number: int,
    epoch: int,
) -> _Result:
    """Runs `on_epoch_begin` or `on_epoch_end` with seeded random generators.

    So a shuffle of an index in `on_epoch_end` can be repeated. `number` counts
    the calls of hooks, and selects the random streams. The caller's global
    generators are restored.
    """
    stream = (seed, seeding.HOOK, number)
    rng = seeding.generator(*stream, 2)
    context = Context(seed, epoch, 0, None, dataset=dataset, _rng=rng)
    found = held_generators.Search(dataset).held
    with _Building(context), preserved_globals(), _Preserved(found):
        for held in found:
            held.reseed(*stream, 1)
        seeding.reseed_globals(*stream, 0)
        return hook()


class _Preserved:
    """Restores random generators that are in globals or class attributes."""

    def __init__(self, found: list[held_generators.Held]) -> None:
        self._found = [held.generator for held in found if held.is_outside]

    def __enter__(self) -> None:
        self._states = [one.state() for one in self._found]

    def __exit__(self, *_: object) -> None:
        for one, state in zip(self._found, self._states, strict=True):
            one.restore(state)


class GlobalRngMonitor:
    """Detects worker threads that draw from shared random generators.

    Args:
        warns: Whether to check only the first builds, and warn once. If not,
            all builds are checked, and `GlobalRngUsedError` is raised for one
            that may have drawn.
    """

    # During one build, another thread of the program may have drawn.
    _TELLING = 2
    # A check costs some 30 us a batch; a dataset that draws does so early.
    _BUILDS_WATCHED = 64

    def __init__(self, *, warns: bool) -> None:
        self._warns = warns
        self._moved = 0
        self._watched = 0
        self._local = threading.local()

    def begin(self) -> None:
        """Records the state of the shared random generators before a build."""
        self._local.before = None
        is_early = self._watched < self._BUILDS_WATCHED
        if (is_early and self._moved < self._TELLING) or not self._warns:
            self._watched += 1
            crossings = global_rng.crossings()
            self._local.before = self._positions(), crossings, self._moved

    def end(self, dataset: str) -> None:
        """Warns or raises if a build changed shared random generators."""
        before = self._local.before
        if before is None:
            return
        positions, crossings, moved = before
        # Another thread may have built inline, and seeded the generators.
        crossed = (
            global_rng.are_preserved() or global_rng.crossings() != crossings
        )
        has_moved = positions != self._positions()
        if not self._warns and (crossed or has_moved):
            raise GlobalRngUsedError(
                "While a thread built a batch, it or another thread drew from "
                "`np.random` or `random`."
            )
        # Several threads build at once; one draw shows in each of the builds.
        is_counted = self._moved != moved
        if self._warns and has_moved and not crossed and not is_counted:
            self._moved += 1
            if self._moved == self._TELLING:
                warnings.warn(
                    f"{dataset}.__getitem__, or other code meanwhile, draws "
                    "from `np.random` or `random`. Worker threads share those "
                    "generators with the program: a batch that draws from them "
                    "cannot be repeated. Draw from `self.rng`, which belongs "
                    "to the batch, or pass `use_multiprocessing=True`.",
                    stacklevel=2,
                )

    def _positions(self) -> tuple[Any, ...]:
        # A model of PyTorch may draw from torch's generator in each step, so
        # no warning depends on that generator.
        return _positions(None if self._warns else seeding.loaded_torch())


def _positions(torch: Any) -> tuple[Any, ...]:
    """Returns a summary of the states of the global random generators."""
    numpy: Any = np.random.get_state(legacy=False)
    state = numpy["state"]
    return (
        numpy["has_gauss"],
        (state["pos"], int(state["key"][0])) if "pos" in state else repr(state),
        hash(random.getstate()),
        torch and torch.get_rng_state().numpy().tobytes(),
    )
