"""Building one batch: seeds, context, and the user's `__getitem__`.

The same `Builder` works inline, in a thread, and in a worker process, so that
a batch has the same bytes wherever it is built.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import random
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from keras_fastdata._validation import integer
from keras_fastdata.building import global_rng, held_generators, seeding
from keras_fastdata.building.global_rng import preserved_globals
from keras_fastdata.building.permutation import Permutation
from keras_fastdata.building.worker_state import WorkerState
from keras_fastdata.errors import LoaderError
from keras_fastdata.memory.arena import aligned_empty
from keras_fastdata.workers.base import ONCE

Empty = Callable[..., npt.NDArray[Any]]
_Method = TypeVar("_Method", bound=Callable[..., Any])
_Result = TypeVar("_Result")


class Dataset(Protocol):
    """What the engine asks of a dataset."""

    def __getitem__(self, index: int, /) -> Any: ...

    def reseed(self, seed_sequence: np.random.SeedSequence, /) -> None: ...

    def on_worker_start(self) -> None: ...

    def on_worker_stop(self) -> None: ...

    def on_epoch_begin(self) -> None: ...

    def on_epoch_end(self) -> None: ...

    @property
    def num_batches(self) -> int | None: ...


class SampleContext:
    """A sample that a batch is being made of, and its generator.

    Args:
        key: Of that generator, within the epoch.
    """

    def __init__(self, key: tuple[int, ...]) -> None:
        self._key = key
        self._rng: np.random.Generator | None = None

    def rng(
        self, rng_for: Callable[..., np.random.Generator]
    ) -> np.random.Generator:
        """The generator, the same one for all threads."""
        with _making:
            if self._rng is None:
                self._rng = rng_for(*self._key)
            return self._rng


def length_of(dataset: Dataset) -> int | None:
    """Batches in an epoch; `None` if nobody knows.

    Raises:
        TypeError: What the dataset says is no integer.
        ValueError: It is negative.
    """
    try:
        found = dataset.num_batches
    except NotImplementedError:  # what Keras's `__iter__` takes for endless
        return None
    if found is None:
        return None
    return checked_length(f"{type(dataset).__name__}.num_batches", found)


def checked_length(name: str, length: Any) -> int:
    """A number of batches, once it is known to be one.

    Raises:
        TypeError: It is no integer.
        ValueError: It is negative.
    """
    if isinstance(length, float):
        raise TypeError(
            f"`{name}` must be an integer. Received: {length!r} (of type "
            f"{type(length).__name__}). Divide with `//`, or round with "
            "`math.ceil`."
        )
    return integer(name, length, least=0)


@dataclasses.dataclass
class Context:
    """What `self.rng`, `self.epoch` ... answer while a batch is built.

    Attributes:
        seed: The base seed.
        epoch: Of the batch.
        index: Of the batch.
        worker_index: Of the worker that builds it; `None` outside of workers.
        empty: What `self.empty` is.
        dataset: Whose batch it is.
        threads: How many may build batches of that dataset here at once; 0 if
            the caller alone does.
        is_private: Whether it is the only batch that this process builds.
        asked: Which of what depends on the epoch was asked for last.
        is_lent: Whether another thread than the one that builds asked.
        part: The sample that is being got.
        outer: The batch in whose build, and thread, this one is built.
    """

    seed: int
    epoch: int
    index: int
    worker_index: int | None
    empty: Empty = aligned_empty
    dataset: Dataset | None = None
    threads: int = 0
    is_private: bool = False
    asked: str = ""
    is_lent: bool = False
    part: SampleContext | None = None
    outer: Context | None = None
    _rng: np.random.Generator | None = None
    _holds: tuple[int, bool] | None = None

    def note_asked(self, name: str) -> None:
        """Remembers what was asked for that depends on the epoch."""
        self.asked = name

    def holds(self, dataset: Any) -> bool:
        """Whether that is a part of the one whose batch is built."""
        if self._holds is None or self._holds[0] != id(dataset):
            found = held_generators.reaches(self.dataset, dataset)
            self._holds = id(dataset), found
        return self._holds[1]

    @property
    def rng(self) -> np.random.Generator:
        if self._rng is None:
            with _making:
                self._rng = self._rng or seeding.generator(
                    self.seed, seeding.BATCH, self.epoch, self.index
                )
        return self._rng

    def restart_rng(self) -> None:
        """Puts `rng` at the start of its stream."""
        self._rng = None

    def rng_for(self, *key: int) -> np.random.Generator:
        return rng_for(self.seed, self.epoch, *key)

    def epoch_order(self, length: int) -> Permutation:
        return epoch_order(self.seed, self.epoch, length)


def rng_for(seed: int, epoch: int, *key: int) -> np.random.Generator:
    """What `self.rng_for` returns in that epoch."""
    return seeding.generator(seed, seeding.PART, epoch, *key)


@functools.lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, length: int) -> Permutation:
    """What `self.epoch_order` returns in that epoch."""
    return Permutation(length, seeding.sequence(seed, seeding.PARTS, epoch))


_DEFAULT_HOOKS: set[Callable[..., Any]] = set()


def default_hook(method: _Method) -> _Method:
    """Marks a method that does nothing unless it is overridden."""
    _DEFAULT_HOOKS.add(method)
    return method


def is_default_hook(method: Callable[..., Any]) -> bool:
    """Whether a method does nothing."""
    return method in _DEFAULT_HOOKS


def overrides(dataset: Dataset, name: str) -> bool:
    """Whether a dataset has a method of its own in place of an idle one."""
    method = getattr(type(dataset), name)
    return name in vars(dataset) or not is_default_hook(method)


class _Current(threading.local):
    """What a thread is at."""

    context: Context | None = None  # the innermost batch that it is building

    def __init__(self) -> None:
        # The datasets that it has asked for batches, by their ids.
        self.consumed: weakref.WeakValueDictionary[int, Dataset] = (
            weakref.WeakValueDictionary()
        )


_current = _Current()
_building_in: dict[int, Context] = {}  # `_current.context` of other threads
_making = threading.RLock()  # held while a generator is made


def current_context() -> Context | None:
    """The batch that the calling thread is building, or `None`."""
    return _current.context


def is_built_for(dataset: Dataset) -> bool:
    """Whether the caller is at work for a batch of that very dataset."""
    context = _current.context
    if context is None:
        return bool(_helped(dataset))
    while context is not None and context.dataset is not dataset:
        context = context.outer
    return context is not None


def is_in_worker(dataset: Dataset) -> bool:
    """Whether the caller is a worker of that dataset, and at work."""
    context = _current.context
    while context is not None:
        if context.dataset is dataset and context.worker_index is not None:
            return True
        context = context.outer
    return False


def context_for(dataset: Dataset, name: str) -> Context | None:
    """The batch that the caller is at work for, or `None`.

    A thread that `__getitem__` started works for the batch of the dataset it
    asks, where that can be only one.

    Args:
        dataset: What is asked.
        name: For what.

    Raises:
        LoaderError: It can be several.
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
            "several batches: whose it is cannot be told. Ask for it in "
            "`__getitem__` itself and hand it to the thread, or build in "
            "processes (`use_multiprocessing=True`)."
        )
    building[0].is_lent = True
    return building[0]


