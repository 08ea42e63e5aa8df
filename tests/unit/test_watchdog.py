"""The watchdog by itself: how long work may take, and what is said of it."""

from __future__ import annotations

import pytest

from keras_fastdata.workers.base import SLOW_START, BatchRequest
from keras_fastdata.workers.watchdog import Activity, Watchdog


def _activity(elapsed_s, **facts):
    request = None if facts.get("starting") else BatchRequest(1, 0, 5)
    return Activity(0, "Batch 5", request, elapsed_s, str, **facts)


def _expires(guard, activity):
    return [expired.activity for expired in guard.look([activity])] == [
        activity
    ]


def test_without_a_timeout_what_somebody_waits_for_may_take_for_ever():
    guard = Watchdog(None, "")
    for starting in (False, True):
        assert not _expires(guard, _activity(1e6, starting=starting))


@pytest.mark.parametrize(
    ("slowest_s", "limit_s"), [(0.0, 60.0), (0.01, 30.0), (4.0, 40.0)]
)
def test_what_nobody_waits_for_may_take_far_longer_than_any_batch_before(
    slowest_s, limit_s
):
    guard = Watchdog(None, "")
    guard.learn(slowest_s)
    assert not _expires(guard, _activity(limit_s - 1, is_wanted=False))
    assert _expires(guard, _activity(limit_s + 1, is_wanted=False))


def test_a_start_that_nobody_waits_for_may_take_a_minute():
    guard = Watchdog(None, "")
    guard.learn(100.0)
    facts = {"starting": True, "is_wanted": False}
    assert not _expires(guard, _activity(59.0, **facts))
    assert _expires(guard, _activity(61.0, **facts))


@pytest.mark.parametrize(
    ("starting", "slow"), [(False, {1}), (True, {SLOW_START})]
)
def test_slow_work_that_somebody_waits_for_is_named_until_it_moves_on(
    starting, slow
):
    guard = Watchdog(None, "")
    guard.look([_activity(61.0, starting=starting)])
    assert guard.slow == slow
    guard.look([_activity(59.0, starting=starting)])
    assert guard.slow == set()


@pytest.mark.parametrize("is_wanted", [False, True])
def test_with_a_timeout_the_timeout_is_the_limit_of_every_batch(is_wanted):
    guard = Watchdog(20.0, "")
    guard.learn(0.01)
    assert not _expires(guard, _activity(19.0, is_wanted=is_wanted))
    assert _expires(guard, _activity(21.0, is_wanted=is_wanted))


def test_the_text_says_that_nobody_waits_any_more():
    (expired,) = Watchdog(None, "").look([_activity(63.0, is_wanted=False)])
    assert (
        expired.text
        == "Batch 5 has taken 63 s, and nobody waits for it any more."
    )
