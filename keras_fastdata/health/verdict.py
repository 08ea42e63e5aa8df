"""Decides why training waits for data, and what the user should change.

This module has only pure functions.

`judge` looks at the sums of one epoch. One reason can hide another, so the
order of the checks matters: first come reasons that concern a few batches,
then reasons that concern every batch.
"""

from __future__ import annotations

import dataclasses
import enum
import heapq
import math
import statistics
from collections.abc import Sequence

from keras_fastdata.metrics import cost_model, formatting
from keras_fastdata.metrics.cost_model import TAKE_S, WORTH, Costs
from keras_fastdata.metrics.recorder import Slow
from keras_fastdata.metrics.worker_kinds import (
    NO_LIMIT,
    WorkerKind,
    WorkerLimit,
)

WORTH_A_CHANGE = 0.1  # of the wall time; below, faster data hardly matters
WORTH_S = 1.0  # of a `fit`: a change that wins less is not advised

_MOST_OF = 0.5
_CLEARLY = 0.25  # of the time or the cores: less may be by chance
_MANY_CORES = 0.3  # of the cores: other programs that use more are named
_COMPUTING_ALIKE = 0.1  # of builds: likewise, and of the GIL's time
_UNSTABLE_WAIT = 0.3  # of the lost time, spent on batches built again
_UNSTABLE_RATE = 0.1  # restarts per batch
_STRAGGLER = 4  # times the median time of builds
_FEW = 0.2  # of all batches
_FULL = 0.1  # of the cores: if fewer are free, or
_FULL_CORES = 0.3  # fewer cores than this, the cores count as full
_GIL_HELD = 0.35  # of the time, at least, in a GIL-bound epoch, and
_ONE_CORE = 1.2  # cores, at most, on which all threads together compute
_IDLE = 0.5  # of the time: Ray workers that build less mostly wait
_LITTLE = 0.05  # of the lost time: less building cannot be the reason
_SOME = 0.2  # of a build: more computing needs a free core
_LOCKED = 0.2  # of the time: if less, Python's lock is not in the way
_STORE_BYTES_PER_S = 2e9  # to shared memory, where it was not measured
_LARGE = 100_000  # bytes of a batch: to move fewer saves no time
_LONGEST_QUEUE = 1000  # batches, the longest queue that is advised


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


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The main reason why training waited, with evidence and advice.

    Attributes:
        kind: The reason; equal to a string such as `"io_bound"`.
        evidence: The figures that support the verdict, in a sentence.
        advice: What to change, and the gain to hope for.
        ceiling_speedup: How many times faster training would be with free
            data, at least 1.
        call: The constructor call to use, as text; empty if none is advised.
        saves_s: The seconds of an epoch that the advice would save: as
            forecast, or at most, without a call and for a late start. NaN if
            unknown.
        forecast_s: The forecast duration of an epoch with `call`, in seconds;
            NaN without one.
        others: A sentence on other programs, if they use many of the cores and
            no core is free; `advice` contains it. Otherwise empty.
    """

    kind: Kind
    evidence: str
    advice: str
    ceiling_speedup: float
    call: str = ""
    saves_s: float = math.nan
    forecast_s: float = math.nan
    others: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.evidence} {self.advice}"


@dataclasses.dataclass(frozen=True)
class Facts:
    """The measurements of one or several epochs; durations are in seconds.

    Attributes:
        workers_are: The kind of the workers.
        workers: The number of workers; 0 for inline.
        max_queue_size: How many batches may wait to be delivered.
        batches: The number of delivered batches.
        nbytes: Bytes of their arrays.
        wall_s: Wall time of the epoch.
        free_s: The wall time to expect if batches took no time to build.
        build_s: Time of all builds.
        cpu_s: CPU time of all builds.
        delay_s: Time in which builds waited for a core.
        store_s: Time of storing batches in shared memory.
        open_s: Time of making arrays over shared memory.
        wait_s: Time in which `fit` waited for batches.
        build_s_p50: Median time of a build.
        first_wait_s: The wait for the first batch.
        hook_s: Time in the dataset's `on_epoch_begin` and `on_epoch_end`.
        retried: Batches that were built again after a worker was lost.
        retried_wait_s: Time in which `fit` waited for these.
        restarts: How many workers were lost.
        slowest: The batches that took longest.
        cores: Cores that this process may use; with Ray, the cluster's.
        busy_cores: How many of these were busy, on average; `None` if unknown.
        gil_held: The share of probes that had to wait for the GIL; NaN if
            unknown.
        has_gil: Whether Python runs with the GIL.
        memory: A sentence on the memory that is left; may be empty.
        dataset: Class name of the dataset.
        trainer_cpu_s: CPU time of the training process, all its threads; NaN
            if unknown.
        elapsed_s: Time in which cores were busy with all of this, compiling and
            sampling included; NaN if unknown.
        start_s: Time to start workers and build the first batch, before the
            first step of a `fit`. It is no part of `wall_s`.
        epochs: The number of epochs.
        auto: Whether `workers="auto"` has chosen the workers.
        take_s: The median wait for a batch that lay ready, which handing it
            over takes; NaN if unknown.
        phase: "train", "validation", "evaluate" or "predict".
        limit: Which workers the dataset can use.
    """

    workers_are: WorkerKind
    workers: int
    max_queue_size: int
    batches: int
    nbytes: int
    wall_s: float
    free_s: float
    build_s: float
    cpu_s: float
    delay_s: float
    store_s: float
    open_s: float
    wait_s: float
    build_s_p50: float
    first_wait_s: float
    hook_s: float
    retried: int
    retried_wait_s: float
    restarts: int
    slowest: tuple[Slow, ...]
    cores: float
    busy_cores: float | None
    gil_held: float = math.nan
    has_gil: bool = True
    memory: str = ""
    dataset: str = "MyDataset"
    trainer_cpu_s: float = math.nan
    elapsed_s: float = math.nan
    start_s: float = 0.0
    epochs: int = 1
    auto: bool = False
    take_s: float = math.nan
    phase: str = "train"
    limit: WorkerLimit = NO_LIMIT

    @property
    def lost_s(self) -> float:
        """The seconds that would be saved if building batches took no time.

        It exceeds the waits if builds slow down the steps beside them.
        """
        return max(0.0, self.wall_s - self.free_s)

    @property
    def slowed_s(self) -> float:
        """The part of `lost_s` by which builds slow down steps, in seconds."""
        return max(0.0, self.lost_s - self.wait_s - self.hook_s)

    @property
    def are_steps_slowed(self) -> bool:
        """Whether most of `lost_s` is steps that builds slow down."""
        return self.slowed_s > _MOST_OF * self.lost_s

    @property
    def data_wait(self) -> float:
        """The share of `lost_s` in the wall time, from 0 to 1."""
        return min(1.0, self.lost_s / self.wall_s) if self.wall_s > 0 else 0.0

    @property
    def ceiling_speedup(self) -> float:
        """The speedup of an epoch if building batches took no time."""
        return self.wall_s / self.free_s if self.free_s > 0 else math.inf

    @property
    def computing(self) -> float:
        """CPU time divided by build time; waits for a core do not count."""
        had_s = self.build_s + self.store_s - self.delay_s
        return min(1.0, self.cpu_s / had_s) if had_s > 0 else 1.0

    @property
    def free_cores(self) -> float:
        """Average number of idle cores; all cores if the load is unknown."""
        return max(0.0, self.cores - (self.busy_cores or 0.0))

    @property
    def our_cores(self) -> float:
        """The number of cores that builds and training steps could use.

        Builds that mostly compute get the free cores besides those they used.
        Of builds that mostly wait, many can be under way. The kernel divides
        the cores evenly among threads that are ready: as many of ours as there
        are cores, and one for each core that others keep busy.
        """
        used = (self.cpu_s + self.step_cpu_s) / max(self.wall_s, 1e-9)
        ours = min(self.free_cores + used, self.cores)
        if self.computing < _MOST_OF:
            others = max(0.0, (self.busy_cores or 0.0) - used)
            ours = max(ours, self.cores**2 / (self.cores + others))
        return max(ours, 0.01 * self.cores)

    @property
    def step_cpu_s(self) -> float:
        """The CPU time of the training process in seconds, without builds."""
        if math.isnan(self.trainer_cpu_s):
            return 0.0
        builds_s = 0.0 if self.workers_are.has_copies else self.cpu_s
        return max(0.0, self.trainer_cpu_s - builds_s)

    @property
    def busy_with(self) -> tuple[float, float, float] | None:
        """How many cores were busy with training, builds, and other programs.

        `None` if unknown.
        """
        ours_s = self.step_cpu_s + self.cpu_s
        known = not math.isnan(self.trainer_cpu_s) and self.elapsed_s > 0
        if self.busy_cores is None or not known:
            return None
        # Some batches were built before the measurement began.
        ours = min(ours_s / self.elapsed_s, self.busy_cores)
        builds = ours * self.cpu_s / max(ours_s, 1e-9)
        return ours - builds, builds, self.busy_cores - ours

    @property
    def cores_are_full(self) -> bool:
        """Whether there is no free core for one more worker."""
        return self.busy_cores is not None and (
            self.free_cores < max(_FULL_CORES, _FULL * self.cores)
        )

    @property
    def stragglers(self) -> list[Slow]:
        """Batches that took far longer to build than usual, longest first."""
        if not self.build_s_p50:
            return []
        limit_s = _STRAGGLER * self.build_s_p50
        return [slow for slow in self.slowest if slow.build_s > limit_s]


def merge(epochs: Sequence[Facts]) -> Facts:
    """Combines the measurements of several epochs into one `Facts`.

    Totals are summed, `busy_cores` is averaged, and `slowest` is merged. All
    other values are those of the last epoch.
    """
    changes = {
        name: sum(getattr(facts, name) for facts in epochs) for name in _SUMS
    }
    slowest = heapq.nlargest(32, (s for facts in epochs for s in facts.slowest))
    busy = [f.busy_cores for f in epochs if f.busy_cores is not None]
    busy_cores = statistics.fmean(busy) if busy else None
    return dataclasses.replace(
        epochs[-1], slowest=tuple(slowest), busy_cores=busy_cores, **changes
    )


_SUMS = (
    *("batches", "nbytes", "wall_s", "free_s", "build_s", "cpu_s", "delay_s"),
    *("store_s", "open_s", "wait_s", "first_wait_s", "hook_s", "retried"),
    *("retried_wait_s", "restarts", "trainer_cpu_s", "elapsed_s", "start_s"),
    "epochs",
)


def judge(facts: Facts, kind: Kind | None = None, name: str = "") -> Verdict:
    """Returns the main reason why training waited, with evidence and advice.

    All durations in its texts are those of one epoch, on average.

    Args:
        facts: The measurements.
        kind: The reason, if it is known already.
        name: What was measured, such as "epoch 3" or "epochs 2 and 3".
    """
    kind = kind or kind_of(facts)
    evidence, advice = _REASONS[kind](facts)
    call, saves_s = "", facts.lost_s / facts.epochs
    forecast_s = math.nan
    if kind is Kind.LATE_START:
        saves_s += facts.start_s / facts.epochs
    else:
        both = _steps_and_waits(facts, name)
        evidence = f"{evidence} {both}." if evidence else f"{both}: {_CEILING}."
        is_slowed = facts.slowed_s > _SOME * facts.lost_s
        if kind is not Kind.COMPUTE_BOUND and is_slowed:
            evidence += f" {_slower_steps(facts)}"
    if kind in _ANSWERED:
        wall_s = facts.wall_s / facts.epochs
        (call, forecast_s), use = other_workers(facts), "Use"
        found, promised_s = call, forecast_s
        if not call:
            forecast_s = math.nan
            if facts.limit.how_more:
                no_limit = dataclasses.replace(facts, limit=NO_LIMIT)
                found, promised_s = other_workers(no_limit)
                use = f"{facts.limit.how_more} Then use"
        if found:
            saves_s = wall_s - promised_s
            use += (
                f" `{found}`: {_NOUNS[facts.phase]} would take about "
                f"{formatting.duration(promised_s)} instead of "
                f"{formatting.duration(wall_s)}."
            )
            advice = f"{advice} {use}" if kind in _EXPLAINED else use
    others = _others(facts)
    if others:
        # What is certain to help comes first.
        advice = f"{advice} {others}" if call else f"{others} {advice}"
    return Verdict(
        kind,
        evidence,
        advice,
        max(1.0, facts.ceiling_speedup),
        call,
        saves_s,
        forecast_s,
        others,
    )


def _steps_and_waits(facts: Facts, name: str) -> str:
    """Says how long an epoch takes, and which epochs that is known of."""
    whose = _NOUNS[facts.phase]
    took = formatting.duration(facts.wall_s / facts.epochs)
    if facts.epochs > 1 and name:
        took += f" on average ({name})"
    elif name and facts.phase in _NUMBERED:
        whose = name
    return (
        f"Steps and waits of {whose} take {took}, the steps alone "
        f"{formatting.duration(facts.free_s / facts.epochs)}"
    )


_NUMBERED = ("train", "validation")  # phases that one `fit` has many of
_NOUNS = {
    "train": "an epoch",
    "validation": "a validation",
    "evaluate": "the evaluation",
    "predict": "the prediction",
}

# Kinds that other workers may answer; and those whose advice says more.
_EXPLAINED = (Kind.STRAGGLERS, Kind.TRANSFER_BOUND)
_ANSWERED = (Kind.IO_BOUND, Kind.GIL_BOUND, Kind.BUILD_CPU_BOUND, *_EXPLAINED)


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


def with_call_of(verdict: Verdict, other: Verdict, name: str) -> Verdict:
    """Adds the advice of `other` to a verdict without a constructor call.

    `name` is what `other` was found from, such as "epochs 2 and 3".
    """
    if not other.call or verdict.call:
        return verdict
    advice = other.advice.replace(other.others, "").strip()
    return dataclasses.replace(
        verdict,
        advice=f"{verdict.advice} For later epochs, such as {name}: {advice}",
        call=other.call,
        forecast_s=other.forecast_s,
    )


def kind_of(facts: Facts) -> Kind:
    """Determines the main reason for waiting from the measurements."""
    whole_s, lost_s = facts.wall_s + facts.start_s, facts.lost_s + facts.start_s
    if facts.start_s > max(_MOST_OF * lost_s, WORTH_A_CHANGE * whole_s):
        return Kind.LATE_START
    if facts.data_wait < WORTH_A_CHANGE:
        return Kind.COMPUTE_BOUND
    if _is_unstable(facts):
        return Kind.UNSTABLE_WORKERS
    if 1 < facts.workers >= facts.batches / facts.epochs:
        return Kind.TOO_FEW_BATCHES
    if _waits_for_stragglers(facts):
        return Kind.STRAGGLERS
    late_s = facts.first_wait_s + facts.hook_s
    if late_s > _MOST_OF * facts.lost_s and facts.batches >= 4 * max(
        1, facts.workers
    ):
        return Kind.LATE_START
    if _is_transfer_bound(facts):
        return Kind.TRANSFER_BOUND
    gil = _is_gil_bound(facts)
    waits = not gil and facts.computing < _MOST_OF
    if waits and not (facts.cores_are_full and facts.computing > _SOME):
        return Kind.IO_BOUND
    if facts.cores_are_full:
        return Kind.CORES_FULL
    return Kind.GIL_BOUND if gil else Kind.BUILD_CPU_BOUND


def _is_unstable(facts: Facts) -> bool:
    share = facts.retried_wait_s / max(facts.lost_s, 1e-9)
    if facts.restarts == 1:
        return share > _MOST_OF
    return facts.restarts > 1 and (
        share > _UNSTABLE_WAIT
        or facts.restarts > _UNSTABLE_RATE * facts.batches
    )


def _waits_for_stragglers(facts: Facts) -> bool:
    slow = facts.stragglers
    waited_s = sum(batch.waited_s for batch in slow)
    few = len(slow) <= _FEW * facts.batches
    return few and waited_s > _MOST_OF * facts.lost_s


def _is_transfer_bound(facts: Facts) -> bool:
    if facts.workers_are is WorkerKind.RAY:
        # Ray's transfers are not measured: all time without builds counts.
        return facts.build_s < _IDLE * facts.workers * facts.wall_s
    moving_s = facts.store_s + facts.open_s
    is_moved = facts.workers_are is WorkerKind.PROCESS
    apart = is_moved and moving_s > facts.build_s
    return apart or _are_at_hand(facts)


def _are_at_hand(facts: Facts) -> bool:
    """Returns whether batches take almost no time to build, as with a cache."""
    return facts.build_s + facts.store_s < _LITTLE * facts.lost_s


def _is_gil_bound(facts: Facts) -> bool:
    return (
        facts.workers_are is WorkerKind.THREAD
        and facts.workers > 1
        and facts.gil_held > _GIL_HELD
        and facts.cpu_s < _ONE_CORE * facts.wall_s
    )


# -- the text -----------------------------------------------------------------


def _compute_bound(facts: Facts) -> tuple[str, str]:
    return "", "A faster model or device would help, faster data would not."


def _build_cpu_bound(facts: Facts) -> tuple[str, str]:
    return f"{_built(facts)}; {_free_cores(facts)}.", _no_more(facts)


def _gil_bound(facts: Facts) -> tuple[str, str]:
    evidence = (
        f"{facts.workers} threads wait for each other: together they compute "
        f"on {facts.cpu_s / max(facts.wall_s, 1e-9):.1f} cores, because one "
        f"holds Python's lock (the GIL); {_free_cores(facts)}."
    )
    return evidence, _no_more(facts)


def _io_bound(facts: Facts) -> tuple[str, str]:
    evidence = f"{_built(facts)}, such as files, a network or a lock."
    return evidence, _no_more(facts)


_CEILING = "training hardly waits for data"


def _cheaper(facts: Facts) -> str:
    """Advises to compute less in a build."""
    why = processes = ""
    if facts.are_steps_slowed and _hold_lock(facts):
        why = ", which leaves Python's lock to the steps"
        if facts.limit.are_processes:
            processes = (
                "Use processes (`use_multiprocessing=True`), which have locks "
                "of their own. "
            )
    elif facts.are_steps_slowed:
        why = ", which leaves more of the cores to the steps"
    return (
        f"{processes}Make builds cheaper{why}: store what is expensive already "
        "prepared; where a model trains on an accelerator, hand over uint8 and "
        "augment in the model. Or give the process more cores."
    )


def _hold_lock(facts: Facts) -> bool:
    """Returns whether threads that build keep Python's lock from steps."""
    is_thread = facts.workers_are is WorkerKind.THREAD
    return is_thread and facts.gil_held > _GIL_HELD


