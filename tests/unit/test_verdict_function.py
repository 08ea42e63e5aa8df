"""Verdicts as a function of figures, without a `fit`.

`test_verdicts` shows the same in real ones.
"""

from __future__ import annotations

import dataclasses
import math
import re

import places
import pytest
from health_records import BUSY_BUILDER, simulated_record
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_fastdata.callbacks.loader_health import _describe
from keras_fastdata.health.account import TimeAccount
from keras_fastdata.health.advised_workers import other_workers
from keras_fastdata.health.comparison import Figures
from keras_fastdata.health.facts import Facts
from keras_fastdata.health.hot_lines import HotLine
from keras_fastdata.health.reasons import Kind, kind_after, kind_of
from keras_fastdata.health.summary import summarize
from keras_fastdata.health.verdict import judge
from keras_fastdata.metrics import cost_model, formatting
from keras_fastdata.metrics.cost_model import Costs
from keras_fastdata.metrics.pool_stats import TuningDecision
from keras_fastdata.metrics.recorder import Slow
from keras_fastdata.metrics.worker_kinds import WorkerKind, WorkerLimit

LOCAL = [kind for kind in WorkerKind if kind is not WorkerKind.RAY]
EPOCH = simulated_record(epochs=1).summary.epochs[0]


def facts(**changes):
    return dataclasses.replace(BUSY_BUILDER, **changes)


IDLE = {"cpu_s": 0.1, "delay_s": 0.0}
FULL = {"cores": 2, "busy_cores": 1.98}
RAY = {
    "workers_are": WorkerKind.RAY,
    "workers": 4,
    "cores": 64,
    "busy_cores": None,
}
THREADS = {"workers_are": WorkerKind.THREAD, "workers": 4, "gil_held": 0.9}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("compute_bound", {"free_s": 9.5}),
        ("compute_bound", {"free_s": 10.5}),
        ("build_cpu_bound", {}),
        ("build_cpu_bound", {"workers_are": WorkerKind.INLINE, "workers": 0}),
        (
            "build_cpu_bound",
            {"workers_are": WorkerKind.THREAD, "gil_held": 0.9},
        ),
        ("build_cpu_bound", {"busy_cores": None}),
        ("build_cpu_bound", THREADS | {"gil_held": 0.1}),
        ("build_cpu_bound", THREADS | {"cpu_s": 25.0, "build_s": 30.0}),
        ("build_cpu_bound", {"cpu_s": 4.0, "delay_s": 5.0}),
        ("gil_bound", THREADS),
        ("gil_bound", THREADS | {"cpu_s": 2.0}),
        ("io_bound", IDLE),
        ("io_bound", IDLE | FULL),
        ("io_bound", IDLE | {"workers_are": WorkerKind.THREAD, "workers": 4}),
        ("cores_full", FULL),
        ("cores_full", FULL | THREADS),
        ("cores_full", FULL | {"workers_are": WorkerKind.INLINE, "workers": 0}),
        ("cores_full", {"cores": 64, "busy_cores": 60.0}),
        ("cores_full", {"cores": 1, "busy_cores": 0.8}),
        ("transfer_bound", {"store_s": 12.0}),
        ("transfer_bound", RAY | {"build_s": 9.0}),
        ("build_cpu_bound", RAY | {"build_s": 35.0, "cpu_s": 34.0}),
        ("io_bound", RAY | {"build_s": 35.0, "cpu_s": 0.5}),
        ("transfer_bound", {"build_s": 1.0, "open_s": 0.5, "store_s": 0.6}),
        ("stragglers", {"slowest": (Slow(4.0, 17, 3.0), Slow(3, 9, 2.5))}),
        (
            "stragglers",  # one of which comes first
            {"slowest": (Slow(5.0, 17, 5.0),), "first_wait_s": 5.0},
        ),
        ("late_start", {"first_wait_s": 5.0}),
        ("late_start", {"hook_s": 5.0}),
        ("too_few_batches", {"batches": 4, "workers": 4}),
        ("unstable_workers", {"restarts": 3, "retried_wait_s": 3.0}),
        ("unstable_workers", {"restarts": 20}),
        ("unstable_workers", {"restarts": 1, "retried_wait_s": 5.0}),
        ("build_cpu_bound", {"restarts": 1, "retried_wait_s": 0.5}),
    ],
)
def test_figures_speak_for_a_reason(kind, changes):
    assert judge(facts(**changes)).kind == kind


SAID = "0.3 with training, 0.9 with builds, 0.8 with other programs."


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, f"2.0 of 2 cores were busy: {SAID}"),
        # Threads build in the process that trains.
        ({"workers_are": WorkerKind.THREAD, "trainer_cpu_s": 12.0}, SAID),
        # Some batches were built before the measurement began.
        (
            {"elapsed_s": 5.0},
            "0.5 with training, 1.5 with builds, 0.0 with other programs.",
        ),
        (
            {"trainer_cpu_s": math.nan},
            "with this, with training and with whatever else runs there.",
        ),
    ],
)
def test_full_cores_are_said_to_be_busy_with_training_builds_or_others(
    changes, told
):
    known = {"cpu_s": 9.0, "trainer_cpu_s": 3.0, "elapsed_s": 10.0}
    verdict = judge(facts(**FULL | known | changes))
    assert told in verdict.evidence
    # The other programs have 40% of the cores, if they are known to have any.
    advises = verdict.advice.startswith(OTHERS)
    assert advises == ("0.8 with other programs" in told)


OTHERS = "Other programs use 0.8 of 2 cores: end them, or wait for their end. "
CROWDED = FULL | {"cpu_s": 9.0, "trainer_cpu_s": 3.0, "elapsed_s": 10.0}


@pytest.mark.parametrize("kind", Kind)
def test_other_programs_that_fill_the_cores_are_told_for_each_reason(kind):
    slow = (Slow(4.0, 17, 3.0),)
    verdict = judge(facts(**CROWDED, slowest=slow), kind)
    assert OTHERS.strip() == verdict.others
    # A call that helps in any case comes first.
    begins, ends = verdict.advice.startswith, verdict.advice.endswith
    helps = not math.isnan(verdict.forecast_s)
    assert (ends if helps else begins)(verdict.others)
    idle = judge(facts(**CROWDED | {"cores": 8}, slowest=slow), kind)
    assert (idle.others, "Other programs" in str(idle)) == ("", False)


def test_other_programs_are_told_where_there_is_nothing_else_to_change():
    little = facts(**CROWDED, wall_s=10.0, free_s=8.9, wait_s=1.0)
    account = TimeAccount(steps_s=1000.0)
    (finding,) = summarize([health(0, little)], [], None, account).findings
    assert finding.advice.startswith(f"{OTHERS}Nothing to change in the data")


