"""What the training process changes reaches the workers before a batch."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import threading
import unittest.mock
import warnings

import numpy as np
import pytest
from edited_holders import HOLDERS
from places import EVERY_KIND
from samples import Holds, Leveled, Numbered, OpensFiles, numbers

from keras_fastdata import FastPyDataset, combine
from keras_fastdata._call_stack import ignoring_errors
from keras_fastdata.building.worker_state import LostStateMonitor
from keras_fastdata.engine import seen_variable
from keras_fastdata.memory import shared_state

pytestmark = pytest.mark.usefixtures("kept_forkserver")


@pytest.fixture(
    params=[
        pytest.param(place, marks=pytest.mark.long)
        if place in ("spawn", "portable")  # they start Python again and again
        else place
        for place in EVERY_KIND
    ]
)
def place(request):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`start_method='fork'`")
        yield EVERY_KIND[request.param]


def _levels(batches):
    return [int(x[0]) for x, _ in batches]


def test_an_assigned_attribute_shows_in_the_very_next_batch(place):
    with Leveled(**place) as dataset:
        batches = iter(dataset)
        assert _levels([next(batches)]) == [0]
        dataset.level = 5
        assert _levels(batches) == [5] * 9


class _Wraps(FastPyDataset):
    """Has the batches of another dataset."""

    def __init__(self, parts, *, early=False, **kwargs):
        if early:
            self.parts = parts
        super().__init__(**kwargs)
        self.parts = parts

    def __len__(self):
        return 10

    def __getitem__(self, index):
        part = self.parts[0] if isinstance(self.parts, list) else self.parts
        return part[index]


@pytest.mark.parametrize(
    "wrap",
    [
        _Wraps,
        functools.partial(_Wraps, early=True),
        lambda part, **place: _Wraps([part], **place),
        lambda part, **place: _Wraps(_Wraps(part), **place),
    ],
    ids=["attribute", "before init", "list", "twice"],
)
def test_an_assignment_to_a_dataset_in_an_attribute_shows(place, wrap):
    part = Leveled()
    with wrap(part, **place) as dataset:
        part.whole = dataset  # each refers to the other
        batches = iter(dataset)
        assert _levels([next(batches)]) == [0]
        part.level = 5
        assert _levels(batches) == [5] * 9


def test_an_edit_of_a_dataset_in_an_attribute_shows_after_mark_changed(place):
    part = Leveled()
    with _Wraps(part, **place) as dataset:
        batches = iter(dataset)
        next(batches)
        part.table["level"] = 7
        part.mark_changed()
        assert [int(x[1]) for x, _ in batches] == [7] * 9


def test_a_hook_of_a_dataset_in_an_attribute_that_is_called_shows(place):
    class Hooked(Leveled):
        def on_epoch_end(self):
            self.table["level"] += 1

    part = Hooked()
    with _Wraps(part, **place) as dataset:
        for level in range(3):
            assert [int(x[1]) for x, _ in dataset] == [level] * 10
            part.on_epoch_end()


@pytest.mark.backend
def test_a_hook_of_a_dataset_in_an_attribute_that_fit_calls_shows(place):
    import keras

    class Hooked(Leveled):
        def __getitem__(self, index):
            state, target = super().__getitem__(index)
            return state[None], target

        def on_epoch_end(self):
            self.table["level"] += 1

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    part = Hooked()
    with _Wraps(part, **place) as dataset:
        assert [int(x[0, 1]) for x, _ in dataset] == [0] * 10
        model.fit(part, epochs=2, verbose=0)
        assert part.table["level"] >= 2
        assert [int(x[0, 1]) for x, _ in dataset] == [part.table["level"]] * 10


def test_a_deleted_attribute_is_gone_in_the_workers(place):
    with Leveled(**place) as dataset:
        batches = iter(dataset)
        next(batches)
        del dataset.level
        assert _levels(batches) == [-1] * 9


def test_an_edit_in_place_shows_after_mark_changed(place):
    with Leveled(**place) as dataset:
        batches = iter(dataset)
        next(batches)
        dataset.table["level"] = 7
        dataset.mark_changed()
        assert [int(x[1]) for x, _ in batches] == [7] * 9


def test_a_change_loses_and_repeats_no_batch(place):
    with Leveled(length=60, **place) as dataset:
        seen = []
        for number, batch in enumerate(dataset):
            seen.append(batch)
            if number % 7 == 0:
                dataset.level = number
        assert numbers(seen) == list(range(60))
        assert _levels(seen)[1:] == [n // 7 * 7 for n in range(59)]


def test_large_arrays_change_with_the_rest(place):
    with Leveled(**place) as dataset:
        dataset.array = np.arange(100_000)
        assert all(int(x[2]) == 99_999 for x, _ in dataset)
        dataset.array = np.arange(200_000)
        assert all(int(x[2]) == 199_999 for x, _ in dataset)


def test_a_mask_that_is_edited_between_epochs_reaches_workers(place):
    with Leveled(**place) as dataset:
        dataset.array = np.ma.array([1.0, 2.0])
        assert all(int(x[2]) == 2 for x, _ in dataset)
        dataset.array[-1] = np.ma.masked
        assert all(np.isnan(x[2]) for x, _ in dataset)


def test_a_fill_value_that_is_edited_between_epochs_reaches_workers(place):
    array = np.ma.array([1, 2], mask=[0, 1])
    with Holds(array, lambda array, _: array.filled()[1], **place) as dataset:
        for value in (5, 9):
            array.fill_value = value
            assert [int(batch) for batch in dataset] == [value] * 3


def test_a_private_map_that_is_edited_between_epochs_reaches_workers(
    place, tmp_path
):
    np.save(tmp_path / "a.npy", np.zeros(3))
    with Leveled(**place) as dataset:
        dataset.array = np.load(tmp_path / "a.npy", mmap_mode="c")
        assert all(int(x[2]) == 0 for x, _ in dataset)
        dataset.array[-1] = 5
        assert all(int(x[2]) == 5 for x, _ in dataset)


class _Scale:
    factor = 1

    def load(self, factor):
        self.factor = factor


class _Scaled:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self):
        return self.scale.factor


class _HasSlot(FastPyDataset):
    __slots__ = ("slot",)


class Started(_HasSlot):
    """Has `on_worker_start` make what depends on the dataset."""

    def __init__(self, log, **kwargs):
        super().__init__(**kwargs)
        self.log, self.level = log, 0
        self.scale, self.loaded = _Scale(), _Scale()
        self.table, self.array = {"a": 1}, np.ones(4, int)
        self.rng_given = np.random.default_rng(4)
        self.slot, self.local = 0, threading.local()
        self.local.number = 0

    def on_worker_start(self):
        with open(self.log, "a") as log:
            log.write("start ")
        self.edit()
        self.scaled = _Scaled(self.scale)
        self.look = self.table.get
        self.view = self.array[1:2]
        self.partial = functools.partial(getattr, self.scale)
        self.draw = self.rng_given.integers

    def edit(self):
        self.loaded.load(7)
        self.slot = self.local.number = 8

    def on_worker_stop(self):
        with open(self.log, "a") as log:
            log.write("stop ")

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return np.array(
            [
                *(self.level, self.loaded.factor, self.scaled()),
                *(self.look("a"), self.view[0], self.partial("factor")),
                *(self.slot, self.local.number),
                *(self.draw(99), self.rng_given.integers(99)),
            ]
        )


@pytest.mark.parametrize("method", ["forkserver", "portable"])
def test_what_on_worker_start_made_of_the_dataset_sees_its_changes(
    method, tmp_path
):
    def epochs(**place):
        with Started(tmp_path / "log", seed=3, **place) as dataset:
            found = [[batch.tolist() for batch in dataset]]
            dataset.level = 1
            found.append([batch.tolist() for batch in dataset])
            dataset.scale.factor = 5
            found.append([batch.tolist() for batch in dataset])
            dataset.table["a"] = 6
            dataset.array[:] = 8
            found.append([batch.tolist() for batch in dataset])
        return found

    inline = epochs(workers=0)
    (tmp_path / "log").unlink()
    place = {"use_multiprocessing": True, "start_method": method}
    assert epochs(workers=1, **place) == inline
    # Each change was one state; both hooks ran for each.
    assert (tmp_path / "log").read_text() == "start stop " * 4
    assert epochs(workers=2, **place) == inline
    assert [batch[:8] for batch in inline[-1]] == [[1, 7, 5, 6, 8, 5, 8, 8]] * 3


@pytest.mark.parametrize("name", ["loaded", "slot", "local"])
def test_what_on_worker_start_edited_in_the_dataset_is_kept(name, tmp_path):
    class Edits(Started):
        def on_worker_start(self):
            self.scaled, self.look, self.view = int, len, [0]
            self.partial = self.draw = id
            if name == "loaded":
                self.loaded.load(7)
            elif name == "slot":
                self.slot = 7
            else:
                self.local.number = 7

        def __getitem__(self, index):
            if name == "local":
                return np.array(self.local.number)
            return np.array(self.slot if name == "slot" else self.loaded.factor)

    place = {"workers": 1, "use_multiprocessing": True}
    with Edits(tmp_path / "log", **place) as dataset:
        for dataset.level in range(3):
            assert [int(batch) for batch in dataset] == [7] * 3


class OpensItself(FastPyDataset):
    """Opens a file in each worker, and is combined with others."""

    def __init__(self, path, **kwargs):
        super().__init__(**kwargs)
        self.path, self.file, self.level = path, None, 0

    def on_worker_start(self):
        self.file = self.path.open()

    def on_worker_stop(self):
        self.file.close()

    def __len__(self):
        return 3

    def __getitem__(self, index):
        self.file.seek(0)
        return np.array([int(self.file.read()), self.level])


@pytest.mark.parametrize("is_deep", [False, True])
def test_what_on_worker_start_opened_is_kept_in_combined_datasets(
    is_deep, tmp_path, caplog
):
    path = tmp_path / "number"
    path.write_text("7")
    place = {"workers": 2, "use_multiprocessing": True}
    inner = OpensItself(path)
    within = combine.map(inner, np.copy) if is_deep else inner
    with combine.concat([within], **place) as dataset:
        for inner.level in range(3):
            found = [batch.tolist() for batch in dataset]
            assert found == [[7, inner.level]] * 3
    assert not caplog.messages


class StartsOnce(Started):
    """Raises an error when it starts again."""

    def on_worker_start(self):
        if self.level:
            raise ValueError("no second start")
        super().on_worker_start()


class _Refusing(list):
    """A list, and an object with a shape, that refuse to be looked at."""

    def _refuse(self, *_):
        raise RuntimeError("not now")

    __len__ = __getitem__ = __eq__ = _refuse
    __hash__ = None
    shape = property(_refuse)


def test_objects_that_refuse_to_be_looked_at_do_not_disturb_builds(tmp_path):
    class HoldsRefusing(Started):
        refusing = None

        def __getitem__(self, index):
            self.refusing.append(index)
            return super().__getitem__(index)

    place = {"workers": 1, "use_multiprocessing": True}
    with HoldsRefusing(tmp_path / "log", **place) as dataset:
        dataset.refusing = _Refusing()
        for dataset.level in range(3):
            assert len(list(dataset)) == 3


def test_an_error_of_a_second_on_worker_start_arrives(tmp_path):
    place = {"workers": 1, "use_multiprocessing": True}
    with StartsOnce(tmp_path / "log", **place) as dataset:
        assert len(list(dataset)) == 3
        dataset.level = 1
        with pytest.raises(ValueError, match="no second start"):
            list(dataset)


def test_what_on_worker_start_opened_is_not_overwritten(tmp_path):
    path = tmp_path / "lines"
    path.write_text("one\ntwo\n")
    with OpensFiles(path, **EVERY_KIND["process"]) as dataset:
        assert list(dataset) == ["one two"] * 4
        dataset.separator = "-"
        assert list(dataset) == ["one-two"] * 4
        assert dataset.file is None


def test_worker_hooks_run_once_in_each_worker(tmp_path):
    path = tmp_path / "lines"
    path.write_text("one\ntwo\n")
    log = tmp_path / "log"
    with OpensFiles(path, log=log, **EVERY_KIND["process"]) as dataset:
        for _ in range(20):
            list(dataset)
    events = sorted(log.read_text().split())
    assert events in (["start", "stop"], ["start", "start", "stop", "stop"])


def test_notes_that_a_build_keeps_are_not_a_change():
    with Leveled(workers=0) as dataset:
        batches = iter(dataset)
        next(batches)
        assert dataset.built == 1
        assert not dataset._fastdata.loader.changes.are_new


class _Tools:
    def __init__(self):
        self.used = 0


class Counting(Leveled):
    """Keeps state on `self`, and what a worker may well keep there."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seen = []
        self.tools = _Tools()
        self.cache = {}
        self.file = self.pid = None
        self.name = "counting"

    def __getitem__(self, index):
        self.seen.append(index)
        self.tools.used += 1
        self.cache[index] = index
        if self.pid != os.getpid():
            self.file, self.pid = object(), os.getpid()
        self.name = "".join(["count", "ing"])
        return super().__getitem__(index)


