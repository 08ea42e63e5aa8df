"""Rows that are packed from sequences: what is in them, and where."""

from __future__ import annotations

import pickle

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matrix import assert_exactly_once, in_every_way

from keras_fastdata import SampleDataset, sources
from keras_fastdata.sources.packing import first_fit

pytestmark = pytest.mark.usefixtures("kept_forkserver")

LENGTH = 8
COUNTS = st.lists(st.integers(0, LENGTH), max_size=30)
ANY_COUNTS = st.lists(st.integers(0, 3 * LENGTH), max_size=12)


def numbered(counts):
    """Sequences of which each token tells its sequence and its place."""
    return [100 * n + np.arange(count) for n, count in enumerate(counts)]


def sequences_of(row):
    """The sequences of a row, after a check of the row's form."""
    ids, positions = row["segment_ids"], row["positions"]
    assert ids.dtype == positions.dtype == np.int32
    assert len(row["tokens"]) == len(ids) == len(positions)
    used = np.count_nonzero(ids)
    assert (ids[used:] == 0).all()
    assert (positions[used:] == 0).all()
    assert (row["tokens"][used:] == 0).all()
    number = int(ids.max())
    assert sorted({*ids[:used].tolist()}) == list(range(1, number + 1))
    found = []
    for segment in range(1, number + 1):
        places = np.flatnonzero(ids == segment)
        np.testing.assert_array_equal(np.diff(places), 1)
        assert positions[places].tolist() == list(range(len(places)))
        found.append(row["tokens"][places].tolist())
    return found


def plain_first_fit(sizes, length):
    rows, left = [], []
    for size in sizes:
        row = next((n for n, room in enumerate(left) if room >= size), None)
        if row is None:
            row = len(left)
            left.append(length)
        left[row] -= size
        rows.append(row)
    return rows


# -- where sequences go ------------------------------------------------------


@given(st.lists(st.integers(1, LENGTH), max_size=200))
def test_rows_are_those_of_a_plain_first_fit(sizes):
    found = first_fit(np.array(sizes, np.int64), LENGTH)
    assert found.tolist() == plain_first_fit(sizes, LENGTH)


def test_rows_of_many_sequences_are_those_of_a_plain_first_fit():
    sizes = np.random.default_rng(0).integers(1, 400, 3000)
    found = first_fit(sizes, 512)
    assert found.tolist() == plain_first_fit(sizes.tolist(), 512)


@given(COUNTS, st.sampled_from([None, 0, 1]))
def test_each_sequence_is_in_one_row_whole(counts, seed):
    texts = numbered(counts)
    packed = sources.Packed(texts, LENGTH, seed=seed)
    found = [part for row in packed for part in sequences_of(row)]
    assert sorted(found) == [text.tolist() for text in texts if len(text)]
    tokens = sum(counts)
    assert packed.padding == pytest.approx(
        1 - tokens / (LENGTH * len(packed)) if tokens else 0
    )


@given(COUNTS)
def test_without_a_seed_sequences_are_packed_in_the_sources_order(counts):
    texts = [text for text in numbered(counts) if len(text)]
    wanted = {}
    rows = plain_first_fit(map(len, texts), LENGTH)
    for row, text in zip(rows, texts, strict=True):
        wanted.setdefault(row, []).append(text.tolist())
    packed = sources.Packed(texts, LENGTH)
    assert [sequences_of(row) for row in packed] == list(wanted.values())


def test_a_seed_sets_the_order_of_packing():
    texts = numbered([3, 4, 5, 6, 2, 1, 7, 3, 3])
    first, again, other = (
        [row["tokens"].tolist() for row in sources.Packed(texts, 8, seed=seed)]
        for seed in (1, 1, 2)
    )
    assert first == again != other


@given(ANY_COUNTS)
def test_sequences_that_are_too_long_are_split(counts):
    texts = numbered(counts)
    packed = sources.Packed(texts, LENGTH, too_long="split")
    found = [part for row in packed for part in sequences_of(row)]
    wanted = [
        text[first : first + LENGTH].tolist()
        for text in texts
        for first in range(0, len(text), LENGTH)
    ]
    assert sorted(found) == sorted(wanted)


@given(ANY_COUNTS, st.sampled_from(["cut", "drop"]))
def test_sequences_that_are_too_long_are_cut_or_dropped(counts, too_long):
    texts = numbered(counts)
    packed = sources.Packed(texts, LENGTH, too_long=too_long)
    found = [part for row in packed for part in sequences_of(row)]
    kept = [text for text in texts if len(text)]
    if too_long == "drop":
        kept = [text for text in kept if len(text) <= LENGTH]
    assert sorted(found) == [text[:LENGTH].tolist() for text in kept]
    left_out = len(texts) - len(kept)
    assert (f", {left_out} left out," in repr(packed)) == bool(left_out)


