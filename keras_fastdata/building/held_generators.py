"""Finds the random generators that a dataset refers to, and seeds them.

The search goes breadth first from the dataset's attributes through objects,
slots, dicts, lists, partials, bound methods and closures. Then it goes through
the variables that the user's classes and functions name. It evaluates no
property, and does not search large arrays.

A generator's stream depends on its path from the dataset, and not on the
number of generators: one that exists in a single process does not change the
draws of others.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import hashlib
import inspect
import io
import itertools
import logging
import pickle
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from keras_fastdata._modules import (
    imports_in,
    is_users,
    is_users_class,
    is_users_code,
    names_in,
)
from keras_fastdata.building import seeding
from keras_fastdata.building.attributes import (
    attributes_of,
    first_items,
    has_attributes,
    slot_values,
)

_MOST_VISITED = 20_000  # objects in one search
_MOST_ITEMS = 1_000  # of a container
_MOST_GROWING = 32  # containers whose growth is noticed
_MOST_WATCHED = 64  # items of containers whose replacement is noticed

_log = logging.getLogger("keras_fastdata")


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


class Held(NamedTuple):
    """A random generator that a dataset refers to."""

    path: str  # the path from the dataset to the generator
    key: tuple[int, ...]  # the key of its stream, computed from the path
    # Whether others may hold it too: it is in a global variable or a class, or
    # in a layer, which the model that trains may have as well.
    is_outside: bool
    generator: _Generator  # the generator

    def reseed(self, seed: int, *key: int) -> None:
        """Seeds the random generator for the random stream `key`."""
        self.generator.reseed(seeding.sequence(seed, *key, *self.key))


class _Generator:
    """Base class of wrappers that seed a random generator in place."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def reseed(self, stream: np.random.SeedSequence) -> None:
        """Seeds the random generator from the seed sequence `stream`."""

    def state(self) -> Any:
        """Returns the random generator's state, which can be compared."""

    def restore(self, state: Any) -> None:
        """Sets the random generator to a state that `state()` returned."""


class _NumpyGenerator(_Generator):
    """Wraps a `np.random.Generator` or a NumPy bit generator."""

    @property
    def _bits(self) -> Any:
        return getattr(self.value, "bit_generator", self.value)

    def reseed(self, stream: np.random.SeedSequence) -> None:
        fresh = type(self._bits)(stream)
        self._set(fresh.state, fresh.seed_seq)

    def state(self) -> tuple[bytes, Any, Any]:
        sequence = self._bits.seed_seq  # used by the generator's `spawn`
        spawned = getattr(sequence, "n_children_spawned", None)
        return pickle.dumps(self._bits.state), sequence, spawned

    def restore(self, state: tuple[bytes, Any, Any]) -> None:
        self._set(pickle.loads(state[0]), state[1])

    def _set(self, state: Any, sequence: Any) -> None:
        kind: Any = np.random.BitGenerator
        kind.__setstate__(self._bits, (state, sequence))


class _SeedSequence(_Generator):
    """Wraps a `np.random.SeedSequence`, whose state is its spawn count."""

    def reseed(self, stream: np.random.SeedSequence) -> None:
        self.restore(int(stream.generate_state(1)[0] >> 1))  # of 32 bits

    def state(self) -> int:
        return int(self.value.n_children_spawned)

    def restore(self, state: int) -> None:
        entropy, _, *others = self.value.__reduce__()[2]
        self.value.__setstate__((entropy, state, *others))


class _NumpyRandomState(_Generator):
    def reseed(self, stream: np.random.SeedSequence) -> None:
        bits = self.value._bit_generator
        # This also forgets a normal number that was drawn in advance.
        self.value.set_state(type(bits)(stream).state)

    def state(self) -> bytes:
        return pickle.dumps(self.value.get_state(legacy=False))

    def restore(self, state: bytes) -> None:
        self.value.set_state(pickle.loads(state))


class _PythonRandom(_Generator):
    def reseed(self, stream: np.random.SeedSequence) -> None:
        words = stream.generate_state(4).tobytes()
        self.value.seed(int.from_bytes(words, "little"))

    def state(self) -> Any:
        return self.value.getstate()

    def restore(self, state: Any) -> None:
        self.value.setstate(state)