@pytest.mark.parametrize("place", ["process", "fork"])
@pytest.mark.filterwarnings("ignore:`start_method='fork'`")
def test_state_that_builds_keep_in_workers_is_said_to_be_lost_once(
    place, caplog
):
    with Counting(length=24, **EVERY_KIND[place]) as dataset:
        for _ in range(2):
            assert len(list(dataset)) == 24
            dataset.level += 1
        dataset.close()  # and new workers
        list(dataset)
        assert dataset.seen == []
    (said,) = (m for m in caplog.messages if "lost" in m)
    assert "Counting.__getitem__ changes `self." in said
    assert "`self.seen`, `self.tools.used` in worker processes" in said


@pytest.mark.parametrize("place", ["inline", "thread"])
def test_state_that_builds_keep_in_the_training_process_is_not_lost(
    place, caplog
):
    with Counting(length=24, **EVERY_KIND[place]) as dataset:
        assert len(list(dataset)) == 24
        assert sorted(dataset.seen) == list(range(24))
    assert not caplog.messages


def _looks(attributes, edits):
    """What is said to have changed while `x` was edited, look after look."""
    notices = LostStateMonitor(attributes)
    found = []
    for edit in edits:
        while not notices.count_build():
            pass
        exec(edit, {"np": np}, attributes)
        found += notices.look(attributes, ([np.zeros((2, 5))], np.zeros(2)))
    return found


