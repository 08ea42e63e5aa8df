"""Work that never ends is replaced, or named; it does not hang the training.

What is stuck here is stuck for good, or until a test opens a FIFO or sets an
event. The watchdog is told who is stuck, and finds late nobody else; so no test
depends on how fast anything is.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import re
import signal
import threading
import time

import keras
import numpy as np
import psutil
import pytest
from lateness import only_the_stuck_are_late, worker_of
from processes import workers
from samples import equal
from slow_samples import (
    WAYS,
    Drawn,
    Freezes,
    Gated,
    SticksWhenLoaded,
    Stuck,
    StuckAtStart,
    TakesItsTime,
    Talks,
    TellsItsProcess,
    is_stuck,
    line_of,
    sleeps,
)
from trainers import START_METHODS

from keras_fastdata import BatchTimeoutError
from keras_fastdata.memory.arena import Arena
from keras_fastdata.workers import stack_dump, supervisor, thread, watchdog
from keras_fastdata.workers.base import BatchRequest
from keras_fastdata.workers.process import channel, children

TIMEOUT_S = 0.75
# Where nobody is stuck: longer than any batch here may take.
LONG_S = 3.0
ONE = {"workers": 1, "use_multiprocessing": True}
TWO = {"workers": 2, "use_multiprocessing": True}
METHODS = pytest.mark.parametrize("start_method", START_METHODS)
HERE = os.path.basename(__file__)

pytestmark = [
    pytest.mark.filterwarnings("ignore:`start_method='fork'`"),
    pytest.mark.usefixtures("kept_forkserver"),
]


@pytest.fixture(autouse=True)
def _warnings_are_seen(caplog):
    caplog.set_level(logging.WARNING, logger="keras_fastdata")


@pytest.fixture
def real_time():
    """Has work be late that has taken too long, which is no work at all."""


@pytest.fixture(autouse=True)
def _only_the_stuck_are_late(request, monkeypatch, tmp_path):
    if "real_time" not in request.fixturenames:
        only_the_stuck_are_late(
            monkeypatch,
            lambda activity: (
                is_stuck(tmp_path, worker_of(activity))
                or worker_of(activity) in StuckThread.stuck
            ),
        )


def _expected(length=8):
    return list(Drawn(length=length, workers=0))


def _indices(batches):
    return [int(y.flat[0]) for _, y in batches]


def _about(caplog, text):
    return [m for m in caplog.messages if text in m]


# -- a process that is stuck -------------------------------------------------


@METHODS
def test_a_worker_that_is_stuck_is_replaced_however_it_is_stuck(
    start_method, tmp_path, caplog
):
    ways = dict(enumerate([*WAYS, "encoding"], start=1))
    dataset = Stuck(
        tmp_path,
        ways,
        length=12,
        batch_timeout=TIMEOUT_S,
        max_worker_restarts=99,
        start_method=start_method,
        **TWO,
    )
    with dataset:
        first, second = list(dataset), list(dataset)
    assert equal(first, _expected(12))
    assert _indices(second) == list(range(12))
    for index, way in ways.items():
        told = "\n".join(_about(caplog, f"Batch {index} of epoch 0 of Stuck"))
        assert "`batch_timeout=0.75`. The worker is replaced" in told
        if way == "stops":
            assert "It has been stopped (SIGSTOP" in told
        else:
            assert line_of(WAYS.get(way, sleeps)) in told
        if way == "encoding":
            assert "in __reduce__" in told


@METHODS
def test_the_log_shows_no_thread_of_the_packages_own(
    start_method, tmp_path, caplog
):
    dataset = Stuck(
        tmp_path,
        {2: "sleeps"},
        batch_timeout=TIMEOUT_S,
        start_method=start_method,
        **ONE,
    )
    with dataset:
        assert equal(list(dataset), _expected())
    (told,) = _about(caplog, "The worker is replaced")
    assert line_of(sleeps) in told
    assert told.count("most recent call first") == 1
    assert "threading.py" not in told


def test_a_batch_that_is_stuck_twice_is_named_with_all_there_is_to_know(
    tmp_path,
):
    dataset = Stuck(
        tmp_path, {3: "sleeps"}, times=99, batch_timeout=TIMEOUT_S, **TWO
    )
    with dataset:
        batches = iter(dataset)
        assert _indices(next(batches) for _ in range(3)) == [0, 1, 2]
        with pytest.raises(BatchTimeoutError) as caught:
            next(batches)
        with pytest.raises(StopIteration):
            next(batches)
    error = caught.value
    assert error.dataset == "Stuck"
    assert error.worker in (0, 1)
    assert (error.epoch, error.batch_index) == (0, 3)
    assert error.elapsed_s > TIMEOUT_S
    assert line_of(sleeps) in error.stack
    message = str(error)
    assert message.startswith("Batch 3 of epoch 0 of Stuck, in worker")
    assert f"(pid {error.pid})" in message
    assert error.pid != os.getpid()
    assert "That was the second time." in message
    assert "pass a larger `batch_timeout` to the constructor." in message
    assert "dataset[3]" in message
    assert message.endswith(error.stack)


def test_without_restarts_the_first_stuck_batch_ends_the_epoch(tmp_path):
    dataset = Stuck(
        tmp_path,
        {3: "sleeps"},
        batch_timeout=TIMEOUT_S,
        max_worker_restarts=0,
        **TWO,
    )
    with dataset:
        batches = iter(dataset)
        assert _indices(next(batches) for _ in range(3)) == [0, 1, 2]
        with pytest.raises(
            BatchTimeoutError, match="`max_worker_restarts=0` is used up"
        ) as caught:
            next(batches)
        assert "second time" not in str(caught.value)
        # The next epoch has its workers again.
        assert _indices(dataset) == list(range(8))


def test_batches_that_are_held_stay_right_when_a_worker_is_replaced(tmp_path):
    dataset = Stuck(
        tmp_path,
        {4: "sleeps", 9: "loops"},
        length=30,
        batch_timeout=TIMEOUT_S,
        max_queue_size=3,
        **TWO,
    )
    with dataset:
        held, copies = [], []
        for x, y in dataset:
            held.append((x, y))
            copies.append((np.array(x), np.array(y)))
        assert equal(held, copies)
    assert equal(held, _expected(30))


@pytest.fixture
def patient(monkeypatch):
    """A worker on a busy machine may take its time to tell its stack."""
    monkeypatch.setattr(stack_dump, "_ANSWER_TIMEOUT_S", 60.0)


@pytest.mark.usefixtures("patient")
def test_a_worker_stuck_in_on_worker_start_is_replaced(tmp_path, caplog):
    dataset = StuckAtStart(tmp_path / "starts", batch_timeout=TIMEOUT_S, **ONE)
    with dataset:
        assert equal(list(dataset), _expected())
    (told,) = _about(caplog, "The worker is replaced")
    assert told.startswith(
        "Loading StuckAtStart, or its `on_worker_start`, in worker 0 (pid "
    )
    assert "more than the 60 s that a start may take." in told
    assert "in on_worker_start" in told


@pytest.mark.usefixtures("patient")
def test_a_start_that_never_ends_is_an_error_not_a_loop(tmp_path):
    dataset = StuckAtStart(
        tmp_path / "starts",
        times=99,
        batch_timeout=TIMEOUT_S,
        max_worker_restarts=0,
        **ONE,
    )
    with dataset:
        with pytest.raises(
            BatchTimeoutError, match="that a start may take"
        ) as caught:
            next(iter(dataset))
        error = caught.value
        assert (error.epoch, error.batch_index) == (None, None)
        assert "in on_worker_start" in error.stack


def test_a_start_may_take_longer_than_a_batch(tmp_path, caplog):
    class StartsSlowly(Drawn):
        def on_worker_start(self):
            time.sleep(2 * TIMEOUT_S)

    with StartsSlowly(batch_timeout=TIMEOUT_S, **ONE) as dataset:
        assert equal(list(dataset), _expected())
    assert not caplog.messages


def test_a_worker_stuck_while_it_loads_the_dataset_is_replaced(
    tmp_path, caplog
):
    with Drawn(batch_timeout=TIMEOUT_S, **ONE) as dataset:
        dataset.reader = SticksWhenLoaded(tmp_path / "loads")
        assert equal(list(dataset), _expected())
    (told,) = _about(caplog, "The worker is replaced")
    assert told.startswith("Loading Drawn")
    assert "in __setstate__" in told


def test_a_worker_stuck_in_taking_over_a_new_state_is_replaced(
    tmp_path, caplog
):
    with Drawn(batch_timeout=TIMEOUT_S, **ONE) as dataset:
        batches = iter(dataset)
        seen = [next(batches), next(batches)]
        dataset.reader = SticksWhenLoaded(tmp_path / "loads")
        seen += batches
    assert equal(seen, _expected())
    (told,) = _about(caplog, "The worker is replaced")
    assert told.startswith("Batch ")
    assert "in __setstate__" in told


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_a_stuck_batch_that_nobody_wants_any_more_does_not_keep_its_worker(
    start_method, tmp_path, caplog
):
    dataset = Stuck(
        tmp_path,
        {2: "sleeps"},
        batch_timeout=TIMEOUT_S,
        start_method=start_method,
        **ONE,
    )
    with dataset:
        batches = iter(dataset)
        assert _indices([next(batches), next(batches)]) == [0, 1]
        _wait_for(tmp_path / "sleeps-2")
        del batches
        assert _indices(dataset) == list(range(8))
    (told,) = _about(caplog, "The worker is replaced")
    assert line_of(sleeps) in told


def test_a_replacement_does_not_begin_with_the_time_of_the_one_before(
    monkeypatch, tmp_path
):
    clocks = []
    write = channel.write_shared_state

    def write_and_tell(start):
        segment = dataset._fastdata.loader._pool.workers._arena.segment
        clocks.append(segment.started_s(start.worker))
        return write(start)

    monkeypatch.setattr(channel, "write_shared_state", write_and_tell)
    dataset = Stuck(tmp_path, {2: "sleeps"}, batch_timeout=TIMEOUT_S, **ONE)
    with dataset:
        assert equal(list(dataset), _expected())
    assert clocks == [0, 0]


def _wait_for(path):
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# -- what is not stuck -------------------------------------------------------


@pytest.mark.long
def test_a_consumer_that_takes_its_time_makes_nobody_late(caplog, real_time):
    # More results than the socket takes: the worker waits for its reader.
    dataset = TellsItsProcess(
        length=900, max_queue_size=800, batch_timeout=LONG_S, **ONE
    )
    with dataset:
        batches = iter(dataset)
        pid = int(next(batches)[0])
        for _ in range(2):
            time.sleep(1.5 * LONG_S)
            assert int(next(batches)[0]) == pid
        assert [int(i) for _, i in batches] == list(range(3, 900))
    assert not caplog.messages


def test_a_worker_whose_results_nobody_wants_any_more_is_not_late(
    caplog, real_time
):
    dataset = TellsItsProcess(
        length=900, max_queue_size=800, batch_timeout=LONG_S, **ONE
    )
    with dataset:
        batches = iter(dataset)
        pid = int(next(batches)[0])
        time.sleep(1.5 * LONG_S)
        del batches
        assert all(int(by) == pid for by, _ in dataset)
    assert not caplog.messages


def test_a_worker_that_waits_to_have_its_log_read_is_not_late(
    caplog, real_time
):
    logging.getLogger("slow_samples").setLevel(logging.WARNING)
    with Talks(length=4, batch_timeout=LONG_S, **ONE) as dataset:
        batches = iter(dataset)
        seen = [next(batches)]
        time.sleep(1.5 * LONG_S)
        seen += batches
    assert equal(seen, _expected(4))
    assert not _about(caplog, "The worker is replaced")


@pytest.mark.parametrize(
    "where", [ONE, {"workers": 1}], ids=["process", "thread"]
)
def test_a_batch_below_the_timeout_is_let_be(where, caplog, real_time):
    dataset = TakesItsTime({2: 0.6}, batch_timeout=60.0, **where)
    with dataset:
        assert equal(list(dataset), _expected())
    assert not caplog.messages


def test_inline_a_timeout_has_no_effect(caplog):
    dataset = TakesItsTime({1: 0.3}, batch_timeout=0.05, workers=0)
    assert equal(list(dataset), _expected())
    assert not caplog.messages


# -- a thread that is stuck --------------------------------------------------


class StuckThread(Drawn):
    """Batches of `at` wait for `gate` in the first epoch."""

    stuck = set()  # the threads that wait

    def __init__(self, at=(2,), **kwargs):
        super().__init__(batch_timeout=TIMEOUT_S, **kwargs)
        self.at = at
        self.gate = threading.Event()
        self.entered = threading.Semaphore(0)
        self.left = threading.Semaphore(0)

    def __getitem__(self, index):
        if self.epoch == 0 and index in self.at:
            self.entered.release()
            self.wait()
            self.left.release()
            return np.full((4, 3), -1), np.full((4, 1), -1)
        return super().__getitem__(index)

    def wait(self):
        self.stuck.add(threading.get_ident())
        self.gate.wait()
        self.stuck.discard(threading.get_ident())


class StuckThreadAtStart(StuckThread):
    """Waits for `gate` in the first `on_worker_start`."""

    starts = 0

    def on_worker_start(self):
        self.starts += 1
        if self.starts == 1:
            self.wait()


@contextlib.contextmanager
def _opened(dataset):
    """Closes a dataset, and lets go what is stuck in it."""
    try:
        with dataset:
            yield dataset
    finally:
        dataset.gate.set()


def test_a_thread_that_is_stuck_ends_the_epoch_with_its_stack():
    with _opened(StuckThread(workers=2)) as dataset:
        batches = iter(dataset)
        assert _indices([next(batches), next(batches)]) == [0, 1]
        with pytest.raises(BatchTimeoutError) as caught:
            next(batches)
        with pytest.raises(StopIteration):
            next(batches)
        error = caught.value
        assert error.dataset == "StuckThread"
        assert error.worker in (0, 1)
        assert error.pid == os.getpid()
        assert (error.epoch, error.batch_index) == (0, 2)
        assert error.elapsed_s > TIMEOUT_S
        assert re.search(rf'{HERE}", line \d+, in __getitem__', error.stack)
        assert "self.gate.wait()" in error.stack
        message = str(error)
        assert message.startswith(
            "Batch 2 of epoch 0 of StuckThread, in worker thread"
        )
        assert "`batch_timeout=0.75`" in message
        assert "`use_multiprocessing=True`" in message
        assert message.endswith(error.stack)


def test_a_stuck_thread_is_named_after_a_slow_signal_handler(request):
    before = signal.signal(signal.SIGUSR1, lambda *_: time.sleep(0.3))
    request.addfinalizer(lambda: signal.signal(signal.SIGUSR1, before))
    main = threading.get_ident()
    with _opened(StuckThread(workers=2)) as dataset:
        batches = iter(dataset)
        assert _indices([next(batches), next(batches)]) == [0, 1]
        dataset.entered.acquire()  # the next batch never comes
        later = threading.Timer(
            0.2, signal.pthread_kill, (main, signal.SIGUSR1)
        )
        later.start()
        with pytest.raises(BatchTimeoutError):
            next(batches)
        later.join()


class StuckThreadThatAsks(StuckThread):
    """Each batch is drawn by a thread that `__getitem__` starts."""

    def __getitem__(self, index):
        super().__getitem__(index)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return np.array([pool.submit(lambda: self.rng.random()).result()])


def test_threads_of_builds_draw_while_a_former_worker_is_still_stuck():
    with _opened(StuckThreadThatAsks(workers=1, seed=1)) as dataset:
        with pytest.raises(BatchTimeoutError):
            list(dataset)
        assert len(list(dataset)) == len(dataset)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_dataset_is_whole_again_while_its_thread_is_still_stuck(workers):
    with _opened(StuckThread(workers=workers)) as dataset:
        with pytest.raises(BatchTimeoutError):
            list(dataset)
        for _ in range(2):
            assert _indices(dataset) == list(range(8))
        assert not dataset.gate.is_set()


def test_what_a_stuck_thread_builds_in_the_end_is_never_delivered():
    with _opened(StuckThread(workers=2)) as dataset:
        with pytest.raises(BatchTimeoutError):
            list(dataset)
        batches = iter(dataset)
        seen = [next(batches)]
        dataset.gate.set()
        assert dataset.left.acquire(timeout=120)
        time.sleep(0.1)  # in which it might be handed over
        seen += batches
        assert _indices(seen) == list(range(8))
        assert _indices(dataset) == list(range(8))


def test_a_thread_stuck_in_on_worker_start_is_named():
    with _opened(StuckThreadAtStart(at=(), workers=1)) as dataset:
        with pytest.raises(
            BatchTimeoutError, match="or its `on_worker_start`"
        ) as caught:
            list(dataset)
        assert (caught.value.epoch, caught.value.batch_index) == (None, None)
        assert "in on_worker_start" in caught.value.stack
        assert _indices(dataset) == list(range(8))
        dataset.gate.set()
        assert _indices(dataset) == list(range(8))


def test_a_thread_stuck_at_what_nobody_wants_any_more_is_replaced():
    with _opened(StuckThread(workers=1)) as dataset:
        batches = iter(dataset)
        assert _indices([next(batches), next(batches)]) == [0, 1]
        assert dataset.entered.acquire(timeout=120)
        del batches
        assert _indices(dataset) == list(range(8))
        assert not dataset.gate.is_set()


@pytest.mark.long
def test_a_second_thread_found_stuck_in_the_next_epoch_does_it_no_harm():
    with _opened(StuckThread(at=(2, 3), workers=2)) as dataset:
        with pytest.raises(BatchTimeoutError):
            list(dataset)
        for _ in range(3):
            assert _indices(dataset) == list(range(8))
            time.sleep(TIMEOUT_S)


# -- the end of a dataset with something stuck -------------------------------


def test_close_returns_while_a_thread_is_stuck(monkeypatch):
    monkeypatch.setattr(thread, "_CLOSE_TIMEOUT_S", 0.2)
    dataset = StuckThread(workers=2)
    try:
        batches = iter(dataset)
        next(batches)
        assert dataset.entered.acquire(timeout=120)
        dataset.close()
        assert not dataset.gate.is_set()
    finally:
        dataset.gate.set()


@pytest.mark.parametrize("way", ["holds_the_gil", "stops", "loops"])
def test_close_ends_a_process_that_is_stuck(way, tmp_path):
    dataset = Stuck(tmp_path, {2: way}, **ONE)
    batches = iter(dataset)
    next(batches)
    (worker,) = workers()
    _wait_for(tmp_path / f"{way}-2")
    dataset.close()
    _, alive = psutil.wait_procs([worker], timeout=120)
    assert not alive


# -- a process that cannot be killed -----------------------------------------


class _Behind:
    """Watches what happens around a worker that is left behind."""

    def __init__(self, monkeypatch):
        self.worker = self.slot = self.kept = None
        self.taken, self.closed = [], []
        leave, take = channel.Channel.abandon, Arena.take
        watcher = self

        def abandon(workers, worker):
            if watcher.worker is None:
                heartbeat = workers.arena.segment.heartbeat(worker.index)
                watcher.slot = workers.in_flight._out(heartbeat).slot
                watcher.worker = psutil.Process(worker.process.pid)
            return leave(workers, worker)

        def take_and_tell(arena, *spare):
            slot = take(arena, *spare)
            if watcher.worker is not None:
                watcher.taken.append(slot)
            return slot

        monkeypatch.setattr(channel.Channel, "abandon", abandon)
        monkeypatch.setattr(Arena, "take", take_and_tell)


def _check_what_is_left_behind(dataset, behind, caplog):
    """Walks through two epochs, of which the first meets the worker."""
    expected = _expected(40)
    with dataset:
        assert equal(list(dataset), expected)
        assert behind.worker.is_running()
        assert len(behind.taken) > 10
        assert behind.slot not in behind.taken
        assert _indices(dataset) == list(range(40))
        assert behind.slot not in behind.taken
        (told,) = _about(caplog, "is left behind")
        name = f"(pid {behind.worker.pid}) of {type(dataset).__name__}"
        assert re.match(r"Worker [01] \(pid ", told)
        assert name in told


def test_a_worker_that_survives_being_killed_is_left_behind(
    monkeypatch, tmp_path, caplog
):
    monkeypatch.setattr(supervisor, "GRACE_S", 0.5)
    behind = _Behind(monkeypatch)
    dataset = Stuck(
        tmp_path, {2: "stops"}, length=40, batch_timeout=TIMEOUT_S, **TWO
    )
    with monkeypatch.context() as patch:
        patch.setattr(children, "kill", lambda *_: True)
        try:
            _check_what_is_left_behind(dataset, behind, caplog)
        finally:
            if behind.worker is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(behind.worker.pid, signal.SIGKILL)
                    os.kill(behind.worker.pid, signal.SIGCONT)
    _, alive = psutil.wait_procs([behind.worker], timeout=120)
    assert not alive


def _kill_unless_stopped(kill):
    def spare(worker, *number):
        with contextlib.suppress(psutil.NoSuchProcess):
            status = psutil.Process(worker.pid).status()
            if status == psutil.STATUS_STOPPED:
                return True
        return kill(worker, *number)

    return spare


def test_new_forks_get_no_slot_of_one_that_was_left_behind(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(supervisor, "GRACE_S", 0.5)
    behind = _Behind(monkeypatch)
    dataset = Stuck(
        tmp_path, {2: "stops"}, length=40, start_method="fork", **TWO
    )
    with dataset, monkeypatch.context() as patch:
        batches = iter(dataset)
        next(batches)
        while not (tmp_path / "stops-2").exists():
            time.sleep(0.01)
        patch.setattr(children, "kill", _kill_unless_stopped(children.kill))
        try:
            dataset.level = 1  # so that the next batch needs new forks
            assert len(_indices(batches)) == 39
            assert len(behind.taken) > 10
            assert behind.slot not in behind.taken
        finally:
            behind.worker.kill()
            behind.worker.wait(120)


@pytest.fixture
def freezer():
    """A freezer of our own, a cgroup (v1) whose processes cannot be killed."""
    root = "/sys/fs/cgroup/freezer"
    with open("/proc/self/cgroup") as file:
        places = [line.strip().split(":", 2)[1:] for line in file]
    if ["freezer", "/"] not in places:
        pytest.skip("this process is not at the root of a cgroup v1 freezer")
    path = f"{root}/keras_fastdata-test-{os.getpid()}"
    try:
        os.mkdir(path)
    except OSError as error:
        pytest.skip(f"no freezer can be made: {error}")
    yield path
    _thaw(path)
    deadline = time.monotonic() + 120
    while True:
        try:
            os.rmdir(path)
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def _thaw(path):
    with open(f"{path}/freezer.state", "w") as file:
        file.write("THAWED")


@pytest.mark.long
@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
def test_a_frozen_worker_is_left_behind_and_ends_when_it_thaws(
    start_method, monkeypatch, tmp_path, caplog, freezer
):
    behind = _Behind(monkeypatch)
    dataset = Freezes(
        freezer,
        tmp_path / "frozen",
        length=40,
        batch_timeout=TIMEOUT_S,
        start_method=start_method,
        **TWO,
    )
    try:
        _check_what_is_left_behind(dataset, behind, caplog)
        assert behind.worker.is_running()
        assert _about(caplog, "uninterruptible system call")
    finally:
        _thaw(freezer)
    if start_method == "forkserver":
        _, alive = psutil.wait_procs([behind.worker], timeout=120)
        assert not alive
    else:
        # It was this process's own child, which nobody waits for any more.
        deadline = time.monotonic() + 120
        while os.waitpid(behind.worker.pid, os.WNOHANG) == (0, 0):
            assert time.monotonic() < deadline
            time.sleep(0.02)


# -- through fit -------------------------------------------------------------


class _Steps(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.count = 0

    def on_train_batch_end(self, batch, logs=None):
        self.count += 1


def _model():
    """A model of its own: Keras, on JAX, spoils one whose fit has failed."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.backend