def test_steps_that_builds_slow_down_are_told():
    slower = facts(wait_s=5.0)
    assert slower.slowed_s == pytest.approx(3.0)
    told = (
        "the steps alone 2.0 s. 3.0 s of an epoch's 8.0 s of waiting are "
        "slower steps: workers use cores and memory meanwhile, so a step takes "
        "50.0 ms instead of 20.0 ms."
    )
    assert judge(slower).evidence.endswith(told)
    both = changed(
        slower, wall_s=20.0, free_s=4.0, wait_s=10.0, epochs=2, batches=200
    )
    assert judge(both).evidence.endswith(told)
    assert "slower steps" not in judge(facts()).evidence
    assert "slower steps" not in judge(facts(free_s=9.5, wait_s=0)).evidence


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (FULL, "workers use the cores meanwhile"),
        (
            FULL | {"workers_are": WorkerKind.INLINE, "workers": 0},
            "builds use the cores meanwhile",
        ),
        (THREADS, "threads that build hold Python's lock (the GIL) meanwhile"),
    ],
)
def test_it_is_said_what_slows_the_steps_down(changes, why):
    assert f": {why}, so a step" in judge(facts(**changes, wait_s=5)).evidence


def test_cheaper_builds_are_advised_where_most_of_the_waiting_is_slow_steps():
    words = "Make builds cheaper, which leaves more of the cores to the steps:"
    assert words in judge(facts(**FULL, wait_s=1.0)).advice
    assert words not in judge(facts(**FULL)).advice
    threads = facts(**FULL | THREADS, wait_s=1.0)
    words = "Use processes (`use_multiprocessing=True`), which have locks of"
    assert words in judge(threads).advice
    assert "cheaper, which leaves Python's lock" in judge(threads).advice
    alone = changed(threads, limit=WorkerLimit(1, False, "Pass a function."))
    assert words not in judge(alone).advice
    assert "Make builds cheaper:" in judge(facts(**FULL)).advice


def test_the_headline_and_the_line_of_an_epoch_have_the_slower_steps():
    slower = health(0, facts(**FULL, wait_s=1.0))
    (finding,) = summarize([slower], []).findings
    told = ", 7.0 s of it in steps that builds slow down"
    assert finding.headline == f"Training waited 8.0 s of 10.0 s for data{told}"
    line = " ".join(_describe(slower, 0).split())
    assert line.endswith(f"for data (80%, cores_full){told}.")
    waits = health(0, facts(**FULL))
    assert "of it" not in summarize([waits], []).findings[0].headline
    assert "of it" not in _describe(waits, 0)
    # Most of a little waiting is little.
    little = health(0, facts(free_s=9.7, wait_s=0.1))
    assert "of it" not in _describe(little, 0)


def test_it_is_named_which_epochs_a_duration_is_of():
    (finding,) = summarize([health(0, facts())], []).findings
    told = "Steps and waits of epoch 1 take 10.0 s, the steps alone 2.0 s."
    assert finding.evidence.endswith(told)
    epochs = [health(number, facts()) for number in range(3)]
    told = "an epoch take 10.0 s on average (epochs 2 and 3), the steps alone"
    assert told in summarize(epochs, []).findings[0].evidence
    epochs = [health(number, facts()) for number in range(5)]
    told = "on average (epochs 3 to 5)"
    assert told in summarize(epochs, []).findings[0].evidence
    validations = [
        dataclasses.replace(
            health(number, facts(phase="validation")), phase="validation"
        )
        for number in (1, 3, 5, 7)
    ]
    verdict = summarize(epochs, validations).validation_verdict
    assert "of a validation take 10.0 s on average (validations 6 and 8)" in (
        verdict.evidence
    )
    alone = dataclasses.replace(
        health(0, facts(phase="evaluate")), phase="evaluate"
    )
    (finding,) = summarize([alone], []).findings
    assert "Steps and waits of the evaluation take 10.0 s" in finding.evidence


def test_the_ceiling_is_told_in_seconds_and_as_a_factor():
    verdict = judge(facts())
    assert verdict.ceiling_speedup == 5.0
    assert verdict.evidence.endswith(
        "Steps and waits of an epoch take 10.0 s, the steps alone 2.0 s."
    )


def test_free_cores_are_what_workers_are_advised_for():
    advice = judge(facts()).advice
    assert "`MyDataset(..., workers=5, use_multiprocessing=True)`" in advice
    assert "about 2.0 s instead of 10.0 s" in advice
    crowded = judge(facts(busy_cores=6.0)).advice
    assert "`MyDataset(..., workers=3, use_multiprocessing=True)`" in crowded


def advised_workers(**changes):
    return int(re.search(r"workers=(\d+)", judge(facts(**changes)).advice)[1])


def test_threads_that_compute_side_by_side_get_more_threads():
    threads = THREADS | {"gil_held": 0.1, "cpu_s": 25.0, "build_s": 30.0}
    advice = judge(facts(**threads, cores=8, busy_cores=3.3)).advice
    assert "use_multiprocessing" not in advice
    assert advised_workers(**threads, cores=8, busy_cores=3.3) > 4


def test_builds_that_compute_now_and_then_get_no_more_workers_than_cores_bear():
    builds = {"build_s": 9.5, "cpu_s": 4.0, "delay_s": 0.5, "free_s": 0.2}
    assert judge(facts(**builds, **FULL)).kind == "cores_full"
    assert advised_workers(**builds, cores=2, busy_cores=1.0) <= 6


@pytest.mark.parametrize("queue", [4, 1000])
def test_a_queue_that_is_too_short_for_the_workers_is_told_with_them(queue):
    advice = judge(facts(max_queue_size=queue)).advice
    assert ("max_queue_size=10)`" in advice) == (queue == 4)


# Of 65 batches, each 13th takes 0.3 s to build, and the others 2 ms.
STRAGGLERS = facts(
    workers_are=WorkerKind.THREAD,
    workers=2,
    batches=65,
    nbytes=65_000_000,
    wall_s=1.52,
    free_s=0.13,
    build_s=1.62,
    cpu_s=0.01,
    delay_s=0.0,
    store_s=0.0,
    wait_s=1.4,
    build_s_p50=0.002,
    first_wait_s=0.002,
    slowest=tuple(Slow(0.3, 13 * n, 0.28) for n in range(5)),
)


def test_stragglers_get_a_queue_that_bridges_them_and_a_forecast():
    verdict = judge(STRAGGLERS)
    assert verdict.kind == "stragglers"
    assert verdict.call == "MyDataset(..., workers=16, max_queue_size=65)"
    # In an epoch, one straggler is waited for, while all others are built.
    assert verdict.forecast_s == pytest.approx(0.3)
    assert "1.0 MB of memory" in verdict.advice
    long = judge(changed(STRAGGLERS, **tenfold(STRAGGLERS)))
    assert "max_queue_size=149" in long.call


