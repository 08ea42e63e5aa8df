"""Samples of different lengths: padded, cut, and told from their padding."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matrix import same
from places import PLACES, somewhere

from keras_fastdata import GeneratorDataset, SampleDataset
from keras_fastdata.datasets.collate import (
    Padded,
    collate,
    collate_columns,
    stack_padded,
)

pytestmark = pytest.mark.usefixtures("kept_forkserver")

RAGGED = [np.arange(1, n + 1) for n in (2, 5, 3)]
NAMED = [{"tokens": row} for row in RAGGED]
TWO = [
    {"question": row, "answer": row[:2]} for row in [np.arange(1, 4), *RAGGED]
]


def batches(dataset):
    """One epoch."""
    with dataset:
        return list(dataset)


def one_batch(samples, **kwargs):
    (batch,) = batches(SampleDataset(samples, workers=0, **kwargs))
    return batch


# -- cutting -----------------------------------------------------------------


@pytest.mark.parametrize(
    "kwargs",
    [
        {"pad_to": 3, "truncate": True},
        {"pad_to": (3,), "truncate": True},
        {"pad_to": "longest", "truncate": 3},
        {"pad_to": 3, "truncate": 3},
        {"pad_to": 3, "truncate": np.int64(3)},
    ],
    ids=str,
)
def test_what_is_longer_is_cut_at_its_end(kwargs):
    assert one_batch(RAGGED, **kwargs).tolist() == [
        [1, 2, 0],
        [1, 2, 3],
        [1, 2, 3],
    ]


def test_samples_are_cut_along_each_axis_that_has_a_length():
    samples = [np.ones((2, 6)), np.ones((5, 6))]
    batch = one_batch(samples, pad_to=(4, None), truncate=True)
    assert batch.shape == (2, 4, 6)
    assert batch.sum((1, 2)).tolist() == [12, 24]


def test_parts_that_are_not_padded_are_not_cut():
    samples = [(row, np.ones(9)) for row in RAGGED]
    x, y = one_batch(samples, pad_to=["longest", None], truncate=2)
    assert x.shape == (3, 2)
    assert y.shape == (3, 9)


def test_without_truncate_the_error_names_it():
    with pytest.raises(ValueError, match=r"Sample 1 .*`truncate=True`"):
        one_batch(RAGGED, pad_to=3)


# -- multiples ---------------------------------------------------------------


@pytest.mark.parametrize(("multiple", "length"), [(1, 5), (4, 8), (5, 5)])
def test_the_longest_is_rounded_up(multiple, length):
    batch = one_batch(RAGGED, pad_to="longest", pad_to_multiple_of=multiple)
    assert batch.shape == (3, length)
    assert batch.sum() == sum(row.sum() for row in RAGGED)


@pytest.mark.parametrize(
    ("multiple", "shape"),
    [(8, (8, 5, 3)), ((8, 4), (8, 8, 3)), ((None, 4), (6, 8, 3))],
)
def test_multiples_are_for_the_first_axes(multiple, shape):
    images = [np.ones((6, 2, 3)), np.ones((4, 5, 3))]
    batch = one_batch(images, pad_to="longest", pad_to_multiple_of=multiple)
    assert batch.shape == (2, *shape)


def test_a_cut_length_is_rounded_up_too():
    batch = one_batch(
        RAGGED, pad_to="longest", truncate=3, pad_to_multiple_of=4
    )
    assert batch.tolist() == [[1, 2, 0, 0], [1, 2, 3, 0], [1, 2, 3, 0]]


# -- masks -------------------------------------------------------------------

MASK = [[True] * 2 + [False] * 3, [True] * 5, [True] * 3 + [False] * 2]


@pytest.mark.parametrize("pad_to", ["longest", 5, {"tokens": 5}])
def test_a_mask_tells_data_from_padding(pad_to):
    batch = one_batch(NAMED, pad_to=pad_to, mask="padding_mask")
    assert list(batch) == ["tokens", "padding_mask"]
    same(batch["padding_mask"], np.array(MASK))


def test_a_mask_goes_to_the_inputs():
    samples = [(row, row["tokens"][-1]) for row in NAMED]
    x, y = one_batch(samples, pad_to="longest", mask="padding_mask")
    same(x["padding_mask"], np.array(MASK))
    assert y.tolist() == [2, 5, 3]


def test_a_mask_is_for_the_first_axis_of_a_sample():
    samples = [{"frames": np.ones((n, 7))} for n in (2, 5, 3)]
    batch = one_batch(samples, pad_to="longest", mask="padding_mask")
    same(batch["padding_mask"], np.array(MASK))


def test_what_is_cut_is_no_padding():
    batch = one_batch(NAMED, pad_to=3, truncate=True, mask="mask")
    assert batch["mask"].tolist() == [[True, True, False], *[[True] * 3] * 2]


def test_parts_that_are_alike_share_a_mask():
    samples = [{"n": 1, "ids": row, "types": row % 2} for row in RAGGED]
    batch = one_batch(samples, pad_to="longest", mask="padding_mask")
    same(batch["padding_mask"], np.array(MASK))


def test_each_part_may_have_its_own_mask():
    mask = {"question": "question_mask", "answer": "answer_mask"}
    batch = one_batch(TWO, pad_to="longest", mask=mask)
    assert batch["question_mask"].sum(1).tolist() == [3, 2, 5, 3]
    assert batch["answer_mask"].all()


@pytest.mark.parametrize("samples", [RAGGED, [(x, 0) for x in RAGGED]])
def test_inputs_that_are_no_dict_get_no_mask(samples):
    with pytest.raises(ValueError, match="inputs that are a dict, and these"):
        one_batch(samples, pad_to="longest", mask="mask")


@pytest.mark.parametrize(
    ("samples", "kwargs", "said"),
    [
        (NAMED, {"mask": "m"}, "`mask='m'` is for samples that are padded"),
        (NAMED, {"truncate": 3}, "`truncate=3` is for samples that are padded"),
        (
            NAMED,
            {"pad_to": "longest", "truncate": True},
            "such as `truncate=512`",
        ),
        (NAMED, {"pad_to": 9, "pad_to_multiple_of": 4}, "pad_to=9"),
        (
            NAMED,
            {"pad_to": "longest", "pad_to_multiple_of": 0},
            "`pad_to_multiple_of` must be an integer of at least 1",
        ),
        (NAMED, {"pad_to": 9, "truncate": 0}, "at least 1, or True or False"),
        (
            TWO,
            {"pad_to": "longest", "mask": "m"},
            r"'question' and 'answer' differ.*`mask=\{'question': 'm'\}`",
        ),
        (
            [{"n": 1}],
            {"pad_to": "longest", "mask": "m"},
            r"for \['n'\], which `pad_to` does not pad. It pads: \[\]",
        ),
        (
            NAMED,
            {"pad_to": "longest", "mask": {"token": "m"}},
            r"for \['token'\].*It pads: \['tokens'\]",
        ),
        (
            NAMED,
            {"pad_to": "longest", "mask": "tokens"},
            r"called \['tokens'\]",
        ),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_are_told(samples, kwargs, said):
    with pytest.raises(ValueError, match=said):
        one_batch(samples, **kwargs)


def test_a_mask_is_no_flag():
    with pytest.raises(TypeError, match="must be a name"):
        SampleDataset(NAMED, pad_to=5, mask=True)


@somewhere
def test_padded_batches_are_the_same_everywhere(place):
    samples = [({"tokens": np.arange(n)}, n) for n in (3, 7, 1, 9, 4, 4, 0)]
    kwargs = {
        "batch_size": 3,
        "pad_to": "longest",
        "truncate": 8,
        "pad_to_multiple_of": 2,
        "mask": "padding_mask",
        "shuffle": True,
        "seed": 2,
    }
    wanted = batches(SampleDataset(samples, **kwargs, workers=0))
    found = batches(SampleDataset(samples, **kwargs, **PLACES[place]))
    assert len(found) == len(wanted) == 3
    same(found, wanted)


def test_items_of_a_generator_are_cut_and_masked_too():
    dataset = GeneratorDataset(
        lambda: iter(NAMED),
        3,
        workers=0,
        pad_to="longest",
        truncate=3,
        pad_to_multiple_of=4,
        mask="mask",
    )
    (batch,) = batches(dataset)
    assert batch["tokens"].shape == (3, 4)
    assert batch["mask"].sum(1).tolist() == [2, 3, 3]


@pytest.mark.backend
def test_a_model_trains_with_a_mask():
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    mask = keras.Input((None,), dtype="bool", name="padding_mask")
    x = keras.layers.Embedding(10, 4)(tokens)
    x = keras.layers.GlobalAveragePooling1D()(x, mask=mask)
    model = keras.Model(
        {"tokens": tokens, "padding_mask": mask}, keras.layers.Dense(1)(x)
    )
    model.compile("sgd", "mse")
    samples = [
        ({"tokens": np.arange(n) % 10}, np.float32(n)) for n in (3, 7, 1, 4)
    ]
    with SampleDataset(
        samples,
        2,
        pad_to="longest",
        pad_to_multiple_of=4,
        mask="padding_mask",
        shuffle=True,
    ) as dataset:
        history = model.fit(dataset, epochs=2, verbose=0)
    assert np.isfinite(history.history["loss"]).all()


# -- columns -----------------------------------------------------------------

LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=6)


@st.composite
def settings(draw):
    """Arguments of `Padded`, for arrays with an axis."""
    to = draw(st.sampled_from(["longest", 6, 9]))
    longest = to == "longest"
    return {
        "to": to,
        "value": draw(st.integers(-2, 2)),
        "truncate": draw(st.sampled_from([False, 4])),
        "multiple_of": draw(st.sampled_from([None, 4])) if longest else None,
        "mask": draw(st.sampled_from([None, "mask"])),
    }


@given(LENGTHS, settings(), st.sampled_from([(), (2,)]))
def test_columns_are_padded_as_samples_are(lengths, kwargs, rest):
    padded = Padded(**kwargs)
    rows = [np.full((n, *rest), n, "int16") for n in lengths]
    if padded.to != "longest" and rest:
        padded.to = (padded.to, None)
    count = range(len(rows))
    samples = [({"x": row}, n) for n, row in enumerate(rows)]
    columns = ({"x": rows}, np.arange(len(rows)))
    same(
        collate_columns(columns, count, np.empty, padded),
        collate(samples, count, np.empty, padded),
    )


@given(LENGTHS, st.sampled_from([np.int8, np.float32, np.bool_]))
def test_padding_changes_no_data(lengths, dtype):
    rng = np.random.default_rng(len(lengths))
    rows = [rng.integers(0, 2, n).astype(dtype) for n in lengths]
    array, found = stack_padded(rows, np.empty, Padded("longest", 1))
    assert array.dtype == dtype
    assert array.shape == (len(rows), max(lengths))
    assert found.tolist() == lengths
    for row, out in zip(rows, array, strict=True):
        np.testing.assert_array_equal(out[: len(row)], row)
        assert (out[len(row) :] == 1).all()


def test_an_array_that_needs_no_padding_is_not_copied():
    table = np.arange(12).reshape(3, 4)
    for to in (None, 4, "longest"):
        assert stack_padded(table, np.empty, Padded(to, 0))[0] is table
    longer, lengths = stack_padded(table, np.empty, Padded(5, 9))
    assert longer.tolist() == [[*row, 9] for row in table.tolist()]
    assert lengths.tolist() == [4, 4, 4]
    shorter, _ = stack_padded(table, np.empty, Padded(2, 9, truncate=True))
    assert shorter.tolist() == table[:, :2].tolist()


@pytest.mark.parametrize(
    ("rows", "to", "said"),
    [
        (RAGGED, None, r"Sample 11 .* with sample 10.*pad_to='longest'"),
        (RAGGED, 4, r"Sample 11 is longer.*`truncate=True`"),
        (np.ones((3, 5)), 4, r"Sample 10 is longer.*`truncate=True`"),
        ([*RAGGED[:2], np.ones((1, 1))], "longest", "Sample 12 .* 2 axes"),
        (
            [np.array(["a", "b"]), np.array(["a"])],
            "longest",
            r"Sample 11 .*\(1,",
        ),
        ([np.array(["a"]), np.array([1])], "longest", "Sample 11 .* is int64"),
    ],
    ids=["ragged", "too long", "a table too long", "axes", "texts", "kinds"],
)
def test_columns_that_do_not_fit_are_told(rows, to, said):
    with pytest.raises(ValueError, match=said):
        collate_columns(rows, range(10, 13), np.empty, Padded(to, 0))
