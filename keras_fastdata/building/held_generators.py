"""Finds the random generators that a dataset refers to, and seeds them.

A generator's stream depends on its path from the dataset, and not on the
number of generators: one that exists in a single process does not change the
draws of others. Generators to which the program gave the same seed, as for
images and their masks, have the stream of the first of them.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import itertools
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from keras_fastdata.building import seeding
from keras_fastdata.building.attributes import attributes_of, has_attributes
from keras_fastdata.building.generator_wrappers import (
    GeneratorWrapper,
    HasSeedMethod,
    KerasSeedGenerator,
    is_global,
    seed_method_of,
    wrapper_of,
)
from keras_fastdata.building.reachable import (
    ReachStep,
    may_refer,
    parts_of,
    reachable,
)

_MOST_ITEMS = 1_000  # of a container
_MOST_GROWING = 64  # containers whose growth is noticed
_MOST_WATCHED = 128  # items of containers whose replacement is noticed
_MOST_WITHIN = 200  # objects in an item that a build adds to a container

_SEQUENCES = (list, collections.deque)
_Place = TypeVar("_Place")
_GROWING_TYPES = {
    *(dict, collections.defaultdict, collections.OrderedDict),
    *_SEQUENCES,
}


class _Content(Mapping[str, Any]):
    """Maps the name "" to the content of a closure cell."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def __getitem__(self, name: str) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError:  # not assigned yet
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter([""])

    def __len__(self) -> int:
        return 1


class First(NamedTuple):
    """A random generator as it was when it was found for the first time."""

    state: bytes = b""  # a digest of its state; empty if that is not known
    is_seeded: bool = False  # whether it is NumPy's, and was given a seed


Firsts = Mapping[str, First]  # by path

# By the owner of a generator. Builds and hooks seed the generator anew, at
# moments that depend on the workers.
_firsts: weakref.WeakKeyDictionary[Any, First] = weakref.WeakKeyDictionary()


class Held(NamedTuple):
    """A random generator that a dataset refers to."""

    path: str  # the path from the dataset to the generator
    key: tuple[int, ...]  # the key of its stream, computed from the path
    # Whether others may hold it too: it is in a global variable or a class, or
    # in a layer, which the model that trains may have as well.
    is_outside: bool
    generator: GeneratorWrapper  # the generator
    is_seeded: bool = False  # see `First`

    @property
    def name(self) -> str:
        """The path as Python code."""
        is_own = self.path.startswith(".")
        return f"self{self.path}" if is_own else self.path.replace(":", ".")

    def reseed(self, seed: int, *key: int) -> None:
        """Seeds the random generator for the random stream `key`."""
        if self.is_seeded:
            parts = seeding.given_parts(seed)
            seed = parts[self.is_outside] or max(parts) or seed
        self.generator.reseed(seeding.sequence(seed, *key, *self.key))