class _TorchGenerator(_Generator):
    def reseed(self, stream: np.random.SeedSequence) -> None:
        self.value.manual_seed(int(stream.generate_state(1, np.uint64)[0] >> 1))

    def state(self) -> bytes:
        found: bytes = self.value.get_state().numpy().tobytes()
        return found

    def restore(self, state: bytes) -> None:
        array = np.frombuffer(state, np.uint8).copy()
        self.value.set_state(sys.modules["torch"].from_numpy(array))


class _KerasSeedGenerator(_Generator):
    """Wraps a `keras.random.SeedGenerator`, as random layers have one.

    On JAX, `fit` takes the values of a model's variables away until the epoch
    ends. No build can draw from such a generator, so it is left as it is.
    """

    def reseed(self, stream: np.random.SeedSequence) -> None:
        words = stream.generate_state(2) >> 1  # some backends have int32
        self._assign(words.tolist())

    def state(self) -> list[int]:
        if self._is_taken:
            return []
        words: list[int] = np.asarray(self.value.state).tolist()
        return words

    def restore(self, state: list[int]) -> None:
        if state:
            self._assign(state)

    def _assign(self, words: list[int]) -> None:
        if not self._is_taken:
            self.value.state.assign(words)

    @property
    def _is_taken(self) -> bool:
        try:
            _ = self.value.state.value
        except Exception:  # which depends on Keras's version
            return True
        return False


class _HasSeedMethod(_Generator):
    """Wraps an object with its own seeding method, such as `seed`."""

    def __init__(self, value: Any, name: str) -> None:
        super().__init__(value)
        self._name = name

    def reseed(self, stream: np.random.SeedSequence) -> None:
        if not self._name:
            return
        try:
            getattr(self.value, self._name)(int(stream.generate_state(1)[0]))
        except Exception as error:
            _log.warning(
                "%s.%s(seed) raised %r: its draws are not seeded for each "
                "batch. Override `reseed` to seed it.",
                type(self.value).__name__,
                self._name,
                error,
            )
            self._name = ""

    def state(self) -> bytes:
        try:
            return pickle.dumps(self.value)
        except Exception:
            return b""


class Search:
    """Finds the random generators that a dataset refers to.

    It refers to parts of the dataset, which may refer to the dataset: whatever
    outlives a dataset must not keep its `Search`.
    """

    def __init__(self, dataset: Any) -> None:
        self.held: list[Held] = []
        attributes = attributes_of(dataset)
        self._count = len(attributes)
        self._roots: dict[str, Any] = {}  # the attributes with generators
        known: set[int] = set()
        within: set[int] = set()  # ids of objects that hold a generator
        seedable: list[tuple[_ReachStep, str]] = []
        # The containers nearest to the dataset, each with whether it is the
        # attributes of an object.
        self._growing: list[tuple[Any, bool]] = []
        watched = _watched(attributes)
        unset: list[_Item] = []  # globals and class attributes
        for step in _reachable(dataset, unset):
            if len(self._growing) < _MOST_GROWING:
                for container in _growing(step.value):
                    is_object = container is not step.value
                    self._growing.append((container, is_object))
                    watched += _watched(container)
            if isinstance(step.value, types.FunctionType):
                for cell in step.value.__closure__ or ():
                    watched += _watched(_Content(cell))
            make = _kind_of(step.value)
            if make is not None:
                bits = getattr(step.value, "bit_generator", step.value)
                if id(bits) not in known and not _is_global(step.value):
                    known.add(id(bits))
                    within.update(id(one.value) for one in step.way())
                    self._add(step, make(step.value))
            elif not step.is_outside and (name := _method_of(step.value)):
                seedable.append((step, name))
        self._counts = [len(part) for part, _ in self._growing]
        # `None` and generators, which a build can replace.
        self._watched = (unset + watched)[:_MOST_WATCHED]
        for step, name in seedable:
            # An object whose generators were found is seeded through them.
            parts = _parts_of(step.value)
            if id(step.value) not in within and not any(
                _kind_of(part) for _, part in parts
            ):
                self._add(step, _HasSeedMethod(step.value, name))

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
                is_replaced |= _may_hold(value)
        if is_replaced:
            return True
        counts = [len(part) for part, _ in self._growing]
        if counts == self._counts:
            return False
        former, self._counts = self._counts, counts
        return any(
            _may_hold(item) if is_object else _kind_of(item) is not None
            for (part, is_object), before, count in zip(
                self._growing, former, counts, strict=True
            )
            if before < count <= _MOST_ITEMS
            for item in _latest(part, count - before)
        )

    def lacks(self, later: Search) -> bool:
        """Returns whether `later` has random generators that `self` lacks."""
        paths = {held.path for held in self.held}
        return any(held.path not in paths for held in later.held)

    def _add(self, step: _ReachStep, generator: _Generator) -> None:
        way = step.way()
        path = "".join(one.name for one in reversed(way))
        digest = hashlib.blake2b(path.encode("utf-8", "replace"), digest_size=8)
        key: tuple[int, ...] = (int.from_bytes(digest.digest(), "little"),)
        if alike := sum(held.path == path for held in self.held):
            key = (*key, alike)  # items of a set share one path
        is_outside = step.is_outside or isinstance(
            generator, _KerasSeedGenerator
        )
        self.held.append(Held(path, key, is_outside, generator))
        if not step.is_outside:
            self._roots[way[-1].name.removeprefix(".")] = way[-1].value


