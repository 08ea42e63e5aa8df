"""Batches that are kept from epoch to epoch, and from run to run."""

from __future__ import annotations

import array
import contextlib
import datetime
import errno
import functools
import importlib
import importlib.util
import itertools
import json
import logging
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import textwrap
import types
import warnings
import zlib

import cache_samples
import keras
import ml_dtypes
import numpy as np
import outside_config as conf
import pandas as pd
import pytest
from cache_samples import (
    Attributed,
    DrawsMuch,
    Hooked,
    Mixed,
    Noted,
    NotedPairs,
    Opens,
    ReadsFolder,
    Reseeded,
    StartsOutside,
    Trainable,
    Varying,
    Worded,
    scaled_by,
)
from hypothesis import example, given
from hypothesis import strategies as st
from places import PLACES, everywhere, quickly, somewhere
from samples import Holds, Numbered, numbers, refused
from subclasses import MAKERS

from keras_fastdata import (
    ArrayDataset,
    FastPyDataset,
    LoaderError,
    LoaderHealth,
    SampleDataset,
    SharedList,
    accelerate,
    combine,
)
from keras_fastdata._dataset_internals import loader_of
from keras_fastdata.engine import batch_file as batch_files
from keras_fastdata.engine import cache as cache_files
from keras_fastdata.engine.batch_iterator import iterate
from keras_fastdata.engine.cache import DiskCache
from keras_fastdata.engine.fingerprint import fingerprint

pytestmark = pytest.mark.usefixtures("kept_forkserver")

KINDS = ["memory", "directory"]
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def cached(tmp_path):
    """Makes datasets whose builds are noted, with a cache of a kind."""

    def make(kind="directory", **kwargs):
        cache = "memory" if kind == "memory" else tmp_path / "cache"
        kwargs = {"cache_version": 1, "workers": 0, **kwargs}
        return Noted(tmp_path / "notes", cache=cache, **kwargs)

    return make


@pytest.fixture
def built(tmp_path):
    """The indices that have been built since this was asked last, sorted."""

    def read():
        notes = tmp_path / "notes"
        text = notes.read_text() if notes.exists() else ""
        notes.unlink(missing_ok=True)
        return sorted(map(int, text.split()))

    return read


def values(epoch):
    """What the batches of an epoch are full of."""
    return [int(x["scalar"]) for x, y in epoch]


# -- what is served ----------------------------------------------------------


@everywhere
@kinds
def test_from_the_second_epoch_on_nothing_is_built(cached, built, kind, place):
    with cached(kind, **PLACES[place]) as dataset:
        first = list(dataset)
        assert built() == list(range(8))
        for _ in range(2):
            again = list(dataset)
            keras.tree.map_structure(
                lambda one, other: np.testing.assert_array_equal(
                    one, other, strict=True
                ),
                first,
                again,
            )
        assert built() == []


@kinds
def test_what_is_served_cannot_be_written_to(cached, kind):
    dataset = cached(kind)
    list(dataset)
    for x, (y,) in dataset:
        for part in (x["c"], x["fortran"], x["scalar"], y):
            assert not part.flags.writeable
            with pytest.raises(ValueError, match="read-only"):
                part[...] = 0
            with pytest.raises(ValueError, match="cannot set WRITEABLE"):
                part.flags.writeable = True


@kinds
def test_batches_are_served_without_a_copy(cached, kind):
    dataset = cached(kind)
    list(dataset)
    one, other = (next(iter(dataset))[0]["c"] for _ in range(2))
    assert one is not other
    assert np.shares_memory(one, other)


def test_what_a_user_does_to_a_batch_of_the_first_epoch_is_not_kept(cached):
    dataset = cached("memory")
    for x, _ in dataset:
        x["c"][...] = -1
    assert [x["c"].max() for x, _ in dataset] == list(range(8))


@somewhere
def test_an_order_is_drawn_all_the_same(cached, built, place):
    with cached("memory", shuffle=True, seed=0, **PLACES[place]) as dataset:
        orders = []
        for _ in range(3):
            walk = iterate(loader_of(dataset), dataset, shuffle=True)
            orders.append(values(walk))
        assert built() == list(range(8))
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert orders[0] != orders[1] != orders[2]


@somewhere
def test_walks_side_by_side_get_every_batch_once(cached, place):
    with cached("memory", length=30, **PLACES[place]) as dataset:
        pairs = list(zip(dataset, dataset, strict=True))
        left, right = zip(*pairs, strict=True)
        assert values(left) == values(right) == list(range(30))
        assert values(dataset) == list(range(30))


