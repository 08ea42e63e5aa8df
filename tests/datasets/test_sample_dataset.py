"""Samples: which are in a batch, in which order, drawn how, stacked how."""

from __future__ import annotations

import collections
import functools

import h5py
import keras
import numpy as np
import pytest
from matrix import same
from places import PLACES, everywhere, quickly, somewhere
from sample_samples import (
    Doubling,
    Drawing,
    Failing,
    Rotated,
    Squares,
    halves,
)

from keras_fastdata import GeneratorDataset, SampleDataset, combine
from keras_fastdata._dataset_internals import version_of

pytestmark = pytest.mark.usefixtures("kept_forkserver")


def batches(dataset):
    """One epoch."""
    with dataset:
        return list(dataset)


# -- what is in a batch ------------------------------------------------------


@everywhere
@pytest.mark.parametrize("samples", [0, 1, 5, 12, 13])
def test_batches_are_those_of_a_plain_loop(place, samples):
    found = batches(Squares(samples, batch_size=4, **PLACES[place]))
    wanted = []
    for start in range(0, samples, 4):
        numbers = np.arange(start, min(start + 4, samples))
        x = {"square": numbers**2, "row": np.stack([numbers] * 3, 1) / 2}
        wanted.append((x, numbers % 2 == 0))
    same(found, wanted)


@everywhere
def test_one_batch_for_more_workers_comes_once(place):
    (batch,) = batches(SampleDataset([1, 2, 3], 32, **PLACES[place]))
    assert batch.tolist() == [1, 2, 3]


