"""Decides why training waits for data.

`kind_of` looks at the sums of one epoch. One reason can hide another, so the
order of the checks matters: first come reasons that concern a few batches,
then reasons that concern every batch.
"""

from __future__ import annotations

import dataclasses
import enum

from keras_fastdata.health.facts import MOST_OF, Facts
from keras_fastdata.metrics.cost_model import WORTH

WORTH_A_CHANGE = 0.1  # of the wall time; below, faster data hardly matters
WORTH_S = 1.0  # of a `fit`: a change that wins less is not advised

_CLEARLY = 0.25  # of the time or the cores: less may be by chance
_COMPUTING_ALIKE = 0.1  # of builds: likewise, and of the GIL's time
_UNSTABLE_WAIT = 0.3  # of the lost time, spent on batches built again
_UNSTABLE_RATE = 0.1  # restarts per batch
_ONE_CORE = 1.2  # cores, at most, on which threads that hold the GIL compute
_SOME = 0.2  # of a build: more computing needs a free core


class Kind(enum.StrEnum):
    """The reasons why training waits for data.

    A member is equal to its name: `verdict.kind == "io_bound"`.
    """

    COMPUTE_BOUND = "compute_bound"  # training hardly waits for data
    BUILD_CPU_BOUND = "build_cpu_bound"  # builds compute, and cores are free
    GIL_BOUND = "gil_bound"  # threads hold each other up
    IO_BOUND = "io_bound"  # builds wait for something else
    CORES_FULL = "cores_full"  # builds compute, and no core is free
    TRANSFER_BOUND = "transfer_bound"  # moving a batch outweighs building it
    STRAGGLERS = "stragglers"  # a few batches take far longer than the rest
    LATE_START = "late_start"  # the epoch's first batch is late
    TOO_FEW_BATCHES = "too_few_batches"  # for the number of workers
    UNSTABLE_WORKERS = "unstable_workers"  # they die, or are replaced


# Kinds that concern every batch. Small differences between epochs decide among
# these; the other kinds are about events.
OF_EVERY_BATCH = frozenset(
    {
        Kind.COMPUTE_BOUND,
        Kind.BUILD_CPU_BOUND,
        Kind.GIL_BOUND,
        Kind.IO_BOUND,
        Kind.CORES_FULL,
        Kind.TRANSFER_BOUND,
    }
)


def kind_of(facts: Facts) -> Kind:
    """Determines the main reason for waiting from the measurements."""
    whole_s, lost_s = facts.wall_s + facts.start_s, facts.lost_s + facts.start_s
    if facts.start_s > max(MOST_OF * lost_s, WORTH_A_CHANGE * whole_s):
        return Kind.LATE_START
    if facts.data_wait < WORTH_A_CHANGE:
        return Kind.COMPUTE_BOUND
    if _is_unstable(facts):
        return Kind.UNSTABLE_WORKERS
    if 1 < facts.workers >= facts.batches / facts.epochs:
        return Kind.TOO_FEW_BATCHES
    if facts.waits_for_stragglers:
        return Kind.STRAGGLERS
    late_s = facts.first_wait_s + facts.hook_s
    if late_s > MOST_OF * facts.lost_s and facts.batches >= 4 * max(
        1, facts.workers
    ):
        return Kind.LATE_START
    if facts.is_transfer_bound:
        return Kind.TRANSFER_BOUND
    gil = _is_gil_bound(facts)
    waits = not gil and facts.computing < MOST_OF
    if waits and not (facts.cores_are_full and facts.computing > _SOME):
        return Kind.IO_BOUND
    if facts.cores_are_full:
        return Kind.CORES_FULL
    return Kind.GIL_BOUND if gil else Kind.BUILD_CPU_BOUND


def _is_unstable(facts: Facts) -> bool:
    share = facts.retried_wait_s / max(facts.lost_s, 1e-9)
    if facts.restarts == 1:
        return share > MOST_OF
    return facts.restarts > 1 and (
        share > _UNSTABLE_WAIT
        or facts.restarts > _UNSTABLE_RATE * facts.batches
    )


def _is_gil_bound(facts: Facts) -> bool:
    return (
        facts.are_several_threads
        and facts.do_threads_hold_lock
        and facts.cpu_s < _ONE_CORE * facts.wall_s
    )


def kind_after(facts: Facts, before: Facts, shown: Kind) -> Kind:
    """Chooses the reason that is reported for the waits of an epoch.

    On a busy machine, epochs differ a little without a reason. So an epoch
    keeps the kind of the epoch before if only small differences speak against
    it, and its own kind does not come for the second time in a row.

    Args:
        facts: The measurements of the epoch.
        before: Those of the epoch before.
        shown: The kind that was shown for the epoch before.
    """
    own = kind_of(facts)
    if own is kind_of(before) or not {own, shown} <= OF_EVERY_BATCH:
        return own
    return shown if kind_of(_nearly(facts, before)) is shown else own


def _nearly(facts: Facts, before: Facts) -> Facts:
    """Returns `facts`, with values of `before` where these differ little."""
    alike = facts
    change = abs(facts.data_wait - before.data_wait)
    is_worth = change >= WORTH and change * facts.wall_s >= WORTH_S
    if change < _CLEARLY and not is_worth:
        free_s = facts.wall_s * (1 - before.data_wait)
        alike = dataclasses.replace(alike, free_s=free_s)
    if abs(facts.computing - before.computing) < _COMPUTING_ALIKE:
        had_s = facts.build_s + facts.store_s - facts.delay_s
        cpu_s = had_s * before.computing
        alike = dataclasses.replace(alike, cpu_s=cpu_s)
    if abs(facts.free_cores - before.free_cores) < _CLEARLY * facts.cores:
        alike = dataclasses.replace(alike, busy_cores=before.busy_cores)
    if abs(facts.gil_held - before.gil_held) < _COMPUTING_ALIKE:
        alike = dataclasses.replace(alike, gil_held=before.gil_held)
    return alike