@everywhere
def test_each_batch_is_built_once_whoever_asks_for_it(
    cached, built, place, tmp_path
):
    """The next epoch, a pass beside, and one after a pass was given up."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    kwargs = {"max_queue_size": 10, **PLACES[place]}
    pairs = NotedPairs(
        tmp_path / "notes", 30, cache="memory", cache_version=1, **kwargs
    )
    with pairs as dataset:
        model.fit(dataset, epochs=3, verbose=0)
        assert built() == list(range(30))
    with cached("memory", length=30, **kwargs) as dataset:
        for left, right in zip(dataset, dataset, strict=True):
            assert values([left]) == values([right])
        assert built() == list(range(30))
    with cached("memory", length=30, **kwargs) as dataset:
        loader = loader_of(dataset)
        opened = iterate(loader, dataset, shuffle=False)
        for _ in range(5):
            next(opened)
        while opened._epoch.waiting:
            loader._pool.workers.wait(0.1)
            loader._prefetcher.drain_results(loader._pool.workers)
        del opened
        assert values(dataset) == list(range(30))
        assert built() == list(range(30))


@pytest.mark.parametrize("place", ["1 thread", "2 processes"])
@pytest.mark.parametrize("seed", [0, 2, 3])
def test_iterators_in_different_orders_take_batches_from_one_another(
    cached, built, place, seed
):
    with cached(
        "memory", length=6, seed=seed, shuffle=True, **PLACES[place]
    ) as dataset:
        pairs = list(zip(dataset, dataset, strict=True))
        assert sorted(values(a for a, _ in pairs)) == list(range(6))
        assert sorted(values(b for _, b in pairs)) == list(range(6))
        assert sorted(built()) == list(range(6))


def test_what_is_not_kept_is_built_again_for_whoever_relies_on_it(
    cached, built
):
    places = PLACES["2 processes"]
    with cached("memory", length=30, cache_bytes=1, **places) as dataset:
        for left, right in zip(dataset, dataset, strict=True):
            assert values([left]) == values([right])
    assert built() == sorted([*range(30), *range(30)])


@somewhere
@kinds
def test_what_does_not_fit_is_built_in_every_epoch(
    cached, built, kind, place, caplog
):
    nbytes = sum(a.nbytes for a in keras.tree.flatten(cached()[0]))
    built()
    dataset = cached(kind, cache_bytes=3 * nbytes, **PLACES[place])
    with dataset, caplog.at_level(logging.WARNING):
        for epoch in range(3):
            assert values(dataset) == list(range(8))
            assert built() == list(range(8))[3 * bool(epoch) :]
    (record,) = caplog.records
    assert "`cache_bytes` is" in record.getMessage()


def test_other_things_than_arrays_are_not_kept(caplog):
    dataset = Worded(cache="memory", workers=0)
    for _ in range(2):
        assert [batch[0] for batch in dataset] == [
            f"word {i}" for i in range(3)
        ]
    (record,) = caplog.records
    assert "other things than arrays" in record.getMessage()


def test_a_batch_that_cannot_be_kept_does_not_keep_others_from_it(caplog):
    dataset = Mixed(cache="memory", workers=0)
    for _ in range(3):
        assert [int(x[0]) for x, y in dataset] == [0, 1, 2, 3]
    assert dataset.builds == [0, 1, 2, 3, 1, 1]
    (record,) = caplog.records
    assert "Not all batches of Mixed" in record.getMessage()


@kinds
def test_a_dataset_that_was_edited_is_built_anew(cached, built, kind):
    dataset = cached(kind)
    list(dataset)
    built()
    dataset.start = 100
    assert values(dataset) == list(range(100, 108))
    assert built() == list(range(8))
    assert values(dataset) == list(range(100, 108))
    assert built() == []


@everywhere
@kinds
def test_another_value_of_a_global_is_another_state(
    tmp_path, built, kind, place, monkeypatch
):
    cache = "memory" if kind == "memory" else tmp_path / "cache"
    kwargs = {"cache": cache, "cache_version": 1, **PLACES[place]}
    with StartsOutside(tmp_path / "notes", **kwargs) as dataset:
        for start in (0, 100):
            monkeypatch.setattr(cache_samples, "START", start)
            for builds in (8, 0):
                assert values(dataset) == list(range(start, start + 8))
                assert len(built()) == builds


# -- what is refused ---------------------------------------------------------


@pytest.mark.parametrize("place", ["inline", "1 thread", "2 processes"])
@pytest.mark.parametrize(
    "what",
    [
        "self.rng",
        "self.rng_for",
        "self.epoch_order",
        "self.epoch",
        "np.random",
        "random",
        "the generator `self.own`",
    ],
)
def test_batches_that_differ_between_epochs_are_refused(what, place):
    if "thread" in place and not what.startswith("self."):
        pytest.skip("threads share these, and leave them alone")
    with (
        Varying(what, cache="memory", on_error="skip", **PLACES[place]) as data,
        pytest.raises(LoaderError, match=f"it used {what}.") as caught,
    ):
        list(data)
    assert "batch 0 of Varying" in str(caught.value)
    with Varying("nothing", cache="memory", **PLACES[place]) as data:
        assert [list(data), list(data)] == [[0, 1, 2]] * 2


@pytest.mark.parametrize(
    "kwargs",
    [
        {"shuffle": True},
        {"sampler": np.ones(8)},
        {"shuffle": True, "bucket_by": np.arange(8)},
    ],
)
def test_samples_in_another_order_each_epoch_are_refused(kwargs):
    dataset = SampleDataset(range(8), 2, cache="memory", workers=0, **kwargs)
    with pytest.raises(LoaderError, match=r"used an order .*`shuffle`"):
        list(dataset)
    mapped = combine.map(dataset, abs)
    with pytest.raises(LoaderError, match=r"of combine\.map .*an order"):
        list(mapped)


@pytest.mark.parametrize(
    ("kind", "method"), [(Hooked, "on_epoch_end"), (Reseeded, "reseed")]
)
def test_what_may_change_batches_between_epochs_is_refused(kind, method):
    with pytest.raises(LoaderError, match=rf"{kind.__name__}\.{method}"):
        list(kind(cache="memory", workers=0))


@somewhere
@pytest.mark.parametrize("what", ["np.random", "random"])
def test_who_draws_as_often_as_a_generator_is_long_is_refused(what, place):
    with (
        DrawsMuch(what, cache="memory", **PLACES[place]) as dataset,
        pytest.raises(LoaderError, match=f"it used {what}"),
    ):
        list(dataset)


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"cache": "batches"}, ValueError, "Pass `cache_version`"),
        ({"cache": 3}, TypeError, "path of a directory"),
        ({"cache": "memory", "cache_bytes": 0}, ValueError, "cache_bytes"),
        ({"cache": "x", "cache_version": 1.5}, TypeError, "cache_version"),
    ],
)
def test_arguments_are_checked(kwargs, error, words):
    with pytest.raises(error, match=words):
        Trainable(**kwargs)


# -- from run to run ---------------------------------------------------------


@somewhere
def test_a_later_run_builds_one_batch_to_compare_it(cached, built, place):
    with cached(**PLACES[place]) as dataset:
        list(dataset)
    built()
    with cached(**PLACES[place]) as dataset:
        for builds in ([0], []):
            assert values(dataset) == list(range(8))
            assert built() == builds


@pytest.fixture
def number(tmp_path):
    """A file in a folder, which no digest tells of."""
    path = tmp_path / "folder" / "number"
    path.parent.mkdir()
    path.write_text("0")
    return path


@pytest.fixture
def reading(tmp_path, number):
    """Makes datasets that read the number, with one directory as a cache."""

    def make(**kwargs):
        kwargs = {"cache": tmp_path / "cache", "cache_version": 1, **kwargs}
        return ReadsFolder(tmp_path / "notes", number.parent, **kwargs)

    return make


@everywhere
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_of_something_else_than_now_are_all_built_again(
    reading, number, built, place, shuffle, caplog
):
    def run(value):
        number.write_text(str(value))
        with reading(seed=0, **PLACES[place]) as dataset:
            loader = loader_of(dataset)
            for _ in range(2):
                found = values(iterate(loader, dataset, shuffle=shuffle))
                assert sorted(found) == list(range(value, value + 8))
        return len(built())

    assert [run(0), run(0), run(100)] == [8, 1, 8]
    (message,) = caplog.messages
    assert "were built from something else than now" in message
    assert "Pass another `cache_version`" in message
    assert [run(100), run(0)] == [1, 8]


_COLUMNS = np.array([[1.7e9, 50.0, 0.0], [1.7e9, 60.0, 1.0]])


@pytest.mark.parametrize(
    "other",
    [
        np.add(_COLUMNS, [0, 0, 1e-9]),  # beside a column of large numbers
        _COLUMNS.astype("float32"),
        _COLUMNS.T.copy(),
        _COLUMNS[:1],
        (_COLUMNS,),
        {"x": _COLUMNS},
        np.array(["a", "b"], object),
        np.where(_COLUMNS, _COLUMNS, np.nan),
    ],
)
def test_a_batch_that_differs_in_anything_replaces_all(tmp_path, other):
    before = DiskCache("Any", tmp_path, None)
    for index in range(3):
        before.put(index, _COLUMNS)
    for batch, is_kept in ((_COLUMNS, True), (other, False)):
        cache = DiskCache("Any", tmp_path, None)
        assert not cache.holds(1)
        cache.put(1, batch)
        assert [cache.holds(index) for index in (0, 2)] == [is_kept] * 2


@everywhere
def test_batches_are_served_if_what_they_were_made_of_is_gone(
    reading, number, built, place, caplog
):
    for _ in range(2):
        with reading(**PLACES[place]) as dataset:
            assert values(dataset) == list(range(8))
        number.unlink(missing_ok=True)
        assert 0 in built()
    (message,) = caplog.messages
    assert "Batch 0 of ReadsFolder cannot be built any more (FileNot" in message


def test_each_run_compares_with_each_run_that_has_left_batches(
    reading, number, built, caplog
):
    """The second run builds other batches than the first has left."""

    def run(value, start, end):
        number.write_text(str(value))
        with reading(workers=0) as dataset:  # nothing is built ahead
            loader = loader_of(dataset)
            for _ in range(2):
                state = dataset.state_dict()
                dataset.load_state_dict({**state, "position": start})
                walk = iterate(loader, dataset, shuffle=False)
                found = values(itertools.islice(walk, end - start))
                assert found == list(range(value + start, value + end))
                del walk
        built()  # the file of notes is gone

    run(0, 0, 4)
    run(100, 4, 8)
    assert not caplog.messages
    run(100, 0, 8)
    (message,) = caplog.messages
    assert "batch 0 differs" in message
    run(100, 0, 8)
    assert len(caplog.messages) == 1


@everywhere
def test_after_a_change_that_nothing_shows_the_cache_is_in_memory(
    reading, number, built, place
):
    """Only some batches change: the one that is compared does not."""
    with reading(since=3, **PLACES[place]) as dataset:
        assert values(dataset) == list(range(8))
        assert len(built()) == 8
        number.write_text("100")
        dataset.mark_changed()
        changed = [0, 1, 2, *range(103, 108)]
        for builds in (8, 0):
            assert values(dataset) == changed
            assert len(built()) == builds
        dataset.start = 0  # any other change: the directory is not used again
        assert values(dataset) == changed
        assert len(built()) == 8
    with reading(since=3, **PLACES[place]) as dataset:
        assert values(dataset) == changed
        assert len(built()) == 8


@somewhere
@pytest.mark.parametrize("when", ["at the end", "before the first batch"])
def test_a_change_that_nothing_shows_counts_at_once(
    reading, number, built, place, when
):
    changed = [0, 1, 2, *range(103, 108)]
    with reading(since=3, **PLACES[place]) as dataset:
        assert values(dataset) == list(range(8))
        number.write_text("100")
        if when == "at the end":
            dataset.mark_changed()
    built()
    with reading(since=3, **PLACES[place]) as dataset:
        if when == "before the first batch":
            dataset.mark_changed()
        for builds in (8, 0):
            assert values(dataset) == changed
            assert len(built()) == builds
    with reading(since=3, **PLACES[place]) as dataset:
        assert values(dataset) == changed
        assert len(built()) == 1


def test_a_batch_whose_request_was_given_up_is_not_waited_for(tmp_path):
    before = DiskCache("Any", tmp_path, None)
    for index in range(3):
        before.put(index, np.full(3, index))
    cache = DiskCache("Any", tmp_path, None)
    assert not cache.holds(1)  # to be compared; nobody may build it
    assert cache.holds(0)
    assert not cache.holds(0, is_wanted=True)  # compared in its place
    assert cache.holds(1)
    cache.put(0, np.zeros(3, int))
    assert all(cache.holds(index, is_wanted=True) for index in range(3))


def test_settings_that_do_not_change_batches_leave_the_cache_valid(
    cached, built
):
    list(cached(seed=1))
    built()
    with cached(seed=2, **PLACES["2 processes"]) as dataset:
        assert values(dataset) == list(range(8))
    assert built() == [0]  # to compare it


def test_other_attributes_or_another_version_are_another_cache(cached, built):
    for change in ({}, {"start": 1}, {"length": 7}, {"cache_version": 2}):
        dataset = cached(**change)
        list(dataset)
        assert built() == list(range(len(dataset)))
    list(cached())
    assert built() == [0]  # to compare it


def test_a_file_that_changed_makes_another_cache(cached, built, tmp_path):
    path = tmp_path / "image.png"
    path.write_bytes(b"first")

    def run():
        dataset = cached()
        dataset.files = {"images": [path, str(tmp_path / "missing.png")]}
        list(dataset)
        return built()

    assert run() == list(range(8))
    assert run() == [0]
    path.write_bytes(b"second")
    assert run() == list(range(8))
    os.utime(path, ns=(1, 1))
    assert run() == list(range(8))


def test_a_class_that_changed_makes_another_cache(tmp_path, monkeypatch):
    source = textwrap.dedent(
        """
        import numpy as np
        from keras_fastdata import FastPyDataset

        class Scaled(FastPyDataset):
            def __len__(self):
                return 2

            def __getitem__(self, index):
                return np.array([index * FACTOR])
        """
    )
    monkeypatch.syspath_prepend(tmp_path)

    def run(factor):
        name = f"scaled_{factor}"
        path = tmp_path / f"{name}.py"
        path.write_text(source.replace("FACTOR", str(factor)))
        module = types.ModuleType(name)
        module.__file__ = str(path)
        exec(compile(path.read_text(), path, "exec"), vars(module))
        monkeypatch.setitem(__import__("sys").modules, name, module)
        module.Scaled.__module__ = name
        data = module.Scaled(cache=tmp_path / "c", cache_version=1, workers=0)
        return [int(batch[0]) for batch in data]

    assert run(2) == [0, 2]
    assert run(3) == [0, 3]


def _numbers(kind, folder):
    made = kind(cache=folder, cache_version=1, workers=0)
    return [int(batch[0]) for batch in made]


def test_what_a_class_depends_on_makes_another_cache(tmp_path, monkeypatch):
    for factor in (2, 3, 2):
        assert _numbers(scaled_by(factor), tmp_path) == [0, factor]
        monkeypatch.setattr(Attributed, "factor", factor)
        assert _numbers(Attributed, tmp_path) == [0, factor]

    def patched(self, index):
        return np.array([index - 1])

    monkeypatch.setattr(Attributed, "__getitem__", patched)
    assert _numbers(Attributed, tmp_path) == [-1, 0]
    assert len(list(tmp_path.iterdir())) == 5


def test_a_file_among_the_keys_of_a_dict_is_looked_at(cached, built, tmp_path):
    path = tmp_path / "image.png"
    for content in (b"one", b"three"):
        path.write_bytes(content)
        dataset = cached()
        dataset.labels = {str(path): 3}
        list(dataset)
        assert built() == list(range(8))


def _arrow_table(columns):
    return pytest.importorskip("pyarrow").table(columns)


def _polars_table(columns):
    return pytest.importorskip("polars").DataFrame(columns)


class _Slotted:
    __slots__ = ("path",)

    def __init__(self, path):
        self.path = str(path)


@pytest.mark.parametrize(
    "hold",
    [
        lambda path: os.fsencode(path),
        lambda path: np.array([os.fsencode(path)]),
        lambda path: np.array([str(path)]),
        lambda path: np.array([[path]], object),
        lambda path: np.array([str(path)], np.dtypes.StringDType()),
        lambda path: [[[[[[{"path": path}]]]]]],
        lambda path: SharedList([path]),
        lambda path: [*np.array([str(path)])],
        lambda path: np.array([(str(path), 1)], "U200,i4"),
        lambda path: _arrow_table({"path": [str(path)]}),
        lambda path: _polars_table({"path": [str(path)]}),
        _Slotted,
        lambda path: functools.partial(open, str(path)),
    ],
    ids=[
        *("bytes", "array of bytes", "array of texts", "array of objects"),
        *("array of strings", "deep", "SharedList", "text of an array"),
        *(
            "array of records",
            "table of Arrow",
            "table of polars",
            "slots",
            "partial",
        ),
    ],
)
def test_a_file_is_looked_at_wherever_its_path_is(
    cached, built, hold, tmp_path
):
    path = tmp_path / "image.png"

    def run():
        dataset = cached()
        dataset.held = hold(path)
        list(dataset)
        return len(built())

    path.write_bytes(b"first")
    assert [run(), run()] == [8, 1]
    path.write_bytes(b"second")
    assert [run(), run()] == [8, 1]


def test_a_file_in_a_column_of_a_table_is_looked_at(cached, built, tmp_path):
    pandas = pytest.importorskip("pandas")
    path = tmp_path / "image.png"
    table = pandas.DataFrame({"path": [str(path)], "label": ["a"]})
    for hold in (table, table.path, table.path.astype("string")):
        for content in (b"first", b"second"):
            path.write_bytes(content)
            dataset = cached()
            dataset.held = hold
            list(dataset)
            assert built() == list(range(8))
            path.unlink()


@pytest.mark.parametrize(
    "hold", [lambda p: p.parent, lambda p: (p.parent, p.name)]
)
def test_files_in_folders_are_not_looked_at(cached, built, hold, tmp_path):
    path = tmp_path / "folder" / "image.png"
    path.parent.mkdir()
    for content, wanted in ((b"first", 8), (b"second", 1)):
        path.write_bytes(content)
        dataset = cached()
        dataset.held = hold(path)
        list(dataset)
        assert len(built()) == wanted


_SOURCES = {
    "the class of a source": "self.factor = VALUE",
    "a helper of a source": "self.factor = helper()",
    "a global": "self.factor = FACTOR",
    "a global of another module": "self.factor = settings.FACTOR",
    "a global of a module's module": "self.factor = settings.deep.OTHER",
    "a module that a method imports": "import deep; self.factor = deep.OTHER",
    "a name that a method imports": (
        "from deep import OTHER; self.factor = OTHER"
    ),
    "a default of a helper's helper": "self.factor = helper(None)",
}


@pytest.mark.parametrize("what", _SOURCES)
@pytest.mark.parametrize("make", ["samples", "wrapped"])
def test_code_that_was_edited_makes_another_cache(
    make, what, tmp_path, monkeypatch
):
    source = textwrap.dedent(
        f"""
        import keras
        import numpy as np
        import settings

        FACTOR = VALUE

        def inner(number=VALUE):
            return number

        def helper(number=inner):
            return VALUE if number else inner()

        class Base:
            def read(self, index):
                {_SOURCES[what]}
                return np.array([index * self.factor])

        class Samples(Base):
            def __len__(self):
                return 2

            def __getitem__(self, index):
                return self.read(index)

        class Wrapped(Base, keras.utils.PyDataset):
            def __len__(self):
                return 2

            def __getitem__(self, index):
                return self.read(index)
        """
    )

    def run(value):
        for name, text in (
            ("deep", f"OTHER = {value}"),
            ("settings", f"import deep\nFACTOR = {value}"),
            ("edited", source.replace("VALUE", str(value))),
        ):
            path = tmp_path / f"{name}.py"
            path.write_text(text)
            module = types.ModuleType(name)
            module.__file__ = str(path)
            module.__spec__ = importlib.util.spec_from_file_location(name, path)
            monkeypatch.setitem(sys.modules, name, module)
            exec(compile(text, path, "exec"), vars(module))
        kwargs = {"cache": tmp_path / "c", "cache_version": 1, "workers": 0}
        if make == "samples":
            data = SampleDataset(module.Samples(), 1, **kwargs)
        else:
            data = accelerate(module.Wrapped(), **kwargs)
        return [int(np.ravel(batch)[0]) for batch in data]

    assert [run(value) for value in (2, 3, 2)] == [[0, 2], [0, 3], [0, 2]]
    assert len(list((tmp_path / "c").iterdir())) == 2


# What a module has at its top; then what its method does. "VALUE" is a number.
_CALLED = {
    "a partial's argument": "f = functools.partial(max, VALUE); return f(i)",
    "a partial's function": "f = functools.partial(edited, 1); return f(i)",
    "a vectorized function": "f = np.vectorize(edited); return f(i)",
    "a vectorized partial": (
        "f = np.vectorize(functools.partial(max, VALUE)); return f(i)"
    ),
    "a cached function": "f = functools.lru_cache(edited); return f(i)",
    "a decorator": "f = decorated(max); return f(i)",
    "a ufunc": "f = np.frompyfunc(edited, 1, 1); return f(i)",
    "a ufunc of a partial": (
        "f = np.frompyfunc(functools.partial(max, VALUE), 1, 1); return f(i)"
    ),
    "a date": "f = datetime.date(2000, 1, VALUE); return f.day",
    "a time": "f = datetime.time(VALUE); return f.hour",
    "a time difference": "f = datetime.timedelta(VALUE); return f.days",
    "a time zone": (
        "f = datetime.timezone(datetime.timedelta(hours=VALUE)); return f"
    ),
    "a decimal": "f = decimal.Decimal(VALUE); return f",
    "a fraction": "f = fractions.Fraction(VALUE); return f",
    "a path": "f = pathlib.Path('a' * VALUE); return f.name",
    "a buffer": "f = bytearray(VALUE); return f",
    "a queue": "f = collections.deque([VALUE]); return f",
    "a dispatched function": "f.register(int, edited); return f(i)",
    "a bound method": "f = Called().run; return f(i)",
    "an object that is called": "f = Called(); return f(i)",
    "an object whose method is called": "f = Helper(); return f.run(i)",
    "an object in a list in an object": (
        "f = Helper();f.steps = [Called()]; return f.steps[0].run(i)"
    ),
    "a function in a namespace": "f = Helper();f.g = edited; return f.g(i)",
    "an item getter": "f = operator.itemgetter(VALUE); return f('abcd')",
    "a pattern": "f = re.compile('a' * VALUE); return f.match('aaaa')",
    "an enumeration": "f = enum.Enum('Size', {'A': VALUE}).A; return f.value",
    "a range": "f = range(VALUE); return len(f)",
    "a statement moved from try to else": "f = max; return moved(i)",
    "a parameter that takes all arguments": "f = max; return starred(i)",
    "a relative import": "f = max; from .tools import f; return f(i)",
    "a relative import of a module": "f = max; from . import tools; return i",
    "a module of a package": "f = max; from pack import tools; return i",
    "what an imported module imports": (
        "f = max; from pack.further import f; return f(i)"
    ),
    "what an imported package imports": (
        "f = max; import pack; return pack.g(i)"
    ),
    "a module in a list": (
        "from pack import tools;f = [tools]; return f[0].f(i)"
    ),
    "a module of a class": (
        "class f: from pack import tools; return f.tools.f(i)"
    ),
    "a module around a function": (
        "import pack.tools;f = (lambda m: lambda i: m.f(i))(pack.tools); "
        "return f(i)"
    ),
    "a special method that is no function": (
        "class f: __getitem__ = functools.partialmethod(max, VALUE); "
        "return f()[i]"
    ),
    "a function of a module that is found by its name": (
        "import pack.tools as f; return getattr(f, 'ef'[1:])(i)"
    ),
    "a function in the dictionary of a module": (
        "import pack.tools as f; return f.__dict__['ef'[1:]](i)"
    ),
    "a function that is a global variable": (
        "f = max; return globals()['edi' + 'ted'](i)"
    ),
    "a name in a text": "f = max; return eval('edi' + 'ted')(i)",
    "the type of an attribute": "class f: k: 'VALUE'; return f.__annotations__",
    "the type of an argument": (
        "def f(i: 'VALUE'): pass; return f.__annotations__"
    ),
    "what is noted with a field": (
        "import dataclasses\n"
        "@dataclasses.dataclass\n"
        "class f:\n"
        "    k: int = dataclasses.field(default=1, metadata={'k': VALUE}); "
        "return f.__dataclass_fields__['k'].metadata['k']"
    ),
    "a special name": "class f: __version__ = VALUE; return f.__version__",
    "the names in a match": (
        "class f: __match_args__ = ('a',) * VALUE; return f.__match_args__"
    ),
    "the docstring of a class": "class f: 'VALUE'; return f.__doc__",
    "a view of a dict": (
        "import types\nf = types.MappingProxyType({'k': VALUE}); return f['k']"
    ),
    "a subclass": (
        "f = Called; return [g().run(i) for g in f.__subclasses__()]"
    ),
    "a function of NumPy": "f = (np.floor, np.ceil)[VALUE % 2]; return f(i)",
    "a function of Python": (
        "f = (operator.neg, operator.abs)[VALUE % 2]; return f(i)"
    ),
    "a method of a dict": "f = {1: VALUE}.get; return f(1)",
    "a library's function in an object": (
        "f = Helper();f.g = (np.sum, np.max)[VALUE % 2]; return f.g(i)"
    ),
    "a static method": "f = staticmethod(edited); return f(i)",
    "a class of a library in an object": (
        "f = Helper();f.g = (set, tuple)[VALUE % 2]; return f.g(i)"
    ),
    "a module of a library": (
        "import math, cmath\nf = (math, cmath)[VALUE % 2]; return f.sqrt(i)"
    ),
    "a module of a library in an object": (
        "import math, cmath\nf = Helper();f.g = (math, cmath)[VALUE % 2]; "
        "return f.g.sqrt(i)"
    ),
    "a class of a dict in an object": (
        "f = Helper();f.g = Table(); return f.g.run(i)"
    ),
    "what is kept for a thread": (
        "import threading\nf = threading.local();f.k = VALUE; return f.k"
    ),
    "an object that cannot be pickled": (
        "import struct\nf = struct.Struct('i' * VALUE); return f.size"
    ),
    "a method of what cannot be pickled": (
        "import struct\nf = [struct.Struct('i' * VALUE).pack]; return f[0](i)"
    ),
    "an object that claims to be a function": (
        "f = Posing(lambda i: i); return f(i)"
    ),
    "a layer of Keras": (
        "import keras\nf = keras.layers.Rescaling(VALUE); return f(i)"
    ),
    "what a weak reference leads to": (
        "import weakref\nkept = Helper();kept.run = VALUE\n"
        "f = weakref.ref(kept); return f().run"
    ),
    "a metaclass": (
        "Meta = type('Meta', (type,), {'k': VALUE});f = Meta('f', (), {}); "
        "return f.k"
    ),
}
_PACKAGE = """
import collections, datetime, decimal, enum, fractions, functools
import operator, pathlib, re
import numpy as np
from keras_fastdata import FastPyDataset

