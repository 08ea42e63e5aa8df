"""When a batch was built, and what that time went into."""

from __future__ import annotations

import math
import os
import threading
import time
import types

import pytest
from samples import Deadly, Numbered
from situations import Burning, Sleeping

from keras_fastdata.metrics import stack_sampler
from keras_fastdata.metrics.timing import RunDelay, Stopwatch
from keras_fastdata.workers.process.pool import ProcessPool

pytestmark = pytest.mark.usefixtures("kept_forkserver")

PLACES = {
    "inline": {"workers": 0},
    "thread": {"workers": 1},
    "process": {"workers": 1, "use_multiprocessing": True},
}
everywhere = pytest.mark.parametrize("place", PLACES)


def _spans(dataset):
    with dataset:
        batches = iter(dataset)
        batches.time_batches(0.0)
        return [batches.span for _ in batches]


@everywhere
def test_moments_come_in_their_order(place):
    began_s = time.monotonic()
    spans = _spans(Numbered(length=20, **PLACES[place]))
    assert [span.batch for span in spans] == list(range(20))
    for span in spans:
        moments = [
            began_s,
            span.queued_s,
            span.began_s,
            span.built_s,
            span.stored_s,
            time.monotonic(),
        ]
        assert moments == sorted(moments)
        assert span.nbytes > 0
        assert span.retries == 0


def test_a_worker_may_begin_before_the_trainer_has_returned_from_asking(
    monkeypatch,
):
    ask = ProcessPool.submit

    def ask_and_be_held_up(pool, request):
        accepted = ask(pool, request)
        time.sleep(0.05)  # in which a worker that is there begins
        return accepted

    with Numbered(length=5, **PLACES["process"]) as dataset:
        list(dataset)  # now the worker is there
        monkeypatch.setattr(ProcessPool, "submit", ask_and_be_held_up)
        batches = iter(dataset)
        batches.time_batches(0.0)
        spans = [batches.span for _ in batches]
    assert all(span.queued_s <= span.began_s for span in spans)


def test_a_run_delay_is_that_of_the_thread_that_reads_it():
    delay = RunDelay()
    thread = threading.Thread(target=delay.read)
    thread.start()
    thread.join()  # the kernel forgets a thread that has ended
    assert delay.read() >= 0.0
    delay.close()


@everywhere
def test_sleeping_is_told_from_computing(place):
    (slept,) = _spans(Sleeping(0.05, length=1, **PLACES[place]))
    (burned,) = _spans(Burning(0.05, length=1, **PLACES[place]))
    assert slept.built_s - slept.began_s >= 0.05
    assert slept.cpu_s < 0.04
    assert burned.cpu_s >= 0.05


@everywhere
def test_unless_batches_are_timed_there_is_no_span(place):
    with Numbered(length=3, **PLACES[place]) as dataset:
        batches = iter(dataset)
        assert [batches.span for _ in batches] == [None] * 3


@everywhere
def test_workers_that_rest_begin_nothing_until_the_next_batch(place):
    with Numbered(length=12, **PLACES[place]) as dataset:
        batches = iter(dataset)
        batches.time_batches(0.0)
        seen = []
        for number in range(12):
            batches.fetch(pause_after=number == 4)
            quiesced_s = time.monotonic()
            if number == 4:
                assert not dataset._fastdata.loader._pool.workers.busy
                time.sleep(0.1)  # in which a worker would have built others
                going_on_s = time.monotonic()
            seen.append(batches.span)
            if number == 4:
                quiet = quiesced_s, going_on_s
        assert [span.batch for span in seen] == list(range(12))
        for span in seen:
            assert not quiet[0] < span.began_s < quiet[1]


@everywhere
def test_nothing_stays_open_after_close(place):
    def open_files():
        links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
        return [os.readlink(li) for li in links if os.path.exists(li)]

    _spans(Numbered(length=3, **PLACES[place]))
    assert [name for name in open_files() if "schedstat" in name] == []


@pytest.fixture
def clock(monkeypatch):
    clock = types.SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(
        "keras_fastdata.metrics.timing.time.monotonic", lambda: clock.now_s
    )
    return clock


def test_of_short_builds_the_kernel_is_asked_now_and_then(clock):
    stopwatch = Stopwatch()
    asked = []
    for _ in range(64):
        stopwatch.start(0.0, epoch=0)
        stopwatch.built()
        asked.append(not math.isnan(stopwatch.stop().cpu_s))
        clock.now_s += 0.001
    stopwatch.close()
    assert asked == [place % 20 == 0 for place in range(64)]


def test_of_short_builds_one_is_told_of_now_and_then_and_of_long_ones_all(
    clock,
):
    stopwatch = Stopwatch()
    told = []
    for place in range(12):
        stopwatch.start(0.01, epoch=0)
        clock.now_s += 0.008 if place < 6 else 0.012
        told.append(stopwatch.stop() is not None)
    stopwatch.close()
    assert told == [True, False, False] * 2 + [True] * 6