def tenfold(measured):
    """An epoch that is ten times as long, with as many stragglers known."""
    names = ("batches", "nbytes", "wall_s", "free_s", "build_s", "cpu_s")
    return {name: 10 * getattr(measured, name) for name in names} | {
        "wait_s": 13.89,
        "slowest": tuple(Slow(0.3, 13 * n, 0.28) for n in range(32)),
    }


def test_slow_batches_are_named():
    verdict = judge(facts(slowest=(Slow(4.0, 17, 3.0), Slow(3.0, 9, 2.5))))
    assert "2 batches (index 17, 9) took up to 4.0 s" in verdict.evidence
    assert "max_queue_size=" in verdict.advice


def test_memory_is_told_where_workers_die():
    verdict = judge(facts(restarts=20, memory="Now 1.0 of 16.0 GiB are free."))
    assert verdict.advice.endswith("Now 1.0 of 16.0 GiB are free.")


SECONDS = st.floats(0, 1e5)
FACTS = st.builds(
    Facts,
    workers_are=st.sampled_from(LOCAL),
    workers=st.integers(0, 64),
    max_queue_size=st.integers(1, 1000),
    batches=st.integers(1, 10**9),
    nbytes=st.integers(0, 10**15),
    wall_s=SECONDS,
    free_s=SECONDS,
    build_s=SECONDS,
    cpu_s=SECONDS,
    delay_s=SECONDS,
    store_s=SECONDS,
    open_s=SECONDS,
    wait_s=SECONDS,
    build_s_p50=SECONDS,
    first_wait_s=SECONDS,
    hook_s=SECONDS,
    retried=st.integers(0, 100),
    retried_wait_s=SECONDS,
    restarts=st.integers(0, 100),
    slowest=st.lists(
        st.builds(Slow, SECONDS, st.integers(0, 10**9), SECONDS), max_size=3
    ).map(tuple),
    cores=st.floats(0.1, 256),
    busy_cores=st.none() | st.floats(0, 256),
    gil_held=st.floats(0, 1) | st.just(math.nan),
)


@settings(max_examples=500 if places.FULL else 100)
@given(FACTS)
def test_whatever_was_measured_there_is_one_verdict_in_words(measured):
    verdict = judge(measured)
    assert verdict.kind in set(Kind)
    assert verdict.ceiling_speedup >= 1
    assert verdict.evidence.endswith(".")
    assert verdict.advice.endswith(".")
    assert str(verdict).startswith(f"{verdict.kind}: ")
    assert "free data" not in str(verdict).lower()


@settings(max_examples=500 if places.FULL else 100)
@given(FACTS)
def test_computing_on_full_cores_is_never_answered_by_more_workers(measured):
    full = dataclasses.replace(measured, busy_cores=measured.cores)
    verdict = judge(full)
    more_workers = re.search(r"workers=(\d+)", verdict.advice)
    if verdict.kind in ("build_cpu_bound", "gil_bound", "cores_full"):
        assert verdict.kind == "cores_full"
        assert more_workers is None


@pytest.mark.parametrize("kind", Kind)
def test_the_lines_of_a_fit_fit_80_columns(kind):
    verdict = dataclasses.replace(judge(SLEEPERS), kind=kind)
    long = dataclasses.replace(EPOCH, wall_s=5000.0, verdict=verdict, epoch=998)
    long = dataclasses.replace(long, account=TimeAccount(steps_s=5000.0))
    validation = dataclasses.replace(long, wall_s=4000.0, phase="validation")
    lines = _describe(long, skipped=1234).splitlines()
    assert max(map(len, lines)) <= 80
    text = str(summarize([long] * 30, [validation] * 30, None, long.account))
    assert max(map(len, text.splitlines())) <= 80


# -- words -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.000012, "0.012 ms"),
        (0.0123, "12.3 ms"),
        (0.9994, "999 ms"),
        (1.234, "1.2 s"),
        (12.34, "12.3 s"),
        (123.4, "123 s"),
        (754, "13 min"),
        (4321, "1 h 12 min"),
        (math.nan, "?"),
    ],
)
def test_durations_have_units_and_few_digits(seconds, text):
    assert formatting.duration(seconds) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (512, "512 B"), (38_535_168, "38.5 MB"), (2e15, "2,000 TB")],
)
def test_sizes_have_units_and_few_digits(nbytes, text):
    assert formatting.size(nbytes) == text


def test_one_batch_is_not_one_batches():
    assert formatting.count(1, "batch") == "1 batch"
    assert formatting.count(2, "batch") == "2 batches"
    assert formatting.count(1234, "time") == "1,234 times"


def test_advice_for_workers_on_ray_is_about_those():
    busy = facts(**RAY | {"build_s": 35.0, "cpu_s": 34.0})
    assert "there are 64 cores" in judge(busy).evidence
    assert "`MyDataset(..., workers=18, " in judge(busy).advice
    assert "use_multiprocessing" not in judge(busy).advice
    idle = judge(facts(**RAY | {"build_s": 9.0}))
    assert "4 workers build 22% of the time" in idle.evidence
    assert "`executor='local'`" in idle.advice


@pytest.mark.parametrize("workers_are", [WorkerKind.THREAD, WorkerKind.PROCESS])
def test_no_more_workers_are_advised_than_have_something_to_do(workers_are):
    few = facts(
        workers_are=workers_are,
        batches=6,
        build_s=9.0,
        build_s_p50=1.5,
        free_s=0.1,
        cpu_s=0.1 if workers_are is WorkerKind.THREAD else 8.9,
        cores=64,
    )
    advice = judge(few).advice
    (workers,) = re.findall(r"workers=(\d+)", advice)
    assert int(workers) == 5
    assert "about 2.0 s instead of 10.0 s" in advice


def test_no_gain_is_promised_that_the_cores_do_not_have():
    full = facts(cores=2, busy_cores=1.0, cpu_s=9.0, build_s=9.0)
    assert "about 5.3 s instead of 10.0 s" in judge(full).advice


# -- what is promised ----------------------------------------------------------

# Of 100 batches in an epoch; 20 ms of sleep, or 50 ms of computing, in each.
SLEEPERS = facts(
    workers=2,
    wall_s=1.1,
    free_s=0.1,
    build_s=2.15,
    cpu_s=0.02,
    delay_s=0.13,
    store_s=0.01,
    wait_s=1.0,
    build_s_p50=0.0215,
    first_wait_s=0.02,
    cores=2,
    busy_cores=0.4,
    slowest=(),
    trainer_cpu_s=0.1,
    dataset="Sleepers",
)