def _slower_steps(facts: Facts) -> str:
    """Says how much of the waiting is steps that builds slow down, and why."""
    if _hold_lock(facts):
        why = "threads that build hold Python's lock (the GIL) meanwhile"
    else:
        is_inline = facts.workers_are is WorkerKind.INLINE
        used = "the cores" if facts.cores_are_full else "cores and memory"
        why = f"{'builds' if is_inline else 'workers'} use {used} meanwhile"
    slowed_s, lost_s = facts.slowed_s, facts.lost_s
    beside = _per_batch(facts, facts.free_s + slowed_s)
    return (
        f"{formatting.duration(slowed_s / facts.epochs)} of "
        f"{_NOUNS[facts.phase]}'s "
        f"{formatting.duration(lost_s / facts.epochs)} of waiting are slower "
        f"steps: {why}, so a step takes {beside} instead of "
        f"{_per_batch(facts, facts.free_s)}."
    )


def _others(facts: Facts) -> str:
    """Returns a sentence on other programs, if they take the cores."""
    if facts.busy_with is None or not facts.cores_are_full:
        return ""
    others = facts.busy_with[2]
    if others <= _MANY_CORES * facts.cores:
        return ""
    return (
        f"Other programs use {others:.1f} of {formatting.cores(facts.cores)}: "
        "end them, or wait for their end."
    )


