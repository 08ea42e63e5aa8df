"""Tells which batch a thread is building.

`self.rng`, `self.epoch` and the like depend on the batch. A thread that builds
one has its context; a thread that `__getitem__` has started finds it.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from keras_fastdata import _call_stack, _process_role
from keras_fastdata.building import global_rng, seeding
from keras_fastdata.building.interface import Dataset
from keras_fastdata.building.permutation import Permutation
from keras_fastdata.building.reachable import reaches
from keras_fastdata.errors import LoaderError
from keras_fastdata.memory.arena import aligned_empty

_MANY = 64  # datasets consumed by one thread: the dead ones are dropped

Empty = Callable[..., npt.NDArray[Any]]


def _first(
    made: list[np.random.Generator],
    make: Callable[..., np.random.Generator],
    *key: int,
) -> np.random.Generator:
    """Returns the generator in `made`, and makes it if there is none.

    Several threads may make one, and the first one counts. With a lock, a
    signal handler that interrupts this could not wait for another thread.
    """
    if not made:
        made.append(make(*key))
    return made[0]


class SampleContext:
    """Holds the random generator of one sample during `get_sample`."""

    def __init__(self, key: tuple[int, ...]) -> None:
        self._key = key
        self._rng: list[np.random.Generator] = []  # once there is one

    def rng(
        self, rng_for: Callable[..., np.random.Generator]
    ) -> np.random.Generator:
        """Returns the sample's random generator; the first call creates it."""
        return _first(self._rng, rng_for, *self._key)


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
    _rng: list[np.random.Generator] = dataclasses.field(default_factory=list)
    _holds: tuple[int, bool] | None = None
    # The function that builds, and the signal handlers that may interrupt it.
    _function: types.CodeType | None = None
    _handlers: frozenset[types.CodeType] | None = None

    def begin(self, function: types.CodeType, outer: Context | None) -> None:
        """Records the function that builds, and the build around it."""
        self._function, self.outer = function, outer

    @property
    def is_interrupted(self) -> bool:
        """Whether the calling code is part of a signal handler.

        The handler has interrupted the build, and does not belong to it.
        """
        if self._handlers is None:
            self._handlers = (
                frozenset() if self.is_private else _call_stack.handlers_here()
            )
        if not self._handlers or self._function is None:
            return False
        return _call_stack.runs_before(self._handlers, self._function)

    def note_asked(self, what: str) -> None:
        """Records what a build reads that depends on the epoch, in words.

        The empty text clears the record.
        """
        self.asked = what

    def holds(self, dataset: Any) -> bool:
        """Returns whether the dataset of this batch refers to `dataset`."""
        if self._holds is None or self._holds[0] != id(dataset):
            found = reaches(self.dataset, dataset)
            self._holds = id(dataset), found
        return self._holds[1]

    def rewind_rng(self) -> None:
        """Resets `rng` to the start of its random stream."""
        self._rng = []

    @property
    def rng(self) -> np.random.Generator:
        """The random generator of this batch."""
        key = self.seed, seeding.BATCH, self.epoch, self.index
        return _first(self._rng, seeding.generator, *key)

    def rng_for(self, *key: int) -> np.random.Generator:
        return seeding.generator(self.seed, seeding.PART, self.epoch, *key)

    def epoch_order(self, length: int) -> Permutation:
        return epoch_order(self.seed, self.epoch, length)


@functools.lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, length: int) -> Permutation:
    """Returns the random order of an epoch."""
    return Permutation(length, seeding.sequence(seed, seeding.PARTS, epoch))


class _Current(threading.local):
    """Stores each thread's build context and the datasets that it consumes."""

    context: Context | None = None  # the innermost batch that it is building

    def __init__(self) -> None:
        # The datasets whose batches the thread consumes, by id. A dict of weak
        # references takes a quarter of the time of a `WeakValueDictionary`.
        self.consumed: dict[int, weakref.ref[Dataset]] = {}


_current = _Current()
_building_in: dict[int, Context] = {}  # `_current.context` of other threads
_builds_begun = 0  # threads may count two builds as one


def current_context() -> Context | None:
    """Returns the calling thread's build context; `None` outside of builds.

    A signal handler that interrupts a build is outside of the build.
    """
    context = _current.context
    return None if context is None or context.is_interrupted else context


def has_interrupted_a_build() -> bool:
    """Returns whether a signal handler runs amid a build of this thread."""
    context = _current.context
    return context is not None and context.is_interrupted


def count_build() -> None:
    """Counts a build that begins; see `builds_begun`."""
    global _builds_begun
    _builds_begun += 1


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
    context = current_context()
    return context is not None and context.worker_index is not None


def is_built_for(dataset: Dataset) -> bool:
    """Returns whether the calling thread is building a batch of `dataset`.

    A thread that `__getitem__` started does not count: nothing tells it from
    other threads of the program.
    """
    return any(c.dataset is dataset for c in _and_outer(current_context()))


def is_in_worker(dataset: Dataset) -> bool:
    """Returns whether the calling thread is a worker of `dataset`."""
    return any(
        c.dataset is dataset and c.worker_index is not None
        for c in _and_outer(current_context())
    )


def context_for(dataset: Dataset, name: str) -> Context | None:
    """Returns the build context to which the calling thread belongs, if any.

    A thread that `__getitem__` started works on the batch of the dataset whose
    attribute it reads, if only one batch is possible.

    Raises:
        LoaderError: The thread may belong to several batches.
    """
    context = current_context()
    if context is not None:
        return context
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


def forget_thread(thread: int) -> None:
    """Removes the context of a worker thread that is abandoned."""
    _building_in.pop(thread, None)


def _enter(context: Context | None) -> None:
    """Sets or clears the calling thread's build context."""
    _current.context = context
    if context is None:
        _building_in.pop(threading.get_ident(), None)
    else:
        _building_in[threading.get_ident()] = context


def _after_fork() -> None:
    """Drops the state of threads that do not exist in the forked child."""
    _building_in.clear()
    _enter(_current.context)


_process_role.at_fork(after_in_child=_after_fork)


class Building:
    """Sets the calling thread's build context during a `with` block.

    It is a class because `contextlib.contextmanager` sets attributes on an
    exception that passes through, and some exceptions forbid that.
    """

    def __init__(self, context: Context) -> None:
        self._context = context

    def __enter__(self) -> None:
        code = _call_stack.code_of_caller(1)
        self._context.begin(code, _current.context)
        _enter(self._context)

    def __exit__(self, *_: object) -> None:
        _enter(self._context.outer)
