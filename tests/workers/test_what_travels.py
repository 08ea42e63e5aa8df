"""What a dataset may hold on its way to worker processes, and what not."""

from __future__ import annotations

import array
import collections
import concurrent.futures
import ctypes
import dataclasses
import functools
import gzip
import io
import logging
import math
import mmap
import os
import pathlib
import pickle
import queue
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import typing
import weakref
import zipfile

import h5py
import keras
import numpy as np
import pytest
from class_kinds import (
    Item,
    WrappingDataset,
    Wraps,
    WrapsWithItems,
    WrapsWithSlots,
    enums,
    generic,
    hooked,
    of_enums,
    of_generic,
    of_hooked,
    of_slots,
    of_wrapping,
)
from PIL import Image
from places import PLACES
from samples import Holds, MapsAFile, h5_item, hold, rest_of, row
from subclasses import CHANGING, MAKERS, OF_LIBRARIES

from keras_fastdata import DatasetPicklingError
from keras_fastdata.engine import module_sources
from keras_fastdata.memory.reducers import Pickler
from keras_fastdata.memory.shared_arrays import owner_of

pytestmark = pytest.mark.usefixtures("kept_forkserver")

PROCESS = {"workers": 1, "use_multiprocessing": True}


def dumps(thing):
    """The pickle of a thing, as workers get it."""
    file = io.BytesIO()
    Pickler(file).dump(thing)
    return file.getvalue()


def assert_travels(thing, use, start_method=None):
    """A worker makes of a thing what the training process makes of it."""
    with Holds(thing, use, start_method=start_method, **PROCESS) as dataset:
        there = list(dataset)
        here = [dataset[index] for index in range(3)]
    np.testing.assert_equal(there, here)


def assert_refused(thing, path, kind, use=None):
    """The error names the attribute, its type, and the ways out."""
    dataset = Holds(thing, use, **PROCESS)
    with pytest.raises(DatasetPicklingError) as caught:
        next(iter(dataset))
    assert caught.value.path == path
    assert caught.value.type_name == kind
    text = str(caught.value)
    assert f"`{path}` is a {kind}" in text
    for way_out in ("on_worker_start", "__getstate__"):
        assert way_out in text
    assert ("start_method='fork'" in text) is hasattr(os, "fork")


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
@pytest.mark.parametrize(
    "make",
    [
        threading.Lock,
        threading.RLock,
        threading.Condition,
        lambda: threading.Condition(threading.Lock()),
    ],
)
def test_a_lock_is_made_anew(make, start_method):
    lock = make()
    dataset = Holds(lock, hold, start_method=start_method, **PROCESS)
    with lock, dataset:  # it is not taken in the worker
        assert len(list(dataset)) == 3


def test_events_semaphores_barriers_and_thread_locals_travel():
    assert_travels(threading.Semaphore(2), hold)
    event = threading.Event()
    event.set()
    assert_travels(event, lambda event, i: event.is_set())
    assert_travels(threading.Barrier(1), lambda barrier, i: barrier.wait())
    local = threading.local()
    local.value = 1
    with Holds(
        local, lambda local, i: hasattr(local, "value"), **PROCESS
    ) as dataset:
        assert not any(dataset)


def test_a_condition_and_its_lock_stay_one():
    lock = threading.Lock()

    def shared(things, index):
        condition, lock = things
        with condition:
            return lock.locked()

    assert_travels((threading.Condition(lock), lock), shared)


# -- memory maps -------------------------------------------------------------


@pytest.fixture
def array_file(tmp_path):
    path = tmp_path / "bilder \N{LATIN SMALL LETTER U WITH DIAERESIS}.npy"
    np.save(path, np.arange(24 * 4096, dtype="float32").reshape(24, 4096))
    return path