def _cores_full(facts: Facts) -> tuple[str, str]:
    users = ", with this, with training and with whatever else runs there"
    if facts.busy_with is not None:
        training, builds, others = facts.busy_with
        users = (
            f": {training:.1f} with training, {builds:.1f} with builds, "
            f"{others:.1f} with other programs"
        )
    evidence = (
        f"{_built(facts)}; {facts.busy_cores or 0.0:.1f} of "
        f"{formatting.cores(facts.cores)} were busy{users}."
    )
    advice = f"More workers would not help. {_cheaper(facts)}"
    if facts.workers > facts.cores:
        advice += (
            f" And {facts.workers} workers on "
            f"{formatting.cores(facts.cores)} only get in each other's way."
        )
    return evidence, advice


def _transfer_bound(facts: Facts) -> tuple[str, str]:
    nbytes = facts.nbytes / facts.batches
    size = formatting.size(nbytes)
    less = (
        "Move less: hand over uint8 or float16 instead of float32 and convert "
        "in the model."
    )
    if nbytes < _LARGE:
        less = "Batches this small cost time each: make them larger, and fewer."
    built = f"Building a batch takes {_per_batch(facts, facts.build_s)}"
    if facts.workers_are is WorkerKind.RAY:
        busy = facts.build_s / max(facts.workers * facts.wall_s, 1e-9)
        return (
            f"{built}, and {facts.workers} workers build "
            f"{formatting.share(busy)} of the time; what is waited for is Ray, "
            f"which moves {size} a batch.",
            f"{less} Or build where the training is: `executor='local'`.",
        )
    if _are_at_hand(facts):
        waited = _per_batch(facts, facts.wait_s)
        if facts.build_s_p50:
            return f"{built}, handing it to training {waited}.", less
        return (
            "Batches are at hand, from a cache, say; but it takes "
            f"{waited} to read or copy the {size} of one.",
            "That happens where training does, so workers would not help. "
            + less,
        )
    moving = _per_batch(facts, facts.store_s + facts.open_s)
    return (
        f"{built}, moving its {size} to the training process {moving}.",
        f"{less} Or build the batch where it will lie, in an array from "
        "`self.empty(shape, dtype)`, which is not copied.",
    )


