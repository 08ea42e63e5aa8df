"""Wraps random generators of all kinds, so that they are seeded in place."""

from __future__ import annotations

import inspect
import logging
import pickle
import random
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_fastdata._call_stack import raise_of_handler
from keras_fastdata._modules import loaded
from keras_fastdata.building import seeding
from keras_fastdata.building.attributes import is_gone

_log = logging.getLogger("keras_fastdata")

# NumPy itself draws a seed of 128 bits for a generator that is given none.
_MOST_GIVEN_BITS = 96


class GeneratorWrapper:
    """Base class of wrappers that seed a random generator in place."""

    # Whether generators with equal `state()` draw the same numbers.
    tells_whole_state = False

    def __init__(self, value: Any) -> None:
        self.value = value

    @property
    def bits(self) -> Any:
        """NumPy's bit generator; `None` for generators of other kinds."""
        return None

    @property
    def owner(self) -> Any:
        """What is there as long as the generator, to be referred to weakly."""
        # A bit generator itself cannot be referred to weakly.
        return self.value if self.bits is None else self.bits.lock

    @property
    def was_given_seed(self) -> bool:
        """Whether NumPy's bit generator was given a seed, of up to 96 bits."""
        return self.bits is not None and was_given_seed(self.bits)

    @property
    def is_fresh(self) -> bool:
        """Whether nothing was drawn yet; False if that cannot be told."""
        return False

    def reseed(self, stream: np.random.SeedSequence) -> None:
        """Seeds the random generator from the seed sequence `stream`."""

    def state(self) -> Any:
        """Returns the random generator's state, which can be compared."""

    def restore(self, state: Any) -> None:
        """Sets the random generator to a state that `state()` returned."""


class _NumpyGenerator(GeneratorWrapper):
    """Wraps a `np.random.Generator` or a NumPy bit generator."""

    tells_whole_state = True

    @property
    def bits(self) -> Any:
        return getattr(self.value, "bit_generator", self.value)

    @property
    def is_fresh(self) -> bool:
        sequence = self.bits.seed_seq
        if type(sequence) is not np.random.SeedSequence:
            return False
        fresh = type(self.bits)(np.random.SeedSequence(**sequence.state))
        spawned = sequence.n_children_spawned
        return not spawned and (
            pickle.dumps(fresh.state) == pickle.dumps(self.bits.state)
        )

    def reseed(self, stream: np.random.SeedSequence) -> None:
        fresh = type(self.bits)(stream)
        self._set(fresh.state, fresh.seed_seq)

    def state(self) -> tuple[bytes, Any, Any]:
        sequence = self.bits.seed_seq  # used by the generator's `spawn`
        spawned = getattr(sequence, "n_children_spawned", None)
        return pickle.dumps(self.bits.state), sequence, spawned

    def restore(self, state: tuple[bytes, Any, Any]) -> None:
        self._set(pickle.loads(state[0]), state[1])

    def _set(self, state: Any, sequence: Any) -> None:
        kind: Any = np.random.BitGenerator
        kind.__setstate__(self.bits, (state, sequence))


class _SeedSequence(GeneratorWrapper):
    """Wraps a `np.random.SeedSequence`, whose state is its spawn count."""

    def reseed(self, stream: np.random.SeedSequence) -> None:
        self.restore(int(stream.generate_state(1)[0] >> 1))  # of 32 bits

    def state(self) -> int:
        return int(self.value.n_children_spawned)

    def restore(self, state: int) -> None:
        entropy, _, *others = self.value.__reduce__()[2]
        self.value.__setstate__((entropy, state, *others))


class _NumpyRandomState(GeneratorWrapper):
    tells_whole_state = True

    @property
    def bits(self) -> Any:
        return self.value._bit_generator

    def reseed(self, stream: np.random.SeedSequence) -> None:
        # This also forgets a normal number that was drawn in advance.
        self.value.set_state(type(self.bits)(stream).state)

    def state(self) -> bytes:
        return pickle.dumps(self.value.get_state(legacy=False))

    def restore(self, state: bytes) -> None:
        self.value.set_state(pickle.loads(state))


class _PythonRandom(GeneratorWrapper):
    tells_whole_state = True

    def reseed(self, stream: np.random.SeedSequence) -> None:
        words = stream.generate_state(4).tobytes()
        self.value.seed(int.from_bytes(words, "little"))

    def state(self) -> Any:
        return self.value.getstate()

    def restore(self, state: Any) -> None:
        self.value.setstate(state)


class _TorchGenerator(GeneratorWrapper):
    tells_whole_state = True

    @property
    def is_fresh(self) -> bool:
        return seeding.is_fresh_torch(self.value)

    def reseed(self, stream: np.random.SeedSequence) -> None:
        self.value.manual_seed(int(stream.generate_state(1, np.uint64)[0] >> 1))

    def state(self) -> bytes:
        found: bytes = self.value.get_state().numpy().tobytes()
        return found

    def restore(self, state: bytes) -> None:
        array = np.frombuffer(state, np.uint8).copy()
        self.value.set_state(sys.modules["torch"].from_numpy(array))


class KerasSeedGenerator(GeneratorWrapper):
    """Wraps a `keras.random.SeedGenerator`, as random layers have one.

    On JAX, `fit` takes the values of a model's variables away until the epoch
    ends. No build can draw from such a generator, so it is left as it is.
    """

    @property
    def is_fresh(self) -> bool:
        _, *drawn = self.state() or (0, 1)
        return drawn == [0]

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
        except Exception as error:  # which depends on Keras's version
            raise_of_handler(error)
            return True
        return False


class HasSeedMethod(GeneratorWrapper):
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
            raise_of_handler(error)
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
        except Exception as error:
            raise_of_handler(error)
            return b""


def wrapper_of(value: Any) -> Callable[[Any], GeneratorWrapper] | None:
    """Returns a random generator's wrapper class, or `None` if unsupported."""
    if is_gone(value):
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
    keras_random = getattr(loaded("keras"), "random", None)
    kind = getattr(keras_random, "SeedGenerator", None)
    if kind is not None and isinstance(value, kind):
        return KerasSeedGenerator
    return None


def was_given_seed(bits: Any) -> bool:
    """Returns whether a bit generator was given a seed, of up to 96 bits."""
    # The functions of old, such as `np.random.seed`, leave no sequence.
    entropy = getattr(getattr(bits, "seed_seq", None), "entropy", None)
    is_drawn = isinstance(entropy, int) and entropy >> _MOST_GIVEN_BITS
    return not is_drawn


def is_global(value: Any) -> bool:
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


def seed_method_of(value: Any) -> str:
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
