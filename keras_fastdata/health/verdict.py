"""Says why training waits for data, and what the user should change.

This module has only pure functions.
"""

from __future__ import annotations

import dataclasses
import math

from keras_fastdata.health.advised_workers import (
    more_processes,
    other_workers,
    workers_to_measure,
)
from keras_fastdata.health.facts import Facts
from keras_fastdata.health.reasons import Kind, kind_of
from keras_fastdata.metrics import cost_model, formatting
from keras_fastdata.metrics.cost_model import WORTH
from keras_fastdata.metrics.worker_kinds import NO_LIMIT, WorkerKind

_MANY_CORES = 0.3  # of the cores: other programs that use more are named
_SOME = 0.2  # of the waiting: more slower steps are named
_LARGE = 100_000  # bytes of a batch: to move fewer saves no time


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
            NaN if nothing is forecast.
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
    to_measure = workers_to_measure(facts) if kind in _MEASURED else ""
    if to_measure:
        call = to_measure
        use = _to_measure(facts, to_measure)
        advice = use if kind in _ANSWERED else f"{advice} {use}"
    elif kind in _ANSWERED:
        use, call, promised_s = _use_workers(facts)
        if use:
            saves_s = facts.wall_s / facts.epochs - promised_s
            forecast_s = promised_s if call else math.nan
            advice = f"{advice} {use}" if kind in _EXPLAINED else use
    others = _others(facts)
    if others:
        # What is certain to help comes first.
        advice = f"{advice} {others}" if call else f"{others} {advice}"
    if kind is Kind.CORES_FULL:
        call = _processes_to_try(facts)
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


def _use_workers(facts: Facts) -> tuple[str, str, float]:
    """Returns advice to use other workers, their call, and the forecast.

    The advice is empty if no other workers are better. Only the call is empty
    if the dataset must be changed before it can use them.
    """
    (call, forecast_s), use = other_workers(facts), "Use"
    found, wall_s = call, facts.wall_s / facts.epochs
    if not call and facts.limit.how_more:
        no_limit = dataclasses.replace(facts, limit=NO_LIMIT)
        found, forecast_s = other_workers(no_limit)
        use = f"{facts.limit.how_more} Then use"
    if not found:
        return "", "", math.nan
    use += (
        f" `{found}`: {_NOUNS[facts.phase]} would take about "
        f"{formatting.duration(forecast_s)} instead of "
        f"{formatting.duration(wall_s)}."
    )
    is_shared = facts.is_loading_shared_by_threads
    if is_shared and "use_multiprocessing" not in found:
        use += " Threads load once what each process loads by itself."
    return use, call, forecast_s


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
# Kinds whose workers trials can choose, where no forecast can.
_MEASURED = (
    *(Kind.COMPUTE_BOUND, Kind.GIL_BOUND, Kind.BUILD_CPU_BOUND),
    *(Kind.TRANSFER_BOUND, Kind.STRAGGLERS),
)


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


def _to_measure(facts: Facts, call: str) -> str:
    """Says that trials choose the workers, because memory sets the speed."""
    return (
        f"Training gets {formatting.size(facts.bytes_per_s)} of batches a "
        "second, so copies of batches and caches count, which cannot be "
        f"foretold. Try `{call}`, which measures several numbers of threads "
        "and processes, and keeps the fastest."
    )


def _cheaper(facts: Facts) -> str:
    """Advises to compute less in a build."""
    why = processes = ""
    if facts.are_steps_slowed and facts.do_threads_hold_lock:
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


def _slower_steps(facts: Facts) -> str:
    """Says how much of the waiting is steps that builds slow down, and why."""
    if facts.do_threads_hold_lock:
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


def _processes_to_try(facts: Facts) -> str:
    """Returns a call with more processes, if other programs take the cores."""
    return more_processes(facts) if _others(facts) else ""


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
    call = _processes_to_try(facts)
    if call:
        return evidence, (
            f"Or try `{call}`: more processes get a larger part of the cores, "
            "and other programs a smaller one. How much that wins cannot be "
            f"foretold: compare the epochs. {_cheaper(facts)}"
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
    if facts.are_at_hand:
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