def _stragglers(facts: Facts) -> tuple[str, str]:
    slow = facts.stragglers
    indices = list(dict.fromkeys(s.batch for s in slow))  # of several epochs
    evidence = (
        f"{formatting.count(len(indices), 'batch')} (index "
        f"{formatting.listed(indices)}) took up to "
        f"{formatting.duration(slow[0].build_s)} to build, the others around "
        f"{formatting.duration(facts.build_s_p50)}; most of the waiting was "
        "for these."
    )
    advice = "Look at what is special about them, with `dataset[index]`."
    if slow[0].waited_s >= facts.first_wait_s > 0:
        advice += (
            " One of them came first: what `__getitem__` imports or opens the "
            "first time belongs into `on_worker_start`."
        )
    if facts.workers_are is WorkerKind.INLINE:
        return evidence, f"{advice} Workers build ahead of them."
    nbytes = formatting.size(facts.nbytes / max(facts.batches, 1))
    return evidence, (
        f"{advice} A longer queue bridges them, where the other workers are "
        f"quick enough to fill it; each batch in it takes {nbytes} of memory."
    )


def _late_start(facts: Facts) -> tuple[str, str]:
    first_s = facts.first_wait_s / facts.epochs
    others_s = max(0.0, facts.wait_s / facts.epochs - first_s)
    evidence = (
        f"The first batch of an epoch was waited for "
        f"{formatting.duration(first_s)}, all others together "
        f"{formatting.duration(others_s)}."
    )
    if facts.hook_s > facts.first_wait_s:
        evidence = (
            f"`on_epoch_begin` and `on_epoch_end` of the dataset took "
            f"{formatting.duration(facts.hook_s / facts.epochs)} in each "
            f"epoch. {evidence}"
        )
    if facts.start_s > facts.first_wait_s:
        evidence = (
            "Before the first step, starting workers and building the first "
            f"batch took {formatting.duration(facts.start_s)}."
        )
        return evidence, (
            "Make the first build cheaper: what it loads, imports or computes "
            "once, such as an index, can be stored in a form that loads "
            f"quickly. That saves up to {formatting.duration(facts.start_s)} "
            "of a `fit`. And keep one dataset object for all calls of `fit`: "
            "its workers stay, with what they have loaded."
        )
    advice = (
        "Where only the first epoch is late, workers start and load the "
        "dataset: keep one dataset object for all calls of `fit`. Where each "
        "epoch is, look at `on_epoch_begin` and `on_epoch_end`: a dataset "
        "that overrides them is built ahead only after they ran."
    )
    if facts.workers_are is WorkerKind.INLINE:
        call = cost_model.call(facts.dataset, 1, False)
        advice += f" And `{call}` builds ahead at all."
    return evidence, advice


