"""Draws the seed of a dataset to which the program gave none.

A program that seeds its random generators expects the same batches in each run.
The package gives these generators other seeds. It derives those from the seed
of the dataset, and the seed of the dataset from what the program has seeded.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import weakref
from typing import Any

import numpy as np

from keras_fastdata.building.held_generators import Search

_random: Any = np.random  # its type stubs lack the function used here

# NumPy itself draws a seed of 128 bits for a generator that is given none.
_MOST_GIVEN_BITS = 96


@dataclasses.dataclass
class _FirstDraw:
    """What a generator gave at first, and to how many datasets."""

    words: list[int]
    datasets: int = 0


# By the lock of a bit generator, which itself cannot be referred to weakly.
# Builds seed the generator anew, at moments that depend on the workers.
_first_draws: weakref.WeakKeyDictionary[Any, _FirstDraw] = (
    weakref.WeakKeyDictionary()
)


def draw_seed(dataset: Any) -> int:
    """Draws a seed below 2**63.

    It depends on `np.random` if the program has seeded that, and on NumPy's
    generators in the dataset that were given a seed. Only `np.random` is
    advanced. If there are none, the seed is drawn from Python's `random`, which
    does not tell whether it was seeded.
    """
    words: list[int] = []
    for bits in _seeded_generators(dataset):
        if bits is _random.get_bit_generator():
            words += _words_of(bits)
            continue
        if (first := _first_draws.get(bits.lock)) is None:
            first = _FirstDraw(_words_of(copy.deepcopy(bits)))
            _first_draws[bits.lock] = first
        words += [*first.words, first.datasets]
        first.datasets += 1
    if not words:
        return random.getrandbits(63)
    sequence = np.random.SeedSequence(words)
    return int(sequence.generate_state(1, np.uint64)[0] >> 1)


def is_repeatable(dataset: Any) -> bool:
    """Returns whether other runs of the program seem to draw the same seed."""
    return bool(_seeded_generators(dataset))


def _seeded_generators(dataset: Any) -> list[Any]:
    """Returns the bit generators of `np.random` and of the dataset."""
    held = [_bits_of(each.generator.value) for each in Search(dataset).held]
    found = [_random.get_bit_generator(), *held]
    return [bits for bits in found if bits is not None and _was_seeded(bits)]


def _words_of(bits: Any) -> list[int]:
    words: list[int] = bits.random_raw(2).tolist()
    return words


def _bits_of(generator: Any) -> Any:
    """Returns the bit generator of a NumPy generator; `None` for others."""
    if isinstance(generator, np.random.RandomState):
        return generator._bit_generator
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator
    return generator if isinstance(generator, np.random.BitGenerator) else None


def _was_seeded(bits: Any) -> bool:
    """Returns whether a bit generator was given a seed, of up to 96 bits."""
    # The functions of old, such as `np.random.seed`, leave no sequence.
    entropy = getattr(getattr(bits, "seed_seq", None), "entropy", None)
    is_drawn = isinstance(entropy, int) and entropy >> _MOST_GIVEN_BITS
    return not is_drawn