def _helped(dataset: Dataset) -> list[Context]:
    """Batches that the calling thread, which builds none, may be helping with.

    Those of the dataset that it asks, or of one that holds it; but a thread
    that consumes a dataset's batches does not help to build them. In a worker
    process only one batch is being built.
    """
    if not _building_in or _consumes(dataset):
        return []
    found = []
    for context in list(_building_in.values()):
        inner: Context | None = context
        while inner is not None and not (
            inner.is_private or inner.dataset is dataset
        ):
            inner = inner.outer
        if inner is not None:
            found.append(inner)
    return found or _holders(dataset)


def _holders(dataset: Dataset) -> list[Context]:
    """Batches being built of datasets that hold that one."""
    return [
        context
        for context in list(_building_in.values())
        if context.holds(dataset) and not _consumes(context.dataset)
    ]


def consume(dataset: Dataset) -> None:
    """Says that the calling thread is one that batches are built for."""
    _current.consumed[id(dataset)] = dataset


def _consumes(dataset: Dataset | None) -> bool:
    return (
        _current.consumed.get(id(dataset)) is dataset
        or threading.current_thread() is threading.main_thread()
    )


def forget_context(dataset: Dataset | None) -> None:
    """Forgets builds of a dataset that a KeyboardInterrupt has broken off.

    It may strike between any two lines, also those that put things back.
    """
    context = _current.context
    while context is not None and context.dataset is dataset:
        context = context.outer
    _enter(context)
    for thread, other in list(_building_in.items()):
        if other.dataset is dataset and not other.threads:
            _building_in.pop(thread, None)
    if context is None:
        global_rng.give_up()


