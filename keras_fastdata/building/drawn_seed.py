"""Draws the seed of a dataset to which the program gave none.

A program that seeds its random generators expects the same batches in each run.
The package gives these generators other seeds. It derives those from the seed
of the dataset, and the seed of the dataset from what the program has seeded.
What a generator in the dataset was seeded with counts for such generators only:
two datasets with `default_rng(3)` still draw different noise from `np.random`.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_fastdata.building import seeding
from keras_fastdata.building.generator_wrappers import (
    GeneratorWrapper,
    was_given_seed,
)
from keras_fastdata.building.held_generators import Search

_random: Any = np.random  # its type stubs lack the function used here

_LEAST_OF_TORCH = 1 << 32  # of seeds that PyTorch draws, but for 1 in 2**21


@dataclasses.dataclass
class _FirstDraw:
    """What a generator gave at first, and to how many datasets."""

    words: list[int]
    datasets: int = 0


# By the owner of a generator. Builds seed the generator anew, at moments that
# depend on the workers.
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
    """Draws the base seed of a dataset.

    It depends on `random` if that is known to be seeded, or else on `np.random`
    or torch if the program has seeded one of them, or else on `random`. It has
    a second part if the dataset has generators of NumPy that were given a seed:
    for these, and from these.
    """
    words: list[int] = []
    for generator in _seeded_in(dataset):
        if (first := _first_draws.get(generator.owner)) is None:
            first = _FirstDraw(_words_of(copy.deepcopy(generator.bits)))
            _first_draws[generator.owner] = first
        words += [*first.words, first.datasets]
        first.datasets += 1
    own = _draw_own_part()
    return seeding.joined(own, _mixed(words)) if words else own


def is_repeatable() -> bool:
    """Returns whether other runs of the program seem to draw the same seed."""
    return (
        _is_random_seeded()
        or was_given_seed(_random.get_bit_generator())
        or _seeded_torch() is not None
    )


def _draw_own_part() -> int:
    if not _is_random_seeded():
        if was_given_seed(shared := _random.get_bit_generator()):
            return _mixed(_words_of(shared))
        if torch := _seeded_torch():
            words = torch.empty(1, dtype=torch.int64, device="cpu").random_()
            return _mixed(words.tolist())
    return random.getrandbits(63)


def _seeded_torch() -> Any:
    """Returns the module `torch` if its generator was given a small seed.

    PyTorch itself draws a seed of 53 bits.
    """
    torch = seeding.loaded_torch()
    is_given = torch is not None and torch.initial_seed() < _LEAST_OF_TORCH
    return torch if is_given else None


def _mixed(words: list[int]) -> int:
    """Returns an integer from 1 to 2**63 that depends on all words."""
    sequence = np.random.SeedSequence(words)
    return 1 + int(sequence.generate_state(1, np.uint64)[0] >> 1)


def _is_random_seeded() -> bool:
    return any(tells() for tells in _tell_that_random_is_seeded)


def _seeded_in(dataset: Any) -> list[GeneratorWrapper]:
    """Returns NumPy's generators in the dataset that were given a seed."""
    return [each.generator for each in Search(dataset).held if each.is_seeded]


def _words_of(bits: Any) -> list[int]:
    words: list[int] = bits.random_raw(2).tolist()
    return words