@functools.singledispatch
def seeds_its_own(dataset: Any) -> bool:
    """Returns whether a dataset seeds its random generators itself.

    A class that does so registers its own function.
    """
    return False


def reaches(dataset: Any, part: Any) -> bool:
    """Returns whether a dataset refers to `part`, directly or indirectly."""
    return any(step.value is part for step in _reachable(dataset))


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
        if value is None or _kind_of(value) is not None
    ]


def _may_hold(value: Any) -> bool:
    """Returns whether an object is or may refer to a random generator."""
    return (
        type(value) not in _LEAF_TYPES
        and not _is_gone(value)
        and not isinstance(value, (*_LEAVES, np.ndarray))
        and not _is_leaf(type(value))
    )


def _is_gone(value: Any) -> bool:
    """Returns whether an object has no class, as the proxy of a dead object."""
    try:
        value.__class__  # noqa: B018 - `isinstance` asks for it
    except Exception:
        return True
    return False


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


_SEQUENCES = (list, collections.deque)
_PLAIN_KEYS = {str, int, bytes, float, bool, type(None)}
_GROWING_TYPES = {
    *(dict, collections.defaultdict, collections.OrderedDict),
    *_SEQUENCES,
}


# -- the search ----------------------------------------------------------------


class _ReachStep(NamedTuple):
    """An object that the search found, with its path from the dataset."""

    name: str  # its part of the path
    value: Any  # the object
    before: Any  # the step before it; `None` for the dataset
    is_outside: bool  # whether the way to it leads through a global or a class

    def way(self) -> list[_ReachStep]:
        """Returns this step and all previous steps, from last to first."""
        found = [self]
        while found[-1].before is not None:
            found.append(found[-1].before)
        return found


