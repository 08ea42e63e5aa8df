"""Rows of Parquet files: which values, from where, and what if damaged."""

from __future__ import annotations

import datetime
import decimal
import functools
import os
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from matrix import assert_exactly_once, in_every_way, same

from keras_fastdata import SampleDataset, sources
from keras_fastdata.sources import parquet
from keras_fastdata.sources.storage import Storage

pytestmark = pytest.mark.usefixtures("kept_forkserver")


@pytest.fixture
def storage(tmp_path):
    return Storage(cache_dir=tmp_path / "cache")


@pytest.fixture
def small_parts(monkeypatch):
    """Each row group is a part."""
    monkeypatch.setattr(parquet, "_PART_BYTES", 1)


def write(path, row_group_size=3, **columns):
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return str(path)


def column(source, name, indices=None):
    indices = np.arange(len(source)) if indices is None else indices
    return source.get_columns(np.array(indices), [name])[name]


def stored(tmp_path, values, kind=None, **kwargs):
    """What comes back of a column of three row groups."""
    path = write(tmp_path / "a.parquet", a=pa.array(values, kind))
    storage = Storage(cache_dir=tmp_path / "cache")
    return column(sources.Parquet(path, storage=storage, **kwargs), "a")


# -- rows in every way -------------------------------------------------------


@in_every_way
@pytest.mark.parametrize("window", [None, 8])
def test_every_row_comes_once(
    tmp_path, storage, small_parts, place, way, window
):
    for file in range(2):
        numbers = np.arange(10) + 10 * file
        write(tmp_path / f"{file}.parquet", n=numbers, x=numbers / 2)
    source = sources.Parquet(tmp_path / "*.parquet", storage=storage)
    assert source.part_lengths == [3, 3, 3, 1] * 2
    make = functools.partial(SampleDataset, source, 3, shuffle_window=window)
    assert_exactly_once(make, lambda b: b["n"], 20, place, way)


def test_a_pickled_source_gives_the_same_rows(tmp_path, storage):
    path = write(tmp_path / "a.parquet", n=range(10), s=["é"] * 10)
    source = sources.Parquet(path, storage=storage)
    first = source[7]
    again = pickle.loads(pickle.dumps(source))
    assert again[7] == first == {"n": 7, "s": "é"}
    assert again[-1]["n"] == 9
    assert [row["n"] for row in again] == list(range(10))


def test_rows_come_in_the_order_asked_for(tmp_path, storage, small_parts):
    path = write(tmp_path / "a.parquet", n=range(10), s=[*"abcdefghij"])
    source = sources.Parquet(path, storage=storage)
    found = source.get_columns(np.array([9, 0, 5, 0, 1]), ["s", "n"])
    assert list(found) == ["s", "n"]
    assert found["n"].tolist() == [9, 0, 5, 0, 1]
    assert found["s"].tolist() == [*"jafab"]


def test_small_row_groups_of_a_file_are_one_part(tmp_path, storage):
    for file in range(3):
        write(tmp_path / f"{file}.parquet", n=range(10))
    source = sources.Parquet(tmp_path / "*.parquet", storage=storage)
    assert source.part_lengths == [10, 10, 10]


def test_more_parts_than_are_held_open_are_read(
    tmp_path, storage, small_parts, monkeypatch
):
    monkeypatch.setattr(parquet, "_HELD", 2)
    path = write(tmp_path / "a.parquet", 1, n=range(10))
    source = sources.Parquet(path, storage=storage)
    for _ in range(2):
        assert column(source, "n").tolist() == list(range(10))
    assert len(source._mapped._results) == 2


def test_a_mapped_part_holds_no_file_open(tmp_path, storage):
    path = write(tmp_path / "a.parquet", n=range(10))
    source = sources.Parquet(path, storage=storage)
    before = len(os.listdir("/proc/self/fd"))
    column(source, "n")
    assert len(os.listdir("/proc/self/fd")) == before


def test_row_groups_are_decoded_once_for_all(tmp_path, storage, monkeypatch):
    path = write(tmp_path / "a.parquet", n=range(10))
    source = sources.Parquet(path, storage=storage)
    column(source, "n")
    again = pickle.loads(pickle.dumps(source))

    def write_again(*args):
        raise AssertionError

    monkeypatch.setattr(sources.Parquet, "_write", write_again)
    assert column(again, "n").tolist() == list(range(10))