def test_fit_trains_on_when_a_process_was_stuck(tmp_path, caplog):
    steps = _Steps()
    dataset = Stuck(
        tmp_path, {0: "sleeps", 5: "loops"}, batch_timeout=TIMEOUT_S, **TWO
    )
    with dataset:
        _model().fit(dataset, epochs=2, verbose=0, callbacks=[steps])
    assert steps.count == 16
    assert len(_about(caplog, "The worker is replaced")) == 2


@pytest.mark.backend
@pytest.mark.parametrize("at", [0, 5])
def test_fit_raises_the_timeout_itself_when_a_thread_is_stuck(at):
    with _opened(StuckThread(at=(at,), workers=2)) as dataset:
        with pytest.raises(BatchTimeoutError) as caught:
            _model().fit(dataset, verbose=0, shuffle=False)
        error = caught.value
        assert type(error) is BatchTimeoutError
        assert error.batch_index == at
        assert "self.gate.wait()" in error.stack
        assert "tensorflow" not in str(error).lower()
        assert len(str(error)) < 2000
        steps = _Steps()
        _model().fit(dataset, verbose=0, callbacks=[steps])
        assert steps.count == 8


@pytest.mark.backend
def test_fit_raises_the_timeout_itself_when_a_batch_is_stuck_twice(tmp_path):
    dataset = Stuck(
        tmp_path, {3: "sleeps"}, times=99, batch_timeout=TIMEOUT_S, **TWO
    )
    with dataset, pytest.raises(BatchTimeoutError) as caught:
        _model().fit(dataset, verbose=0)
    assert type(caught.value) is BatchTimeoutError
    assert caught.value.batch_index == 3