def test_a_remainder_may_be_left_out():
    dataset = SampleDataset(range(10), 4, drop_remainder=True)
    assert [b.tolist() for b in batches(dataset)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    assert len(SampleDataset(range(3), 4, drop_remainder=True)) == 0


@somewhere
def test_a_source_in_a_file_is_read_by_the_workers(place, tmp_path):
    rows = np.arange(30.0).reshape(10, 3)
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["rows"] = rows
    with h5py.File(tmp_path / "rows.h5") as file:
        dataset = SampleDataset(file["rows"], 4, **PLACES[place])
        np.testing.assert_array_equal(np.concatenate(batches(dataset)), rows)


def test_a_source_that_gives_samples_together_is_asked_for_whole_batches():
    asked = []

    class Source(list):
        def __getitems__(self, indices):
            asked.append(indices)
            return [self[index] for index in indices]

    dataset = SampleDataset(Source(range(5)), 2, workers=0)
    assert [b.tolist() for b in batches(dataset)] == [[0, 1], [2, 3], [4]]
    assert asked == [[0, 1], [2, 3], [4]]


@pytest.mark.backend
@somewhere
def test_a_model_trains_on_samples(place):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with Doubling(20, batch_size=8, shuffle=True, **PLACES[place]) as dataset:
        history = model.fit(dataset, epochs=2, verbose=0)
    assert len(history.history["loss"]) == 2


# -- order -------------------------------------------------------------------


def epochs(count=3, samples=23, **kwargs):
    """The samples of several epochs, in their order."""
    with SampleDataset(range(samples), 4, **kwargs) as dataset:
        return [np.concatenate(list(dataset)).tolist() for _ in range(count)]


@everywhere
def test_a_shuffled_epoch_has_every_sample_once_and_each_its_order(place):
    found = epochs(shuffle=True, seed=3, **PLACES[place])
    for order in found:
        assert sorted(order) == list(range(23))
    assert len(set(map(tuple, [*found, range(23)]))) == 4
    assert found == epochs(shuffle=True, seed=3, workers=0)
    assert found != epochs(shuffle=True, seed=4, workers=0)


def test_the_order_does_not_depend_on_the_size_of_batches():
    orders = []
    for size in (3, 8):
        dataset = SampleDataset(range(20), size, shuffle=True, seed=1)
        orders.append(np.concatenate(batches(dataset)).tolist())
    assert orders[0] == orders[1]


@pytest.mark.backend
@pytest.mark.parametrize("shuffle", [True, False])
def test_fit_does_not_shuffle_what_shuffles_itself(shuffle):
    seen = []
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    dataset = SampleDataset(
        [(np.full(1, i, "float32"), i) for i in range(12)],
        4,
        shuffle=shuffle,
        seed=1,
        workers=0,
    )
    inner = dataset.sample_indices
    dataset.sample_indices = lambda index: seen.append(index) or inner(index)
    model.fit(dataset, shuffle=True, verbose=0)
    assert seen[-3:] == [0, 1, 2]


@pytest.mark.parametrize("place", quickly(PLACES, "2 processes"))
def test_weights_draw_samples_in_proportion(place):
    weights = [0, 1, 3, 0] * 1000
    (found,) = epochs(1, 4000, sampler=weights, seed=5, **PLACES[place])
    counts = collections.Counter(index % 4 for index in found)
    assert set(counts) == {1, 2}
    assert 2800 < counts[2] < 3200
    assert len(set(found)) > 1000
    assert found == epochs(1, 4000, sampler=weights, seed=5, workers=0)[0]


def test_weights_draw_anew_each_epoch():
    one, other = epochs(2, sampler=np.ones(23), seed=5, workers=0)
    assert one != other


@everywhere
def test_a_function_may_choose_the_samples(place):
    found = epochs(2, 10, sampler=halves, seed=5, **PLACES[place])
    for order in found:
        assert sorted(order) == sorted([*range(5)] * 2)
    assert found[0] != found[1]
    assert found == epochs(2, 10, sampler=halves, seed=5, workers=0)


@everywhere
def test_a_function_chooses_anew_when_the_dataset_is_changed(place):
    with Rotated(6, batch_size=3, **PLACES[place]) as dataset:
        assert [*dataset.sample_indices(0)] == [0, 1, 2]
        dataset.first = 2
        assert np.concatenate([*dataset]).tolist() == [2, 3, 4, 5, 0, 1]
        assert [*dataset.sample_indices(0)] == [2, 3, 4]
        dataset.first = 4
        assert np.concatenate([*dataset]).tolist() == [4, 5, 0, 1, 2, 3]


def test_a_function_chooses_anew_when_samples_were_added():
    class Growing(SampleDataset):
        num_samples = property(lambda self: len(self.rows))

        def get_sample(self, index):
            return self.rows[index]

    dataset = Growing(
        batch_size=2, sampler=np.random.Generator.permutation, workers=0
    )
    dataset.rows = [0, 1]
    for _ in range(2):
        dataset.sample_indices(0)
    dataset.rows.extend([2, 3])  # which nobody notices
    found = np.concatenate([dataset.sample_indices(k) for k in range(2)])
    assert sorted(found) == [0, 1, 2, 3]


@everywhere
def test_a_function_chooses_anew_for_a_loaded_seed(place):
    make = functools.partial(
        SampleDataset, range(24), 4, sampler=halves, **PLACES[place]
    )
    with make(seed=1) as first, make() as second:
        batches = iter(first)
        next(batches)
        state = first.state_dict()
        next(iter(second))
        second.load_state_dict(state)
        same(list(second), list(batches))


# -- generators --------------------------------------------------------------


@everywhere
def test_what_a_sample_draws_does_not_depend_on_its_batch(place):
    drawn = []
    for size, shuffle in [(3, False), (8, True)]:
        dataset = Drawing(
            20, batch_size=size, shuffle=shuffle, seed=7, **PLACES[place]
        )
        rows = np.concatenate(batches(dataset))
        drawn.append({int(index): tuple(draws) for index, *draws in rows})
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0].values())) == 20


def test_what_a_sample_draws_differs_between_epochs():
    with Drawing(4, batch_size=4, seed=7, workers=0) as dataset:
        (one,), (other,) = list(dataset), list(dataset)
    assert (one[:, 1:] != other[:, 1:]).all()


