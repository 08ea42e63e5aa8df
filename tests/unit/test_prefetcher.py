"""The prefetcher by itself: what is out, what is ready, and in which order."""

from __future__ import annotations

import dataclasses

import pytest
from fake_pool import FakePool
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from samples import Numbered

from keras_fastdata.engine.autotune import SettingsInEffect
from keras_fastdata.engine.epoch import Epoch, Finish
from keras_fastdata.engine.open_epochs import OpenEpochs
from keras_fastdata.engine.prefetcher import Prefetcher
from keras_fastdata.engine.schedule import plan_epoch
from keras_fastdata.engine.settings import Settings
from keras_fastdata.engine.sharding import Shard
from keras_fastdata.workers.base import SLOW_START


class _Iterator:
    """Holds an epoch open."""


class _Case:
    def __init__(self, capacity=100, **settings):
        self.pool = FakePool(capacity)
        self.epochs = OpenEpochs()
        self.dataset = Numbered(workers=0)
        in_effect = SettingsInEffect(Settings(**settings), self.dataset)
        self.prefetcher = Prefetcher(in_effect, self.epochs)
        self.iterators = []

    def epoch(self, number, length):
        epoch = Epoch(shuffle=False)
        schedule = plan_epoch(
            length, shuffle=False, seed=1, epoch=number, shard=Shard()
        )
        epoch.plan(number, schedule)
        epoch.activate()
        self.iterators.append(_Iterator())
        self.epochs.register(self.iterators[-1], epoch)
        return epoch

    def fill(self, epoch, cache=None):
        return self.prefetcher.fill(self.pool, epoch, cache)

    def indices_out(self):
        return sorted(request.index for request in self.pool.out.values())

    def build(self, index):
        for request_id, request in self.pool.out.items():
            if request.index == index:
                self.pool.build(request_id)
                return

    def drain(self):
        self.prefetcher.drain_results(self.pool)


def test_requests_go_as_far_ahead_as_the_settings_allow():
    case = _Case(workers=2, max_queue_size=5)
    epoch = case.epoch(0, 100)
    assert not case.fill(epoch)
    assert case.indices_out() == list(range(len(case.pool.out)))
    assert len(case.pool.out) == epoch.ahead
    before = epoch.ahead
    case.fill(epoch)
    assert epoch.ahead == before


@dataclasses.dataclass
class _EmptyCache:
    keeps_all: bool

    def holds(self, index):
        return False


@pytest.mark.parametrize("keeps_all", [True, False])
def test_epochs_share_requests_only_while_the_cache_keeps_the_batches(
    keeps_all,
):
    case = _Case(workers=2, max_queue_size=5, cache="memory")
    first, second = case.epoch(0, 2), case.epoch(1, 2)
    for epoch in (first, second, first, second):
        case.fill(epoch, _EmptyCache(keeps_all))
    assert case.indices_out() == ([0, 1] if keeps_all else [0, 0, 1, 1])
    if not keeps_all:
        for epoch in (first, second):
            for request_id in epoch.waiting.values():
                assert case.pool.out[request_id].epoch == epoch.number


def test_slow_builds_that_nobody_waits_for_are_withdrawn_and_come_again():
    case = _Case(workers=2, max_queue_size=5)
    left, awaited = case.epoch(0, 3), case.epoch(1, 3)
    for each in (left, awaited):
        case.fill(each)
    case.pool.slow_requests = {left.waiting[1], awaited.waiting[1]}
    case.prefetcher.withdraw_slow(case.pool, [awaited, None])
    assert sorted(left.waiting) == [0, 2]
    assert sorted(awaited.waiting) == [0, 1, 2]
    case.fill(left)
    assert sorted(left.waiting) == [0, 1, 2]


def test_a_slow_start_withdraws_all_that_nobody_waits_for():
    case = _Case(workers=2, max_queue_size=5)
    left, awaited = case.epoch(0, 3), case.epoch(1, 3)
    for each in (left, awaited):
        case.fill(each)
    case.pool.slow_requests = {SLOW_START}
    case.prefetcher.withdraw_slow(case.pool, [awaited])
    assert not left.waiting
    assert sorted(awaited.waiting) == [0, 1, 2]


def test_a_slow_build_that_was_taken_over_is_withdrawn_and_comes_again():
    case = _Case(workers=2, max_queue_size=5, cache="memory")
    first, second = case.epoch(0, 1), case.epoch(1, 1)
    for epoch in (first, second):
        case.fill(epoch, _EmptyCache(keeps_all=True))
    (taken_over,) = case.pool.slow_requests = set(case.pool.out)
    case.prefetcher.withdraw_slow(case.pool, [second])
    assert not case.pool.out
    case.fill(second, _EmptyCache(keeps_all=True))
    assert list(second.waiting.values()) != [taken_over]
    case.build(0)
    case.drain()
    assert set(second.ready) == {0}


def test_the_end_of_the_schedule_is_told():
    case = _Case(workers=2, max_queue_size=5)
    epoch = case.epoch(0, 2)
    assert case.fill(epoch)
    assert case.indices_out() == [0, 1]


def test_a_result_lies_ready_at_its_position_whatever_order_they_come_in():
    case = _Case(workers=2, max_queue_size=5)
    epoch = case.epoch(0, 3)
    case.fill(epoch)
    case.build(2)
    case.build(0)
    case.drain()
    assert {p: c.done.batch for p, c in epoch.ready.items()} == {0: 0, 2: 2}
    assert set(epoch.waiting) == {1}


