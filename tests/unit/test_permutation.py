"""The order of an epoch, at any length."""

from __future__ import annotations

import functools
import tracemalloc

import numpy as np
import pytest
from places import FULL, quickly

from keras_fastdata.building.permutation import STORED, Permutation
from keras_fastdata.engine.schedule import plan_epoch

LARGE = 3_000_001


def permutation(length, seed=0):
    return Permutation(length, np.random.SeedSequence(seed))


def whole(length, seed=0):
    return permutation(length, seed).at(np.arange(length))


_LENGTHS = [0, 1, 2, 1000, STORED, STORED + 1]


@pytest.mark.parametrize(
    "length",
    quickly([*_LENGTHS, 2 * STORED, 2 * STORED + 1, LARGE], *_LENGTHS, LARGE),
)
def test_each_item_comes_once(length):
    found = np.zeros(length, bool)
    found[whole(length)] = True
    assert found.all()


@pytest.mark.parametrize("length", [100, LARGE])
def test_items_are_the_same_in_whatever_order_they_are_asked_for(length):
    order, items = permutation(length), whole(length)
    places = [*range(50), length - 1, 0, length // 2, *range(99, 40, -1)]
    assert [order[place] for place in places] == items[places].tolist()
    assert order.at(np.array(places)).tolist() == items[places].tolist()


@pytest.mark.parametrize("length", [100, LARGE])
@pytest.mark.parametrize(
    "part", [np.s_[3:9], np.s_[:2], np.s_[-5:], np.s_[9:3:-2], np.s_[7:7]]
)
def test_a_part_is_an_array_of_its_own(length, part):
    order, items = permutation(length), whole(length)
    for _ in range(2):
        found = order[part]
        assert found.tolist() == items[part].tolist()
        found[:] = 0


@pytest.mark.parametrize("length", [100, LARGE])
@pytest.mark.parametrize("beyond", [-1, 0])
def test_there_is_nothing_beyond_the_length(length, beyond):
    position = -1 if beyond else length
    with pytest.raises(IndexError, match=f"order of {length} items"):
        permutation(length)[position]


def test_epochs_and_seeds_have_orders_of_their_own():
    plans = [
        plan_epoch(LARGE, shuffle=True, seed=seed, epoch=epoch)
        for seed in (1, 2)
        for epoch in (0, 1)
    ]
    heads = {tuple(p.index_at(i) for i in range(20)) for p in plans}
    assert len(heads) == 4
    again = plan_epoch(LARGE, shuffle=True, seed=1, epoch=0)
    assert [again.index_at(i) for i in range(20)] == [
        plans[0].index_at(i) for i in range(20)
    ]


def test_a_billion_batches_take_no_memory():
    tracemalloc.start()
    plan = plan_epoch(10**9, shuffle=True, seed=1, epoch=0)
    items = [plan.index_at(position) for position in range(5000)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(items)) == 5000
    assert max(items) > 9 * 10**8
    assert peak < 1 << 20


# -- is it as random as NumPy's own? ------------------------------------------

LENGTH = STORED + 12_345
SEEDS = range(6 if FULL else 3)


@functools.cache
def by_numpy(seed):
    return np.random.default_rng(seed).permutation(LENGTH)


@functools.cache
def ours(seed):
    return whole(LENGTH, seed)


def uneven(counts):
    """By how many standard deviations counts differ from even ones."""
    expected = counts.sum() / counts.size
    chi = ((counts - expected) ** 2 / expected).sum()
    freedom = counts.size - 1
    return (chi - freedom) / np.sqrt(2 * freedom)


def pairs(a, b, kinds):
    return np.bincount(a * kinds + b, minlength=kinds * kinds)


def where_items_land(items):
    """Regions of positions against regions of items."""
    places = np.arange(LENGTH)
    return uneven(pairs(places * 64 // LENGTH, items * 64 // LENGTH, 64))


def low_bits(items):
    return uneven(pairs(np.arange(LENGTH) % 64, items % 64, 64))


def neighbours(items):
    """Regions of an item and of the next."""
    regions = items * 64 // LENGTH
    return uneven(pairs(regions[:-1], regions[1:], 64))


def neighbours_far_apart(items):
    regions = items * 64 // LENGTH
    return uneven(pairs(regions[:-1024], regions[1024:], 64))


def steps(items):
    """Differences of neighbours, around the length."""
    return uneven(
        np.bincount((np.diff(items) % LENGTH) * 256 // LENGTH, minlength=256)
    )


def ups_and_downs(items):
    """The six orders that three items in a row may have."""
    triples = items[: LENGTH // 3 * 3].reshape(-1, 3)
    return uneven(
        np.bincount(triples.argsort(axis=1) @ [9, 3, 1], minlength=22)[
            [5, 7, 11, 15, 19, 21]
        ]
    )


@pytest.mark.parametrize(
    "draw", [ours, pytest.param(by_numpy, marks=pytest.mark.long)]
)
@pytest.mark.parametrize(
    "measure",
    [
        where_items_land,
        low_bits,
        neighbours,
        neighbours_far_apart,
        steps,
        ups_and_downs,
    ],
)
def test_no_pattern_shows(measure, draw):
    deviations = [measure(draw(seed)) for seed in SEEDS]
    assert max(map(abs, deviations)) < 4.5, deviations
    # Drawn without replacement, places are a little more even than chance.
    assert abs(np.mean(deviations)) < 2.5, deviations


@pytest.mark.parametrize("draw", [by_numpy, ours])
def test_as_many_items_stay_in_their_place_as_chance_has_it(draw):
    stay = sum(int((draw(s) == np.arange(LENGTH)).sum()) for s in SEEDS)
    assert 0 < stay < 3 * len(SEEDS)  # a Poisson number around `len(SEEDS)`
