"""What is ours in a dataset, behind its one private attribute.

A user's class may have any name that is not public here: `self._loader = ...`
and `def _state_of(self)` are everyday ones. So a `FastPyDataset` has public
names and `_fastdata`, and everything else that the package asks of a dataset
is a function, most of them in this module. Attributes of the ready-made
datasets that are not public begin with `_fastdata` too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_fastdata import _process_role
from keras_fastdata.building import build, seeding
from keras_fastdata.building.permutation import Permutation
from keras_fastdata.engine.loader import Loader
from keras_fastdata.engine.settings import Settings
from keras_fastdata.engine.state_dict import State
from keras_fastdata.errors import EndOfData
from keras_fastdata.memory.arena import aligned_empty

# What differs from epoch to epoch.
_VARYING = frozenset(["rng", "rng_for", "epoch_order", "epoch"])


class Internals:
    """The settings and the loader of one dataset.

    It is pickled and copied as its settings alone.

    Attributes:
        settings: The constructor arguments.
        owner: The dataset.
        loader: Its loader, once there is one.
        outside_rng: `self.rng` where no batch is being built.
    """

    def __init__(self, settings: Settings, owner: build.Dataset) -> None:
        self.settings = settings
        self.owner = weakref.ref(owner)
        self.loader: Loader | None = None
        self.outside_rng: np.random.Generator | None = None

    def forget_outside_rng(self) -> None:
        """Has `self.rng` begin anew where no batch is being built."""
        self.outside_rng = None

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _ForeignInternals, (self.settings,)

    def __deepcopy__(self, memo: Any) -> _ForeignInternals:
        return _ForeignInternals(self.settings)


@dataclasses.dataclass
class _ForeignInternals:
    """The internals of a dataset this one was copied or unpickled from."""

    settings: Settings


def give_internals(dataset: build.Dataset, settings: Settings) -> Internals:
    """Gives a dataset settings of its own, and no loader yet."""
    internals = Internals(settings, dataset)
    vars(dataset)[seeding.PRIVATE] = internals
    return internals


def own_internals(dataset: build.Dataset) -> Internals | None:
    """A dataset's internals, unless they are those of its copy's original."""
    found = vars(dataset).get(seeding.PRIVATE)
    if isinstance(found, Internals) and found.owner() is dataset:
        return found
    return None


def internals_of(dataset: build.Dataset) -> Internals:
    """A dataset's internals; made now for a copy, which has the settings."""
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
    return give_internals(dataset, found.settings)


def loader_of(dataset: build.Dataset) -> Loader:
    """A dataset's loader, which is made when it is first asked for."""
    internals = internals_of(dataset)
    if internals.loader is None:
        internals.loader = Loader(dataset, internals.settings)
    return internals.loader


def settings_in_effect(dataset: build.Dataset) -> Settings:
    """The settings as they are at the moment; "auto" has decided."""
    internals = internals_of(dataset)
    if internals.loader is None:
        return internals.settings
    return internals.loader.settings


def replace_settings(dataset: build.Dataset, **changes: Any) -> None:
    """Changes settings, and the workers with them."""
    internals = internals_of(dataset)
    internals.settings = dataclasses.replace(internals.settings, **changes)
    if internals.loader is not None:
        internals.loader.reconfigure(internals.settings)


def note_assigned(dataset: build.Dataset, name: str) -> None:
    """Says that an attribute was assigned or deleted.

    A build may keep notes on `self`; all else is a new state.
    """
    own = own_internals(dataset)
    loader = None if own is None else own.loader
    if loader is None:
        return
    if build.is_built_for(dataset):
        loader.built.add(name)
    else:
        loader.built.discard(name)
        loader.mark_changed()


@functools.singledispatch
def state_dict_of(dataset: Any, state: State) -> dict[str, Any]:
    """What `state_dict` returns for a place in a dataset.

    A class whose states have more in them registers a function of its own.
    """
    return state.as_dict()


def answer(dataset: build.Dataset, name: str) -> Any:
    """What `self.rng`, `self.epoch` and the like are for the caller.

    Even where the user's class has another attribute of that name.
    """
    context = build.context_for(dataset, name)
    if context is None:
        return getattr(_Outside(dataset), name)
    if name in _VARYING:
        context.note_asked(name)
    return getattr(context, name)


def plain_iterator(dataset: build.Dataset) -> Iterator[Any]:
    """The batches of a dataset in order, built in the caller."""
    count = build.length_of(dataset)
    if count is not None:
        yield from (dataset[index] for index in range(count))
        return
    with contextlib.suppress(EndOfData):
        for index in itertools.count():
            yield dataset[index]


class _Outside:
    """What `self.rng` and the like answer where no batch is being built.

    So that `dataset[3]`, called by hand, works.
    """

    worker_index = None
    empty = staticmethod(aligned_empty)

    def __init__(self, dataset: build.Dataset) -> None:
        self._dataset = dataset

    @property
    def epoch(self) -> int:
        loader = internals_of(self._dataset).loader
        return loader.epoch if loader else 0

    @property
    def rng(self) -> np.random.Generator:
        internals = internals_of(self._dataset)
        if internals.outside_rng is None:
            internals.outside_rng = seeding.generator(
                self._seed, seeding.OUTSIDE
            )
        return internals.outside_rng

    def rng_for(self, *key: int) -> np.random.Generator:
        return build.rng_for(self._seed, self.epoch, *key)

    def epoch_order(self, length: int) -> Permutation:
        return build.epoch_order(self._seed, self.epoch, length)

    @property
    def _seed(self) -> int:
        if _process_role.is_worker():
            return internals_of(self._dataset).settings.seed or 0
        return loader_of(self._dataset).seed