def size_of_payload(dataset):
    """Bytes that travel to the workers of a dataset, beside sources."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_sources, "_MOST_BYTES", 0)  # those of all tests
        next(iter(dataset))
    sizes = [
        os.stat(f"/proc/self/fd/{fd}").st_size
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
        and "fastdata-dataset" in os.readlink(f"/proc/self/fd/{fd}")
    ]
    assert len(sizes) == 1
    return sizes[0]


@pytest.mark.parametrize(
    "view",
    [
        lambda m: m,
        lambda m: m[3:],
        lambda m: m[3:20:2, 5::7],
        lambda m: m[::-1],
        lambda m: m.T[:24],
        lambda m: np.asarray(m),
        lambda m: np.asarray(m)[5:],
        lambda m: m.view("uint32"),
        lambda m: m[4:5].reshape(64, 64),
        lambda m: m[..., None],
    ],
)
def test_a_memory_map_travels_by_path(view, array_file):
    array = view(np.load(array_file, mmap_mode="r"))
    assert_travels(array, row)
    assert_travels(
        array, lambda a, i: [type(a) is np.memmap, a.flags.writeable]
    )
    with Holds(array, row, **PROCESS) as dataset:
        assert size_of_payload(dataset) < 32 * 1024


def test_what_a_worker_writes_to_a_writeable_map_is_in_the_file(array_file):
    def write(array, index):
        array[index, 0] = -1 - index
        return array[index, :2]

    array = np.load(array_file, mmap_mode="r+")
    assert_travels(array, write)
    assert np.load(array_file)[:3, 0].tolist() == [-1, -2, -3]


def test_a_map_that_differs_from_its_file_travels_by_value(array_file):
    private = np.load(array_file, mmap_mode="c")
    private[0, 0] = 77
    assert_travels(private, row)
    assert np.load(array_file)[0, 0] == 0

    deleted = np.load(array_file, mmap_mode="r")
    os.rename(array_file, f"{array_file}.moved")
    np.save(array_file, np.zeros((24, 4096), "float32"))
    assert deleted[1, 1] != 0
    assert_travels(deleted, row)

    os.remove(f"{array_file}.moved")
    assert_travels(deleted, row)


def test_a_map_at_an_offset_travels(tmp_path):
    path = tmp_path / "raw"
    path.write_bytes(bytes(range(256)) * 64)
    array = np.memmap(path, ">u2", "r", offset=4098, shape=(100, 3))
    assert_travels(array[7:], row)


class _Scaled(np.memmap):
    def __array_finalize__(self, other):
        super().__array_finalize__(other)
        self.scale = getattr(other, "scale", None)


@pytest.mark.parametrize("take", ["all", "a part", "a copy"])
def test_a_map_of_a_users_class_keeps_its_attributes(tmp_path, take):
    path = tmp_path / "raw"
    path.write_bytes(bytes(range(8)))
    array = _Scaled(path, "uint8", "r")
    array.scale = 3
    taken = {"all": array, "a part": array[2:], "a copy": array.copy()}[take]
    there = pickle.loads(dumps(taken))
    assert type(there) is _Scaled
    assert there.scale == 3
    assert there.tolist() == taken.tolist()
    is_mapped = isinstance(owner_of(there).base, mmap.mmap)
    assert is_mapped == (take != "a copy")


def test_an_anonymous_map_travels_by_value():
    memory = mmap.mmap(-1, 4096)
    array = np.frombuffer(memory, "uint8")
    array[0] = 9
    assert_travels(array, row)


# -- memoryviews -------------------------------------------------------------


@pytest.mark.parametrize(
    "view",
    [
        memoryview(b"abcdef"),
        memoryview(bytearray(b"abcdef"))[::-2],
        memoryview(array.array("d", [0.5, 1.5, 2.5])),
        memoryview(np.arange(24, dtype="int16").reshape(4, 6)[::2, 1:]),
        memoryview(np.array(2.5)),
        memoryview(np.empty((3, 0), "float32")),
        memoryview(np.arange(1 << 17)),
    ],
)
def test_a_memoryview_travels_as_one(view):
    again = pickle.loads(dumps(view))
    assert type(again) is memoryview
    assert (again.format, again.shape) == (view.format, view.shape)
    assert again.readonly == view.readonly
    assert again.tolist() == view.tolist()


def test_a_memoryview_of_numbers_has_them_in_a_worker():
    numbers = memoryview(np.arange(100, 103))
    assert_travels(numbers, lambda view, index: view[index])


def test_a_memoryview_whose_format_an_array_lacks_is_refused():
    view = memoryview(b"abc").cast("c")
    assert_refused(view, "dataset.thing", "builtins.memoryview")


# -- files -------------------------------------------------------------------


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "zeilen.txt"
    path.write_text("eins\nzwei\ndrei f\u00fcnf\n", encoding="latin-1")
    return path


@pytest.mark.parametrize(
    "how",
    [
        {"mode": "r", "encoding": "latin-1"},
        {"mode": "rb"},
        {"mode": "rb", "buffering": 0},
        {"mode": "r", "encoding": "ascii", "errors": "replace"},
    ],
)
def test_an_open_file_is_opened_again_where_it_was(how, text_file):
    with open(text_file, **how) as file:
        file.readline()
        assert_travels(file, rest_of)
        assert_travels(file, lambda f, i: [type(f).__name__, f.name])


@pytest.mark.parametrize("newline", [None, "", "\n", "\r", "\r\n"])
@pytest.mark.parametrize("text", ["a\nb\n", "a\r\nb\r\n", "a\r\nb\nc\rd"])
def test_a_file_splits_its_lines_as_it_did(newline, text, tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text(text, newline="")
    with open(path, newline=newline) as file:
        file.read(1)
        again = pickle.loads(dumps(file))
        assert again.readlines() == file.readlines()
        again.close()


def test_a_file_of_numpy_with_several_arrays_travels(tmp_path):
    np.savez(tmp_path / "a.npz", a=np.arange(3), b=np.array([{}, None, {}]))
    with np.load(tmp_path / "a.npz", allow_pickle=True) as file:
        assert_travels(file, lambda file, i: file["a"][i])
        assert_travels(file, lambda file, i: file["b"][i] is None)
    assert_refused(file, "dataset.thing", "numpy.lib.npyio.NpzFile")


def test_a_zip_file_travels(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.txt", "content")
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        assert_travels(archive, lambda a, i: len(a.read("a.txt")))


def test_standard_streams_are_the_workers_own():
    assert_travels(sys.__stdout__, lambda stream, i: stream.fileno())


def test_a_file_that_cannot_be_opened_again_is_refused(text_file, tmp_path):
    kind = "_io.TextIOWrapper"
    with open(tmp_path / "out", "w") as file:
        assert_refused(file, "dataset.thing", kind)
    with open(text_file) as file:
        os.remove(text_file)
        assert_refused(file, "dataset.thing", kind)
        text_file.write_text("another")
        assert_refused(file, "dataset.thing", kind)
    assert_refused(file, "dataset.thing", kind)  # closed by now
    reading, writing = os.pipe()
    with open(reading) as pipe, open(writing, "w"):
        assert_refused(pipe, "dataset.thing", kind)
    with gzip.open(tmp_path / "a.gz", "w"):
        pass
    with gzip.open(tmp_path / "a.gz") as file:
        assert_refused(file, "dataset.thing._buffer", "_io.BufferedReader")


# -- h5py --------------------------------------------------------------------


def test_h5py_files_groups_and_datasets_are_opened_again(tmp_path):
    path = tmp_path / "a b.h5"
    with h5py.File(path, "w") as file:
        file["group/x"] = np.arange(12).reshape(3, 4)
    with h5py.File(path) as file:
        assert_travels(file, lambda f, i: f["group/x"][i])
        assert_travels(file["group"], lambda g, i: g["x"][i])
        assert_travels(file["group/x"], row)
        assert_travels(
            {"file": file, "x": file["group/x"]},
            lambda d, i: d["file"]["group/x"][i] + d["x"][i],
        )
        with Holds(file["group/x"], row, **PROCESS) as dataset:
            assert size_of_payload(dataset) < 32 * 1024
        x = file["group/x"]
        for thing in (x.attrs, x.dims, x.dims[0]):
            kind = type(thing)
            name = f"{kind.__module__}.{kind.__qualname__}"
            assert_refused(thing, "dataset.thing", name)
    closed = "h5py._hl.files.File"
    assert_refused(file, "dataset.thing", closed)
    with h5py.File(path, "r+") as file:
        assert_refused(file, "dataset.thing", closed)
    with h5py.File("memory", "w", driver="core", backing_store=False) as file:
        assert_refused(file, "dataset.thing", closed)


@pytest.mark.parametrize("is_whole", [True, False])
def test_an_h5py_file_with_a_relative_path_is_the_same_elsewhere(
    is_whole, tmp_path, monkeypatch
):
    for number in range(2):
        (tmp_path / f"{number}").mkdir()
        with h5py.File(tmp_path / f"{number}" / "a.h5", "w") as file:
            file["x"] = np.full(3, number)
    monkeypatch.chdir(tmp_path / "0")
    with h5py.File("a.h5") as file:
        monkeypatch.chdir(tmp_path / "1")
        thing = file if is_whole else file["x"]
        with Holds(thing, h5_item, **PROCESS) as dataset:
            assert [int(batch) for batch in dataset] == [0] * 3
        os.rename(tmp_path / "0" / "a.h5", tmp_path / "0" / "b.h5")
        with Holds(thing, h5_item, **PROCESS) as dataset:
            assert [int(batch) for batch in dataset] == [0] * 3
        os.unlink(tmp_path / "0" / "b.h5")
        kind = type(thing)
        name = f"{kind.__module__}.{kind.__qualname__}"
        assert_refused(thing, "dataset.thing", name, h5_item)


# -- functions and classes ---------------------------------------------------


def test_loggers_lambdas_closures_and_partials_travel():
    assert_travels(logging.getLogger("a.b"), lambda logger, i: len(logger.name))
    factor = 3
    assert_travels(lambda i: factor * i, lambda f, i: f(i))
    assert_travels(functools.partial(max, 1), lambda f, i: f(i))


def test_cached_functions_and_methods_travel():
    class Local:
        @functools.lru_cache(maxsize=3)  # noqa: B019
        def method(self, n):
            return 2 * n

        @functools.cached_property
        def once(self):
            return 5

    @functools.lru_cache
    def fibonacci(n):
        return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

    assert_travels(Local(), lambda o, i: o.method(i) + o.once)
    assert_travels(fibonacci, lambda f, i: [f(i + 9), f.cache_info().maxsize])
    assert_travels(
        functools.lru_cache(maxsize=7, typed=True)(abs),
        lambda f, i: [f(-i), f.cache_parameters()["maxsize"]],
    )


def test_a_generic_function_that_was_called_travels():
    @functools.singledispatch
    def size(value):
        return 0

    size.register(int, lambda value: value)
    assert [size(4), size("a")] == [4, 0]
    assert_travels(size, lambda f, i: [f(i), f("a")])


def test_weak_dicts_travel_with_what_else_is_held():
    held = {"a": threading.local()}
    weak = weakref.WeakValueDictionary(held)
    assert_travels([held, weak], lambda both, i: len(both[1]))


def test_a_callback_of_keras_travels_without_its_model():
    callback = keras.callbacks.EarlyStopping(patience=3)
    callback.set_params({"epochs": 2})
    callback._model = threading.Lock()
    copy = pickle.loads(dumps(callback))
    assert (copy.patience, copy.params) == (3, {"epochs": 2})
    assert copy.model is None
    assert callback._model is not None


def test_a_main_script_with_locks_caches_and_files_of_its_own(tmp_path, zygote):
    (tmp_path / "data.txt").write_text("abc")
    script = tmp_path / "main.py"
    script.write_text(
        "import functools, threading, numpy as np\n"
        "from keras_fastdata import FastPyDataset\n"
        "LOCK = threading.Lock()\n"
        "FILE = open('data.txt')\n"
        "@functools.lru_cache(maxsize=None)\n"
        "def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)\n"
        "class D(FastPyDataset):\n"
        "    def __len__(self): return 3\n"
        "    @functools.lru_cache(maxsize=10)\n"
        "    def size(self):\n"
        "        with LOCK:\n"
        "            FILE.seek(0)\n"
        "            return len(FILE.read())\n"
        "    def __getitem__(self, i): return np.array([self.size(), fib(i)])\n"
        "for start_method in 'forkserver', 'spawn':\n"
        "    with D(workers=2, use_multiprocessing=True,\n"
        "           start_method=start_method) as d:\n"
        "        print(np.concatenate(list(d)).tolist())\n"
    )
    ran = zygote.run(script, folder=tmp_path)
    assert ran.stdout == "[3, 0, 3, 1, 3, 1]\n" * 2, ran.stderr


# -- tensors -----------------------------------------------------------------


@pytest.mark.backend
@pytest.mark.skipif(
    keras.backend.backend() == "tensorflow",
    reason="test_batch_kinds.py does it, with one import of TensorFlow",
)
def test_a_tensor_of_the_backend_travels():
    tensor = keras.ops.convert_to_tensor(np.arange(6.0).reshape(3, 2))
    assert_travels(tensor, lambda t, i: np.asarray(t[i]))


# -- what does not travel ----------------------------------------------------


def test_what_lives_in_the_training_process_alone_is_refused():
    assert_refused(queue.Queue(), "dataset.thing", "queue.Queue")
    assert_refused(queue.SimpleQueue(), "dataset.thing", "_queue.SimpleQueue")
    assert_refused(
        threading.Thread(target=print), "dataset.thing", "threading.Thread"
    )
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert_refused(
            pool,
            "dataset.thing",
            "concurrent.futures.thread.ThreadPoolExecutor",
        )
    with subprocess.Popen(["true"]) as process:
        assert_refused(process, "dataset.thing", "subprocess.Popen")


def test_the_innermost_culprit_is_named_by_its_path():
    class Reader:
        pass

    reader = Reader()
    reader.parts = {"a": [1, (i for i in ())]}
    assert_refused(reader, "dataset.thing.parts['a'][1]", "builtins.generator")
    with socket.socket() as connection:
        assert_refused([connection], "dataset.thing[0]", "socket.socket")
    connection = sqlite3.connect(":memory:")
    reader.parts = connection
    assert_refused(reader, "dataset.thing.parts", "sqlite3.Connection")
    connection.close()
    reader.parts = weakref.ref(reader)
    assert_refused(reader, "dataset.thing.parts", "weakref.ReferenceType")


def test_a_culprit_that_a_function_refers_to_is_named():
    with socket.socket() as connection:
        assert_refused(
            1,
            "dataset.use -> connection",
            "socket.socket",
            use=lambda thing, i: connection,
        )

        class Local:
            @staticmethod
            def method():
                return connection

        assert_refused(
            Local(),
            "dataset.thing.__class__.method -> connection",
            "socket.socket",
        )


def test_a_refused_dataset_leaves_no_process():
    import psutil  # needs `resource`; the other tests run without it

    before = psutil.Process().children()
    assert_refused(queue.Queue(), "dataset.thing", "queue.Queue")
    assert psutil.Process().children() == before


def test_a_file_that_deletes_itself_is_refused():
    with tempfile.NamedTemporaryFile("r") as file:
        kind = "tempfile._TemporaryFileWrapper"
        assert_refused(file, "dataset.thing", kind)
        assert os.path.exists(file.name)


def test_parts_of_a_memory_map_come_as_arrays_in_shared_memory(tmp_path):
    path = tmp_path / "rows"
    rows = np.arange(40_000, dtype="float32").reshape(4, 100, 100)
    rows.tofile(path)
    with MapsAFile(path, workers=1, use_multiprocessing=True) as dataset:
        for index, (batch, other) in enumerate(dataset):
            np.testing.assert_array_equal(batch, rows[index])
            np.testing.assert_array_equal(other["also"][0], rows[index])
            assert type(batch) is type(other["also"][0]) is np.ndarray
            assert batch.ctypes.data % 64 == 0


def test_members_of_an_enum_have_their_attributes_values_and_aliases():
    kinds = enums()
    expected = of_enums(kinds, 0)
    with Holds(kinds, of_enums, **PROCESS) as dataset:
        for _ in range(2):
            for found in dataset:
                assert bytes(found).decode() == bytes(expected).decode()
            kinds[0].CAT.legs = 4  # is sent anew
            dataset.mark_changed()
            expected = of_enums(kinds, 0)


def test_hooks_of_classes_do_not_run_again_in_a_worker():
    classes = hooked()
    expected = bytes(of_hooked(classes, 0)).decode()
    with Holds(classes, of_hooked, **PROCESS) as dataset:
        for _ in range(2):
            assert {bytes(found).decode() for found in dataset} == {expected}
            dataset.mark_changed()


def test_classes_with_bases_that_are_not_classes_reach_processes():
    classes = generic()

    class Local(Holds, typing.Generic[Item]):
        """The dataset's own class has such a base, too."""

    with Local(classes, of_generic, **PROCESS) as dataset:
        for _ in range(2):
            found = list(dataset)
            assert [batch.tolist() for batch in found] == [
                [1, 1, 2, 4, 3, 5, 6, 0, index] for index in range(3)
            ]
            dataset.mark_changed()