def _reachable(
    dataset: Any, unset: list[_Item] | None = None
) -> Iterator[_ReachStep]:
    """Yields the objects that a dataset refers to; global objects come last.

    Adds the variables and class attributes that are `None` to `unset`.
    """
    inside: collections.deque[_ReachStep] = collections.deque()
    outside: collections.deque[_ReachStep] = collections.deque()
    seen = {id(dataset)}

    def meet(
        name: str, part: Any, before: _ReachStep | None, is_out: bool
    ) -> None:
        if type(part) in _LEAF_TYPES or id(part) in seen:
            return
        seen.add(id(part))
        if _is_gone(part):
            return
        if isinstance(part, types.ModuleType) and not is_users(part.__name__):
            return
        if not isinstance(part, _LEAVES) and not _is_leaf(type(part)):
            step = _ReachStep(name, part, before, is_out)
            (outside if is_out else inside).append(step)

    def open_up(value: Any, step: _ReachStep | None) -> None:
        is_out = step is not None and step.is_outside
        for name, part in _parts_of(value):
            meet(name, part, step, is_out)
        # The path of a global must not depend on the function that names it.
        for name, part, home, key in _named_by(value, value is dataset):
            if part is None and unset is not None:
                unset.append(_Item(home, key, None))
            meet(name, part, None, True)

    open_up(dataset, None)
    imgaug = sys.modules.get("imgaug.random")
    meet("imgaug", getattr(imgaug, "GLOBAL_RNG", None), None, True)
    for _ in range(_MOST_VISITED):
        if not inside and not outside:
            return
        step = (inside or outside).popleft()
        yield step
        open_up(step.value, step)  # a generator may hold another one


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields (name, object) for each object that `value` contains."""
    items: Any = ()
    if isinstance(value, dict):
        for number, key in enumerate(first_items(dict.keys(value))):
            name = _key_name(key, number)
            if type(key) not in _PLAIN_KEYS:
                yield f"{{{name}}}", key
            yield f"[{name}]", dict.get(value, key)
    elif isinstance(value, (list, tuple, collections.deque)):
        items = first_items(value)
    elif isinstance(value, (set, frozenset)):
        # The order of a set depends on addresses.
        for item in sorted(first_items(value), key=_class_name):
            yield "{}", item
    elif isinstance(value, np.ndarray):
        if value.dtype == object:
            items = first_items(value.flat)
    elif isinstance(value, types.FunctionType):
        yield ".__defaults__", value.__defaults__
        yield ".__kwdefaults__", value.__kwdefaults__
        names = value.__code__.co_freevars
        for name, cell in zip(names, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not assigned yet
                yield f" -> {name}", cell.cell_contents
    elif isinstance(value, functools.partial):
        yield ".func", value.func
        yield ".args", value.args
        yield ".keywords", value.keywords
    elif isinstance(value, types.MethodType):
        yield ".__func__", value.__func__
        yield "", value.__self__
    elif isinstance(value, types.BuiltinMethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, _OF_PYTHON):
        # There is no other access to everything that these keep.
        items = first_items(gc.get_referents(value))
    for number, item in enumerate(items):
        yield f"[{number}]", item
    if isinstance(value, (type, types.ModuleType)):
        return
    # Sorted: the order of attributes may differ in a worker.
    attributes = attributes_of(value)
    for name in sorted(name for name in attributes if isinstance(name, str)):
        if name != seeding.PRIVATE:
            yield f".{name}", attributes.get(name)
    for name, part in slot_values(value):
        yield f".{name}", part


def _key_name(key: Any, number: int) -> str:
    """Names a dict key in the same way in all processes."""
    with contextlib.suppress(Exception):
        name = repr(key)
        if " at 0x" not in name:
            return name[:100]
    return f"{type(key).__qualname__} {number}"


def _class_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _named_by(
    value: Any, is_dataset: bool
) -> Iterator[tuple[str, Any, Any, str]]:
    """Yields what a user's class, function or module refers to by name.

    Each with its path, and with the variables that have it, and its name there.
    """
    if isinstance(value, types.FunctionType):
        if is_users_code(str(value.__globals__.get("__name__"))):
            names, around = names_in(value.__code__), value.__globals__
            yield from _globals_of(around, names)
            for name in _imported_by(value.__code__, around.get("__package__")):
                if name in sys.modules:
                    found = {name: sys.modules[name]}
                    yield from _globals_of(found, names | {name})
        return
    if isinstance(value, types.ModuleType):
        own = first_items(vars(value))
        names = frozenset(name for name in own if not name.startswith("__"))
        yield from _globals_of(vars(value), names)
        return
    kind = value if isinstance(value, type) else type(value)
    metaclass: type = type(kind)
    for base in (*kind.__mro__, *metaclass.__mro__):
        if is_users_class(base):
            for name in sorted(vars(base)):
                # A worker does not construct the dataset.
                is_run = not is_dataset or name not in ("__init__", "__new__")
                if is_run and name != "__dict__":
                    part = vars(base).get(name)
                    inner = getattr(part, "__func__", None)
                    inner = inner or getattr(part, "fget", None)
                    inner = inner or getattr(part, "func", None)
                    path = f"{base.__qualname__}.{name}"
                    if isinstance(part, property):
                        yield f"{path}.setter", part.fset, vars(base), name
                    part = part if inner is None else inner
                    yield path, part, vars(base), name


@functools.lru_cache(maxsize=4096)
def _imported_by(code: types.CodeType, package: str | None) -> tuple[str, ...]:
    """Returns the names of the modules that a function itself may import."""
    names: dict[str, None] = {}
    for module, parts in imports_in(code, package):
        names |= dict.fromkeys([module, *(f"{module}.{n}" for n in parts)])
    return tuple(names)


def _globals_of(
    found: dict[str, Any], names: frozenset[str]
) -> Iterator[tuple[str, Any, Any, str]]:
    for name in sorted(names & found.keys()):
        part = found.get(name)
        if not isinstance(part, types.ModuleType):
            yield f"{found.get('__name__')}:{name}", part, found, name
        elif is_users(part.__name__):
            home = vars(part)
            for inner in sorted(names & home.keys()):
                yield f"{part.__name__}:{inner}", home[inner], home, inner


def _is_leaf(kind: type) -> bool:
    """Returns whether the search skips the instances of a class."""
    if kind.__name__ in ("Tensor", "Parameter"):
        return kind.__module__.startswith("torch")
    return kind.__module__.partition(".")[0] in _OPAQUE


# Packages whose objects hold no random generators: arrays, tables and the like.
_OPAQUE = {
    *("tensorflow", "jax", "jaxlib", "pandas", "polars", "pyarrow", "h5py"),
    # File systems and connections, which threads of their own change.
    *(
        "fsspec",
        "s3fs",
        "gcsfs",
        "aiobotocore",
        "botocore",
        "aiohttp",
        "asyncio",
    ),
}
_LEAF_TYPES = {
    *(str, bytes, bytearray, int, float, complex, bool),
    *(type(None), type(...), slice, range),
}
# Objects of Python itself that keep others.
_OF_PYTHON = (
    functools._lru_cache_wrapper,
    types.MappingProxyType,
    *(property, staticmethod, classmethod),
    *(enumerate, filter, map, reversed, zip),
    *(kind for kind in vars(itertools).values() if isinstance(kind, type)),
)
_LEAVES = (
    types.CodeType,
    types.GeneratorType,
    np.generic,
    np.dtype,
    memoryview,
    weakref.ref,
    io.IOBase,
    threading.Thread,
)


# -- recognizing generators ----------------------------------------------------


def _kind_of(value: Any) -> Callable[[Any], _Generator] | None:
    """Returns a random generator's wrapper class, or `None` if unsupported."""
    if _is_gone(value):
        return None
    if isinstance(value, (np.random.Generator, np.random.BitGenerator)):
        return _NumpyGenerator
    if isinstance(value, np.random.RandomState):
        return _NumpyRandomState
    if type(value) is np.random.SeedSequence:
        return _SeedSequence
    if isinstance(value, random.Random):
        is_system = isinstance(value, random.SystemRandom)
        return None if is_system else _PythonRandom
    torch = seeding.loaded_torch()
    if torch is not None and isinstance(value, torch.Generator):
        return _TorchGenerator
    keras_random = getattr(sys.modules.get("keras"), "random", None)
    kind = getattr(keras_random, "SeedGenerator", None)
    if kind is not None and isinstance(value, kind):
        return _KerasSeedGenerator
    return None