@pytest.mark.parametrize(
    ("value", "edits"),
    [
        (None, ["x = 1", "x = 2"]),
        (1, ["x = 5", "x = 5", "x = 5"]),
        (0.5, ["x = 0.5", "x = 0.25 * 2"]),
        ({}, ["pass", "x[1] = 2", "x[3] = 4", "del x[1]"]),
        ([None] * 2, ["x[0] = 1", "x[1] = 2"]),
        ([None] * 99, ["x[0] = 1", "x[1] = 2"]),
        ({"a": np.ones(3)}, ["x['a'] = np.ones(3)", "x['a'] = np.ones(3)"]),
        (np.zeros(3), ["x[0] = 1", "x[1] = 2"]),
        (np.full(3, np.nan), ["x[0] = 1", "x[1] = 2"]),
        (np.ones((2, 5)), ["x += 1", "x += 1"]),
        (np.ones(5), ["x += 1", "x += 1"]),
        ({"a": np.arange(3)}, ["pass", "x['b'] = x.pop('a')"]),
    ],
    ids=[
        *("file", "pid", "equal", "cache", "files", "long", "made again"),
        "cache in an array",
        *("cache of NaN", "buffer", "buffer of a sample", "cache of arrays"),
    ],
)
def test_what_a_worker_opens_or_caches_for_itself_is_not_lost_state(
    value, edits
):
    assert _looks({"x": value}, edits) == []
    assert _looks({}, ["pass", *edits] if value is None else []) == []