# -- without a timeout: the warning about a slow batch -----------------------


@pytest.fixture
def fifos(tmp_path):
    paths = [tmp_path / "first", tmp_path / "second"]
    for path in paths:
        os.mkfifo(path)
    return paths


def _let_go(fifo):
    """Opens a FIFO for its reader, if that has come."""
    with contextlib.suppress(OSError):
        os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))


class _Asked:
    """Counts how often a stack is asked for; `then` is told after each."""

    def __init__(self, monkeypatch, where, then):
        self.count = 0
        name = "request" if where is ONE else "of_thread"
        request = getattr(stack_dump, name)

        def ask_and_tell(*args):
            told = request(*args)
            self.count += 1
            then(self.count)
            return told

        monkeypatch.setattr(stack_dump, name, ask_and_tell)


SLOW = pytest.mark.parametrize(
    "where", [ONE, {"workers": 1}], ids=["process", "thread"]
)


def _quick_to_warn(monkeypatch):
    monkeypatch.setattr(watchdog, "_FIRST_LIMIT_S", 0.5)
    monkeypatch.setattr(watchdog, "_LEAST_LIMIT_S", 0.5)


def _place(where, function):
    line = line_of(function)
    return line if where is ONE else line.replace(" in ", ", in ")


@SLOW
def test_a_slow_batch_is_warned_about_once_where_it_stays(
    where, monkeypatch, fifos, caplog
):
    _quick_to_warn(monkeypatch)

    def then(count):
        if count >= 3:
            _let_go(fifos[0])
            _let_go(fifos[1])

    asked = _Asked(monkeypatch, where, then)
    # A reader of the second FIFO that finds one end open does not wait.
    keeper = os.open(fifos[1], os.O_RDWR)
    try:
        with Gated(fifos, **where) as dataset:
            assert equal(list(dataset), _expected())
    finally:
        os.close(keeper)
    assert asked.count == 3
    (told,) = caplog.messages
    assert told.startswith("Batch 2 of epoch 0 of Gated, in worker ")
    assert re.search(r"has taken \d+ s so far", told)
    assert "`batch_timeout" in told or "batch_timeout=...`" in told
    assert _place(where, Gated.wait_for_first) in told