def changed(measured, **changes):
    return dataclasses.replace(measured, **changes)


def test_time_without_a_core_is_not_taken_for_computing():
    """Free cores divide computing alone: blocked time is for many workers."""
    for delay_s in (0.0, 0.13, 0.6):
        verdict = judge(changed(SLEEPERS, delay_s=delay_s))
        assert verdict.kind == "io_bound"
        assert "workers=16, use_multiprocessing=True" in verdict.call
        assert 0.6 < verdict.saves_s < 1.0


def test_busy_loops_beside_it_do_not_hide_that_builds_are_blocked():
    beside = changed(
        SLEEPERS, busy_cores=2.0, delay_s=0.5, build_s=2.6, wall_s=1.35
    )
    verdict = judge(beside)
    assert verdict.kind == "io_bound"
    assert "workers=16, use_multiprocessing=True" in verdict.call


def test_builds_that_wait_get_an_even_share_of_cores_that_others_use():
    waits = changed(SLEEPERS, cores=2, cpu_s=0.11, wall_s=1.1, delay_s=0.0)
    assert waits.step_cpu_s == pytest.approx(0.1)
    used = 0.21 / 1.1
    for others, share in ((0.0, 2.0), (1.0, 4 / 3), (2 - used, 1.05)):
        beside = changed(waits, busy_cores=used + others)
        assert beside.our_cores == pytest.approx(share, rel=0.01)
    # Builds that compute get no more than is free, and what they used.
    computes = changed(waits, cpu_s=2.0, busy_cores=2.0, wall_s=2.0)
    assert computes.our_cores == pytest.approx((2.0 + 0.1) / 2.0)
    assert changed(computes, cpu_s=0.5, build_s=0.6).our_cores < 1


def test_builds_that_compute_on_full_cores_get_no_more_workers():
    beside = changed(
        SLEEPERS,
        busy_cores=2.0,
        cpu_s=5.0,
        delay_s=5.0,
        build_s=10.0,
        build_s_p50=0.1,
        wall_s=5.5,
    )
    verdict = judge(beside)
    assert (verdict.kind, verdict.call) == ("cores_full", "")


# 5 ms of computing in each build, beside three loops of other programs.
BESIDE_LOOPS = changed(
    SLEEPERS,
    busy_cores=2.0,
    cpu_s=0.5,
    delay_s=0.7,
    build_s=1.2,
    build_s_p50=0.012,
    wall_s=0.8,
    wait_s=0.6,
    elapsed_s=0.8,
)


@pytest.mark.parametrize("workers_are", LOCAL)
def test_beside_busy_programs_processes_are_to_be_tried_without_a_forecast(
    workers_are,
):
    in_trainer_s = 0.1 + 0.5 * (not workers_are.has_copies)
    measured = changed(
        BESIDE_LOOPS,
        workers_are=workers_are,
        workers=0 if workers_are is WorkerKind.INLINE else 2,
        trainer_cpu_s=in_trainer_s,
    )
    verdict = judge(measured)
    assert verdict.kind == "cores_full"
    assert verdict.call == (
        "Sleepers(..., workers=16, use_multiprocessing=True, max_queue_size=32)"
    )
    assert math.isnan(verdict.forecast_s)
    assert verdict.advice.startswith(f"{verdict.others} Or try `Sleepers(")
    assert "instead of" not in verdict.advice
    # It is no such advice where these processes are there already,
    there = changed(BESIDE_LOOPS, workers=16)
    assert (judge(there).kind, judge(there).call) == ("cores_full", "")
    # where no other program computes, or where there can be no processes.
    alone = changed(measured, busy_cores=2.0, elapsed_s=0.31)
    assert (judge(alone).kind, judge(alone).call) == ("cores_full", "")
    limit = WorkerLimit(are_processes=False)
    assert judge(changed(measured, limit=limit)).call == ""


def test_threads_that_wait_for_a_core_beside_a_free_one_get_processes():
    """As threads beside PyTorch's steps, which share Python's lock."""
    threads = changed(
        SLEEPERS,
        workers_are=WorkerKind.THREAD,
        nbytes=100_000,
        wall_s=0.48,
        free_s=0.25,
        build_s=0.98,
        cpu_s=0.52,
        delay_s=0.33,
        store_s=0.0,
        wait_s=0.12,
        build_s_p50=0.0098,
        first_wait_s=0.001,
        busy_cores=1.35,
        trainer_cpu_s=0.7,
        elapsed_s=0.48,
        gil_held=0.05,
    )
    verdict = judge(threads)
    assert verdict.kind == "build_cpu_bound"
    assert "use_multiprocessing=True" in verdict.call
    # What the threads lost is not expected of processes.
    assert verdict.forecast_s == pytest.approx(0.35, rel=0.05)
    busy = judge(changed(threads, delay_s=0.05))
    assert "use_multiprocessing=True" not in busy.call


def test_processes_not_threads_compute_beside_steps_that_hold_the_lock():
    inline = changed(
        SLEEPERS,
        workers_are=WorkerKind.INLINE,
        workers=0,
        wall_s=0.78,
        free_s=0.25,
        build_s=0.52,
        cpu_s=0.52,
        delay_s=0.0,
        store_s=0.0,
        wait_s=0.53,
        build_s_p50=0.0052,
        busy_cores=0.9,
        trainer_cpu_s=0.67,
        elapsed_s=0.78,
    )
    calls = [judge(changed(inline, gil_held=held)).call for held in (0, 0.1)]
    assert calls == [
        "Sleepers(..., workers=2)",
        "Sleepers(..., workers=2, use_multiprocessing=True)",
    ]


def test_steps_are_forecast_to_be_quicker_without_waits_between_them():
    steps = changed(SLEEPERS, wall_s=1.25, free_s=0.25)
    assert steps.in_a_row_s == pytest.approx(0.25 - 100 * 0.0003)
    short = changed(SLEEPERS, free_s=0.05)
    assert short.in_a_row_s == pytest.approx(0.85 * 0.05)
    ready = changed(SLEEPERS, wait_s=0.0)
    assert ready.in_a_row_s == ready.free_s
    full = changed(steps, busy_cores=2.0)
    assert full.in_a_row_s == full.free_s
    # Few steps follow a wait where a few batches are slow.
    slow = changed(STRAGGLERS, wall_s=1.53)
    assert slow.in_a_row_s == slow.free_s