@pytest.mark.parametrize(
    ("value", "edit"),
    [
        (0, "x += 1"),
        ("a", "x += 'a'"),
        ({1: 1}, "x[1] += 1"),
        ({1}, "x.add(len(x) + 1)"),
        ([], "x.append(3)"),
        ([1], "x[0] += 1"),
        ([0] * 99, "x.append(3)"),
        ([*range(99)], "x[:] = x[::-1]"),
        (dict.fromkeys(range(99), 1), "x[1] += 1"),
        ([{"a": 1}] * 2, "x[0]['a'] += 1"),
        ([np.ones(3), np.ones(3)], "x[1] /= 2"),
        ({"a": np.ones(3)}, "x['a'] /= 2"),
        ((np.ones(3), np.ones(3)), "x[1].__itruediv__(2)"),
        ([{"boxes": [[1.0, 2.0]]}], "x[0]['boxes'][0][1] /= 2"),
        ([_Tools()], "x[0].used += 1"),
        (np.arange(320), "np.random.shuffle(x)"),
        (np.arange(200_000), "np.random.shuffle(x)"),
        (np.array(["a", "b", "c"], object), "x[:] = x[[1, 2, 0]]"),
        (np.full((8, 3), 256.0), "x[0] /= 2"),
        (np.full((8, 9), 256.0)[:, ::2], "x[3] /= 2"),
        (np.array(1), "x += 1"),
        (_Tools(), "x.used += 1"),
        (np.zeros(3), "x = x + 1"),
        (iter(range(9)), "next(x)"),
        (iter([1, 2, 3, 4]), "next(x)"),
        (itertools.cycle("abcde"), "next(x)"),
        (itertools.count(0.5), "next(x)"),
        (zip(map(str, "abcd"), range(9), strict=False), "next(x)"),
    ],
    ids=[
        "number",
        "text",
        "value",
        "set",
        "list",
        "item",
        "long",
        "index",
        "counts",
        "list of dicts",
        "list of arrays",
        "dict of arrays",
        "tuple of arrays",
        "list of boxes",
        "list of objects",
        "index in an array",
        "long index in an array",
        "names in an array",
        "images",
        "columns of an array",
        "number in an array",
        "object",
        "array",
        "iterator of a range",
        "iterator of a list",
        "cycle",
        "count",
        "zip",
    ],
)
def test_what_changes_again_and_again_is_lost_state(value, edit):
    (found,) = set(_looks({"x": value}, [edit] * 3))
    assert found in ("x", "x.used")


