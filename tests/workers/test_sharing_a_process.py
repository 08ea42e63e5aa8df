"""Datasets share a process: with each other, threads, forks, libraries."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import gc
import itertools
import os
import pathlib
import pickle
import random
import signal
import stat
import threading
import time

import cloudpickle
import keras
import numpy as np
import psutil
import pytest
from places import FULL, KINDS, quickly
from processes import workers
from samples import Numbered, Random, equal, numbers
from trainers import START_METHODS, Trainer, endless

from keras_fastdata import FastPyDataset
from keras_fastdata.memory import arena
from keras_fastdata.workers.process import forkserver_connection, forkservers

pytestmark = pytest.mark.usefixtures("kept_forkserver")

# The long way round, in the full run.
DATASETS = 1000 if FULL else 50
PROCESSES = {"workers": 2, "use_multiprocessing": True}
_PATIENCE_S = 120.0


def _model(**options):
    """A model whose loss is the mean of the squares of the targets."""
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")]
    )
    model.compile(keras.optimizers.SGD(0.0), "mse", **options)
    return model


def _mean_square(length):
    return pytest.approx(np.mean(np.arange(length) ** 2.0), rel=1e-5)


# -- training, and training again ----------------------------------------------


@pytest.mark.backend
def test_training_and_validation_take_turns():
    with (
        Numbered(length=12, **PROCESSES) as training,
        Numbered(length=7, **PROCESSES) as validation,
    ):
        history = _model().fit(
            training, validation_data=validation, epochs=3, verbose=0
        )
    assert history.history["loss"] == [_mean_square(12)] * 3
    assert history.history["val_loss"] == [_mean_square(7)] * 3


@pytest.mark.backend
def test_one_dataset_is_both_training_and_validation():
    with Numbered(length=12, **PROCESSES) as dataset:
        history = _model().fit(
            dataset,
            validation_data=dataset,
            validation_steps=5,
            epochs=3,
            verbose=0,
        )
    assert history.history["loss"] == [_mean_square(12)] * 3
    assert history.history["val_loss"] == [_mean_square(5)] * 3


class _Stop(keras.callbacks.Callback):
    """Does something after the third batch, once."""

    def __init__(self, act):
        super().__init__()
        self.act = act

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2 and self.act is not None:
            act, self.act = self.act, None
            act(self.model)


def _stop_training(model):
    model.stop_training = True


def _fail(_):
    raise RuntimeError("mine")


@pytest.mark.backend
@pytest.mark.parametrize("act", [_stop_training, _fail])
@pytest.mark.parametrize("place", ["thread", "process"])
def test_after_an_epoch_was_broken_off_the_next_fit_is_whole(place, act):
    model = _model()
    fails = act is _fail
    with Numbered(length=40, **KINDS[place]) as dataset:
        for _ in range(3):
            with (
                pytest.raises(RuntimeError, match="mine")
                if fails
                else (contextlib.nullcontext())
            ):
                model.fit(dataset, verbose=0, callbacks=[_Stop(act)])
            model.stop_training = False
            history = model.fit(dataset, verbose=0)
            assert history.history["loss"] == [_mean_square(40)]
        assert numbers(dataset) == list(range(40))


@pytest.mark.backend
def test_after_early_stopping_the_next_fit_is_whole():
    model = _model()
    early = keras.callbacks.EarlyStopping("loss", patience=1)
    with Numbered(length=10, **PROCESSES) as dataset:
        history = model.fit(dataset, epochs=9, verbose=0, callbacks=[early])
        assert history.history["loss"] == [_mean_square(10)] * 2
        history = model.fit(dataset, epochs=2, verbose=0)
        assert history.history["loss"] == [_mean_square(10)] * 2


class _Failing(keras.Sequential):
    def train_step(self, *_):
        raise RuntimeError("mine")


@pytest.mark.backend
def test_after_a_train_step_raised_the_next_fit_is_whole():
    with Numbered(length=10, **PROCESSES) as dataset:
        for _ in range(2):
            # Under JAX the model has lost its variables then, with any data.
            model = _Failing([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            with pytest.raises(RuntimeError, match="mine"):
                model.fit(dataset, verbose=0)
            history = _model().fit(dataset, verbose=0)
            assert history.history["loss"] == [_mean_square(10)]


# -- threads -------------------------------------------------------------------


def _in_threads(*functions):
    """Runs functions in a thread each, begun together; returns the results."""
    gate = threading.Barrier(len(functions))

    def run(function, future):
        gate.wait(_PATIENCE_S)
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    futures = [concurrent.futures.Future() for _ in functions]
    for function, future in zip(functions, futures, strict=True):
        # Daemons: one that hangs is to fail its test, not to hang all.
        threading.Thread(
            target=run, args=(function, future), daemon=True
        ).start()
    return [future.result(_PATIENCE_S) for future in futures]


@pytest.mark.backend
@pytest.mark.parametrize("place", ["thread", "process"])
def test_two_models_are_fitted_in_two_threads(place):
    models = _model(), _model()
    with (
        Numbered(length=30, **KINDS[place]) as one,
        Numbered(length=20, **KINDS[place]) as other,
    ):
        histories = _in_threads(
            lambda: models[0].fit(one, epochs=3, verbose=0),
            lambda: models[1].fit(other, epochs=3, verbose=0),
        )
    assert histories[0].history["loss"] == [_mean_square(30)] * 3
    assert histories[1].history["loss"] == [_mean_square(20)] * 3


@pytest.mark.parametrize("place", ["thread", "process"])
def test_two_loops_over_two_datasets_are_zipped(place):
    with (
        Numbered(length=50, **KINDS[place]) as one,
        Numbered(length=40, **KINDS[place]) as other,
    ):
        pairs = list(zip(other, one, strict=False))
    assert numbers(a for a, _ in pairs) == list(range(40))
    assert numbers(b for _, b in pairs) == list(range(40))


@pytest.mark.parametrize("place", ["thread", "process"])
def test_two_loops_over_one_dataset_are_zipped(place):
    with Numbered(length=50, **KINDS[place]) as dataset:
        pairs = list(zip(dataset, dataset, strict=True))
    for side in range(2):
        assert numbers(pair[side] for pair in pairs) == list(range(50))


def _interleave(dataset, passes, draw, most_held):
    """Takes batches from several passes in turn; returns what each gave."""
    opened = [iter(dataset) for _ in range(passes)]
    given = [[] for _ in range(passes)]
    left = list(range(passes))
    held = []
    while left:
        one = draw.choice(left)
        try:
            batch = opened[one].fetch(pause_after=draw.random() < 0.1)
        except StopIteration:
            left.remove(one)
            continue
        given[one] += numbers([batch])
        held.append((given[one][-1], batch[0]))
        del held[:-most_held]
        assert all((x == number).all() for number, x in held)
    return given


@pytest.mark.parametrize("seed", range(3))
def test_passes_in_any_order_share_few_slots(seed, monkeypatch):
    """Each has its batches once and in order, whatever the others hold.

    What lies ready for one pass is given up where another has no room.
    """
    monkeypatch.setattr(arena, "_MOST_SLOTS", 14)
    draw = random.Random(seed)
    with Numbered(
        length=15,
        shape=(64, 1024),
        max_queue_size=draw.randint(1, 12),
        **PROCESSES,
    ) as dataset:
        if seed:  # from the second epoch on, of those that `fit` prepares
            opened = iter(dataset)
            opened.prefetch_next(True)
            assert numbers(opened) == list(range(15))
        given = _interleave(dataset, 6, draw, most_held=draw.randint(1, 9))
        assert given == [list(range(15))] * 6


@pytest.mark.parametrize("place", ["thread", "process"])
def test_each_thread_has_its_own_epoch_of_one_dataset(place):
    with Numbered(length=300, **KINDS[place]) as dataset:
        epochs = _in_threads(*[lambda: list(dataset)] * 3)
    for epoch in epochs:
        assert numbers(epoch) == list(range(300))
        assert all((x == y[0]).all() for x, y in epoch)


def test_epochs_in_threads_have_the_bytes_of_epochs_in_turn():
    with Random(length=50, seed=3, **PROCESSES) as dataset:
        in_turn = [list(dataset) for _ in range(2)]
    with Random(length=50, seed=3, **PROCESSES) as dataset:
        # Which thread's is the first is not said.
        in_threads = _in_threads(*[lambda: list(dataset)] * 2)
    if not equal(in_threads[0][0], in_turn[0][0]):
        in_threads.reverse()
    assert equal(in_threads, in_turn)


@pytest.mark.parametrize("place", ["thread", "process"])
def test_an_iterator_gives_each_batch_to_one_of_its_threads(place):
    with Numbered(length=500, **KINDS[place]) as dataset:
        batches = iter(dataset)
        shares = _in_threads(*[lambda: numbers(batches)] * 3)
    assert sorted(itertools.chain(*shares)) == list(range(500))
    for share in shares:
        assert share == sorted(share)


@pytest.mark.parametrize("place", ["thread", "process"])
def test_a_dataset_is_closed_by_one_thread_while_another_iterates(place):
    taken = threading.Semaphore(0)

    def iterate():
        for batch in dataset:
            seen.append(batch)
            taken.release()

    def close():
        for _ in range(20):
            assert taken.acquire(timeout=_PATIENCE_S)
            dataset.close()

    seen = []
    with Numbered(length=60, max_queue_size=2, **KINDS[place]) as dataset:
        _in_threads(iterate, close)
        assert numbers(seen) == list(range(60))


def test_a_dataset_is_changed_by_one_thread_while_another_iterates():
    with Numbered(length=400, **PROCESSES) as dataset:
        over = threading.Event()

        def iterate():
            try:
                return numbers(dataset)
            finally:
                over.set()

        def change():
            while not over.wait(0.001):
                dataset.mark_changed()

        seen, _ = _in_threads(iterate, change)
    assert seen == list(range(400))


# -- datasets that come and go -------------------------------------------------


class _Blocked(FastPyDataset):
    """Begins to build, says so, and does not come to an end."""

    def __init__(self, pipe, **kwargs):
        super().__init__(**kwargs)
        self.pipe = str(pipe)

    def __len__(self):
        return 10

    def __getitem__(self, index):
        if index:
            with open(self.pipe, "w") as pipe:
                pipe.write("building")
            threading.Event().wait()
        return np.zeros(3)


def _wait_until(condition):
    """Waits for what another process does in its own time."""
    while not condition():
        time.sleep(0.001)


@pytest.mark.long
@pytest.mark.parametrize("cyclic", [False, True])
def test_datasets_come_and_go_by_the_hundred(cyclic):
    with Numbered(**PROCESSES) as keeps_the_forkserver:
        next(iter(keeps_the_forkserver))
        for number in range(DATASETS):
            dataset = Numbered(length=3, workers=1, use_multiprocessing=True)
            assert numbers([next(iter(dataset))]) == [0]
            if cyclic:
                dataset.itself = dataset
            if number % 10 == 0:
                assert numbers(dataset) == [0, 1, 2]
        del dataset
        gc.collect()
        _wait_until(lambda: len(workers()) == 2)
        assert numbers(keeps_the_forkserver) == list(range(10))


@pytest.mark.long
def test_a_dataset_is_collected_by_another_thread_while_workers_build(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    dataset = _Blocked(pipe, **PROCESSES)
    next(iter(dataset))
    assert pipe.read_text().startswith("building")
    dataset.itself = dataset
    gc.disable()
    try:
        del dataset
        assert workers()
        _in_threads(gc.collect)
    finally:
        gc.enable()
    _wait_until(lambda: not workers())


def test_a_dataset_is_collected_while_a_worker_of_another_is_forked(
    monkeypatch,
):
    dropped = Numbered(**PROCESSES)
    next(iter(dropped))
    dropped.itself = dropped
    send_fds = forkserver_connection.socket.send_fds

    def send_and_collect(*arguments):
        # As the collector may, at any allocation.
        sent = send_fds(*arguments)
        gc.collect()
        return sent

    gc.disable()
    try:
        del dropped
        with Numbered(**PROCESSES) as dataset:
            monkeypatch.setattr(
                forkserver_connection.socket, "send_fds", send_and_collect
            )
            assert numbers(dataset) == list(range(10))
            _wait_until(lambda: len(workers()) == 2)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "duplicate",
    [
        copy.copy,
        copy.deepcopy,
        lambda dataset: pickle.loads(pickle.dumps(dataset)),
        lambda dataset: cloudpickle.loads(cloudpickle.dumps(dataset)),
    ],
    ids=["copy", "deepcopy", "pickle", "cloudpickle"],
)
def test_a_dataset_is_duplicated_while_its_workers_run(duplicate):
    with Numbered(length=60, **PROCESSES) as dataset:
        batches = iter(dataset)
        seen = [next(batches) for _ in range(5)]
        with duplicate(dataset) as twin:
            assert twin.workers == 2
            pairs = list(zip(twin, batches, strict=False))
            assert numbers(a for a, _ in pairs)[:55] == list(range(55))
            assert numbers(seen) + numbers(b for _, b in pairs) == list(
                range(60)
            )
        # What the twin's end leaves alone:
        assert numbers(dataset) == list(range(60))


# -- processes that the user forks --------------------------------------------

FORKED = """
data = Data(300, pause_s=0.001, max_worker_restarts=0)
batches = iter(data)
seen = numbers([next(batches) for _ in range(5)])
pid = os.fork()
if not pid:
    {child}
