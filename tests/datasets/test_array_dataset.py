"""Rows of arrays, in memory and in files."""

from __future__ import annotations

import collections
import functools
import tracemalloc

import h5py
import keras
import numpy as np
import pytest
import scipy.sparse
from array_samples import Doubling, doubled, jittered
from places import PLACES, everywhere, somewhere

from keras_fastdata import ArrayDataset

pytestmark = pytest.mark.usefixtures("kept_forkserver")

ROWS = np.random.default_rng(0).normal(size=(50, 4)).astype("float32")
LABELS = np.arange(50)


class Frame:
    """What pandas, polars and pyarrow have in common."""

    def __init__(self, values):
        self._values = values

    def to_numpy(self):
        return self._values


@pytest.fixture(params=["array", "map", "fortran", "hdf5", "chunked hdf5"])
def stored(request, tmp_path):
    """`ROWS`, in memory or in a file."""
    match request.param:
        case "array":
            yield ROWS
        case "map":
            np.save(tmp_path / "rows.npy", ROWS)
            yield np.load(tmp_path / "rows.npy", mmap_mode="r")
        case "fortran":
            yield np.asfortranarray(ROWS)
        case _:
            chunks = (7, 2) if "chunked" in request.param else None
            with h5py.File(tmp_path / "rows.h5", "w") as file:
                file.create_dataset("rows", data=ROWS, chunks=chunks)
            with h5py.File(tmp_path / "rows.h5") as file:
                yield file["rows"]


def epoch(dataset):
    """The rows and labels of one epoch."""
    with dataset:
        batches = list(dataset)
    for x, y in batches:
        assert x.dtype == "float32"
        assert len(x) == len(y)
    return [np.concatenate(part) for part in zip(*batches, strict=True)]


@everywhere
def test_batches_are_slices(place, stored):
    dataset = ArrayDataset(stored, LABELS, batch_size=8, **PLACES[place])
    assert len(dataset) == 7
    with dataset:
        for number, (x, y) in enumerate(dataset):
            start = 8 * number
            np.testing.assert_array_equal(x, ROWS[start : start + 8])
            assert y.tolist() == LABELS[start : start + 8].tolist()


@somewhere
@pytest.mark.parametrize("how", ["shuffle", "weights"])
def test_rows_and_labels_stay_together_in_any_order(place, stored, how):
    order = {"shuffle": {"shuffle": True}, "weights": {"sampler": LABELS}}[how]
    x, y = epoch(
        ArrayDataset(
            stored, LABELS, batch_size=8, seed=1, **order, **PLACES[place]
        )
    )
    np.testing.assert_array_equal(x, ROWS[y])
    assert len(y) == 50
    assert (sorted(y) == LABELS).all() == (how == "shuffle")
    assert y.tolist() != LABELS.tolist()


