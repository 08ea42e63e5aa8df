"""`StepClock` in a world whose clock, device and loader are simulated.

There the time that an epoch would take without waiting for data is known.
"""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from places import FULL

from keras_fastdata.health import step_clock
from keras_fastdata.health.step_clock import StepClock
from keras_fastdata.metrics.recorder import Recorder
from keras_fastdata.metrics.sampling import SamplingState

COMPILING_S = 0.8
HOST_S = 0.00025  # of the host, for each batch and for each step


def data_wait(timing):
    """The share of the wall time that free data would save."""
    if not timing.wall_s:
        return 0.0
    return max(0.0, 1.0 - timing.free_s / timing.wall_s)


class World:
    """A training loop whose time is counted rather than spent.

    Args:
        load_s: What building a batch takes.
        step_s: What computing a step takes, while nothing else runs.
        asynchronous: Whether the host goes on while a step is computed.
        ahead: Whether a worker builds while the host does other things;
            else batches are built when they are asked for.
        slowdown: How many times longer the host and the device take for
            anything while workers build.
        fetches_ahead: Whether a batch is fetched before its step begins.
        tells: Whether the backend tells what compiling takes.
    """

    def __init__(
        self,
        load_s,
        step_s,
        asynchronous=False,
        ahead=False,
        slowdown=1.0,
        fetches_ahead=False,
        interval_s=0.0,
        tells=False,
    ):
        self.now_s = 100.0
        self.tells, self.compiling_s = tells, 0.0
        self.load_s, self.step_s = load_s, step_s
        self.asynchronous, self.ahead = asynchronous, ahead
        self.slowdown = slowdown
        self.fetches_ahead = fetches_ahead
        self.device_s = 0.0  # when the device will have done all
        self.built_s = 0.0  # when the worker will have its next batch
        self.rests = False
        self.compiles = True
        self.halts_s = 0.0  # in which the thread did not compute
        self.recorder = Recorder(interval_s)
        self.seen = []
        self.clock = StepClock(
            "train",
            self.recorder,
            self.synchronize if asynchronous else None,
            fetches_ahead,
            self.seen.append,
            (lambda: self.compiling_s) if tells else None,
        )

    def thread_time(self):
        return self.now_s - self.halts_s

    def synchronize(self):
        self.now_s = max(self.now_s, self.device_s)

    def fetch(self):
        if self.asynchronous:
            self.clock.before_wait()
        began_s = self.now_s
        if self.ahead:
            self.now_s = max(self.now_s, self.built_s)
            self.rests = self.clock.state is not SamplingState.OFF
            self.built_s = self.now_s + self.load_s
        else:
            self.now_s += self.load_s
        self.recorder.add(None, self.now_s - began_s)
        self.now_s += HOST_S * self.slowed  # Keras makes tensors of it

    @property
    def slowed(self):
        return self.slowdown if self.ahead and not self.rests else 1.0

    def compute(self):
        step_s = self.step_s * self.slowed
        if self.rests:
            # What the worker would have built, it builds afterwards.
            self.built_s = self.now_s + step_s + self.load_s
        if self.compiles:
            self.now_s += COMPILING_S
            self.compiling_s += self.tells * 0.9 * COMPILING_S
            self.compiles = False
        self.now_s += HOST_S
        self.device_s = max(self.device_s, self.now_s) + step_s
        if not self.asynchronous:
            self.now_s = self.device_s

    def epoch(self, count, number=0):
        self.built_s = self.now_s + self.load_s
        self.clock.begin(number)
        for step in range(count):
            if self.fetches_ahead:
                self.fetch()
                self.clock.step(step)
            else:
                self.clock.step(step)
                self.fetch()
            self.compute()
        return self.clock.end()


@pytest.fixture
def world(monkeypatch):
    def make(*args, **kwargs):
        made = World(*args, **kwargs)
        monkeypatch.setattr(step_clock.time, "monotonic", lambda: made.now_s)
        monkeypatch.setattr(step_clock.time, "thread_time", made.thread_time)
        return made

    return make