def test_members_of_an_enum_are_the_trainers_own_when_they_come_back():
    kind = enums()[0]

    def member(kind, index):
        return np.array([kind.DOG], object)

    with Holds(kind, member, **PROCESS) as dataset:
        assert next(iter(dataset))[0] is kind.DOG


def test_a_class_made_in_a_function_has_its_whole_name_in_a_worker():
    class Local:
        """Is not in the module's variables."""

    assert_travels(Local, lambda thing, _: str(thing.__qualname__))


@pytest.mark.parametrize("start_method", ["forkserver", "portable"])
@pytest.mark.parametrize("kind", [Wraps, WrapsWithSlots, WrapsWithItems])
def test_objects_that_ask_others_for_attributes_reach_processes(
    kind, start_method
):
    thing = kind(["a", "b"])
    thing.more = 3
    if kind is WrapsWithItems:
        thing["key"] = 4
    assert_travels(thing, of_wrapping, start_method)


def test_a_dataset_that_asks_another_object_for_attributes_has_processes():
    wrapped = WrapsWithItems(["a", "b"])
    wrapped.more = 3
    with WrappingDataset(wrapped, **PROCESS) as dataset:
        assert [int(batch) for batch in dataset] == [0, 3]


def test_slots_of_classes_are_slots_in_processes():
    class Point:
        __slots__ = ("__weakref__", "y")

    @dataclasses.dataclass(slots=True)
    class Data:
        x: int = 3

    with Holds([Point, Data()], of_slots, **PROCESS) as dataset:
        for _ in range(2):
            assert [batch.tolist() for batch in dataset] == [
                [index, 3, 0, 0] for index in range(3)
            ]
            dataset.mark_changed()


