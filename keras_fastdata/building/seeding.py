"""Derives random state from keys such as (seed, epoch, batch index).

Every stream has a key: the base seed, the purpose of the stream, and numbers
such as epoch and index. Two batches, two epochs, or two purposes never share a
stream, and no worker passes random state to another. A generator's stream
comes from a `np.random.SeedSequence` of the seed, with the rest of the key as
spawn key. The state of the global generators is drawn from SHAKE-128 over the
key, in a fifth of the time.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np

from keras_fastdata._modules import loaded
from keras_fastdata.building import mt19937

# First element of the spawn key: the purpose of a stream.
BATCH = 0  # (epoch, index): `self.rng`
GLOBALS = 1  # (epoch, index): np.random, random, torch
ATTRIBUTES = 2  # (epoch, index): generators kept in the dataset
USER = 3  # (epoch, index): `reseed`
ORDER = 4  # (epoch): the permutation of an epoch
HOOK = 5  # (n): the n-th call of on_epoch_begin / on_epoch_end
OUTSIDE = 6  # (*place): `self.rng` outside of builds
PART = 7  # (epoch, *key): `self.rng_for`
PARTS = 8  # (epoch): `self.epoch_order`
LENGTHS = 9  # (): samples whose lengths are asked for
START = 10  # (): `on_worker_start`

PRIVATE = "_fastdata"  # this package's attribute of a dataset

_JOINED = 1 << 256  # marks a joined seed; seeds that users give are smaller
_PART_MASK = (1 << 64) - 1  # the bits of a part


def joined(own: int, given: int, outside: int = 0) -> int:
    """Returns a base seed with parts for generators that were given a seed.

    So these draw alike where the program gives them the same seed, and all
    other generators do not. Each part is below 2**64.

    Args:
        own: The part for generators that were given no seed.
        given: The part for those that the dataset has alone; 0 without any.
        outside: The part for those in globals and classes; 0 without any.
    """
    return _JOINED | outside << 128 | given << 64 | own


def own_part(seed: int) -> int:
    """Returns the part for generators without a seed; or all of the seed."""
    return seed & _PART_MASK if _is_joined(seed) else seed


def given_parts(seed: int) -> tuple[int, int]:
    """Returns the other parts, `given` and `outside`; zeros if not joined."""
    if not _is_joined(seed):
        return 0, 0
    return seed >> 64 & _PART_MASK, seed >> 128 & _PART_MASK


def _is_joined(seed: int) -> bool:
    return seed >> 256 == 1


def sequence(seed: int, *key: int) -> np.random.SeedSequence:
    """Returns the NumPy seed sequence for a seed and a stream key."""
    return np.random.SeedSequence(own_part(seed), spawn_key=key)


def generator(seed: int, *key: int) -> np.random.Generator:
    """Returns a new NumPy random generator for a seed and a stream key."""
    return np.random.Generator(np.random.PCG64(sequence(seed, *key)))


def reseed_globals(seed: int, *key: int) -> None:
    """Seeds `np.random`, `random` and, if it is imported, torch."""
    stream = hashlib.shake_128(repr((own_part(seed), key)).encode())
    drawn = stream.digest(mt19937.SEED_NBYTES + 16 + 8)
    own, rest = drawn[: mt19937.SEED_NBYTES], drawn[mt19937.SEED_NBYTES :]
    mt19937.seed(own)
    random.seed(int.from_bytes(rest[:16], "little"))
    torch = loaded_torch()
    if torch is not None:
        torch.default_generator.manual_seed(int.from_bytes(rest[16:], "little"))


def global_states() -> dict[str, Any]:
    """Returns the states of the global random generators, by name."""
    torch = loaded_torch()
    return {
        "np.random": mt19937.state(),
        "random": random.getstate(),
        "torch": torch and torch.get_rng_state().numpy().tobytes(),
    }


def loaded_torch() -> Any:
    """Returns the module `torch`, or `None` if it is not fully imported."""
    return loaded("torch")


def is_fresh_torch(generator: Any) -> bool:
    """Returns whether nothing was drawn from a generator of torch."""
    fresh = type(generator)(device=generator.device)
    fresh.manual_seed(generator.initial_seed())
    return bool(fresh.get_state().equal(generator.get_state()))