def _enter(context: Context | None) -> None:
    """Makes that the batch which the calling thread is building."""
    _current.context = context
    if context is None:
        _building_in.pop(threading.get_ident(), None)
    else:
        _building_in[threading.get_ident()] = context


def _after_fork() -> None:
    """In the child: its one thread is all that goes on."""
    _building_in.clear()
    _enter(_current.context)


os.register_at_fork(after_in_child=_after_fork)


class _Building:
    """Makes a context the current one of the calling thread.

    A class, because `contextlib.contextmanager` sets attributes of an
    exception that passes, which not all allow.
    """

    def __init__(self, context: Context) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._context.outer = _current.context
        _enter(self._context)

    def __exit__(self, *_: object) -> None:
        _enter(self._context.outer)


class Observer(Protocol):
    """Wants to know what batches draw from, so as not to share it."""

    @property
    def observes(self) -> bool:
        """Whether it wants to know of the next one."""
        ...

    def on_global_rng(self, what: str) -> None:
        """Told of a batch built inline that draws from `what`."""
        ...


class GlobalRngUsedError(LoaderError):
    """A batch built by a thread may have drawn from what threads share.

    Whether it has shows when it is built where nobody else builds.
    """


class Builder:
    """Builds batches of one dataset.

    Args:
        dataset: Gives the dataset; weak where the builder must not keep it.
        seed: Base seed.
        threads: How many build at the same time. They share the global
            generators, with each other and with the rest of the program, so
            these are left alone. 0: the caller alone builds.
        private: Whether the process is the worker's own, so that the global
            generators need not be put back.
        cached: Whether batches are to be the same in every epoch.
        observer: Told of a batch that draws from what threads share; a
            thread then raises `GlobalRngUsedError` instead of returning it.
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
    ) -> None:
        self._cached = cached
        self._observer = observer
        self._dataset = dataset
        self._seed = seed
        self._threads = threads
        self._shared = threads > 0
        self._private = private
        self._search: held_generators.Search | None = None
        self._is_sure = False  # whether builds add no generator to those
        self._rng_monitor: GlobalRngMonitor | None = None
        if self._shared:
            self._rng_monitor = GlobalRngMonitor(warns=observer is None)
        self._former: list[Dataset] = []
        self._own: set[str] = set()
        self._worker_state: WorkerState | None = None

    @property
    def dataset(self) -> Dataset:
        return self._dataset()

    def start(self, worker_index: int) -> None:
        """Runs `on_worker_start`, once for each worker."""
        dataset = self.dataset
        given = dict(vars(dataset))
        with _Building(self._outside(worker_index)):
            dataset.on_worker_start()
        self._own = {
            name
            for name, value in vars(dataset).items()
            if name not in given or given[name] is not value
        }
        if self._private:
            self._worker_state = WorkerState(self._given_attributes())

    def stop(self, worker_index: int) -> None:
        """Runs `on_worker_stop`, once for each worker."""
        dataset = self.dataset
        with _Building(self._outside(worker_index)):
            try:
                dataset.on_worker_stop()
            except Exception:
                # Nobody waits for anything any more.
                logging.getLogger("keras_fastdata").exception(
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
        """Builds the batch at `index`, as `__getitem__` returns it.

        Raises:
            LoaderError: It depends on the epoch, and is to be kept.
            GlobalRngUsedError: It may have drawn, which is not to be.
        """
        context = Context(
            self._seed,
            epoch,
            index,
            worker_index,
            empty,
            self.dataset,
            self._threads,
            self._private,
        )
        with _Building(context):
            if self._rng_monitor is not None:
                self._rng_monitor.begin()
                try:
                    return self._made(context)
                finally:
                    self._rng_monitor.end(type(self.dataset).__name__)
            if self._private:
                batch = self._seeded(context)
                state = self._worker_state
                if state is not None and state.is_due():
                    self._look_for_lost_state(state)
                return batch
            with preserved_globals(), _Preserved(self._held()):
                return self._observed(context)

    def _observed(self, context: Context) -> Any:
        """The batch, once the observer knows what it draws from."""
        observer = self._observer
        if observer is None or not observer.observes:
            return self._seeded(context)
        if overrides(self.dataset, "reseed"):
            observer.on_global_rng("what `reseed` seeds")
        elif any(not held.is_outside for held in self._held()):
            observer.on_global_rng(
                "the random generators that the dataset holds"
            )
        else:
            self._reseed(context.epoch, context.index)
            before = _positions(), self._states()
            try:
                return self._made(context)
            finally:
                positions, states = before
                if positions != _positions():
                    observer.on_global_rng("`np.random` and `random`")
                elif states != self._states():
                    observer.on_global_rng(
                        "the random generators of its module"
                    )
                if context.is_lent:
                    observer.on_global_rng("what its own threads ask for")
        return self._seeded(context)

    def _seeded(self, context: Context) -> Any:
        """The batch, drawn from generators that are all seeded for it.

        The first build may make some; then it is done again, with these.
        """
        self._reseed(context.epoch, context.index)
        batch = self._made(context)
        search = self._search
        if search is not None and not (
            self._is_sure and search.is_of(self.dataset)
        ):
            self._is_sure = True
            self._search = held_generators.Search(self.dataset)
            if search.lacks(self._search):
                del batch
                context.restart_rng()
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
            used = context.asked and f"self.{context.asked}"
            for name, state in before.items():
                used = used or (name if state != after[name] else "")
            if not used:
                return batch
            if context.asked or last:
                break
            # Another thread may have drawn: once more, to be sure.
        raise LoaderError(
            f"`cache` keeps batches for all epochs to come, and batch {index} "
            f"of {type(dataset).__name__} is another one in every epoch: it "
            f"used {used}. Leave out `cache`; or draw from a generator of its "
            "own, such as `np.random.default_rng(index)`."
        )

    def _states(self) -> dict[str, Any]:
        """How far random generators are, unless threads share them."""
        if self._shared:
            return {}
        return {
            **seeding.global_states(),
            "a random generator that the dataset holds": [
                held.generator.state() for held in self._held()
            ],
        }

    def adopt(self, newer: Builder) -> None:
        """Goes on with a newer state of the worker's dataset.

        What `on_worker_start` set stays the worker's own. What builds set
        goes: they would have set it from the state before.
        """
        former, dataset = self.dataset, newer.dataset
        mine, theirs = vars(former), vars(dataset)
        for name in mine.keys() - theirs.keys() - self._own:
            del mine[name]
        mine.update((k, v) for k, v in theirs.items() if k not in self._own)
        # Parts of it refer to this one, and what is the worker's own to
        # former ones: what they all see is the same.
        object.__setattr__(dataset, "__dict__", mine)
        if hasattr(type(former), "__del__"):
            self._former.append(former)  # it would end what all have
        self._dataset = newer._dataset
        self.change()
        if self._worker_state is not None:
            self._worker_state.begin(self._given_attributes())

    def _given_attributes(self) -> dict[str, Any]:
        """What the training process, and not this worker, has set."""
        attributes = vars(self.dataset).items()
        return {k: v for k, v in attributes if k not in self._own}

    def _look_for_lost_state(self, state: WorkerState) -> None:
        """Says once if builds keep state here that nobody else will see."""
        paths = state.look(vars(self.dataset))
        if not paths:
            return
        self._worker_state = None
        name = type(self.dataset).__name__
        logging.getLogger("keras_fastdata").warning(
            "%s.__getitem__ changes %s in worker processes. Each has "
            "a copy of the dataset, so the change is lost: neither the "
            "training process nor another worker sees it. Return what is to "
            "be kept with the batch, or build in this process "
            "(`use_multiprocessing=False`).",
            name,
            ", ".join(f"`self.{path}`" for path in paths),
            extra={ONCE: "lost state"},
        )

    def change(self) -> None:
        """Told that the dataset may hold other generators now."""
        self._search, self._is_sure = None, False

    def _reseed(self, epoch: int, index: int) -> None:
        seed = self._seed
        dataset = self.dataset
        for held in self._held():
            held.reseed(seed, seeding.ATTRIBUTES, epoch, index)
        seeding.reseed_globals(seed, seeding.GLOBALS, epoch, index)
        if overrides(dataset, "reseed"):
            dataset.reseed(seeding.sequence(seed, seeding.USER, epoch, index))

    def _held(self) -> list[held_generators.Held]:
        dataset = self.dataset
        if held_generators.seeds_its_own(dataset):
            return []
        if self._search is None or not self._search.is_of(dataset):
            self._search = held_generators.Search(dataset)
        return self._search.held

    def _outside(self, worker_index: int) -> Context:
        return Context(
            self._seed,
            0,
            0,
            worker_index,
            dataset=self.dataset,
            threads=self._threads,
            is_private=self._private,
        )


def builder_in_worker(dataset: Dataset, seed: int, cached: bool) -> Builder:
    """The builder of a worker process, which has the dataset to itself."""
    return Builder(lambda: dataset, seed, private=True, cached=cached)


def _item(dataset: Dataset, index: int) -> Any:
    """`dataset[index]`, once it is known to have been built.

    Raises:
        TypeError: It is code that has yet to run.
    """
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
    """Runs `on_epoch_begin` or `on_epoch_end`, seeded by its number.

    Shuffling an index in `on_epoch_end` is the commonest way to shuffle, and
    this makes it repeatable, with `self.rng` or the global generators. The
    caller's global generators are put back.
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
    """Leaves generators outside of the dataset as it found them."""

    def __init__(self, found: list[held_generators.Held]) -> None:
        self._found = [held.generator for held in found if held.is_outside]

    def __enter__(self) -> None:
        self._states = [one.state() for one in self._found]

    def __exit__(self, *_: object) -> None:
        for one, state in zip(self._found, self._states, strict=True):
            one.restore(state)


