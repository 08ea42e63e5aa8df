"""Draws the seed of a dataset to which the program gave none.

A program that seeds its random generators expects the same batches in each run.
The package gives these generators other seeds. It derives those from the seed
of the dataset, and the seed of the dataset from what the program has seeded.
What a generator in the dataset was seeded with counts for such generators only:
two datasets with `default_rng(3)` still draw different noise from `np.random`.
"""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_fastdata.building import build_context, global_rng, seeding
from keras_fastdata.building.generator_wrappers import was_given_seed
from keras_fastdata.building.held_generators import Search

_random: Any = np.random  # its type stubs lack the function used here

_LEAST_OF_TORCH = 1 << 32  # of seeds that PyTorch draws, but for 1 in 2**21

# By the owner of a generator: how many datasets have drawn a seed from it.
_times_drawn: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_drawn_in_handlers = itertools.count()  # numbers such seeds
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
    further parts if there are generators of NumPy that were given a seed: for
    these alone, and from these. Those in globals, which all datasets draw from,
    do not change the part for those that the dataset has.
    """
    own_words: list[int] = []
    outside_words: list[int] = []
    search = Search(dataset)
    for held in search.held:
        if held.is_seeded:
            state = search.firsts[held.path].state
            times = _times_drawn.get(owner := held.generator.owner, 0)
            words = outside_words if held.is_outside else own_words
            words += [int.from_bytes(state), times]
            _times_drawn[owner] = times + 1
    own = _own_part()
    global_rng.note_seed_drawn()
    if not own_words and not outside_words:
        return own
    return seeding.joined(own, _mixed(own_words), _mixed(outside_words))


def is_repeatable() -> bool:
    """Returns whether other runs of the program seem to draw the same seed."""
    return (
        _is_random_seeded()
        or was_given_seed(_random.get_bit_generator())
        or _seeded_torch() is not None
    )


def _own_part() -> int:
    """Draws a seed from the generators that all datasets share."""
    if not build_context.has_interrupted_a_build():
        return _draw_own_part()
    with global_rng.preserved_globals():  # the build goes on to draw from them
        return _mixed([_draw_own_part(), next(_drawn_in_handlers)])


def _draw_own_part() -> int:
    if not _is_random_seeded():
        if was_given_seed(shared := _random.get_bit_generator()):
            return _mixed(shared.random_raw(2).tolist())
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
    """Returns an integer from 1 to 2**63 that depends on all words, or 0."""
    if not words:
        return 0
    sequence = np.random.SeedSequence(words)
    return 1 + int(sequence.generate_state(1, np.uint64)[0] >> 1)


def _is_random_seeded() -> bool:
    return any(tells() for tells in _tell_that_random_is_seeded)