def edited(number, other=0):
    return number * VALUE

def decorated(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args) * VALUE
    return wrapper

@functools.singledispatch
def f(number):
    return number

class Called:
    def run(self, number):
        return number * VALUE
    __call__ = run

class Helper:
    def run(self, number):
        return number * VALUE

class Table(dict):
    def run(self, number):
        return number * VALUE

class Posing:
    __class__ = property(lambda self: type(edited))
    def __init__(self, function):
        self.function = function
    def __getattr__(self, name):
        return getattr(self.function, name)
    def __call__(self, number):
        return self.function(number) * VALUE

class Further(Called):
    def run(self, number):
        return number + VALUE

def starred(STARother):
    return other

def moved(number):
    try:
        found = max(number)
        MOVED_UP
    except ValueError:
        found = 7
    MOVED_DOWN
    return found

TOP

class Read(FastPyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        BODY
"""


@pytest.mark.parametrize("what", _CALLED)
def test_whatever_code_calls_makes_another_cache_when_edited(
    what, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("from pack.further import f as g")
    (package / "further.py").write_text("import pack.tools as t\nf = t.f")
    top, _, body = _CALLED[what].partition("; ")

    def run(value):
        (package / "tools.py").write_text(f"def f(i): return i * {value}")
        text = _PACKAGE.replace("TOP", top).replace("BODY", body)
        for name, new in (
            ("VALUE", str(value)),
            ("STAR", "*" if value == 2 else ""),
            ("MOVED_UP", "found = max(found)" if value == 2 else ""),
            ("MOVED_DOWN", "" if value == 2 else "else: found = max(found)"),
        ):
            text = text.replace(name, new)
        (package / "read.py").write_text(text)
        for name in ("pack", "pack.further", "pack.tools", "pack.read"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        dataset = importlib.import_module("pack.read").Read(workers=0)
        return fingerprint(dataset, version=1)

    first, second, third = map(run, (2, 3, 2))
    assert first == third != second


_WITHOUT_CONTENT = {
    "a lock": ("threading.Lock()", "object"),
    "a logger": ("logging.getLogger('read')", "object"),
    "a random generator": ("random.Random(1)", "object"),
    "an abstract base": ("None", "abc.ABC"),
    "a protocol": ("None", "Protocol"),
}
_BESIDE = """
import abc, logging, random, threading
from typing import Protocol
from keras_fastdata import FastPyDataset

held = HELD

def unused():
    return VALUE

class Base(BASE):
    pass

class Read(Base, FastPyDataset):
    held = held

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return index if held else -index
"""


@pytest.mark.parametrize("what", _WITHOUT_CONTENT)
def test_code_beside_the_dataset_may_be_edited(what, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    held, base = _WITHOUT_CONTENT[what]
    text = _BESIDE.replace("HELD", held).replace("BASE", base)

    def run(value):
        (tmp_path / "beside.py").write_text(text.replace("VALUE", str(value)))
        monkeypatch.delitem(sys.modules, "beside", raising=False)
        importlib.invalidate_caches()
        dataset = importlib.import_module("beside").Read(workers=0)
        return fingerprint(dataset, version=1)

    assert run(2) == run(3)


def test_a_script_in_which_code_looks_for_a_name_counts_as_a_whole(
    tmp_path, monkeypatch
):
    def run(value):
        top, body = "", "return globals()['edi' + 'ted'](i)"
        text = _PACKAGE.replace("TOP", top).replace("BODY", body)
        for name in ("STAR", "MOVED_UP", "MOVED_DOWN"):
            text = text.replace(name, "")
        path = tmp_path / "script.py"
        path.write_text(text.replace("VALUE", str(value)))
        main = types.ModuleType("__main__")
        main.__file__ = str(path)
        monkeypatch.setitem(sys.modules, "__main__", main)
        exec(compile(path.read_text(), path, "exec"), vars(main))
        return fingerprint(main.Read(workers=0), version=1)

    first, second, third = map(run, (2, 3, 2))
    assert first == third != second


def test_what_workers_build_without_a_value_stays_out_of_a_directory(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(conf, "transform", refused(lambda x: -x))
    use = lambda _, index: conf.transform(index)  # noqa: E731
    cached = {"cache": tmp_path, "cache_version": 1}
    for _ in range(2):
        processes = {"workers": 1, "use_multiprocessing": True, **cached}
        with Holds(0, use, **processes) as dataset:
            for _ in range(2):  # with a warning
                assert [int(batch) for batch in dataset] == [0, 1, 2]
    assert "has set `outside_config.transform`" in caplog.text
    assert "and not in the directory" in caplog.text
    with Holds(0, use, workers=0, **cached) as dataset:
        assert [int(batch) for batch in dataset] == [0, -1, -2]


def test_a_folder_that_the_cache_is_in_may_change(cached, built, tmp_path):
    for again in (False, True):
        dataset = cached()
        dataset.folder = tmp_path
        list(dataset)
        (tmp_path / "another").touch()
        assert built() == ([0] if again else list(range(8)))


def _through_partial(value):
    return functools.partial(int, value)


def _cached_property(value):
    return functools.cached_property(eval(f"lambda self: {value}"))


def _cached_method(value):
    return functools.lru_cache(eval(f"lambda self: {value}"))


def _keyword(value):
    def function(self, *, default=value):
        return default

    return function


def _nested(value):
    return type("Config", (), {"__qualname__": "Attributed.Config", "k": value})


@pytest.mark.parametrize(
    "make",
    [
        lambda value: pathlib.Path(f"/data/v{value}"),
        np.int64,
        lambda value: np.arange(value + 1),
        lambda value: pd.DataFrame({"k": [value, 1]}),
        lambda value: np.dtype(f"uint{8 * value}"),
        range,
        lambda value: re.compile(f"a{value}"),
        lambda value: types.SimpleNamespace(k=value),
        _through_partial,
        _cached_property,
        _cached_method,
        _keyword,
        _nested,
    ],
    ids=[
        *("path", "number", "array", "table", "dtype", "range", "pattern"),
        "namespace",
        *("partial", "cached property", "cached method", "keyword", "class"),
    ],
)
def test_whatever_a_class_has_makes_another_cache(make, tmp_path, monkeypatch):
    for number, value in enumerate((1, 2, 1)):
        monkeypatch.setattr(Attributed, "other", make(value), raising=False)
        _numbers(Attributed, tmp_path)
        assert len(list(tmp_path.iterdir())) == min(number + 1, 2)


@pytest.mark.parametrize("kind", ["hdf5", "memory map", "view of one"])
def test_what_is_opened_again_is_looked_at(kind, tmp_path):
    import h5py

    path = tmp_path / ("x.h5" if kind == "hdf5" else "x.npy")

    def write(value, at):
        if kind == "hdf5":
            with h5py.File(path, "w") as file:
                file["x"] = np.full((4, 2), value)
        else:
            np.save(path, np.full((4, 2), value))
        os.utime(path, ns=(at, at))

    def read():
        kwargs = {"cache": tmp_path / "cache", "workers": 0}
        kwargs["cache_version"] = 1
        if kind == "hdf5":
            with (
                h5py.File(path) as file,
                ArrayDataset(file["x"], batch_size=4, **kwargs) as dataset,
            ):
                return [float(x[0, 0]) for x in dataset]
        mapped = np.load(path, mmap_mode="r")
        if kind == "view of one":
            mapped = np.asarray(mapped)
        with ArrayDataset(mapped, batch_size=4, **kwargs) as dataset:
            return [float(x[0, 0]) for x in dataset]

    write(1.0, 10**9)
    assert read() == [1.0]
    write(2.0, 2 * 10**9)
    assert read() == [2.0]


@pytest.mark.long
@pytest.mark.parametrize("holds", ["a set of words", "a class of the script"])
def test_a_script_that_runs_again_finds_its_batches(holds, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import dataclasses, pathlib, sys
            sys.path[:0] = {sys.path!r}
            import numpy as np
            from keras_fastdata import FastPyDataset

            @dataclasses.dataclass
            class Config:
                scale: int = 2

            class D(FastPyDataset):
                def __len__(self):
                    return 3
                def __getitem__(self, index):
                    print("built", index)
                    return np.full(2, index)

            dataset = D(workers=0, cache={str(tmp_path)!r}, cache_version=1)
            if {holds == "a set of words"}:
                dataset.words = {{"a", "b", "c", "d", "e"}}
            else:
                dataset.config = Config()
            list(dataset)
            """
        )
    )

    def run(seed):
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        done = subprocess.run(
            [sys.executable, str(script)],
            capture_output=True,
            text=True,
            env=environment,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.count("built")

    assert [run(seed) for seed in (1, 2)] == [3, 1]


@pytest.mark.parametrize("place", ["inline", "1 thread"])
def test_what_workers_and_builds_set_is_no_change(place, tmp_path, built):
    with Opens(
        tmp_path / "notes",
        cache=tmp_path / "cache",
        cache_version=1,
        **PLACES[place],
    ) as dataset:
        list(dataset)
        assert built() == list(range(8))
        dataset.set_epoch(5)
        list(dataset)
        assert built() == []
        dataset.start = 100
        assert values(dataset) == list(range(100, 108))
    assert len(list((tmp_path / "cache").iterdir())) == 2


@somewhere
def test_a_file_that_is_removed_meanwhile_is_built_again(
    cached, built, tmp_path, place
):
    with cached(length=200, **PLACES[place]) as dataset:
        list(dataset)
        built()
        batches = iter(dataset)
        seen = [int(next(batches)[0]["scalar"]) for _ in range(20)]
        for index in (30, 31, 50):
            (path,) = (tmp_path / "cache").glob(f"*/{index}.batch")
            path.unlink()
        seen += values(batches)
    assert seen == list(range(200))
    assert built() == [30, 31, 50]


def test_all_of_an_epoch_can_be_held_with_few_descriptors(cached, built):
    import resource  # POSIX only; the other tests run without it

    before = len(os.listdir("/proc/self/fd"))
    dataset = cached(length=250)
    list(dataset)
    built()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 30, hard))
    try:
        held = list(dataset)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert values(held) == list(range(250))
    assert not held[-1][0]["c"].flags.writeable
    with pytest.raises(ValueError, match="cannot set WRITEABLE"):
        held[-1][0]["c"].flags.writeable = True
    assert built() == []