def test_functions_that_share_a_variable_share_it_in_processes():
    def counter():
        count = 0

        def add(number):
            nonlocal count
            count += number

        return add, lambda: count

    def counted(functions, index):
        add, total = functions
        before = total()
        add(10)
        return np.array(total() - before)

    with Holds(counter(), counted, **PROCESS) as dataset:
        assert [int(batch) for batch in dataset] == [10] * 3


class _Node:
    def __init__(self):
        self.parent = self.method = None

    def go(self):
        return 0


def _child():
    node = _Node()
    node.child = _Node()
    node.child.parent = node
    return node


def _with_method():
    node = _Node()
    node.method = node.go
    return node


class _Nodes(list):
    pass


def _within():
    nodes = _Nodes([_Node()])
    nodes[0].parent = nodes
    return nodes


def _chain():
    first = node = _Node()
    for _ in range(300):
        node.child = _Node()
        node = node.child
    return first


@pytest.mark.parametrize("make", [_child, _with_method, _within, _chain])
def test_a_function_keeps_up_beside_objects_that_refer_to_one_another(make):
    def counter():
        count = 0

        def add():
            nonlocal count
            count += 1

        return lambda: count, add

    total, add = counter()
    things = [total, add, make()]
    with Holds(things, lambda held, _: held[0](), **PROCESS) as dataset:
        for count in range(3):
            assert [int(batch) for batch in dataset] == [count] * 3
            add()


