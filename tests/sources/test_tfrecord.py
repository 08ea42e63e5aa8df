"""Records of TFRecord files, and the examples in them."""

from __future__ import annotations

import doctest
import functools
import pickle

import numpy as np
import pytest
from matrix import assert_exactly_once, in_every_way

from keras_fastdata import SampleDataset, sources
from keras_fastdata.sources import tfrecord
from keras_fastdata.sources.storage import Storage

pytestmark = pytest.mark.usefixtures("kept_forkserver")


@pytest.fixture
def storage(tmp_path):
    return Storage(cache_dir=tmp_path / "cache")


@pytest.fixture(scope="module")
def tf():
    return pytest.importorskip("tensorflow")


def write(tf, path, records, compression=""):
    with tf.io.TFRecordWriter(str(path), compression) as sink:
        for record in records:
            sink.write(record)
    return str(path)


def example(tf, **features):
    kinds = {float: "float", int: "int64", bytes: "bytes"}
    made = {}
    for name, values in features.items():
        kind = kinds[type(values[0])] if values else "float"
        lists = {"float": tf.train.FloatList, "int64": tf.train.Int64List}
        made[name] = tf.train.Feature(
            **{
                f"{kind}_list": lists.get(kind, tf.train.BytesList)(
                    value=values
                )
            }
        )
    features = tf.train.Features(feature=made)
    return tf.train.Example(features=features).SerializeToString()


def numbered(tf, number):
    return example(tf, n=[number], x=[number / 2] * 6, s=[b"\0%d" % number])


FEATURES = {"n": (), "x": (2, 3), "s": ()}


# -- records in every way ----------------------------------------------------


@in_every_way
@pytest.mark.parametrize("window", [None, 8])
def test_every_record_comes_once(tf, tmp_path, storage, place, way, window):
    for file in range(4):
        numbers = range(5 * file, 5 * file + 5)
        records = [numbered(tf, number) for number in numbers]
        write(tf, tmp_path / f"{file}.tfrecord", records)
    features = {"n": (), "x": (2, 3)}
    source = sources.TFRecord(
        tmp_path / "*.tfrecord", features, storage=storage
    )
    assert source.part_lengths == [5] * 4
    make = functools.partial(SampleDataset, source, 3, shuffle_window=window)
    assert_exactly_once(make, lambda b: b["n"], 20, place, way)


def test_records_are_bytes_without_features(tf, tmp_path, storage):
    records = [b"", b"one", b"x" * 100_000]
    path = write(tf, tmp_path / "a.tfrecord", records)
    source = sources.TFRecord(path, storage=storage)
    assert list(source) == records
    assert not hasattr(source, "get_columns")
    again = pickle.loads(pickle.dumps(source))
    assert again.__getitems__([2, 0, 2, 1]) == [
        records[n] for n in (2, 0, 2, 1)
    ]
    with pytest.raises(IndexError, match="no sample 3; there are 3"):
        again[3]


def test_no_records_are_no_samples(tf, tmp_path, storage):
    write(tf, tmp_path / "a.tfrecord", [])
    write(tf, tmp_path / "b.tfrecord", [b"one"])
    source = sources.TFRecord(tmp_path / "*.tfrecord", storage=storage)
    assert source.part_lengths == [0, 1]
    assert list(source) == [b"one"]


# -- examples ----------------------------------------------------------------


def test_features_are_arrays(tf, tmp_path, storage):
    path = write(tf, tmp_path / "a", [numbered(tf, n) for n in range(5)])
    source = sources.TFRecord(path, FEATURES, storage=storage)
    source = pickle.loads(pickle.dumps(source))
    assert source.columns == ["n", "x", "s"]
    found = source.get_columns(np.array([4, 0, 4]), ["x", "n"])
    assert list(found) == ["x", "n"]
    np.testing.assert_array_equal(
        found["n"], np.array([4, 0, 4], "int64"), strict=True
    )
    wanted = np.array([2, 0, 2], "float32")[:, None, None] * np.ones((1, 2, 3))
    np.testing.assert_array_equal(
        found["x"], wanted.astype("float32"), strict=True
    )
    assert source[3]["s"] == b"\x003"
    assert source.get_columns(np.array([], int), ["x"])["x"].shape == (0, 2, 3)


def test_features_are_those_of_tensorflow(tf, tmp_path, storage):
    rng = np.random.default_rng(0)
    records = [
        example(
            tf,
            x=rng.normal(size=4).tolist(),
            n=rng.integers(-(2**63), 2**63, 3).tolist(),
            s=[rng.bytes(5), b""],
            many=rng.integers(0, 9, size).tolist(),
        )
        for size in range(1, 9)
    ]
    path = write(tf, tmp_path / "a.tfrecord", records)
    kinds = {
        "x": tf.io.FixedLenFeature([4], tf.float32),
        "n": tf.io.FixedLenFeature([3], tf.int64),
        "s": tf.io.FixedLenFeature([2], tf.string),
        "many": tf.io.RaggedFeature(tf.int64),
    }
    wanted = tf.io.parse_example(records, kinds)
    source = sources.TFRecord(path, kinds, storage=storage)
    found = source.get_columns(np.arange(8), source.columns)
    for name in "xns":
        np.testing.assert_array_equal(
            found[name], wanted[name].numpy(), strict=True
        )
    assert [row.tolist() for row in found["many"]] == wanted["many"].to_list()