def test_steps_that_run_in_the_background_overlap_when_in_a_row():
    # Starting all steps takes 0.1 s; each is known from its start to its end.
    steps = changed(SLEEPERS, busy_cores=2.0, free_s=0.12)
    assert steps.in_a_row_s == pytest.approx(0.1)
    # Steps of a slow device cannot overlap more than they are started.
    device = changed(SLEEPERS, busy_cores=2.0, free_s=0.9)
    assert device.in_a_row_s == pytest.approx(0.8)


def test_handing_over_tiny_batches_counts_as_moving_them():
    tiny = changed(TINY, build_s=0.06, cpu_s=0.08, take_s=math.nan)
    assert judge(tiny).kind != "transfer_bound"
    assert judge(changed(tiny, take_s=3e-5)).kind == "transfer_bound"


def test_the_advice_of_a_profile_and_of_a_fit_is_the_same():
    """From the same costs, where steps take no time."""
    per_batch = Costs(cpu_s=2e-4, blocked_s=0.02, take_s=4e-5)
    threads = dataclasses.replace(per_batch, lock_s=2e-4)
    kinds = {False: threads, True: per_batch}
    workers, are_processes, _ = cost_model.choose(kinds, 2.0, 16, True)
    told = cost_model.call("Sleepers", workers, are_processes, 2 * workers)
    assert judge(changed(SLEEPERS, free_s=0.0)).call == told


def test_steps_that_compute_on_the_same_cores_limit_what_is_promised():
    # Two seconds of CPU time in steps that take one second, on two cores.
    computes = facts(cores=2, busy_cores=1.2, trainer_cpu_s=2.0, free_s=1.0)
    _, alone_s = other_workers(changed(computes, trainer_cpu_s=0.0))
    _, together_s = other_workers(computes)
    assert together_s > alone_s
    assert together_s >= (9.3 + 2.0) / 2


def test_advice_keeps_to_the_workers_that_a_dataset_can_use():
    sleepers = changed(SLEEPERS, workers_are=WorkerKind.THREAD, workers=1)
    assert "workers=16" in judge(sleepers).call
    two = changed(sleepers, limit=WorkerLimit(2, True, "Raise `num_shards`."))
    assert judge(two).call == "Sleepers(..., workers=2)"
    one = changed(sleepers, limit=WorkerLimit(1, False, "Pass a function."))
    verdict = judge(one)
    assert (verdict.kind, verdict.call) == ("io_bound", "")
    assert "Pass a function. Then use `Sleepers(..., workers=1" in (
        verdict.advice
    )
    assert verdict.saves_s == judge(sleepers).saves_s
    inline = changed(one, workers_are=WorkerKind.INLINE, workers=0, free_s=0.6)
    assert "use_multiprocessing" not in judge(inline).advice


def test_a_fit_whose_workers_were_chosen_by_measuring_gets_no_others():
    verdict = judge(changed(SLEEPERS, auto=True))
    assert verdict.call == ""
    assert '`workers="auto"` has tried other workers.' in verdict.advice


def test_small_batches_are_not_told_to_use_smaller_numbers():
    moving = {"build_s": 1.0, "open_s": 0.5, "store_s": 0.6}
    assert "uint8" in judge(facts(**moving, nbytes=10**9)).advice
    assert "uint8" not in judge(facts(**moving, nbytes=19_200)).advice


def test_a_late_first_batch_is_the_reason_whatever_the_rest_lost():
    late = changed(SLEEPERS, start_s=8.0)
    verdict = judge(late)
    assert verdict.kind == "late_start"
    assert "took 8.0 s" in verdict.evidence
    assert judge(changed(late, free_s=1.09)).kind == "late_start"
    assert judge(changed(late, start_s=0.5)).kind == "io_bound"


@settings(max_examples=500 if places.FULL else 100)
@given(st.data())
def test_no_forecast_is_below_the_steps_nor_above_what_was_measured(data):
    measured = data.draw(FACTS)
    call, forecast_s = other_workers(measured)
    if call:
        assert measured.in_a_row_s <= forecast_s * (1 + 1e-9)
        assert forecast_s <= 0.95 * measured.wall_s * (1 + 1e-9)


# -- a whole fit ---------------------------------------------------------------


def health(number, measured, kind=None):
    return dataclasses.replace(
        EPOCH,
        epoch=number,
        wall_s=measured.wall_s,
        data_wait=measured.data_wait,
        verdict=judge(measured, kind, f"epoch {number + 1}"),
        facts=measured,
    )


def test_after_a_cache_has_filled_the_later_epochs_decide():
    filling = changed(SLEEPERS, wall_s=60.0, build_s=118.0)
    cached = changed(SLEEPERS, wall_s=0.62, free_s=0.6, build_s=0.0)
    epochs = [health(0, filling), health(1, cached), health(2, cached)]
    summary = summarize(epochs, [])
    assert summary.verdict.kind == "compute_bound"
    assert "workers=" not in str(summary)


GIL_BOUND = THREADS | {"cpu_s": 1.5, "busy_cores": 1.2}


def _waiting(share, wall_s=1.5, **changes):
    """Facts of an epoch that waited for a share of its time; cores are full."""
    return facts(
        **FULL | changes,
        wall_s=wall_s,
        free_s=wall_s * (1 - share),
        wait_s=wall_s * share,
        first_wait_s=0.0,
        slowest=(),
    )


@pytest.mark.parametrize(
    ("epochs", "kinds"),
    [
        ([_waiting(w) for w in (0, 0.15, 0.02)], "compute_bound " * 3),
        ([_waiting(w) for w in (0.3, 0.07, 0.3)], "cores_full " * 3),
        (  # for the second time in a row
            [_waiting(w) for w in (0, 0.15, 0.15)],
            "compute_bound compute_bound cores_full",
        ),
        (  # by a second
            [_waiting(w, 60.0) for w in (0, 0.16, 0.02)],
            "compute_bound cores_full compute_bound",
        ),
        (  # but by less than 5%
            [_waiting(w, 60.0) for w in (0.08, 0.12, 0.08)],
            "compute_bound " * 3,
        ),
        (
            [_waiting(w) for w in (0.9, 0, 0)],
            "cores_full compute_bound compute_bound",
        ),
        (
            [_waiting(0.9, busy_cores=busy) for busy in (1.9, 1.6, 1.9)],
            "cores_full " * 3,
        ),
        (
            [_waiting(0.9, cpu_s=s) for s in (2.2, 1.7, 0.5, 1.7)],
            "cores_full cores_full io_bound io_bound",
        ),
        (
            [
                _waiting(0.9, **GIL_BOUND | {"gil_held": held})
                for held in (0.4, 0.32, 0.1)
            ],
            "gil_bound gil_bound io_bound",
        ),
        (
            [_waiting(0.0, start_s=9.0), _waiting(0.0)],
            "late_start compute_bound",
        ),
    ],
)
def test_an_epoch_has_another_verdict_only_if_it_is_clearly_different(
    epochs, kinds
):
    shown = []
    for number, measured in enumerate(epochs):
        kind = kind_of(measured)
        if number:
            kind = kind_after(measured, epochs[number - 1], shown[-1])
        shown.append(kind)
        assert judge(measured, kind).kind is kind
    assert shown == kinds.split()


