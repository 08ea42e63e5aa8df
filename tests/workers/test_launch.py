"""Training starts from wherever Python runs, without a main guard."""

from __future__ import annotations

import csv
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest
from places import EVERY_KIND, LONG_BUT_ON_JAX, NO_TRAINING, quickly
from samples import Numbered, numbers

import keras_fastdata
from keras_fastdata import FastPyDataset, LoaderError
from keras_fastdata.workers import (
    environment,
    stack_dump,
    supervisor,
    worker_process,
)
from keras_fastdata.workers.process import (
    children,
    forkserver_connection,
    forkservers,
    inherited,
)

PROCESSES = {"workers": 2, "use_multiprocessing": True}
# Of the tests that are not about a fork server.
kept = pytest.mark.usefixtures("kept_forkserver")

SCRIPT = """
import keras
import numpy as np
from keras_fastdata import FastPyDataset, LoaderHealth

scale = lambda x: x / 2
print("main runs")

class Mine(FastPyDataset):
    def __init__(self, transform, **kwargs):
        super().__init__(**kwargs)
        self.transform = transform
    def __len__(self):
        return 6
    def __getitem__(self, index):
        x = np.full((4, 2), index, "float32")
        return self.transform(x), scale(x[:, :1])

data = Mine(lambda x: x + 1, workers=1, use_multiprocessing=True,
            start_method=METHOD)
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
history = model.fit(data, epochs=2, verbose=0, callbacks=[LoaderHealth(0)])
print("trained", len(history.history["loss"]))
"""


NOTEBOOK = """
import sys
import nbclient
import nbformat

cells = sys.stdin.read().split("\\n\\n")
notebook = nbformat.v4.new_notebook(
    cells=[nbformat.v4.new_code_cell(cell) for cell in cells]
)
nbclient.NotebookClient(notebook, timeout=280, kernel_name="python3").execute()
for cell in notebook.cells:
    for output in cell["outputs"]:
        print(output.get("text", ""))
"""


def _run(arguments, **kwargs):
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    # The repository itself, where the package is not installed.
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
        **kwargs,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _script(tmp_path, method):
    script = tmp_path / "with space and ä.py"
    script.write_text(SCRIPT.replace("METHOD", repr(method)))
    return str(script)


@pytest.mark.parametrize("method", quickly(["forkserver", "spawn"], "spawn"))
def test_a_script_without_a_main_guard_trains(method, tmp_path, zygote):
    done = zygote.run(_script(tmp_path, method))
    assert done.stdout == "main runs\ntrained 2\n", done.stderr


@pytest.mark.long
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_python_trains_with_a_script_without_a_main_guard(method, tmp_path):
    assert _run([_script(tmp_path, method)]) == "main runs\ntrained 2\n"


POOL_SCRIPT = """
import multiprocessing
import numpy as np
from keras_fastdata import FastPyDataset

def square(number):
    return number ** 2

class Squares(FastPyDataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        with multiprocessing.get_context(POOL).Pool(1) as pool:
            return np.array(pool.map(square, [index, index + 1]))

if __name__ == "__main__":
    with Squares(workers=1, use_multiprocessing=True,
                 start_method=METHOD) as dataset:
        print([batch.tolist() for batch in dataset])
"""


@pytest.mark.parametrize("is_module", [False, True])
@pytest.mark.parametrize("pool", ["spawn", "forkserver"])
@pytest.mark.parametrize(
    "method", quickly(["forkserver", "spawn", "portable"], "forkserver")
)
def test_a_build_may_start_a_pool_with_a_function_of_the_script(
    method, pool, is_module, tmp_path
):
    script = POOL_SCRIPT.replace("METHOD", repr(method))
    file = tmp_path / "squares.py"
    file.write_text(script.replace("POOL", repr(pool)))
    started = ["-m", "squares"] if is_module else [file.name]
    assert _run(started, cwd=tmp_path) == "[[0, 1], [1, 4]]\n"


@pytest.mark.long
def test_standard_input_trains():
    script = SCRIPT.replace("METHOD", "None")
    assert _run(["-"], input=script) == "main runs\ntrained 2\n"


@pytest.mark.long
def test_python_c_trains():
    script = SCRIPT.replace("METHOD", "None")
    assert _run(["-c", script]) == "main runs\ntrained 2\n"