seen += numbers([next(batches) for _ in range(100)])
say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
say(seen + numbers(batches) == list(range(300)))
say(numbers(data) == list(range(300)))
"""
CHILDREN = {
    "os._exit": "os._exit(0)",
    "sys.exit": "sys.exit(0)",
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "its own epoch": "sys.exit(numbers(data) != list(range(300)))",
    "the rest of the epoch": (
        "sys.exit(numbers(batches) != list(range(5, 300)))"
    ),
    "half an epoch": "next(iter(data)); held = iter(data); sys.exit()",
    "close": "data.close(); sys.exit()",
    "close, then an epoch": (
        "data.close(); sys.exit(numbers(data) != list(range(300)))"
    ),
    "del": "del data, batches; gc.collect(); sys.exit()",
    "del of the epoch": (
        "del batches; gc.collect(); next(iter(data)); sys.exit()"
    ),
    "another dataset": "sys.exit(numbers(Data()) != list(range(20)))",
    "a new state": (
        "data.length = 7; sys.exit(numbers(data) != list(range(7)))"
    ),
}


# Each takes seconds; the others are for the full run.
_QUICK = ("close",)


@pytest.mark.parametrize(
    "child",
    [
        child
        if child in _QUICK
        else pytest.param(child, marks=pytest.mark.long)
        for child in CHILDREN
    ],
)
def test_a_forked_process_does_not_disturb_its_parent_by(child, zygote):
    script = FORKED.format(child=CHILDREN[child])
    status = -signal.SIGKILL if child == "SIGKILL" else 0
    with Trainer(zygote, script) as trainer:
        assert trainer.line() == str(status), trainer.errors()
        assert trainer.line() == "True"
        assert trainer.line() == "True"
        assert trainer.end() == 0
        trainer.leaves_nothing()


@pytest.mark.long
@pytest.mark.parametrize("start_method", ["spawn", "fork"])
@pytest.mark.parametrize("child", ["sys.exit", "its own epoch", "close"])
def test_nor_without_a_forkserver(child, start_method, zygote):
    script = FORKED.format(child=CHILDREN[child]).replace(
        "max_worker", f"start_method={start_method!r}, max_worker"
    )
    with Trainer(zygote, script) as trainer:
        assert trainer.line() == "0", trainer.errors()
        assert trainer.line() == "True"
        assert trainer.line() == "True"
        assert trainer.end() == 0
        trainer.leaves_nothing()


BESIDE = {
    "multiprocessing": """
