"""What holds for files of all formats: from afar, without libraries, fitted."""

from __future__ import annotations

import doctest
import importlib
import io
import sys
import tarfile

import fsspec.asyn
import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from format_samples import DyingParquet
from servers import FileServer

from keras_fastdata import SampleDataset, sources
from keras_fastdata.sources.storage import Storage

pytestmark = pytest.mark.usefixtures("kept_forkserver")


@pytest.fixture
def storage(tmp_path):
    return Storage(cache_dir=tmp_path / "cache")


@pytest.fixture(scope="module", autouse=True)
def _loop_of_fsspec():
    """Starts what `fsspec` keeps."""
    fsspec.asyn.get_loop()


@pytest.fixture
def server():
    with FileServer() as started:
        yield started


def parquet_file(start, stop):
    sink = io.BytesIO()
    numbers = np.arange(start, stop)
    table = {"x": numbers.astype("float32"), "y": numbers}
    pq.write_table(pa.table(table), sink, row_group_size=4)
    return sink.getvalue()


def tar_file(start, stop):
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as shard:
        for number in range(start, stop):
            member = tarfile.TarInfo(f"{number}.y")
            member.size = len(str(number))
            shard.addfile(member, io.BytesIO(str(number).encode()))
    return sink.getvalue()


# -- here --------------------------------------------------------------------


def test_a_relative_path_is_that_of_the_directory_at_first(
    tmp_path, storage, monkeypatch
):
    (tmp_path / "a.parquet").write_bytes(parquet_file(0, 10))
    monkeypatch.chdir(tmp_path)
    source = sources.Parquet("*.parquet", storage=storage)
    monkeypatch.chdir("/")
    assert source[7] == {"x": 7.0, "y": 7}


def test_batches_of_many_parts_come_in_order(tmp_path, storage):
    paths = []
    for file in range(100):
        paths.append(tmp_path / f"{file}.parquet")
        paths[-1].write_bytes(parquet_file(10 * file, 10 * file + 10))
    source = sources.Parquet(paths, storage=storage)
    wanted = np.random.default_rng(0).permutation(1000)[:256]
    found = source.get_columns(wanted, ["x", "y"])
    np.testing.assert_array_equal(found["x"], wanted)
    np.testing.assert_array_equal(found["y"], wanted)
    assert [row["y"] for row in source.__getitems__(wanted)] == wanted.tolist()


# -- elsewhere ---------------------------------------------------------------


@pytest.mark.parametrize("kind", ["parquet", "tar"])
def test_remote_files_are_read_whatever_the_connection_does(
    server, storage, kind
):
    make = parquet_file if kind == "parquet" else tar_file
    for file in range(3):
        server.files[f"/{file}"] = make(10 * file, 10 * file + 10)
    server.faults["/1"] += ["drop", 503, "truncate"]
    paths = f"{server.url}/{{0..2}}"
    if kind == "parquet":
        source = sources.Parquet(paths, storage=storage)
    else:
        source = sources.Tar(paths, {"y": int}, storage=storage)
    with SampleDataset(
        source, 4, label="y", shuffle=True, workers=2, use_multiprocessing=True
    ) as dataset:
        found = np.concatenate([y for _, y in dataset])
    assert sorted(found.tolist()) == list(range(30))
    assert [server.count("GET", f"/{file}") for file in range(3)] == [1, 4, 1]


@pytest.mark.parametrize("kind", ["Parquet", "Tar", "TFRecord", "ArrayRecord"])
def test_the_error_of_a_damaged_remote_file_has_its_address(
    server, storage, kind
):
    server.files["/one"] = b"no file of any format" * 99
    address = f"{server.url}/one"
    with pytest.raises(ValueError, match=address):
        getattr(sources, kind)(address, storage=storage)


def test_a_file_that_cannot_be_fetched_again_is_not_called_damaged(
    server, tmp_path
):
    server.files["/one"] = parquet_file(0, 10)
    forgetful = Storage(cache_dir=tmp_path, cache_bytes=0, attempts=1)
    source = sources.Parquet(f"{server.url}/one", storage=forgetful)
    server.faults["/one"] += [503]
    with pytest.raises(OSError, match="503") as caught:
        source[3]
    assert "Write the file again" not in str(caught.value)


# -- processes that die ------------------------------------------------------


def test_a_worker_that_dies_while_it_decodes_leaves_no_wrong_byte(
    tmp_path, storage
):
    (tmp_path / "a.parquet").write_bytes(parquet_file(0, 20))
    source = DyingParquet(
        tmp_path / "a.parquet", storage=storage, marker=tmp_path / "died"
    )
    with SampleDataset(
        source, 4, label="y", shuffle=True, workers=2, use_multiprocessing=True
    ) as dataset:
        batches = list(dataset)
    assert (tmp_path / "died").exists()
    found = np.concatenate([y for _, y in batches])
    assert sorted(found.tolist()) == list(range(20))
    np.testing.assert_array_equal(
        np.concatenate([x["x"] for x, _ in batches]), found
    )


# -- libraries ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "module", "extra"),
    [
        ("Parquet", "pyarrow.parquet", "parquet"),
        ("TFRecord", "crc32c", "tfrecord"),
        ("ArrayRecord", "array_record.python", "arrayrecord"),
    ],
)
def test_a_missing_library_is_an_error_that_names_the_extra(
    monkeypatch, tmp_path, kind, module, extra
):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"keras-fastdata\[{extra}\]"):
        getattr(sources, kind)(tmp_path / "none")


def test_images_in_tar_files_need_pillow(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ImportError, match=r"keras-fastdata\[images\]"):
        sources.Tar(tmp_path / "none", {"jpg": "rgb"})


@pytest.mark.parametrize("kind", ["Parquet", "Tar", "TFRecord", "ArrayRecord"])
def test_a_missing_file_is_named(tmp_path, storage, kind):
    with pytest.raises(FileNotFoundError, match="/none"):
        getattr(sources, kind)(tmp_path / "none", storage=storage)


def test_other_names_are_attribute_errors():
    assert {"Parquet", "Tar", "TFRecord", "ArrayRecord"} <= {*dir(sources)}
    with pytest.raises(AttributeError, match="has no attribute 'CSV'"):
        _ = sources.CSV


# -- training ----------------------------------------------------------------


@pytest.mark.backend
def test_fit_trains_on_the_columns_of_a_parquet_file(tmp_path, storage):
    rng = np.random.default_rng(0)
    table = {name: rng.normal(size=64).astype("float32") for name in "abc"}
    table["y"] = table["a"] - table["b"]
    pq.write_table(pa.table(table), tmp_path / "a.parquet", row_group_size=10)
    inputs = {name: keras.Input((1,), name=name) for name in "ab"}
    outputs = keras.layers.Dense(1)(
        keras.layers.Concatenate()(list(inputs.values()))
    )
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.2), "mse")
    source = sources.Parquet(tmp_path / "a.parquet", storage=storage)
    with SampleDataset(
        source,
        16,
        columns=["a", "b"],
        label="y",
        shuffle=True,
        workers=2,
        use_multiprocessing=True,
    ) as dataset:
        history = model.fit(dataset, epochs=10, verbose=0)
    assert history.history["loss"][-1] < 0.01


@pytest.mark.parametrize("name", ["array_record", "parquet", "tar"])
def test_the_examples_in_docstrings_do_what_they_show(
    name, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    module = importlib.import_module(f"keras_fastdata.sources.{name}")
    found = doctest.testmod(module)
    assert found.failed == 0
    assert found.attempted >= 5
