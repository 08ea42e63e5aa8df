"""The function that decides for `workers="auto"`, on simulated loads."""

from __future__ import annotations

import random

import pytest
from places import FULL

from keras_fastdata.engine.tuner import (
    INLINE,
    Sample,
    Tuner,
    WorkerConfigChoice,
)
from keras_fastdata.metrics.timing import Timing

QUEUE = 10
HAND_OVER_S = 30e-6


class Load:
    """What builds and steps take, and what that comes to somewhere.

    Args:
        waits_s: Of a build, without a core.
        python_s: Of a build, holding Python's lock.
        native_s: Of a build, computing without it.
        store_s: More of it in a process, to copy the batch.
        crowd_s: More waiting in any worker, as at a disk that several use.
        step_s: With it, on a device.
        step_cpu_s: The same on a core.
    """

    def __init__(
        self,
        waits_s=0,
        python_s=0,
        native_s=0,
        store_s=0,
        step_s=1e-3,
        step_cpu_s=0,
        crowd_s=0,
    ):
        self.crowd_s = crowd_s
        self.waits_s, self.python_s, self.native_s = waits_s, python_s, native_s
        self.store_s, self.step_s, self.step_cpu_s = store_s, step_s, step_cpu_s

    def cpu_s(self, choice):
        stored_s = self.store_s if choice.are_processes else 0
        return self.python_s + self.native_s + stored_s

    def build_s(self, choice):
        crowd_s = self.crowd_s if choice.workers else 0
        return self.waits_s + crowd_s + self.cpu_s(choice)

    def period_s(self, choice, cores):
        build_s = self.build_s(choice)
        step_s = self.step_s + self.step_cpu_s
        if choice == INLINE:
            return build_s + step_s
        handed_s = step_s + HAND_OVER_S
        used_s = self.cpu_s(choice) + self.step_cpu_s + HAND_OVER_S
        limits = [build_s / choice.workers, handed_s, used_s / cores]
        if not choice.are_processes:
            limits.append(self.python_s + self.step_cpu_s)
        return max(limits)

    def sample(self, choice, cores, draw):
        period_s = self.period_s(choice, cores) * draw.uniform(0.97, 1.05)
        if draw.random() < 0.02:
            period_s *= 5  # somebody else had the core
        gap_s = self.step_s + self.step_cpu_s
        build_s = self.build_s(choice)
        timing = Timing(0, build_s, build_s, self.cpu_s(choice), 0)
        wait_s = max(0, period_s - gap_s)
        return Sample(gap_s, self.step_cpu_s, wait_s, timing)


LOADS = {
    "cheap": Load(native_s=20e-6),
    "sleeping": Load(waits_s=0.01),
    "GIL-bound": Load(python_s=0.005),
    "CPU-bound": Load(native_s=0.008),
    "huge batches": Load(native_s=0.02, store_s=0.015),
    "mixed": Load(waits_s=0.005, python_s=0.005),
    "a slow step": Load(python_s=0.005, step_s=0.02),
    "a step on the cores": Load(python_s=0.005, step_s=0, step_cpu_s=0.01),
    "slow builds": Load(waits_s=0.3, native_s=0.2, step_s=0.1),
    "crowded disk": Load(waits_s=0.005, step_s=0.002, crowd_s=0.005),
    "no step": Load(native_s=200e-6, step_s=0),
}


def run(tuner, load, cores, batches, seed=0):
    """Has a tuner see so many batches; returns how often it moved."""
    draw = random.Random(seed)
    before = len(tuner.decisions)
    for _ in range(batches):
        tuner.add(load.sample(tuner.choice, cores, draw))
    return len(tuner.decisions) - before


def quickest_s(load, cores):
    counts = [n for n in (1, 2, 4, 8, 16) if n <= QUEUE]
    places = [
        INLINE,
        *(WorkerConfigChoice(n, p) for n in counts for p in (False, True)),
    ]
    return min(load.period_s(choice, cores) for choice in places)


@pytest.mark.parametrize("cores", [1, 1.5, 2, 8])
@pytest.mark.parametrize("name", LOADS)
def test_it_is_nearly_as_quick_as_anything_after_200_batches_and_stays_so(
    name, cores
):
    load = LOADS[name]
    for seed in range(10 if FULL else 2):
        tuner = Tuner(cores, QUEUE)
        run(tuner, load, cores, 200, seed)
        assert tuner.has_converged
        found_s = load.period_s(tuner.choice, cores)
        assert found_s <= 1.25 * quickest_s(load, cores), tuner.decisions
        assert run(tuner, load, cores, 5000, seed) == 0, tuner.decisions