def test_what_other_states_have_kept_counts_as_well(cached, built, caplog):
    def run(version, most):
        dataset = cached(cache_version=version, cache_bytes=most)
        list(dataset)
        list(dataset)
        return len(built())

    assert run(1, 100_000) == 8
    assert run(2, 100) == 16
    assert "bytes are in use" in caplog.text


def test_no_more_files_stay_open_than_a_few(cached, built):
    before = len(os.listdir("/proc/self/fd"))
    dataset = cached(length=250)
    for _ in range(3):
        assert values(dataset) == list(range(250))
    assert len(os.listdir("/proc/self/fd")) < before + 150
    assert built() == list(range(250))


@pytest.mark.parametrize(
    "layout",
    [
        '{"shape": [1], "dtype": {"name": "no such"}, "order": "C"}',
        '{"shape": [1e400], "dtype": "<f4", "order": "C"}',
        '{"shape": [1], "dtype": "i4,,", "order": "C"}',
        '{"shape": [1], "dtype": "O", "order": "C"}',
        '{"shape": [], "dtype": {"name": "finfo"}, "order": "C"}',
        '{"shape": [], "dtype": {"name": "__name__"}, "order": "C"}',
        '{"shape": [], "dtype": "T", "order": "C"}',
        '{"shape": [2], "dtype": "i2,i2", "order": "C"}',
        '{"shape": [-1], "dtype": "<i4", "order": "C"}',
        '{"shape": [-1, -1], "dtype": "<i4", "order": "C"}',
        '{"shape": [0, 1], "dtype": "<i4", "order": "C"}',
        '{"shape": [4611686018427387905], "dtype": "<i4", "order": "C"}',
        '{"shape": [2], "dtype": "<i4", "order": "C"}',
        '["set", []]',
        "[" * 5000 + "]" * 5000,
    ],
    ids=range(15),
)
def test_a_hostile_file_is_not_trusted(cached, built, layout, tmp_path, caplog):
    list(cached())
    built()
    (path,) = (tmp_path / "cache").glob("*/3.batch")
    head = b'{"layout": %s, "arrays": [[4, 558161692]]}' % layout.encode()
    data = b"keras_fastdata batch 1\n"
    data += struct.pack("<QI", len(head), zlib.crc32(head)) + head
    data += bytes(-len(data) % 64) + bytes(4)
    path.write_bytes(data)
    assert values(cached()) == list(range(8))
    assert built() == [0, 3]
    (record,) = caplog.records
    assert "is not a batch that was cached" in record.getMessage()


