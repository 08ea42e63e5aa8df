"""Iterables that are no generator functions: each pass begins a new iteration.

Where a library can split its iterable among workers, a pass is over one part.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import threading
import time
import types
import weakref
from collections.abc import Iterator
from typing import Any

from keras_fastdata._call_stack import ignoring_errors
from keras_fastdata.building.held_generators import Search
from keras_fastdata.datasets.columns import tidied
from keras_fastdata.engine.pool_handle import ForkSafeLock
from keras_fastdata.sources.tables import is_a

_LOOK_S = 0.05  # between two looks at the thread that reads
_STUCK_S = 60.0  # of one read, before another thread may read, too

_log = logging.getLogger("keras_fastdata")


class Passes:
    """Makes passes over an iterable that can be iterated through again.

    Attributes:
        splits: Whether `begin` can return a part of the items.
        travels: Whether a copy can go to a worker process.
        reseeds: Whether to seed the random generators in it.
    """

    splits = False
    travels = True
    reseeds = True

    def __init__(self, iterable: Any) -> None:
        self.iterable = iterable

    @staticmethod
    def over(iterable: Any) -> Passes | None:
        """Returns the passes over an iterable; `None` for other objects."""
        if is_a(iterable, "datasets", "IterableDataset"):
            return _OfHuggingFace(iterable)
        if is_torch_iterable(iterable):
            return _OfTorch(iterable)
        if hasattr(iterable, "as_numpy_iterator"):
            return _OfTensorFlow(iterable)
        has_samples = hasattr(iterable, "__getitem__")
        if has_samples or not hasattr(iterable, "__iter__"):
            return None
        return Passes(iterable)

    def begin(self, index: int, count: int, key: int) -> Iterator[Any]:
        """Returns an iterator over part `index` of `count` parts.

        `key` differs between passes, and is the same for all parts.
        """
        return map(tidied, iter(self.iterable))


class _OfHuggingFace(Passes):
    """Passes over a `datasets.IterableDataset`."""

    splits = True
    reseeds = False

    def begin(self, index: int, count: int, key: int) -> Iterator[Any]:
        split = importlib.import_module("datasets.distributed")
        turn = _turn_of(self.iterable)
        with turn:
            part = split.split_dataset_by_node(self.iterable, index, count)
            examples = getattr(self.iterable, "_ex_iterable", None)
            if Search(self).held and not _is_split(examples):
                # It shuffles: all parts alike, and each pass anew.
                part.set_epoch(1 + key % (1 << 31))
            examples = vars(part).get("_ex_iterable")
            if count > 1 and examples is not None:
                vars(part)["_ex_iterable"] = _own_copy(examples)
        return map(tidied, part if count == 1 else _in_turn(part, turn))


def _is_split(examples: Any, *, is_below: bool = False) -> bool:
    """Returns whether a part was taken of what is shuffled.

    Another order would have other items in the part, also those of the rest.
    `is_below`: whether this is what a part was taken of.
    """
    name = type(examples).__name__
    if is_below and "Shuffled" in name:
        return True
    is_below |= name.startswith(("Take", "Skip"))
    below = [*getattr(examples, "ex_iterables", ())]
    if hasattr(examples, "ex_iterable"):
        below.append(examples.ex_iterable)
    return any(_is_split(one, is_below=is_below) for one in below)


def _own_copy(examples: Any) -> Any:
    """Copies the objects in which Hugging Face keeps the place of a pass.

    The parts of a dataset share these where it concatenates or interleaves
    others, and would lose items.
    """
    own = copy.copy(examples)
    for name, below in vars(own).items():
        if name == "ex_iterable":
            own.ex_iterable = _own_copy(below)
        elif name == "ex_iterables":
            own.ex_iterables = [_own_copy(one) for one in below]
    return own


class _StreamTurn:
    """Lets one thread at a time read from a source, as a lock does.

    A thread that was given up while it reads, or reads one item for longer than
    `_STUCK_S`, keeps no other thread from its turn.
    """

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._guard = ForkSafeLock()  # held while the lock is replaced
        # The thread that reads, and since when.
        self._holder: tuple[threading.Thread, float] | None = None
        self._taken = threading.local()  # the locks that a thread has

    def __enter__(self) -> None:
        lock = self._lock.own()
        while not lock.acquire(timeout=_LOOK_S):
            with self._guard.own():
                if lock is self._lock.own() and self._is_stuck():
                    self._holder = None
                    self._lock.renew()
            lock = self._lock.own()
        taken = vars(self._taken).setdefault("locks", [])
        taken.append(lock)
        self._holder = threading.current_thread(), time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._taken.locks.pop().release()

    def _is_stuck(self) -> bool:
        if self._holder is None:
            return False
        thread, since_s = self._holder
        if time.monotonic() - since_s > _STUCK_S:
            _log.warning(
                "A read from a stream has taken over %d s in thread %r. "
                "Another thread now reads from the stream.",
                *(_STUCK_S, thread.name),
            )
            return True
        return getattr(thread, "is_given_up", False)


# By the source of the items, which is not pickled with the dataset.
_turns: weakref.WeakKeyDictionary[Any, _StreamTurn] = (
    weakref.WeakKeyDictionary()
)


def _turn_of(dataset: Any) -> _StreamTurn:
    """Returns the turns of all datasets that share a source of items."""
    source = getattr(dataset, "_ex_iterable", dataset)
    while (inner := getattr(source, "ex_iterable", None)) is not None:
        source = inner
    return _turns.setdefault(source, _StreamTurn())


def _in_turn(part: Any, turn: _StreamTurn) -> Iterator[Any]:
    """Yields the items of a part, of which one thread at a time gets one.

    The parts share objects, and would lose items if threads met there.
    """
    iterator = None
    while True:
        with turn:
            iterator = iter(part) if iterator is None else iterator
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


class _OfTorch(Passes):
    """Passes over a torch `IterableDataset`, which asks what its part is."""

    splits = True

    def begin(self, index: int, count: int, key: int) -> Iterator[Any]:
        if count == 1:
            return super().begin(index, count, key)
        own = self.iterable
        with ignoring_errors():  # it cannot be copied
            # Each part sets attributes of its own, as in torch's workers.
            own = copy.copy(own)
        return map(tidied, self._part(_WorkerInfo(index, count, key, own)))

    def _part(self, info: _WorkerInfo) -> Iterator[Any]:
        iterator = None
        while True:
            with _worker_info.shown(info):
                try:
                    if iterator is None:
                        iterator = iter(info.dataset)
                    item = next(iterator)
                except StopIteration:
                    return
            if not info.was_asked:
                raise ValueError(
                    f"The {type(self.iterable).__name__} does not ask "
                    "`torch.utils.data.get_worker_info()` which part of the "
                    f"items is its own. So each of {info.num_workers} workers "
                    "or shards would give all items. Have its `__iter__` skip "
                    "what belongs to others, or use `workers=1` and "
                    "`num_shards=1`."
                )
            yield item


class _WorkerInfo:
    """What `torch.utils.data.get_worker_info` returns in a pass."""

    def __init__(self, index: int, count: int, key: int, dataset: Any) -> None:
        self.was_asked = False
        self.num_workers = count
        self.seed = key + index
        self.dataset = dataset
        self._index = index

    @property
    def id(self) -> int:
        """The number of the part, from 0."""
        self.was_asked = True
        return self._index


class _WorkerInfoOfThread:
    """Shows torch the `_WorkerInfo` of the calling thread.

    torch has one for the process. So this object takes its place while a pass
    makes an item. A thread without a pass has all items, or what torch had.
    """

    def __init__(self) -> None:
        self._turn = ForkSafeLock()
        self._count = 0  # of passes that make an item now
        self._before: Any = None
        self._local = threading.local()

    @contextlib.contextmanager
    def shown(self, info: _WorkerInfo) -> Iterator[None]:
        """Shows `info` to the calling thread."""
        worker: Any = importlib.import_module("torch.utils.data._utils.worker")
        outer = getattr(self._local, "info", None)
        with self._turn.own():
            if not self._count:
                self._before, worker._worker_info = worker._worker_info, self
            self._count += 1
        self._local.info = info
        try:
            yield
        finally:
            self._local.info = outer
            with self._turn.own():
                self._count -= 1
                if not self._count:
                    worker._worker_info = self._before

    def __getattr__(self, name: str) -> Any:
        info = getattr(self._local, "info", None) or self._before or _ALONE
        return getattr(info, name)


_worker_info = _WorkerInfoOfThread()
_ALONE = types.SimpleNamespace(id=0, num_workers=1, seed=0, dataset=None)


class _OfTensorFlow(Passes):
    """Passes over a `tf.data.Dataset`, which runs in threads of its own."""

    travels = False

    def begin(self, index: int, count: int, key: int) -> Iterator[Any]:
        return iter(self.iterable.as_numpy_iterator())


def is_torch_iterable(held: Any) -> bool:
    """Returns whether an object is a torch `IterableDataset`."""
    return is_a(held, "torch.utils.data", "IterableDataset")
