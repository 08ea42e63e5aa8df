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
from collections.abc import Callable
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
_tell_that_random_is_seeded: list[Callable[[], bool]] = []


def trust_random_where(is_seeded: Callable[[], bool]) -> None:
    """Has seeds be drawn from `random` where a function says it is seeded.

    Python's `random` itself does not tell. It is better than `np.random`, which
    builds in threads may advance at any time.
    """
    _tell_that_random_is_seeded[:] = [is_seeded]


def draw_seed(dataset: Any) -> int:
    """Draws a seed below 2**63.

    It depends on `random` if that is known to be seeded, or else on `np.random`
    if the program has seeded that; and on NumPy's generators in the dataset
    that were given a seed. If there are none, the seed is drawn from `random`.
    """
    words: list[int] = []
    if _is_random_seeded():
        words.append(random.getrandbits(63))
    elif _was_seeded(shared := _random.get_bit_generator()):
        words += _words_of(shared)
    for bits in _seeded_in(dataset):
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
    return (
        _is_random_seeded()
        or _was_seeded(_random.get_bit_generator())
        or bool(_seeded_in(dataset))
    )


def _is_random_seeded() -> bool:
    return any(tells() for tells in _tell_that_random_is_seeded)


def _seeded_in(dataset: Any) -> list[Any]:
    """Returns the bit generators of the dataset that were given a seed."""
    held = [each.generator.bits for each in Search(dataset).held]
    return [bits for bits in held if bits is not None and _was_seeded(bits)]


def _words_of(bits: Any) -> list[int]:
    words: list[int] = bits.random_raw(2).tolist()
    return words


def _was_seeded(bits: Any) -> bool:
    """Returns whether a bit generator was given a seed, of up to 96 bits."""
    # The functions of old, such as `np.random.seed`, leave no sequence.
    entropy = getattr(getattr(bits, "seed_seq", None), "entropy", None)
    is_drawn = isinstance(entropy, int) and entropy >> _MOST_GIVEN_BITS
    return not is_drawn