def _too_few_batches(facts: Facts) -> tuple[str, str]:
    batches = round(facts.batches / facts.epochs)
    evidence = (
        f"{formatting.count(batches, 'batch')} for {facts.workers} "
        "workers: they build all at once, and training waits for the first."
    )
    advice = (
        "Smaller batches, and more of them, let training begin earlier. More "
        f"than `workers={batches}` have nothing to do. Longer epochs "
        "(more `steps_per_epoch`, or a `__len__` that covers the data several "
        "times) begin less often."
    )
    return evidence, advice


def _unstable_workers(facts: Facts) -> tuple[str, str]:
    evidence = (
        f"Workers were lost {formatting.count(facts.restarts, 'time')} in "
        f"{formatting.count(facts.batches, 'batch')}, and "
        f"{formatting.count(facts.retried, 'batch')} had to be built again."
    )
    advice = (
        "The log says how each ended, and over which batch. Where the kernel "
        "killed them, memory ran out: lower `workers` or `max_queue_size`. "
        "Where `batch_timeout` replaced them, raise it if a batch may take "
        "that long."
    )
    return evidence, f"{advice} {facts.memory}".rstrip()


_REASONS = {
    Kind.COMPUTE_BOUND: _compute_bound,
    Kind.BUILD_CPU_BOUND: _build_cpu_bound,
    Kind.GIL_BOUND: _gil_bound,
    Kind.IO_BOUND: _io_bound,
    Kind.CORES_FULL: _cores_full,
    Kind.TRANSFER_BOUND: _transfer_bound,
    Kind.STRAGGLERS: _stragglers,
    Kind.LATE_START: _late_start,
    Kind.TOO_FEW_BATCHES: _too_few_batches,
    Kind.UNSTABLE_WORKERS: _unstable_workers,
}


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
    if _are_at_hand(facts) and not facts.build_s_p50:
        return "", math.inf  # the training process itself reads a cache
    batches = facts.batches / facts.epochs
    kinds = _costs(facts)
    present = facts.workers_are.has_copies
    if not facts.limit.are_processes:
        del kinds[True]
    cores = facts.our_cores
    most = int(max(cost_model.MOST, facts.cores, 2 * facts.workers))
    if _hides_waits(facts):
        most = min(most, math.ceil(2 * cores))
    if facts.limit.most is not None:
        most = min(most, facts.limit.most)
    workers, are_processes, period_s = cost_model.choose(
        kinds, cores, max(1, min(most, math.ceil(batches) - 1)), present
    )
    queue = cost_model.queue_for(workers, facts.max_queue_size)
    bridging = kinds[are_processes].bridging(period_s)
    if bridging > (queue or facts.max_queue_size):
        queue = max(1, min(bridging, math.ceil(batches), _LONGEST_QUEUE))
    wall_s = facts.wall_s / facts.epochs
    # An epoch that nothing is built ahead for begins with a whole build.
    is_cold = facts.hook_s > 0 or facts.phase != "train"
    first_s = facts.build_s_p50 if is_cold else 0.0
    late_s = max(0.0, facts.first_wait_s / facts.epochs - facts.build_s_p50)
    late_s += facts.hook_s / facts.epochs
    steady_s = wall_s - late_s - (first_s if facts.workers else 0.0)
    forecast_s = (
        late_s
        + first_s
        + batches
        * kinds[are_processes].period_s(
            workers,
            cores,
            queue or facts.max_queue_size,
            longer=_longer(facts, kinds[present], are_processes, steady_s),
        )
    )
    forecast_s = max(facts.free_s / facts.epochs, forecast_s, facts.build_s_p50)
    if forecast_s > (1 - WORTH) * wall_s:
        return "", wall_s
    call = cost_model.call(
        facts.dataset,
        workers,
        are_processes and facts.workers_are is not WorkerKind.RAY,
        queue,
    )
    return call, forecast_s


