"""Records of ArrayRecord files."""

from __future__ import annotations

import functools
import pickle

import numpy as np
import pytest
from format_samples import Numbers
from matrix import assert_exactly_once, in_every_way

from keras_fastdata import SampleDataset, sources
from keras_fastdata.sources import array_record
from keras_fastdata.sources.storage import Storage

pytestmark = pytest.mark.usefixtures("kept_forkserver")


@pytest.fixture
def storage(tmp_path):
    return Storage(cache_dir=tmp_path / "cache")


@pytest.fixture
def module():
    return pytest.importorskip("array_record.python.array_record_module")


def write(module, path, records, options="group_size:1"):
    writer = module.ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()
    return str(path)


@in_every_way
@pytest.mark.parametrize("window", [None, 8])
def test_every_record_comes_once(module, tmp_path, storage, place, way, window):
    for file in range(4):
        records = [b"%d" % n for n in range(5 * file, 5 * file + 5)]
        write(module, tmp_path / f"{file}.array_record", records)
    source = sources.ArrayRecord(tmp_path / "*.array_record", storage=storage)
    assert source.part_lengths == [5] * 4
    make = functools.partial(
        SampleDataset, Numbers(source), 3, shuffle_window=window
    )
    assert_exactly_once(make, np.asarray, 20, place, way)


@pytest.mark.parametrize("options", ["group_size:1", "group_size:4"])
def test_records_are_bytes(module, tmp_path, storage, options):
    records = [b"", b"one", b"x" * 100_000, b"two", b"three", b"four"]
    path = write(module, tmp_path / "a", records, options)
    source = sources.ArrayRecord(path, storage=storage)
    assert list(source) == records
    again = pickle.loads(pickle.dumps(source))
    assert again.__getitems__([2, 0, 2, 1]) == [
        records[n] for n in (2, 0, 2, 1)
    ]
    with pytest.raises(IndexError, match="no sample 6; there are 6"):
        again[6]


def test_no_records_are_no_samples(module, tmp_path, storage):
    write(module, tmp_path / "a", [])
    write(module, tmp_path / "b", [b"one"])
    source = sources.ArrayRecord(
        [tmp_path / "a", tmp_path / "b"], storage=storage
    )
    assert source.part_lengths == [0, 1]
    assert list(source) == [b"one"]


def test_more_files_than_are_held_open_are_read(
    module, tmp_path, storage, monkeypatch
):
    monkeypatch.setattr(array_record, "_OPEN", 2)
    paths = [write(module, tmp_path / str(n), [b"%d" % n]) for n in range(5)]
    source = sources.ArrayRecord(paths, storage=storage)
    for _ in range(2):
        assert source.__getitems__(range(5)) == [b"%d" % n for n in range(5)]
    assert len(source._readers._results) == 2


@pytest.mark.parametrize("kept", [0, 10, 1000])
def test_a_file_that_is_cut_off_is_named(module, tmp_path, storage, kept):
    rng = np.random.default_rng(0)
    path = write(module, tmp_path / "a", [rng.bytes(999) for _ in range(99)])
    content = (tmp_path / "a").read_bytes()
    (tmp_path / "a").write_bytes(content[:kept])
    with pytest.raises(ValueError, match=r"/a cannot be read: .* damaged"):
        sources.ArrayRecord(path, storage=storage)


def test_a_damaged_record_is_an_error_when_it_is_read(
    module, tmp_path, storage
):
    rng = np.random.default_rng(0)
    records = [rng.bytes(999) for _ in range(99)]
    path = write(module, tmp_path / "a", records)
    content = bytearray((tmp_path / "a").read_bytes())
    place = content.index(records[50])
    content[place] ^= 1
    (tmp_path / "a").write_bytes(content)
    source = sources.ArrayRecord(path, storage=storage)
    assert source[49] == records[49]
    with pytest.raises(ValueError, match=r"/a cannot be read: .* mismatch"):
        source[50]


def test_a_file_that_changes_is_noticed(module, tmp_path, storage):
    path = write(module, tmp_path / "a", [b"one"])
    source = sources.ArrayRecord(path, storage=storage)
    write(module, path, [b"two", b"three"])
    with pytest.raises(RuntimeError, match="has changed"):
        source[0]
    assert len(sources.ArrayRecord(path, storage=storage)) == 2