def test_classes_whose_metaclass_refuses_assignments_reach_processes():
    class Constants(type):
        def __setattr__(cls, name, value):
            raise AttributeError(f"{name} is constant")

        def __delattr__(cls, name):
            raise AttributeError(f"{name} is constant")

    class Sizes(metaclass=Constants):
        WIDTH = 4

    def read(sizes, index):
        with pytest.raises(AttributeError, match="WIDTH is constant"):
            sizes.WIDTH = 5
        return np.array(sizes.WIDTH)

    with Holds(Sizes, read, **PROCESS) as dataset:
        assert [int(batch) for batch in dataset] == [4] * 3
        dataset.mark_changed()
        assert [int(batch) for batch in dataset] == [4] * 3


BY_NAME_SCRIPT = """
import sys
import typing
import numpy as np
from keras_fastdata import FastPyDataset

UserId = typing.NewType("UserId", int)
Arguments = typing.ParamSpec("Arguments")
Sizes = typing.TypeVarTuple("Sizes")
if sys.version_info >= (3, 12):
    exec("type Rows = list[UserId]")
else:
    Rows = list[UserId]

class Missing:
    __slots__ = ("text",)

    def __reduce__(self):
        return "MISSING"

MISSING = Missing()
MISSING.text = "missing"

class Only:
    made = None

    def __new__(cls):
        cls.made = cls.made or super().__new__(cls)
        return cls.made

    def __reduce__(self):
        return "ONLY"

class Code(int):
    def __reduce__(self):
        return "IGNORED"

ONLY = Only()
IGNORED = Code(255)

def to_id(number: int) -> UserId:
    return UserId(number)

class Mine(FastPyDataset):
    first: Rows

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.marker = MISSING
        self.kinds = Arguments, Sizes, Rows

    def __len__(self):
        return 2

    def __getitem__(self, index: UserId) -> Rows:
        is_it = self.marker is MISSING and ONLY is Only() and IGNORED == 255
        return np.array([to_id(index), is_it, len(MISSING.text)])

for method in ("forkserver", "portable"):
    with Mine(
        workers=1, use_multiprocessing=True, start_method=method
    ) as dataset:
        for _ in range(2):
            dataset.mark_changed()
            for batch in dataset:
                print(batch.tolist())
"""