def _longer(
    facts: Facts, costs: Costs, are_processes: bool, steady_s: float
) -> float:
    """Returns how many times longer builds take than `costs` say.

    Threads also lose time when they pass on Python's lock. This is not
    expected of the advised workers if these `are_processes`.
    """
    limits = costs.limits(max(1, facts.workers), facts.our_cores)
    is_lock = facts.workers > 0 and max(limits.values()) == limits["lock"]
    if is_lock and are_processes:
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
    slow = facts.stragglers if _waits_for_stragglers(facts) else []
    take_s = max(TAKE_S, facts.open_s / facts.batches)
    if not math.isnan(facts.take_s):
        take_s = max(take_s, facts.take_s)
    threads = Costs(
        cpu_s=thread_s,
        blocked_s=blocked_s,
        lock_s=lock_s,
        step_s=facts.free_s / facts.batches,
        # This contains what receiving takes.
        step_cpu_s=max(0.0, facts.step_cpu_s / facts.batches - take_s),
        # Threads hand over nothing but a reference.
        take_s=TAKE_S if stored else take_s,
        straggler_s=statistics.median(s.build_s for s in slow) if slow else 0.0,
        every=facts.batches / max(1, len(slow)),
    )
    processes = dataclasses.replace(
        threads, cpu_s=thread_s + moving_s, lock_s=0.0, take_s=take_s
    )
    computes = facts.computing >= _MOST_OF and not _is_transfer_bound(facts)
    locks = facts.has_gil and stored and computes
    if facts.workers_are is WorkerKind.RAY or locks:
        # Whether threads would hold Python's lock, processes cannot tell.
        return {True: processes}
    return {False: threads, True: processes}


