"""Workers that need nothing but what Python has on every system."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import logging
import os
import re
import signal

import numpy as np
import psutil
import pytest
from places import quickly
from portable_samples import (
    LARGE,
    EndsItsResults,
    InPlace,
    Keeps,
    Large,
    Pickled,
    Sized,
    TellsProcess,
)
from processes import workers
from samples import (
    Deadly,
    Leveled,
    Numbered,
    OpensFiles,
    Random,
    equal,
    numbers,
)
from slow_samples import Stuck, holds_the_gil, line_of, sleeps
from trainers import Trainer, endless

from keras_fastdata import LoaderError, WorkerDiedError
from keras_fastdata.engine import settings
from keras_fastdata.workers import supervisor
from keras_fastdata.workers.portable import (
    channel,
    launcher,
    requirements,
    worker_main,
)

TWO = {
    "workers": 2,
    "use_multiprocessing": True,
    "start_method": "portable",
}
ONE = {**TWO, "workers": 1}
ENDS = {
    "sigkill": -signal.SIGKILL,
    "sigterm": -signal.SIGTERM,
    "exit0": 0,
    "exit3": 3,
    "sysexit": 5,
}


def _same(one, other):
    return all(
        equal(a, b) for a, b in itertools.zip_longest(list(one), list(other))
    )


def test_workers_end_though_memory_of_waiting_batches_cannot_be_opened(
    monkeypatch,
):
    receive, fails = channel.PipeChannel.receive, iter([True])

    def receive_or_fail(pipes):
        if next(fails, False):
            raise LoaderError("The memory of a batch could not be opened")
        return receive(pipes)

    with Large(**TWO) as dataset:
        next(iter(dataset))
        pids = [worker.pid for worker in workers()]
        monkeypatch.setattr(channel.PipeChannel, "receive", receive_or_fail)
        dataset.close()
        assert next(fails, "all") == "all"
        assert not [pid for pid in pids if psutil.pid_exists(pid)]


# -- batches -------------------------------------------------------------------


def test_batches_are_the_same_bytes_as_inline_epoch_after_epoch():
    inline = Random(workers=0, seed=3)
    with Random(seed=3, **TWO) as dataset:
        for _ in range(3):
            assert _same(inline, dataset)


def test_batches_of_every_size_come_in_order():
    sizes = [1, LARGE, 10, 9 * LARGE, 3 * LARGE, 40_000, 0, 2]
    with Sized(sizes, **TWO) as dataset:
        for _ in range(2):
            for index, batch in enumerate(dataset):
                assert len(batch) == sizes[index]
                assert (batch == index).all()


def test_batches_that_are_held_are_not_written_to():
    with Sized([LARGE] * 60, **TWO) as dataset:
        held = list(dataset)
        list(dataset)
        assert all((batch == i).all() for i, batch in enumerate(held))
    assert all((batch == i).all() for i, batch in enumerate(held))


def test_arrays_from_empty_and_pickled_batches_arrive():
    for dataset in (InPlace(**ONE), Pickled(**ONE), Keeps(**ONE)):
        with dataset, type(dataset)(workers=0) as inline:
            for _ in range(2):
                for one, other in zip(dataset, inline, strict=True):
                    np.testing.assert_equal(one, other)


def test_changes_of_the_dataset_reach_the_workers():
    with Leveled(length=30, **TWO) as dataset:
        batches = iter(dataset)
        assert int(next(batches)[0][0]) == 0
        dataset.level = 5
        assert {int(x[0]) for x, _ in batches} == {5}


def test_a_large_array_that_changes_each_epoch_reaches_the_workers():
    with Large(**ONE) as dataset:
        for level in range(6):
            dataset.table = np.full(1 << 21, float(level))
            found = [batch.tolist() for batch in dataset]
            assert found == [[level, level, index] for index in range(3)]


def test_hooks_of_workers_run_when_they_start_and_stop(tmp_path):
    path, log = tmp_path / "text", tmp_path / "log"
    path.write_text("a b c")
    with OpensFiles(path, log=log, **TWO) as dataset:
        assert len(list(dataset)) == 4
    words = log.read_text().split()
    assert words.count("start") == words.count("stop") == 2


# -- deaths --------------------------------------------------------------------


@pytest.mark.parametrize("how", quickly(ENDS, "sigkill"))
def test_a_worker_that_ends_is_replaced_and_no_batch_is_lost(how, tmp_path):
    with Deadly(tmp_path / "deaths", how=how, **TWO) as dataset:
        assert numbers(dataset) == list(range(10))
        assert numbers(dataset) == list(range(10))


@pytest.mark.parametrize("how", quickly(ENDS, "sigkill"))
def test_a_batch_that_ends_two_workers_is_named(how, tmp_path):
    dataset = Deadly(tmp_path / "deaths", how=how, times=99, **TWO)
    with dataset:
        batches = iter(dataset)
        assert numbers(next(batches) for _ in range(3)) == [0, 1, 2]
        with pytest.raises(WorkerDiedError, match="second time") as caught:
            next(batches)
    assert (caught.value.epoch, caught.value.batch_index) == (0, 3)
    assert caught.value.exit_code == ENDS[how]


class DiesOnStart(Deadly):
    """Ends in `on_worker_start`."""

    def on_worker_start(self):
        if self.strike():
            self.die()


@pytest.mark.parametrize("times", [1, 99])
def test_a_worker_that_ends_at_its_start(times, tmp_path):
    dataset = DiesOnStart(tmp_path / "d", "exit3", at=-1, times=times, **TWO)
    with dataset:
        if times == 1:
            assert numbers(dataset) == list(range(10))
        else:
            with pytest.raises(WorkerDiedError, match="status 3"):
                next(iter(dataset))


def test_kills_at_any_time_lose_and_repeat_nothing():
    with TellsProcess(400, 0.001, max_worker_restarts=99, **TWO) as dataset:
        for _ in range(2):
            seen = []
            for number, batch in enumerate(dataset):
                seen.append(int(batch[0]))
                if number % 100 == 50:
                    os.kill(seen[-1], signal.SIGKILL)
            assert len(seen) == 400


@pytest.mark.parametrize("way", quickly([sleeps, holds_the_gil], sleeps))
def test_a_stuck_worker_is_replaced_and_its_line_is_logged(
    way, tmp_path, monkeypatch, caplog
):
    caplog.set_level(logging.WARNING, logger="keras_fastdata")
    # A worker that holds the GIL does not answer: its stacks are read then.
    monkeypatch.setattr(channel, "_STACK_TIMEOUT_S", 10.0)
    ways = dict.fromkeys((1, 4), way.__name__)
    with Stuck(tmp_path, ways, batch_timeout=2.0, **TWO) as dataset:
        assert [int(y[0, 0]) for _, y in dataset] == list(range(8))
    assert [m for m in caplog.messages if line_of(way) in m]


def test_a_worker_without_results_that_cannot_be_killed_is_left_behind(
    tmp_path, monkeypatch, caplog
):
    pid, kill = tmp_path / "pid", launcher.kill

    def kill_others(process):
        if pid.read_text() != str(process.pid):
            kill(process)

    monkeypatch.setattr(launcher, "kill", kill_others)
    monkeypatch.setattr(supervisor, "GRACE_S", 0.2)
    with EndsItsResults(pid, **TWO) as dataset:
        assert [int(batch[0]) for batch in dataset] == list(range(6))
    text = f"(pid {pid.read_text()}) of EndsItsResults does not end"
    assert text in caplog.messages[0]
    with contextlib.suppress(ChildProcessError):
        os.waitpid(int(pid.read_text()), 0)


def test_a_worker_whose_task_pipe_has_ended_leaves_no_name():
    with Sized([LARGE] * 50, **ONE) as dataset:
        next(iter(dataset))
        channel = dataset._fastdata.loader._pool.workers._channel
        (worker,) = channel.workers.values()
        worker.tasks.pipe.close()
        worker.process.wait()
        names = os.listdir("/dev/shm")
        assert not [n for n in names if n.startswith(channel.arena.prefix)]


# -- the end of the trainer ----------------------------------------------------


@pytest.mark.parametrize(
    "signum", quickly([signal.SIGKILL, signal.SIGTERM], signal.SIGKILL)
)
def test_a_trainer_that_a_signal_ends_leaves_nothing(signum, zygote):
    script = f"fit({endless('portable')}, Tell())\n"
    with Trainer(zygote, script) as trainer:
        assert trainer.line() == "training"
        assert len(trainer.family()) >= 4  # it, two workers, what one runs
        trainer.send(signum)
        assert trainer.end() == -signum
        trainer.leaves_nothing()


def test_a_trainer_that_is_killed_leaves_nothing_beside_a_fork(zygote):
    script = (
        f"data = {endless('portable')}\n"
        "batches = iter(data)\n"
        "next(batches)\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    time.sleep(600)\n"
        "from multiprocessing.resource_tracker import _resource_tracker\n"
        "say(pid, _resource_tracker._pid)\n"
        "fit(data, Tell())\n"
    )
    with Trainer(zygote, script) as trainer:
        fork, tracker = map(int, trainer.line().split())
        assert trainer.line() == "training"
        trainer.send(signal.SIGKILL)
        trainer.end()
        trainer.leaves_no_process(but=[fork, tracker])
        os.kill(fork, signal.SIGKILL)
        trainer.leaves_nothing()


def test_a_trainer_that_ends_in_order_leaves_and_prints_nothing(zygote):
    script = (
        "data = Data(start_method='portable')\n"
        "held = list(data)\n"
        "say(len(held))\n"
    )
    with Trainer(zygote, script) as trainer:
        assert trainer.line() == "20"
        assert trainer.end() == 0
        trainer.leaves_nothing()


def test_a_script_needs_no_main_guard(tmp_path, zygote):
    script = tmp_path / "train.py"
    script.write_text(
        "import numpy as np\n"
        "from keras_fastdata import FastPyDataset\n"
        "class Mine(FastPyDataset):\n"
        "    def __len__(self):\n"
        "        return 3\n"
        "    def __getitem__(self, index):\n"
        "        return np.array([index])\n"
        "print('runs')\n"
        f"with Mine(**{TWO!r}) as dataset:\n"
        "    print([int(batch[0]) for batch in dataset])\n"
    )
    done = zygote.run(script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["runs", "[0, 1, 2]", ""]


# -- how they are chosen -------------------------------------------------------


def test_this_system_lacks_nothing():
    assert requirements.lacking() == []


@pytest.mark.parametrize(
    ("module", "name", "lacks"),
    [
        (os, "memfd_create", "memfd_create"),
        (os, "pidfd_open", "pidfd_open"),
        (os, "fork", "fork"),
        (signal, "SIGKILL", "SIGKILL"),
    ],
)
def test_what_the_system_lacks_is_named(module, name, lacks, monkeypatch):
    monkeypatch.delattr(module, name)
    assert requirements.lacking() == [lacks]


@pytest.mark.parametrize("number", [1, 38])  # EPERM, ENOSYS
def test_a_refused_system_call_is_lacking(number, monkeypatch):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert requirements.lacking() == ["memfd_create", "pidfd_open"]
    with Numbered(workers=1, use_multiprocessing=True) as dataset:
        assert numbers(dataset) == list(range(10))


def test_a_start_method_that_cannot_be_had_is_an_error(monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")
    dataset = Numbered(**{**ONE, "start_method": "forkserver"})
    text = re.escape("`start_method='forkserver'` needs pidfd_open")
    with dataset, pytest.raises(LoaderError, match=text):
        next(iter(dataset))


def test_the_start_method_is_one_of_four():
    assert "portable" in settings.START_METHODS
    with pytest.raises(ValueError, match="portable"):
        Numbered(start_method="loky")


def test_a_worker_watches_the_trainer_where_no_thread_dumps_stacks(
    tmp_path, monkeypatch
):
    def refuse(*_, **__):
        raise RuntimeError("unable to start watchdog thread")

    monkeypatch.setattr(faulthandler, "dump_traceback_later", refuse)
    with open(tmp_path / "stacks", "w+b") as stacks:
        worker_main._restart_timer(stacks.fileno())