class Search:
    """Finds the random generators that a dataset refers to.

    It refers to parts of the dataset, which may refer to the dataset: whatever
    outlives a dataset must not keep its `Search`.

    Args:
        dataset: The dataset.
        firsts: How generators were first found in the training process. With
            `None`, this is that process.
        is_first: Whether builds cannot have drawn from generators that were not
            found before.
    """

    def __init__(
        self,
        dataset: Any,
        firsts: Firsts | None = None,
        *,
        is_first: bool = True,
    ) -> None:
        self.held: list[Held] = []
        attributes = attributes_of(dataset)
        self._count = len(attributes)
        self._roots: dict[str, Any] = {}  # the attributes with generators
        known: set[int] = set()
        within: set[int] = set()  # ids of objects that hold a generator
        seedable: list[tuple[ReachStep, str]] = []
        # Containers, each with whether it is the attributes of an object.
        growing = _Uncrowded[tuple[Any, bool]](_MOST_GROWING)
        # `None` and generators, which a build can replace.
        watched = _Uncrowded[_Item](_MOST_WATCHED)
        watched.add(0, _watched(attributes))
        unset: list[tuple[Any, str]] = []  # globals and class attributes
        for step in reachable(dataset, unset):
            crowd = step.crowd
            if growing.has_room(crowd):
                for container in _growing(step.value):
                    is_object = container is not step.value
                    growing.add(crowd, [(container, is_object)])
                    watched.add(crowd, _watched(container))
            if isinstance(step.value, types.FunctionType):
                for cell in step.value.__closure__ or ():
                    watched.add(crowd, _watched(_Content(cell)))
            make = wrapper_of(step.value)
            if make is not None:
                bits = getattr(step.value, "bit_generator", step.value)
                if id(bits) not in known and not is_global(step.value):
                    known.add(id(bits))
                    within.update(id(one.value) for one in step.way())
                    self._add(step, make(step.value))
            elif not step.is_outside and (name := seed_method_of(step.value)):
                seedable.append((step, name))
        self._growing = growing.first()
        self._counts = [len(part) for part, _ in self._growing]
        watched.add(1, [_Item(*place, None) for place in unset])
        self._watched = watched.first()
        for step, name in seedable:
            # An object whose generators were found is seeded through them.
            parts = parts_of(step.value)
            if id(step.value) not in within and not any(
                wrapper_of(part) for _, part in parts
            ):
                self._add(step, HasSeedMethod(step.value, name))
        self.firsts = {**(firsts or {})}
        for held in self.held:
            if held.path not in self.firsts:
                self.firsts[held.path] = _first_of(held.generator, is_first)
        self._apply_firsts()

    def _apply_firsts(self) -> None:
        """Gives generators that were first in one state the same stream."""
        known = self.firsts
        leaders: dict[bytes, Held] = {}
        for held in sorted(self.held, key=lambda held: held.path):
            leaders.setdefault(known.get(held.path, First()).state, held)
        for place, held in enumerate(self.held):
            state, is_seeded = known.get(held.path, First())
            leader = leaders[state] if state else held
            # Items of a set share one path, and have keys of their own.
            key = held.key if leader.path == held.path else leader.key
            self.held[place] = held._replace(key=key, is_seeded=is_seeded)

    def fits(self, dataset: Any) -> bool:
        """Returns whether the search result seems valid for `dataset`."""
        attributes = attributes_of(dataset)
        if len(attributes) != self._count:
            return False
        for name, value in self._roots.items():
            if attributes.get(name) is not value:
                return False
        return True

    def has_gained(self) -> bool:
        """Returns whether a container or a global may have a new generator.

        Looks at items that were added to a container, and at those that were
        `None` or a generator before.
        """
        is_replaced = False
        for place, item in enumerate(self._watched):
            if (value := item.now()) is not item.value:
                self._watched[place] = item._replace(value=value)
                is_replaced |= may_refer(value)
        if is_replaced:
            return True
        counts = [len(part) for part, _ in self._growing]
        if counts == self._counts:
            return False
        former, self._counts = self._counts, counts
        return any(
            may_refer(item) if is_object else _has_generator(item)
            for (part, is_object), before, count in zip(
                self._growing, former, counts, strict=True
            )
            if before < count <= _MOST_ITEMS
            for item in _latest(part, count - before)
        )

    def lacks(self, later: Search) -> bool:
        """Returns whether a build drew from random generators that it added.

        `later` is the search after the build.
        """
        paths = {held.path for held in self.held}
        return any(
            held.path not in paths and not held.generator.is_fresh
            for held in later.held
        )

    def finds_same(self, later: Search) -> bool:
        """Returns whether both searches have found the same generators."""
        return len(self.held) == len(later.held) and all(
            before.generator.value is after.generator.value
            for before, after in zip(self.held, later.held, strict=True)
        )

    def _add(self, step: ReachStep, generator: GeneratorWrapper) -> None:
        way = step.way()
        path = "".join(one.name for one in reversed(way))
        digest = hashlib.blake2b(path.encode("utf-8", "replace"), digest_size=8)
        key: tuple[int, ...] = (int.from_bytes(digest.digest(), "little"),)
        if alike := sum(held.path == path for held in self.held):
            key = (*key, alike)  # items of a set share one path
        is_outside = step.is_outside or isinstance(
            generator, KerasSeedGenerator
        )
        self.held.append(Held(path, key, is_outside, generator))
        if not step.is_outside:
            self._roots[way[-1].name.removeprefix(".")] = way[-1].value


