"""Decides why training waits for data, and what to change: pure functions.

`judge` looks at the sums of one epoch. One reason can hide another, so the
order of the checks matters: first come reasons that concern a few batches,
then reasons that concern every batch.
"""

from __future__ import annotations

import dataclasses
import enum
import math

from keras_fastdata.health.step_clock import share_saved
from keras_fastdata.metrics import formatting
from keras_fastdata.metrics.recorder import Slow

WORTH_A_CHANGE = 0.1  # of the wall time; below, faster data hardly matters

_MOST_OF = 0.5
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
_LONGEST_QUEUE = 1000  # batches, the longest queue that is advised


class Kind(enum.StrEnum):
    """The reasons why training waits.

    A member is equal to its name: `verdict.kind == "io_bound"`.
    """

    COMPUTE_BOUND = "compute_bound"  # data is free: the ceiling is reached
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
    """Why training waited, and what to change.

    Attributes:
        kind: The reason; equal to a string such as `"io_bound"`.
        evidence: The figures that support the verdict, in a sentence.
        advice: What to change, and the gain to hope for.
        ceiling_speedup: How many times faster training would be with free
            data, at least 1.
    """

    kind: Kind
    evidence: str
    advice: str
    ceiling_speedup: float

    def __str__(self) -> str:
        return f"{self.kind}: {self.evidence} {self.advice}"


@dataclasses.dataclass(frozen=True)
class Facts:
    """The measurements of one epoch. Durations are in seconds.

    Attributes:
        workers_are: "inline", "thread", "process" or "ray".
        workers: The number of workers; 0 for inline.
        max_queue_size: How many batches may wait to be delivered.
        batches: The number of delivered batches.
        nbytes: Bytes of their arrays.
        wall_s: Wall time of the epoch.
        free_s: The wall time to expect with free data.
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
        memory: A sentence on the memory that is left; may be empty.
    """

    workers_are: str
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
    memory: str = ""

    @property
    def lost_s(self) -> float:
        """The time an epoch would save if its data were ready at no cost.

        It exceeds the waits if builds slow down the steps beside them.
        """
        return max(0.0, self.wall_s - self.free_s)

    @property
    def data_wait(self) -> float:
        """The share of the wall time that free data would save: 0 to 1."""
        return share_saved(self.wall_s, self.free_s)

    @property
    def ceiling_speedup(self) -> float:
        """How many times faster an epoch would be if its data cost no time."""
        return self.wall_s / self.free_s if self.free_s > 0 else math.inf

    @property
    def computing(self) -> float:
        """The share of build time spent computing, or waiting for a core."""
        busy_s = self.cpu_s + self.delay_s
        return min(1.0, busy_s / max(self.build_s + self.store_s, 1e-9))

    @property
    def free_cores(self) -> float:
        """Cores that were idle, on average; all cores if unknown."""
        return self.cores - (self.busy_cores or 0.0)

    @property
    def room(self) -> float:
        """Cores available to builds: those they use, and those free."""
        used = self.cpu_s / max(self.wall_s, 1e-9)
        return self.free_cores + min(used, self.cores)

    @property
    def cores_are_full(self) -> bool:
        """Whether there is no free core for one more worker."""
        return self.busy_cores is not None and (
            self.free_cores < max(_FULL_CORES, _FULL * self.cores)
        )

    @property
    def stragglers(self) -> list[Slow]:
        """The batches that took far longer than usual, longest first."""
        if not self.build_s_p50:
            return []
        limit_s = _STRAGGLER * self.build_s_p50
        return [slow for slow in self.slowest if slow.build_s > limit_s]


def judge(facts: Facts) -> Verdict:
    """Returns the main reason why an epoch took longer than its steps."""
    kind = _kind_of(facts)
    evidence, advice = _REASONS[kind](facts)
    if kind is not Kind.COMPUTE_BOUND:
        evidence += (
            f" With free data it would take {formatting.duration(facts.free_s)}"
            f" instead of {formatting.duration(facts.wall_s)}."
        )
    return Verdict(kind, evidence, advice, max(1.0, facts.ceiling_speedup))


def _kind_of(facts: Facts) -> Kind:
    if facts.data_wait < WORTH_A_CHANGE:
        return Kind.COMPUTE_BOUND
    if _is_unstable(facts):
        return Kind.UNSTABLE_WORKERS
    if 1 < facts.workers >= facts.batches:
        return Kind.TOO_FEW_BATCHES
    slow = facts.stragglers
    if (
        len(slow) <= _FEW * facts.batches
        and sum(s.waited_s for s in slow) > _MOST_OF * facts.lost_s
    ):
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


def _is_transfer_bound(facts: Facts) -> bool:
    if facts.workers_are == "ray":
        # Ray's transfers are not measured: all time without builds counts.
        return facts.build_s < _IDLE * facts.workers * facts.wall_s
    moving_s = facts.store_s + facts.open_s
    apart = facts.workers_are == "process" and moving_s > facts.build_s
    return apart or _are_at_hand(facts)


