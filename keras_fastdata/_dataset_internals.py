"""Defines the content of a dataset's only private attribute, `_fastdata`.

Users' classes may use any name that is not public: `self._loader = ...` and
`def _state_of(self)` are common. So `FastPyDataset` has public names and
`_fastdata` only. Other operations of the package on a dataset are functions,
most of them in this module. Private attributes of the ready-made datasets
begin with `_fastdata` too.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from keras_fastdata import _process_role
from keras_fastdata.building import build, build_context, interface, seeding
from keras_fastdata.building.interface import Dataset
from keras_fastdata.engine.batch_iterator import iterate
from keras_fastdata.engine.loader import Loader
from keras_fastdata.engine.pool_factory import import_process_workers
from keras_fastdata.engine.pool_handle import ForkSafeLock
from keras_fastdata.engine.settings import Settings
from keras_fastdata.engine.state_dict import State
from keras_fastdata.errors import EndOfData
from keras_fastdata.metrics.recorder import WorkersWithin
from keras_fastdata.metrics.worker_kinds import NO_LIMIT, WorkerLimit
from keras_fastdata.workers.signals import DeferredSignals

# Names whose values differ between epochs, and those that depend on the seed.
_VARYING = frozenset(["rng", "rng_for", "epoch_order", "epoch"])
_SEEDED = _VARYING - {"epoch"} | {"seed"}
_MOST_WITHIN = 100  # items of a container that are looked at for datasets
_creating = ForkSafeLock()  # held while a loader is created
_unpickled = itertools.count()  # numbers the datasets that are


class Internals:
    """The settings and the loader of one dataset.

    Pickles and copies contain the settings only.

    Attributes:
        settings: The constructor arguments.
        owner: A weak reference to the dataset.
        loader: The dataset's loader, or `None` before its first use.
        version: Before there is a loader: replaced by each change.
        is_unseen: Likewise: whether such a change may be in no attribute.
        generators: The random generators that builds in this process seed.
        home: The `process_numbers` where the dataset was constructed.
        number: Tells this dataset from the others that the process has
            unpickled; `None` if it was constructed.
        outside_rng: `self.rng` outside of builds, and what it was made with;
            `None` before its use.
        followers: Those of the datasets that were made of this one, or that
            have it in an attribute.
    """

    def __init__(self, settings: Settings, owner: Dataset) -> None:
        self.settings = settings
        self.owner = weakref.ref(owner)
        self.loader: Loader | None = None
        self.version = object()
        self.is_unseen = False
        self.generators = build.Generators()
        self.home = _process_role.process_numbers()
        self.number: int | None = None
        self.outside_rng: tuple[Any, np.random.Generator] | None = None
        self.followers: weakref.WeakSet[Internals] = weakref.WeakSet()

    def mark_changed(self, *, unseen: bool = False) -> None:
        """Marks the dataset and its followers as changed.

        `unseen` says that the change may be in no attribute, such as in a file.
        """
        self.mark_alone(unseen=unseen)
        self.mark_followers(unseen=unseen)

    def mark_followers(self, *, unseen: bool = False) -> None:
        """Marks the followers, and theirs, as changed; see `mark_changed`."""
        marked = [self]  # two datasets may follow each other
        for internals in marked:
            for follower in list(internals.followers):
                if follower not in marked:
                    follower.mark_alone(unseen=unseen)
                    marked.append(follower)

    def mark_alone(self, *, unseen: bool = False) -> None:
        """Marks the dataset as changed, and no follower; see `mark_changed`."""
        if self.loader is None:
            self.version = object()
            self.is_unseen |= unseen
        else:
            self.loader.changes.mark()
            if unseen:
                self.loader.note_unseen_change()

    def forget_outside_rng(self) -> None:
        """Resets the random generator of `dataset.rng` outside of builds."""
        self.outside_rng = None

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return copy.copy, (self.settings,)

    def __deepcopy__(self, memo: Any) -> Settings:
        return self.settings


def give_internals(dataset: Dataset, settings: Settings) -> Internals:
    """Creates a dataset's internals with the given settings and no loader."""
    if not _process_role.is_worker():
        import_process_workers(settings)
    internals = Internals(settings, dataset)
    vars(dataset)[seeding.PRIVATE] = internals
    for value in list(vars(dataset).values()):
        _follow_in(value, internals)
    return internals


