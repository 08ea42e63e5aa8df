"""Chooses better workers than the present ones, and predicts their speed."""

from __future__ import annotations

import dataclasses
import math
import statistics

from keras_fastdata.health.facts import MOST_OF, Facts
from keras_fastdata.metrics import cost_model
from keras_fastdata.metrics.cost_model import COMPUTES, TAKE_S, WORTH, Costs
from keras_fastdata.metrics.worker_kinds import NO_LIMIT, WorkerKind

_LOCKED = 0.2  # of the time: if less, Python's lock is not in the way
_STEPS_LOCK = 0.05  # of the steps' time, if they hold Python's lock at all
_PROCESSES_PER_CORE = 8  # to try, at most, where other programs compute
_PASSING_LOCK = 1.4  # times longer, if threads pass on the lock all the time
_THREAD_TAKE_S = 15e-6  # receiving a batch from a thread, if not measured
_STORE_BYTES_PER_S = 2e9  # to shared memory, where it was not measured
_LONGEST_QUEUE = 1000  # batches, the longest queue that is advised


def other_workers(facts: Facts) -> tuple[str, float]:
    """Chooses better workers, and predicts an epoch's duration with them.

    The forecast is what the cost model says, with builds that take longer as
    far as the model underestimates the present workers. It is no shorter than
    the steps allow.

    Returns:
        The call, or "" if it would win too little; the seconds of an epoch.
    """
    if facts.auto:
        return "", math.inf  # which has tried the others
    if facts.are_at_hand and not facts.build_s_p50:
        return "", math.inf  # the training process itself reads a cache
    batches = facts.batches / facts.epochs
    kinds = _costs(facts)
    present = facts.workers_are.has_copies
    # Threads neither load so often nor move batches.
    shares = facts.is_loading_shared_by_threads or facts.is_transfer_bound
    kept = present and not shares
    if facts.workers_are is WorkerKind.INLINE:
        kept = _do_steps_hold_lock(facts)
    if not facts.limit.are_processes:
        del kinds[True]
    cores = facts.our_cores
    most = max(cost_model.MOST, facts.cores, 2 * facts.workers)
    if _hides_waits(facts):
        most = min(most, math.ceil(2 * cores))
    workers, are_processes, period_s = cost_model.choose(
        kinds, cores, _at_most(facts, most), kept
    )
    queue = cost_model.queue_for(workers, facts.max_queue_size)
    bridging = kinds[are_processes].bridging(period_s)
    if bridging > (queue or facts.max_queue_size):
        queue = max(1, min(bridging, math.ceil(batches), _LONGEST_QUEUE))
    costs, wall_s = kinds[are_processes], facts.wall_s / facts.epochs
    begin_s, steady_s = _begin_s(facts)
    longer = _longer(facts, kinds[present], are_processes, steady_s)
    period_s = costs.period_s(
        workers, cores, queue or facts.max_queue_size, longer
    )
    forecast_s = begin_s + batches * period_s
    least_s = facts.in_a_row_s / facts.epochs
    forecast_s = max(least_s, forecast_s, facts.build_s_p50)
    if forecast_s > (1 - WORTH) * wall_s:
        return "", wall_s
    call = cost_model.call(
        facts.dataset,
        workers,
        are_processes and facts.workers_are is not WorkerKind.RAY,
        queue,
    )
    return call, forecast_s


def _begin_s(facts: Facts) -> tuple[float, float]:
    """Returns what the begin of an epoch takes, and the rest of this one."""
    # An epoch that nothing is built ahead for begins with a whole build.
    is_cold = facts.hook_s > 0 or facts.phase != "train"
    first_s = facts.build_s_p50 if is_cold else 0.0
    late_s = max(0.0, facts.first_wait_s / facts.epochs - facts.build_s_p50)
    late_s += facts.hook_s / facts.epochs
    steady_s = facts.wall_s / facts.epochs - late_s
    return late_s + first_s, steady_s - (first_s if facts.workers else 0.0)


def more_processes(facts: Facts) -> str:
    """Chooses processes that take cores from other programs, without forecast.

    The kernel divides the cores among all that is ready to run, so more
    processes get more. How much more depends on the other programs, and on how
    the kernel groups them.

    Returns:
        The call, or "" if the dataset has as many processes as it can use.
    """
    if facts.auto or facts.workers_are is WorkerKind.RAY:
        return ""
    most = max(cost_model.MOST, facts.cores)
    workers = _at_most(facts, min(most, _PROCESSES_PER_CORE * facts.cores))
    present = facts.workers if facts.workers_are.has_copies else 0
    if not facts.limit.are_processes or workers <= max(1, present):
        return ""
    queue = cost_model.queue_for(workers, facts.max_queue_size)
    return cost_model.call(facts.dataset, workers, True, queue)