class GlobalRngMonitor:
    """Notices when threads draw from generators that they share.

    Args:
        warns: Whether to warn once, and look at the first builds alone; or to
            raise `GlobalRngUsedError`, whenever one may have drawn.
    """

    # One moved build may be somebody else's draw in another thread.
    _TELLING = 2
    # Looking costs some 30 us a batch; a dataset that draws does so early.
    _BUILDS_WATCHED = 64

    def __init__(self, *, warns: bool) -> None:
        self._warns = warns
        self._moved = 0
        self._watched = 0
        self._local = threading.local()

    def begin(self) -> None:
        """Called before a build, by the thread that builds."""
        self._local.before = None
        early = self._moved < self._TELLING
        early = early and self._watched < self._BUILDS_WATCHED
        if early or not self._warns:
            self._watched += 1
            crossings = preserved_globals.crossings
            self._local.before = _positions(), crossings

    def end(self, dataset: str) -> None:
        """Called after it."""
        before = self._local.before
        if before is None:
            return
        positions, crossings = before
        # Another thread may build inline, and seed them meanwhile.
        crossed = (
            preserved_globals.depth or preserved_globals.crossings != crossings
        )
        if not self._warns and (crossed or positions != _positions()):
            raise GlobalRngUsedError(
                "While a thread built a batch, `np.random` or `random` was "
                "drawn from, by it or by another."
            )
        if not crossed and positions != _positions():
            self._moved += 1
            if self._moved == self._TELLING:
                warnings.warn(
                    f"{dataset}.__getitem__ draws from `np.random` or "
                    "`random` in worker threads, which share those "
                    "generators: its batches cannot be repeated. Draw from "
                    "`self.rng`, which belongs to the batch, or pass "
                    "`use_multiprocessing=True`.",
                    stacklevel=2,
                )


def _positions() -> tuple[Any, ...]:
    """How far the global generators are."""
    numpy: Any = np.random.get_state(legacy=False)
    state = numpy["state"]
    torch = seeding.loaded_torch()
    return (
        numpy["has_gauss"],
        (state["pos"], int(state["key"][0])) if "pos" in state else repr(state),
        hash(random.getstate()),
        torch and torch.get_rng_state().numpy().tobytes(),
    )
