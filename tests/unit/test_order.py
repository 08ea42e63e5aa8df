"""Orders of samples, as functions of seed, epoch and position."""

import collections
import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_fastdata.building import build_context
from keras_fastdata.datasets import order as orders


def epoch_of(count, seed=3, number=0):
    context = build_context.Context(seed, number, 0, None)

    def ask(name):
        return getattr(context, name)

    return orders.OrderEpoch(count, None, ask)


def whole(order, count, number=0, step=7):
    """An epoch, asked for in batches."""
    length, epoch = order.length(count), epoch_of(count, number=number)
    found = [
        order.at(np.arange(start, min(start + step, length)), epoch)
        for start in range(0, length, step)
    ]
    return np.concatenate(found).tolist() if found else []


def makers():
    lengths = np.arange(50) % 11
    weights = np.arange(50) % 3 + 0.0
    groups = [range(20), range(20, 50)]
    return {
        "in order": orders.InOrder(),
        "in order, longer": orders.InOrder(120),
        "shuffled": orders.Shuffled(),
        "shuffled, longer": orders.Shuffled(120),
        "in windows": orders.ShuffledInWindows([5, 20, 1, 0, 24], 16),
        "weighted": orders.Weighted(weights, None),
        "weighted once": orders.WeightedOnce(weights, None),
        "mixed": orders.Mixed(groups, [3, 1], "all", True, 50),
        "mixed in order": orders.Mixed(groups, [3, 1], "all", False, 50),
        "buckets": orders.Bucketed(orders.InOrder(), lengths, 4, 3, False),
        "shuffled buckets": orders.Bucketed(
            orders.Shuffled(), lengths, 4, 3, True
        ),
    }


@pytest.mark.parametrize("name", makers())
def test_a_position_has_the_same_sample_however_it_is_asked_for(name):
    order = makers()[name]
    found = whole(order, 50)
    assert found == whole(makers()[name], 50, step=1)
    assert found == whole(pickle.loads(pickle.dumps(order)), 50, step=50)
    last = order.at(np.arange(len(found) - 3, len(found)), epoch_of(50))
    assert found[-3:] == last.tolist()


@pytest.mark.parametrize("name", makers())
def test_epochs_differ_where_the_order_is_random(name):
    order = makers()[name]
    differ = whole(order, 50, 0) != whole(order, 50, 1)
    assert differ == order.is_random


@pytest.mark.parametrize("name", makers())
def test_all_samples_come_once_unless_they_are_drawn_again(name):
    order = makers()[name]
    found = whole(order, 50)
    if name == "weighted once":
        assert sorted(found) == [i for i in range(50) if i % 3]
    elif not order.draws_again:
        assert sorted(found) == [*range(50)]


@pytest.mark.parametrize("order", [orders.InOrder, orders.Shuffled])
def test_a_longer_epoch_has_each_sample_once_before_any_comes_again(order):
    found = whole(order(23), 10)
    assert sorted(found[:10]) == sorted(found[10:20]) == [*range(10)]
    assert len(set(found[20:])) == 3
    if order is orders.Shuffled:
        assert found[:10] != found[10:20]


def test_a_shorter_epoch_has_other_samples_in_each_epoch():
    order = orders.Shuffled(5)
    found = [frozenset(whole(order, 50, number)) for number in range(4)]
    assert len(set(found)) == 4
    assert {len(samples) for samples in found} == {5}