@pytest.mark.parametrize("fetches_ahead", [False, True])
@pytest.mark.parametrize("ahead", [False, True], ids=["inline", "worker"])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("load_s", "step_s"), [(0.03, 0.01), (0.015, 0.019), (0, 0.01), (1, 0.001)]
)
def test_free_data_would_bring_what_is_predicted(
    world, load_s, step_s, asynchronous, ahead, fetches_ahead
):
    kind = {
        "asynchronous": asynchronous,
        "ahead": ahead,
        "fetches_ahead": fetches_ahead,
    }
    real = world(load_s, step_s, **kind)
    real.epoch(100)
    seen = real.epoch(100, 1)
    free = world(0, step_s, **kind)
    free.epoch(100)
    ceiling = free.epoch(100, 1)
    assert data_wait(seen) == pytest.approx(
        1 - ceiling.wall_s / seen.wall_s, abs=0.03
    )


@settings(max_examples=100 if FULL else 40)
@example(
    load_s=0.0,
    step_s=0.5,
    asynchronous=True,
    ahead=False,
    fetches_ahead=True,
    count=3,
    epochs=2,
)
@example(
    load_s=0.0,
    step_s=0.5,
    asynchronous=True,
    ahead=True,
    fetches_ahead=True,
    count=2,
    epochs=2,
)
@given(
    load_s=st.floats(0, 0.5),
    step_s=st.floats(0.001, 0.5),
    asynchronous=st.booleans(),
    ahead=st.booleans(),
    fetches_ahead=st.booleans(),
    count=st.integers(1, 60),
    epochs=st.integers(1, 3),
)
def test_a_share_is_a_share_and_every_step_is_told_once(
    load_s, step_s, asynchronous, ahead, fetches_ahead, count, epochs
):
    with pytest.MonkeyPatch.context() as patch:
        real = World(load_s, step_s, asynchronous, ahead, 1.5, fetches_ahead)
        patch.setattr(step_clock.time, "monotonic", lambda: real.now_s)
        patch.setattr(step_clock.time, "thread_time", real.thread_time)
        for number in range(epochs):
            began_s = real.now_s
            stretch = real.epoch(count, number)
            assert 0 <= data_wait(stretch) <= 1
            in_all_s = stretch.wall_s + stretch.compiling_s
            assert in_all_s <= real.now_s - began_s + 1e-9
            assert 0 <= stretch.free_s <= stretch.wall_s * 1.5 + 1
    told = [(step.epoch, step.number) for step in real.seen]
    assert told == [(e, n) for e in range(epochs) for n in range(count)]
    for before, after in zip(real.seen, real.seen[1:], strict=False):
        assert before.ended_s <= after.began_s + 1e-9