def _hides_waits(facts: Facts) -> bool:
    """Returns whether the measured waits of builds include waits for the GIL.

    Up to the time that threads compute, these may be waits for something else.
    """
    return (
        facts.workers_are is WorkerKind.THREAD
        and facts.workers > 1
        and facts.gil_held > _LOCKED
    )


def _no_more(facts: Facts) -> str:
    """Explains why the advice is not to change the number of workers."""
    if facts.auto:
        return f'`workers="auto"` has tried other workers. {_cheaper(facts)}'
    return f"Other workers would win less than {WORTH:.0%}. {_cheaper(facts)}"


def _built(facts: Facts) -> str:
    """Describes a build's duration, and the shares of computing and waits."""
    had_s = max(facts.build_s + facts.store_s, 1e-9)
    delay = min(1.0, facts.delay_s / had_s)
    computing = min(1.0 - delay, facts.cpu_s / had_s)
    idle = 1.0 - delay - computing
    text = (
        f"Building a batch takes {_per_batch(facts, facts.build_s)} on "
        f"average: {formatting.share(computing)} computing, "
    )
    if delay >= WORTH:
        text += f"{formatting.share(delay)} waiting for a core, "
    return f"{text}{formatting.share(idle)} waiting for something else"


def _per_batch(facts: Facts, seconds: float) -> str:
    return formatting.duration(seconds / max(facts.batches, 1))


def _free_cores(facts: Facts) -> str:
    cores = formatting.cores(facts.cores)
    if facts.busy_cores is None:
        return f"there are {cores}"
    return f"{facts.free_cores:.1f} of {cores} were free"