@settings(deadline=None, max_examples=50)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    window=st.integers(1, 60),
)
def test_windows_have_each_sample_once_from_few_parts(lengths, window):
    count = sum(lengths)
    found = whole(orders.ShuffledInWindows(lengths, window), count)
    assert sorted(found) == [*range(count)]
    part_of = np.repeat(np.arange(len(lengths)), lengths)
    # A part is in neighbouring windows only.
    windows = collections.defaultdict(set)
    for position, sample in enumerate(found):
        windows[part_of[sample]].add(position // window)
    for part, inside in windows.items():
        assert max(inside) - min(inside) < len(inside)
        assert len(inside) <= -(-lengths[part] // window) + 1


def test_windows_must_cover_all_samples():
    with pytest.raises(ValueError, match=r"have 5 samples together.* 6"):
        orders.ShuffledInWindows([2, 3], 4).length(6)


def test_draws_without_replacement_favour_heavy_samples():
    weights = np.repeat([1.0, 9.0], 500)
    order = orders.WeightedOnce(weights, 100)
    drawn = [i for n in range(20) for i in whole(order, 1000, n, 100)]
    share = np.mean(np.asarray(drawn) >= 500)
    assert 0.85 < share < 0.93
    assert len(set(whole(order, 1000, 0, 100))) == 100


def test_no_more_samples_are_drawn_once_than_have_weight():
    with pytest.raises(ValueError, match="there are 2 samples"):
        orders.WeightedOnce(np.asarray([1.0, 0, 2]), 3)


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    data=st.data(),
    shuffles=st.booleans(),
)
def test_groups_are_mixed_in_exact_proportion(sizes, data, shuffles):
    weights = data.draw(
        st.lists(st.floats(0.05, 1), min_size=len(sizes), max_size=len(sizes))
    )
    ends = np.cumsum(sizes)
    groups = [range(e - n, e) for e, n in zip(ends, sizes, strict=True)]
    count = int(ends[-1])
    order = orders.Mixed(groups, weights, 200, shuffles, count)
    found = np.asarray(whole(order, count))
    group_of = np.repeat(np.arange(len(sizes)), sizes)[found]
    shares = np.asarray(weights) / np.sum(weights)
    turn = int(np.ceil(1 / shares.min())) if shuffles else 1
    for n in range(turn, 201, turn):
        came = np.bincount(group_of[:n], minlength=len(sizes))
        assert np.abs(came - n * shares).max() <= 2
    # In a group, all samples come before one comes again.
    for number, size in enumerate(sizes):
        mine = found[group_of == number]
        for start in range(0, len(mine) - size + 1, size):
            assert len(set(mine[start : start + size])) == size


@pytest.mark.parametrize("shuffles", [False, True])
def test_a_mix_ends_before_a_sample_comes_twice(shuffles):
    groups = [range(6), range(6, 106)]
    order = orders.Mixed(groups, [0.25, 0.75], "first", shuffles, 106)
    found = whole(order, 106)
    assert len(found) == len(set(found))
    longer = orders.Mixed(groups, [0.25, 0.75], len(found) + 1, False, 106)
    again = whole(longer, 106)
    assert len(again) > len(set(again))
    assert {*range(6)} <= set(found)


@pytest.mark.parametrize("shuffles", [False, True])
def test_a_mix_goes_on_until_each_sample_has_come(shuffles):
    groups = [range(6), range(6, 106)]
    order = orders.Mixed(groups, [0.25, 0.75], "all", shuffles, 106)
    found = whole(order, 106)
    assert set(found) == {*range(106)}
    shorter = orders.Mixed(groups, [0.25, 0.75], len(found) - 1, False, 106)
    assert len(set(whole(shorter, 106))) == 105


def test_a_mix_is_exact_far_into_an_epoch():
    groups = [range(7), range(7, 10)]
    order = orders.Mixed(groups, [0.7, 0.3], 10**12, False, 10)
    start = 10**12 - 1000
    found = order.at(np.arange(start, start + 1000), epoch_of(10))
    assert abs(np.sum(found < 7) - 700) <= 2
    halves = [
        order.at(np.arange(start + k, start + k + 500), epoch_of(10))
        for k in (0, 500)
    ]
    assert np.concatenate(halves).tolist() == found.tolist()


def test_a_thousand_classes_come_in_another_order_each_turn():
    groups = [np.arange(k, 3000, 1000) for k in range(1000)]
    order = orders.Mixed(groups, [1.0] * 1000, 3000, True, 3000)
    found = np.asarray(whole(order, 3000, step=32)) % 1000
    turns = found.reshape(3, 1000)
    assert (np.sort(turns) == np.arange(1000)).all()
    assert (turns[0] != turns[1]).mean() > 0.9


@settings(deadline=None, max_examples=50)
@given(
    lengths=st.lists(st.integers(0, 99), min_size=1, max_size=80),
    batch_size=st.integers(1, 9),
    batches=st.integers(1, 6),
)
def test_a_batch_has_samples_of_similar_length(lengths, batch_size, batches):
    order = orders.Bucketed(
        orders.Shuffled(), np.asarray(lengths), batch_size, batches, True
    )
    count = len(lengths)
    found = whole(order, count)
    assert sorted(found) == [*range(count)]
    window = batch_size * batches
    for start in range(0, count, window):
        inside = found[start : start + window]
        inside = inside[: len(inside) // batch_size * batch_size]
        rows = np.asarray(lengths)[inside].reshape(-1, batch_size)
        rows = rows[np.argsort(rows.min(axis=1), kind="stable")]
        ranges = sorted((row.min(), row.max()) for row in rows)
        for (_, high), (low, _) in itertools.pairwise(ranges):
            assert high <= low