def test_a_sample_that_is_drawn_twice_draws_differently():
    dataset = Drawing(4, batch_size=4, seed=7, sampler=[0, 0, 1, 0], workers=0)
    (batch,) = batches(dataset)
    assert set(batch[:, 0]) == {2}
    assert len(set(batch[:, 1])) == 4


def test_a_dataset_may_keep_a_generator_of_its_own_under_that_name():
    dataset = Drawing(4, batch_size=4, workers=0)
    dataset.rng = np.random.default_rng(0)
    assert dataset.rng.random() == np.random.default_rng(0).random()


def test_sample_by_hand_has_a_generator_too():
    assert Drawing(4).get_sample(2)[0] == 2


# -- samples that do not fit -------------------------------------------------


MASKED = np.ma.masked_equal([1, 2], 2)
RAGGED = [np.arange(n) for n in (2, 4, 3)]


@pytest.mark.parametrize("pad_to", ["longest", 4, (4,), np.int64(4)])
def test_ragged_samples_are_padded(pad_to):
    (batch,) = batches(SampleDataset(RAGGED, pad_to=pad_to, pad_value=-1))
    assert batch.tolist() == [[0, 1, -1, -1], [0, 1, 2, 3], [0, 1, 2, -1]]


class Column:
    """As one of pandas's: by label, unless it is asked for `iloc`."""

    def __init__(self, values, labels):
        self.iloc = values
        self.labels = labels

    def __len__(self):
        return len(self.iloc)

    def __getitem__(self, label):
        return self.iloc[self.labels.index(label)]

    def to_numpy(self):
        return np.asarray(self.iloc)


class Table(Column):
    columns = ("a",)


def test_a_buffer_that_is_filled_again_is_padded_like_any():
    class Refills(SampleDataset):
        num_samples = 4
        buffer = np.zeros(3, "float32")

        def get_sample(self, index):
            self.buffer[:] = index
            return self.buffer[: 1 + index % 3]

    (batch,) = batches(Refills(pad_to="longest", pad_value=-1))
    assert batch.tolist() == [[0, -1, -1], [1, 1, -1], [2, 2, 2], [3, -1, -1]]


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.1, np.float64(0.1)])
def test_any_number_pads_floats(value):
    samples = [np.ones(n, "float32") for n in (1, 2)]
    (batch,) = batches(SampleDataset(samples, pad_to=2, pad_value=value))
    np.testing.assert_array_equal(batch[0], np.array([1, value], "float32"))


def test_a_column_of_a_table_has_samples_by_position():
    column = Column([10.0, 11.0, 12.0, 13.0], labels=[2, 0, 3, 9])
    (batch,) = batches(SampleDataset(column))
    assert batch.tolist() == [10, 11, 12, 13]