def test_a_new_state_of_the_dataset_is_not_lost_state():
    notices = LostStateMonitor({"x": 0})
    for value in range(3):
        notices.begin({"x": value})
        assert notices.count_build()
        assert notices.look({"x": value}) == []
        assert notices.count_build()
        assert notices.look({"x": value}) == []


class FromFile(FastPyDataset):
    """Reads its batches from a memory map of a file."""

    def __init__(self, path, **kwargs):
        super().__init__(**kwargs)
        self.path = str(path)
        self.open()

    def open(self):
        self.table = np.load(self.path, mmap_mode="r")

    def __len__(self):
        return len(self.table)

    def __getitem__(self, index):
        return np.array([[self.table[index]]]), np.zeros((1, 1))


def test_a_file_that_was_replaced_by_one_of_the_same_name_is_read_anew(
    place, tmp_path
):
    path, fresh = tmp_path / "table.npy", tmp_path / "fresh.npy"
    np.save(path, np.arange(6))
    with FromFile(path, **place) as dataset:
        assert [int(x[0, 0]) for x, _ in dataset] == [0, 1, 2, 3, 4, 5]
        np.save(fresh, np.arange(10, 16))
        fresh.replace(path)
        dataset.open()
        assert [int(x[0, 0]) for x, _ in dataset] == [10, 11, 12, 13, 14, 15]


class Turned(FastPyDataset):
    """Batch i holds `order[i]`, which each epoch hook turns by one."""

    raises = False

    def __init__(self, length=6, **kwargs):
        super().__init__(**kwargs)
        self.order = np.arange(length)
        self.on_epoch_end()

    def __len__(self):
        return len(self.order)

    def __getitem__(self, index):
        return np.array([[self.order[index]]]), np.zeros((1, 1))

    def on_epoch_end(self):
        self.order[:] = np.roll(self.order, -1)
        if self.raises:
            raise ValueError("after all")


