"""Forks of the training process while worker threads build."""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
import os
import signal
import subprocess
import threading
import time

import keras
import numpy as np
import pytest
from samples import Numbered, numbers

from keras_fastdata import BatchTimeoutError
from keras_fastdata.workers import forks

_forking = threading.Event()  # set when a fork begins to wait


class Holds(Numbered):
    """Holds locks in builds until a fork begins, and for a while longer.

    Begins once the program has the first batch, which needs a lock as well.
    """

    def __init__(self, *locks, **kwargs):
        super().__init__(**kwargs)
        self.locks, self.building = locks, threading.Event()
        self.has_first = threading.Event()

    def __getitem__(self, index):
        if index > 0:
            self.has_first.wait(60)
            for lock in self.locks:
                lock.acquire()
            self.building.set()
            _forking.wait(60)
            time.sleep(0.2)  # a fork that does not wait is over by then
            for lock in self.locks:
                lock.release()
        return super().__getitem__(index)


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    _forking.clear()
    begin_fork = forks._builds.begin_fork

    def wait():
        _forking.set()
        begin_fork()

    monkeypatch.setattr(forks._builds, "begin_fork", wait)
    monkeypatch.setattr(forks._builds, "_patience_s", 60.0)


@pytest.fixture
def locks():
    return threading.Lock(), np.random.get_bit_generator().lock


def _status_of_child(run):
    """Forks; returns the exit status of the child: what `run` returns."""
    if not (pid := os.fork()):
        try:
            os._exit(run())
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _count_locked(locks):
    return sum(not lock.acquire(timeout=5) for lock in locks)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_fork_waits_for_builds_that_hold_locks(workers, locks):
    with Holds(*locks, workers=workers) as dataset:
        batches = iter(dataset)
        next(batches)
        dataset.has_first.set()
        assert dataset.building.wait(60)
        assert _status_of_child(lambda: _count_locked(locks)) == 0
        assert numbers(batches) == [*range(1, 10)]


class ForksAfterEpochs(keras.callbacks.Callback):
    """Takes locks in a pool of processes while the next epoch is built."""

    def __init__(self, locks):
        global _locks
        super().__init__()
        _locks, self.found = locks, []

    def on_epoch_end(self, epoch, logs=None):
        with multiprocessing.get_context("fork").Pool(1) as pool:
            self.found.append(pool.apply(_count_locked_of_callback))


_locks = ()


def _count_locked_of_callback():
    return _count_locked(_locks)


@pytest.mark.backend
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_a_callback_may_use_a_pool_of_forked_processes(locks):
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    _forking.set()  # no build waits for a fork
    callback = ForksAfterEpochs(locks)
    with Holds(*locks, workers=1, length=3) as dataset:
        dataset.has_first.set()
        model.fit(dataset, epochs=3, verbose=0, callbacks=[callback])
    assert callback.found == [0, 0, 0]


def test_a_fork_by_a_thread_that_trains_waits_as_well(locks):
    def train():
        with Holds(*locks, workers=1) as dataset:
            batches = iter(dataset)
            next(batches)
            dataset.has_first.set()
            assert dataset.building.wait(60)
            assert _status_of_child(lambda: _count_locked(locks)) == 0
            assert numbers(batches) == [*range(1, 10)]

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(train).result()


class Forks(Numbered):
    """Forks in each build, in two threads at the same time."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.statuses, self.both = [], threading.Barrier(2)

    def __getitem__(self, index):
        self.both.wait(60)
        self.statuses.append(_status_of_child(lambda: 7))
        return super().__getitem__(index)


def test_builds_that_fork_do_not_wait_for_each_other():
    with Forks(workers=2, length=8) as dataset:
        assert numbers(dataset) == [*range(8)]
    assert dataset.statuses == [7] * 8


class ForksUnderLock(Numbered):
    """Forks in each build under a lock, which two threads take."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.lock, self.both = threading.Lock(), threading.Barrier(2)

    def __getitem__(self, index):
        self.both.wait(60)
        with self.lock:  # such as that of an executor
            assert _status_of_child(lambda: 7) == 7
        return super().__getitem__(index)


def test_a_build_that_forks_under_a_lock_waits_for_no_other_build(caplog):
    with ForksUnderLock(workers=2) as dataset:
        assert numbers(dataset) == [*range(10)]
    assert "A fork" not in caplog.text


class StoppedError(Exception):
    """Is raised by a signal handler."""


def _stop(*_):
    raise StoppedError


def test_what_a_signal_handler_raises_ends_the_wait_of_a_fork(monkeypatch):
    monkeypatch.setattr(forks._builds, "_patience_s", threading.TIMEOUT_MAX)
    before = signal.signal(signal.SIGUSR1, _stop)

    def interrupt():
        assert _forking.wait(60)
        os.kill(os.getpid(), signal.SIGUSR1)

    try:
        with (
            Waits(workers=1) as dataset,
            concurrent.futures.ThreadPoolExecutor(1) as pool,
        ):
            batches = iter(dataset)
            next(batches)
            assert dataset.building.wait(60)
            interrupted = pool.submit(interrupt)
            with pytest.raises(StoppedError):
                _status_of_child(lambda: 3)
            interrupted.result()
            dataset.may_end.set()
            assert numbers(batches) == [*range(1, 10)]
    finally:
        signal.signal(signal.SIGUSR1, before)


class ForksInPool(Numbered):
    """Waits in each build for a thread that forks."""

    def __getitem__(self, index):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(_status_of_child, lambda: 7).result()
        return super().__getitem__(index)