def test_each_part_of_a_sample_is_padded_its_own_way():
    samples = [({"a": np.ones((n, n)), "b": np.ones(2)}, n) for n in (1, 2)]
    pad_to = ({"a": (3, 2), "b": None}, None)
    (batch,) = batches(SampleDataset(samples, pad_to=pad_to))
    x, y = batch
    assert x["a"].shape == (2, 3, 2)
    assert x["a"].sum(axis=(1, 2)).tolist() == [1, 4]
    assert x["b"].shape == (2, 2)
    assert y.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("samples", "kwargs", "said"),
    [
        (RAGGED, {}, r"Sample 1 .* with sample 0: it has shape \(4,\), not"),
        (RAGGED, {"pad_to": 3}, "Sample 1 is longer than `pad_to`"),
        ([(1, 2), (1, 2, 3)], {}, r"it is tuple with \[0, 1, 2\]"),
        ([{"a": 1}, {"b": 1}], {}, r"dict with \['b'\]"),
        ([(0, 1), (0, 0.5)], {}, r"its part \[1\] is float32, not int64"),
        ([np.ones(2), np.ones((2, 1))], {"pad_to": "longest"}, "2 axes, not 1"),
        ([(1, None), (1, 2)], {}, "in place of None"),
        ([np.ones(2)], {"pad_to": (2, 2)}, "2 lengths for an array of shape"),
        ([np.ones((2, 3)), np.ones((2, 2))], {"pad_to": 4}, r"\(2, 2\), not"),
        ([np.ones((2, 2)), np.ones((2, 3))], {"pad_to": 4}, r"\(2, 3\), not"),
        ([[1], [1, 2]], {"pad_to": "longest"}, "A list is a structure"),
        (["a", 1], {}, "it is int64, not <U1"),
        ([{"a": 1}], {"pad_to": {"b": 1}}, r"`pad_to` has \['b'\]"),
        ([(1, 2)], {"pad_to": [1]}, "for 1 parts of a sample"),
        ([1, 2], {"pad_to": "all"}, '"longest", a length'),
        (RAGGED, {"pad_to": 4, "pad_value": 0.5}, "0.5` does not fit"),
        (RAGGED, {"pad_to": "longest", "pad_value": 0.5}, "0.5` does not fit"),
        ([1, np.ma.masked], {}, "Sample 1 has masked values, and a batch has"),
        ([MASKED], {}, r"Sample 0 has masked .* it has 1 of them\. Fill"),
        ([{"x": MASKED}], {"pad_to": "longest"}, r"part \['x'\] has 1 of them"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_samples_that_do_not_fit_are_told_apart(samples, kwargs, said):
    with pytest.raises(ValueError, match=said):
        batches(SampleDataset(samples, workers=0, **kwargs))


@pytest.mark.parametrize(
    "samples",
    [
        [("a", 1), ("bcd", 2)],
        [(1.5, None), (2.5, None)],
        [[np.float64(1)], [np.float64(2)]],
        [collections.OrderedDict(a=True), collections.OrderedDict(a=False)],
        [np.ma.array([1, 2]), np.ma.array([3, 4], mask=[False, False])],
    ],
    ids=["words", "no targets", "lists", "dicts", "masks that hide nothing"],
)
def test_samples_of_all_kinds_are_stacked(samples):
    (batch,) = batches(SampleDataset(samples, workers=0))
    assert str(batch) == str(_stacked(samples))


@pytest.mark.parametrize("last", [b"abc\0", "abc\0"], ids=["bytes", "str"])
def test_texts_keep_the_zeros_they_end_in(last):
    samples = [last[:1], last, last[:0]]
    as_samples = batches(SampleDataset(samples, 2, workers=0))
    as_items = GeneratorDataset(lambda: iter(samples), 2, workers=0)
    assert [batch.tolist() for batch in as_samples] == [
        samples[:2],
        samples[2:],
    ]
    assert [batch.tolist() for batch in as_items] == [samples[:2], samples[2:]]


@pytest.mark.backend
@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="others have no texts"
)
def test_string_tensors_keep_the_zeros_that_texts_end_in():
    import tensorflow as tf

    samples = [(b"abc\0", 4.0), (b"d", 1.0)]

    class Lengths(keras.Model):
        def call(self, x):
            return tf.cast(tf.strings.length(x), tf.float32)

    model = Lengths()
    model.compile(loss="mse")
    with SampleDataset(samples, 2, workers=2) as dataset:
        assert model.evaluate(dataset, verbose=0) == 0


def _stacked(samples):
    first = samples[0]
    if isinstance(first, dict):
        return {k: _stacked([s[k] for s in samples]) for k in first}
    if isinstance(first, (tuple, list)):
        return type(first)(
            _stacked(list(part)) for part in zip(*samples, strict=True)
        )
    if first is None:
        return None
    return np.array(samples, "float32" if type(first) is float else None)


@everywhere
def test_an_exception_names_the_sample(place):
    with pytest.raises(KeyError) as caught:
        batches(Failing(10, batch_size=4, **PLACES[place]))
    assert "In sample 6." in caught.value.__notes__


# -- arguments ---------------------------------------------------------------


class LikeTensorFlows:
    """What a `tf.data.Dataset` is to us."""

    def __iter__(self):
        return iter([1])

    def as_numpy_iterator(self):
        return iter(self)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (
            functools.partial(SampleDataset, "a path"),
            TypeError,
            "Open the file",
        ),
        (
            functools.partial(SampleDataset, iter([1])),
            TypeError,
            r"`GeneratorDataset\(function, batch_size=32\)`\.$",
        ),
        (
            functools.partial(SampleDataset, {1, 2}, 8),
            TypeError,
            r"`GeneratorDataset\(source, batch_size=8\)`\.$",
        ),
        (
            functools.partial(SampleDataset, LikeTensorFlows()),
            TypeError,
            r"`GeneratorDataset\(source, batch_size=32\)`",
        ),
        (
            lambda: len(SampleDataset([1], sampler="balanced")),
            ValueError,
            r"does not know the labels .*np\.bincount\(labels\)\[labels\]`\.$",
        ),
        (functools.partial(SampleDataset, [1], 0), ValueError, "at least 1"),
        (functools.partial(SampleDataset, [1], 2.5), TypeError, "2.5"),
        (
            functools.partial(SampleDataset, [1], shuffle=True, sampler=[1]),
            ValueError,
            "leave out `shuffle`",
        ),
        (
            functools.partial(SampleDataset, [1], sampler=[-1]),
            ValueError,
            "at least 0",
        ),
        (
            functools.partial(SampleDataset, [1], sampler=[[1]]),
            ValueError,
            "for each sample",
        ),
        (
            functools.partial(SampleDataset, [1], sampler="even"),
            TypeError,
            "Received: 'even'",
        ),
        (
            functools.partial(SampleDataset, [1], shuffle_window=8),
            ValueError,
            "needs `shuffle=True`",
        ),
        (
            lambda: len(SampleDataset([1], shuffle=True, shuffle_window=8)),
            ValueError,
            "source of parts",
        ),
        (
            functools.partial(SampleDataset, [1], replacement=False),
            ValueError,
            "needs `sampler`",
        ),
        (
            lambda: len(
                SampleDataset(
                    *([1, 2], 1),
                    sampler=[1, 0],
                    replacement=False,
                    samples_per_epoch=2,
                )
            ),
            ValueError,
            "without replacement there are 1 samples",
        ),
        (
            functools.partial(SampleDataset, Table([1], labels=[0])),
            TypeError,
            "ArrayDataset",
        ),
        (
            functools.partial(SampleDataset, {"a": [1]}),
            TypeError,
            "by key.*ArrayDataset",
        ),
        (
            functools.partial(SampleDataset, (np.ones((9, 2)), np.ones(9)), 4),
            TypeError,
            r"each array of the tuple for one sample.*"
            r"`ArrayDataset\(\*source, batch_size=4\)`\.$",
        ),
        (
            functools.partial(SampleDataset, [1], colour="red"),
            TypeError,
            "colour",
        ),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_what_cannot_be_meant_is_refused(make, error, said):
    with pytest.raises(error, match=said):
        make()


def test_arrays_of_different_axes_are_samples_for_a_function_that_uses_them():
    source = (np.ones((9, 2)), np.ones(9))
    assert SampleDataset(source, transform=np.sum)[0].tolist() == [18, 9]
    assert SampleDataset(source, collate=len)[0] == 2


@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        ([1, 1], "2 weights for 3 samples"),
        (lambda rng, count: [0], "must return 3 indices"),
        (lambda rng, count: [0, 1, 3], "from 0 to 3"),
        (lambda rng, count: np.ones(3), "dtype float64"),
    ],
    ids=["weights", "too few", "beyond", "floats"],
)
def test_a_sampler_that_cannot_be_right_is_told_so(sampler, said):
    with pytest.raises(ValueError, match=said):
        batches(SampleDataset(range(3), sampler=sampler, workers=0))