def test_a_sequence_that_is_too_long_is_an_error_by_default():
    said = r"Sample 1 has 1,200 tokens, and `length` is 1,024.*'split'"
    with pytest.raises(ValueError, match=said):
        sources.Packed([np.ones(3), np.ones(1200)], 1024)


def test_it_shows_how_much_is_padding():
    packed = sources.Packed(numbered([5, 4, 3]), 8)
    assert repr(packed) == (
        "Packed(2 rows of 8 tokens from 3 sequences, padding 25.0%)"
    )
    assert packed.padding == 0.25


# -- what is in a row --------------------------------------------------------


def test_features_of_a_sample_stay_side_by_side():
    samples = [
        {"tokens": text, "frames": np.stack([text, -text], 1).astype("f4")}
        for text in numbered([5, 4, 3])
    ]
    first, second = sources.Packed(samples, 8, pad_value=7)
    assert list(first) == ["tokens", "frames", "segment_ids", "positions"]
    for row, used in (first, 8), (second, 4):
        assert row["frames"].shape == (8, 2)
        assert row["frames"].dtype == np.float32
        np.testing.assert_array_equal(
            row["frames"][:used, 0], row["tokens"][:used]
        )
        assert (row["tokens"][used:] == 7).all()
        assert (row["frames"][used:] == 7).all()


def test_features_may_be_chosen():
    samples = [{"id": n, "text": [n] * 3} for n in range(3)]
    packed = sources.Packed(samples, 6, features=["text"])
    assert packed.columns == ["text", "segment_ids", "positions"]
    assert packed[0]["text"].tolist() == [0, 0, 0, 1, 1, 1]
    assert packed[-1]["text"].tolist() == [2, 2, 2, 0, 0, 0]
    with pytest.raises(IndexError):
        packed[2]


class Columns:
    """A table of sequences, which notes what is read."""

    columns = ("text", "url")

    def __init__(self, texts):
        self.texts = texts
        self.asked = []

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return {"text": self.texts[index], "url": "..."}

    def get_columns(self, indices, names):
        self.asked.append((indices.tolist(), list(names)))
        return {"text": [self.texts[index] for index in indices]}


class Together(list):
    """Sequences that are fetched together."""

    def __getitems__(self, indices):
        self.asked = indices
        return [self[index] for index in indices]


def test_columns_of_a_table_are_read_for_a_whole_batch():
    texts = numbered([5, 4, 3, 4])
    source = Columns(texts)
    packed = sources.Packed(source, 8, features=["text"])
    source.asked.clear()
    rows = packed.__getitems__([1, 0])
    assert source.asked == [([1, 3, 0, 2], ["text"])]
    assert [row["text"].tolist() for row in rows] == [
        [*texts[1], *texts[3]],
        [*texts[0], *texts[2]],
    ]


def test_a_table_is_packed_as_it_is():
    polars = pytest.importorskip("polars")
    texts = numbered([5, 4, 3])
    frame = polars.DataFrame(
        {"text": [text.tolist() for text in texts], "label": [0, 1, 0]}
    )
    packed = sources.Packed(frame, 8, features=["text"])
    assert [row["text"].tolist() for row in packed] == [
        [*texts[0], *texts[2]],
        [*texts[1], 0, 0, 0, 0],
    ]


def test_samples_are_fetched_together_where_the_source_can():
    source = Together(numbered([5, 4, 3]))
    packed = sources.Packed(source, 8)
    packed[0]
    assert source.asked == [0, 2]


def test_with_lengths_only_the_first_sample_is_read():
    class Source(list):
        read = ()

        def __getitem__(self, index):
            self.read = (*self.read, index)
            return super().__getitem__(index)

    source = Source(numbered([5, 4, 3]))
    packed = sources.Packed(source, 8, lengths=[5, 4, 3])
    assert set(source.read) == {0}
    assert [sequences_of(row) for row in packed] == [
        sequences_of(row) for row in sources.Packed(list(source), 8)
    ]


def test_rows_without_sequences_do_not_exist():
    for texts in ([], [np.zeros(0, int)] * 2):
        packed = sources.Packed(texts, 8)
        assert len(packed) == 0
        assert list(packed) == []
        assert packed.padding == 0


def test_lists_of_numbers_are_sequences_too():
    packed = sources.Packed([[], [1, 2], [3]], 4)
    assert packed[0]["tokens"].tolist() == [1, 2, 3, 0]
    assert packed[0]["tokens"].dtype == np.int64