def test_a_feature_of_any_length_may_be_missing(tf, tmp_path, storage):
    records = [example(tf, a=[1, 2]), example(tf), example(tf, a=[3, 4])]
    path = write(tf, tmp_path / "a.tfrecord", records)
    source = sources.TFRecord(path, {"a": None}, storage=storage)
    found = source.get_columns(np.arange(3), ["a"])["a"]
    assert [row.tolist() for row in found] == [[1, 2], [], [3, 4]]
    assert {row.dtype for row in found} == {np.dtype("int64")}
    even = source.get_columns(np.array([0, 2]), ["a"])["a"]
    assert even.tolist() == [[1, 2], [3, 4]]


def test_values_beside_an_empty_list_of_another_kind_are_kept(
    tf, tmp_path, storage
):
    # `example` writes an empty list as one of floats.
    records = [example(tf, n=[]), example(tf, n=[3, 4])]
    path = write(tf, tmp_path / "a.tfrecord", records)
    source = sources.TFRecord(path, {"n": None}, storage=storage)
    found = source.get_columns(np.arange(2), ["n"])["n"]
    assert [row.tolist() for row in found] == [[], [3, 4]]


@pytest.mark.parametrize("shape", [None, ()])
@pytest.mark.parametrize(
    "values", [([1.0, 2.0], [1] * 8), ([1], [2.5]), ([1], [b"a"])]
)
def test_values_of_two_kinds_are_an_error(tf, tmp_path, storage, shape, values):
    records = [example(tf, n=each) for each in values]
    path = write(tf, tmp_path / "a.tfrecord", records)
    source = sources.TFRecord(path, {"n": shape}, storage=storage)
    with pytest.raises(ValueError, match=r"Record 1 .* feature 'n' in a "):
        source.get_columns(np.arange(2), ["n"])


def test_a_missing_feature_is_an_error_that_lists_the_others(
    tf, tmp_path, storage
):
    path = write(tf, tmp_path / "a.tfrecord", [example(tf, a=[1], b=[2])])
    source = sources.TFRecord(path, {"c": ()}, storage=storage)
    with pytest.raises(
        ValueError, match=r"Record 0 .* 0 values of feature 'c'"
    ):
        source[0]
    source = sources.TFRecord(path, {"a": (2,)}, storage=storage)
    with pytest.raises(
        ValueError, match=r"1 values of feature 'a'.* is \(2,\)"
    ):
        source[0]
    with pytest.raises(TypeError, match=r"`features\['a'\]` must be a shape"):
        sources.TFRecord(path, {"a": 3}, storage=storage)


def test_a_record_that_is_no_example_is_an_error(tf, tmp_path, storage):
    path = write(tf, tmp_path / "a.tfrecord", [example(tf, a=[1]), b"none"])
    source = sources.TFRecord(path, {"a": ()}, storage=storage)
    with pytest.raises(
        ValueError, match=r"Record 1 .* is no `tf.train.Example`"
    ):
        source.__getitems__([0, 1])


# -- errors ------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
def test_a_compressed_file_is_an_error(tf, tmp_path, storage, compression):
    path = write(tf, tmp_path / "a.tfrecord", [b"x" * 99] * 9, compression)
    with pytest.raises(ValueError, match=r"a\.tfrecord .*compressed"):
        sources.TFRecord(path, storage=storage)


# Each of the three records takes 16 bytes more than its data.
@pytest.mark.parametrize(
    ("kept", "record", "place"),
    [(5, 0, 0), (18, 0, 0), (22, 1, 19), (37, 1, 19), (40, 2, 38)],
)
def test_a_file_that_is_cut_off_is_an_error(
    tf, tmp_path, storage, kept, record, place
):
    path = write(tf, tmp_path / "a.tfrecord", [b"one", b"two", b"six"])
    content = (tmp_path / "a.tfrecord").read_bytes()
    assert len(content) == 3 * 19
    (tmp_path / "a.tfrecord").write_bytes(content[:kept])
    with pytest.raises(
        ValueError, match=rf"Record {record} .* is cut off, at byte {place}\."
    ):
        sources.TFRecord(path, storage=storage)


def test_a_damaged_length_is_an_error(tf, tmp_path, storage):
    path = write(tf, tmp_path / "a.tfrecord", [b"one", b"two", b"six"])
    content = bytearray((tmp_path / "a.tfrecord").read_bytes())
    content[19] += 1
    (tmp_path / "a.tfrecord").write_bytes(content)
    with pytest.raises(
        ValueError, match=r"Record 1 of .* has a damaged length, at byte 19"
    ):
        sources.TFRecord(path, storage=storage)


def test_a_damaged_record_is_an_error_when_it_is_read(tf, tmp_path, storage):
    path = write(tf, tmp_path / "a.tfrecord", [b"one", b"two", b"six"])
    content = bytearray((tmp_path / "a.tfrecord").read_bytes())
    content[19 + 12] += 1
    (tmp_path / "a.tfrecord").write_bytes(content)
    source = sources.TFRecord(path, storage=storage)
    assert source.__getitems__([0, 2]) == [b"one", b"six"]
    with pytest.raises(
        ValueError, match=r"Record 1 \(byte 19 of .*\) is damaged"
    ):
        source[1]


def test_a_file_that_changes_is_noticed(tf, tmp_path, storage):
    path = write(tf, tmp_path / "a.tfrecord", [b"one"])
    source = sources.TFRecord(path, storage=storage)
    write(tf, path, [b"other"])
    with pytest.raises(RuntimeError, match="has changed"):
        source[0]
    assert list(sources.TFRecord(path, storage=storage)) == [b"other"]


def test_the_example_in_the_docstring_does_what_it_shows(
    tf, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = doctest.testmod(tfrecord)
    assert found.failed == 0
    assert found.attempted >= 5