@pytest.mark.parametrize("fetches_ahead", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("step_s", [0.01, 0.0])
def test_steps_that_builds_slow_down_are_known_from_those_beside_which_none_run(
    world, step_s, asynchronous, fetches_ahead
):
    slowed = world(0.02, step_s, asynchronous, True, 3.0, fetches_ahead)
    slowed.epoch(200)
    stretch = slowed.epoch(200, 1)
    needed_s = step_s + 2 * HOST_S
    assert stretch.step_s == pytest.approx(needed_s, rel=0.1)
    assert stretch.free_s == pytest.approx(200 * needed_s, rel=0.1)


@pytest.mark.parametrize("at", range(1, 10))
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_batch_that_comes_late_counts_whichever_steps_are_sampled(
    world, asynchronous, at
):
    real = world(0.0, 0.05, asynchronous)
    real.epoch(10)
    real.clock.begin(1)
    began_s = real.now_s
    for step in range(10):
        real.load_s = 2.5 if step == at else 0.0
        real.clock.step(step)
        real.fetch()
        real.compute()
    found = real.clock.end()
    assert found.wall_s == pytest.approx(real.now_s - began_s, rel=0.15)
    assert found.free_s == pytest.approx(0.5, rel=0.15)


def test_slow_samples_do_not_make_an_epoch_longer_than_it_was(world):
    real = world(0, 0.2, asynchronous=True, tells=True)

    class Quicker:
        """Makes the steps after the first few, which are sampled, quick."""

        compute = real.compute
        calls = 0

        def __call__(self):
            real.step_s = 0.2 if self.calls < 4 else 0.01
            self.calls += 1
            self.compute()

    real.compute = Quicker()
    began_s = real.now_s
    found = real.epoch(50)
    assert found.step_s == pytest.approx(0.2, rel=0.01)
    assert found.wall_s + found.compiling_s <= real.now_s - began_s
    assert found.wall_s == pytest.approx(4 * 0.2 + 46 * 0.01, rel=0.1)


def test_slow_steps_of_a_first_epoch_do_not_count_in_the_second(world):
    real = world(0.02, 0.05, ahead=True)
    real.epoch(40)
    real.step_s = 0.01  # caches are warm
    stretch = real.epoch(40, 1)
    assert stretch.step_s == pytest.approx(0.01 + 2 * HOST_S, rel=0.01)
    assert data_wait(stretch) == pytest.approx(1 - 0.011 / 0.021, abs=0.05)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_step_that_compiles_is_left_out(world, asynchronous):
    real = world(0, 0.01, asynchronous)
    first = real.epoch(50)
    assert first.compiling_s == pytest.approx(COMPILING_S, rel=0.1)
    assert first.compiled == {0}
    assert first.wall_s == pytest.approx(50 * 0.01, rel=0.2)
    real.compiles = True  # a batch of another shape
    second = real.epoch(50, 1)
    assert second.compiling_s == pytest.approx(COMPILING_S, rel=0.1)
    assert data_wait(second) < 0.1


@pytest.mark.parametrize("ragged", [0, 1, 12], ids="step {}".format)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_backend_that_tells_of_compiling_is_believed(
    world, asynchronous, ragged
):
    """Compiling takes less than ten steps do, so no length shows it."""
    real = world(0, 0.2, asynchronous, tells=True)
    real.epoch(20)

    class Ragged:
        """Compiles in one step, which may be one that is sampled."""

        compute = real.compute
        calls = 0

        def __call__(self):
            real.compiles = self.calls == ragged
            self.calls += 1
            self.compute()

    real.compute = Ragged()
    began_s = real.now_s
    second = real.epoch(20, 1)
    assert second.compiled == {ragged}
    assert second.compiling_s == pytest.approx(COMPILING_S, rel=0.3)
    # A device may have computed that step, or others, at the same time.
    whole_s = real.now_s - began_s - second.compiling_s
    assert min(18.5 * 0.2, whole_s) <= second.wall_s < 21.5 * 0.2
    assert second.step_s == pytest.approx(0.2, rel=0.05)
    assert data_wait(second) < 0.1


def test_a_long_step_is_not_taken_for_compiling_if_the_backend_tells(world):
    real = world(0, 0.01, tells=True)
    first = real.epoch(50)
    real.compiles = True
    real.tells = False  # it is the machine that halts for a while
    second = real.epoch(50, 1)
    assert first.compiled == {0}
    assert not second.compiled
    assert not second.compiling_s


def test_a_long_step_that_did_not_compute_is_not_taken_for_compiling(world):
    """As if threads that build had kept Python's lock from it."""
    real = world(0, 0.01)
    first = real.epoch(50)
    compute = real.compute

    def wait_first():
        real.now_s += 0.3
        real.halts_s += 0.3
        compute()

    real.compute = wait_first
    second = real.epoch(50, 1)
    assert first.compiled == {0}
    assert not second.compiled
    assert second.wall_s > 50 * 0.3


def test_sampling_takes_at_most_a_hundredth_of_the_time(world):
    real = world(0.001, 0.01, asynchronous=True, ahead=True)
    real.epoch(10)
    real.epoch(10_000, 1)
    sampled = [step for step in real.seen[10:] if step.sampled]
    spent_s = sum(step.ended_s - step.began_s for step in sampled)
    assert sampled
    assert spent_s < 0.02 * (real.seen[-1].ended_s - real.seen[10].began_s)


@pytest.mark.parametrize("fetches_ahead", [False, True])
@pytest.mark.parametrize("ahead", [False, True], ids=["inline", "worker"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_short_steps_are_looked_at_in_groups_and_the_figures_are_the_same(
    world, asynchronous, ahead, fetches_ahead
):
    def second_epoch(interval_s):
        real = world(
            0.0004, 0.0003, asynchronous, ahead, 1.5, fetches_ahead, interval_s
        )
        real.epoch(2000)
        told = len(real.seen)
        return real.epoch(2000, 1), real.seen[told:]

    (each, steps_seen), (grouped, groups) = map(second_epoch, (0.0, 0.005))
    assert len(steps_seen) == 2000
    assert len(groups) < 450
    assert sum(group.calls for group in groups) == 2000
    number = 0
    for group in groups:
        assert group.number == number
        number += group.calls
    assert {group.calls for group in groups if group.sampled} == {1}
    assert grouped.step_s == pytest.approx(each.step_s, rel=0.02)
    assert grouped.wall_s == pytest.approx(each.wall_s, rel=0.02)
    assert data_wait(grouped) == pytest.approx(data_wait(each), abs=0.02)


def test_a_step_that_compiles_amid_short_ones_is_left_out(world):
    real = world(0, 0.0003, interval_s=0.005)
    real.epoch(1000)
    real.compiles = True  # a batch of another shape
    second = real.epoch(1000, 1)
    assert second.compiling_s == pytest.approx(COMPILING_S, rel=0.1)
    assert data_wait(second) < 0.1


def test_steps_that_were_only_asked_for_are_not_booked_on_what_follows(world):
    real = world(0, 0.05, asynchronous=True)
    training = real.epoch(20)
    assert real.device_s <= real.now_s  # all have been computed
    assert training.wall_s == pytest.approx(20 * 0.05, rel=0.1)


def test_a_single_step_that_compiles_is_all_there_is(world):
    stretch = world(0.01, 0.01).epoch(1)
    assert stretch.wall_s == pytest.approx(COMPILING_S, rel=0.1)
    assert data_wait(stretch) < 0.1


def test_an_epoch_without_steps_waits_for_nothing(world):
    stretch = world(0.01, 0.01).epoch(0)
    assert data_wait(stretch) == 0


def test_time_aside_belongs_to_no_epoch(world):
    real = world(0.01, 0.01)
    real.epoch(5)
    real.clock.begin(1)
    for step in range(5):
        real.clock.step(step)
        real.fetch()
        real.compute()
    real.now_s += 10  # a validation is set up
    real.recorder.exclude(10)
    stretch = real.clock.end()
    assert stretch.wall_s == pytest.approx(5 * (0.02 + 2 * HOST_S), rel=0.01)
    last = real.seen[-1]
    assert last.excluded_s == 10
    assert last.waited_s == pytest.approx(0.01)
    assert last.own_s == pytest.approx(0.01 + 2 * HOST_S)


def test_steps_outside_an_epoch_are_not_looked_at(world):
    real = world(0.01, 0.01)
    real.clock.step(0)
    assert real.seen == []


# -- the states of sampling ----------------------------------------------------

OFF, PAUSING, ISOLATED = SamplingState


def _begun(fetches_ahead):
    clock = StepClock("train", Recorder(), None, fetches_ahead, [].append)
    clock.begin(0)
    return clock


def _states(clock, steps):
    states = []
    for number in range(steps):
        clock.step(number)
        states.append(clock.state)
    return states


def test_the_first_samples_are_the_steps_after_the_first():
    clock = _begun(fetches_ahead=False)
    assert _states(clock, 5) == [OFF, ISOLATED, ISOLATED, ISOLATED, OFF]


def test_where_batches_are_fetched_ahead_workers_pause_a_step_before():
    clock = _begun(fetches_ahead=True)
    states = [OFF, PAUSING, ISOLATED, ISOLATED, ISOLATED, OFF]
    assert _states(clock, 6) == states


@pytest.mark.parametrize("end", ["interrupt", "end"])
def test_no_step_is_sampled_after_an_interruption_or_the_end(end):
    clock = _begun(fetches_ahead=False)
    assert _states(clock, 2)[-1] is ISOLATED
    getattr(clock, end)()
    assert clock.state is OFF