def _is_global(value: Any) -> bool:
    """Returns whether `value` is one of the global random generators.

    `seeding.reseed_globals` seeds those.
    """
    numpy: Any = np.random
    torch = seeding.loaded_torch()
    return (
        value is numpy.mtrand._rand
        or value is numpy.get_bit_generator()
        or value is getattr(random, "_inst", None)
        or (torch is not None and value is torch.default_generator)
    )


def _method_of(value: Any) -> str:
    """Returns the name of an object's seeding method, or "" if none exists.

    An object with items or steps is a dataset, an array or an environment;
    there `seed` may mean something else.
    """
    kind = type(value)
    for name in ("set_random_seed", "seed"):
        method = getattr(kind, name, None)
        if isinstance(method, types.FunctionType):
            has_items = any(hasattr(kind, other) for other in _NOT_SEEDED)
            return name if not has_items and _takes_a_seed(method) else ""
    return ""


def _takes_a_seed(method: types.FunctionType) -> bool:
    _, *parameters = inspect.signature(method).parameters.values()
    if not parameters or "seed" not in parameters[0].name:
        return False
    return parameters[0].kind is not inspect.Parameter.KEYWORD_ONLY and all(
        one.default is not one.empty
        or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        for one in parameters[1:]
    )


_NOT_SEEDED = ("__getitem__", "__len__", "__iter__", "__next__", "step")