def test_the_line_of_an_epoch_says_if_it_keeps_the_verdict_of_the_one_before():
    waits = _waiting(0.21)
    line = _describe(health(1, waits, Kind.COMPUTE_BOUND), 0)
    assert line.endswith("for data (21%, still\ncompute_bound).")
    assert "(21%, cores_full)" in _describe(health(1, waits), 0)


def test_a_fit_of_which_no_later_epoch_waits_does_not_wait():
    shares = 0.08, 0.125, 0.08, 0.125  # 0.1025 on average
    epochs = [
        health(number, _waiting(share), Kind.COMPUTE_BOUND)
        for number, share in enumerate(shares)
    ]
    verdict = summarize(epochs, []).verdict
    assert verdict.kind is Kind.COMPUTE_BOUND
    assert "1.5 s" in verdict.evidence
    assert "This verdict is on" not in verdict.evidence
    epochs[-1] = health(3, _waiting(0.125))
    assert summarize(epochs, []).verdict.kind is Kind.CORES_FULL


def test_where_later_epochs_have_one_reason_so_have_they_together():
    epochs = [
        health(number, _waiting(share), Kind.CORES_FULL)
        for number, share in enumerate((0.3, 0.11, 0.05))
    ]
    verdict = summarize(epochs, []).verdict  # of 8%, taken together
    assert verdict.kind is Kind.CORES_FULL
    assert "This verdict is on" not in verdict.evidence


def test_a_reason_that_is_not_that_of_each_epoch_says_why():
    shares = 0.6, 0.12, 0.04, 0.08
    kinds = "cores_full", "cores_full", "compute_bound", "cores_full"
    epochs = [
        health(number, _waiting(share), Kind(kind))
        for number, (share, kind) in enumerate(zip(shares, kinds, strict=True))
    ]
    summary = summarize(epochs[:3], [])
    assert summary.verdict.kind == "compute_bound"
    told = (
        "This verdict is on epochs 2 and 3 together: 8% of the time is "
        "waiting. Looked at one by one, epoch 2 is `cores_full`."
    )
    assert summary.verdict.evidence.endswith(told)
    assert summary.findings[0].evidence.endswith(told)
    assert told in " ".join(str(summary).split())
    # After a cache was filled, the later half decides.
    verdict = summarize([epochs[0], epochs[2]], []).verdict
    assert verdict.evidence.endswith(
        "This verdict is on epoch 3: 4% of the time is waiting."
    )


def test_a_late_first_batch_that_decides_says_so():
    late = changed(SLEEPERS, start_s=8.0)
    verdict = summarize([health(0, late), later(1), later(2)], []).verdict
    assert verdict.evidence.endswith(
        "This verdict is on epoch 1, whose first batch was waited for longer "
        "than all others of the fit together."
    )
    assert "For later epochs, such as epochs 2 and 3: Use `" in verdict.advice
    (finding,) = summarize([health(0, late)], []).findings
    assert "This verdict" not in finding.evidence


def test_no_more_is_saved_than_was_waited_where_each_batch_is_slow():
    started = changed(SLEEPERS, start_s=0.9)
    summary = summarize([health(0, started), health(1, SLEEPERS)], [])
    assert summary.verdict.kind == "io_bound"
    waited_s = sum(epoch.waited_s for epoch in summary.epochs)
    costly = dataclasses.replace(summary.verdict, saves_s=9.0)
    assert dataclasses.replace(summary, verdict=costly).saves_s == waited_s


def test_a_late_start_is_saved_once():
    late = changed(IDLE, start_s=2.0, first_wait_s=0.0)
    epochs = [health(0, late), health(1, IDLE), health(2, IDLE)]
    waits = changed(IDLE, free_s=0.6, first_wait_s=0.0, auto=True)
    epochs += [health(number, waits) for number in range(3, 5)]
    summary = summarize(epochs, [])
    assert summary.verdict.kind == "late_start"
    assert summary.saves_s == pytest.approx(2.0)
    late = changed(SLEEPERS, start_s=8.0)
    with_call = summarize([health(0, late), *map(later, (1, 2))], [])
    wins_s = SLEEPERS.wall_s - with_call.verdict.forecast_s
    assert with_call.saves_s == pytest.approx(8.0 + 3 * 0.02 + 2 * wins_s)


def test_what_concerns_every_batch_is_found_from_the_later_epochs():
    """Even if the first batch of the fit cost more than all other waits."""
    few = {"batches": 6, "workers": 4, "slowest": (), "build_s_p50": 1.0}
    first = facts(**few, first_wait_s=5.0, wait_s=8.0)
    assert kind_of(first) == "build_cpu_bound"
    idle = changed(IDLE, batches=6)
    epochs = [health(0, first), *(health(number, idle) for number in (1, 2))]
    assert summarize(epochs, []).verdict.kind is Kind.COMPUTE_BOUND


def test_figures_of_several_epochs_are_told_as_those_of_one():
    changes = {"epochs": 3, "wall_s": 30.0, "free_s": 6.0, "wait_s": 24.0}
    late = judge(facts(**changes, batches=300, first_wait_s=15.0))
    assert late.kind == "late_start"
    assert "The first batch of an epoch was waited for 5.0 s" in late.evidence
    assert "all others together 3.0 s" in late.evidence
    few = judge(facts(**changes, batches=12, workers=4, slowest=()))
    assert few.kind == "too_few_batches"
    assert few.evidence.startswith("4 batches for 4 workers")
    assert "`workers=4` have nothing" in few.advice
    twice = (Slow(8.0, 17, 7.0), Slow(7.5, 17, 6.0))
    slow = judge(facts(**changes, batches=300, slowest=twice))
    assert slow.evidence.startswith("1 batch (index 17) took up to 8.0 s")


def test_little_time_is_not_worth_advice():
    epochs = [health(number, SLEEPERS) for number in range(4)]
    assert "Use `Sleepers(" in str(summarize(epochs, []))
    assert "Use `" not in str(summarize(epochs[:1], []))
    assert "Nothing to change" in str(summarize(epochs[:1], []))