import multiprocessing
context = multiprocessing.get_context("fork")
with context.Pool(2) as pool:
    seen += numbers([next(batches) for _ in range(50)])
    assert pool.map(abs, range(50)) == list(range(50))
process = context.Process(target=data.close)
process.start()
seen += numbers([next(batches) for _ in range(50)])
process.join()
assert process.exitcode == 0
""",
    "subprocess": """
for options in {}, {"close_fds": False}, {"preexec_fn": gc.collect}:
    subprocess.run(["true"], check=True, **options)
    seen += numbers([next(batches) for _ in range(50)])
""",
    "torch": """
import torch
loader = torch.utils.data.DataLoader(list(range(60)), num_workers=2)
found = []
for theirs, ours in zip(loader, batches):
    found += theirs.tolist()
    seen += numbers([ours])
assert found == list(range(60))
# One that reads our dataset, too.
class Mapped(torch.utils.data.Dataset):
    def __len__(self): return 20
    def __getitem__(self, index): return int(data[index][1].flat[0])
loader = torch.utils.data.DataLoader(Mapped(), num_workers=2)
assert [int(number) for number in loader] == list(range(20))
del loader
""",
}


@pytest.mark.parametrize("beside", BESIDE)
def test_processes_of_others_beside_ours(beside, zygote):
    if beside == "torch":
        pytest.importorskip("torch")
    script = (
        "data = Data(300, pause_s=0.001, max_worker_restarts=0)\n"
        "batches = iter(data)\n"
        "seen = numbers([next(batches) for _ in range(5)])\n"
        f"{BESIDE[beside]}\n"
        "say(seen + numbers(batches) == list(range(300)))\n"
    )
    with Trainer(zygote, script) as trainer:
        assert trainer.line() == "True"
        assert trainer.end() == 0
        trainer.leaves_nothing()


def test_a_worker_of_a_job_in_the_background_stays_there(zygote):
    script = (
        "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\n"
        "class Policy(FastPyDataset):\n"
        "    def __len__(self): return 1\n"
        "    def __getitem__(self, index): return os.sched_getscheduler(0)\n"
        "with Policy(workers=1, use_multiprocessing=True) as dataset:\n"
        "    say(list(dataset) == [os.SCHED_IDLE])\n"
    )
    with Trainer(zygote, script) as trainer:
        assert trainer.line() == "True"
        assert trainer.end() == 0
        trainer.leaves_nothing()


@pytest.mark.parametrize(
    "signum", quickly([signal.SIGKILL, signal.SIGINT], signal.SIGKILL)
)
@pytest.mark.parametrize("start_method", START_METHODS)
def test_a_forked_process_that_lives_on_does_not_keep_workers(
    signum, start_method, zygote
):
    script = (
        f"data = {endless(start_method)}\n"
        "batches = iter(data)\n"
        "next(batches)\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    time.sleep(600)\n"
        "from multiprocessing.resource_tracker import _resource_tracker\n"
        "say(pid, _resource_tracker._pid)\n"
        "for _ in batches: pass\n"
    )
    with Trainer(zygote, script) as trainer:
        child, tracker = map(int, trainer.line().split())
        trainer.send(signum)
        assert trainer.end() == -signum
        trainer.leaves_no_process(but=[child, tracker])
        assert child in trainer.family()


# -- libraries with threads of their own ---------------------------------------


class _Multiplies(FastPyDataset):
    """Batches made by libraries that run threads below Python."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return compute(index)


