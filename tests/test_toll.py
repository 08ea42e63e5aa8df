"""The book of deaths: who is replaced, and what becomes of a batch."""

from __future__ import annotations

import dataclasses

import pytest

from keras_fastdata import WorkerDiedError
from keras_fastdata.workers.base import Ticket
from keras_fastdata.workers.deaths import Death
from keras_fastdata.workers.toll import Toll, strike


@dataclasses.dataclass
class _Held:
    ticket: Ticket = dataclasses.field(default_factory=lambda: Ticket(1, 0, 3))
    strikes: int = 0


def _death(worker=0):
    return Death(
        dataset="Images",
        worker=worker,
        pid=77,
        exit_code=-9,
        overdue=None,
        starting=False,
    )


def test_workers_are_replaced_as_often_as_allowed_in_an_epoch():
    toll = Toll(count=2, max_restarts=1)
    toll.record(0, 77)
    assert toll.replaces(0)
    toll.record(0, 78)
    assert not toll.replaces(0)
    assert toll.replaces(1)
    assert not toll.is_over
    toll.record(1, 79)
    assert toll.is_over
    toll.begin_epoch()
    assert not toll.is_over
    assert toll.replaces(0)
    assert [(loss.worker, loss.pid) for loss in toll.losses] == [
        (0, 77),
        (0, 78),
        (1, 79),
    ]


def test_deaths_that_are_one_with_another_count_once():
    toll = Toll(count=3, max_restarts=1)
    toll.record(0, 77)
    toll.record(1, 78, counts=False)
    toll.record(2, 79, counts=False)
    assert all(map(toll.replaces, range(3)))
    assert len(toll.losses) == 3


def test_a_batch_is_built_again_once(caplog):
    toll, held = Toll(count=2, max_restarts=9), _Held()
    for _ in range(2):
        strike(held)
        toll.record(0, 77)
        error = toll.judge(_death(), held)
    assert len(caplog.messages) == 1
    assert "(restart 1 of at most 9 in this epoch)" in caplog.text
    assert isinstance(error, WorkerDiedError)
    assert (error.epoch, error.batch_index) == (0, 3)
    assert "while building batch 3 of epoch 0, for the second time" in str(
        error
    )


def test_a_timed_ticket_is_told_of_once_a_worker_died_over_it():
    timed = _Held(Ticket(1, 0, 3, interval_s=0.02))
    untimed = _Held()
    for held in (timed, untimed):
        strike(held)
    assert timed.ticket.interval_s == 0
    assert untimed.ticket.interval_s is None


@pytest.mark.parametrize("held", [None, _Held()], ids=["idle", "at a batch"])
def test_without_restarts_a_death_ends_the_batch_it_struck(held, caplog):
    toll = Toll(count=1, max_restarts=0)
    toll.record(0, 77)
    error = toll.judge(_death(), held)
    assert not caplog.messages
    if held is None:
        assert error is None
    else:
        assert "`max_worker_restarts=0` is used up." in str(error)


def test_what_nobody_is_left_to_build_ends_in_the_last_death():
    toll = Toll(count=1, max_restarts=0)
    toll.record(0, 77)
    toll.judge(_death(), _Held())
    error = toll.end().error()
    assert isinstance(error, WorkerDiedError)
    assert (error.worker, error.pid, error.batch_index) == (0, 77, None)
    assert "`max_worker_restarts=0` is used up." in str(error)
