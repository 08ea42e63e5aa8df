"""Random state as a function of (seed, epoch, batch index).

Every stream has a key that begins with the base seed and what the stream is
for. Two batches, two epochs, or two uses within a batch therefore never share
a stream, and no worker ever passes state to another. Streams of generators are
those of a `np.random.SeedSequence` over the seed, with the rest as its spawn
key; the global generators' whole state is drawn from SHAKE-128 over the key,
in a fifth of the time.
"""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
import types
from typing import Any

import numpy as np

from keras_fastdata.engine import mersenne

# First element of the spawn key: what a stream is for.
BATCH = 0  # (epoch, index): `self.rng`
GLOBALS = 1  # (epoch, index): np.random, random, torch
ATTRIBUTES = 2  # (epoch, index): generators kept in the dataset
USER = 3  # (epoch, index): `reseed`
ORDER = 4  # (epoch): the permutation of an epoch
HOOK = 5  # (n): the n-th call of on_epoch_begin / on_epoch_end
OUTSIDE = 6  # (): `self.rng` where no batch is being built
PART = 7  # (epoch, *key): `self.rng_for`
PARTS = 8  # (epoch): `self.epoch_order`

_MAX_DEPTH = 4  # of objects within objects in which generators are sought
_MAX_ITEMS = 256  # of a container that is searched for generators
_MAX_VISITS = 10_000  # objects looked at in one search

PRIVATE = "_fastdata"  # the attribute of a dataset that is not the user's


def sequence(seed: int, *key: int) -> np.random.SeedSequence:
    """The seed sequence of one stream."""
    return np.random.SeedSequence(seed, spawn_key=key)


def generator(seed: int, *key: int) -> np.random.Generator:
    """A fresh NumPy generator on one stream."""
    return np.random.Generator(np.random.PCG64(sequence(seed, *key)))


def reseed_globals(seed: int, *key: int) -> None:
    """Seeds `np.random`, `random` and, where loaded, torch's generator."""
    stream = hashlib.shake_128(repr((seed, key)).encode())
    drawn = stream.digest(mersenne.SEED_NBYTES + 16 + 8)
    own, rest = drawn[: mersenne.SEED_NBYTES], drawn[mersenne.SEED_NBYTES :]
    mersenne.seed(own)
    random.seed(int.from_bytes(rest[:16], "little"))
    torch = loaded_torch()
    if torch is not None:
        torch.default_generator.manual_seed(int.from_bytes(rest[16:], "little"))


def states(generators: list[Any]) -> dict[str, Any]:
    """How far these are, and generators that `find_generators` found."""
    torch = loaded_torch()
    return {
        "np.random": mersenne.state(),
        "random": random.getstate(),
        "torch": torch and torch.get_rng_state().numpy().tobytes(),
        "a random generator that the dataset holds": [
            pickle.dumps(found)
            for found in generators
            if not isinstance(found, random.SystemRandom)
        ],
    }


def reseed_generator(found: Any, stream: np.random.SeedSequence) -> None:
    """Puts a NumPy or Python generator at the start of a stream, in place."""
    if isinstance(found, np.random.Generator):
        bits = found.bit_generator
        bits.state = type(bits)(stream).state
    elif isinstance(found, np.random.RandomState):
        found.seed(stream.generate_state(4))
    else:
        state = stream.generate_state(4).tobytes()
        found.seed(int.from_bytes(state, "little"))


def find_generators(owner: Any) -> list[Any]:
    """Random generators kept in an object, in the order they are met.

    Attributes are searched, and what they hold: objects, dicts, lists and
    tuples, a few levels deep. Modules, classes and large containers are not.
    """
    found: list[Any] = []
    seen: set[int] = set()

    def visit(value: Any, depth: int) -> None:
        if isinstance(value, _LEAVES) or id(value) in seen:
            return
        if len(seen) >= _MAX_VISITS:
            return
        seen.add(id(value))
        if isinstance(value, _GENERATORS):
            found.append(value)
        elif depth < _MAX_DEPTH:
            for part in _parts_of(value):
                visit(part, depth + 1)

    for value in _attributes(owner):
        visit(value, 1)
    return found


def _parts_of(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [] if len(value) > _MAX_ITEMS else list(value.values())
    if isinstance(value, (list, tuple)):
        return [] if len(value) > _MAX_ITEMS else list(value)
    return _attributes(value)


def _attributes(owner: Any) -> list[Any]:
    attributes = getattr(owner, "__dict__", {})
    return [part for name, part in attributes.items() if name != PRIVATE]


def loaded_torch() -> Any:
    """torch, if it has been imported and has finished importing."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "default_generator") else None


_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
_LEAVES = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    np.ndarray,
    np.generic,
)