class _Twice:
    """A mixin that knows nothing of ours."""

    def on_epoch_end(self):
        super().on_epoch_end()
        super().on_epoch_end()


class TurnedTwice(_Twice, Turned):
    pass


def _order(batches):
    return [int(x[0, 0]) for x, _ in batches]


def test_a_hook_that_is_called_by_hand_reaches_the_very_next_batch(place):
    with TurnedTwice(**place) as dataset:
        assert _order(dataset) == [2, 3, 4, 5, 0, 1]
        dataset.on_epoch_end()
        assert _order(dataset) == [4, 5, 0, 1, 2, 3]
        batches = iter(dataset)
        assert _order([next(batches)]) == [4]
        dataset.on_epoch_end()
        assert _order(batches) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("has_it", ["object", "class"])
def test_a_hook_that_is_set_later_is_noticed_when_an_epoch_begins(
    place, has_it
):
    class Later(Leveled):
        """Gets its hook after it was made."""

    with Later(**place) as dataset:

        def hook(self=dataset):
            self.table["level"] += 1

        (dataset if has_it == "object" else Later).on_epoch_end = hook
        for epoch in range(3):
            level = dataset.table["level"]
            assert [int(x[1]) for x, _ in dataset] == [level] * 10, epoch
            dataset.on_epoch_end()


def test_what_a_hook_changed_before_it_raised_reaches_the_workers(place):
    with Turned(**place) as dataset:
        assert _order(dataset) == [1, 2, 3, 4, 5, 0]
        with (
            unittest.mock.patch.object(Turned, "raises", new=True),
            pytest.raises(ValueError, match="after all"),
        ):
            dataset.on_epoch_end()
        assert _order(dataset) == [2, 3, 4, 5, 0, 1]


class Shuffled(Turned):
    def on_epoch_begin(self):
        np.random.shuffle(self.order)


def test_a_hook_that_is_called_by_hand_is_seeded_and_called_again_on_resuming():
    def loop(dataset, epochs):
        for _ in range(epochs):
            dataset.on_epoch_begin()
            yield from dataset
            dataset.on_epoch_end()

    with Shuffled(workers=0, seed=1) as dataset:
        list(dataset)
        batches = loop(dataset, epochs=3)
        for _ in range(9):
            next(batches)
        np.random.seed(0)
        state = dataset.state_dict()
        wanted = _order(batches)
    with Shuffled(workers=0) as resumed:
        resumed.load_state_dict(state)
        assert _order(loop(resumed, epochs=2)) == wanted


@pytest.mark.parametrize("begin", [False, True])
def test_hooks_called_by_hand_before_the_first_batch_are_resumed(begin):
    def loop(dataset):
        for _ in range(2):
            if begin:
                dataset.on_epoch_begin()
            yield from dataset
            dataset.on_epoch_end()

    with Shuffled(workers=0, seed=1) as dataset:
        batches = loop(dataset)
        _order(itertools.islice(batches, 2))
        state = dataset.state_dict()
        wanted = _order(batches)
    with Shuffled(workers=0, seed=1) as resumed:
        resumed.load_state_dict(state)
        assert _order(loop(resumed)) == wanted


class Levels(FastPyDataset):
    """Draws a level when an epoch begins."""

    def __len__(self):
        return 3

    def on_epoch_begin(self):
        self.level = self.rng.random()

    def __getitem__(self, index):
        return np.array([self.level])


def test_the_begin_of_the_epoch_after_a_resumed_one_is_not_skipped():
    with Levels(workers=0, seed=1) as dataset:
        dataset.on_epoch_begin()
        next(iter(dataset))
        state = dataset.state_dict()
    with Levels(workers=0, seed=1) as resumed:
        resumed.load_state_dict(state)
        rest = list(resumed)
        resumed.on_epoch_begin()
        following = list(resumed)
    assert len(rest) == 2
    assert rest[0] != following[0]