def compute(index):
    """What NumPy, SciPy and scikit-learn make of a number."""
    linalg = pytest.importorskip("scipy.linalg")
    cluster = pytest.importorskip("sklearn.cluster")
    a = np.random.default_rng(index).normal(size=(120, 120))
    kmeans = cluster.KMeans(3, n_init=1, random_state=index).fit(a[:, :5])
    return a @ a.T, linalg.svdvals(a), np.sort(kmeans.cluster_centers_, axis=0)


# Not by "fork": OpenMP of GCC, under scikit-learn, does not survive it.
@pytest.mark.long
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_libraries_with_threads_work_in_trainer_and_workers(start_method):
    expected = [compute(index) for index in range(4)]
    with _Multiplies(start_method=start_method, **PROCESSES) as dataset:
        for _ in range(2):
            for index, batch in enumerate(dataset):
                assert all(map(np.allclose, batch, expected[index]))
                assert all(map(np.allclose, batch, compute(index)))


# -- what others on the machine can see ----------------------------------------


@pytest.fixture
def family():
    """This process and the workers of a dataset in the midst of an epoch."""
    forkservers.close_kept()  # one that a test before this one left
    with Numbered(length=50, **PROCESSES) as dataset:
        batches = iter(dataset)
        held = [next(batches) for _ in range(5)]
        trainer = psutil.Process()
        family = [trainer, *trainer.children(recursive=True)]
        assert len(family) == 4
        yield family
        assert numbers([*held, *batches]) == list(range(50))