def test_of_a_build_after_a_long_one_the_kernel_is_asked(clock):
    stopwatch = Stopwatch()
    for seconds in (0, 0.025, 0):
        stopwatch.start(0.0, epoch=0)
        clock.now_s += seconds
        stopwatch.built()
        latest = stopwatch.stop()
    stopwatch.close()
    assert not math.isnan(latest.cpu_s)


def test_threads_are_sampled_while_their_builds_take_5_ms(clock, monkeypatch):
    sampled = set()
    monkeypatch.setattr(stack_sampler, "watch", sampled.add)
    monkeypatch.setattr(stack_sampler, "ignore", sampled.discard)
    stopwatch = Stopwatch()
    for seconds, is_sampled in ((0.004, False), (0.006, True), (0.004, False)):
        for _ in range(100):
            stopwatch.start(0.0, epoch=0)
            clock.now_s += seconds
            stopwatch.stop()
        assert (stopwatch in sampled) == is_sampled
    stopwatch.close()


def test_the_first_build_is_sampled_and_quick_ones_after_a_late_one_are_not(
    clock, monkeypatch
):
    sampled = set()
    monkeypatch.setattr(stack_sampler, "watch", sampled.add)
    monkeypatch.setattr(stack_sampler, "ignore", sampled.discard)
    for first_s, most in ((0.001, 0), (7.0, 7)):
        stopwatch = Stopwatch()
        stopwatch.start(0.0, epoch=0)
        assert stopwatch in sampled
        clock.now_s += first_s
        stopwatch.stop()
        watched = 0
        for _ in range(100):
            clock.now_s += 0.02  # each build is measured
            stopwatch.start(0.0, epoch=0)
            watched += stopwatch in sampled
            clock.now_s += 0.001
            stopwatch.stop()
        assert watched <= most
        stopwatch.close()


def test_of_the_stacks_of_a_long_build_those_of_its_end_are_kept_too():
    stopwatch = Stopwatch()
    stopwatch.start(0.0, epoch=0)
    for number in range(2000):
        stopwatch.add_stack(f"{number >= 1000}")
    stacks = stopwatch.stop().stacks
    stopwatch.close()
    assert len(stacks) == 64
    assert set(stacks) == {"True", "False"}


def asked_at(clock, stopwatch, interval_s, epoch, milliseconds):
    """When the kernel was asked about builds of 1 ms, in that time."""
    asked = []
    for millisecond in range(milliseconds):
        stopwatch.start(interval_s, epoch)
        clock.now_s += 0.001
        timing = stopwatch.stop()
        if timing is not None and not math.isnan(timing.cpu_s):
            asked.append(millisecond)
    return asked


def test_the_more_the_kernel_has_told_of_an_epoch_the_more_rarely_it_is_asked(
    clock,
):
    stopwatch = Stopwatch()
    for epoch in range(2):
        asked = asked_at(clock, stopwatch, 0.02, epoch, 10_000)
        assert asked[0] < 20
        assert asked[24] - asked[0] == pytest.approx(24 * 20, abs=25)
        assert asked[-1] - asked[-2] == pytest.approx(100, abs=25)
    stopwatch.close()


def test_where_all_builds_are_told_of_the_kernel_is_always_asked_as_often(
    clock,
):
    stopwatch = Stopwatch()
    asked = asked_at(clock, stopwatch, 0.0, 0, 10_000)
    stopwatch.close()
    assert len(asked) == pytest.approx(500, abs=25)


def test_a_stopwatch_that_is_not_started_says_nothing():
    stopwatch = Stopwatch()
    stopwatch.start(None, epoch=0)
    stopwatch.built()
    assert stopwatch.stop() is None
    stopwatch.close()
    stopwatch.close()


def test_without_the_kernels_word_a_delay_is_0(monkeypatch):
    monkeypatch.setattr(
        "keras_fastdata.metrics.timing._SCHEDSTAT", "/proc/nothing/here"
    )
    stopwatch = Stopwatch()
    stopwatch.start(0.0, epoch=0)
    timing = stopwatch.stop()
    assert timing.delay_s == 0.0


@everywhere
def test_of_batches_that_come_quickly_the_first_of_every_epoch_has_a_span(
    place,
):
    with Numbered(length=30, **PLACES[place]) as dataset:
        for _ in range(2):
            batches = iter(dataset)
            batches.time_batches(3600.0)
            seen = [batches.span and batches.span.batch for _ in batches]
            assert seen == [0] + [None] * 29


def test_a_batch_that_was_built_again_has_a_span_however_quickly_it_came(
    tmp_path,
):
    with Deadly(
        tmp_path / "once",
        at=30,
        length=40,
        workers=2,
        use_multiprocessing=True,
    ) as dataset:
        batches = iter(dataset)
        batches.time_batches(3600.0)
        spans = [batches.span for _ in batches]
    assert [(s.batch, s.retries) for s in spans if s] == [(0, 0), (30, 1)]