@pytest.mark.parametrize("missing", ["num_samples", "get_sample"])
def test_a_dataset_without_samples_says_what_is_missing(missing):
    members = {
        "num_samples": 3,
        "get_sample": lambda self, index: index,
    }
    del members[missing]
    kind = type("Half", (SampleDataset,), members)
    with pytest.raises(NotImplementedError, match=missing):
        batches(kind(workers=0))


class Few(list):
    """Loses a sample when asked for several."""

    def __getitems__(self, indices):
        return [self[index] for index in indices[:-1]]


class Many(list):
    def __getitems__(self, indices):
        return [self[index] for index in indices] * 2


@pytest.mark.parametrize(("kind", "gave"), [(Few, "3"), (Many, "more")])
def test_a_source_that_gives_another_number_of_samples_is_told_so(kind, gave):
    with pytest.raises(ValueError, match=f"for 4 samples and gave {gave}"):
        batches(SampleDataset(kind(range(4)), workers=0))


def test_mappings_are_structures_in_any_order_of_their_keys():
    samples = [
        collections.UserDict(a=1, b=2),
        collections.UserDict(b=20, a=10),
    ]
    (batch,) = batches(SampleDataset(samples, workers=0))
    assert {key: part.tolist() for key, part in batch.items()} == {
        "a": [1, 10],
        "b": [2, 20],
    }