def test_what_is_forgotten_is_cancelled_discarded_and_asked_for_again():
    case = _Case(workers=2, max_queue_size=5)
    epoch = case.epoch(0, 3)
    case.fill(epoch)
    case.build(0)
    case.drain()
    case.prefetcher.forget(case.pool, epoch)
    assert not case.pool.out
    assert case.pool.results[0].is_discarded
    assert epoch.ahead == 0
    case.fill(epoch)
    assert case.indices_out() == [0, 1, 2]


def test_the_epoch_of_an_interrupted_peek_is_a_dropped_one():
    case = _Case()
    ahead = case.epoch(0, 3).peeking()

    def peek():
        with case.epochs.peeking(ahead):
            assert ahead in case.epochs
            assert not case.epochs.has_dropped
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        peek()
    assert [*case.epochs.take_dropped()] == [ahead]
    assert ahead not in case.epochs


def test_the_batch_that_is_waited_for_takes_the_room_of_a_ready_one():
    case = _Case(capacity=2, workers=2, max_queue_size=5)
    far, wanted = case.epoch(0, 2), case.epoch(1, 3)
    case.fill(far)
    case.build(0)
    case.build(1)
    case.drain()
    full = case.pool.capacity
    case.pool.capacity = 0  # no room, until a ready batch is given up
    ready = far.ready[1].done

    def discard():
        case.pool.capacity = full
        ready.is_discarded = True

    ready.discard = discard
    case.prefetcher.require(case.pool, wanted, 0, 0)
    assert ready.is_discarded
    assert set(far.ready) == {0}
    assert far.issued == 1  # position 1 is asked for again
    assert 0 in wanted.waiting


def test_where_nothing_can_be_given_up_the_request_is_made_later():
    case = _Case(capacity=0, workers=2, max_queue_size=5)
    epoch = case.epoch(0, 2)
    case.prefetcher.require(case.pool, epoch, 0, 0)
    assert not epoch.waiting
    case.pool.capacity = 1
    case.prefetcher.require(case.pool, epoch, 0, 0)
    assert set(epoch.waiting) == {0}


@pytest.mark.parametrize("cleared", [False, True])
def test_epochs_whose_iterators_are_gone_are_handed_out_once(cleared):
    case = _Case(workers=2, max_queue_size=5)
    epoch = case.epoch(0, 3)
    case.fill(epoch)
    if cleared:
        case.prefetcher.clear()
        assert not epoch.waiting
    assert [*case.epochs] == [epoch]
    case.iterators.clear()
    assert [*case.epochs.take_dropped()] == [epoch]
    assert [*case.epochs.take_dropped()] == []
    assert [*case.epochs] == []


class Machine(RuleBasedStateMachine):
    """Two epochs are filled, built, consumed and forgotten in any order."""

    @initialize(
        capacity=st.integers(1, 6),
        queue=st.integers(1, 6),
        workers=st.integers(1, 3),
    )
    def begin(self, capacity, queue, workers):
        self.case = _Case(capacity, workers=workers, max_queue_size=queue)
        self.open = [self.case.epoch(n, 7) for n in range(2)]
        self.delivered = {id(epoch): [] for epoch in self.open}

    @rule(n=st.integers(0, 1))
    def fill(self, n):
        if not self.open[n].is_finished:
            self.case.fill(self.open[n])

    @precondition(lambda self: self.case.pool.out)
    @rule(data=st.data())
    def build(self, data):
        out = self.case.pool.out
        self.case.pool.build(data.draw(st.sampled_from(sorted(out))))

    @rule()
    def drain(self):
        self.case.drain()

    @rule(n=st.integers(0, 1))
    def consume(self, n):
        epoch = self.open[n]
        if epoch.is_finished:
            return
        index = epoch.schedule.index_at(epoch.position)
        if index is None:
            self.case.prefetcher.forget(self.case.pool, epoch)
            epoch.finish(Finish.EXHAUSTED)
            return
        self.case.prefetcher.require(
            self.case.pool, epoch, epoch.position, index
        )
        if epoch.position in epoch.ready:
            batch = epoch.ready.pop(epoch.position).done.open()
            self.delivered[id(epoch)].append(batch)
            epoch.note_delivery(index, batch)

    @rule(n=st.integers(0, 1))
    def forget(self, n):
        self.case.prefetcher.forget(self.case.pool, self.open[n])

    @invariant()
    def batches_come_once_and_in_order(self):
        for epoch in getattr(self, "open", []):
            batches = self.delivered[id(epoch)]
            assert batches == list(range(len(batches)))

    @invariant()
    def each_request_belongs_to_one_place(self):
        if not hasattr(self, "open"):
            return
        waiting = [i for e in self.open for i in e.waiting.values()]
        assert len(set(waiting)) == len(waiting)
        assert set(self.case.pool.out) <= set(waiting)

    def teardown(self):
        """Whatever has happened, all batches can be had."""
        for n, epoch in enumerate(getattr(self, "open", [])):
            while not epoch.is_finished:
                self.consume(n)
                while self.case.pool.out:
                    self.case.pool.build(min(self.case.pool.out))
                self.case.drain()
            assert self.delivered[id(epoch)] == list(range(7))


Machine.TestCase.settings = hypothesis_settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestPrefetcher = Machine.TestCase
