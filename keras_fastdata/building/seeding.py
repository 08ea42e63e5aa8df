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
import random
import sys
from typing import Any

import numpy as np

from keras_fastdata.building import mt19937

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
    drawn = stream.digest(mt19937.SEED_NBYTES + 16 + 8)
    own, rest = drawn[: mt19937.SEED_NBYTES], drawn[mt19937.SEED_NBYTES :]
    mt19937.seed(own)
    random.seed(int.from_bytes(rest[:16], "little"))
    torch = loaded_torch()
    if torch is not None:
        torch.default_generator.manual_seed(int.from_bytes(rest[16:], "little"))


def global_states() -> dict[str, Any]:
    """How far the global generators are."""
    torch = loaded_torch()
    return {
        "np.random": mt19937.state(),
        "random": random.getstate(),
        "torch": torch and torch.get_rng_state().numpy().tobytes(),
    }


def loaded_torch() -> Any:
    """torch, if it has been imported and has finished importing."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "default_generator") else None