def test_a_hook_that_a_test_has_replaced_is_called():
    keras = pytest.importorskip("keras")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with unittest.mock.patch.object(Numbered, "on_epoch_end") as hook:
        model.fit(Numbered(workers=0), epochs=2, verbose=0)
    assert hook.call_count >= 2


@pytest.mark.backend
@pytest.mark.parametrize("what", ["evaluate", "predict"])
def test_what_was_evaluated_or_predicted_is_an_epoch_as_well(what):
    import keras

    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    with Drawing(seed=1) as dataset, Drawing() as other:
        getattr(model, what)(dataset, verbose=0)
        state = dataset.state_dict()
        assert state["epoch"] == dataset.epoch == 1
        other.load_state_dict(state)
        for (x, _), (wanted, _) in zip(other, dataset, strict=True):
            np.testing.assert_array_equal(x, wanted)


class Drawing(FastPyDataset):
    """Two batches of four, drawn."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return self.rng.normal(size=(4, 3)), np.zeros((4, 1))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_assignment_is_noticed_while_another_dataset_is_built(workers):
    building, go_on = threading.Event(), threading.Event()

    class Waits(Numbered):
        def __getitem__(self, index):
            building.set()
            assert go_on.wait(60)
            return super().__getitem__(index)

    with Leveled(workers=1) as dataset, Waits(1, workers=workers) as other:
        thread = threading.Thread(target=list, args=(other,))
        batches = iter(dataset)
        assert _levels([next(batches)]) == [0]
        thread.start()
        try:
            assert building.wait(60)
            dataset.level = 5
            assert _levels(batches) == [5] * 9
        finally:
            go_on.set()
            thread.join(60)


def test_a_build_that_assigns_to_another_dataset_changes_that_one():
    class Sets(Numbered):
        def __getitem__(self, index):
            self.other.level = index
            return super().__getitem__(index)

    with Leveled(workers=1) as dataset, Sets(3, workers=0) as builds:
        builds.other = dataset
        batches = iter(dataset)
        next(batches)
        seen = [_levels([next(batches)]) for _ in builds]
        assert seen == [[0], [1], [2]]


class _Reader:
    """Reads what its dataset notes down for it."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __call__(self):
        return self.dataset.now * 10 + self.dataset.level


class _Derives(Leveled):
    """Keeps what follows from its state; a hook makes that out of date."""

    def on_epoch_end(self):
        self.level += 1
        vars(self).pop("tenfold", None)
        if hasattr(self, "hundredfold"):
            del self.hundredfold

    @functools.cached_property
    def tenfold(self):
        return self.level * 10

    def __getitem__(self, index):
        if not hasattr(self, "hundredfold"):
            self.hundredfold = self.level * 100
        return np.array([self.level + self.tenfold + self.hundredfold]), index