def test_a_thread_of_a_build_does_not_wait_for_the_build(caplog):
    with ForksInPool(workers=2) as dataset:
        assert numbers(dataset) == [*range(10)]
    assert "A fork" not in caplog.text


class Iterates(Numbered):
    """Has a thread iterate a dataset with worker threads, in each build.

    `run` runs in this thread, between batches of that dataset.
    """

    def __init__(self, run, **kwargs):
        super().__init__(**kwargs)
        self.run = run

    def __getitem__(self, index):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            assert pool.submit(self._iterate).result() == [*range(10)]
        return super().__getitem__(index)

    def _iterate(self):
        with Numbered(workers=2, max_queue_size=1) as inner:
            batches = iter(inner)
            found = numbers([next(batches)])
            self.run()
            return found + numbers(batches)


def test_a_thread_of_a_build_may_iterate_a_dataset_and_fork(caplog):
    fork = functools.partial(_status_of_child, lambda: 7)
    with Iterates(fork, workers=1) as dataset:
        assert numbers(dataset) == [*range(10)]
    assert "A fork" not in caplog.text


def test_a_fork_waits_for_a_build_that_iterates_another_dataset(caplog):
    has_first, building = threading.Event(), threading.Event()

    def wait_for_fork():
        if has_first.is_set():
            building.set()
            _forking.wait(60)

    with Iterates(wait_for_fork, workers=1, max_queue_size=1) as dataset:
        batches = iter(dataset)
        next(batches)
        has_first.set()
        assert building.wait(60)
        assert _status_of_child(lambda: 3) == 3
        assert numbers(batches) == [*range(1, 10)]
    assert "A fork" not in caplog.text


class Waits(Numbered):
    """Waits in the build of batch 1 until the program lets it go on."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.building, self.may_end = threading.Event(), threading.Event()

    def __getitem__(self, index):
        if index == 1:
            self.building.set()
            self.may_end.wait(60)
        return super().__getitem__(index)


def test_forks_wait_only_once_for_a_build_that_takes_long(monkeypatch, caplog):
    monkeypatch.setattr(forks._builds, "_patience_s", 0.2)
    monkeypatch.setattr(forks, "_AFTERWARDS_S", 0.0)
    with Waits(workers=1) as dataset:
        batches = iter(dataset)
        next(batches)
        assert dataset.building.wait(60)
        for _ in range(2):
            assert _status_of_child(lambda: 3) == 3
        dataset.may_end.set()
        assert numbers(batches) == [*range(1, 10)]
    said = [r.getMessage() for r in caplog.records]
    assert [text[:35] for text in said] == [
        "A fork of this process waited 0.2 s",
        "A fork of this process waited 0 s f",
    ]


def test_a_fork_that_becomes_another_program_waits_for_no_build(caplog):
    with Waits(workers=1) as dataset:
        batches = iter(dataset)
        next(batches)
        assert dataset.building.wait(60)
        assert subprocess.run(["true"], preexec_fn=os.setpgrp).returncode == 0
        dataset.may_end.set()
        assert numbers(batches) == [*range(1, 10)]
    assert "A fork" not in caplog.text


def test_no_fork_waits_for_a_thread_that_was_given_up(caplog):
    with Waits(workers=1, batch_timeout=0.2) as dataset:
        with pytest.raises(BatchTimeoutError):
            numbers(dataset)
        assert _status_of_child(lambda: 3) == 3
        dataset.may_end.set()
    assert "A fork" not in caplog.text


def test_a_forked_process_can_build_in_threads_of_its_own():
    with Numbered(workers=1) as dataset:
        batches = iter(dataset)
        next(batches)

        def run():
            with Numbered(workers=1) as own:
                return int(numbers(own) != [*range(10)])

        assert _status_of_child(run) == 0
        assert numbers(batches) == [*range(1, 10)]


class ForksAndFails(Numbered):
    """Forks a process that fails in its build; gives the process's status."""

    depth = 0

    def __len__(self):
        return 1

    def __getitem__(self, index):
        if child := os.fork():
            return np.array(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        self.depth += 1
        if self.depth > 1:
            os._exit(9)
        raise ValueError("A fault.")


def test_a_process_that_an_inline_build_forks_raises_its_error_once():
    """It would build the batch again, and fork again, without an end."""
    this = os.getpid()
    with ForksAndFails(workers=0) as dataset:
        try:
            found = [int(batch) for batch in dataset]
        except ValueError:
            assert os.getpid() != this
            os._exit(7)
        if os.getpid() != this:
            os._exit(8)
        assert found == [7]


@pytest.mark.filterwarnings("ignore:`start_method='fork'`")
def test_workers_are_not_forked_while_a_thread_starts_others(monkeypatch):
    start, inside = subprocess._fork_exec, threading.Event()

    def slow(*args):
        pid = start(*args)
        inside.set()
        time.sleep(1)  # the pipe that `Popen` reads until its end is open
        return pid

    monkeypatch.setattr(subprocess, "_fork_exec", slow)
    place = {"workers": 1, "use_multiprocessing": True}
    spawned = Numbered(start_method="spawn", **place)
    thread = threading.Thread(target=list, args=(spawned,), daemon=True)
    with Numbered(start_method="fork", **place) as forked, spawned:
        thread.start()
        assert inside.wait(30)
        assert next(iter(forked)) is not None
        thread.join(30)
        assert not thread.is_alive()