# -- values ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "kind", "dtype"),
    [
        (range(5), pa.int8(), "int8"),
        (range(5), pa.uint64(), "uint64"),
        ([0.5] * 5, pa.float32(), "float32"),
        ([0.5] * 5, pa.float16(), "float16"),
        ([True, False, True, True, False], None, "bool"),
        ([decimal.Decimal("1.5")] * 5, None, "float64"),
        ([datetime.date(2020, 1, 2)] * 5, None, "datetime64[D]"),
        ([datetime.datetime(2020, 1, 2)] * 5, None, "datetime64[us]"),
        (["é", "", "a\0", "b", "c"], None, "object"),
        ([b"\0", b"", b"a\0", b"b", b"c"], None, "object"),
    ],
)
def test_values_have_the_dtype_of_their_column(tmp_path, values, kind, dtype):
    found = stored(tmp_path, values, kind)
    assert found.dtype == dtype
    wanted = np.array([*values], object)
    assert (found == wanted.astype(dtype)).all()


def test_categories_are_their_values(tmp_path):
    values = pa.array([*"abcab"]).dictionary_encode()
    assert stored(tmp_path, values).tolist() == [*"abcab"]


def test_lists_of_equal_length_are_one_array(tmp_path):
    rows = [[n, n + 1] for n in range(5)]
    np.testing.assert_array_equal(stored(tmp_path, rows), rows)
    fixed = stored(tmp_path, rows, pa.list_(pa.float32(), 2))
    np.testing.assert_array_equal(fixed, np.array(rows, "float32"), strict=True)


@pytest.mark.parametrize(
    "kind", [pa.int16(), pa.bool_(), pa.list_(pa.int8(), 2)]
)
def test_lists_of_different_lengths_are_a_list_of_arrays(
    tmp_path, kind, small_parts
):
    item = {pa.int16(): 1, pa.bool_(): True}.get(kind, [1, 2])
    rows = [[item] * n for n in range(5)]
    found = stored(tmp_path, rows, pa.list_(kind))
    assert [len(row) for row in found] == [0, 1, 2, 3, 4]
    assert {row.dtype for row in found} == {found[0].dtype}
    assert found[4].tolist() == [item] * 4
    found[4][0] = 0  # a transform may write to it


def test_nested_lists_are_arrays_if_they_are_even(tmp_path):
    found = stored(tmp_path, [[[1.0, 2.0]] * n for n in range(1, 6)])
    assert [row.shape for row in found] == [(n, 2) for n in range(1, 6)]


def test_a_struct_is_a_dict(tmp_path, storage):
    rows = [{"u": n, "v": {"w": str(n)}} for n in range(5)]
    path = write(tmp_path / "a.parquet", st=rows)
    source = sources.Parquet(path, storage=storage)
    assert source.columns == ["st"]
    assert source[3] == {"st": {"u": 3, "v": {"w": "3"}}}


def test_a_tensor_has_its_shape(tmp_path):
    kind = pa.fixed_shape_tensor(pa.float32(), [2, 2])
    flat = pa.array([[n] * 4 for n in range(5)], kind.storage_type)
    found = stored(tmp_path, pa.ExtensionArray.from_storage(kind, flat))
    assert found.shape == (5, 2, 2)
    assert (found[3] == 3).all()


def test_no_rows_have_the_dtypes_of_their_columns(tmp_path, storage):
    path = write(tmp_path / "a.parquet", x=pa.array([], pa.float32()))
    source = sources.Parquet(path, storage=storage)
    assert len(source) == 0
    assert source.part_lengths == []
    found = column(source, "x")
    assert found.dtype == "float32"
    assert found.shape == (0,)
    with pytest.raises(IndexError, match="there are 0"):
        source[0]


def test_files_without_rows_are_passed_over(tmp_path, storage):
    for file, rows in enumerate([0, 1, 0, 2]):
        write(tmp_path / f"{file}.parquet", x=pa.array(range(rows), pa.int8()))
    source = sources.Parquet(tmp_path / "*.parquet", storage=storage)
    assert source.part_lengths == [1, 2]
    assert column(source, "x").tolist() == [0, 0, 1]


# -- empty values ------------------------------------------------------------


def test_an_empty_float_is_nan(tmp_path):
    found = stored(tmp_path, [1.0, None, 3.0, 4.0])
    np.testing.assert_array_equal(found, [1.0, np.nan, 3.0, 4.0])


