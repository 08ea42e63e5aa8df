"""The recommended call, on simulated loads: nearly the best, and as forecast.

`python -m benchmarks.advice` shows the same in real trainings.
"""

from __future__ import annotations

import dataclasses
import re

import pytest
from simulated_loads import (
    HAND_OVER_S,
    INLINE,
    LOADS,
    QUEUE,
    Load,
    quickest_s,
    run,
)

from keras_fastdata.engine.tuner import Tuner, WorkerConfigChoice
from keras_fastdata.health.facts import Facts
from keras_fastdata.health.verdict import judge
from keras_fastdata.metrics.worker_kinds import WorkerKind

BATCHES = 400
STARTS = {
    "inline": INLINE,
    "thread": WorkerConfigChoice(2, False),
    "process": WorkerConfigChoice(2, True),
}
# A build holds Python's lock in a worker process; nobody outside can tell.
UNSEEN = {("huge batches", "process"), ("memory copies", "process")}
PIPELINES = LOADS | {
    "sleep 5 ms": Load(waits_s=0.005, native_s=1e-4),
    "sleep 20 ms": Load(waits_s=0.02, native_s=1e-4),
    "sleep 100 ms": Load(waits_s=0.1, native_s=1e-4),
    "Python 50 ms": Load(python_s=0.05, step_cpu_s=5e-4),
    "native 5 ms": Load(native_s=0.005, step_cpu_s=5e-4),
    "native 50 ms": Load(native_s=0.05, step_cpu_s=5e-4),
    "memory copies": Load(native_s=0.005, store_s=0.004),
    "tiny steps": Load(native_s=2e-6, step_s=3e-4, step_cpu_s=2e-4),
}
del PIPELINES["no step"]  # which is about handing over alone


def measured(load, choice, cores, others=0.0):
    """What LoaderHealth measures of an epoch.

    `others`: cores that other programs keep busy.
    """
    ours = cores if not others else cores / 2
    period_s = load.period_s(choice, ours)
    cpu_s, step_s = load.cpu_s(choice), load.step_s + load.step_cpu_s
    took_s, delay_s = load.build_s(choice), 0.0
    if choice.workers and period_s > step_s + HAND_OVER_S:
        extra_s = choice.workers * period_s - took_s
        took_s += extra_s
        used_s = cpu_s + load.step_cpu_s + HAND_OVER_S
        if used_s / ours >= period_s * 0.999:
            delay_s = extra_s
    store_s = load.store_s if choice.are_processes else 0.0
    in_trainer_s = load.step_cpu_s + HAND_OVER_S
    if not choice.are_processes:
        in_trainer_s += cpu_s
    python_s = load.python_s + load.step_cpu_s
    busy_cores = others + (cpu_s + load.step_cpu_s) / period_s
    return Facts(
        workers_are=WorkerKind.local(*choice[:2]),
        workers=choice.workers,
        max_queue_size=10,
        batches=BATCHES,
        nbytes=int(BATCHES * load.store_s * 2e9),
        wall_s=BATCHES * period_s,
        free_s=BATCHES * step_s,
        build_s=BATCHES * (took_s - store_s),
        cpu_s=BATCHES * cpu_s,
        delay_s=BATCHES * delay_s,
        store_s=BATCHES * store_s,
        open_s=0.0,
        wait_s=BATCHES * (period_s - step_s),
        build_s_p50=took_s - store_s,
        first_wait_s=0.0,
        hook_s=0.0,
        retried=0,
        retried_wait_s=0.0,
        restarts=0,
        slowest=(),
        cores=cores,
        busy_cores=min(cores, busy_cores),
        gil_held=min(1.0, python_s / period_s),
        trainer_cpu_s=BATCHES * in_trainer_s,
    )


def choice_of(call, present, load, cores):
    """The workers of a recommended call; the present ones without a call."""
    if not call:
        return present
    if 'workers="auto"' in call:
        tuner = Tuner(cores, QUEUE)
        run(tuner, load, cores, 300)
        return tuner.choice
    workers = int(re.search(r"workers=(\d+)", call)[1])
    return WorkerConfigChoice(workers, "use_multiprocessing" in call)


@pytest.mark.parametrize("cores", [1, 2, 8])
@pytest.mark.parametrize(
    ("name", "start"),
    sorted({(name, start) for name in PIPELINES for start in STARTS} - UNSEEN),
)
def test_the_recommended_call_is_nearly_the_best_and_as_forecast(
    name, start, cores
):
    load, present = PIPELINES[name], STARTS[start]
    verdict = judge(measured(load, present, cores))
    choice = choice_of(verdict.call, present, load, cores)
    came_s = load.period_s(choice, cores)
    assert came_s <= 1.25 * quickest_s(load, cores, 16), verdict
    if verdict.call and "auto" not in verdict.call:
        forecast_s = verdict.forecast_s / BATCHES
        assert forecast_s == pytest.approx(came_s, rel=0.2), verdict


def test_time_that_threads_lose_with_the_lock_is_not_forecast_of_processes():
    load = Load(python_s=0.005, step_cpu_s=5e-4)
    facts = measured(load, STARTS["thread"], 2)
    lost_s = 0.35 * facts.wall_s
    verdict = judge(
        dataclasses.replace(
            facts,
            wall_s=facts.wall_s + lost_s,
            wait_s=facts.wait_s + lost_s,
            gil_held=facts.gil_held / 1.35,
        )
    )
    choice = choice_of(verdict.call, STARTS["thread"], load, 2)
    assert choice.are_processes
    came_s = load.period_s(choice, 2)
    assert verdict.forecast_s / BATCHES == pytest.approx(came_s, rel=0.2)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", ["sleep 5 ms", "sleep 20 ms", "sleep 100 ms"])
def test_builds_that_wait_are_answered_as_well_beside_busy_loops(name, start):
    load, present = PIPELINES[name], STARTS[start]
    verdict = judge(measured(load, present, 2, others=2.0))
    came_s = load.period_s(choice_of(verdict.call, present, load, 1), 1)
    assert came_s <= 1.25 * quickest_s(load, 1, 16), verdict
    assert verdict.forecast_s / BATCHES == pytest.approx(came_s, rel=0.2)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", PIPELINES)
def test_each_further_call_is_quicker_than_the_one_before(name, start):
    load, present = PIPELINES[name], STARTS[start]
    for _ in range(5):
        verdict = judge(measured(load, present, 2))
        if not verdict.call:
            return
        before, present = present, choice_of(verdict.call, present, load, 2)
        if "auto" in verdict.call:
            assert load.period_s(present, 2) <= load.period_s(before, 2)
            return  # it keeps what is quick enough
        assert load.period_s(present, 2) < 0.97 * load.period_s(before, 2)
    pytest.fail(f"There is always another call: {verdict}")