def test_the_first_batch_of_an_epoch_is_late_where_nothing_is_built_ahead():
    _, without_s = other_workers(SLEEPERS)
    for cold in ({"hook_s": 1e-6}, {"phase": "validation"}):
        _, cold_s = other_workers(changed(SLEEPERS, **cold))
        assert cold_s == pytest.approx(without_s + 0.0215, abs=0.003)
    late = changed(SLEEPERS, first_wait_s=0.2215, wall_s=1.3)
    assert other_workers(late)[1] == pytest.approx(without_s + 0.2)


def test_builds_that_take_longer_than_modelled_leave_the_step_as_it_is():
    _, as_modelled_s = other_workers(changed(SLEEPERS, free_s=0.5))
    _, slower_s = other_workers(changed(SLEEPERS, free_s=0.5, wall_s=1.4))
    steps_s = changed(SLEEPERS, free_s=0.5).in_a_row_s
    assert as_modelled_s == pytest.approx(steps_s + 100 * 4e-5)
    assert slower_s == pytest.approx(as_modelled_s)


# 2,000 batches that are at hand, in steps of 0.4 ms.
TINY = facts(
    workers=2,
    batches=2000,
    nbytes=2_000_000,
    wall_s=1.4,
    free_s=0.8,
    build_s=0.004,
    cpu_s=0.02,
    delay_s=0.0,
    store_s=0.02,
    wait_s=0.6,
    build_s_p50=2e-6,
    first_wait_s=0.001,
    slowest=(),
    take_s=0.0003,
)


def test_processes_that_only_hand_over_are_answered_by_threads():
    verdict = judge(TINY)
    assert verdict.kind == "transfer_bound"
    assert verdict.call == "MyDataset(..., workers=1)"
    assert verdict.forecast_s == pytest.approx(0.813, rel=1e-3)
    assert "handing it to training 0.3 ms" in verdict.evidence
    assert "cache" not in verdict.evidence


def test_processes_are_answered_by_threads_that_may_all_need_the_lock():
    copies = facts(workers=4, cores=2, busy_cores=1.5, build_s=6.0, nbytes=1000)
    verdict = judge(changed(copies, store_s=5.9))
    assert verdict.kind == "build_cpu_bound"
    # 34 ms of computing: at worst all of it with the lock.
    assert "use_multiprocessing" not in verdict.call
    assert 0.034 * 1.4 < verdict.forecast_s / 100 < 0.1
    # Without as much to store, threads would compute for longer.
    less = judge(changed(copies, store_s=2.0))
    assert "use_multiprocessing=True" in less.call or not less.call


# 16 MB in each batch, at 3.3 GB/s.
LARGE = facts(
    workers_are=WorkerKind.INLINE,
    workers=0,
    nbytes=1_600_000_000,
    wall_s=0.48,
    free_s=0.3,
    build_s=0.1,
    cpu_s=0.1,
    delay_s=0.0,
    store_s=0.0,
    wait_s=0.12,
    build_s_p50=0.001,
    first_wait_s=0.001,
    slowest=(),
    cores=2,
    busy_cores=0.9,
)


@pytest.mark.parametrize("free_s", [0.3, 0.47])
def test_where_batches_fill_the_memory_bus_auto_is_to_be_tried(free_s):
    verdict = judge(changed(LARGE, free_s=free_s))
    assert verdict.kind in ("build_cpu_bound", "compute_bound")
    assert verdict.call == 'MyDataset(..., workers="auto")'
    assert math.isnan(verdict.forecast_s)
    assert verdict.call in verdict.advice
    assert "gets 3.3 GB of batches a second" in verdict.advice
    assert "instead of" not in verdict.advice


@pytest.mark.parametrize(
    "changes",
    [
        {"auto": True},
        {"nbytes": 300_000_000},
        {"on_cpu": False},  # a device of its own computes the steps
        {"limit": WorkerLimit(most=4)},
    ],
)
def test_elsewhere_auto_is_not_advised(changes):
    for free_s in 0.3, 0.47:
        verdict = judge(changed(LARGE, free_s=free_s, **changes))
        assert "auto" not in verdict.call
        assert "Try" not in verdict.advice


def test_without_the_lock_processes_that_compute_are_answered_by_threads():
    copies = facts(
        workers=4, cores=4, busy_cores=3.0, store_s=5.0, build_s=6.0, cpu_s=10.0
    )
    with_lock, without = judge(copies), judge(changed(copies, has_gil=False))
    assert "workers" not in with_lock.call
    assert re.fullmatch(r"MyDataset\(\.\.\., workers=\d+\)", without.call)


def test_threads_that_hand_over_slowly_are_not_answered_by_processes():
    threads = changed(TINY, workers_are=WorkerKind.THREAD, gil_held=0.0)
    assert judge(threads).call == ""


def test_a_late_start_does_not_hide_what_later_epochs_need():
    late = changed(SLEEPERS, start_s=8.0)
    summary = summarize([health(0, late), *map(later, (1, 2))], [])
    assert summary.verdict.kind == "late_start"
    alone = judge(changed(SLEEPERS, starts_late=True))
    assert summary.verdict.call == alone.call
    assert summary.verdict.forecast_s == alone.forecast_s
    assert summary.verdict.call in summary.verdict.advice


def test_after_a_late_start_of_processes_that_wait_threads_are_advised():
    late = changed(SLEEPERS, start_s=8.0)
    summary = summarize([health(0, late), *map(later, (1, 2))], [])
    assert summary.verdict.call == judge(SLEEPERS).call.replace(
        ", use_multiprocessing=True", ""
    )
    assert "Threads load once what each process" in summary.verdict.advice
    # Without such a start, workers stay processes.
    assert "use_multiprocessing" in judge(SLEEPERS).call


def later(number):
    return health(number, SLEEPERS)


def test_a_late_first_batch_decides_where_it_cost_most():
    late = changed(SLEEPERS, start_s=8.0, wall_s=0.3, free_s=0.28)
    quick = changed(late, start_s=0.0)
    summary = summarize([health(0, late), health(1, quick)], [])
    assert summary.verdict.kind == "late_start"
    assert summary.is_worth_a_change
    (finding,) = summary.findings
    assert (
        finding.headline == "Training waited 8.0 s of 8.6 s for its first batch"
    )
    text = str(summary)
    assert max(map(len, text.splitlines())) <= 80


def validated(training, validation):
    """A summary of three epochs and three validations."""
    epochs = [health(number, training) for number in range(3)]
    validations = [
        dataclasses.replace(health(number, validation), phase="validation")
        for number in range(3)
    ]
    return summarize(epochs, validations)


IDLE = changed(SLEEPERS, free_s=SLEEPERS.wall_s, wait_s=0.0)
IDLE_ADVICE = "A faster model or device would help, faster data would not."