@everywhere
@pytest.mark.parametrize("rows", [0, 1, 8, 9])
def test_any_number_of_rows_makes_its_batches(place, rows):
    dataset = ArrayDataset(ROWS[:rows], batch_size=8, **PLACES[place])
    with dataset:
        found = [len(batch) for batch in dataset]
    assert found == [8] * (rows // 8) + [rows % 8] * bool(rows % 8)


def test_a_remainder_may_be_left_out():
    dataset = ArrayDataset(ROWS, batch_size=8, drop_remainder=True)
    with dataset:
        assert [len(batch) for batch in dataset] == [8] * 6


def test_structures_stay_what_they_are():
    x = {"a": ROWS, "b": [ROWS, (LABELS,)]}
    with ArrayDataset(x, [LABELS, ROWS], LABELS, batch_size=10) as dataset:
        inputs, targets, weights = next(iter(dataset))
    keras.tree.assert_same_structure(x, inputs)
    np.testing.assert_array_equal(inputs["b"][0], ROWS[:10])
    assert targets[0].tolist() == weights.tolist() == LABELS[:10].tolist()


@pytest.mark.parametrize(
    "leaf",
    [
        Frame(ROWS),
        Frame(LABELS),
        np.array([f"word {n}" for n in LABELS]),
        np.array([{n} for n in LABELS]),
        LABELS.astype(">i4"),
        LABELS.astype("M8[s]"),
        np.ma.masked_array(LABELS, LABELS > 40),
        keras.ops.convert_to_tensor(ROWS),
    ],
    ids=lambda leaf: type(leaf).__name__,
)
@pytest.mark.parametrize("shuffle", [True, False])
def test_arrays_of_all_kinds_are_taken(leaf, shuffle):
    if hasattr(leaf, "to_numpy"):
        plain = leaf.to_numpy()
    elif isinstance(leaf, np.ndarray):
        plain = leaf
    else:
        plain = keras.ops.convert_to_numpy(leaf)
    dataset = ArrayDataset(
        leaf, LABELS, batch_size=20, shuffle=shuffle, workers=0
    )
    for found, indices in dataset:
        assert found.dtype == plain.dtype
        np.testing.assert_array_equal(found, plain[indices])


@everywhere
def test_a_transform_gets_the_parts_of_a_batch(place):
    found = epoch(
        ArrayDataset(
            ROWS, LABELS, batch_size=8, transform=doubled, **PLACES[place]
        )
    )
    np.testing.assert_array_equal(found[0], 2 * ROWS)
    np.testing.assert_array_equal(found[1], LABELS)


@somewhere
def test_a_transform_may_write_to_its_arguments_and_draw(place):
    rows = ROWS.copy()
    found = epoch(
        ArrayDataset(
            rows,
            LABELS,
            batch_size=8,
            transform=jittered,
            seed=1,
            **PLACES[place],
        )
    )
    inline = epoch(
        ArrayDataset(
            rows, LABELS, batch_size=8, transform=jittered, seed=1, workers=0
        )
    )
    np.testing.assert_array_equal(found[0], inline[0])
    assert (found[0] != ROWS).all()
    np.testing.assert_array_equal(rows, ROWS)


def test_a_batch_is_not_the_arrays_own_memory():
    rows = ROWS.copy()
    with ArrayDataset(rows, batch_size=8, workers=0) as dataset:
        for batch in dataset:
            batch[:] = 0
    np.testing.assert_array_equal(rows, ROWS)


def test_rows_of_a_file_are_asked_for_in_ascending_order_once_each():
    asked = []

    class File:
        shape, dtype = ROWS.shape, ROWS.dtype

        def __len__(self):
            return len(ROWS)

        def __getitem__(self, rows):
            asked.append(rows)
            return ROWS[rows]

    weights = np.zeros(50)
    weights[[3, 7, 9]] = 1
    x, y = epoch(
        ArrayDataset(
            File(),
            LABELS,
            batch_size=25,
            sampler=weights,
            seed=0,
            workers=0,
        )
    )
    np.testing.assert_array_equal(x, ROWS[y])
    for rows in asked:
        assert rows.tolist() == [3, 7, 9]
    assert len(asked) == 2


@pytest.mark.backend
@somewhere
def test_a_model_trains_on_arrays_with_weights(place):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    dataset = ArrayDataset(
        ROWS, LABELS, np.ones(50), 8, shuffle=True, **PLACES[place]
    )
    with dataset:
        history = model.fit(dataset, epochs=2, verbose=0)
        predictions = model.predict(
            ArrayDataset(ROWS, batch_size=8, workers=0), verbose=0
        )
    assert len(history.history["loss"]) == 2
    assert predictions.shape == (50, 1)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (
            functools.partial(ArrayDataset, ROWS, LABELS[:3]),
            ValueError,
            "50 in `x`, 3 in `y`",
        ),
        (functools.partial(ArrayDataset, 3), TypeError, "has no rows"),
        (functools.partial(ArrayDataset, None, LABELS), TypeError, "`x` must"),
        (functools.partial(ArrayDataset, []), ValueError, "no array"),
        (
            functools.partial(ArrayDataset, ROWS, None, LABELS),
            ValueError,
            "needs `y`",
        ),
        (
            functools.partial(ArrayDataset, ROWS, transform=3),
            TypeError,
            "must be a function",
        ),
        (functools.partial(ArrayDataset, ROWS, batch_size=0), ValueError, "1"),
        (functools.partial(ArrayDataset, ROWS, shuffle="no"), TypeError, "no"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_what_cannot_be_meant_is_refused(make, error, said):
    with pytest.raises(error, match=said):
        make()


@pytest.mark.parametrize(
    "rows",
    [
        np.asfortranarray(ROWS),
        np.repeat(ROWS, 2, axis=1)[:, ::2],
        np.repeat(ROWS, 2, axis=0)[::2],
        np.frombuffer(b"x" + ROWS.tobytes(), "f4", 200, 1).reshape(50, 4),
    ],
    ids=["fortran", "columns", "every other", "misaligned"],
)
def test_no_more_is_copied_than_a_batch(rows):
    large = np.lib.stride_tricks.as_strided(
        rows, (100_000, 4), (0, rows.strides[1]), writeable=False
    )
    dataset = ArrayDataset(large, batch_size=10, shuffle=True, workers=0)
    dataset[0]
    tracemalloc.start()
    try:
        np.testing.assert_array_equal(dataset[1], np.stack([rows[0]] * 10))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


class Backwards(ArrayDataset):
    """Has an order of its own."""

    def sample_indices(self, index):
        return 49 - super().sample_indices(index)


class Beyond(ArrayDataset):
    def sample_indices(self, index):
        return super().sample_indices(index) + 1


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_subclass_may_choose_the_rows(shuffle):
    x, y = epoch(
        Backwards(ROWS, LABELS, batch_size=8, shuffle=shuffle, workers=0)
    )
    np.testing.assert_array_equal(x, ROWS[y])
    assert shuffle or y.tolist() == LABELS[::-1].tolist()
    with pytest.raises(IndexError, match="there are 50"):
        epoch(Beyond(ROWS, LABELS, batch_size=8, shuffle=shuffle, workers=0))


@everywhere
def test_a_subclass_may_have_a_transform_that_draws(place):
    made = Doubling(ROWS, batch_size=8, seed=1, **PLACES[place])
    inline = Doubling(ROWS, batch_size=8, seed=1, workers=0)
    with made, inline:
        for (x, draws), (_, wanted) in zip(made, inline, strict=True):
            np.testing.assert_array_equal(draws, wanted)
            assert x.shape[1] == 4


@pytest.mark.backend
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", ["csr", "csc", "coo"])
def test_rows_of_a_sparse_matrix_stay_sparse(kind, shuffle):
    matrix = scipy.sparse.random(50, 4, 0.3, format=kind, rng=1)
    dataset = ArrayDataset(
        matrix, LABELS, batch_size=8, shuffle=shuffle, workers=0
    )
    batches = list(dataset)
    assert all(scipy.sparse.issparse(x) for x, _ in batches)
    rows = np.concatenate([x.toarray() for x, _ in batches])
    labels = np.concatenate([y for _, y in batches])
    np.testing.assert_array_equal(rows, matrix.toarray()[labels])


def test_another_transform_may_be_assigned_that_draws():
    dataset = ArrayDataset(ROWS, transform=np.negative, workers=0)
    assert next(iter(dataset))[0, 0] == -ROWS[0, 0]
    dataset.transform = lambda x, rng: x * rng.integers(2, 3)
    assert next(iter(dataset))[0, 0] == 2 * ROWS[0, 0]
    dataset.transform = None
    assert next(iter(dataset))[0, 0] == ROWS[0, 0]


def test_several_inputs_without_targets_are_inputs_to_keras():
    inputs = [keras.Input((4,)), keras.Input((4,))]
    model = keras.Model(inputs, keras.layers.Subtract()(inputs))
    with ArrayDataset((ROWS, ROWS / 2), batch_size=8) as dataset:
        found = model.predict(dataset, verbose=0)
    np.testing.assert_allclose(found, ROWS / 2, rtol=1e-6)


def test_named_tuples_stay_named():
    pair = collections.namedtuple("pair", "left right")
    with ArrayDataset({"p": pair(ROWS, LABELS)}, batch_size=8) as dataset:
        batch = next(iter(dataset))["p"]
    np.testing.assert_array_equal(batch.left, ROWS[:8])


@pytest.mark.parametrize("cache", [None, "memory"])
@everywhere
def test_other_arrays_may_be_assigned(place, cache):
    """As with pseudo-labels."""
    more = {"cache": cache, **PLACES[place]}
    with ArrayDataset(LABELS, Frame(LABELS), batch_size=25, **more) as dataset:
        assert [y[0] for _, y in dataset] == [0, 25]
        dataset.y = Frame(-LABELS)
        assert [y[-1] for _, y in dataset] == [-24, -49]
        dataset.x, dataset.y = np.arange(30), np.arange(30)
        assert [len(y) for _, y in dataset] == [25, 5]
        dataset.sample_weight = dataset.y * 2
        assert [weight[0] for _, _, weight in dataset] == [0, 50]
        dataset.sample_weight = dataset.y = None
        assert dataset.y is None
        assert [x[0] for x in dataset] == [0, 25]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("x", None, "`x` must be arrays. Received: None"),
        ("y", 3, "`y` must be arrays with one row for each sample"),
        ("y", None, "`sample_weight` needs `y`"),
    ],
)
def test_what_can_be_no_array_cannot_be_assigned(name, value, said):
    with ArrayDataset(LABELS, LABELS, LABELS, workers=0) as dataset:
        with pytest.raises((TypeError, ValueError), match=said):
            setattr(dataset, name, value)
        assert [len(y) for _, y, _ in dataset] == [32, 18]


def test_arrays_of_several_lengths_are_an_error_when_an_epoch_begins():
    with ArrayDataset(LABELS, LABELS, workers=0) as dataset:
        dataset.y = LABELS[:40]
        with pytest.raises(ValueError, match="50 in `x`, 40 in `y`"):
            list(dataset)


class _KeepsItsOwn(ArrayDataset):
    """Has attributes of its own under the names of the arguments."""

    def __init__(self, frame, labels, **kwargs):
        self.x = frame
        super().__init__(frame, labels, **kwargs)

    @property
    def y(self):
        return "its own"


def test_a_subclass_keeps_its_own_attributes():
    frame = Frame(LABELS)
    with _KeepsItsOwn(frame, LABELS, workers=0) as dataset:
        assert dataset.x is frame
        assert dataset.y == "its own"
        assert [y[0] for _, y in dataset] == [0, 32]
        dataset.x = Frame(-LABELS)
        assert [x[-1] for x, _ in dataset] == [-31, -49]