def _are_at_hand(facts: Facts) -> bool:
    """Whether almost nothing is built: batches come from a cache."""
    return facts.build_s + facts.store_s < _LITTLE * facts.lost_s


def _is_gil_bound(facts: Facts) -> bool:
    return (
        facts.workers_are == "thread"
        and facts.workers > 1
        and facts.gil_held > _GIL_HELD
        and facts.cpu_s < _ONE_CORE * facts.wall_s
    )


# -- the text -----------------------------------------------------------------


def _compute_bound(facts: Facts) -> tuple[str, str]:
    return (
        f"Free data would save {formatting.share(facts.data_wait)} of the "
        "time: the ceiling is reached.",
        "A faster model or device would help, faster data would not.",
    )


def _build_cpu_bound(facts: Facts) -> tuple[str, str]:
    evidence = (
        f"Building a batch takes {_per_batch(facts, facts.build_s)}, "
        f"{formatting.share(facts.computing)} of it computing; "
        f"{_free_cores(facts)}."
    )
    return evidence, _more_processes(facts)


def _gil_bound(facts: Facts) -> tuple[str, str]:
    evidence = (
        f"{facts.workers} threads wait for each other: together they compute "
        f"on {facts.cpu_s / max(facts.wall_s, 1e-9):.1f} cores, because one "
        f"holds Python's lock (the GIL); {_free_cores(facts)}."
    )
    return evidence, _more_processes(facts)


def _io_bound(facts: Facts) -> tuple[str, str]:
    idle = 1.0 - facts.computing
    evidence = (
        f"Building a batch takes {_per_batch(facts, facts.build_s)}, and "
        f"{formatting.share(idle)} of that it waits for something else: files, "
        "a network, a lock."
    )
    workers = max(facts.workers, 1)
    wanted = math.ceil(facts.build_s / max(facts.free_s, 1e-9))
    wanted = min(wanted, max(32, 2 * workers))
    if facts.computing > 0.01:
        wanted = min(wanted, math.floor(facts.room / facts.computing))
    wanted = max(_of_use(facts, wanted), workers + 1)
    building_s = max(facts.build_s / wanted, facts.cpu_s / facts.cores)
    advice = f"Waiting needs no core: pass `workers={wanted}`" + _gain(
        facts, building_s
    )
    return evidence, advice + _longer_queue(facts, wanted)


def _cores_full(facts: Facts) -> tuple[str, str]:
    assert facts.busy_cores is not None
    evidence = (
        f"Building a batch takes {_per_batch(facts, facts.build_s)} of "
        f"computing, and {facts.busy_cores:.1f} of "
        f"{facts.cores:g} {_cores(facts.cores)} were busy, with this, with "
        "training and with whatever else runs there."
    )
    advice = (
        "More workers would not help. Make the work cheaper: store what is "
        "expensive already prepared; where a model trains on an accelerator, "
        "hand over uint8 and augment in the model. Or give the process more "
        "cores."
    )
    if facts.workers > facts.cores:
        advice += (
            f" And {facts.workers} workers on {facts.cores:g} "
            f"{_cores(facts.cores)} only get in each other's way."
        )
    return evidence, advice


def _transfer_bound(facts: Facts) -> tuple[str, str]:
    if facts.workers_are == "ray":
        return _transfer_bound_on_ray(facts)
    if _are_at_hand(facts):
        return (
            "Batches are at hand, from a cache, say; but it takes "
            f"{_per_batch(facts, facts.wait_s)} to read or copy the "
            f"{formatting.size(facts.nbytes / facts.batches)} of one.",
            "That happens where training does, so workers would not help. "
            "Move less: hand over uint8 or float16 instead of float32 and "
            "convert in the model.",
        )
    moving_s = facts.store_s + facts.open_s
    evidence = (
        f"Building a batch takes {_per_batch(facts, facts.build_s)}, moving "
        f"its {formatting.size(facts.nbytes / facts.batches)} to the training "
        f"process {_per_batch(facts, moving_s)}."
    )
    advice = (
        "Move less: hand over uint8 or float16 instead of float32 and convert "
        "in the model; or build the batch where it will lie, in an array from "
        "`self.empty(shape, dtype)`, which is not copied. Builds this quick "
        "may do without processes: try `use_multiprocessing=False`."
    )
    return evidence, advice


def _transfer_bound_on_ray(facts: Facts) -> tuple[str, str]:
    busy = facts.build_s / max(facts.workers * facts.wall_s, 1e-9)
    evidence = (
        f"Building a batch takes {_per_batch(facts, facts.build_s)}, and "
        f"{facts.workers} workers build {formatting.share(busy)} of the time; "
        f"what is waited for is Ray, which moves "
        f"{formatting.size(facts.nbytes / facts.batches)} a batch."
    )
    advice = (
        "Move less: hand over uint8 or float16 instead of float32 and convert "
        "in the model. Or build where the training is: `executor='local'`."
    )
    return evidence, advice