def own_internals(dataset: Dataset) -> Internals | None:
    """Returns a dataset's own internals, or `None` before their creation.

    A copied dataset at first has the internals of its original.
    """
    found = vars(dataset).get(seeding.PRIVATE)
    if isinstance(found, Internals) and found.owner() is dataset:
        return found
    return None


def mark_changed(dataset: Dataset, *, unseen: bool = False) -> None:
    """Marks a dataset and its followers; see `Internals.mark_changed`."""
    if (internals := own_internals(dataset)) is not None:
        internals.mark_changed(unseen=unseen)


def internals_of(dataset: Dataset) -> Internals:
    """Returns a dataset's own internals, and creates them if necessary."""
    own = own_internals(dataset)
    if own is not None:
        return own
    found = vars(dataset).get(seeding.PRIVATE)
    if found is None:
        warnings.warn(
            f"{type(dataset).__name__}.__init__ should call "
            "`super().__init__(**kwargs)`, which takes `workers`, "
            "`use_multiprocessing`, `max_queue_size` and more. The "
            "defaults are used.",
            stacklevel=3,
        )
        return give_internals(dataset, Settings())
    # A copy has the internals of its original, or their settings alone.
    is_copy = isinstance(found, Internals)
    internals = give_internals(dataset, found.settings if is_copy else found)
    if is_copy:
        internals.home, internals.number = found.home, found.number
    else:
        internals.number = next(_unpickled)
    follow(dataset)
    return internals


@functools.singledispatch
def datasets_within(dataset: Any) -> list[Any]:
    """Returns the datasets that a dataset was made of.

    A class that is made of datasets registers a function.
    """
    return []


def follow(dataset: Dataset) -> None:
    """Has changes of the datasets within a dataset count as its own."""
    for each in datasets_within(dataset):
        internals_of(each).followers.add(internals_of(dataset))


def _follow_in(value: Any, follower: Internals) -> None:
    """Has changes of a dataset, or of those in a container, count as another's.

    `value` is an attribute of the other dataset.
    """
    parts = [value]
    if type(value) is dict:
        parts = list(itertools.islice(value.values(), _MOST_WITHIN))
    elif type(value) in (list, tuple):
        parts = list(value[:_MOST_WITHIN])
    for part in parts:
        with contextlib.suppress(AttributeError):
            # Not `getattr`, which may run code of the user's.
            if seeding.PRIVATE in object.__getattribute__(part, "__dict__"):
                internals_of(part).followers.add(follower)


def run_hook(dataset: Dataset, name: str) -> None:
    """Runs an epoch hook; marks the dataset and its followers as changed."""
    try:
        loader_of(dataset).hooks.run(dataset, name)
    finally:
        internals_of(dataset).mark_followers()


def loader_of(dataset: Dataset) -> Loader:
    """Returns a dataset's loader, and creates it if necessary."""
    internals = internals_of(dataset)
    if internals.loader is None:
        # Two threads, or a signal handler, may ask at once.
        with DeferredSignals(), _creating.own():
            if internals.loader is None:
                loader = Loader(dataset, internals.settings)
                loader.changes.version = internals.version
                if internals.is_unseen:
                    loader.note_unseen_change()
                internals.loader = loader
    return internals.loader


def own_loader(dataset: Dataset) -> Loader | None:
    """Returns a dataset's loader, or `None` if there is no loader yet."""
    own = own_internals(dataset)
    return None if own is None else own.loader


def settings_in_effect(dataset: Dataset) -> Settings:
    """Returns the current settings, with the workers that "auto" chose."""
    internals = internals_of(dataset)
    return (internals.loader or internals).settings


def replace_settings(dataset: Dataset, **changes: Any) -> None:
    """Changes a dataset's settings, and replaces its workers."""
    internals = internals_of(dataset)
    internals.settings = dataclasses.replace(internals.settings, **changes)
    if internals.loader is not None:
        internals.loader.reconfigure(dataset, internals.settings)


def note_assigned(dataset: Dataset, name: str) -> None:
    """Notifies the loader that an attribute was assigned or deleted.

    In a thread that builds, this is a change that the build made on `self`. In
    any other thread it is a new state of the dataset, which workers must
    receive.
    """
    internals = own_internals(dataset)
    if internals is None:
        return
    if internals.loader is None:
        internals.version = object()
    else:
        by_build = build_context.is_built_for(dataset)
        internals.loader.changes.note_assigned(name, by_build)
    if not build_context.is_building():
        _follow_in(vars(dataset).get(name), internals)
        internals.mark_followers()


