"""A build that never ends keeps no worker for itself once nobody waits for it.

A signal interrupts the consumer, as Ctrl-C does, while a build is stuck. The
next pass has all its batches, without a `batch_timeout`. The watchdog is told
who is stuck, and finds late nobody else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time

import keras
import numpy as np
import pytest
from lateness import only_the_stuck_are_late, worker_of
from slow_samples import is_stuck, sleeps, strike
from trainers import START_METHODS

from keras_fastdata import FastPyDataset, GeneratorDataset
from keras_fastdata.engine.pool_handle import PoolHandle
from keras_fastdata.workers import inline

pytestmark = [
    pytest.mark.filterwarnings("ignore:`start_method='fork'`"),
    pytest.mark.usefixtures("kept_forkserver"),
]

gate = threading.Event()


def _be_stuck_once(folder, kind):
    """Is stuck at the first call, a thread until the gate opens."""
    if not strike(os.path.join(folder, "strikes")):
        return
    if kind != "thread":
        sleeps(None)
    mine = os.path.join(folder, f"stuck-{threading.get_ident()}")
    os.rename(os.path.join(folder, f"stuck-{os.getpid()}"), mine)
    gate.wait()
    os.remove(mine)


def _strikes(folder):
    return os.path.getsize(folder / "strikes")


def _is_stuck_now(folder):
    return any(folder.glob("stuck-*"))


@pytest.fixture(autouse=True)
def _only_the_stuck_are_late(monkeypatch, tmp_path):
    gate.clear()
    only_the_stuck_are_late(
        monkeypatch,
        lambda activity: is_stuck(tmp_path, worker_of(activity)),
        without_timeout=True,
    )
    yield
    gate.set()


@pytest.fixture(autouse=True)
def _warnings_are_seen(caplog):
    caplog.set_level(logging.WARNING, logger="keras_fastdata")


class Interrupted(BaseException):
    """What the signal handler raises."""


def _waits(thread):
    """Whether a thread waits for a batch."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code is PoolHandle.wait.__code__:
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def _interrupted(folder):
    """Interrupts this thread when something is stuck; swallows the error."""

    def raise_it(*_):
        raise Interrupted

    def interrupt():
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if _is_stuck_now(folder) and armed.is_set() and _waits(main):
                break
            time.sleep(0.01)
        signal.pthread_kill(main, signal.SIGUSR1)

    main, armed = threading.get_ident(), threading.Event()
    before = signal.signal(signal.SIGUSR1, raise_it)
    sender = threading.Thread(target=interrupt)
    sender.start()
    try:
        armed.set()
        with contextlib.suppress(Interrupted):
            yield
            pytest.fail("no interrupt came")
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)


def _indices(batches):
    return [int(y.flat[0]) for _, y in batches]


def _facts(kind):
    if kind == "thread":
        return {}
    return {
        "use_multiprocessing": True,
        "start_method": kind,
        "max_worker_restarts": 0,
    }


class StuckOnce(FastPyDataset):
    """Batch 2 is stuck the first time."""

    def __init__(self, folder, kind, **kwargs):
        super().__init__(workers=1, **_facts(kind), **kwargs)
        self.how = str(folder), kind

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 2:
            _be_stuck_once(*self.how)
        return np.zeros((2, 1), "float32"), np.full((2, 1), index, "float32")


class StuckAtStart(StuckOnce):
    """The first `on_worker_start` is stuck."""

    def on_worker_start(self):
        _be_stuck_once(*self.how)


@pytest.mark.parametrize("kind", ["thread", *START_METHODS])
def test_the_next_pass_replaces_the_worker_that_an_interrupted_pass_waited_for(
    kind, tmp_path, caplog
):
    with StuckOnce(tmp_path, kind) as dataset:
        with _interrupted(tmp_path):
            list(dataset)
        assert _indices(dataset) == list(range(8))
    told = caplog.messages[-1]
    assert told.startswith("Batch 2 of epoch 0 of Stuck")
    assert "and nobody waits for it any more." in told
    assert ("Another thread takes its place" in told) == (kind == "thread")
    assert ("The worker is replaced" in told) == (kind != "thread")


@pytest.mark.parametrize("kind", ["thread", "forkserver"])
def test_an_iterator_that_is_held_keeps_no_worker_and_loses_no_batch(
    kind, tmp_path
):
    with StuckOnce(tmp_path, kind) as dataset:
        first = iter(dataset)
        assert _indices([next(first), next(first)]) == [0, 1]
        with _interrupted(tmp_path):
            next(first)
        assert _indices(dataset) == list(range(8))
        assert _indices(first) == list(range(2, 8))