@pytest.mark.parametrize(
    ("samples", "kwargs", "said"),
    [
        ([[1]], {"too_long": "keep"}, "`too_long` must be one of 'error'"),
        ([[1]], {"length": 0}, "`length` must be an integer of at least 1"),
        ([[1]], {"lengths": [1, 2]}, "an integer for each of 1 samples"),
        ([[1]], {"lengths": [1.0]}, "an integer for each of 1 samples"),
        ([[1]], {"lengths": [-1]}, "negative numbers: -1"),
        ([[1]], {"pad_value": 0.5}, "`pad_value=0.5` does not fit"),
        ([[1]], {"pad_value": np.nan}, "`pad_value=nan` does not fit"),
        ([np.ones(1, "uint8")], {"pad_value": -1}, "not fit .* of uint8"),
        ([[1]], {"features": ["a"]}, "for samples that are dicts"),
        ([{"a": [1], "b": 2}], {}, "'b' of sample 0 is no sequence: 2"),
        (["text"], {}, "'tokens' of sample 0 is no sequence: 'text'"),
        ([{"positions": [1]}], {}, "Rows get `segment_ids` and `positions`"),
    ],
    ids=str,
)
def test_what_cannot_be_packed_is_told(samples, kwargs, said):
    with pytest.raises(ValueError, match=said):
        sources.Packed(samples, **{"length": 4, **kwargs})


@pytest.mark.parametrize(
    ("samples", "lengths", "said"),
    [
        ([[1], [1, 2]], [1, 1], "'tokens' of sample 1 has 2 tokens"),
        ([[1], [1, 2]], [1, 3], "'tokens' of sample 1 has 2 tokens"),
        ([{"a": [1], "b": [1, 2]}], None, "'b' of sample 0 has 2 tokens"),
        ([[1], [0.5]], None, "'tokens' of sample 1 is float64, not int64"),
    ],
    ids=str,
)
def test_a_sample_that_is_not_as_told_is_an_error(samples, lengths, said):
    packed = sources.Packed(samples, 4, lengths=lengths)
    with pytest.raises(ValueError, match=said):
        packed[0]


# -- in a dataset ------------------------------------------------------------


def sequence_numbers(batch):
    begins = (batch["positions"] == 0) & (batch["segment_ids"] > 0)
    return batch["tokens"][begins] // 100


@in_every_way
def test_each_sequence_comes_once_everywhere(place, way):
    counts = np.random.default_rng(3).integers(1, 9, 60)
    packed = sources.Packed(numbered(counts), 16, seed=1)

    def make(**kwargs):
        return SampleDataset(packed, batch_size=3, **kwargs)

    assert_exactly_once(make, sequence_numbers, len(counts), place, way)


def test_a_pickle_has_the_same_rows_in_few_bytes():
    texts = numbered(np.random.default_rng(0).integers(1, 9, 1000))
    packed = sources.Packed(texts, 64, seed=1)
    again = pickle.loads(pickle.dumps(packed))
    assert [sequences_of(row) for row in packed] == [
        sequences_of(row) for row in again
    ]
    more = len(pickle.dumps(packed)) - len(pickle.dumps(texts))
    assert more < 20 * len(texts)


class Shifted(SampleDataset):
    """Rows, and the token after each as its target."""

    def get_sample(self, index):
        row = self.source[index]
        targets = np.roll(row["tokens"], -1)
        ids = row["segment_ids"]
        weights = (ids > 0) & (ids == np.roll(ids, -1))
        return row, targets, weights.astype("float32")


@pytest.mark.backend
def test_a_model_attends_within_sequences():
    tokens = keras.Input((16,), dtype="int32", name="tokens")
    ids = keras.Input((16,), dtype="int32", name="segment_ids")
    positions = keras.Input((16,), dtype="int32", name="positions")
    x = keras.layers.Embedding(10, 8)(tokens)
    x = x + keras.layers.Embedding(16, 8)(positions)
    same = keras.layers.Lambda(lambda n: n[:, :, None] == n[:, None, :])(ids)
    x = keras.layers.MultiHeadAttention(2, 4)(
        x, x, attention_mask=same, use_causal_mask=True
    )
    x = keras.layers.Dense(10)(x)
    inputs = {"tokens": tokens, "segment_ids": ids, "positions": positions}
    model = keras.Model(inputs, x)
    model.compile(
        "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    rng = np.random.default_rng(0)
    texts = [rng.integers(1, 10, n) for n in (5, 9, 3, 16, 7, 2)]
    packed = sources.Packed(texts, 16)
    with Shifted(packed, 2, shuffle=True) as dataset:
        history = model.fit(dataset, epochs=2, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    # What a sequence gets does not depend on its neighbours in the row.
    row = {name: part[None] for name, part in packed[0].items()}
    alone = {name: part.copy() for name, part in row.items()}
    other = alone["segment_ids"] != 1
    assert other.any()
    alone["tokens"][other] = 0
    found = model.predict(row, verbose=0)[~other]
    np.testing.assert_allclose(
        found, model.predict(alone, verbose=0)[~other], rtol=1e-4, atol=1e-5
    )
