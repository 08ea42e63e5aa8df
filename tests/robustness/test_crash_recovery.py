"""Whenever and however a worker dies, every batch arrives as if it had not.

What the kernel does to a worker when memory runs out is a SIGKILL from
outside, and has no cell of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import numpy as np
import psutil
import pytest
from crash_samples import (
    EXITS,
    SIGNALS,
    DiesAnswering,
    DiesBuilding,
    DiesChanged,
    DiesEncoding,
    DiesStarting,
    DiesStopping,
    DiesTaking,
    DiesUnpickled,
    DiesWhenTold,
    Drawn,
    FailsAtLength,
    Fate,
    Gated,
    KeepsItsArray,
    KeepsLate,
    Leaf,
    WaitsStopping,
    ending,
    kill,
)
from places import FULL, quickly

from keras_fastdata import LoaderError, WorkerDiedError
from keras_fastdata.workers.process import forkserver_connection, forkservers

pytestmark = [
    pytest.mark.filterwarnings("ignore:`start_method='fork'`"),
    pytest.mark.usefixtures("kept_forkserver"),
]

PROCESSES = {"workers": 2, "use_multiprocessing": True, "seed": 7}
ONE_PROCESS = {**PROCESSES, "workers": 1}
CAUSES = [*SIGNALS, *EXITS]
START_METHODS = ["forkserver", "spawn", "fork"]
INSIDE = {
    "unpickled": DiesUnpickled,
    "starting": DiesStarting,
    "building": DiesBuilding,
    "encoding": DiesEncoding,
    "taking": DiesTaking,
    "answering": DiesAnswering,
    "changed": DiesChanged,
}


def _cell(*values, quick):
    """A case of a test; those that are not quick are for the full run."""
    return pytest.param(
        *values, id="-".join(values), marks=() if quick else pytest.mark.long
    )


# The quick run has each cause at one moment, each moment with one cause, and
# each start method with one of both.
# A fork unpickles nothing, neither when it starts nor after a change.
CELLS_INSIDE = (
    [
        _cell(
            moment,
            how,
            start_method,
            quick=(moment, how) == ("building", "sigkill")
            or (start_method == "forkserver" and moment == "building")
            or (start_method == "forkserver" and how == "sigkill"),
        )
        for moment in INSIDE
        for how in CAUSES
        for start_method in START_METHODS
        if start_method != "fork" or moment not in ("unpickled", "changed")
    ]
    + [
        # The fork server is what "forkserver" has.
        _cell(
            moment,
            "forkserver",
            "forkserver",
            quick=moment in ("starting", "building"),
        )
        for moment in INSIDE
    ]
    + [
        # The fork server has imported a package for the workers.
        _cell(
            moment,
            how,
            "sharing",
            quick=(moment, how) == ("building", "sigkill"),
        )
        for moment in INSIDE
        for how in [*CAUSES, "forkserver"]
    ]
)
# sys.exit would end the thread that has waited for the word, not the process.
CELLS_OUTSIDE = [
    _cell(
        how,
        start_method,
        quick=start_method == "forkserver" and how in ("sigkill", "exit0"),
    )
    for how in CAUSES
    if how != "sysexit"
    for start_method in START_METHODS
]


@pytest.fixture(scope="module")
def undisturbed():
    """Two epochs in which nobody dies."""
    with Drawn(**PROCESSES) as dataset:
        return [list(dataset), list(dataset)]


# -- cause x moment x start method -------------------------------------------


@pytest.mark.parametrize(("moment", "how", "start_method"), CELLS_INSIDE)
def test_a_death_in_the_midst_of_work_changes_no_byte(
    moment, how, start_method, undisturbed, tmp_path
):
    fate = Fate(tmp_path, how)
    shares = start_method == "sharing"
    method = "forkserver" if shares else start_method
    dataset = INSIDE[moment](fate, start_method=method, **PROCESSES)
    if shares:
        dataset.of_a_package = psutil.Error
    with dataset:
        _assert_same(list(dataset), undisturbed[0])
        servers = forkservers._forkservers.items()
        keys = [key for key, server in servers if server.users]
        assert shares is any(key.imports is not None for key in keys)
        if moment == "changed":
            dataset.change()
        _assert_same(list(dataset), undisturbed[1])
    assert fate.deaths == 1


@pytest.mark.parametrize(("how", "start_method"), CELLS_OUTSIDE)
def test_the_death_of_an_idle_worker_changes_no_byte(
    how, start_method, undisturbed, tmp_path
):
    dataset = DiesWhenTold(
        Fate(tmp_path, how),
        max_queue_size=3,
        start_method=start_method,
        **PROCESSES,
    )
    with dataset:
        batches = iter(dataset)
        seen = [next(batches), next(batches)]
        _wait_until(lambda: dataset.answered() == 5)
        _end(dataset, dataset.builder_of(2))
        seen.extend(batches)
        _assert_same(seen, undisturbed[0])
        _assert_same(list(dataset), undisturbed[1])


@pytest.mark.parametrize(("how", "start_method"), CELLS_OUTSIDE)
def test_a_death_between_epochs_changes_no_byte(
    how, start_method, undisturbed, tmp_path
):
    dataset = DiesWhenTold(
        Fate(tmp_path, how), start_method=start_method, **PROCESSES
    )
    with dataset:
        _assert_same(list(dataset), undisturbed[0])
        _wait_until(lambda: dataset.answered() == len(dataset))
        _end(dataset, dataset.builder_of(0))
        _assert_same(list(dataset), undisturbed[1])


@pytest.mark.parametrize(("how", "start_method"), CELLS_OUTSIDE)
def test_a_batch_that_is_held_outlives_the_worker_that_built_it(
    how, start_method, undisturbed, tmp_path
):
    dataset = DiesWhenTold(
        Fate(tmp_path, how), start_method=start_method, **PROCESSES
    )
    with dataset:
        batches = iter(dataset)
        held = [next(batches) for _ in range(4)]
        _end(dataset, dataset.builder_of(3))
        _assert_same(held, undisturbed[0][:4])
        _assert_same([*held, *batches], undisturbed[0])
        _assert_same(list(dataset), undisturbed[1])
        _assert_same(held, undisturbed[0][:4])
    _assert_same(held, undisturbed[0][:4])


# -- how often ---------------------------------------------------------------


@pytest.mark.parametrize("moment", ["unpickled", "starting", "taking"])
def test_a_worker_may_die_as_often_as_is_allowed_before_it_builds(
    moment, undisturbed, tmp_path
):
    fate = Fate(tmp_path, "sigkill", times=3)
    dataset = INSIDE[moment](fate, max_worker_restarts=3, **ONE_PROCESS)
    with dataset:
        _assert_same(list(dataset), undisturbed[0])
    assert fate.deaths == 3


@pytest.mark.parametrize("moment", ["unpickled", "starting", "taking"])
def test_one_death_more_than_allowed_ends_the_epoch_before_it_builds(
    moment, undisturbed, tmp_path
):
    fate = Fate(tmp_path, "exit3", times=3)
    dataset = INSIDE[moment](fate, max_worker_restarts=2, **ONE_PROCESS)
    with dataset:
        with pytest.raises(WorkerDiedError, match="restarts=2") as caught:
            next(iter(dataset))
        assert caught.value.exit_code == 3
        assert fate.deaths == 3
        _assert_same(list(dataset), undisturbed[1])


@pytest.mark.parametrize("moment", ["building", "encoding"])
def test_without_restarts_a_death_names_the_batch_it_cost(
    moment, undisturbed, tmp_path
):
    dataset = INSIDE[moment](
        Fate(tmp_path, "sigabrt"), max_worker_restarts=0, **PROCESSES
    )
    with dataset:
        batches = iter(dataset)
        _assert_same([next(batches) for _ in range(3)], undisturbed[0][:3])
        with pytest.raises(WorkerDiedError, match="restarts=0") as caught:
            next(batches)
        assert (caught.value.epoch, caught.value.batch_index) == (0, 3)
        assert caught.value.exit_code == -signal.SIGABRT
        assert list(batches) == []
        _assert_same(list(dataset), undisturbed[1])


@pytest.mark.parametrize("moment", ["building", "encoding"])
def test_a_batch_that_kills_twice_is_named(moment, undisturbed, tmp_path):
    fate = Fate(tmp_path, "sigsegv", times=2)
    with INSIDE[moment](fate, **PROCESSES) as dataset:
        batches = iter(dataset)
        _assert_same([next(batches) for _ in range(3)], undisturbed[0][:3])
        with pytest.raises(WorkerDiedError, match="second time") as caught:
            next(batches)
        assert (caught.value.epoch, caught.value.batch_index) == (0, 3)
        assert caught.value.exit_code == -signal.SIGSEGV
        assert fate.deaths == 2
        _assert_same(list(dataset), undisturbed[1])


def test_restarts_are_counted_anew_in_every_epoch(undisturbed, tmp_path):
    fate = Fate(tmp_path, "sigkill")
    dataset = DiesBuilding(
        fate, each_epoch=True, max_worker_restarts=1, **PROCESSES
    )
    with dataset:
        _assert_same(list(dataset), undisturbed[0])
        assert fate.deaths == 1
        _assert_same(list(dataset), undisturbed[1])
        assert fate.deaths == 2


def test_deaths_over_several_batches_are_added_up(undisturbed, tmp_path):
    fate = Fate(tmp_path, "sigkill")
    dataset = DiesBuilding(
        fate, at=(3, 5), max_worker_restarts=1, **ONE_PROCESS
    )
    with dataset:
        batches = iter(dataset)
        _assert_same([next(batches) for _ in range(5)], undisturbed[0][:5])
        with pytest.raises(WorkerDiedError, match="restarts=1") as caught:
            next(batches)
        assert caught.value.batch_index == 5
        assert fate.deaths == 2


# -- several at once ---------------------------------------------------------


@pytest.mark.parametrize("start_method", quickly(START_METHODS, "forkserver"))
def test_both_workers_may_die_at_once(start_method, undisturbed, tmp_path):
    dataset = Gated(
        tmp_path, gated=(3, 4), start_method=start_method, **PROCESSES
    )
    with dataset:
        batches = iter(dataset)
        seen = [next(batches)]
        with _at_gates(dataset, 3, 4) as builders:
            kill(*builders)
        seen.extend(batches)
        _assert_same(seen, undisturbed[0])
        _assert_same(list(dataset), undisturbed[1])


@pytest.mark.parametrize("max_queue_size", [1, 64])
@pytest.mark.parametrize("moment", ["building", "taking", "answering"])
def test_a_death_costs_nothing_with_any_length_of_the_queue(
    moment, max_queue_size, undisturbed, tmp_path
):
    fate = Fate(tmp_path, "sigkill")
    dataset = INSIDE[moment](fate, max_queue_size=max_queue_size, **PROCESSES)
    with dataset:
        _assert_same(list(dataset), undisturbed[0])
        _assert_same(list(dataset), undisturbed[1])
    assert fate.deaths == 1


# -- the fork server ---------------------------------------------------------


def test_a_forkserver_that_dies_idle_is_started_again(undisturbed, tmp_path):
    fate = Fate(tmp_path, "sigkill")
    with DiesWhenTold(fate, **PROCESSES) as dataset:
        _assert_same(list(dataset), undisturbed[0])
        _wait_until(lambda: dataset.answered() == len(dataset))
        _kill_forkserver_of(dataset.builder_of(0))
        _assert_same(list(dataset), undisturbed[1])


def test_a_forkserver_that_dies_while_both_workers_build_is_started_again(
    undisturbed, tmp_path
):
    with Gated(tmp_path, gated=(3, 4), **PROCESSES) as dataset:
        batches = iter(dataset)
        seen = [next(batches)]
        with _at_gates(dataset, 3, 4) as builders:
            _kill_forkserver_of(builders[0])
        seen.extend(batches)
        _assert_same(seen, undisturbed[0])
        _assert_same(list(dataset), undisturbed[1])


def test_a_forkserver_that_dies_before_it_reads_a_request_is_started_again(
    undisturbed, tmp_path, monkeypatch
):
    killed = []

    def send_fds(sock, buffers, fds, *rest):
        if killed or list(buffers) != [forkserver_connection.forkserver.FORK]:
            return sent(sock, buffers, fds, *rest)
        (pid,) = forkservers.forkserver_pids()
        forkserver = psutil.Process(pid)
        forkserver.suspend()
        _wait_until(lambda: forkserver.status() == psutil.STATUS_STOPPED)
        count = sent(sock, buffers, fds, *rest)
        kill(forkserver.pid)
        killed.append(forkserver)
        return count

    forkservers.close_kept()
    sent = forkserver_connection.socket.send_fds
    monkeypatch.setattr(forkserver_connection.socket, "send_fds", send_fds)
    with Drawn(**PROCESSES) as dataset:
        _assert_same(list(dataset), undisturbed[0])
        _assert_same(list(dataset), undisturbed[1])
    assert killed


def test_an_error_says_by_which_signal_each_new_forkserver_ends(monkeypatch):
    def send_fds(sock, buffers, fds, *rest):
        if list(buffers) == [forkserver_connection.forkserver.FORK]:
            (pid,) = forkservers.forkserver_pids()
            server = psutil.Process(pid)
            server.terminate()
            _wait_until(lambda: server.status() == psutil.STATUS_ZOMBIE)
        return sent(sock, buffers, fds, *rest)

    forkservers.close_kept()
    sent = forkserver_connection.socket.send_fds
    monkeypatch.setattr(forkserver_connection.socket, "send_fds", send_fds)
    with (
        Drawn(**PROCESSES) as dataset,
        pytest.raises(LoaderError, match=r"was killed by SIGTERM\. Unless"),
    ):
        next(iter(dataset))


def test_the_death_of_a_forkserver_is_one_death(undisturbed, tmp_path):
    for number in range(5 if FULL else 2):
        directory = tmp_path / str(number)
        directory.mkdir()
        dataset = Gated(
            directory, gated=(3, 4), max_worker_restarts=1, **PROCESSES
        )
        with dataset:
            batches = iter(dataset)
            seen = [next(batches)]
            with _at_gates(dataset, 3, 4) as builders:
                _kill_forkserver_of(builders[0])
            seen.extend(batches)
            _assert_same(seen, undisturbed[0])


# -- the end -----------------------------------------------------------------


@pytest.mark.parametrize("how", quickly(CAUSES, "sigkill", "exit0", "sysexit"))
def test_a_worker_that_dies_in_close_does_not_disturb_it(
    how, undisturbed, tmp_path
):
    fate = Fate(tmp_path, how)
    with DiesStopping(fate, **PROCESSES) as dataset:
        batches = iter(dataset)
        seen = [next(batches)]
        dataset.close()
        assert fate.deaths
        seen.extend(batches)
        _assert_same(seen, undisturbed[0])


@pytest.mark.parametrize("start_method", quickly(START_METHODS, "forkserver"))
def test_workers_that_are_killed_during_close_do_not_disturb_it(
    start_method, undisturbed, tmp_path
):
    with WaitsStopping(
        tmp_path, start_method=start_method, **PROCESSES
    ) as dataset:
        _assert_same(list(dataset), undisturbed[0])

        def kill_both():
            stopping = []
            while len(stopping) < 2:
                stopping = list(tmp_path.glob("stopping-*"))
                time.sleep(0.001)
            for path in stopping:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(path.name.split("-")[1]), signal.SIGKILL)

        with _thread(kill_both):
            dataset.close()


def test_a_worker_that_dies_while_it_tells_of_a_failure_is_replaced(tmp_path):
    dataset = FailsAtLength(Fate(tmp_path, "sigkill"), **ONE_PROCESS)
    with dataset, pytest.raises(ValueError, match="long long"):
        next(iter(dataset))


# -- when no worker is left --------------------------------------------------


def test_a_change_after_the_last_death_is_no_deadlock(undisturbed, tmp_path):
    dataset = Gated(
        tmp_path,
        gated=(3, 4),
        max_queue_size=4,
        max_worker_restarts=0,
        **PROCESSES,
    )
    with dataset:
        batches = iter(dataset)
        seen = [next(batches)]
        with _at_gates(dataset, 3, 4) as builders:
            seen.append(next(batches))
            kill(*builders)
        seen.append(next(batches))
        _assert_same(seen, undisturbed[0][:3])
        dataset.mark_changed()
        with pytest.raises(WorkerDiedError, match="restarts=0"):
            next(batches)
        _assert_same(list(dataset), undisturbed[1])


def test_an_older_pass_ends_too_when_no_worker_is_left(undisturbed, tmp_path):
    dataset = Gated(
        tmp_path,
        gated=(3,),
        max_queue_size=1,
        max_worker_restarts=0,
        **ONE_PROCESS,
    )
    with dataset:
        older, younger = iter(dataset), iter(dataset)
        seen = [next(older)]
        _assert_same([next(younger) for _ in range(3)], undisturbed[1][:3])
        with _at_gates(dataset, 3) as builders:
            kill(*builders)
        with pytest.raises(WorkerDiedError, match="restarts=0"):
            next(younger)
        with pytest.raises(WorkerDiedError, match="restarts=0"):
            seen.extend(older)
        _assert_same(seen, undisturbed[0][: len(seen)])


def test_forks_that_are_left_survive_a_change(tmp_path):
    dataset = DiesWhenTold(
        Fate(tmp_path, "sigkill"),
        start_method="fork",
        max_queue_size=1,
        max_worker_restarts=0,
        **PROCESSES,
    )
    dataset.length = 400
    with dataset:
        batches = iter(dataset)
        seen = [next(batches)]
        pid = dataset.builder_of(0)
        _wait_until(lambda: dataset.answered() == 2)
        _end(dataset, pid)
        while psutil.pid_exists(pid):
            seen.append(next(batches))
        dataset.mark_changed()
        seen.extend(batches)
        assert [int(b["index"][1]) for b in seen] == list(range(400))


# -- memory ------------------------------------------------------------------


def test_what_a_dead_worker_kept_stays_with_those_who_hold_it(
    undisturbed, tmp_path
):
    fate = Fate(tmp_path, "sigkill")
    with KeepsItsArray(fate, at=(3, 5), **ONE_PROCESS) as dataset:
        held = list(dataset)
        _assert_same(held, undisturbed[0])
        _assert_same(list(dataset), undisturbed[1])
        _assert_same(held, undisturbed[0])
    assert fate.deaths == 2


def test_what_a_late_worker_keeps_is_not_given_to_another(tmp_path):
    dataset = KeepsLate(tmp_path, max_queue_size=4, **PROCESSES)
    gate = []

    def kill_the_other():
        gate.append(open(tmp_path / "gate", "wb"))  # noqa: SIM115
        file = tmp_path / "pid-1"
        _wait_until(lambda: file.exists() and file.read_text())
        kill(int(file.read_text()))

    with dataset:
        batches = iter(dataset)
        with _thread(kill_the_other):
            early = [next(batches) for _ in range(4)]
        # The late one has a ticket of these, and another builds its batch.
        early += [next(batches) for _ in range(4)]
        assert [int(x[0, 0]) for x in early] == list(range(8))
        del early
        gate[0].close()
        held = list(batches)
        assert [np.unique(x).tolist() for x in held] == [
            [index] for index in range(8, 24)
        ]


# -- helpers -----------------------------------------------------------------


def _assert_same(one, other):
    """Fails unless two nested batches have the same bytes."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            _assert_same(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            _assert_same(left, right)
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()
    elif isinstance(one, Leaf):
        assert vars(one) == vars(other)
    else:
        assert one == other


def _wait_until(condition):
    while not condition():
        time.sleep(0.001)


def _end(dataset, pid):
    """Ends a worker in the way that is its fate; returns when it has ended."""
    how = dataset.fate.how
    with ending(pid):
        if how in SIGNALS:
            os.kill(pid, SIGNALS[how])
        else:
            dataset.tell(pid)


def _kill_forkserver_of(pid):
    """Kills the process that has forked a worker, and so the worker."""
    kill(psutil.Process(pid).ppid(), also=[pid])


@contextlib.contextmanager
def _at_gates(dataset, *indices):
    """Holds the workers that build these batches while the block runs.

    The gates are taken down, for whoever builds the batches next.
    """
    with contextlib.ExitStack() as gates:
        for index in indices:
            gates.enter_context(open(dataset.gate(index), "wb"))
        for index in indices:
            dataset.gate(index).unlink()
        yield [dataset.builder_of(index) for index in indices]


@contextlib.contextmanager
def _thread(run):
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
