"""The function that decides for `workers="auto"`, on simulated loads."""

from __future__ import annotations

import random

import pytest
from places import FULL
from simulated_loads import LOADS, QUEUE, Load, quickest_s, run

from keras_fastdata.engine.tuner import (
    INLINE,
    Sample,
    Tuner,
    WorkerConfigChoice,
)


@pytest.mark.parametrize("cores", [1, 1.5, 2, 8])
@pytest.mark.parametrize("name", LOADS)
def test_it_is_nearly_as_quick_as_anything_after_300_batches_and_stays_so(
    name, cores
):
    load = LOADS[name]
    for seed in range(10 if FULL else 1):
        tuner = Tuner(cores, QUEUE)
        run(tuner, load, cores, 300, seed)
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


def test_threads_build_where_python_has_no_lock():
    # Copying the batch costs processes something.
    load = Load(native_s=0.005, store_s=0.001)
    tuner = Tuner(4, QUEUE, has_gil=False)
    run(tuner, load, 4, 300)
    assert tuner.has_converged
    assert tuner.choice.workers > 1
    assert not tuner.choice.are_processes
    assert not any("process" in d.place for d in tuner.decisions)


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