@SLOW
def test_a_slow_batch_is_warned_about_again_when_it_has_moved(
    where, monkeypatch, fifos, caplog
):
    _quick_to_warn(monkeypatch)
    asked = _Asked(monkeypatch, where, lambda count: _let_go(fifos[count - 1]))
    with Gated(fifos, **where) as dataset:
        assert equal(list(dataset), _expected())
    assert asked.count == 2
    first, second = caplog.messages
    assert _place(where, Gated.wait_for_first) in first
    assert _place(where, Gated.wait_for_second) not in first
    assert _place(where, Gated.wait_for_second) in second
    assert all(m.startswith("Batch 2 of epoch 0") for m in caplog.messages)


@SLOW
def test_a_batch_in_the_usual_range_is_not_warned_about(
    where, monkeypatch, caplog
):
    monkeypatch.setattr(watchdog, "_LEAST_LIMIT_S", 0.05)
    dataset = TakesItsTime({0: 0.4, 3: 0.8, 5: 0.8}, **where)
    with dataset:
        assert equal(list(dataset), _expected())
    assert not caplog.messages


def _work(elapsed_s, where="here", request=None, worker=0):
    request = request or BatchRequest(7, 1, 3)
    what = watchdog.building("D", request, "worker 0")
    return watchdog.Activity(worker, what, request, elapsed_s, lambda: where)