_BATCH = {"x": np.arange(9.0), "y": [np.array([b"abc"]), np.array(True)]}
_SHAPES = st.lists(st.integers(-2, 2**63) | st.integers(0, 3), max_size=3)
_TYPES = st.sampled_from(
    ["O", "|O", "T", "V8", "<i4", "|S3", "<U1", "<M8[s]", "i4,O", "2i4", ""]
) | st.sampled_from(
    ["finfo", "iinfo", "bfloat16", "int4", "_np", "__all__", "imag", "no"]
).map(lambda name: {"name": name})
_LEAVES = st.fixed_dictionaries(
    {"shape": _SHAPES, "dtype": _TYPES, "order": st.sampled_from("CFA")}
)
_LAYOUTS = st.recursive(
    _LEAVES | st.none() | st.integers() | st.text(max_size=3),
    lambda parts: st.lists(
        st.sampled_from(["tuple", "list", "dict", "set"])
        | st.lists(st.sampled_from("abc"), max_size=3)
        | st.lists(parts, max_size=3),
        max_size=3,
    ),
    max_leaves=5,
)
_EXTENTS = st.lists(st.tuples(st.integers(-8, 99), st.just(0)), max_size=3)


def test_a_directory_that_cannot_be_made_leaves_batches_uncached(
    tmp_path, monkeypatch, caplog
):
    def mkdir(self, **how):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(pathlib.Path, "mkdir", mkdir)
    with Numbered(workers=0, cache=tmp_path, cache_version=1) as dataset:
        for _ in range(2):
            assert numbers(dataset) == list(range(10))
    (message,) = caplog.messages
    assert message.startswith(
        "No more batches of Numbered are cached: the directory cannot be made "
        "([Errno 13] Permission denied: "
    )