class _ReferredTo(Leveled):
    """Parts of it refer to it, made by the constructor and by a worker."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.parts = [_Reader(self), lambda: self.now * 10 + self.level]

    def on_worker_start(self):
        self.own = _Reader(self)

    def __getitem__(self, index):
        self.now = index
        (level,) = {part() - index * 10 for part in (*self.parts, self.own)}
        return np.array([level]), index


class _ClosesItsFile(Leveled):
    """Ends what it has when it is collected."""

    def __init__(self, path, **kwargs):
        super().__init__(**kwargs)
        self.file = open(path)  # noqa: SIM115

    def __getitem__(self, index):
        self.file.seek(0)
        return np.array([self.level * int(self.file.read())]), index

    def __del__(self):
        self.file.close()


class _Slotted(Leveled):
    __slots__ = ("slot",)

    def __getitem__(self, index):
        self.slot = getattr(self, "slot", 0)
        return np.array([self.slot]), index


class _SetsByItself(Leveled):
    """Does not call what it overrides."""

    def __setattr__(self, name, value):
        object.__setattr__(self, name, value)

    def __delattr__(self, name):
        object.__delattr__(self, name)


@pytest.mark.parametrize(
    "kind",
    [_Derives, _ReferredTo, _ClosesItsFile, _Slotted, _SetsByItself],
)
def test_a_new_state_is_whole_whatever_the_dataset_is_made_of(kind, tmp_path):
    path = tmp_path / "one"
    path.write_text("1")
    arguments = [path] if kind is _ClosesItsFile else []
    with kind(*arguments, length=4, **EVERY_KIND["process"]) as dataset:
        for level in range(4):
            found = _levels(dataset)
            assert found == [level * (111 if kind is _Derives else 1)] * 4
            if kind is _Slotted:
                dataset.slot = level + 1
            elif kind is _Derives:
                dataset.on_epoch_end()
            else:
                dataset.level = level + 1
        if kind is _SetsByItself:
            del dataset.level
            assert _levels(dataset) == [-1] * 4


def test_a_method_that_sets_attributes_is_noticed_wherever_it_is_from(place):
    class SetsElsewhere:
        def __setattr__(self, name, value):
            vars(self).setdefault("values", {})[name] = value

    class Mixed(SetsElsewhere, Leveled):
        def __getitem__(self, index):
            return np.array([self.values["level"]]), index

    with Mixed(length=4, **place) as dataset:
        vars(dataset)["length"] = 4
        for level in range(2):
            dataset.level = level
            assert _levels(dataset) == [level] * 4


def test_a_variable_of_a_function_around_the_class_is_as_it_is_now(place):
    level = 0

    class Enclosed(Leveled):
        def __getitem__(self, index):
            return np.array([level]), index

    with Enclosed(length=4, **place) as dataset:
        for level in range(3):
            assert _levels(dataset) == [level] * 4


@pytest.mark.parametrize("cache", [None, "memory"])
@pytest.mark.parametrize("where", ["inline", "thread", "process"])
@pytest.mark.parametrize("name", HOLDERS)
def test_an_edit_shows_wherever_the_dataset_holds_the_number(
    name, where, cache
):
    if "PyTorch" in name:
        pytest.importorskip("torch")
    edited = HOLDERS[name]()
    read = edited.read

    def use(held, _):
        return np.array(read(held))

    kinds = EVERY_KIND[where]
    with Holds(edited.held, use, cache=cache, **kinds) as dataset:
        for number in range(3):
            edited.edit(number)
            assert [int(batch) for batch in dataset] == [number] * 3


class _LimitError(Exception):
    pass


class _Limit:
    """A time limit, as a handler that is a function, a method or an object."""

    def __init__(self, kind):
        self.handler = {
            "function": lambda *_: self.__call__(),
            "method": self.handle,
            "partial": functools.partial(self.handle),
            "object": self,
        }[kind]

    def handle(self, *_):
        raise _LimitError

    __call__ = handle


@pytest.fixture(params=["function", "method", "partial", "object"])
def limit(request):
    before = signal.signal(signal.SIGUSR1, _Limit(request.param).handler)
    yield lambda *_, **__: signal.raise_signal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


def test_what_a_signal_handler_raises_amid_pickling_is_raised(
    limit, monkeypatch
):
    dataset = Holds(0, lambda *_: 0, **EVERY_KIND["process"])
    monkeypatch.setattr(shared_state, "pickle_in_parts", limit)
    with dataset, pytest.raises(_LimitError):
        next(iter(dataset))


def test_what_a_signal_handler_raises_is_no_error_to_ignore(limit):
    with ignoring_errors():
        raise ValueError
    with pytest.raises(_LimitError), ignoring_errors():
        limit()
    with pytest.raises(KeyboardInterrupt), ignoring_errors():
        raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["thread", "process"])
def test_what_a_signal_handler_raises_amid_a_comparison_is_raised(
    where, limit, monkeypatch
):
    held = {"level": 0}

    def level(held, _):
        return np.array(held["level"])

    with Holds(held, level, cache="memory", **EVERY_KIND[where]) as dataset:
        assert [int(batch) for batch in dataset] == [0] * 3
        held["level"] = 1
        with monkeypatch.context() as patch:
            patch.setattr(seen_variable, "content_of", limit)
            with pytest.raises(_LimitError):
                next(iter(dataset))
        assert [int(batch) for batch in dataset] == [1] * 3
