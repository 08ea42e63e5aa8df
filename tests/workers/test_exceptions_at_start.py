"""What cannot be sent, loaded or started is said at once, and by name."""

from __future__ import annotations

import gc
import importlib
import io
import os
import pdb
import queue
import re
import sys
import time
import traceback

import numpy as np
import pytest
from places import KINDS, quickly
from test_exceptions import (
    FRESH,
    TwoArguments,
    caught,
    shown,
    walk,
)

from keras_fastdata import (
    DatasetPicklingError,
    FastPyDataset,
    LoaderError,
    WorkerDiedError,
)

PROCESSES = KINDS["process"]
START_METHODS = ["forkserver", "spawn", "fork"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:`start_method='fork'`"),
    pytest.mark.usefixtures("kept_forkserver"),
]


class Plain(FastPyDataset):
    """A dataset that takes any attribute."""

    def __init__(self, attributes=None, **kwargs):
        super().__init__(**kwargs)
        for name, value in (attributes or {}).items():
            setattr(self, name, value)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return np.zeros((4, 2), "float32"), np.zeros((4, 1), "float32")


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def fit(dataset):
    import keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model.fit(dataset, shuffle=False, verbose=0)


# -- loading ------------------------------------------------------------------


class Explosive:
    """Can be pickled; raises where it is loaded."""

    def __init__(self, cls, *args):
        self.make = cls, args

    def __reduce__(self):
        cls, args = self.make
        return _explode, (cls, *args)


def _explode(cls, *args):
    try:
        int("seven")
    except ValueError as error:
        raise cls(*args) from error


@pytest.mark.parametrize(
    ("run", "start_method"),
    [
        (fit, "spawn"),
        pytest.param(walk, "forkserver", marks=pytest.mark.long),
        pytest.param(walk, "spawn", marks=pytest.mark.long),
        pytest.param(fit, "forkserver", marks=pytest.mark.long),
    ],
)
def test_an_error_while_the_dataset_is_loaded_is_the_callers(
    start_method, run, capfd
):
    part = Explosive(TwoArguments, "a.png", 3)
    options = {"start_method": start_method, **PROCESSES, **FRESH}
    with Plain({"part": part}, **options) as dataset:
        error = caught(run, dataset)
        assert type(error) is TwoArguments
        assert (error.path, error.code) == ("a.png", 3)
        assert last_frame(error) == "_explode"
        assert isinstance(error.__context__, ValueError)
        assert is_start(error, "Plain", "process")
        dataset.part = None
        assert walk(dataset) == 4
    assert "Traceback" not in capfd.readouterr().err


def last_frame(error):
    """The last function in this file that the exception went through."""
    extracted = traceback.extract_tb(error.__traceback__)
    return [frame.name for frame in extracted if frame.filename == __file__][-1]


def is_start(error, dataset, kind):
    where = {
        "process": r"in worker \d \(pid \d+\)\.",
        "thread": r"[Ii]n worker thread \d",
        "inline": "",
    }[kind]
    notes = getattr(error, "__notes__", [""])
    return any(dataset in n and re.search(where, n) for n in notes)