def test_objects_of_a_script_that_pickle_sends_by_name_reach_processes(
    tmp_path, zygote
):
    path = tmp_path / "script.py"
    path.write_text(BY_NAME_SCRIPT)
    ran = zygote.run(path)
    wanted = ["[0, 1, 7]", "[1, 1, 7]"] * 4
    assert ran.stdout.splitlines() == wanted, ran.stderr


SUBMODULES_SCRIPT = """
import wsgiref.util
import xml.sax.saxutils
import numpy as np
from keras_fastdata import FastPyDataset


def escaped():
    import xml
    return lambda: [xml.sax.saxutils.escape("<") for _ in range(1)]


class Escaped(FastPyDataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        (text,) = self.escape()
        schemes = (wsgiref.util.guess_scheme({}) for _ in range(1))
        return np.array([len(text), *schemes])


with Escaped(workers=1, use_multiprocessing=True) as dataset:
    dataset.escape = escaped()
    print(next(iter(dataset)).tolist())
"""


def test_a_submodule_that_code_inside_a_function_uses_is_imported(
    tmp_path, zygote
):
    path = tmp_path / "script.py"
    path.write_text(SUBMODULES_SCRIPT)
    ran = zygote.run(path)
    assert ran.stdout.split() == ["['4',", "'http']"], ran.stderr


BY_TEXT_SCRIPT = """
import sys
import numpy as np
import pandas
from keras_fastdata import FastPyDataset

SIZE = FACTOR = LEAST = 0
TABLE = pandas.DataFrame({"number": range(5)})


class Data(FastPyDataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        by_query = len(TABLE.query("number >= @LEAST"))
        return np.array(
            [by_globals(), by_eval(), by_import(), by_modules(), by_query]
        )


def by_globals():
    return globals().get("SIZE", -1)


def by_eval():
    return eval("FACTOR * 2")


def by_import():
    import __main__

    return __main__.OTHER


def by_modules():
    return getattr(sys.modules[__name__], "LAST", -1)


with Data(workers=1, use_multiprocessing=True) as dataset:
    for number in range(2):
        SIZE = FACTOR = OTHER = LAST = LEAST = number + 1
        print(next(iter(dataset)).tolist())
"""


def test_variables_of_a_script_that_code_names_in_a_text_travel(
    tmp_path, zygote
):
    path = tmp_path / "script.py"
    path.write_text(BY_TEXT_SCRIPT)
    ran = zygote.run(path)
    wanted = ["[1, 2, 1, 1, 4]", "[2, 4, 2, 2, 3]"]
    assert ran.stdout.splitlines() == wanted, ran.stderr


@pytest.mark.parametrize("kind", [*MAKERS, *OF_LIBRARIES])
def test_an_object_with_attributes_arrives_whole(kind):
    thing = (MAKERS | OF_LIBRARIES)[kind]()
    there = pickle.loads(dumps([thing, thing]))
    assert there[0] is there[1]
    assert type(there[0]) is type(thing)
    np.testing.assert_equal(_content_of(there[0]), _content_of(thing))
    again = pickle.loads(dumps(there[0]))
    np.testing.assert_equal(_content_of(again), _content_of(thing))


def _content_of(thing):
    """What pickle tells, with the attributes that it forgets."""
    bits = getattr(thing, "bit_generator", None)
    scale = getattr(thing, "scale", None) or bits.scale
    state = None if bits is None else bits.state
    if isinstance(thing, np.ma.MaskedArray):
        state = thing.tolist()
    # The first part is the class, or what makes an object of another one.
    parts = None if state else pickle.dumps(thing.__reduce_ex__(5)[1:])
    return type(thing), scale, state, parts


@pytest.mark.parametrize("kind", CHANGING)
def test_no_method_of_a_users_subclass_changes_the_object_again(kind):
    thing = CHANGING[kind]()
    (there, same) = pickle.loads(dumps([thing, thing]))
    assert there is same
    assert type(there) is type(thing)
    if not isinstance(thing, set):  # a set has no order
        assert repr(there) == repr(thing)
    assert vars(there) == vars(thing)
    if not isinstance(thing, Exception):
        assert there == thing


def test_workers_see_each_edit_of_an_object_of_a_users_subclass():
    # The generator that holds the bits is not the user's.
    kinds = [kind for kind in MAKERS if kind != "generator of bits"]
    things = {kind: MAKERS[kind]() for kind in kinds}

    def scales(things, index):
        return np.array([thing.scale for thing in things.values()])

    with Holds(things, scales, **PROCESS) as dataset:
        assert next(iter(dataset)).tolist() == [5] * len(things)
        for number, thing in enumerate(things.values(), 1):
            thing.scale = 6
            expected = [6] * number + [5] * (len(things) - number)
            assert next(iter(dataset)).tolist() == expected