def test_a_file_in_place_of_the_directory_is_said_once(tmp_path, caplog):
    (tmp_path / "file").touch()
    where = {"cache": tmp_path / "file", "cache_version": 1}
    with Numbered(workers=0, **where) as dataset:
        for _ in range(2):
            assert numbers(dataset) == list(range(10))
    (message,) = caplog.messages
    assert "the directory cannot be made ([Errno 20] Not a dir" in message


def test_a_directory_that_is_removed_is_filled_again(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(cache_files, "_MOST_OPEN", 1)
    folder = tmp_path / "cache"
    with Numbered(workers=0, cache=folder, cache_version=1) as dataset:
        assert numbers(dataset) == list(range(10))
        shutil.rmtree(folder)
        assert numbers(dataset) == list(range(10))
        (message,) = caplog.messages
        assert "cannot be had from the cache any more" in message
        assert len(list(folder.glob("*/*.batch"))) == 10
        assert numbers(dataset) == list(range(10))
    assert len(caplog.messages) == 1


@pytest.fixture(scope="module")
def batch_file(tmp_path_factory):
    """What is read of a batch's file that has these bytes; `None`: damaged."""
    folder = tmp_path_factory.mktemp("file")

    def read(data):
        # Not into the file before, which may be mapped.
        (folder / "0.batch").unlink(missing_ok=True)
        (folder / "0.batch").write_bytes(data)
        cache = DiskCache("Any", folder, None)
        cache.holds(0)  # reads the file
        with contextlib.suppress(OSError, ValueError):
            return cache.get(0)
        return None

    DiskCache("Any", folder, None).put(0, _BATCH)
    read.whole = (folder / "0.batch").read_bytes()
    return read


@given(data=st.data())
def test_a_file_with_any_bytes_changed_is_the_batch_or_damaged(
    batch_file, data
):
    whole = bytearray(batch_file.whole)
    places = st.integers(0, len(whole) - 1)
    changes = data.draw(st.lists(st.tuples(places, st.integers(1, 255))))
    for place, change in changes:
        whole[place] ^= change
    length = data.draw(places | st.just(len(whole)))
    found = batch_file(bytes(whole[:length]))
    if found is not None:
        keras.tree.map_structure(np.testing.assert_array_equal, found, _BATCH)
    elif length == len(whole):
        assert bytes(whole) != batch_file.whole


@given(data=st.binary(max_size=200))
def test_a_file_of_any_bytes_is_damaged(batch_file, data):
    assert batch_file(data) is None
    assert batch_file(batch_file.whole[:23] + data) is None


@given(_LAYOUTS, _EXTENTS)
@example({"shape": [1], "dtype": {"name": "finfo"}, "order": "C"}, [(8, 0)])
def test_a_file_of_any_layout_is_a_batch_of_its_bytes_or_damaged(
    batch_file, layout, arrays
):
    arrays = [(n, zlib.crc32(b"\1" * max(0, n))) for n, _ in arrays]
    head = json.dumps({"layout": layout, "arrays": arrays}).encode()
    data = b"keras_fastdata batch 1\n"
    data += struct.pack("<QI", len(head), zlib.crc32(head)) + head
    for nbytes, _ in arrays:
        data += bytes(-len(data) % 64) + b"\1" * nbytes
    found = keras.tree.flatten(batch_file(data))
    if found != [None]:
        for leaf, (nbytes, _) in zip(found, arrays, strict=True):
            assert leaf.tobytes() == b"\1" * nbytes


def test_a_pipe_in_place_of_a_file_is_not_waited_for(cached, built, tmp_path):
    list(cached())
    built()
    (path,) = (tmp_path / "cache").glob("*/3.batch")
    path.unlink()
    os.mkfifo(path)
    assert values(cached()) == list(range(8))
    assert built() == [0, 3]


def test_another_users_files_are_left_as_they_are(
    cached, built, tmp_path, monkeypatch, caplog
):
    list(cached())
    built()
    paths = [*(tmp_path / "cache").glob("*/[345].batch")]
    before = [os.stat(path) for path in paths]
    usual = batch_files._open_at_once

    def refuse(path, flags):
        if path in map(str, paths):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return usual(path, flags)

    monkeypatch.setattr(batch_files, "_open_at_once", refuse)
    dataset = cached()
    for compared in ([0], []):
        assert values(dataset) == list(range(8))
        assert built() == [*compared, 3, 4, 5]
    assert [os.stat(path) for path in paths] == before
    (record,) = caplog.records
    assert "may not read" in record.getMessage()


@pytest.mark.parametrize("dtype", ["V8", "<M8[ns]", "S3", "U2", "bfloat16"])
def test_arrays_of_any_type_without_objects_are_kept(tmp_path, dtype):
    kind = getattr(ml_dtypes, dtype, dtype)
    batch = np.zeros(8, kind)
    cache = DiskCache("Any", tmp_path, None)
    cache.put(0, batch)
    again = DiskCache("Any", tmp_path, None)
    assert not again.holds(0)  # it is to be compared
    again.put(0, batch)
    assert again.holds(0)
    np.testing.assert_array_equal(again.get(0), batch, strict=True)


@pytest.mark.parametrize(
    "damage",
    ["a byte", "the head", "its end", "all of it", "something else", "magic"],
)
def test_a_damaged_file_is_not_trusted(cached, built, damage, tmp_path, caplog):
    list(cached())
    built()
    (path,) = (tmp_path / "cache").glob("*/3.batch")
    data = bytearray(path.read_bytes())
    match damage:
        case "a byte":
            data[-2] ^= 1
        case "the head":
            data[60] ^= 1
        case "its end":
            del data[-20:]
        case "all of it":
            data.clear()
        case "something else":
            data[:] = b"\x80\x05." * 100
        case "magic":
            del data[10:]
    path.write_bytes(data)
    assert values(cached()) == list(range(8))
    assert built() == [0, 3]
    (record,) = caplog.records
    assert "3.batch is not a batch that was cached" in record.getMessage()
    assert values(cached()) == list(range(8))
    assert built() == [0]  # to compare it


def test_a_directory_that_cannot_be_written_to_is_said_to_be_one(
    cached, built, monkeypatch, caplog
):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", refuse)
    dataset = cached()
    for _ in range(2):
        assert values(dataset) == list(range(8))
        assert built() == list(range(8))
    (record,) = caplog.records
    assert "No space left on device" in record.getMessage()
    left = list(pathlib.Path(dataset.notes).parent.rglob("*.tmp"))
    assert left == []


# -- through Keras -----------------------------------------------------------


def _fit(dataset, *callbacks):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with dataset:
        return model.fit(
            dataset,
            epochs=3,
            shuffle=False,
            verbose=0,
            callbacks=list(callbacks),
        ).history["loss"]


@pytest.mark.backend
@kinds
@pytest.mark.parametrize(
    "place", quickly(["inline", "1 thread", "2 processes"], "2 processes")
)
def test_fit_learns_the_same(kind, place, tmp_path):
    cache = "memory" if kind == "memory" else tmp_path
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*not writable")
        found = _fit(Trainable(cache=cache, cache_version=0, **PLACES[place]))
    assert found == _fit(Trainable(**PLACES[place]))


class Scheduled(FastPyDataset):
    """Builds edit one item of its options, and callbacks another."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.options = {"level": 0, "file": None}
        self.get, self.set = self._closures()

    @staticmethod
    def _closures():
        level = 0

        def get():
            return level

        def set(new):
            nonlocal level
            level = new

        return get, set

    def __len__(self):
        return 3

    def __getitem__(self, index):
        if self.options["file"] is None:
            self.options["file"] = "open"
        levels = self.options["level"], self.get()
        return np.array([levels], "float32"), np.zeros((1, 1), "float32")


@pytest.mark.backend
@pytest.mark.parametrize("hook", ["on_train_begin", "on_epoch_begin"])
@pytest.mark.parametrize("place", ["inline", "1 thread", "4 threads"])
def test_what_callbacks_set_before_the_first_batch_is_in_all_batches(
    place, hook
):
    seen = []

    class Records(keras.layers.Layer):
        def call(self, inputs):
            seen.append(inputs)
            return inputs[:, :1]

    dataset = Scheduled(cache="memory", **PLACES[place])

    def set_all(*_):
        dataset.options["level"] = 7
        dataset.set(8)

    callback = keras.callbacks.LambdaCallback(**{hook: set_all})
    model = keras.Sequential([Records(), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    with dataset:
        model.fit(dataset, epochs=2, verbose=0, callbacks=[callback])
        batches = [batch.tolist() for batch, _ in dataset]
    assert batches == [[[7, 8]]] * 3
    if keras.backend.backend() != "jax":  # whose steps are compiled
        found = [keras.ops.convert_to_numpy(x).tolist() for x in seen[-6:]]
        assert found == [[[7, 8]]] * 6


@pytest.mark.backend
@somewhere
def test_epochs_from_the_cache_are_measured(place):
    health = LoaderHealth(verbose=0)
    _fit(Trainable(cache="memory", **PLACES[place]), health)
    assert [e.batches for e in health.summary().epochs] == [6, 6, 6]


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (datetime.date(2020, 1, 1), datetime.date(2021, 1, 1)),
        (conf.Level.LOW, conf.Level.HIGH),
        (range(2), range(3)),
        (["a"] * 2000, ["b"] * 2000),
        ("a" * 100_000, "b" * 100_000),
        (bytearray(b"a"), bytearray(b"b")),
        (conf.Pair(1, 2), conf.Pair(1, 3)),
        (conf.Steps([1]), conf.Steps([2])),
        ({n: n for n in range(2000)}, {n: n + 1 for n in range(2000)}),
    ],
)
def test_data_in_a_global_object_changes_the_directory(
    tmp_path, monkeypatch, first, other
):
    """The last batch alone depends on it, which is not compared."""
    held = Held(first)
    monkeypatch.setattr(conf, "config", held)

    def use(_, index):
        return zlib.crc32(repr(conf.config.thing).encode()) * (index == 2)

    found = []
    for value in (first, other, first):
        held.thing = value
        with Holds(
            0, use, cache=tmp_path, cache_version=1, workers=0
        ) as dataset:
            found.append([int(batch) for batch in dataset])
    assert found[0] == found[2] != found[1]
    assert len(list(tmp_path.iterdir())) == 2


class Held:
    """An object of the user's in a variable."""

    def __init__(self, thing):
        self.thing = thing


@pytest.mark.parametrize(
    "held",
    [array.array("d", [0]), Held(np.zeros(2)), Held(array.array("d", [0]))],
    ids=["array", "array of an object", "standard array of an object"],
)
def test_an_array_that_changes_between_epochs_is_told_apart(
    held, tmp_path, monkeypatch
):
    monkeypatch.setattr(conf, "config", held)

    def use(*_):
        found = conf.config
        return (found.thing if isinstance(found, Held) else found)[0]

    items = held.thing if isinstance(held, Held) else held
    kwargs = {"cache": tmp_path, "cache_version": 1, "workers": 0}
    with Holds(0, use, **kwargs) as dataset:
        for number in (0, 1, 2, 1):
            items[0] = number
            assert [int(batch) for batch in dataset] == [number] * 3


def test_an_attribute_of_a_function_changes_the_fingerprint():
    def scaled(index):
        return np.array([index * scaled.factor])

    class Scaled(FastPyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return scaled(index)

    found = set()
    for factor in (1, 2, 1):
        scaled.factor = factor
        found.add(fingerprint(Scaled(workers=0), version=1))
    assert len(found) == 2


_WITH_CONFIG = """
import sys
import numpy as np
from keras_fastdata import FastPyDataset

class Config:
    def __init__(self, scale, names):
        self.scale, self.names, self.reads = scale, names, 0

CONFIG = Config(int(sys.argv[1]), {"a", "b", "c", "d"})

class Read(FastPyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        CONFIG.reads += 1
        return np.array(index * CONFIG.scale * len(CONFIG.names))

def values():
    workers = int(sys.argv[2])
    with Read(cache="cache", cache_version=1, workers=workers) as dataset:
        return [int(batch) for batch in dataset]

if __name__ == "__main__":
    print(values(), CONFIG.reads)
    CONFIG.scale = 9
    print(values(), CONFIG.reads)
"""


def test_a_directory_is_for_the_attributes_of_global_objects(tmp_path):
    (tmp_path / "script.py").write_text(_WITH_CONFIG)

    def run(scale, workers, hash_seed):
        done = subprocess.run(
            [sys.executable, "script.py", str(scale), str(workers)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert not done.returncode, done.stderr
        return done.stdout.split("\n")[:2]

    assert run(1, 0, 1) == ["[0, 4, 8] 3", "[0, 36, 72] 6"]
    # Where nothing differs, one batch is built, to compare it.
    assert run(2, 1, 2) == ["[0, 8, 16] 3", "[0, 36, 72] 4"]


def test_a_directory_is_for_the_folder_that_relative_paths_begin_at(
    tmp_path, monkeypatch
):
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "data.bin").write_bytes(name[:1].encode())
        os.utime(folder / "data.bin", (1, 1))
    kinds = {"cache": tmp_path / "cache", "cache_version": 1, "workers": 0}
    for name in ("one", "two", "one"):
        monkeypatch.chdir(tmp_path / name)
        with Holds("data.bin", _first_byte, **kinds) as dataset:
            assert [int(batch) for batch in dataset] == [ord(name[0])] * 3
    assert len([*tmp_path.glob("cache/*/*.batch")]) == 6


def _first_byte(path, index):
    with open(path, "rb") as file:
        return file.read(1)[0]


class Diagonal(FastPyDataset):
    """Has one item of a large array in each batch."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.items = np.zeros((600, 600))

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return np.array([self.items[index, index]])


@everywhere
def test_an_edit_of_one_item_of_a_large_array_empties_a_directory(
    place, tmp_path
):
    cache = {"cache": tmp_path, "cache_version": "1"}
    with Diagonal(**cache, **PLACES[place]) as dataset:
        for epoch in range(1, 4):
            expected = dataset.items.diagonal()[:4].tolist()
            assert [item for (item,) in dataset] == expected
            dataset.items[epoch, epoch] = 5


_EDITED = ("array", "counter", "array of objects", "text")


@everywhere
@pytest.mark.parametrize("kind", quickly(_EDITED, *_EDITED[:2]))
def test_an_edit_of_an_object_of_a_users_subclass_empties_a_directory(
    kind, place, tmp_path
):
    cache = {"cache": tmp_path, "cache_version": "1"}
    thing = MAKERS[kind]()
    for _ in range(2):
        with Holds(thing, _scale, **cache, **PLACES[place]) as dataset:
            for scale in (5, 6, 5):
                thing.scale = scale
                assert [int(batch) for batch in dataset] == [scale] * 3


def _scale(thing, index):
    return np.array(thing.scale)