def test_cheap_batches_stay_where_they_are():
    tuner = Tuner(8, QUEUE)
    run(tuner, LOADS["cheap"], 8, 200)
    assert tuner.choice == INLINE
    assert [d.place for d in tuner.decisions] == ["inline"]
    assert "Workers would bring nothing." in tuner.decisions[0].reason


def test_no_more_workers_than_the_cores_that_training_leaves():
    load = Load(python_s=0.005, step_s=0, step_cpu_s=0.005)
    tuner = Tuner(2, QUEUE)
    run(tuner, load, 2, 200)
    assert tuner.choice == WorkerConfigChoice(1, True)


@pytest.mark.parametrize("queue", [2, 3, 10, 100])
def test_no_more_workers_than_the_queue_is_long_nor_than_16(queue):
    tuner = Tuner(8, queue)
    run(tuner, Load(waits_s=0.5, step_s=0.02), 8, 300)
    assert tuner.choice.workers == min(queue, 16)


def test_a_kind_that_is_ruled_out_is_never_chosen():
    for processes in (False, True):
        for load in LOADS.values():
            tuner = Tuner(4, QUEUE)
            tuner.exclude(processes=processes, reason="It cannot be had.")
            run(tuner, load, 4, 500)
            kind = "process" if processes else "thread"
            assert not any(kind in d.place for d in tuner.decisions)


def test_a_kind_that_is_ruled_out_on_trial_is_left_at_once():
    draw = random.Random(0)
    load = LOADS["GIL-bound"]
    tuner = Tuner(4, QUEUE)
    while not tuner.choice.are_processes:
        tuner.add(load.sample(tuner.choice, 4, draw))
    tuner.exclude(processes=True, reason="It cannot be pickled.")
    assert not tuner.choice.are_processes
    run(tuner, load, 4, 500)
    assert not tuner.choice.are_processes
    assert "It cannot be pickled." in tuner.decisions[-1].reason


def test_a_kind_that_is_ruled_out_later_is_left_at_once():
    load = LOADS["sleeping"]
    tuner = Tuner(2, QUEUE)
    run(tuner, load, 2, 200)
    assert tuner.choice == WorkerConfigChoice(10, False)
    tuner.exclude(processes=False, reason="They share what it draws from.")
    assert tuner.choice == INLINE
    run(tuner, load, 2, 200)
    assert tuner.choice == WorkerConfigChoice(10, True)
    assert tuner.has_converged


def test_a_forecast_that_a_trial_belies_is_corrected_and_tried_again():
    tuner = Tuner(2, QUEUE)
    run(tuner, LOADS["crowded disk"], 2, 300)
    tried = [d.place for d in tuner.decisions]
    # 5 ms of waiting in steps of 2 ms were for 4 threads, 10 ms are for 8.
    assert tried == ["4 threads", "8 threads", "8 threads"]
    assert tuner.has_converged
    assert "8 threads: 2" in tuner.decisions[-1].reason


def test_a_forecast_is_corrected_once_for_each_kind_of_workers():
    tuner = Tuner(2, QUEUE)
    draw = random.Random(0)
    # The longer a queue of builds, the longer each of them takes.
    for _ in range(400):
        crowd_s = 0.005 * tuner.choice.workers
        load = Load(waits_s=0.005, step_s=0.002, crowd_s=crowd_s)
        tuner.add(load.sample(tuner.choice, 2, draw))
    assert tuner.has_converged
    kinds = [d.place.split()[-1] for d in tuner.decisions if not d.settled]
    assert kinds.count("threads") <= 2
    assert kinds.count("processes") <= 2


def test_what_changes_while_training_is_followed_and_the_reason_given():
    tuner = Tuner(2, QUEUE)
    run(tuner, LOADS["sleeping"], 2, 1500)
    assert tuner.choice == WorkerConfigChoice(10, False)
    run(tuner, LOADS["cheap"], 2, 3000)
    assert tuner.choice == INLINE
    assert any("Builds took 10" in d.reason for d in tuner.decisions)
    run(tuner, LOADS["GIL-bound"], 2, 6000)
    assert tuner.choice == WorkerConfigChoice(2, True)


def test_what_changes_often_is_not_followed_for_ever():
    tuner = Tuner(2, QUEUE)
    moves = 0
    for turn in range(100):
        load = LOADS["sleeping" if turn % 2 else "cheap"]
        moves += run(tuner, load, 2, 1000)
    assert moves < 40


def test_batches_of_which_nothing_is_known_do_no_harm():
    tuner = Tuner(2, QUEUE)
    for _ in range(1000):
        tuner.add(Sample(1e-3, 0, 0, None))
    assert tuner.choice == INLINE