def version_of(dataset: Dataset) -> object | None:
    """Returns a token that is replaced whenever the dataset changes.

    Returns `None` where nothing changes the dataset: in a worker process,
    which receives a new dataset instead.
    """
    if _process_role.is_worker():
        return None
    internals = internals_of(dataset)
    loader = internals.loader
    return internals.version if loader is None else loader.changes.version


@functools.singledispatch
def twin_of(dataset: Any) -> Any:
    """Returns a shallow copy of a dataset; the copy has a separate loader.

    What is set on the twin does not reach the dataset. A class that keeps its
    progress elsewhere registers its own function.
    """
    return make_twin(dataset)


def make_twin(dataset: Any, **changes: Any) -> Any:
    """Returns a shallow copy of a dataset with some settings changed.

    Not `copy.copy`: a user's `__getstate__` may leave out open files.
    """
    settings = internals_of(dataset).settings
    twin = object.__new__(type(dataset))
    vars(twin).update(vars(dataset))
    give_internals(twin, dataclasses.replace(settings, **changes))
    follow(twin)
    return twin


@functools.singledispatch
def workers_within(dataset: Any) -> WorkersWithin | None:
    """Returns the workers that a dataset waits for in its builds, or `None`.

    A class that has such workers registers a function.
    """
    return None


@functools.singledispatch
def worker_limit(dataset: Any) -> WorkerLimit:
    """Returns which workers a dataset can use.

    A class that cannot use any number of any kind registers a function.
    """
    return NO_LIMIT


@functools.singledispatch
def state_dict_of(dataset: Any, state: State) -> dict[str, Any]:
    """Returns the result of `dataset.state_dict()`.

    A class that adds fields registers its own function.
    """
    return state.as_dict()


def answer(dataset: Dataset, name: str) -> Any:
    """Returns a dataset's current `rng`, `epoch` or similar attribute.

    Works also if the user's class has another attribute of that name.
    """
    context = build_context.context_for(dataset, name)
    if context is None:
        return _outside(dataset, name)
    if name in _VARYING:
        context.note_asked(f"self.{name}")
    return getattr(context, name)


def iterate_alone(dataset: Dataset) -> Iterator[Any]:
    """Returns an iterator over one epoch, in the trainer or in a worker."""
    if _process_role.is_worker():
        return plain_iterator(dataset)
    return iterate(loader_of(dataset), dataset, shuffle=False)


def plain_iterator(dataset: Dataset) -> Iterator[Any]:
    """Yields the batches of one epoch, built in the calling thread."""
    count = interface.length_of(dataset)
    if count is not None:
        order: Iterable[int] = range(count)
        if internals_of(dataset).settings.shuffle:
            order = map(int, answer(dataset, "rng").permutation(count))
        yield from (dataset[index] for index in order)
        return
    with contextlib.suppress(EndOfData):
        for index in itertools.count():
            yield dataset[index]


def _place_of(internals: Internals) -> tuple[int, ...]:
    """Returns which of the processes and copies draws by itself.

    Empty where a dataset was constructed, in workers, and in a process that
    `multiprocessing` has not started.
    """
    here = _process_role.process_numbers()
    if _process_role.is_worker() or not here:
        return ()
    if internals.number is not None:
        return (*here, internals.number)
    return () if here == internals.home else here


def _outside(dataset: Dataset, name: str) -> Any:
    """Returns a dataset's `rng`, `epoch`, ... for calls outside of builds.

    These values make `dataset[3]` work when a user calls it. `rng` draws other
    numbers in each process that the dataset is handed to, such as those of
    PyTorch's `DataLoader`, and each time that they unpickle the dataset.
    """
    internals, seed = internals_of(dataset), 0
    if name in _SEEDED and _process_role.is_worker():
        seed = internals.settings.seed or 0
    elif name in _SEEDED:
        seed = loader_of(dataset).seed
    if name == "rng":
        key = (seed, seeding.OUTSIDE, *_place_of(internals))
        if internals.outside_rng is None or internals.outside_rng[0] != key:
            internals.outside_rng = key, seeding.generator(*key)
        return internals.outside_rng[1]
    epoch = internals.loader.epoch if internals.loader else 0
    return getattr(build_context.Context(seed, epoch, 0, None), name)