@pytest.mark.long
def test_python_m_trains(tmp_path):
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "tools.py").write_text("def half(x): return x / 2\n")
    script = SCRIPT.replace("METHOD", "None").replace(
        "scale = lambda x: x / 2", "from .tools import half as scale"
    )
    (package / "train.py").write_text(script)
    out = _run(["-m", "mine.train"], cwd=tmp_path)
    assert out == "main runs\ntrained 2\n"


@pytest.mark.long
def test_ipython_trains(tmp_path):
    script = tmp_path / "session.ipy"
    script.write_text(SCRIPT.replace("METHOD", "None"))
    assert "trained 2" in _run(["-m", "IPython", str(script)])


@pytest.mark.backend
@pytest.mark.parametrize(
    "method", [pytest.param("forkserver", marks=LONG_BUT_ON_JAX)]
)
def test_a_class_defined_in_a_notebook_cell_trains(method):
    script = SCRIPT.replace("METHOD", repr(method))
    assert "trained 2" in _run(["-c", NOTEBOOK], input=script)


def test_a_worker_whose_dataset_does_not_import_keras_does_not_either():
    class Loaded(FastPyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            import sys

            heavy = ("keras", "tensorflow", "jax", "torch")
            return sorted(set(heavy) & set(sys.modules)), 0

    with Loaded(**PROCESSES) as dataset:
        assert [found for found, _ in dataset] == [[], []]


@pytest.mark.backend
@pytest.mark.parametrize(
    "kind", quickly(list(EVERY_KIND), "process", "portable")
)
def test_a_dataset_is_a_dataset_of_keras_in_every_kind_of_workers(kind):
    class Half(FastPyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return np.full((2, 1), index / 2)

    class Whole(FastPyDataset):
        def __init__(self, part, **kwargs):
            super().__init__(**kwargs)
            self.part = part

        def __len__(self):
            return 2

        def __getitem__(self, index):
            import keras as keras_here

            model = keras_here.Sequential(
                [keras_here.Input((1,)), keras_here.layers.Rescaling(2.0)]
            )
            is_known = isinstance(self.part, keras_here.utils.PyDataset)
            return int(is_known), model.predict(self.part, verbose=0)

    with Whole(Half(), **EVERY_KIND[kind]) as dataset:
        for is_known, predicted in dataset:
            assert is_known
            np.testing.assert_array_equal(predicted, [[0], [0], [1], [1]])


def test_a_worker_holds_at_most_60_mb_of_its_own():
    with Numbered(length=100, **PROCESSES) as dataset:
        list(dataset)
        (forkserver,) = psutil.Process().children()
        workers = forkserver.children()
        assert len(workers) == 2
        for process in (forkserver, *workers):
            assert process.memory_full_info().uss < 60e6


def test_a_worker_is_clean():
    class Inspect(FastPyDataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            import os
            import signal

            names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MINE")
            with open("/proc/self/oom_score_adj") as score:
                return (
                    [os.environ.get(name) for name in names],
                    os.getpgid(0) == os.getpid(),
                    int(score.read()),
                    subprocess.run(
                        ["sh", "-c", "kill -INT $$; echo survived"],
                        capture_output=True,
                        text=True,
                    ).stdout,
                    signal.getsignal(signal.SIGINT) is not signal.SIG_IGN,
                )

    place = {**PROCESSES, "worker_env": {"MINE": "1", "OMP_NUM_THREADS": "2"}}
    with Inspect(**place) as dataset:
        ((environment, leads_group, score, stopped, python_handler),) = dataset
    assert environment == ["", "2", "1"]
    assert leads_group
    assert score == 500
    assert stopped == ""  # what a worker starts can be interrupted
    assert python_handler


class Policy(FastPyDataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return os.sched_getscheduler(0)


@kept
def test_a_worker_that_wakes_leaves_the_training_thread_on_its_core():
    with Policy(**PROCESSES) as dataset:
        assert list(dataset) == [os.SCHED_BATCH]


def test_a_worker_sees_the_trainers_place(tmp_path, monkeypatch):
    class Where(FastPyDataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return os.getcwd(), os.environ.get("SET_LATE"), sys.argv

    with Numbered(**PROCESSES) as other:
        list(other)  # the fork server runs before what follows
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("SET_LATE", "yes")
        with Where(**PROCESSES) as dataset:
            ((cwd, late, argv),) = dataset
    assert cwd == str(tmp_path)
    assert late == "yes"
    assert argv == sys.argv


def test_a_worker_has_the_limits_that_the_program_has_set():
    class Limits(FastPyDataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return sys.getrecursionlimit(), csv.field_size_limit()

    limits = sys.getrecursionlimit(), csv.field_size_limit()
    sys.setrecursionlimit(5000)
    csv.field_size_limit(10**9)
    try:
        with Limits(**PROCESSES) as dataset:
            assert list(dataset) == [(5000, 10**9)]
    finally:
        sys.setrecursionlimit(limits[0])
        csv.field_size_limit(limits[1])


@pytest.mark.parametrize("method", ["forkserver", "spawn", "portable"])
@pytest.mark.parametrize("use", [os.read, os.pread, os.write])
def test_the_number_of_a_file_of_the_trainers_is_no_file_of_a_worker(
    method, use, tmp_path
):
    class Reading(FastPyDataset):
        def __init__(self, fd, **kwargs):
            super().__init__(**kwargs)
            self.fd = fd

        def __len__(self):
            return 1

        def __getitem__(self, index):
            found = []
            for fd in range(3, self.fd + 1):
                try:
                    use(fd, *{os.pread: (1, 0), os.read: (1,)}.get(use, (b"",)))
                except OSError as error:
                    found.append(error.errno)
                else:
                    found.append(0)
            return np.array(found)

    with open(tmp_path / "file", "w+b", buffering=0) as file:
        # The numbers below are those of files that the trainer has.
        fd = max(file.fileno(), 20)
        with Reading(fd, start_method=method, **PROCESSES) as dataset:
            (found,) = dataset
    assert set(found.tolist()) == {errno.EBADF}


class Folder(FastPyDataset):
    """Each batch is the name of the folder that it was built in."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return os.path.basename(os.getcwd())


class CachedFolder(Folder):
    """The same as numbers, for a cache keeps no texts."""

    def __getitem__(self, index):
        return np.array([ord(super().__getitem__(index))])


@pytest.fixture
def folders(tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    for name in "abc":
        (tmp_path / name).mkdir()
    return tmp_path


@kept
@pytest.mark.parametrize("kind", quickly(EVERY_KIND, "inline", "process"))
def test_an_epoch_is_built_in_the_folder_that_the_program_is_in(folders, kind):
    with Folder(**EVERY_KIND[kind]) as dataset:
        for name in "aba":
            os.chdir(folders / name)
            assert list(dataset) == [name] * 4


@pytest.mark.parametrize("cache", ["memory", "directory"])
@pytest.mark.parametrize("kind", ["inline", "thread", "process"])
def test_a_change_of_folder_makes_a_cache_invalid(folders, kind, cache):
    kinds = {"cache": cache, **EVERY_KIND[kind]}
    if cache == "directory":
        kinds.update(cache=folders / "cache", cache_version=1)
    with CachedFolder(**kinds) as dataset:
        for name in "abba":
            os.chdir(folders / name)
            assert [chr(batch[0]) for batch in dataset] == [name] * 4
    if cache == "directory":
        assert len([*folders.glob("cache/*/*.batch")]) == 8


@kept
@pytest.mark.parametrize("kind", quickly(EVERY_KIND, "process"))
def test_mark_changed_has_the_rest_of_an_epoch_built_in_the_folder(
    folders, kind
):
    with Folder(**EVERY_KIND[kind]) as dataset:
        os.chdir(folders / "a")
        batches = iter(dataset)
        assert next(batches) == "a"
        os.chdir(folders / "b")
        dataset.mark_changed()
        assert list(batches) == ["b"] * 3


@kept
@pytest.mark.parametrize("kind", ["process", "portable"])
def test_a_folder_that_on_worker_start_sets_stays_until_the_program_sets_one(
    folders, kind
):
    class Changes(Folder):
        def on_worker_start(self):
            os.chdir(folders / "c")

    with Changes(**EVERY_KIND[kind]) as dataset:
        os.chdir(folders / "a")
        assert list(dataset) == ["c"] * 4
        dataset.mark_changed()
        assert list(dataset) == ["c"] * 4
        os.chdir(folders / "b")
        assert list(dataset) == ["b"] * 4


_LEAVES = """
import os, sys
sys.path.append("source")
import leaves_data, leaves_more
os.chdir("run")  # with another version of the modules
for method in %r:
    kind = {"workers": 1, "use_multiprocessing": True, "start_method": method}
    with leaves_data.Data(**kind) as dataset:
        print(*(int(batch) for batch in dataset))
"""
_LEAVES_DATA = """
import os
import numpy as np
import leaves_more
with open("labels.txt") as file:
    NUM_LABELS = len(file.read())
from keras_fastdata import FastPyDataset

class Data(FastPyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        assert os.path.basename(os.getcwd()) == "run"
        return np.array(index + leaves_more.START * NUM_LABELS)
"""


@pytest.mark.parametrize(
    "method",
    [
        "forkserver",
        pytest.param("portable", marks=LONG_BUT_ON_JAX),
        pytest.param("spawn", marks=pytest.mark.long),
    ],
)
def test_modules_are_imported_as_they_were_before_a_change_of_folder(
    tmp_path, method
):
    for folder, start in (("source", 0), ("run/source", 100), ("run", 1000)):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        text = f"START = {start}"
        (tmp_path / folder / "leaves_data.py").write_text(_LEAVES_DATA)
        (tmp_path / folder / "leaves_more.py").write_text(text)
    (tmp_path / "run" / "source" / "leaves_data.py").write_text("1 / 0")
    (tmp_path / "leaves_more.py").write_text("START = 7")
    (tmp_path / "labels.txt").write_text("a")
    done = subprocess.run(
        [sys.executable],  # so that `sys.path[0]` is the current folder
        cwd=tmp_path,
        input=_LEAVES % [method],
        env={**os.environ, **NO_TRAINING},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stdout == "7 8 9\n", done.stderr


def test_two_loaders_share_a_forkserver_and_the_last_ends_it():
    one, other = Numbered(**PROCESSES), Numbered(**PROCESSES)
    list(one), list(other)
    assert len(psutil.Process().children()) == 1
    one.close()
    assert len(psutil.Process().children()) == 1
    assert numbers(other) == list(range(10))
    other.close()
    assert not psutil.Process().children()


def test_datasets_that_two_threads_collect_end_their_fork_servers(monkeypatch):
    # Each thread collects a dataset while it starts workers of another.
    def join(**worker_env):
        worker_env = tuple(worker_env.items())
        return forkservers.join(inherited.key_of_this_process(worker_env))

    one, other = join(), join(OTHER="1")
    forking, joining = threading.Event(), threading.Event()
    python, joined = children.start_python, []

    def collect_and_start(*arguments):
        joining.set()
        assert forking.wait(60)
        one.exit_code(1, 0.2)
        return python(*arguments)

    def fork_and_collect():
        with one._lock:
            forking.set()
            assert joining.wait(60)
            forkservers.leave(other)

    monkeypatch.setattr(
        forkserver_connection, "start_python", collect_and_start
    )
    threads = [
        threading.Thread(target=target, daemon=True)
        for target in (
            fork_and_collect,
            lambda: joined.append(join(NEW="1")),
        )
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert other.state is forkserver_connection.ForkserverState.GONE
    for server in (one, *joined):
        forkservers.leave(server)
    assert not psutil.Process().children()


@kept
def test_a_forked_copy_of_the_trainer_disturbs_nobody():
    with Numbered(**PROCESSES) as dataset:
        batches = iter(dataset)
        next(batches)
        pid = os.fork()
        if not pid:
            try:
                alone = numbers(dataset) == list(range(10))
                dataset.close()
                os._exit(0 if alone else 1)
            finally:
                os._exit(2)
        assert os.waitpid(pid, 0)[1] == 0
        assert numbers(batches) == list(range(1, 10))


def test_a_dataset_that_cannot_be_pickled_runs_under_fork():
    import threading

    class Locked(Numbered):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.lock = threading.Lock()

        def __getitem__(self, index):
            with self.lock:
                return super().__getitem__(index)

    with Locked(start_method="fork", **PROCESSES) as dataset:
        with pytest.warns(RuntimeWarning, match="start_method='fork'"):
            batches = list(dataset)
        assert numbers(batches) == list(range(10))


class Seeking(Numbered):
    """Moves the position in an open file."""

    def __init__(self, file, **kwargs):
        super().__init__(**kwargs)
        self.file = file

    def __getitem__(self, index):
        self.file.seek(index + 1)
        assert self.file.read(1) == bytes([index + 1])
        return super().__getitem__(index)


@pytest.mark.filterwarnings("ignore:`start_method='fork'`")
@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_workers_have_positions_of_their_own_in_open_files(method, tmp_path):
    (tmp_path / "file").write_bytes(bytes(range(20)))
    with (
        open(tmp_path / "file", "rb", buffering=0) as file,
        Seeking(file, start_method=method, **PROCESSES) as dataset,
    ):
        assert numbers(dataset) == list(range(10))
        assert file.tell() == 0


@pytest.mark.parametrize("workers", quickly([2, "auto"], 2))
def test_the_first_batches_import_no_module_of_the_package(workers, tmp_path):
    """A process that is forked meanwhile would wait for the import for ever."""
    script = (
        "import sys\n"
        "from samples import Numbered\n"
        "kinds = {'workers': WORKERS, 'use_multiprocessing': WORKERS == 2}\n"
        "dataset = Numbered(**kinds)\n"
        "before = set(sys.modules)\n"
        "list(dataset)\n"
        "dataset.close()\n"
        "added = set(sys.modules) - before\n"
        "print(*[m for m in added if m.startswith('keras_fastdata')])\n"
    ).replace("WORKERS", repr(workers))
    assert _run(["-c", script]) == "\n"


@pytest.mark.long
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_script_without_standard_streams_loads(method, tmp_path):
    out = tmp_path / "out"
    script = (
        "import os\n"
        "for fd in (0, 1, 2): os.close(fd)\n"
        "from samples import Numbered, numbers\n"
        "d = Numbered(workers=2, use_multiprocessing=True,\n"
        f"             start_method={method!r})\n"
        f"open({str(out)!r}, 'w').write(str(numbers(d)))\n"
    )
    _run(["-c", script])
    assert out.read_text() == str(list(range(10)))


def test_close_does_not_wait_for_a_process_that_the_user_forked(monkeypatch):
    # If it waited for the fork server's end, it would do so for ever.
    monkeypatch.setattr(forkserver_connection, "_END_TIMEOUT_S", None)
    dataset = Numbered(**PROCESSES)
    next(iter(dataset))
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(write)
        os.read(read, 1)  # until the parent is done
        os._exit(0)
    dataset.close()
    os.close(write)
    os.close(read)
    os.waitpid(pid, 0)


@kept
def test_a_process_forked_while_a_batch_is_awaited_can_load_too():
    with Numbered(**PROCESSES) as dataset:
        batches = iter(dataset)
        next(batches)
        with dataset._fastdata.loader._pool.lock:  # as another thread would
            pid = os.fork()
            if not pid:
                try:
                    good = numbers(dataset) == list(range(10))
                    dataset.close()
                    os._exit(0 if good else 1)
                finally:
                    os._exit(2)
        assert os.waitpid(pid, 0)[1] == 0


@kept
@pytest.mark.parametrize("place", [{"workers": 0}, PROCESSES], ids=str)
@pytest.mark.parametrize(
    "shape", quickly([-1, (3, -1), "3", 1.5], -1, "3"), ids=str
)
def test_empty_refuses_what_is_no_shape(shape, place):
    class Asks(FastPyDataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return self.empty(shape)

    with (
        Asks(**place) as dataset,
        pytest.raises((TypeError, ValueError)),
    ):
        list(dataset)


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_a_path_object_among_the_places_of_modules_is_passed_over(
    start_method, monkeypatch, tmp_path
):
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    with Numbered(
        workers=1, use_multiprocessing=True, start_method=start_method
    ) as dataset:
        assert numbers(dataset) == list(range(10))


def test_threads_where_workers_are_forked_are_named():
    dataset = Numbered(
        workers=1,
        use_multiprocessing=True,
        worker_env={"OPENBLAS_NUM_THREADS": "2"},
    )
    with dataset, pytest.raises(LoaderError, match="OPENBLAS_NUM_THREADS"):
        next(iter(dataset))
    with Numbered(
        workers=1,
        use_multiprocessing=True,
        worker_env={"OPENBLAS_NUM_THREADS": "2"},
        start_method="spawn",
    ) as dataset:
        assert numbers(dataset) == list(range(10))


class Hashes(FastPyDataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return {hash("a name")}


ASK = ["-c", "print({hash('a name')})"]


def test_names_have_one_hash_in_all_workers(monkeypatch):
    def of(worker_env=None, **place):
        place = {"use_multiprocessing": True, "workers": 1, **place}
        with Hashes(worker_env=worker_env, **place) as dataset:
            return str(next(iter(dataset)))

    everywhere = {of(), of(), of(start_method="spawn"), of({"MINE": "1"})}
    assert len(everywhere) == 1
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    assert of({"PYTHONHASHSEED": "5"}) == _run(ASK).strip()


@pytest.mark.parametrize("given", [None, "7", "random"])
def test_the_hash_seed_of_workers_is_the_trainers_if_it_was_given(
    given, monkeypatch
):
    if given is None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    else:
        monkeypatch.setenv("PYTHONHASHSEED", given)
    seed = environment.hash_seed.__wrapped__()["PYTHONHASHSEED"]
    assert seed == ("7" if given == "7" else "0")


def test_the_umask_is_known_without_proc_too(monkeypatch):
    before = os.umask(0o027)
    try:
        assert worker_process._umask() == 0o027
        monkeypatch.setattr(stack_dump, "status_of", lambda pid: {})
        assert worker_process._umask() == 0o027
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)


# -- whose the workers are -----------------------------------------------------


class OfGroup(Numbered):
    """Batch i tells the group of whoever builds it."""

    def __getitem__(self, index):
        return np.array([os.getegid()])


@pytest.mark.skipif(os.getuid() != 0, reason="needs the rights of root")
def test_workers_that_are_started_later_have_the_rights_of_the_trainer_then():
    def groups(dataset):
        return {int(batch[0]) for batch in dataset}

    group = os.getegid()
    with OfGroup(**PROCESSES) as before, OfGroup(**PROCESSES) as after:
        assert groups(before) == {group}
        os.setegid(65534)
        try:
            assert groups(after) == {65534}
            for process in psutil.Process().children(recursive=True):
                if (
                    process.pid
                    in before._fastdata.loader.pool_stats().pids.values()
                ):
                    process.kill()
            assert groups(before) == {65534}
        finally:
            os.setegid(group)


class Stuck(Numbered):
    """Batch 1 never comes, and says when it is begun."""

    def __init__(self, begun, **kwargs):
        super().__init__(**kwargs)
        self.begun = begun

    def __getitem__(self, index):
        while index == 1:
            self.begun.touch()
            time.sleep(60)
        return super().__getitem__(index)


def test_a_worker_that_may_not_be_killed_is_left_behind_by_name(
    monkeypatch, caplog, tmp_path
):
    def refuse(pidfd, number):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(supervisor, "GRACE_S", 0.2)
    begun = tmp_path / "begun"
    with Stuck(begun, workers=1, use_multiprocessing=True) as dataset:
        next(iter(dataset))
        while not begun.exists():
            time.sleep(0.01)
        (pid,) = dataset._fastdata.loader.pool_stats().pids.values()
        monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    (told,) = [r.getMessage() for r in caplog.records]
    assert told.startswith(f"Worker 0 (pid {pid}) of Stuck does not end")
    assert "may not be killed (EPERM)" in told


@pytest.mark.parametrize("refusal", [errno.ENOSYS, errno.EPERM])
@pytest.mark.parametrize("call", ["memfd_create", "pidfd_open"])
def test_a_container_that_forbids_a_call_has_portable_workers(
    call, refusal, monkeypatch
):
    def refuse(*_):
        raise OSError(refusal, os.strerror(refusal))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, refuse)
        text = f"`start_method='forkserver'` needs {call}"
        dataset = Numbered(start_method="forkserver", **PROCESSES)
        with dataset, pytest.raises(LoaderError, match=text):
            next(iter(dataset))
        with Numbered(**PROCESSES) as dataset:
            assert numbers(dataset) == list(range(10))
    with Numbered(start_method="forkserver", **PROCESSES) as dataset:
        assert numbers(dataset) == list(range(10))


@pytest.mark.filterwarnings("ignore:`start_method='fork'`")
@pytest.mark.parametrize("timeout_s", [0, 1e-3])
def test_a_default_timeout_for_sockets_does_not_matter(timeout_s, caplog):
    former = socket.getdefaulttimeout()
    try:
        socket.setdefaulttimeout(timeout_s)
        for method in ("forkserver", "spawn", "fork"):
            place = {"use_multiprocessing": True, "start_method": method}
            with Numbered(length=6, workers=2, **place) as dataset:
                assert numbers(dataset) == list(range(6))
    finally:
        socket.setdefaulttimeout(former)
    assert not [m for m in caplog.messages if "replaced" in m]


def test_a_worker_finds_the_package_where_the_trainer_has_it(monkeypatch):
    commands = []

    def record(command, **kwargs):
        commands.append(command)
        raise OSError("not started")

    monkeypatch.setattr(subprocess, "Popen", record)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(OSError, match="not started"):
        children.start_python("forkserver.main", {}, [])
    folder = os.path.dirname(os.path.dirname(keras_fastdata.__file__))
    assert f"[{folder!r}]" in commands[0][-1]
