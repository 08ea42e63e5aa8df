"""Which samples an epoch has, as the arguments of the datasets say."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from changing_samples import Growing, Longer, Parts, remainder
from matrix import assert_exactly_once, in_every_way, same
from places import PLACES, everywhere

from keras_fastdata import (
    ArrayDataset,
    ImageFileDataset,
    SampleDataset,
    combine,
)

pytestmark = pytest.mark.usefixtures("kept_forkserver")

LABELS = np.repeat([0, 1, 2], [40, 8, 2])
LENGTHS = np.arange(50) * 7 % 31


def epoch_of(dataset):
    with dataset:
        return np.concatenate([np.ravel(batch) for batch in dataset])


@everywhere
def test_classes_come_equally_often(place):
    dataset = ArrayDataset(
        np.arange(50),
        LABELS,
        None,
        6,
        sampler="balanced",
        seed=1,
        **PLACES[place],
    )
    with dataset:
        batches = list(dataset)
    for _, labels in batches[:-1]:
        assert np.bincount(labels).tolist() == [2, 2, 2]
    x = np.concatenate([x for x, _ in batches])
    assert len(x) == 50
    counts = np.bincount(x, minlength=50)
    assert np.ptp(counts[:40]) == 1
    assert np.ptp(counts[40:48]) <= 1
    with ArrayDataset(
        np.arange(50), LABELS, None, 6, sampler="balanced", seed=1, workers=0
    ) as inline:
        same(batches, list(inline))


def test_classes_come_as_often_as_their_weights_say():
    dataset = ArrayDataset(
        *(LABELS, LABELS, None, 10),
        sampler={0: 0, 2: 4},
        samples_per_epoch=100,
        workers=0,
    )
    with dataset:
        labels = np.concatenate([y for _, y in dataset])
    assert np.bincount(labels).tolist() == [0, 20, 80]


def test_images_know_their_labels(tmp_path):
    dataset = ImageFileDataset(
        *([tmp_path / str(n) for n in range(50)], LABELS),
        decoder=lambda path, size: np.zeros((1, 1, 3), "uint8"),
        sampler="balanced",
        workers=0,
    )
    with dataset:
        labels = np.concatenate([y for _, y in dataset])
    assert np.ptp(np.bincount(labels)) <= 1


def test_a_class_that_does_not_exist_is_refused():
    dataset = ArrayDataset(LABELS, LABELS, sampler={3: 1}, workers=0)
    with pytest.raises(ValueError, match=r"weights for \[3\].*\[0, 1, 2\]"):
        len(dataset)


@pytest.mark.parametrize("y", [None, {"a": LABELS}], ids=["none", "dict"])
def test_rows_without_labels_are_told_what_to_pass(y):
    dataset = ArrayDataset(LABELS, y, sampler="balanced", workers=0)
    with pytest.raises(ValueError, match=r"no `y`.*Pass weights"):
        len(dataset)


def test_one_hot_labels_are_told_what_to_pass():
    dataset = ArrayDataset(LABELS, np.eye(3)[LABELS], sampler="balanced")
    with pytest.raises(ValueError, match=r"shape \(50, 3\); pass weights"):
        len(dataset)


@everywhere
def test_an_epoch_may_be_shorter_or_longer_than_the_data(place):
    for per_epoch in (12, 120):
        dataset = SampleDataset(
            *(range(50), 5),
            shuffle=True,
            samples_per_epoch=per_epoch,
            seed=2,
            **PLACES[place],
        )
        assert len(dataset) == -(-per_epoch // 5)
        found = epoch_of(dataset)
        assert len(found) == per_epoch
        assert np.ptp(np.bincount(found, minlength=50)) == 1


def test_a_sample_that_comes_again_draws_something_else():
    class Drawing(SampleDataset):
        num_samples = 2

        def get_sample(self, index):
            return self.rng.random()

    found = epoch_of(Drawing(batch_size=2, samples_per_epoch=8, workers=0))
    assert len(set(found.tolist())) == 8


def test_weights_may_draw_each_sample_once():
    weights = np.arange(50) % 5
    dataset = SampleDataset(
        range(50), 8, sampler=weights, replacement=False, workers=0
    )
    found = epoch_of(dataset)
    assert sorted(found) == np.flatnonzero(weights).tolist()


def test_a_curriculum_may_depend_on_the_epoch():
    with Growing(batch_size=8, workers=0) as dataset:
        hardest = [np.concatenate([*dataset]).max() for _ in range(5)]
    assert [most // 10 for most in hardest] == [0, 1, 2, 3, 3]


@in_every_way
def test_windows_of_parts(place, way):
    make = functools.partial(SampleDataset, Parts(), 4, shuffle_window=12)
    assert_exactly_once(make, np.asarray, 50, place, way)


@in_every_way
def test_buckets_of_lengths(place, way):
    make = functools.partial(
        SampleDataset, range(50), 4, bucket_by=LENGTHS, bucket_batches=3
    )
    assert_exactly_once(make, np.asarray, 50, place, way)


def test_a_batch_has_similar_lengths():
    samples = [np.zeros(n) for n in LENGTHS]

    def padding(**kwargs):
        dataset = SampleDataset(
            samples, 5, pad_to="longest", shuffle=True, workers=0, **kwargs
        )
        with dataset:
            cells = sum(batch.size for batch in dataset)
        return 1 - LENGTHS.sum() / cells

    assert padding(bucket_by=len) < padding() / 2
    assert padding(bucket_by=LENGTHS) < padding() / 2


def test_a_column_tells_lengths_and_labels():
    pa = pytest.importorskip("pyarrow")
    table = pa.table(
        {
            "tokens": [[1] * n for n in LENGTHS],
            "length": LENGTHS,
            "kind": [["a", "b", "c"][label] for label in LABELS],
        }
    )
    make = functools.partial(
        SampleDataset, table, 5, columns="tokens", pad_to="longest", workers=0
    )
    by_lists = make(shuffle=True, seed=1, bucket_by="tokens")
    by_numbers = make(shuffle=True, seed=1, bucket_by="length")
    same(list(by_lists), list(by_numbers))
    with make(label="kind", sampler="balanced") as dataset:
        kinds = np.concatenate([y for _, y in dataset])
    assert np.ptp(np.unique(kinds, return_counts=True)[1]) <= 1
    with pytest.raises(ValueError, match="'size'"):
        len(make(bucket_by="size"))


def test_a_list_has_no_column_of_lengths():
    with pytest.raises(ValueError, match="are no rows of a table"):
        len(SampleDataset(range(3), bucket_by="length"))


def test_classes_are_those_of_the_labels_that_a_dataset_was_given_later():
    dataset = ArrayDataset(LABELS, LABELS, sampler="balanced", workers=0)
    list(dataset)
    dataset.y = LABELS % 2
    with dataset:
        labels = np.concatenate([y for _, y in dataset])
    assert np.bincount(labels).tolist() == [25, 25]


def test_a_function_of_lengths_is_called_once_for_each_sample():
    asked = []

    def length(sample):
        asked.append(sample)
        return sample

    with SampleDataset(range(9), 2, bucket_by=length, workers=0) as dataset:
        for _ in range(2):
            list(dataset)
    assert asked == [*range(9)]


def _cut(sample, rng):
    """Returns a part of a sample, of random length."""
    return np.full(int(rng.integers(1, 20)), sample)


def _cut_samples(**kwargs):
    return SampleDataset(
        range(45),
        8,
        shuffle=True,
        bucket_by=len,
        transform=_cut,
        pad_to=20,
        **kwargs,
    )


@pytest.mark.parametrize("place", ["inline", "2 processes"])
def test_random_lengths_do_not_depend_on_when_they_are_asked_for(place):
    with _cut_samples(seed=1, **PLACES[place]) as dataset:
        expected = [list(dataset) for _ in range(3)]
    with _cut_samples(seed=1, **PLACES[place]) as dataset:
        dataset.rng.normal()
        same(expected[0], list(dataset))
        dataset.mark_changed()
        batches = iter(dataset)
        next(batches)
        state = dataset.state_dict()
    for kwargs in {"seed": 1}, {}:
        with _cut_samples(**kwargs, **PLACES[place]) as dataset:
            len(dataset)
            dataset.load_state_dict(state)
            same(expected[1][1:], list(dataset))
            same(expected[2], list(dataset))


@pytest.mark.parametrize(
    ("bucket_by", "said"),
    [
        ([1, 2], "2 lengths in `bucket_by` for 3 samples"),
        ([[1], [1, 2], []], "must be a length for each sample"),
        (["a", "b", "c"], "a length for each sample"),
        (str, "a length for each sample"),
    ],
    ids=["too few", "lists", "texts", "function"],
)
def test_lengths_that_cannot_be_right_are_refused(bucket_by, said):
    with pytest.raises(ValueError, match=said):
        len(SampleDataset(range(3), bucket_by=bucket_by))


def test_rows_have_no_function_of_lengths():
    with pytest.raises(ValueError, match="an array with a length"):
        len(ArrayDataset(np.ones(3), bucket_by=len))


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"samples_per_epoch": 0}, "at least 1"),
        ({"bucket_batches": 0}, "at least 1"),
        (
            {"shuffle": True, "shuffle_window": 4, "samples_per_epoch": 4},
            "no `sampler` or `samples_per_epoch`",
        ),
        ({"sampler": {"a": -1}}, "at least 0"),
        ({"sampler": {}}, "not all 0"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be_meant_are_refused(kwargs, said):
    with pytest.raises(ValueError, match=said):
        SampleDataset(range(3), **kwargs)


def test_batches_in_buckets_can_be_cached():
    dataset = SampleDataset(
        range(9), 2, bucket_by=LENGTHS[:9], cache="memory", workers=0
    )
    with dataset:
        same(list(dataset), list(dataset))


def test_a_part_has_some_of_the_classes_that_weights_are_for():
    labels = np.repeat([0, 1, 2], 2)
    dataset = ArrayDataset(np.arange(6), labels, sampler={0: 0, 2: 3})
    (batch,) = combine.skip(dataset, 4)
    assert set(batch[0].tolist()) == {4, 5}
    (batch,) = combine.take(dataset, 4)
    assert set(batch[0].tolist()) == {2, 3}
    with pytest.raises(ValueError, match="have the weight 0"):
        len(combine.take(dataset, 2))
    weighted = ArrayDataset(np.arange(2), sampler=[0, 1])
    with pytest.raises(ValueError, match="have the weight 0"):
        len(combine.take(weighted, 1))


@pytest.mark.parametrize("sampler", ["balanced", {1: 2.0}, [1, 1]])
def test_an_empty_part_has_no_batch(sampler):
    dataset = ArrayDataset(
        np.arange(2), np.arange(2), sampler=sampler, samples_per_epoch=4
    )
    assert list(combine.take(dataset, 0)) == []


@pytest.mark.parametrize("place", ["inline", "processes"])
def test_buckets_follow_a_dataset_that_changes(place):
    kwargs = {"processes": {"workers": 2, "use_multiprocessing": True}}
    with Longer(
        batch_size=2, bucket_by=remainder, **kwargs.get(place, {})
    ) as dataset:
        assert len(dataset) == 4  # the order is known before the first epoch
        dataset.batch_size = 3
        for size, count in (3, 7), (4, 10), (5, 13):
            batches = [batch.tolist() for batch in dataset]
            assert sorted(np.concatenate(batches)) == list(range(count))
            for batch in batches[: count // size]:
                lengths = [remainder(number) for number in batch]
                assert lengths == sorted(lengths)
            assert batches[0][:2] == [0, 4]
            dataset.on_epoch_end()


@everywhere
@pytest.mark.parametrize("make", [list, np.asarray])
def test_later_edits_of_lengths_and_weights_change_no_order(make, place):
    lengths, weights = make([3, 1, 2, 0]), np.array([1.0, 0, 0, 0])
    source = [0, 1, 2, 3]
    bucketed = SampleDataset(
        source, 2, seed=1, bucket_by=lengths, **PLACES[place]
    )
    weighted = SampleDataset(source, 2, sampler=weights, **PLACES[place])
    with bucketed, weighted:
        before = [batch.tolist() for batch in bucketed]
        lengths[:] = [0, 1, 2, 3]
        weights[:] = [0, 0, 0, 1]
        assert [batch.tolist() for batch in bucketed] == before
        assert [batch.tolist() for batch in weighted] == [[0, 0]] * 2
