"""The handle of a pool by itself: its states, and who ends the workers."""

from __future__ import annotations

import itertools
import os
import threading
import weakref

import pytest
from fake_pool import FakePool
from samples import Numbered

from keras_fastdata.engine.pool_handle import (
    ForkSafeLock,
    PoolHandle,
    PoolState,
)
from keras_fastdata.errors import LoaderError


class _Prefetched:
    """Counts how often everything that was asked is forgotten."""

    def __init__(self):
        self.cleared = 0

    def clear(self):
        self.cleared += 1

    def results(self):
        return []


class _Case:
    def __init__(self):
        self.dataset = Numbered(length=3, workers=0)
        self.prefetched = _Prefetched()
        self.pool = PoolHandle(
            weakref.ref(self.dataset), "Numbered", self.prefetched
        )
        self.made = []

    def create(self):
        self.made.append(FakePool())
        return self.made[-1]

    def use(self):
        return self.pool.ensure(self.dataset, self.create)


@pytest.fixture
def case():
    case = _Case()
    yield case
    case.pool.close()


def test_workers_are_made_by_the_first_call_that_needs_them(case):
    assert case.pool.state is PoolState.ABSENT
    case.pool.run(lambda: None)
    assert case.pool.state is PoolState.ABSENT
    seen = case.pool.run(lambda: (case.use(), case.pool.state))
    assert seen == (case.made[0], PoolState.IN_CALL)
    assert case.pool.state is PoolState.READY
    assert case.pool.run(case.use) is case.made[0]
    assert len(case.made) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_workers_of_a_call_that_was_interrupted_are_replaced(case, error):
    def interrupted():
        case.use()
        raise error("on purpose")

    with pytest.raises(error, match="on purpose"):
        case.pool.run(interrupted)
    assert case.pool.state is PoolState.IN_CALL
    assert case.pool.run(case.use) is case.made[1]
    assert case.made[0].is_closed
    assert case.prefetched.cleared == 1


def test_workers_that_a_call_confirms_outlive_its_error(case):
    def fails():
        case.use()
        case.pool.confirm()
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        case.pool.run(fails)
    assert case.pool.state is PoolState.READY
    assert case.pool.run(case.use) is case.made[0]


def test_workers_that_a_call_invalidates_end_with_it(case):
    def invalidates():
        workers = case.use()
        case.pool.invalidate()
        assert not workers.is_closed

    case.pool.run(invalidates)
    assert case.made[0].is_closed
    assert case.pool.state is PoolState.ABSENT
    assert case.pool.workers is None


def test_a_call_that_replaces_the_workers_begins_anew_when_they_have_ended(
    case,
):
    def replaces():
        workers = case.use()
        if workers is case.made[0]:
            case.pool.replace()
        assert case.made[0].is_closed
        assert case.pool.state is PoolState.IN_CALL
        return workers

    assert case.pool.run(replaces) is case.made[1]
    assert case.pool.state is PoolState.READY
    assert case.made[0].is_closed
    assert not case.made[1].is_closed


def test_a_call_within_a_call_of_the_same_thread_is_refused(case):
    def nested():
        with pytest.raises(LoaderError, match="about to hand one out"):
            case.pool.run(case.use)
        return case.pool.run(lambda: "settings", nests=True)

    assert case.pool.run(nested) == "settings"


def test_closing_amid_a_call_is_left_to_the_end_of_the_call(case):
    def closes():
        workers = case.use()
        case.pool.close()
        assert not workers.is_closed
        assert case.pool.state is PoolState.INVALID

    case.pool.run(closes)
    assert case.made[0].is_closed


def test_closing_twice_ends_the_workers_once_and_a_later_call_makes_others(
    case,
):
    case.pool.run(case.use)
    case.pool.close()
    case.pool.close()
    assert case.made[0].is_closed
    assert case.pool.run(case.use) is case.made[1]


def test_nobody_holds_the_lock_while_workers_end(case):
    entered, leave = threading.Event(), threading.Event()

    class Slow(FakePool):
        def close(self):
            entered.set()
            assert leave.wait(60)

    case.pool.run(lambda: case.pool.ensure(case.dataset, Slow))
    closing = threading.Thread(target=case.pool.close)
    closing.start()
    assert entered.wait(60)
    assert case.pool.lock.acquire(timeout=60)
    case.pool.lock.release()
    leave.set()
    closing.join(60)
    assert not closing.is_alive()


def test_a_forked_child_leaves_the_workers_to_its_parent(case):
    case.pool.run(case.use)
    with case.pool.lock:  # as another thread would hold it
        pid = os.fork()
        if not pid:
            good = False
            try:
                good = case.pool.run(case.use) is case.made[1]
                good = good and not case.made[0].is_closed
            finally:
                os._exit(0 if good else 1)
    _, status = os.waitpid(pid, 0)
    assert status == 0
    assert case.pool.run(case.use) is case.made[0]


def test_two_threads_of_a_forked_child_have_one_lock():
    lock = ForkSafeLock()
    pid = os.fork()
    if not pid:
        make, calls, found = threading.RLock, itertools.count(), []
        second, done = threading.Event(), threading.Event()

        def make_in_turn():
            # The first is done while the second makes another.
            if next(calls):
                second.set()
                done.wait(60)
            else:
                second.wait(60)
            return make()

        def ask():
            found.append(lock.own())
            done.set()

        status = 1
        try:
            threading.RLock = make_in_turn
            threads = [threading.Thread(target=ask) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            status = int(found[0] is not found[1])
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_the_workers_of_a_dataset_that_is_collected_end(case):
    case.pool.run(case.use)
    dataset = weakref.ref(case.dataset)
    del case.dataset
    assert dataset() is None
    assert case.made[0].is_closed