def _start(elapsed_s):
    what = watchdog.loading("D", "worker 0")
    return watchdog.Activity(
        0, what, None, elapsed_s, lambda: "here", starting=True
    )


def test_how_slow_is_too_slow_is_learned_from_the_batches_before(caplog):
    guard = watchdog.Watchdog(None, "Do something.")
    guard.look([_work(59.9)])
    guard.learn(1.0)
    guard.look([_work(30.0)])
    guard.learn(40.0)
    guard.learn(2.0)
    guard.look([_work(400.0)])
    assert not caplog.messages
    assert guard.look([_work(401.0)]) == []
    (told,) = caplog.messages
    assert told == (
        "Batch 3 of epoch 1 of D, in worker 0, has taken 401 s so far; the "
        "slowest before took 40 s. Do something.\nhere"
    )


@pytest.mark.parametrize(("learned", "limit"), [(None, 60), (0.1, 30), (5, 50)])
def test_the_limits_of_a_slow_batch(learned, limit, caplog):
    guard = watchdog.Watchdog(None, "Do something.")
    if learned:
        guard.learn(learned)
    guard.look([_work(limit)])
    assert not caplog.messages
    guard.look([_work(limit + 0.1)])
    assert len(caplog.messages) == 1


def test_a_slow_batch_is_looked_at_ever_more_rarely(caplog):
    guard = watchdog.Watchdog(None, "Do something.")
    guard.look([_work(61, "a")])
    guard.look([_work(121, "b")])
    assert len(caplog.messages) == 1
    guard.look([_work(123, "b")])
    assert len(caplog.messages) == 2
    guard.look([_work(300, "b"), _work(99, "c", BatchRequest(8, 1, 4), 1)])
    assert len(caplog.messages) == 3
    guard.look([_work(61, "b", BatchRequest(9, 1, 5))])
    assert len(caplog.messages) == 4
    assert "Batch 5" in caplog.messages[-1]


