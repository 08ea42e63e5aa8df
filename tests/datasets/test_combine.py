"""Datasets of datasets."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
from changing_samples import Batches, Hooked, Shuffles
from matrix import assert_exactly_once, in_every_way, same
from places import PLACES, everywhere

import keras_fastdata
from keras_fastdata import (
    ArrayDataset,
    FastPyDataset,
    GeneratorDataset,
    LoaderError,
    SampleDataset,
    accelerate,
    combine,
)
from keras_fastdata.building import interface

pytestmark = pytest.mark.usefixtures("kept_forkserver")


def numbers(*bounds, **kwargs):
    return SampleDataset(range(*bounds), **{"batch_size": 3, **kwargs})


class Noisy(SampleDataset):
    num_samples = 5

    def get_sample(self, index):
        return self.rng.random()


def flat(dataset):
    with dataset:
        return np.concatenate([np.ravel(batch) for batch in dataset]).tolist()


def is_small(number):
    return number % 10 < 5


def add(number, rng=None):
    return number + (100 if rng is None else rng.integers(1000))


# -- samples -----------------------------------------------------------------


@in_every_way
def test_concatenated_samples(place, way):
    make = functools.partial(
        combine.concat, [numbers(4), numbers(4, 20)], batch_size=3
    )
    assert_exactly_once(make, np.asarray, 20, place, way)


@in_every_way
def test_mixed_samples(place, way):
    make = functools.partial(
        combine.mix, [numbers(4), numbers(4, 20)], [1, 4], batch_size=3
    )
    assert_exactly_once(make, np.asarray, 20, place, way)


@in_every_way
def test_mapped_parts_of_samples(place, way):
    def make(shuffle, **kwargs):
        whole = numbers(30, shuffle=shuffle)
        part = combine.skip(combine.take(whole, 25), 5)
        return combine.map(part, lambda n: n - 5, **kwargs)

    assert_exactly_once(make, np.asarray, 20, place, way)


@in_every_way
def test_batches_of_several_datasets(place, way):
    make = functools.partial(
        combine.concat, [Batches(7), Batches(7, 12)], shuffle=None
    )

    def in_order(shuffle, **kwargs):
        return make(**kwargs)

    assert_exactly_once(in_order, np.asarray, 12, place, way)


def test_parts_keep_what_the_dataset_is():
    class Squares(SampleDataset):
        num_samples = 10

        def get_sample(self, index):
            return index**2

    part = combine.take(Squares(batch_size=4, workers=0), 6)
    assert type(part) is Squares
    assert len(part) == 2
    assert flat(part) == [0, 1, 4, 9, 16, 25]
    rows = combine.skip(ArrayDataset(np.arange(9), np.arange(9) % 2), 7)
    same(list(rows), [(np.asarray([7, 8]), np.asarray([1, 0]))])


def test_a_part_is_shuffled_within_itself():
    part = combine.skip(numbers(20, shuffle=True, seed=1, workers=0), 12)
    found = flat(part)
    assert sorted(found) == [*range(12, 20)]
    assert found != sorted(found)


def test_a_part_is_balanced_and_weighted_by_its_own_samples():
    labels = np.arange(20) % 4
    rows = functools.partial(ArrayDataset, np.arange(20), labels, workers=0)
    part = combine.take(rows(sampler="balanced"), 6)
    ((x, y),) = list(part)
    assert np.ptp(np.bincount(y)) <= 1
    assert x.max() < 6
    weights = (np.arange(20) == 3) + 0.0
    ((x, _),) = list(combine.take(rows(sampler=weights), 6))
    assert x.tolist() == [3] * 6
    longest = combine.skip(
        numbers(20, bucket_by=np.arange(20)[::-1], workers=0), 14
    )
    assert flat(longest) == [19, 18, 17, 16, 15, 14]


@pytest.mark.parametrize("shuffle", [False, True])
def test_two_parts_divide_the_samples(shuffle):
    whole = numbers(20, workers=0)
    one, other = combine.split(whole, 0.7, shuffle=shuffle, seed=4)
    found = flat(one), flat(other)
    assert [len(part) for part in found] == [14, 6]
    assert sorted(found[0] + found[1]) == [*range(20)]
    assert (found[0] == [*range(14)]) != shuffle
    again = combine.split(whole, 0.7, shuffle=shuffle, seed=4)
    assert tuple(map(flat, again)) == found


@pytest.mark.parametrize("share", [0.001, 0.999])
def test_each_part_has_a_sample(share):
    parts = combine.split(numbers(5, workers=0), share)
    assert sorted(len(flat(part)) for part in parts) == [1, 4]


def test_a_filter_asks_once_for_each_sample():
    asked = []

    def keep(number):
        asked.append(int(number))
        return number % 3 == 1

    part = combine.filter(numbers(10, workers=0), keep)
    assert flat(part) == flat(part) == [1, 4, 7]
    assert asked == [*range(10)]


def test_what_nothing_is_left_of_is_empty():
    part = combine.filter(numbers(10, workers=0), lambda number: False)
    assert len(part) == 0
    assert list(part) == []


def test_no_samples_of_a_filtered_dataset_are_an_empty_dataset():
    part = combine.filter(numbers(10, workers=0), lambda number: number > 5)
    assert [*combine.take(part, 0)] == [*combine.skip(part, 9)] == []


def test_samples_of_several_datasets_draw_their_own_numbers():
    noisy = Noisy(batch_size=3, seed=1, workers=0)
    found = flat(combine.concat([noisy, noisy]))
    assert len(set(found)) == 10
    assert found == flat(combine.concat([noisy, noisy], batch_size=2))


def test_a_mapped_function_may_draw():
    found = flat(combine.map(numbers(8, seed=3, workers=0), add))
    assert len({n % 7 for n in found}) > 1
    again = combine.map(numbers(8, batch_size=2, seed=3, workers=0), add)
    assert found == flat(again)


def test_a_mix_has_the_arguments_of_its_first_dataset():
    ragged = SampleDataset(
        [np.ones(n) for n in (1, 3)],
        batch_size=2,
        pad_to="longest",
        pad_value=7,
        workers=0,
    )
    (batch,) = combine.concat(
        [combine.take(ragged, 1), combine.skip(ragged, 1)]
    )
    assert batch.tolist() == [[1, 7, 7], [1, 1, 1]]
    given = combine.concat([ragged], batch_size=1, workers=3)
    assert repr(given).count("3 threads") == 1
    given.close()


@everywhere
def test_a_mix_of_shuffled_samples_differs_between_epochs(place):
    members = [numbers(8), numbers(100, 104)]
    make = functools.partial(
        combine.mix, members, [2, 1], shuffle=True, seed=9, batch_size=6
    )
    with make(**PLACES[place]) as dataset:
        epochs = [list(dataset), list(dataset)]
    for epoch in epochs:
        for batch in epoch:
            assert sum(batch >= 100) == 2
    first, second = (np.concatenate(epoch).tolist() for epoch in epochs)
    assert first != second
    assert sorted(first) == [*range(8), *range(100, 104)]


@pytest.mark.backend
def test_fit_does_not_tear_a_mix_apart():
    seen = []

    def noted(sample):
        seen.append(int(sample[1]))
        return sample

    many = SampleDataset([(np.ones(2, "float32"), 0)] * 30, 4, workers=0)
    few = SampleDataset([(np.ones(2, "float32"), 1)] * 10, 4, workers=0)
    dataset = combine.map(combine.mix([many, few], [3, 1]), noted)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(dataset, epochs=2, verbose=0)
    batches = np.asarray(seen[-40:]).reshape(10, 4)
    assert (batches.sum(axis=1) == 1).all()


# -- batches -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "weights"),
    [((5, 5), None), ((5, 2, 5), (1, 2, 1)), ((2, 2, 1, 1), (4, 3, 2, 1))],
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_mix_of_all_has_all_of_those_that_end_together(
    sizes, weights, shuffle
):
    starts = range(0, 100 * len(sizes), 100)
    each = [numbers(s, s + n) for s, n in zip(starts, sizes, strict=True)]
    mixed = combine.mix(each, weights, "all", shuffle=shuffle)
    found = flat(mixed)
    assert set(found) == {number for one in each for number in one.source}
    if weights is None:
        assert len(found) == sum(sizes)


def test_batches_are_mixed_in_proportion():
    members = [Batches(12), Batches(100, 104)]
    with combine.mix(members, [3, 1], workers=0) as dataset:
        found = flat(dataset)
    assert len(found) == 16
    assert [sum(n >= 100 for n in found[k : k + 4]) for k in (0, 4, 8)] == [
        1
    ] * 3
    with combine.mix(members, stop="all", shuffle=True, seed=1) as dataset:
        found = flat(dataset)
    assert {*found} == {*range(12), *range(100, 104)}


def test_a_function_may_get_whole_batches_of_samples():
    shuffled = numbers(9, shuffle=True, seed=1, workers=0)
    with combine.map(shuffled, np.sort, by="batches") as dataset:
        found = list(dataset)
    same(found, [np.sort(batch) for batch in shuffled])
    mixed = combine.mix([numbers(4), numbers(100, 104)], batch_size=4)
    with combine.map(mixed, lambda batch: batch >= 100, by="batches") as rows:
        assert [batch.sum() for batch in rows] == [2, 2]


def test_samples_may_be_combined_by_batches():
    members = [numbers(5, workers=0), numbers(10, 14, batch_size=2)]
    with combine.concat(members, by="batches") as dataset:
        found = [batch.tolist() for batch in dataset]
    assert found == [[0, 1, 2], [3, 4], [10, 11], [12, 13]]


def test_parts_of_batches():
    with combine.skip(Batches(9, workers=0), 6) as dataset:
        assert flat(dataset) == [6, 7, 8]
    kept = combine.filter(Batches(20, workers=0), lambda b: is_small(b[0]))
    assert flat(kept) == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
    assert flat(combine.map(Batches(3, workers=0), add)) != [0, 1, 2]


@everywhere
def test_hooks_of_the_datasets_are_called(place):
    hooked = Hooked(**PLACES[place])
    model = keras.Sequential([keras.layers.Lambda(lambda x: x)])
    model.compile("sgd", "mse")
    with combine.concat([hooked, Batches(3)], **PLACES[place]) as dataset:
        dataset.on_epoch_begin()
        first = next(iter(dataset))
    assert first[1] == 1
    assert first[2] >= 1


@pytest.mark.parametrize("make", [combine.concat, combine.map])
def test_hooks_of_the_datasets_reach_workers_and_resumed_epochs(make):
    def of(dataset):
        dataset.on_epoch_begin()
        batches = [batch.tolist() for batch in dataset]
        dataset.on_epoch_end()
        return batches

    def made(place):
        each = Shuffles()
        args = ([each],) if make is combine.concat else (each, np.asarray)
        return make(*args, seed=1, **PLACES[place])

    with made("inline") as dataset:
        expected = [of(dataset) for _ in range(3)]
    assert [batches[0][1] for batches in expected] == [1, 2, 3]
    assert expected[1] != [[number, 2] for number in range(4)]
    with made("2 processes") as dataset:
        assert [of(dataset) for _ in range(2)] == expected[:2]
        dataset.on_epoch_begin()
        first = next(iter(dataset)).tolist()
        state = dataset.state_dict()
    with made("2 processes") as dataset:
        dataset.load_state_dict(state)
        assert [first, *of(dataset)] == expected[2]


@pytest.mark.parametrize(
    "settings",
    [PLACES["2 processes"], {"cache": "memory"}, {"cache": "folder"}],
    ids=["processes", "memory", "folder"],
)
@pytest.mark.parametrize(
    "make",
    [
        lambda one, **kwargs: combine.concat([one], **kwargs),
        lambda one, **kwargs: combine.concat([one], by="batches", **kwargs),
        lambda one, **kwargs: combine.map(one, abs, **kwargs),
        lambda one, **kwargs: combine.map(
            combine.mix([one]), abs, by="batches", **kwargs
        ),
        # A part is a copy of the mapped dataset, beside it.
        lambda one, **kwargs: combine.take(combine.map(one, abs, **kwargs), 6),
    ],
    ids=["concat", "batches", "map", "nested", "part"],
)
def test_an_assignment_to_a_dataset_within_is_noticed(make, settings, tmp_path):
    if settings.get("cache") == "folder":
        settings = {"cache": str(tmp_path), "cache_version": 1}
    one = numbers(6)
    with make(one, **settings) as dataset:
        before = [batch.tolist() for batch in dataset]
        one.source = range(10, 16)
        after = [batch.tolist() for batch in dataset]
        assert [batch.tolist() for batch in dataset] == after
    assert before == [[0, 1, 2], [3, 4, 5]]
    assert after == [[10, 11, 12], [13, 14, 15]]


def test_a_dataset_within_says_that_it_was_edited_in_place():
    source = [1, 2, 3]
    one = SampleDataset(source)
    with combine.map(one, abs, cache="memory") as dataset:
        assert flat(dataset) == [1, 2, 3]
        source[0] = -5
        one.mark_changed()
        assert flat(dataset) == [5, 2, 3]


class Counted(SampleDataset):
    num_samples = 6
    built = 0

    def get_sample(self, index):
        self.built += 1
        return index


def test_what_builds_assign_to_a_dataset_within_is_no_change():
    one = Counted(batch_size=3)
    flat(one)  # it has a loader of its own
    with combine.map(one, abs, workers=1, cache="memory") as dataset:
        assert len(list(dataset)) == 2
        built = one.built
        assert len(list(dataset)) == 2
        assert one.built == built


def streamed(**kwargs):
    return GeneratorDataset(lambda: iter(range(6)), 2, num_batches=3, **kwargs)


@pytest.mark.parametrize("workers", [2, "auto"])
def test_batches_of_streams_are_combined_by_one_worker(workers):
    with pytest.raises(ValueError, match="`workers` must be 0 or 1"):
        combine.map(streamed(), abs, workers=workers)
    nested = combine.concat([Batches(2), combine.concat([streamed()])])
    with pytest.raises(ValueError, match=r"combine\.concat has its batches"):
        combine.concat([nested], workers=workers)


def test_a_stream_within_ends_its_worker_when_it_is_collected():
    # Its thread meets the end of the data, which nobody asks for.
    assert flat(combine.map(streamed(), abs, workers=1)) == [*range(6)]


def test_what_has_a_stream_that_goes_on_has_no_state():
    dataset = combine.concat([combine.concat([streamed(restart=False)])])
    with dataset, pytest.raises(LoaderError, match="`restart=True`"):
        dataset.state_dict()
    with combine.concat([streamed()]) as dataset:
        assert dataset.state_dict()["position"] == 0


def test_a_combined_dataset_has_the_hooks_that_it_calls():
    overrides = functools.partial(
        interface.overrides, combine.concat([Hooked(), Batches(3)])
    )
    assert overrides("on_epoch_begin")
    assert overrides("on_worker_start")
    assert not overrides("on_epoch_end")
    assert not interface.overrides(
        combine.concat([Batches(3)]), "on_epoch_begin"
    )


def test_a_sequence_of_keras_is_taken_after_accelerate():
    class Plain:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return np.asarray([index])

    with pytest.raises(TypeError, match=r"accelerate\(\.\.\.\)"):
        combine.concat([Plain()])
    assert flat(combine.concat([accelerate(Plain(), workers=0)])) == [0, 1]


@pytest.mark.parametrize(
    "weights", [[1e-300, 1e300], [5e-324, 1e308], [1e-20, 1]]
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_dataset_of_next_to_no_weight_hardly_comes(weights, shuffle):
    pair = [numbers(3), numbers(10, 13)]
    mixed = combine.mix(pair, weights, shuffle=shuffle)
    assert sorted(flat(mixed)) == [10, 11, 12]
    assert min(flat(combine.mix(pair, weights, 9, shuffle=shuffle))) == 10
    with pytest.raises(ValueError, match="number 0 of `datasets`"):
        combine.mix(pair, weights, "all", shuffle=shuffle)


def test_huge_weights_have_a_sum():
    pair = [numbers(2), numbers(10, 12)]
    assert flat(combine.mix(pair, [1e308, 1e308])) == [0, 10, 1, 11]


# -- what cannot be meant ----------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: combine.concat([]), TypeError, "at least one"),
        (lambda: combine.concat(numbers(3)), TypeError, "a list"),
        (
            lambda: combine.concat([Batches(2)], by="samples"),
            ValueError,
            r"Batches has no samples.*by=\"batches\"",
        ),
        (
            lambda: combine.mix([numbers(3)], [1, 2]),
            ValueError,
            "2 numbers for 1 datasets",
        ),
        (
            lambda: combine.mix([numbers(3), numbers(3)], [1, 0]),
            ValueError,
            "above 0",
        ),
        (
            lambda: combine.mix([numbers(3), numbers(0)]),
            ValueError,
            "Number 1 of `datasets` is empty",
        ),
        (lambda: combine.mix([numbers(3)], stop="never"), ValueError, "never"),
        (lambda: combine.mix([numbers(3)], stop=0), ValueError, "at least 1"),
        (
            lambda: combine.take(combine.mix([numbers(3)]), 2),
            ValueError,
            "A mix has no parts",
        ),
        (
            lambda: combine.concat([combine.mix([numbers(3)]), numbers(3)]),
            ValueError,
            r"the proportions would be lost.*by=\"batches\"",
        ),
        (
            lambda: combine.map(numbers(3), add, shuffle=True),
            TypeError,
            "pass `shuffle` to that dataset",
        ),
        (lambda: combine.take(numbers(3), -1), ValueError, "at least 0"),
        (lambda: combine.split(numbers(3), 1), ValueError, "between 0 and 1"),
        (lambda: combine.split(numbers(1), 0.5), ValueError, "at least 2"),
    ],
)
def test_what_cannot_be_combined_is_refused(make, error, said):
    with pytest.raises(error, match=said):
        make()


def test_a_dataset_without_end_has_no_parts():
    class Endless(FastPyDataset):
        num_batches = None

        def __getitem__(self, index):
            return np.asarray([index])

    with pytest.raises(ValueError, match="does not know how many"):
        combine.take(Endless(), 3)


def test_a_dataset_goes_by_the_name_of_its_function():
    mixed = combine.mix([numbers(6)], workers=2)
    assert repr(mixed) == "<combine.mix: 2 batches; 2 threads>"
    assert repr(combine.take(Batches(3), 2)).startswith("<combine.take")
    assert repr(combine.take(numbers(6), 2)).startswith("<SampleDataset")
    report = keras_fastdata.profile(
        combine.map(mixed, lambda batch: batch, workers=0), seconds=0.2
    )
    assert "SampleDataset" not in str(report)


def test_the_module_is_there_without_its_import():
    assert keras_fastdata.combine is combine


# -- parts of what a function made -------------------------------------------


def doubled(number):
    return 2 * number


def test_what_a_function_made_has_parts():
    made = combine.map(combine.skip(numbers(10), 2), doubled)
    assert flat(combine.take(made, 3)) == [4, 6, 8]
    assert flat(combine.skip(made, 5)) == [14, 16, 18]
    assert flat(combine.filter(made, is_small)) == [4, 10, 12, 14]
    one, other = combine.split(made, 0.5, shuffle=True)
    assert sorted(flat(one) + flat(other)) == flat(made)
    assert len(flat(one)) == 4
    assert flat(combine.concat([combine.take(made, 2), made])) == [
        *(4, 6),
        *range(4, 20, 2),
    ]


def test_a_part_of_what_a_function_made_is_balanced_by_its_own_samples():
    labels = np.repeat([0, 1, 2], [6, 4, 2])
    dataset = ArrayDataset(
        np.arange(12), labels, batch_size=4, sampler="balanced"
    )
    part = combine.take(combine.map(dataset, lambda pair: pair[1]), 10)
    found = flat(part)
    assert sorted(found) == [0] * 5 + [1] * 5


def test_combined_samples_are_stacked_by_the_first_datasets_collate():
    one = numbers(5, collate=lambda samples: -np.asarray(samples))
    expected = [0, -2, -4, -6, -8]
    assert flat(combine.map(one, doubled)) == expected
    assert flat(combine.concat([one, one])) == [0, -1, -2, -3, -4] * 2


def test_combined_rows_are_padded_by_the_names_of_their_columns():
    rows = [{"t": np.arange(1, n + 1), "y": n} for n in (1, 3)]
    first = SampleDataset(rows, label="y", pad_to={"t": "longest"})
    for made in combine.concat([first]), combine.map(first, lambda row: row):
        same(made[0], first[0])
    only = SampleDataset(rows, columns="t", label="y", pad_to={"t": "longest"})
    same(combine.concat([only])[0], only[0])
    (x, _) = combine.concat([first], truncate=2, mask="mask")[0]
    assert x["t"].tolist() == [[1, 0], [1, 2]]
    assert x["mask"].tolist() == [[True, False], [True, True]]