@pytest.mark.parametrize("mode", ["P", "PA"])
@pytest.mark.parametrize("colors", ["RGB", "RGBA"])
def test_an_image_with_a_palette_keeps_its_colors(mode, colors):
    image = Image.new(mode, (1, 2))
    image.putdata([0, 1] if mode == "P" else [(0, 9), (1, 200)])
    image.putpalette([*range(10, 10 + 2 * len(colors))], colors)
    there = pickle.loads(dumps(image))
    assert there.mode == mode
    np.testing.assert_array_equal(
        np.asarray(there.convert("RGBA")), np.asarray(image.convert("RGBA"))
    )


def test_an_image_with_a_transparent_color_keeps_that(tmp_path):
    image = Image.new("P", (1, 2))
    image.putdata([0, 1])
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.save(tmp_path / "a.png", transparency=1)
    opened = Image.open(tmp_path / "a.png")
    there = pickle.loads(dumps(opened))
    np.testing.assert_array_equal(
        np.asarray(there.convert("RGBA")), np.asarray(opened.convert("RGBA"))
    )


@pytest.mark.parametrize("kind", [ctypes.c_int * 2, ctypes.c_int * 2 * 3])
def test_an_array_of_ctypes_travels(kind):
    array = kind()
    ctypes.memset(array, 7, ctypes.sizeof(kind))
    there = pickle.loads(dumps(array))
    assert type(there) is kind
    assert bytes(there) == bytes(array)


class _Pair(typing.NamedTuple):
    first: float
    others: list


class _Three(tuple):
    def product(self):
        return math.prod(self)


class _Options:
    def __init__(self):
        self.level, self.rng = 1.0, np.random.default_rng(1)


def _square(x):
    return x * x


