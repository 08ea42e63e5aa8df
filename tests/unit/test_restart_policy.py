"""The book of deaths: who is replaced, and what becomes of a batch."""

from __future__ import annotations

from keras_fastdata import WorkerDiedError
from keras_fastdata.workers.base import BatchRequest
from keras_fastdata.workers.exit_messages import WorkerExit
from keras_fastdata.workers.in_flight import Task
from keras_fastdata.workers.restart_policy import RestartPolicy


def _held(**request):
    return Task(BatchRequest(1, 0, 3, **request), slot=0)


def _death(worker=0):
    return WorkerExit(
        dataset="Images",
        worker=worker,
        pid=77,
        exit_code=-9,
        expired=None,
        starting=False,
    )


def test_workers_are_replaced_as_often_as_allowed_in_an_epoch():
    policy = RestartPolicy(count=2, max_restarts=1)
    policy.record(0, 77)
    assert policy.replaces(0)
    policy.record(0, 78)
    assert not policy.replaces(0)
    assert policy.replaces(1)
    assert not policy.is_over
    policy.record(1, 79)
    assert policy.is_over
    policy.renew_restarts()
    assert not policy.is_over
    assert policy.replaces(0)
    assert [(loss.worker, loss.pid) for loss in policy.losses] == [
        (0, 77),
        (0, 78),
        (1, 79),
    ]


def test_deaths_that_are_one_with_another_count_once():
    policy = RestartPolicy(count=3, max_restarts=1)
    policy.record(0, 77)
    policy.record(1, 78, counts=False)
    policy.record(2, 79, counts=False)
    assert all(map(policy.replaces, range(3)))
    assert len(policy.losses) == 3


def test_a_batch_is_built_again_once(caplog):
    policy, held = RestartPolicy(count=2, max_restarts=9), _held()
    for _ in range(2):
        held.note_crash()
        policy.record(0, 77)
        error = policy.judge(_death(), held)
    assert len(caplog.messages) == 1
    assert "(restart 1 of at most 9 in this epoch)" in caplog.text
    assert isinstance(error, WorkerDiedError)
    assert (error.epoch, error.batch_index) == (0, 3)
    assert "while building batch 3 of epoch 0, for the second time" in str(
        error
    )


def test_a_timed_request_is_told_of_once_a_worker_died_over_it():
    timed = _held(interval_s=0.02)
    untimed = _held()
    for held in (timed, untimed):
        held.note_crash()
    assert timed.request.interval_s == 0
    assert untimed.request.interval_s is None


def test_without_restarts_a_death_ends_the_batch_it_struck(caplog):
    policy = RestartPolicy(count=1, max_restarts=0)
    policy.record(0, 77)
    error = policy.judge(_death(), _held())
    assert not caplog.messages
    assert "`max_worker_restarts=0` is used up." in str(error)


def test_without_restarts_the_death_of_an_idle_worker_is_logged(caplog):
    policy = RestartPolicy(count=1, max_restarts=0)
    policy.record(0, 77)
    assert policy.judge(_death(), None) is None
    assert "not replaced: `max_worker_restarts=0` is used up." in caplog.text


def test_what_nobody_is_left_to_build_ends_in_the_last_death():
    policy = RestartPolicy(count=1, max_restarts=0)
    policy.record(0, 77)
    policy.judge(_death(), _held())
    error = policy.end().error()
    assert isinstance(error, WorkerDiedError)
    assert (error.worker, error.pid, error.batch_index) == (0, 77, None)
    assert "`max_worker_restarts=0` is used up." in str(error)