def test_a_sample_made_of_others_draws_as_ever():
    class Mixed(Drawing):
        def get_sample(self, index):
            other[0]
            return super().get_sample(index)

    other = Drawing(2, batch_size=1)
    mixed = Mixed(4, batch_size=4, seed=7, workers=0)[0]
    assert mixed.tolist() == Drawing(4, batch_size=4, seed=7)[0].tolist()


def test_the_number_of_samples_may_be_an_attribute():
    class Three(SampleDataset):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.num_samples = 3

        def get_sample(self, index):
            return index

    assert [batch.tolist() for batch in batches(Three(workers=0))] == [
        [0, 1, 2]
    ]


@pytest.mark.parametrize("index", [-1, 2])
def test_there_is_no_batch_beyond(index):
    with pytest.raises(IndexError, match="has 2"):
        SampleDataset(range(7), 3, drop_remainder=True)[index]


def test_a_function_that_chooses_samples_is_asked_again_after_a_change():
    chosen = {"index": 0}
    dataset = SampleDataset(
        range(3),
        sampler=lambda rng, count: [chosen["index"]] * count,
        workers=0,
    )
    assert dataset[0].tolist() == [0, 0, 0]
    chosen["index"] = 2
    dataset.mark_changed()
    assert dataset[0].tolist() == [2, 2, 2]


@pytest.mark.parametrize("cache", [None, "memory"])
@everywhere
@pytest.mark.parametrize("make", [list, np.asarray])
def test_an_edit_of_the_source_shows_in_the_next_epoch(make, place, cache):
    source = make([0.0] * 5)
    inner = SampleDataset(source, 2)
    kinds = PLACES[place]
    outer = SampleDataset(source, 2, cache=cache, **kinds)
    both = combine.concat([inner], cache=cache, **kinds)
    with outer, both:
        for epoch in range(3):
            source[4] = epoch
            for dataset in (outer, both):
                *_, (last,) = dataset
                assert last == epoch


@pytest.mark.parametrize(
    "order",
    [
        {},
        {"shuffle": True},
        {"sampler": np.ones(12)},
        {"bucket_by": [1, 2] * 6},
    ],
    ids=["in order", "shuffled", "weighted", "in buckets"],
)
def test_a_next_epoch_is_no_change_of_the_dataset(order):
    """Else workers would drop what they have built in advance, or keep."""

    class OfScript(Squares):
        """Travels to workers with its code, as a class of a script does."""

    place = {"workers": 1, "use_multiprocessing": True}
    with (
        OfScript(12, batch_size=4, **order, **place) as one,
        combine.concat([one], **place) as joined,
    ):
        for dataset in (one, joined):
            versions = []
            for _ in range(3):
                # `list` would ask for the length first.
                assert sum(1 for _ in dataset) == 3
                versions.append(version_of(dataset))
            assert versions == versions[:1] * 3