def workers_to_measure(facts: Facts) -> str:
    """Returns the call with `workers="auto"`, if only trials can tell.

    Where builds and steps move memory, caches decide which workers are quick,
    and whether the backend copies what they hand over. The cost model knows
    neither.

    Returns:
        The call, or "" if the model can tell.
    """
    if facts.auto or not facts.is_memory_bound or facts.limit != NO_LIMIT:
        return ""
    return cost_model.call(facts.dataset, "auto")


def _at_most(facts: Facts, workers: float) -> int:
    """Returns as many of the workers as the dataset and an epoch can use."""
    most = min(workers, math.ceil(facts.batches / facts.epochs) - 1)
    if facts.limit.most is not None:
        most = min(most, facts.limit.most)
    return max(1, int(most))


def _do_steps_hold_lock(facts: Facts) -> bool:
    """Returns whether steps hold Python's lock, and builds compute.

    Threads that compute beside such steps take the lock again and again. They
    then lose more time than the model tells.
    """
    held_s = facts.gil_held * facts.wall_s
    return facts.computing > COMPUTES and held_s > _STEPS_LOCK * facts.free_s


def _longer(
    facts: Facts, costs: Costs, are_processes: bool, steady_s: float
) -> float:
    """Returns how many times longer builds take than `costs` say.

    Threads also lose time when they pass on Python's lock, or wait for a core
    while another one is free. This is not expected of the advised workers if
    these `are_processes`.
    """
    limits = costs.limits(max(1, facts.workers), facts.our_cores)
    longest = max(limits, key=lambda limit: limits[limit])
    is_of_threads = facts.workers > 0 and longest in ("lock", "shared")
    if is_of_threads and are_processes:
        return 1.0
    period_s = costs.period_s(
        facts.workers, facts.our_cores, facts.max_queue_size
    )
    modelled_s = facts.batches / facts.epochs * period_s
    return max(1.0, steady_s / max(modelled_s, 1e-9))


def _costs(facts: Facts) -> dict[bool, Costs]:
    """Returns the cost of a batch for each kind of worker.

    `True` stands for processes, `False` for threads.
    """
    stored = facts.workers_are.has_copies
    cpu_s = facts.cpu_s / facts.batches
    busy_s = facts.cpu_s + facts.delay_s
    blocked_s = facts.build_s + facts.store_s - busy_s
    blocked_s = max(0.0, blocked_s) / facts.batches
    lock_s = cpu_s if facts.has_gil else 0.0
    if not math.isnan(facts.gil_held) and not stored:
        # Steps hold it too, if they run in Python.
        lock_s = facts.gil_held * facts.wall_s / facts.batches
        if _hides_waits(facts):
            turns_s = (facts.workers - 1) * min(cpu_s, lock_s)
            blocked_s = max(blocked_s - turns_s, min(blocked_s, cpu_s))
    moving_s = facts.store_s / facts.batches
    if not stored:
        moving_s = facts.nbytes / facts.batches / _STORE_BYTES_PER_S
    thread_s = max(0.0, cpu_s - stored * moving_s)
    slow = facts.stragglers if facts.waits_for_stragglers else []
    take_s = max(TAKE_S, facts.open_s / facts.batches)
    if not math.isnan(facts.take_s):
        take_s = max(take_s, facts.take_s)
    are_threads = facts.workers_are is WorkerKind.THREAD
    given_s = facts.take_s if are_threads else math.nan
    threads = Costs(
        cpu_s=thread_s,
        blocked_s=blocked_s,
        lock_s=lock_s,
        # More threads would not get the free cores either.
        shared_s=(
            facts.wall_s / facts.batches if facts.are_threads_crowded else 0.0
        ),
        step_s=facts.in_a_row_s / facts.batches,
        # This contains what receiving takes.
        step_cpu_s=max(0.0, facts.step_cpu_s / facts.batches - take_s),
        # Threads hand over nothing but a reference.
        take_s=_THREAD_TAKE_S if math.isnan(given_s) else given_s,
        straggler_s=statistics.median(s.build_s for s in slow) if slow else 0.0,
        every=facts.batches / max(1, len(slow)),
    )
    processes = dataclasses.replace(
        threads,
        cpu_s=thread_s + moving_s,
        lock_s=0.0,
        shared_s=0.0,
        take_s=take_s,
    )
    computes = facts.computing >= MOST_OF and not facts.is_transfer_bound
    if facts.workers_are is WorkerKind.RAY:
        return {True: processes}
    if facts.has_gil and stored and computes:
        # How long threads would hold Python's lock, processes cannot tell: at
        # most for all that builds and steps compute.
        lock_s = _PASSING_LOCK * (threads.cpu_s + threads.step_cpu_s)
        threads = dataclasses.replace(threads, lock_s=lock_s)
    return {False: threads, True: processes}


def _hides_waits(facts: Facts) -> bool:
    """Returns whether the measured waits of builds include waits for the GIL.

    Up to the time that threads compute, these may be waits for something else.
    """
    return facts.are_several_threads and facts.gil_held > _LOCKED