def test_a_validation_that_waits_comes_before_a_training_that_does_not():
    waits = changed(SLEEPERS, phase="validation", dataset="HeldOut")
    summary = validated(IDLE, waits)
    first, second = summary.findings
    assert (first.phase, second.phase) == ("Validation", "Training")
    assert first.verdict == summary.validation_verdict
    assert first.verdict.call.startswith("HeldOut(")
    assert "a validation would take about" in first.advice
    assert first.saves_s > second.saves_s == 0.0
    text = str(summary)
    assert " ".join(text.split()).endswith(first.advice)
    assert text.index("compute_bound: Tr") < text.index("io_bound: Validation")
    # "Faster data would not help" is true of the training data alone.
    assert second.advice not in " ".join(text.split())
    assert IDLE_ADVICE in str(
        validated(IDLE, changed(IDLE, phase="validation"))
    )
    assert max(map(len, text.splitlines())) <= 80


def test_the_last_line_is_the_advice_whatever_else_is_said():
    line = HotLine("data.py", 19, "read", 0.9)
    decision = TuningDecision(40, "2 threads", True, "It was the best.")
    summary = dataclasses.replace(
        summarize([later(0)], []),
        hot_lines=(line,),
        decisions=(decision,),
        shard="shard 1 of 2",
        compared=Figures(dataset="Photos"),
    )
    text = str(summary)
    advice = formatting.wrapped(summary.findings[0].advice)
    assert text.endswith(f"\nHottest line: {line}.\n{advice}")
    said = str(decision), "This process has shard 1 of 2.", "before"
    assert all(words in " ".join(text.split()) for words in said)


def test_a_validation_that_hardly_waits_is_not_mentioned():
    idle = changed(IDLE, phase="validation")
    (finding,) = validated(SLEEPERS, idle).findings
    assert finding.phase == "Training"
    assert "Validation" not in str(validated(SLEEPERS, idle))


def test_the_headline_has_the_longest_part_of_a_fit_and_its_seconds():
    account = TimeAccount(waiting_s=6.5, steps_s=1.0, compiling_s=27.5)
    summary = dataclasses.replace(
        summarize([later(0)], []), account=account, validations=()
    )
    (finding,) = summary.findings
    assert finding.headline == (
        "Training waited 6.5 s of 35.0 s for data; compiling took 27.5 s"
    )
    assert f"io_bound: {finding.headline}." in str(summary)
    quick = dataclasses.replace(account, compiling_s=0.5)
    (finding,) = dataclasses.replace(summary, account=quick).findings
    assert finding.headline == "Training waited 6.5 s of 8.0 s for data"


def test_the_headline_is_on_the_first_batch_where_that_decides():
    slow = (Slow(8.0, 17, 8.0),)
    first = changed(
        SLEEPERS, wall_s=9.0, wait_s=8.9, first_wait_s=8.0, slowest=slow
    )
    assert kind_of(first) == "stragglers"
    account = TimeAccount(first_batch_s=8.0, waiting_s=0.1, steps_s=1.0)
    summary = summarize([health(0, first), health(1, IDLE)], [], None, account)
    told = "Training waited 8.0 s of 9.1 s for its first batch"
    assert summary.findings[0].headline == told
    late = changed(SLEEPERS, phase="validation", wall_s=4.0, first_wait_s=3.5)
    validation = dataclasses.replace(health(0, late), phase="validation")
    account = dataclasses.replace(account, validation_wait_s=3.9)
    summary = summarize([health(0, first)], [validation], None, account)
    told = "Validation waited 3.9 s of 13.0 s for data"
    (finding,) = (f for f in summary.findings if f.phase == "Validation")
    assert finding.verdict.kind == "late_start"
    assert finding.headline.startswith(told)


def test_the_table_names_what_the_account_lists_by_itself():
    account = TimeAccount(first_batch_s=2.5, hooks_s=0.01, waiting_s=1.0)
    summary = summarize([later(0), later(1)], [], None, account)
    said = "; waiting includes the first batch of the fit (2.5 s)"
    assert summary.note.endswith(f"waiting / took{said}")
    assert said in " ".join(str(summary).split())
    assert said in summary._repr_html_()
    account = TimeAccount(first_batch_s=0.01, hooks_s=0.5, waiting_s=1.0)
    summary = dataclasses.replace(summary, account=account)
    assert summary.note.endswith("waiting includes epoch hooks (500 ms)")
    account = TimeAccount(first_batch_s=0.01, waiting_s=2.0)
    summary = dataclasses.replace(summary, account=account)
    assert summary.note.endswith("data_wait = waiting / took")


def test_advice_that_saves_little_says_so_in_seconds_of_the_fit():
    summary = summarize([later(0)], [], None, TimeAccount(steps_s=1000.0))
    (finding,) = summary.findings
    saves = formatting.duration(finding.saves_s)
    assert finding.advice == (
        f"Nothing to change in the data: at most {saves} of 17 min would be "
        "saved."
    )


def test_the_table_has_a_row_for_each_validation():
    waits = changed(SLEEPERS, phase="validation")
    lines = str(validated(IDLE, waits)).splitlines()
    names = [line.split("  ")[0] for line in lines[1:7]]
    assert names == [
        name
        for number in (1, 2, 3)
        for name in (f"epoch {number}", "validation")
    ]
    whole = formatting.duration(SLEEPERS.wall_s)
    waited = formatting.duration(SLEEPERS.lost_s)
    share = formatting.share(SLEEPERS.data_wait)
    assert re.search(rf"{whole} +{waited} +{share} +io_bound", lines[2])
    assert "data_wait = waiting / took" in lines[7]


@pytest.mark.parametrize("workers_are", LOCAL)
def test_of_batches_from_a_cache_no_worker_is_said_to_be_slow(workers_are):
    cached = facts(
        workers_are=workers_are,
        workers=int(workers_are is not WorkerKind.INLINE),
        build_s=0.0,
        build_s_p50=0.0,
        store_s=0.0,
        cpu_s=0.0,
        delay_s=0.0,
        slowest=(),
        open_s=7.0,
    )
    verdict = judge(cached)
    assert verdict.kind == "transfer_bound"
    assert "80.0 ms" in verdict.evidence
    assert "workers=" not in verdict.advice
    assert "use_multiprocessing" not in verdict.advice


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.9996, "1 s"),
        (0.9994, "999 ms"),
        (math.inf, "?"),
        (math.nan, "?"),
        (0, "0 ms"),
    ],
)
def test_a_duration_is_in_the_unit_that_it_is_rounded_to(seconds, text):
    assert formatting.duration(seconds) == text


def test_a_size_is_in_the_unit_that_it_is_rounded_to():
    assert [formatting.size(n) for n in (999, 999.6, 999_499, 999_600)] == [
        "999 B",
        "1 KB",
        "999 KB",
        "1 MB",
    ]