def _stragglers(facts: Facts) -> tuple[str, str]:
    slow = facts.stragglers
    evidence = (
        f"{formatting.count(len(slow), 'batch')} (index "
        f"{formatting.listed([s.batch for s in slow])}) took up to "
        f"{formatting.duration(slow[0].build_s)} to build, the others around "
        f"{formatting.duration(facts.build_s_p50)}; most of the waiting was "
        "for these."
    )
    advice = "Look at what is special about them, with `dataset[index]`."
    if facts.workers_are == "inline":
        return evidence, advice + " `workers=1` builds ahead of them."
    if slow[0].waited_s >= facts.first_wait_s > 0:
        advice += (
            " One of them came first: what `__getitem__` imports or opens the "
            "first time belongs into `on_worker_start`."
        )
    wanted = max(
        2 * facts.max_queue_size,
        math.ceil(
            slow[0].build_s / max(facts.free_s / max(facts.batches, 1), 1e-9)
        ),
    )
    wanted = max(1, min(wanted, facts.batches, _LONGEST_QUEUE))
    advice += (
        " A longer queue bridges them, where the other workers are quick "
        f"enough to fill it: `max_queue_size={wanted}`"
    )
    if facts.workers < 2:
        advice += " and `workers=2`"
    queued = formatting.size(wanted * facts.nbytes / max(facts.batches, 1))
    return evidence, f"{advice}; the queue may take {queued} of memory then."


def _late_start(facts: Facts) -> tuple[str, str]:
    evidence = (
        f"The first batch was waited for "
        f"{formatting.duration(facts.first_wait_s)}, all others together "
        f"{formatting.duration(max(0.0, facts.wait_s - facts.first_wait_s))}."
    )
    if facts.hook_s > facts.first_wait_s:
        evidence = (
            f"`on_epoch_begin` and `on_epoch_end` of the dataset took "
            f"{formatting.duration(facts.hook_s)}. {evidence}"
        )
    advice = (
        "Where only the first epoch is late, workers start and load the "
        "dataset: keep one dataset object for all calls of `fit`. Where each "
        "epoch is, look at `on_epoch_begin` and `on_epoch_end`: a dataset "
        "that overrides them is built ahead only after they ran."
    )
    if facts.workers_are == "inline":
        advice += " And `workers=1` builds ahead at all."
    return evidence, advice


def _too_few_batches(facts: Facts) -> tuple[str, str]:
    evidence = (
        f"{formatting.count(facts.batches, 'batch')} for {facts.workers} "
        "workers: they build all at once, and training waits for the first."
    )
    advice = (
        "Smaller batches, and more of them, let training begin earlier. More "
        f"than `workers={facts.batches}` have nothing to do. Longer epochs "
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


def _more_processes(facts: Facts) -> str:
    """Advises how many workers keep up with the steps, on the free cores."""
    builds_s = facts.cpu_s + facts.store_s
    wanted = math.ceil(builds_s / max(facts.free_s, 1e-9))
    scales = facts.workers_are in ("process", "ray") or (
        facts.workers > 1 and not _is_gil_bound(facts)
    )
    ours = facts.workers if scales else 0
    count = _of_use(facts, min(wanted, math.floor(facts.room + 0.3)))
    count = max(1, count, ours + 1)
    if scales and facts.workers_are in ("thread", "ray"):
        call = f"`workers={count}`"
    else:
        call = f"`workers={count}, use_multiprocessing=True`"
    building_s = max(builds_s / count, facts.cpu_s / facts.cores)
    advice = f"Pass {call}" + _gain(facts, building_s)
    return advice + _longer_queue(facts, count)


def _of_use(facts: Facts, workers: int) -> int:
    """Limits a number of workers to fewer than the epoch's batches."""
    return min(workers, facts.batches - 1)


def _longer_queue(facts: Facts, workers: int) -> str:
    """Advises a longer queue if some workers would be idle."""
    if workers <= facts.max_queue_size:
        return ""
    return f" Raise `max_queue_size` to {2 * workers} with it."


def _gain(facts: Facts, building_s: float) -> str:
    """Says how long an epoch would take at best with quicker building."""
    hoped_s = max(facts.free_s, building_s, facts.build_s_p50)
    if hoped_s >= facts.wall_s:
        return "."
    return f": {formatting.duration(hoped_s)} an epoch at best."


def _per_batch(facts: Facts, seconds: float) -> str:
    return formatting.duration(seconds / max(facts.batches, 1))


def _free_cores(facts: Facts) -> str:
    if facts.busy_cores is None:
        return f"there are {facts.cores:g} {_cores(facts.cores)}"
    return (
        f"{facts.free_cores:.1f} of {facts.cores:g} {_cores(facts.cores)} "
        "were free"
    )


def _cores(number: float) -> str:
    return "core" if number == 1 else "cores"