def _links(process):
    """What the descriptors of a process lead to, by number."""
    found = {}
    for fd in os.listdir(f"/proc/{process.pid}/fd"):
        with contextlib.suppress(OSError):
            found[int(fd)] = os.readlink(f"/proc/{process.pid}/fd/{fd}")
    return found


def test_nobody_can_connect_to_our_sockets(family):
    for process in family:
        for connection in process.net_connections(kind="all"):
            assert connection.status != psutil.CONN_LISTEN
    sockets = {
        link.removeprefix("socket:[").removesuffix("]")
        for process in family[1:]
        for link in _links(process).values()
        if link.startswith("socket:")
    }
    lines = pathlib.Path("/proc/net/unix").read_text().splitlines()[1:]
    ours = [f for f in map(str.split, lines) if f[6] in sockets]
    assert len(ours) == len(sockets) >= 3  # tasks, results, control
    for _, _, _, flags, _, _, _, *path in ours:
        assert not path
        assert not int(flags, 16) & 0x10000  # __SO_ACCEPTCON: it listens


def test_our_shared_memory_has_no_name(family):
    ours = {
        link
        for process in family
        for link in _links(process).values()
        if "keras_fastdata" in link
    }
    assert ours == {
        "/memfd:keras_fastdata-batches (deleted)",
        "/memfd:keras_fastdata-dataset (deleted)",
        "/memfd:keras_fastdata-stacks (deleted)",
    }
    for process in family:
        for mapped in process.memory_maps(grouped=False):
            name = mapped.path.removesuffix(" (deleted)")
            if "keras_fastdata" in name and not name.endswith((".so", ".py")):
                assert name.startswith("/memfd:")
    assert not [
        name for name in os.listdir("/dev/shm") if "keras_fastdata" in name
    ]


@pytest.mark.filterwarnings("ignore:os.fork")  # JAX
@pytest.mark.filterwarnings("ignore:.*multi-threaded")  # Python 3.12
def test_other_users_cannot_open_our_shared_memory(family):
    paths = [
        f"/proc/{process.pid}/fd/{fd}"
        for process in family
        for fd, link in _links(process).items()
        if "/memfd:keras_fastdata" in link
    ]
    assert len(paths) >= 3
    for path in paths:
        directory = os.stat(os.path.dirname(path))
        assert directory.st_uid == os.getuid()
        assert not stat.S_IMODE(directory.st_mode) & 0o077
        if os.getuid() == 0:
            assert _opened_by_nobody(path) is PermissionError


def _opened_by_nobody(path):
    """What comes of opening a file as a user without rights."""
    pid = os.fork()
    if not pid:
        status = 2
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            os.close(os.open(path, os.O_RDONLY))
            status = 0
        except PermissionError:
            status = 1
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {0: None, 1: PermissionError}[status]
