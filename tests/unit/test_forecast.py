"""What more workers would build, and which to use: plain values."""

from __future__ import annotations

import dataclasses
import math

import pytest

from keras_fastdata.health import forecast
from keras_fastdata.health.forecast import BuildCosts

COMPUTES = BuildCosts(cpu_s=0.010, idle_s=0.0, second_idle_s=0.0, take_s=1e-4)
LOOPS = dataclasses.replace(COMPUTES, lock_s=0.010)  # in Python
SLEEPS = BuildCosts(cpu_s=1e-4, idle_s=0.1, second_idle_s=0.1, take_s=1e-4)


def _advised(threads, processes, cores, inline_s=None, held=math.nan):
    inline_s = threads.build_s if inline_s is None else inline_s
    found = forecast.advise(inline_s, threads, processes, cores, held)
    assert found.reason
    return found.workers, found.use_multiprocessing


# -- the model ---------------------------------------------------------------


def test_a_worker_builds_one_batch_after_another():
    costs = BuildCosts(cpu_s=0.01, idle_s=0.03)
    for workers in (1, 2, 4):
        found = forecast.expected(costs, workers, cores=64)
        assert found == pytest.approx(workers / 0.04)


def test_computing_is_limited_by_cores():
    costs = BuildCosts(cpu_s=0.01, idle_s=0.0)
    assert forecast.expected(costs, 8, cores=2) == pytest.approx(200)
    assert forecast.expected(costs, 8, cores=1.5) == pytest.approx(150)


def test_taking_a_batch_needs_a_core_too():
    costs = BuildCosts(cpu_s=0.01, idle_s=0.0, take_s=0.01)
    assert forecast.expected(costs, 8, cores=2) == pytest.approx(100)


def test_waiting_needs_no_core():
    assert forecast.expected(SLEEPS, 16, cores=1) == pytest.approx(160, rel=0.1)


def test_threads_are_limited_by_the_lock():
    for workers in (1, 2, 16):
        found = forecast.expected(LOOPS, workers, cores=64)
        assert found == pytest.approx(100)


def test_transfer_is_done_by_one_process():
    costs = BuildCosts(cpu_s=0.01, idle_s=0.0, take_s=0.004)
    assert forecast.expected(costs, 16, cores=64) == pytest.approx(250)


def test_what_one_worker_at_a_time_can_use_limits_all():
    # Each of two needs twice as long, because they take turns throughout.
    costs = BuildCosts(cpu_s=0.0, idle_s=0.1, second_idle_s=0.2)
    assert costs.shared_s == pytest.approx(0.1)
    assert forecast.expected(costs, 16, cores=2) == pytest.approx(10)
    # They take turns for 0.08 s of 0.1: each needs 0.16 s.
    costs = BuildCosts(cpu_s=0.0, idle_s=0.1, second_idle_s=0.16)
    assert costs.shared_s == pytest.approx(0.08)


def test_a_little_longer_beside_another_is_no_limit():
    costs = BuildCosts(cpu_s=0.0, idle_s=0.1, second_idle_s=0.11)
    assert costs.shared_s == 0
    assert BuildCosts(cpu_s=0.0, idle_s=0.1).shared_s == 0


def test_the_lock_is_held_for_no_longer_than_a_build_computes():
    assert forecast.lock_s(0.5, 100, cpu_s=1.0) == pytest.approx(0.005)
    assert forecast.lock_s(1.0, 10, cpu_s=0.02) == pytest.approx(0.02)
    assert forecast.lock_s(math.nan, 10, cpu_s=0.02) == pytest.approx(0.02)
    assert forecast.lock_s(0.0, 10, cpu_s=0.02) == 0


def test_a_batch_that_costs_nothing_is_no_division_by_zero():
    costs = BuildCosts(cpu_s=0.0, idle_s=0.0)
    assert forecast.expected(costs, 1, cores=1) == math.inf
    assert costs.computing == 1


@pytest.mark.parametrize(
    ("cores", "found"),
    [
        (1, [1, 2, 4, 8, 16]),
        (1.5, [1, 2, 4, 8, 16]),
        (6, [1, 2, 4, 6, 8, 16]),
        (48, [1, 2, 4, 8, 16, 32, 48]),
    ],
)
def test_the_counts_are_powers_of_two_and_the_cores(cores, found):
    assert forecast.counts(cores) == found


# -- the advice --------------------------------------------------------------


def test_waiting_is_for_many_threads():
    assert _advised(SLEEPS, SLEEPS, cores=1) == (16, False)
    found = forecast.advise(0.1, SLEEPS, SLEEPS, 1)
    assert "waits 100% of its time" in found.reason


def test_python_code_is_for_processes_one_to_a_core():
    assert _advised(LOOPS, COMPUTES, cores=2) == (2, True)
    assert _advised(LOOPS, COMPUTES, cores=6) == (6, True)
    found = forecast.advise(0.01, LOOPS, COMPUTES, 2, held=0.97)
    assert "held 97% of the time" in found.reason
    assert "there are 2" in found.reason


def test_code_that_lets_go_of_the_lock_is_for_threads():
    assert _advised(COMPUTES, COMPUTES, cores=2) == (2, False)


@pytest.mark.parametrize("threads", [LOOPS, COMPUTES])
def test_one_core_is_for_one_worker_that_computes(threads):
    assert _advised(threads, COMPUTES, cores=1) == (1, False)
    # A little of it was not accounted for as computing.
    hazy = dataclasses.replace(COMPUTES, cpu_s=0.008, idle_s=0.002)
    assert _advised(hazy, hazy, cores=1) == (1, False)


def test_without_processes_python_code_is_for_one_thread():
    assert _advised(LOOPS, None, cores=8) == (1, False)
    reason = forecast.advise(0.01, LOOPS, None, 8, held=0.9).reason
    assert "take turns" in reason
    assert "processes bring no more" not in reason


def test_batches_that_cost_less_than_handing_over_are_built_inline():
    costs = BuildCosts(cpu_s=1e-5, idle_s=0.0, take_s=1e-4)
    assert _advised(costs, costs, cores=2) == (0, False)


def test_a_disk_that_serves_one_at_a_time_needs_no_more_than_one_worker():
    costs = BuildCosts(cpu_s=1e-4, idle_s=0.1, second_idle_s=0.2)
    assert _advised(costs, costs, cores=4) == (1, False)
    assert "such as a disk" in forecast.advise(0.1, costs, costs, 4).reason
