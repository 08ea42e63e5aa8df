"""A worker that dies costs time, never a batch."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import time

import psutil
import pytest
from places import FULL
from processes import workers
from samples import Deadly, LetsAChildReturn, Numbered, numbers

from benchmarks.trouble import Trouble
from keras_fastdata import WorkerDiedError
from keras_fastdata.workers.in_flight import losses_of

pytestmark = pytest.mark.usefixtures("kept_forkserver")

# The long way round, in the full run.
KILLS = 300 if FULL else 40
PROCESSES = {"workers": 2, "use_multiprocessing": True}
CAUSES = {
    "sigkill": -signal.SIGKILL,
    "sigsegv": -signal.SIGSEGV,
    "sigabrt": -signal.SIGABRT,
    "sigterm": -signal.SIGTERM,
    "exit0": 0,
    "exit3": 3,
    "sysexit": 5,
}


@pytest.mark.parametrize("how", CAUSES)
def test_a_batch_that_kills_two_workers_is_named(how, tmp_path):
    dataset = Deadly(tmp_path / "deaths", how=how, times=99, **PROCESSES)
    with dataset:
        batches = iter(dataset)
        assert numbers(next(batches) for _ in range(3)) == [0, 1, 2]
        with pytest.raises(WorkerDiedError, match="second time") as caught:
            next(batches)
        error = caught.value
        assert error.dataset == "Deadly"
        assert (error.epoch, error.batch_index) == (0, 3)
        assert error.exit_code == CAUSES[how]
        assert error.worker in (0, 1)
        assert "dataset[3]" in str(error)


def test_without_restarts_the_first_death_ends_the_epoch(tmp_path):
    dataset = Deadly(tmp_path / "deaths", max_worker_restarts=0, **PROCESSES)
    with dataset:
        batches = iter(dataset)
        assert numbers(next(batches) for _ in range(3)) == [0, 1, 2]
        with pytest.raises(WorkerDiedError, match="max_worker_restarts=0"):
            next(batches)
        with pytest.raises(StopIteration):
            next(batches)
        # The next epoch has its workers again.
        assert numbers(dataset) == list(range(10))


def test_a_dataset_that_dies_while_it_is_loaded_is_an_error_not_a_loop(
    tmp_path,
):
    class DiesOnStart(Deadly):
        def on_worker_start(self):
            self.die()

    dataset = DiesOnStart(tmp_path / "deaths", **PROCESSES)
    with dataset, pytest.raises(WorkerDiedError, match="SIGKILL"):
        next(iter(dataset))


def test_a_worker_killed_while_idle_is_replaced():
    with Numbered(**PROCESSES) as dataset:
        assert numbers(dataset) == list(range(10))
        for worker in workers():
            worker.kill()
        assert numbers(dataset) == list(range(10))


def test_when_the_forkserver_is_killed_another_takes_its_place():
    with Numbered(length=30, **PROCESSES) as dataset:
        batches = iter(dataset)
        assert numbers([next(batches)]) == [0]
        forkserver = psutil.Process().children()[0]
        forkserver.kill()
        assert numbers(batches) == list(range(1, 30))


def test_random_kills_without_restarts_lose_and_repeat_nothing():
    kills = raised = 0
    seed = 0
    while kills < KILLS:
        seed += 1
        with (
            Numbered(
                length=2000, max_worker_restarts=0, **PROCESSES
            ) as dataset,
            Trouble(seed, 0.02, {"SIGKILL": 1}) as trouble,
        ):
            for _ in range(10):
                seen = []
                try:
                    seen.extend(dataset)
                    assert numbers(seen) == list(range(2000))
                except WorkerDiedError:
                    raised += 1
                    assert numbers(seen) == list(range(len(seen)))
        kills += trouble.done.total()
    assert raised  # else no kill has met a worker at work


def test_random_kills_with_restarts_change_no_byte():
    # A batch that was lost is delivered before the next kill, so that no kill
    # meets the same batch twice, however slow the machine is.
    rng = random.Random(0)
    length = 9000 if FULL else 3000
    killed = 0
    with Numbered(
        length=length, max_worker_restarts=9999, **PROCESSES
    ) as dataset:
        for _ in range(2):
            seen, kill_at = [], rng.randrange(500)
            for x, y in dataset:
                seen += numbers([(x, y)])
                assert (x == y[0]).all()
                if len(seen) > kill_at:
                    kill_at += rng.randrange(100, 500)
                    killed += _kill_a_worker(rng)
            assert seen == list(range(length))
    assert killed


def test_a_long_queue_does_not_deadlock():
    with Numbered(length=3000, max_queue_size=1000, **PROCESSES) as dataset:
        assert numbers(dataset) == list(range(3000))


class WithChild(Numbered):
    """Has a process of its own, as one that decodes video would."""

    def on_worker_start(self):
        self.child = subprocess.Popen(["sleep", "600"])


def test_what_a_worker_started_ends_with_it():
    with WithChild(**PROCESSES) as dataset:
        sleeps = []
        while len(sleeps) < 2:
            list(dataset)
            family = psutil.Process().children(recursive=True)
            sleeps = [p for p in family if _sleeps(p)]
        for worker in workers():
            if not _sleeps(worker):
                worker.kill()
        list(dataset)
        _, alive = psutil.wait_procs(sleeps, timeout=120)
        assert not alive


# -- the pure part -----------------------------------------------------------


def test_a_request_noted_by_the_dead_is_the_suspect():
    losses = losses_of({1, 2}, 1, {0: 2})
    assert (losses.suspect, losses.unclaimed) == (1, ())


def test_a_request_that_nobody_admits_to_is_unclaimed():
    losses = losses_of({1, 2}, 0, {0: 2})
    assert (losses.suspect, losses.unclaimed) == (None, (1,))


def test_a_note_about_a_request_with_a_result_accuses_nobody():
    losses = losses_of({2}, 1, {0: 2})
    assert (losses.suspect, losses.unclaimed) == (None, ())


def _kill_a_worker(rng):
    with contextlib.suppress(psutil.NoSuchProcess, IndexError):
        rng.choice(workers()).kill()
        return True
    return False


def _sleeps(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name() == "sleep"
    return False


def test_a_death_ends_the_wait_for_the_batch(tmp_path):
    dataset = Deadly(
        tmp_path / "deaths", at=0, max_worker_restarts=0, **PROCESSES
    )
    with dataset:
        batches = iter(dataset)
        with pytest.raises(WorkerDiedError):
            next(batches)


def test_each_death_is_logged_with_its_cause_and_batch(tmp_path, caplog):
    with Deadly(tmp_path / "deaths", how="exit3", **PROCESSES) as dataset:
        assert numbers(dataset) == list(range(10))
    (told,) = caplog.messages
    assert re.fullmatch(
        r"Worker \d \(pid \d+\) of Deadly exited with status 3 while building "
        r"batch 3 of epoch 0\. It is replaced and its batch is built again "
        r"\(restart 1 of at most 3 in this epoch\)\.",
        told,
    )


@pytest.mark.parametrize(
    ("start_method", "name"),
    [
        ("forkserver", "SIGUSR1"),
        ("forkserver", "SIGUSR2"),
        ("forkserver", "SIGHUP"),
        ("fork", "SIGUSR1"),
        ("spawn", "SIGUSR1"),
    ],
)
def test_a_signal_for_the_whole_job_ends_no_worker(name, start_method):
    with Numbered(start_method=start_method, **PROCESSES) as dataset:
        list(dataset)
        workers = dataset._fastdata.loader._pool.workers._workers
        while not all(worker.is_ready for worker in workers.values()):
            list(dataset)
        batches = iter(dataset)
        next(batches)
        pids = dataset._fastdata.loader.pool_stats().pids
        for process in psutil.Process().children(recursive=True):
            process.send_signal(getattr(signal, name))
        assert numbers(batches) == list(range(1, 10))
        assert numbers(dataset) == list(range(10))
        assert dataset._fastdata.loader.pool_stats().pids == pids


def test_workers_are_met_when_they_end_although_the_trainer_ignores_that(
    tmp_path,
):
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        dataset = Deadly(
            tmp_path / "deaths", how="exit3", times=99, **PROCESSES
        )
        with dataset, pytest.raises(WorkerDiedError, match="second") as caught:
            list(dataset)
        assert caught.value.exit_code == 3
        # Nobody can learn it of a child of the trainer itself.
        dataset = Deadly(
            tmp_path / "others", times=99, start_method="spawn", **PROCESSES
        )
        with dataset, pytest.raises(WorkerDiedError, match="not be learned"):
            list(dataset)
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_a_process_that_ends_at_once_unseen_is_replaced(
    start_method, monkeypatch
):
    opened = os.pidfd_open
    killed = []

    def open_late(pid):
        """Opens the pidfd of the first new process after that has ended."""
        if pid != os.getpid() and not killed:
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)
            while psutil.pid_exists(pid):
                time.sleep(0.001)
        return opened(pid)

    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        monkeypatch.setattr(os, "pidfd_open", open_late)
        with Numbered(
            length=20,
            start_method=start_method,
            worker_env={"NEW": "1"},  # for which there is no fork server yet
            **PROCESSES,
        ) as dataset:
            assert numbers(dataset) == list(range(20))
        assert killed
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("raises", [False, True])
def test_a_process_that_a_build_forks_does_not_answer_for_its_worker(raises):
    with LetsAChildReturn(
        raises, length=5, workers=1, use_multiprocessing=True
    ) as dataset:
        assert numbers(dataset) == [0, 1, 2, 3, 4]