def _layers():
    """Layers whose attributes were set later, with what each makes of 1."""

    @keras.saving.register_keras_serializable("tests")
    class Registered(keras.layers.Layer):
        def __init__(self, scale=2.0, **kwargs):
            super().__init__(**kwargs)
            self.scale, self._power, self.gain = scale, 1.0, np.float32(1)
            self.table = np.ones(1, "float32")
            self.pair = _Pair(1.0, [1.0])
            self.nested = {"a": [(1.0, {"b": 1.0})]}
            self.order = collections.OrderedDict(a=1.0, b=1.0)
            self.three = _Three([1.0, 1.0, 1.0])
            self.options, self.function = _Options(), float
            self.window, self.ufunc = slice(None), np.abs
            self.loss = 1.0  # models have one as well
            self.itself = lambda: self

        def call(self, x):
            nested = self.nested["a"][0][1]["b"]
            x = x * self.scale * self._power * float(self.gain) * nested
            self.order.move_to_end("a")  # no dict has this
            x = x * self.three.product()
            x = x * self.pair.first * self.pair.others[0] * self.options.level
            x = (
                x
                * self.loss
                * float(self.ufunc(1.0))
                * (self.itself().scale == self.scale)
            )
            return x[self.window] * self.table * self.function(1)

        def get_config(self):
            return {**super().get_config(), "scale": self.scale}

    class Unregistered(Registered):
        pass

    class Block(keras.layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.parts = {"all": [Registered(), (Unregistered(), 1.0)]}

        def call(self, x):
            first, (second, scale) = self.parts["all"]
            return first(second(x)) * scale

    def with_others():
        layer = Unregistered()
        layer.scale, layer._power, layer.gain = 5.0, 2.0, np.float32(3)
        layer.table = np.full(1, 2, "float32")
        layer.pair = _Pair(2.0, [3.0])
        layer.nested["a"][0] = (0, {"b": 2.0})
        layer.options.level, layer.function = 2.0, lambda _: 10
        layer.options.folder = pathlib.Path("a")
        layer.loss = 2.0
        layer.window, layer.ufunc = slice(1), functools.partial(np.add, 2)
        layer.file = open(os.devnull, "w")  # noqa: SIM115 - it cannot travel
        return layer

    class Shifted(keras.layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.shift = 5.0

        def call(self, x):
            return x + getattr(self, "shift", 1.0)

    def without_shift():
        layer = Shifted()
        del layer.shift
        return layer

    outer = keras.Sequential([keras.layers.Rescaling(1.0), Registered(4.0)])
    outer.layers[0].scale = 3.0
    builtin = keras.layers.Rescaling(1.0)
    builtin.offset = 0.5
    block = Block()
    block.parts["all"][0].scale = 3.0
    block.parts["all"][1][0].scale = 5.0
    block.parts["all"][1] = (block.parts["all"][1][0], 2.0)
    dense = keras.layers.Dense(
        1, activation=_square, kernel_initializer=keras.initializers.Ones()
    )
    return {
        "a registered class": (Registered(3.0), 3.0),
        "another class": (
            with_others(),
            5.0 * 2 * 3 * 2 * 6 * 2 * 2 * 10 * 3 * 2,
        ),
        "of Keras": (builtin, 1.5),
        "within a model": (outer, 12.0),
        "within containers": (block, 30.0),
        "with a function": (dense, 1.0),
        "without an attribute": (without_shift(), 2.0),
    }


def _of_one(layer, _=None):
    return keras.ops.convert_to_numpy(layer(np.ones((1, 1), "float32")))


@pytest.mark.parametrize("kind", _layers())
def test_a_layer_of_keras_arrives_whole(kind, monkeypatch):
    layer, made_of_one = _layers()[kind]
    assert _of_one(layer) == made_of_one
    pickled = dumps(layer)
    for name in list(keras.saving.get_custom_objects()):  # as in a worker
        monkeypatch.delitem(keras.saving.get_custom_objects(), name)
    assert _of_one(pickle.loads(pickled)) == made_of_one


def _losses_and_metrics():
    class Loss(keras.losses.Loss):
        def __init__(self, scale):
            super().__init__()
            self.scale = scale

        def call(self, y_true, y_pred):
            return self.scale * (y_true - y_pred)

    class Mean(keras.metrics.Mean):
        scale = 1.0

        def result(self):
            return self.scale * super().result()

    mean = Mean()
    mean.scale = 3.0
    mean.update_state(2.0)
    return {
        "loss": (Loss(3.0), lambda one: one(np.ones(1), np.zeros(1)), 3.0),
        "metric": (mean, _mean_of_two, 6.0),
    }


def _mean_of_two(metric):
    metric.reset_state()
    metric.update_state(2.0)
    return metric.result()


@pytest.mark.parametrize("kind", _losses_and_metrics())
def test_a_loss_or_a_metric_of_the_script_arrives_whole(kind):
    thing, use, result = _losses_and_metrics()[kind]
    assert float(use(thing)) == result
    there = pickle.loads(dumps(thing))
    assert float(use(there)) == result


class _Shift(keras.layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.shifts, self.kinds = [1.0], {1}

    def call(self, x):
        return x + sum(self.shifts) + 10 * len(self.kinds)


@pytest.mark.parametrize("cache", [None, "memory"])
@pytest.mark.parametrize("place", ["inline", "1 thread", "1 process"])
def test_an_edit_of_a_container_of_a_layer_reaches_workers(place, cache):
    kinds = {**PLACES[place], "cache": cache}
    layer = _Shift()
    with Holds(layer, _of_one, **kinds) as dataset:
        assert next(iter(dataset)) == 12
        layer.shifts.append(2.0)
        assert next(iter(dataset)) == 14
        layer.shifts[0] = 5.0
        assert next(iter(dataset)) == 18
        layer.kinds.add(2)
        assert next(iter(dataset)) == 28


@pytest.mark.backend
def test_a_layer_of_a_class_of_the_script_is_used_in_workers(tmp_path, zygote):
    path = tmp_path / "script.py"
    path.write_text(LAYER_SCRIPT)
    ran = zygote.run(path)
    assert ran.stdout.splitlines() == ["[6.0, 6.0]"], ran.stderr


LAYER_SCRIPT = """
import keras
import numpy as np
from keras_fastdata import FastPyDataset

@keras.saving.register_keras_serializable()
class Scaled(keras.layers.Layer):
    def __init__(self, scale, **kwargs):
        super().__init__(**kwargs)
        self.scale = scale

    def call(self, x):
        return x * self.scale

    def get_config(self):
        return {**super().get_config(), "scale": self.scale}

class Mine(FastPyDataset):
    def __init__(self, layer, **kwargs):
        super().__init__(**kwargs)
        self.layer = layer

    def __len__(self):
        return 2

    def __getitem__(self, index):
        x = keras.ops.ones((1, 1))
        return keras.ops.convert_to_numpy(self.layer(x))

layer = Scaled(3.0)
layer.scale = 6.0
with Mine(layer, workers=1, use_multiprocessing=True) as dataset:
    print([float(batch.item()) for batch in dataset])
"""


def test_a_cached_function_keeps_its_attributes():
    @functools.lru_cache
    def scaled(number):
        return number * scaled.scale

    scaled.scale = 3
    assert_travels(scaled, lambda scaled, index: scaled(index))


def test_a_hard_mask_stays_hard():
    array = np.ma.array([1, 2], mask=[1, 0], hard_mask=True)
    there = pickle.loads(dumps(array))
    there[:] = 5
    assert there.tolist() == [None, 5]


def test_two_layer_classes_of_one_name_are_refused():
    def block(scale):
        class Block(keras.layers.Layer):
            def call(self, x):
                return x * scale

        return Block()

    model = keras.Sequential([block(2.0), block(3.0)])
    with pytest.raises(TypeError, match=r"two classes .* name 'Block'"):
        dumps(model)


def test_functions_of_one_name_stay_two_in_a_model():
    def power(exponent):
        def raised(x):
            return x**exponent

        return raised

    layers = [keras.layers.Activation(power(number)) for number in (2, 3)]
    model = keras.Sequential(layers)
    x = np.full((1, 1), 2.0, "float32")
    there = pickle.loads(dumps(model))
    assert keras.ops.convert_to_numpy(there(x)) == 64


def test_a_layer_that_is_not_built_draws_the_same_weights():
    layer = keras.layers.Dense(2)
    first, second = (pickle.loads(dumps(layer)) for _ in range(2))
    expected = _of_one(layer)
    np.testing.assert_array_equal(_of_one(first), expected)
    np.testing.assert_array_equal(_of_one(second), expected)