def _has_generator(item: Any) -> bool:
    """Returns whether an item is, or holds, what the search would seed."""
    waiting, known = [item], set()
    for value in waiting:  # grows
        if id(value) in known:
            continue
        known.add(id(value))
        if wrapper_of(value) is not None or seed_method_of(value):
            return True
        if len(waiting) < _MOST_WITHIN:
            parts = (part for _, part in parts_of(value))
            waiting += filter(may_refer, parts)
    return False


def _first_of(generator: GeneratorWrapper, is_known: bool) -> First:
    """Returns how a generator was found first, which may be now.

    Unless `is_known`, a build has made the generator, and drawn from it.
    """
    if not generator.tells_whole_state:
        return First()
    try:
        first = _firsts.get(generator.owner)
        if first is None:
            state = _digest_of(generator) if is_known else b""
            first = First(state, generator.was_given_seed)
            _firsts[generator.owner] = first
    except TypeError:  # a subclass with slots cannot be referred to weakly
        return First()
    return first


def _digest_of(generator: GeneratorWrapper) -> bytes:
    text = repr((type(generator.value), generator.state()))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


@functools.singledispatch
def seeds_its_own(dataset: Any) -> bool:
    """Returns whether a dataset seeds its random generators itself.

    A class that does so registers its own function.
    """
    return False


class _Item(NamedTuple):
    """An item of a container, or a variable, that a build can replace."""

    home: Any  # a mapping, a list or a deque
    key: Any  # the key or index in it
    value: Any  # the item at the latest look

    def now(self) -> Any:
        """Returns the present item, or `None` if it does not exist."""
        if not isinstance(self.home, _SEQUENCES):
            return self.home.get(self.key)
        try:
            return self.home[self.key]
        except IndexError:
            return None


class _Uncrowded(Generic[_Place]):
    """Keeps what is not in large containers: those of a dataset are its data.

    Args:
        most: How many to keep.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_crowd: dict[int, list[_Place]] = {}

    def has_room(self, crowd: int) -> bool:
        """Returns whether something in a container of that size is kept."""
        found = self._by_crowd.items()
        before = sum(len(places) for size, places in found if size <= crowd)
        return before < self._most

    def add(self, crowd: int, places: list[_Place]) -> None:
        """Keeps what is in a container with `crowd` items."""
        self._by_crowd.setdefault(crowd, []).extend(places)

    def first(self) -> list[_Place]:
        """Returns up to `most` places, those in small containers first."""
        found = (self._by_crowd[crowd] for crowd in sorted(self._by_crowd))
        places = itertools.chain.from_iterable(found)
        return list(itertools.islice(places, self._most))


def _watched(container: Any) -> list[_Item]:
    """Returns the items of a container that are `None` or a generator."""
    items: Any = enumerate(container)
    if not isinstance(container, _SEQUENCES):
        items = container.items()
    try:
        some = list(itertools.islice(items, _MOST_ITEMS))
    except RuntimeError:  # a thread of the build adds items
        return []
    return [
        _Item(container, key, value)
        for key, value in some
        if value is None or wrapper_of(value) is not None
    ]


def _growing(value: Any) -> list[Any]:
    """Returns the container to which a build can add items, or no container."""
    if type(value) in _GROWING_TYPES:
        return [value]
    if isinstance(value, (type, types.FunctionType, types.ModuleType)):
        return []
    return [attributes_of(value)] if has_attributes(value) else []


def _latest(container: Any, count: int) -> list[Any]:
    """Returns the `count` items that were last added to a container."""
    items = container.values() if isinstance(container, dict) else container
    try:
        return list(itertools.islice(reversed(items), count))
    except RuntimeError:  # a thread of the build adds items
        return []
