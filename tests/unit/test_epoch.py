"""An epoch by itself: its states, and what each change does to its fields."""

from __future__ import annotations

import threading

import pytest

from keras_fastdata.engine.epoch import Epoch, EpochState, Finish
from keras_fastdata.engine.schedule import plan_epoch
from keras_fastdata.engine.sharding import Shard


def planned(num_batches=4, shuffle=False):
    epoch = Epoch(shuffle)
    schedule = plan_epoch(
        num_batches, shuffle=shuffle, seed=1, epoch=0, shard=Shard()
    )
    epoch.plan(0, schedule)
    return epoch


def deliver(epoch, count):
    for _ in range(count):
        index = epoch.schedule.index_at(epoch.position)
        epoch.note_delivery(index, f"batch {index}")


def interrupt(*_):
    raise KeyboardInterrupt


def test_an_epoch_is_planned_then_active_then_finished():
    epoch = planned()
    assert epoch.state is EpochState.PLANNED
    assert not epoch.has_begun
    epoch.activate()
    assert epoch.has_begun
    assert not epoch.is_finished
    epoch.finish(Finish.EXHAUSTED)
    assert epoch.is_finished
    assert epoch.has_begun
    assert epoch.finished_by is Finish.EXHAUSTED


def test_an_epoch_that_is_finished_keeps_its_reason():
    epoch = planned()
    epoch.activate()
    epoch.finish(Finish.END_OF_DATA)
    epoch.finish(Finish.EXHAUSTED)
    epoch.finish(Finish.ABANDONED)
    assert epoch.finished_by is Finish.END_OF_DATA


@pytest.mark.parametrize("finishes", [False, True])
def test_a_rewound_epoch_delivers_what_was_remembered_again(finishes):
    epoch = planned(2)
    epoch.activate()
    epoch.remember_first(2)
    deliver(epoch, 1)
    remembered = dict(epoch.remembered)
    if finishes:
        epoch.finish(Finish.END_OF_DATA)
    epoch.rewind()
    assert epoch.state is EpochState.ACTIVE
    assert epoch.finished_by is None
    assert (epoch.position, epoch.delivered) == (0, 0)
    assert epoch.peeked == ({} if finishes else remembered)
    assert not epoch.remembers


def test_only_the_first_two_batches_are_remembered_until_the_third():
    epoch = planned()
    epoch.activate()
    epoch.remember_first(2)
    deliver(epoch, 2)
    assert epoch.remembered == {0: "batch 0", 1: "batch 1"}
    deliver(epoch, 1)
    assert epoch.remembered == {}
    assert not epoch.remembers


def test_an_epoch_begins_where_an_earlier_run_has_left_it():
    epoch = planned()
    epoch.start_at(3)
    epoch.activate()
    deliver(epoch, 1)
    assert epoch.latest == 3
    assert epoch.position_before(1) == 3


@pytest.mark.parametrize("finishes", [False, True])
def test_an_unplanned_epoch_has_no_number_and_begins_at_the_first_batch(
    finishes,
):
    epoch = planned()
    epoch.start_at(4)
    epoch.activate()
    epoch.skipped[1] = "Traceback"
    if finishes:
        epoch.finish(Finish.EXHAUSTED)
    epoch.unplan()
    assert epoch.state is EpochState.PLANNED
    assert (epoch.start, epoch.position, epoch.issued) == (0, 0, 0)
    assert epoch.number is None
    assert epoch.schedule is None
    assert epoch.skipped == {}


def test_rewinding_does_not_begin_an_epoch():
    epoch = planned()
    epoch.rewind()
    assert epoch.state is EpochState.PLANNED


def test_positions_that_were_given_up_are_asked_for_again():
    epoch = planned()
    for _ in range(3):
        epoch.note_issued()
    epoch.issue_again_from(1)
    assert epoch.issued == 1
    epoch.issue_again_from(2)
    assert epoch.issued == 1
    epoch.pass_position()
    epoch.pass_position()
    epoch.note_built_here()
    assert epoch.issued == 3


def test_the_next_epoch_counts_among_what_is_ahead_until_it_is_released():
    epoch = planned()
    following = epoch.prepare_next()
    assert epoch.prepare_next() is following
    following.waiting[0] = 7
    assert epoch.ahead == 1
    epoch.release_next()
    assert epoch.ahead == 0


def test_an_epoch_that_may_not_prefetch_hands_that_on():
    epoch = planned()
    epoch.forbid_prefetching()
    assert not epoch.prepare_next().may_prefetch_next


def test_an_epoch_for_peeking_shares_what_was_skipped():
    epoch = planned()
    ahead = epoch.peeking()
    ahead.skipped[2] = "Traceback"
    assert epoch.skipped == {2: "Traceback"}


def test_a_batch_that_nobody_has_got_is_delivered_again():
    epoch = planned(4)
    deliver(epoch, 2)
    acknowledgements = epoch.acknowledgements
    acknowledgements.requeue(acknowledgements.latest)
    assert epoch.position_before(0) == 1
    assert epoch.redeliver() == "batch 1"
    assert not acknowledgements.has_requeued
    assert (epoch.position, epoch.delivered) == (2, 2)
    assert epoch.position_before(0) == 2


def test_a_batch_is_delivered_once_if_its_count_was_interrupted(monkeypatch):
    epoch = planned(4)
    with monkeypatch.context() as patch:
        patch.setattr(Epoch, "pass_position", interrupt)
        with pytest.raises(KeyboardInterrupt):
            deliver(epoch, 1)
    acknowledgements = epoch.acknowledgements
    acknowledgements.requeue(acknowledgements.latest)
    assert epoch.position_before(0) == 0
    assert epoch.redeliver() == "batch 0"
    assert (epoch.position, epoch.delivered) == (1, 1)


def test_a_batch_that_is_requeued_twice_is_delivered_once():
    epoch = planned(4)
    deliver(epoch, 1)
    acknowledgements = epoch.acknowledgements
    delivery = acknowledgements.latest
    acknowledgements.requeue(delivery)
    acknowledgements.requeue(delivery)
    assert epoch.redeliver() == "batch 0"
    assert not acknowledgements.has_requeued


def test_a_thread_does_not_acknowledge_the_batch_of_another_one():
    epoch = planned(4)
    deliver(epoch, 1)
    thread = threading.Thread(target=epoch.acknowledgements.acknowledge)
    thread.start()
    thread.join(60)
    assert epoch.acknowledgements.latest is not None


def test_an_epoch_that_starts_again_drops_requeued_batches():
    epoch = planned(4)
    deliver(epoch, 1)
    acknowledgements = epoch.acknowledgements
    acknowledgements.requeue(acknowledgements.latest)
    epoch.rewind()
    assert not acknowledgements.has_requeued
