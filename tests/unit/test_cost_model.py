"""What batches take with other workers, and which to use: plain values."""

from __future__ import annotations

import dataclasses
import math

import pytest

from keras_fastdata.metrics import cost_model
from keras_fastdata.metrics.cost_model import Costs, choose

COMPUTES = Costs(cpu_s=0.010, blocked_s=0.0, take_s=1e-4)
LOOPS = dataclasses.replace(COMPUTES, lock_s=0.010)  # in Python
SLEEPS = Costs(cpu_s=1e-4, blocked_s=0.1, take_s=1e-4)


def _rate(costs, workers, cores):
    return 1 / costs.period_s(workers, cores)


def _chosen(threads, processes, cores, present=False):
    kinds = {False: threads} | ({} if processes is None else {True: processes})
    return choose(kinds, cores, 16, present)[:2]


# -- the model ---------------------------------------------------------------


def test_a_worker_builds_one_batch_after_another():
    costs = Costs(cpu_s=0.01, blocked_s=0.03)
    for workers in (1, 2, 4):
        assert _rate(costs, workers, 64) == pytest.approx(workers / 0.04)


def test_computing_is_limited_by_cores():
    costs = Costs(cpu_s=0.01, blocked_s=0.0, take_s=0.0)
    assert _rate(costs, 8, cores=2) == pytest.approx(200)
    assert _rate(costs, 8, cores=1.5) == pytest.approx(150)


def test_taking_a_batch_and_a_step_need_a_core_too():
    costs = Costs(cpu_s=0.01, blocked_s=0.0, take_s=0.01)
    assert _rate(costs, 8, cores=2) == pytest.approx(100)
    costs = Costs(0.01, 0.0, step_s=0.005, step_cpu_s=0.01, take_s=0.0)
    assert _rate(costs, 8, cores=2) == pytest.approx(100)


def test_being_blocked_needs_no_core():
    assert _rate(SLEEPS, 16, cores=1) == pytest.approx(160, rel=0.1)


def test_threads_are_limited_by_the_lock():
    for workers in (1, 2, 16):
        assert _rate(LOOPS, workers, cores=64) == pytest.approx(100)


def test_no_workers_are_quicker_than_the_steps():
    costs = dataclasses.replace(SLEEPS, step_s=0.02, take_s=0.0)
    assert costs.period_s(16, 64) == pytest.approx(0.02)
    assert costs.period_s(0, 64) == pytest.approx(0.1201)  # one by one


def test_what_one_worker_at_a_time_can_use_limits_all():
    # Each of two needs twice as long, because they take turns throughout.
    assert cost_model.shared_s(0.1, 0.2) == pytest.approx(0.1)
    # They take turns for 0.08 s of 0.1: each needs 0.16 s.
    assert cost_model.shared_s(0.1, 0.16) == pytest.approx(0.08)
    costs = Costs(cpu_s=0.0, blocked_s=0.1, shared_s=0.1)
    assert _rate(costs, 16, cores=2) == pytest.approx(10)


STRAGGLES = Costs(0.0, 0.02, step_s=0.01, take_s=0.0, straggler_s=1.0, every=20)


def test_all_batches_wait_for_a_straggler_beyond_the_queue():
    # Ten of 20 batches are ready meanwhile; the other ten take a step each.
    assert STRAGGLES.period_s(8, 2, 10) == pytest.approx((1.0 + 0.1) / 20)
    assert STRAGGLES.period_s(8, 2, 50) == pytest.approx(1.0 / 50)
    assert STRAGGLES.period_s(8, 2, 100) == pytest.approx(0.01)
    assert STRAGGLES.period_s(8, 2) == pytest.approx(0.01)


def test_a_queue_that_bridges_a_straggler_holds_the_steps_of_its_time():
    assert STRAGGLES.bridging(0.01) == 100
    assert SLEEPS.bridging(0.01) == 0


def test_builds_that_take_longer_do_not_make_the_steps_longer():
    costs = dataclasses.replace(SLEEPS, step_s=0.05, take_s=0.0)
    assert costs.period_s(4, 64, longer=1.5) == pytest.approx(0.05)
    assert costs.period_s(1, 64, longer=1.5) == pytest.approx(0.15015)
    assert costs.period_s(0, 64, longer=2.0) == pytest.approx(0.2502)


def test_a_little_longer_beside_another_is_no_limit():
    assert cost_model.shared_s(0.1, 0.11) == 0
    assert cost_model.shared_s(0.1, math.nan) == 0
    assert cost_model.shared_s(0.1, 0.05) == 0