@pytest.mark.parametrize("kind", ["thread", "forkserver"])
def test_the_next_pass_does_not_wait_for_the_stuck_build_of_a_shared_batch(
    kind, tmp_path
):
    with StuckOnce(tmp_path, kind, cache="memory") as dataset:
        first = iter(dataset)  # is held
        with _interrupted(tmp_path):
            list(first)
        for _ in range(2):
            assert _indices(dataset) == list(range(8))


def test_the_same_pass_goes_on_waiting_after_an_interrupt(tmp_path, caplog):
    with StuckOnce(tmp_path, "thread") as dataset:
        batches = iter(dataset)
        assert _indices([next(batches), next(batches)]) == [0, 1]
        with _interrupted(tmp_path):
            next(batches)
        opener = threading.Timer(0.5, gate.set)
        opener.start()
        assert _indices(batches) == list(range(2, 8))
        opener.join()
        assert _strikes(tmp_path) == 1
    assert "takes its place" not in caplog.text


def test_a_pass_in_another_thread_keeps_its_worker(tmp_path, caplog):
    with StuckOnce(tmp_path, "thread") as dataset:
        found = []
        other = threading.Thread(target=lambda: found.extend(dataset))
        other.start()
        while not _is_stuck_now(tmp_path):
            time.sleep(0.01)
        opener = threading.Timer(0.5, gate.set)
        opener.start()
        assert _indices(dataset) == list(range(8))
        other.join()
        opener.join()
        assert _indices(found) == list(range(8))
        assert _strikes(tmp_path) == 2  # once for each pass
    assert "takes its place" not in caplog.text


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("kind", ["thread", "forkserver"])
def test_a_start_that_is_stuck_does_not_keep_the_next_pass_waiting(
    kind, is_held, tmp_path, caplog
):
    with StuckAtStart(tmp_path, kind) as dataset:
        first = iter(dataset)
        with _interrupted(tmp_path):
            list(first)
        if not is_held:
            del first
        assert _indices(dataset) == list(range(8))
    told = caplog.messages[-1]
    assert "or its `on_worker_start`" in told
    assert "and nobody waits for it any more." in told


class Numbers:
    """Yields numbers; the generator is stuck once, at number 5."""

    def __init__(self, folder, kind):
        self.how = str(folder), kind

    def __call__(self, shard_index, num_shards):
        for number in range(shard_index, 20, num_shards):
            if number == 5:
                _be_stuck_once(*self.how)
            yield np.float32(number)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["thread", "forkserver", "portable"])
def test_a_stream_begins_anew_after_an_interrupt_of_a_stuck_generator(
    kind, workers, tmp_path
):
    dataset = GeneratorDataset(
        Numbers(tmp_path, kind), workers=workers, **_facts(kind)
    )
    with dataset:
        with _interrupted(tmp_path):
            list(dataset)
        assert [int(number) for number in dataset] == list(range(20))


@pytest.mark.backend
def test_fit_trains_after_ctrl_c_in_a_fit_that_waited_for_ever(tmp_path):
    def model():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    with StuckOnce(tmp_path, "thread") as dataset:
        with _interrupted(tmp_path):
            model().fit(dataset, epochs=2, verbose=0)
        history = model().fit(dataset, epochs=2, verbose=0)
        assert len(history.history["loss"]) == 2
        assert _strikes(tmp_path) == 3


def test_an_inline_build_that_is_stuck_in_one_thread_stops_no_other_one(
    monkeypatch, caplog
):
    monkeypatch.setattr(inline, "_STUCK_S", 0.2)
    stuck, opened = threading.Event(), threading.Event()
    main = threading.get_ident()

    class StuckInThread(FastPyDataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            if index == 2 and threading.get_ident() != main:
                stuck.set()
                opened.wait()
            return np.zeros(1), np.full(1, index)

    dataset = StuckInThread(workers=0)
    found = []
    thread = threading.Thread(target=lambda: found.extend(dataset))
    thread.start()
    stuck.wait()
    assert _indices(dataset) == list(range(6))
    opened.set()
    thread.join()
    assert _indices(found) == list(range(6))
    assert "This thread now builds" in caplog.text