def test_a_file_with_values_where_the_first_has_none_is_named(
    tmp_path, storage
):
    write(tmp_path / "a.parquet", n=pa.nulls(2))
    write(tmp_path / "b.parquet", n=[1, 2])
    source = sources.Parquet(tmp_path / "*.parquet", storage=storage)
    with pytest.raises(ValueError, match=r"b\.parquet cannot be read as"):
        source[3]


@pytest.mark.parametrize(
    "kind", [sources.Parquet, sources.Tar, sources.TFRecord]
)
def test_a_folder_in_place_of_its_files_is_named(tmp_path, storage, kind):
    with pytest.raises(IsADirectoryError, match=r"is a folder.* a pattern"):
        kind(tmp_path, storage=storage)


def test_another_empty_value_is_none_which_no_batch_takes(tmp_path, storage):
    path = write(tmp_path / "a.parquet", n=[1, None])
    source = sources.Parquet(path, storage=storage)
    assert source[1] == {"n": None}
    with pytest.raises(ValueError, match=r"no value \(null\) in row 1"):
        SampleDataset(source, 2)[0]
    filled = sources.Parquet(path, fill_null={"n": 7}, storage=storage)
    assert SampleDataset(filled, 2)[0]["n"].tolist() == [1, 7]


@pytest.mark.parametrize(
    ("values", "fill"),
    [
        ([1, None], "x"),
        ([1, None], 1.5),
        ([1, None], float("nan")),
        (["a", None], 0),
        ([[1], None], 0),
    ],
)
def test_a_replacement_of_another_type_is_an_error(tmp_path, values, fill):
    with pytest.raises(ValueError, match=r"`fill_null=.* of column 'a', whose"):
        stored(tmp_path, values, fill_null=fill)


@pytest.mark.parametrize(
    ("values", "fill", "wanted"),
    [
        ([1, None], -1, [1, -1]),
        ([1, None], {"a": -1, "b": 2}, [1, -1]),
        ([True, None], False, [True, False]),
        (["a", None], "", ["a", ""]),
    ],
)
def test_empty_values_can_be_replaced(tmp_path, values, fill, wanted):
    found = stored(tmp_path, values, fill_null=fill)
    assert found.tolist() == wanted


# -- errors ------------------------------------------------------------------


def test_an_unknown_column_is_an_error_that_lists_the_others(tmp_path, storage):
    path = write(tmp_path / "a.parquet", n=range(3))
    with pytest.raises(KeyError, match=r"no column 'x'.*\['n'\]"):
        sources.Parquet(path, ["x"], storage=storage)


@pytest.mark.parametrize("content", [b"", b"no Parquet file", b"PAR1" * 9])
def test_a_file_that_is_no_parquet_file_is_named(tmp_path, storage, content):
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(ValueError, match=r"footer of .*a\.parquet.*damaged"):
        sources.Parquet(tmp_path / "a.parquet", storage=storage)


def test_damaged_row_groups_are_named(tmp_path, storage, small_parts):
    path = write(tmp_path / "a.parquet", n=[*range(9)], s=["x" * 99] * 9)
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[4:60] = bytes(56)
    (tmp_path / "a.parquet").write_bytes(content)
    source = sources.Parquet(path, storage=storage)
    assert column(source, "n", [8]).tolist() == [8]
    with pytest.raises(ValueError, match=r"Row groups 0 to 0 of .*a\.parquet"):
        column(source, "n", [0])


def test_a_file_with_other_columns_is_named(tmp_path, storage):
    write(tmp_path / "a.parquet", n=[1])
    write(tmp_path / "b.parquet", m=[1])
    source = sources.Parquet(tmp_path / "*.parquet", storage=storage)
    with pytest.raises(ValueError, match=r"b\.parquet cannot be read as the"):
        column(source, "n")


def test_another_type_of_the_same_column_is_converted(tmp_path, storage):
    write(tmp_path / "a.parquet", n=pa.array([1], pa.int64()))
    write(tmp_path / "b.parquet", n=pa.array([2], pa.int8()))
    source = sources.Parquet(tmp_path / "*.parquet", storage=storage)
    same(column(source, "n"), np.array([1, 2], "int64"))


def test_a_file_that_changes_is_noticed(tmp_path, storage):
    path = write(tmp_path / "a.parquet", n=[1, 2])
    source = sources.Parquet(path, storage=storage)
    write(path, n=[3, 4, 5])
    with pytest.raises(RuntimeError, match="has changed"):
        column(source, "n")
    assert len(sources.Parquet(path, storage=storage)) == 3
    assert column(sources.Parquet(path, storage=storage), "n", [0]) == [3]