def test_the_lock_is_held_for_no_longer_than_a_build_computes():
    assert cost_model.lock_s(0.5, 0.01, cpu_s=1.0) == pytest.approx(0.005)
    assert cost_model.lock_s(1.0, 0.1, cpu_s=0.02) == pytest.approx(0.02)
    assert cost_model.lock_s(math.nan, 0.1, cpu_s=0.02) == pytest.approx(0.02)
    assert cost_model.lock_s(0.0, 0.1, cpu_s=0.02) == 0


# -- the model, corrected by a trial -------------------------------------------


def test_a_trial_that_took_as_long_as_forecast_corrects_nothing():
    came_s = SLEEPS.period_s(4, 2)
    assert SLEEPS.corrected(SLEEPS, came_s, 4, 2) == SLEEPS


def test_builds_that_wait_longer_in_a_trial_get_more_workers():
    seen = dataclasses.replace(SLEEPS, blocked_s=0.2)
    wanted = dataclasses.replace(SLEEPS, step_s=0.05)
    learned = wanted.corrected(seen, seen.period_s(2, 2), 2, 2)
    assert learned == dataclasses.replace(wanted, blocked_s=0.2)
    assert (wanted.useful(2, 16), learned.useful(2, 16)) == (4, 6)


def test_builds_that_compute_and_came_late_take_turns():
    # Four threads, of which one at a time runs Python code.
    seen = Costs(cpu_s=0.010, blocked_s=0.030)
    learned = COMPUTES.corrected(seen, came_s=0.010, workers=4, cores=8)
    assert learned == dataclasses.replace(COMPUTES, shared_s=0.010)
    assert learned.period_s(8, 8) == pytest.approx(0.010)
    assert learned.useful(8, 16) == 1


# -- the choice ----------------------------------------------------------------


def test_waiting_is_for_many_workers_on_any_number_of_cores():
    assert _chosen(SLEEPS, SLEEPS, cores=1) == (16, False)
    assert SLEEPS.why_no_more(16, 1).startswith("More workers build more")


@pytest.mark.parametrize("present", [False, True])
def test_the_kind_in_use_is_kept_where_the_other_is_no_quicker(present):
    assert _chosen(SLEEPS, SLEEPS, 2, present) == (16, present)
    assert _chosen(COMPUTES, COMPUTES, 2, present) == (2, present)


@pytest.mark.parametrize("present", [False, True])
def test_python_code_is_for_processes_one_to_a_core(present):
    assert _chosen(LOOPS, COMPUTES, 2, present) == (2, True)
    assert _chosen(LOOPS, COMPUTES, 6, present) == (6, True)


@pytest.mark.parametrize("threads", [LOOPS, COMPUTES])
def test_one_core_is_for_one_worker_that_computes(threads):
    assert _chosen(threads, COMPUTES, cores=1) == (1, False)
    # A little of it was not accounted for as computing.
    hazy = dataclasses.replace(COMPUTES, cpu_s=0.0081, blocked_s=0.0019)
    assert _chosen(hazy, hazy, cores=1) == (1, False)


def test_without_processes_python_code_is_for_one_thread():
    assert _chosen(LOOPS, None, cores=8) == (1, False)
    assert "Python's lock" in LOOPS.why_no_more(1, 8)


def test_a_disk_that_serves_one_at_a_time_needs_no_more_than_one_worker():
    costs = dataclasses.replace(SLEEPS, shared_s=0.1)
    assert _chosen(costs, costs, cores=4) == (1, False)
    assert "such as a disk" in costs.why_no_more(1, 4)


def test_copies_that_fill_the_memory_bus_need_no_more_workers_than_it_bears():
    # Alone 10 ms of CPU time, beside another one 20 ms.
    shared_s = cost_model.shared_s(0.010, 0.020)
    copies = dataclasses.replace(COMPUTES, shared_s=shared_s)
    assert _chosen(copies, copies, cores=8) == (1, False)


def test_slow_steps_need_few_workers():
    slow = dataclasses.replace(COMPUTES, step_s=0.05)
    assert _chosen(slow, slow, cores=8) == (1, False)
    slow = dataclasses.replace(SLEEPS, step_s=0.05)
    workers, _ = _chosen(slow, slow, cores=8)
    assert 2 <= workers <= 4


def test_the_call_can_be_pasted_and_has_a_longer_queue_where_it_must():
    assert cost_model.call("Photos", 3, True) == (
        "Photos(..., workers=3, use_multiprocessing=True)"
    )
    queue = cost_model.queue_for(16, 10)
    assert cost_model.call("Photos", 16, False, queue) == (
        "Photos(..., workers=16, max_queue_size=32)"
    )
    assert cost_model.queue_for(10, 10) is None