def test_a_module_that_the_worker_lacks_is_named(tmp_path, monkeypatch):
    module = tmp_path / "here_alone.py"
    module.write_text("class Reader:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    here_alone = importlib.import_module("here_alone")
    module.unlink()
    importlib.invalidate_caches()
    with Plain({"reader": here_alone.Reader()}, **PROCESSES) as dataset:
        error = caught(walk, dataset)
    monkeypatch.delitem(sys.modules, "here_alone")
    assert type(error) is ModuleNotFoundError
    assert error.name == "here_alone"
    assert is_start(error, "Plain", "process")


def test_an_error_while_a_new_state_is_loaded_is_the_callers(capfd):
    with Plain(**PROCESSES, **FRESH) as dataset:
        assert walk(dataset) == 4
        dataset.part = Explosive(TwoArguments, "a.png", 3)
        error = caught(walk, dataset)
        assert type(error) is TwoArguments
        dataset.part = None
        assert walk(dataset) == 4
    assert "Traceback" not in capfd.readouterr().err


# -- on_worker_start and on_worker_stop ---------------------------------------


class Starting(Plain):
    def on_worker_start(self):
        if self.where in (None, self.worker_index):
            self.fail()

    def __getitem__(self, index):
        if self.where is not None:
            time.sleep(120)  # for longer than the test may take
        return super().__getitem__(index)


def start_badly():
    try:
        int("seven")
    except ValueError as error:
        raise TwoArguments("a.png", 3) from error


def start_wordily():
    raise ValueError("0123456789abcdef" * 65536)


def start_and_exit():
    sys.exit(7)


def starting(fail, kind, where=None, **options):
    attributes = {"fail": fail, "where": where}
    return Starting(attributes, **KINDS[kind], **options)


@pytest.mark.parametrize("run", [walk, fit])
def test_an_error_of_on_worker_start_is_the_callers(kind, run):
    with starting(start_badly, kind) as dataset:
        error = caught(run, dataset)
        assert type(error) is TwoArguments
        assert (error.path, error.code) == ("a.png", 3)
        assert last_frame(error) == "start_badly"
        assert isinstance(error.__context__, ValueError)
        assert kind == "inline" or is_start(error, "Starting", kind)
        dataset.fail = bool
        assert walk(dataset) == 4


def test_an_error_of_one_worker_does_not_wait_for_the_other():
    with starting(start_badly, "process", where=1) as dataset:
        assert type(caught(walk, dataset)) is TwoArguments


def test_a_wordy_error_of_on_worker_start_is_the_callers(kind):
    with starting(start_wordily, kind) as dataset:
        error = caught(walk, dataset)
    assert type(error) is ValueError
    assert str(error).startswith("0123456789abcdef" * 1024)


def test_sys_exit_in_on_worker_start_is_an_error(kind):
    with starting(start_and_exit, kind) as dataset:
        error = caught(walk, dataset)
    if kind == "process":
        assert type(error) is WorkerDiedError
        assert error.exit_code == 7
        assert "on_worker_start" in str(error)
    else:
        assert type(error) is SystemExit
        assert error.code == 7


@pytest.mark.parametrize("cls", [StopIteration, ReferenceError])
def test_no_error_of_on_worker_start_is_taken_for_something_else(kind, cls):
    """These two have a meaning where batches are asked for."""
    with starting(RaisesIt(cls), kind) as dataset:
        error = caught(walk, dataset)
    assert isinstance(error, RuntimeError if cls is StopIteration else cls)
    assert f"{cls.__name__}: a.png" in shown(error)


class RaisesIt:
    def __init__(self, cls):
        self.cls = cls

    def __call__(self):
        raise self.cls("a.png")


class Lengthless(Plain):
    def __len__(self):
        return next(iter([]))


def test_a_length_that_cannot_be_told_is_not_an_empty_epoch(kind):
    with (
        Lengthless(**KINDS[kind]) as dataset,
        pytest.raises(RuntimeError) as found,
    ):
        walk(dataset)
    assert "StopIteration" in shown(found.value)


class Stopping(Plain):
    def on_worker_stop(self):
        raise TwoArguments("a.png", 3)


def test_an_error_of_on_worker_stop_is_logged_and_stops_nothing(kind, caplog):
    dataset = Stopping(**KINDS[kind])
    assert walk(dataset) == 4
    dataset.close()
    count = {"process": 2, "thread": len(caplog.records), "inline": 1}[kind]
    assert len(caplog.records) == count >= 1
    for record in caplog.records:
        assert record.levelname == "ERROR"
        assert "Stopping" in record.getMessage()
        assert "a.png has code 3" in caplog.text
    assert walk(dataset) == 4
    dataset.close()


# -- what cannot be pickled ---------------------------------------------------


class Reader:
    def __init__(self, **attributes):
        vars(self).update(attributes)


class Slotted:
    __slots__ = ("queue",)

    def __init__(self):
        self.queue = queue.SimpleQueue()


def _closure():
    line = queue.SimpleQueue()

    def transform(batch):
        line.put(batch)
        return line.get()

    return transform


def _round():
    """A reader that knows its dataset's other parts, and they know it."""
    reader = Reader()
    reader.index = Reader(reader=reader)
    reader.handle = queue.SimpleQueue()
    return reader


UNPICKLABLE = {
    "dataset.reader.handle": lambda: {"reader": Reader(handle=_queue())},
    "dataset._queue": lambda: {"_queue": _queue()},
    "dataset.readers[1]['train']": lambda: {
        "readers": [1, {"test": 2, "train": _queue()}]
    },
    "dataset.reader.stack[0].file": lambda: {
        "reader": Reader(stack=(Reader(file=sys.stdout.buffer.raw),))
    },
    "dataset.reader": lambda: {"reader": Slotted()},
    "dataset.transform -> line": lambda: {"transform": _closure()},
    "dataset.batches": lambda: {"batches": (n for n in range(3))},
    "dataset.lines": lambda: {"lines": _begun()},
}


def _begun():
    """A text file that is being iterated over."""
    file = open(__file__)  # noqa: SIM115 - the dataset's
    next(file)
    return file


def _queue():
    return queue.SimpleQueue()


WAYS_OUT = ["on_worker_start", "__getstate__"]
if hasattr(os, "fork"):
    WAYS_OUT.append("start_method='fork'")


@pytest.mark.parametrize("path", UNPICKLABLE)
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_what_cannot_be_pickled_is_named_by_its_path(
    path, start_method, monkeypatch
):
    file = io.TextIOWrapper(io.FileIO(os.devnull, "w"))
    monkeypatch.setattr(sys, "stdout", Reader(buffer=Reader(raw=file.buffer)))
    attributes = UNPICKLABLE[path]()
    monkeypatch.undo()
    dataset = Plain(attributes, start_method=start_method, **PROCESSES)
    with dataset:
        error = caught(walk, dataset)
    assert type(error) is DatasetPicklingError
    assert error.path == path
    assert f"`{path}`" in str(error)
    assert error.type_name in str(error)
    assert "Plain" in str(error)
    assert all(way in str(error) for way in WAYS_OUT)
    assert error.__cause__ is not None


def test_a_path_does_not_go_round_in_circles():
    with Plain({"reader": _round()}, **PROCESSES) as dataset:
        error = caught(walk, dataset)
    assert type(error) is DatasetPicklingError
    assert error.path == "dataset.reader.handle"


def test_a_path_does_not_lead_through_the_dataset_again():
    with Plain(**PROCESSES) as dataset:
        dataset.reader = Reader(owner=dataset, handle=_queue())
        error = caught(walk, dataset)
    assert type(error) is DatasetPicklingError
    assert error.path == "dataset.reader.handle"


def test_what_cannot_be_pickled_is_named_through_fit():
    with Plain({"queue": _queue()}, **PROCESSES) as dataset:
        error = caught(fit, dataset)
    assert type(error) is DatasetPicklingError
    assert (error.path, error.type_name) == (
        "dataset.queue",
        "_queue.SimpleQueue",
    )


def test_an_attribute_that_is_set_later_is_named_too():
    with Plain(**PROCESSES) as dataset:
        assert walk(dataset) == 4
        dataset.queue = _queue()
        for _ in range(2):
            error = caught(walk, dataset)
            assert type(error) is DatasetPicklingError
            assert error.path == "dataset.queue"
        del dataset.queue
        assert walk(dataset) == 4


class Refusing:
    def __getstate__(self):
        raise TwoArguments("a.png", 3)


def test_a_getstate_that_raises_is_named_and_is_the_cause():
    with Plain({"part": Refusing()}, **PROCESSES) as dataset:
        error = caught(walk, dataset)
    assert type(error) is DatasetPicklingError
    assert error.path == "dataset.part"
    assert type(error.__cause__) is TwoArguments
    assert last_frame(error.__cause__) == "__getstate__"


def test_threads_and_the_caller_need_no_pickling(kind):
    if kind != "process":
        with Plain({"queue": _queue()}, **KINDS[kind]) as dataset:
            assert walk(dataset) == 4


class MadeInTheWorker(Plain):
    def on_worker_start(self):
        self.queue = _queue()

    def __getitem__(self, index):
        self.queue.put(super().__getitem__(index))
        return self.queue.get()


class LeftOut(MadeInTheWorker):
    def __getstate__(self):
        return {k: v for k, v in vars(self).items() if k != "queue"}


def test_each_of_the_three_ways_out_leads_out():
    for dataset in (
        MadeInTheWorker(**PROCESSES),
        LeftOut({"queue": _queue()}, **PROCESSES),
        Plain({"queue": _queue()}, start_method="fork", **PROCESSES),
    ):
        with dataset:
            assert walk(dataset) == 4


# -- batches that cannot travel -----------------------------------------------


class Smuggling(Plain):
    """Hides what `make` returns in batch 2."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        if index == 2 and self.make is not None:
            return {"x": x, "thing": self.make()}, y
        return {"x": x, "thing": x}, y


def _file():
    return open(os.devnull, "rb")


def _generator():
    return (n for n in range(3))


@pytest.mark.parametrize("make", [_queue, _file, _generator, Refusing])
def test_a_batch_that_cannot_be_sent_is_named(make):
    with Smuggling({"make": make}, **PROCESSES) as dataset:
        for epoch in range(2):
            error = caught(walk, dataset)
            assert isinstance(error, Exception)
            assert not isinstance(error, WorkerDiedError)
            where = f"While building batch 2 of epoch {epoch} of Smuggling"
            assert where in shown(error)
            if make is _queue:
                assert "queue" in str(error)
        dataset.make = None
        assert walk(dataset) == 4


class Homesick:
    """Can be pickled anywhere, and loaded in a worker alone."""

    def __reduce__(self):
        return _load_at_home, (os.getpid(),)


def _load_at_home(pid):
    if os.getpid() != pid:
        raise TwoArguments("a.png", 3)
    return Homesick()


def test_a_batch_that_cannot_be_loaded_is_named():
    with Smuggling({"make": Homesick}, **PROCESSES) as dataset:
        for epoch in range(2):
            error = caught(walk, dataset)
            assert type(error) is TwoArguments
            where = f"batch 2 of epoch {epoch} of Smuggling"
            assert where in shown(error)
        dataset.make = None
        assert walk(dataset) == 4


# -- debuggers ----------------------------------------------------------------


def call_breakpoint():
    breakpoint()


def call_pdb():
    # Not `pdb.set_trace`, which pytest replaces.
    pdb.Pdb(nosigint=True).set_trace()
    return True


class Debugged(Plain):
    def __getitem__(self, index):
        if index == 2:
            self.debug()
        return super().__getitem__(index)


@pytest.mark.parametrize("start_method", START_METHODS)
@pytest.mark.parametrize(
    "debug", quickly([call_breakpoint, call_pdb], call_pdb)
)
def test_a_debugger_in_a_worker_is_an_error_that_names_the_way(
    start_method, debug, monkeypatch
):
    # A terminal that nobody types at, and that a fork inherits.
    read, write = os.pipe()
    with os.fdopen(read) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        dataset = Debugged(
            {"debug": debug}, start_method=start_method, **PROCESSES
        )
        with dataset:
            error = caught(walk, dataset)
    os.close(write)
    assert type(error) is LoaderError
    assert "workers=0" in str(error)
    assert "dataset[index]" in str(error)
    assert "of epoch 0 of Debugged" in shown(error)
    assert f"in {debug.__name__}" in shown(error)


def test_breakpoint_does_nothing_where_it_is_turned_off():
    dataset = Debugged(
        {"debug": call_breakpoint},
        worker_env={"PYTHONBREAKPOINT": "0"},
        **PROCESSES,
    )
    with dataset:
        assert walk(dataset) == 4


def test_a_dataset_that_failed_to_start_is_collected_without_noise(kind, capfd):
    dataset = starting(start_badly, kind, **FRESH)
    error = caught(walk, dataset)
    del dataset, error
    gc.collect()
    assert capfd.readouterr().err == ""
