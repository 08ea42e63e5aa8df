"""`dataset.show()` draws samples, and the training does not notice."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest
from places import PLACES
from samples import Numbered, Random

from keras_fastdata import (
    ArrayDataset,
    FastPyDataset,
    GeneratorDataset,
    LoaderError,
    accelerate,
)
from keras_fastdata._dataset_internals import own_loader
from keras_fastdata.display.samples import build_batch, parts_of, pixels


class Given(FastPyDataset):
    """Every batch is the one that it is given."""

    def __init__(self, batch, class_names=None):
        super().__init__(workers=0)
        self.batch = batch
        self.class_names = class_names

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return self.batch


def _images(count=6, side=8, channels=3):
    shape = (count, side, side, channels)
    return np.linspace(0, 1, np.prod(shape)).reshape(shape).astype("float32")


def _titles(figure):
    return [t for axes in figure.axes if (t := axes.get_title())]


def _cells(figure):
    (table,) = figure.axes[0].tables
    rows = 1 + max(row for row, _ in table.get_celld())
    columns = 1 + max(column for _, column in table.get_celld())
    return [
        [table[row, column].get_text().get_text() for column in range(columns)]
        for row in range(rows)
    ]


# -- what is drawn -------------------------------------------------------------


@pytest.mark.parametrize(
    ("images", "scaled"),
    [
        (_images(), _images()),
        (_images() * 255, _images()),
        (np.full((6, 8, 8, 3), 51, "uint8"), np.full((6, 8, 8, 3), 0.2)),
        (_images() * 4 - 2, _images()),
        (_images().transpose(0, 3, 1, 2), _images()),
        (_images(channels=1), _images(channels=1)[..., 0]),
        (_images()[..., 0] > 0.5, _images()[..., 0] > 0.5),
        (np.eye(8, dtype="int64")[None] * 3, np.eye(8)[None]),
        (np.full((1, 8, 8), np.nan), np.zeros((1, 8, 8))),
    ],
    ids=[
        "unit",
        "255",
        "bytes",
        "standardized",
        "first",
        "gray",
        "bool",
        "mask",
        "nan",
    ],
)
def test_images_of_any_range_become_colours_from_0_to_1(images, scaled):
    np.testing.assert_allclose(pixels(images), scaled, atol=1e-6)


@pytest.mark.parametrize(
    ("labels", "titles"),
    [
        (np.arange(6), ["0", "1", "2"]),
        (np.arange(6)[:, None] / 8, ["0", "0.125", "0.25"]),
        (np.eye(6), ["0", "1", "2"]),
        (np.triu(np.ones((6, 6)), 4), ["4, 5", "5", "none"]),
        (
            np.array(["a", "b\n c", "d" * 99] * 2),
            ["a", "b c", "d" * 21 + "..."],
        ),
        (np.array([b"a", b"\xff", b"$c$"] * 2), ["a", "\ufffd", r"\$c\$"]),
    ],
    ids=["classes", "numbers", "one-hot", "several", "text", "bytes"],
)
def test_images_have_their_labels_as_titles(labels, titles):
    assert _titles(Given((_images(), labels)).show(3)) == titles


def test_classes_are_named_if_the_dataset_has_their_names():
    batch = _images(), np.array([1, 0, 7] * 2)
    assert _titles(Given(batch, ["cat", "dog"]).show(3)) == ["dog", "cat", "7"]
    batch = _images(), np.eye(2)[[1, 0] * 3]
    assert _titles(Given(batch, ["cat", "dog"]).show(2)) == ["dog", "cat"]


def test_several_images_of_a_sample_stand_beside_each_other():
    mask = (_images()[..., :1] > 0.5).astype("int32")
    batch = (
        {"image": _images(), "age": np.arange(6)},
        {"mask": mask},
        np.ones(6),
    )
    figure = Given(batch).show(2)
    assert _titles(figure) == [
        "x['age']: 0\nweight: 1",
        "y['mask']",
        "x['age']: 1\nweight: 1",
        "y['mask']",
    ]
    assert "x['image']: float32 (6, 8, 8, 3), 0 to 0.3" in figure.get_suptitle()


def test_other_data_become_a_table():
    figure = Given((np.arange(8.0).reshape(4, 2), np.arange(4)[:, None])).show()
    assert _cells(figure) == [
        ["x[:, 0]", "x[:, 1]", "y"],
        ["0", "1", "0"],
        ["2", "3", "1"],
        ["4", "5", "2"],
        ["6", "7", "3"],
    ]


def test_a_wide_table_keeps_a_column_of_each_array():
    words = np.array(["a", "b"])
    batch = {"wide": np.zeros((2, 99)), "words": words}, np.arange(2)
    header, *_ = _cells(Given(batch).show())
    assert len(header) <= 10
    assert header[-3:] == ["x['wide'][:, 7:]", "x['words']", "y"]


def test_many_columns_are_left_out_before_the_targets():
    inputs = {f"feature {i}": np.zeros(2) for i in range(40)}
    header, *_ = _cells(Given((inputs, np.arange(2))).show())
    assert len(header) == 10
    assert header[-2:] == ["...", "y"]


@pytest.mark.parametrize(
    "batch",
    [
        np.zeros(3),
        [np.zeros((2, 3))],
        ({"x": np.zeros((0, 3))},),
        (object(), 3),
    ],
    ids=["array", "list", "empty", "objects"],
)
def test_batches_of_any_structure_are_drawn(batch):
    assert Given(batch).show()._repr_png_().startswith(b"\x89PNG")


def test_parts_have_names_shapes_and_the_first_rows():
    parts = parts_of(((np.zeros((4, 2)), np.ones(4)), None, np.ones(4)), 3)
    assert [(p.name, p.structure, len(p.rows)) for p in parts] == [
        ("x[0]", "float64 (4, 2)", 3),
        ("x[1]", "float64 (4,)", 3),
        ("weight", "float64 (4,)", 3),
    ]


# -- what must not change ------------------------------------------------------


@pytest.mark.parametrize(
    "where",
    [PLACES[place] for place in ("inline", "1 thread", "1 process")],
    ids=["inline", "thread", "process"],
)
def test_showing_samples_changes_no_batch_and_no_generator(where):
    with Random(seed=3, shuffle=True, **where) as dataset:
        expected = [list(dataset), list(dataset)]
    with Random(seed=3, shuffle=True, **where) as dataset:
        dataset.show()
        epochs = [list(dataset)]
        random.seed(1)
        np.random.seed(1)
        before = random.getstate(), np.random.get_state()[1].tolist()
        dataset.show(index=2)
        after = random.getstate(), np.random.get_state()[1].tolist()
        assert before == after
        epochs.append(list(dataset))
    if where["workers"] and "use_multiprocessing" not in where:
        picked = [0, 1]  # threads share the other generators
    else:
        picked = range(5)
    for epoch, wanted in zip(epochs, expected, strict=True):
        for batch, other in zip(epoch, wanted, strict=True):
            for place in picked:
                np.testing.assert_array_equal(batch[place], other[place])


def test_the_shown_batch_is_that_of_the_next_epoch():
    with Random(workers=0, seed=3) as dataset:
        first = build_batch(dataset, 5)
        for place, array in enumerate(list(dataset)[5]):
            np.testing.assert_array_equal(array, first[place])
        second = build_batch(dataset, 5)
        assert not np.array_equal(first[1], second[1])
        for place, array in enumerate(list(dataset)[5]):
            np.testing.assert_array_equal(array, second[place])


def test_showing_starts_no_worker_and_draws_no_seed():
    random.seed(1)
    before = random.getstate()
    dataset = Numbered(workers=2, use_multiprocessing=True)
    dataset.show()
    assert own_loader(dataset) is None
    assert random.getstate() == before


def test_showing_in_the_midst_of_an_epoch_leaves_the_position():
    with Numbered(workers=1) as dataset:
        iterator = iter(dataset)
        next(iterator)
        state = dataset.state_dict()
        dataset.show()
        assert dataset.state_dict() == state
        assert [int(y[0, 0]) for _, y in iterator] == list(range(1, 10))


def test_worker_hooks_run_on_a_copy():
    said = []

    class Opening(Numbered):
        def on_worker_start(self):
            self.opened = True

        def __getitem__(self, index):
            assert self.opened
            return super().__getitem__(index)

        def on_worker_stop(self):
            said.append(self.opened)

        def __getstate__(self):
            raise TypeError("cannot be pickled")

    dataset = Opening()
    dataset.show()
    assert said == [True]
    assert "opened" not in vars(dataset)


def test_an_exception_of_the_dataset_arrives():
    class Raising(Numbered):
        def __getitem__(self, index):
            raise KeyError(index)

    with pytest.raises(KeyError, match="4"):
        Raising().show(index=4)


def _numbers(shard_index, num_shards):
    yield from range(shard_index, 8, num_shards)


@pytest.mark.parametrize("restart", [True, False])
def test_generators_are_shown_without_taking_their_items(restart):
    arguments = {"workers": 2, "num_batches": 4, "restart": restart}
    with GeneratorDataset(_numbers, 2, **arguments) as dataset:
        expected = [batch.tolist() for batch in dataset]
    with GeneratorDataset(_numbers, 2, **arguments) as dataset:
        dataset.show()
        iterator = iter(dataset)
        found = [next(iterator).tolist()]
        assert _cells(dataset.show())[1:] == [["0"], ["2"]]
        found += [batch.tolist() for batch in iterator]
    assert found == expected


def test_an_iterator_is_not_shown_as_its_items_would_be_lost():
    with GeneratorDataset(iter(range(8)), 2) as dataset:
        with pytest.raises(LoaderError, match="come once"):
            dataset.show()
        assert len(list(dataset)) == 4


def test_ready_made_datasets_are_shown():
    made = ArrayDataset(_images(), np.arange(6), batch_size=2)
    assert _titles(made.show()) == ["0", "1"]
    assert _titles(accelerate([(_images(), np.arange(6))]).show(1)) == ["0"]


# -- its arguments -------------------------------------------------------------


def test_a_missing_matplotlib_is_an_error_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"keras-fastdata\[report\]"):
        Numbered().show()


@pytest.mark.parametrize("arguments", [{"n": 0}, {"index": -1}])
def test_arguments_out_of_range_are_errors(arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        Numbered().show(**arguments)


def test_the_users_own_attribute_of_that_name_wins():
    dataset = Numbered()
    dataset.show = 3
    assert dataset.show == 3