def test_a_slow_start_is_measured_by_itself(caplog):
    guard = watchdog.Watchdog(None, "Do something.")
    guard.learn(100.0)
    guard.look([_start(60.0)])
    assert not caplog.messages
    guard.look([_start(61.0)])
    (told,) = caplog.messages
    assert told.startswith("Loading D, or its `on_worker_start`, in worker 0")


class _Clock:
    """A clock that a test sets."""

    now_s = 100.0

    def monotonic(self):
        return self.now_s


@pytest.mark.parametrize("timeout_s", [3.0, None], ids=["replaces", "warns"])
def test_time_in_which_nobody_looked_is_no_time_of_a_batch(
    timeout_s, monkeypatch, caplog, real_time
):
    clock = _Clock()
    monkeypatch.setattr(watchdog, "time", clock)
    guard = watchdog.Watchdog(timeout_s, "Do something.")
    limit_s = timeout_s or 60.0

    def is_late(after_s):
        """Lets time pass; is work late that began at 100 s?"""
        clock.now_s += after_s
        assert guard.begin_look()
        late = guard.look([_work(clock.now_s - 100)])
        found = bool(late or caplog.messages)
        caplog.clear()
        return found

    def looks_until_late():
        looks = 0
        while not is_late(0.5):
            looks += 1
        return looks

    assert not is_late(0.5)
    assert not is_late(1000.0)  # suspended, by Ctrl-Z for example
    assert looks_until_late() == limit_s / 0.5
    assert not is_late(1000.0)
