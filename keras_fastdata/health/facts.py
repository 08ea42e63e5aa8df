"""Defines `Facts`: what was measured of one or several epochs.

The reason for waiting and the advice are found from these figures alone.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import statistics
from collections.abc import Sequence

from keras_fastdata.metrics.recorder import Slow
from keras_fastdata.metrics.worker_kinds import (
    NO_LIMIT,
    WorkerKind,
    WorkerLimit,
)

MOST_OF = 0.5

_STRAGGLER = 4  # times the median time of builds
_FEW = 0.2  # of all batches
_FULL = 0.1  # of the cores: if fewer are free, or
_FULL_CORES = 0.3  # fewer cores than this, the cores count as full
_GIL_HELD = 0.35  # of the time, at least, where threads keep it from others
_IDLE = 0.5  # of the time: Ray workers that build less mostly wait
_LITTLE = 0.05  # of the lost time: less building cannot be the reason
_SOME = 0.2  # of builds: a shorter wait for a core may be by chance
_CLEARLY = 0.25  # of the cores: if more are free, a thread need not wait
# Each batch is read and written several times. From this on, that takes more
# than a tenth of the time: a core copies some 5 to 15 GB/s.
_MUCH_MEMORY_BYTES_PER_S = 1e9

# What a step takes longer after a wait, because cores slept and other programs
# used their caches. `benchmarks/advice.py` met 0.2 to 0.5 ms after 20 ms.
_WAKING_S = 0.0003  # at most,
_WAKING = 0.03  # of the wait, at most, and
_WAKING_OF_STEP = 0.15  # of the step, at most


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
        on_cpu: Whether training steps run on the CPU, as builds do.
        starts_late: Whether the first batch of the `fit` cost more than all
            other waits for data.
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
    on_cpu: bool = True
    starts_late: bool = False

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
        return self.slowed_s > MOST_OF * self.lost_s

    @property
    def in_a_row_s(self) -> float:
        """The seconds of all steps, if they followed each other at once.

        This is less than `free_s` where most steps follow a wait. Where cores
        are full, they do not sleep, and steps in a row wait for them.

        `free_s` counts each step from its start to its last result. A backend
        that computes in the background starts the next step meanwhile.
        """
        started_s = max(0.0, self.wall_s - self.wait_s - self.hook_s)
        steps_s = min(self.free_s, max(started_s, self.free_s - started_s))
        if self.waits_for_stragglers or self.cores_are_full:
            return steps_s
        batches = max(self.batches, 1)
        waking_s = min(_WAKING_S, _WAKING * self.wait_s / batches)
        return steps_s - min(batches * waking_s, _WAKING_OF_STEP * steps_s)

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
        if self.computing < MOST_OF:
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
    def are_several_threads(self) -> bool:
        """Whether the workers are two or more threads."""
        return self.workers_are is WorkerKind.THREAD and self.workers > 1

    @property
    def are_threads_crowded(self) -> bool:
        """Whether threads wait for a core while a core is free.

        A thread that waits for Python's lock is often put on the core of the
        thread that releases the lock, and stays there.
        """
        is_delayed = self.delay_s > _SOME * self.build_s
        return (
            self.are_several_threads
            and self.busy_cores is not None
            and is_delayed
            and self.free_cores > _CLEARLY * self.cores
        )

    @property
    def stragglers(self) -> list[Slow]:
        """Batches that took far longer to build than usual, longest first."""
        if not self.build_s_p50:
            return []
        limit_s = _STRAGGLER * self.build_s_p50
        return [slow for slow in self.slowest if slow.build_s > limit_s]

    @property
    def waits_for_stragglers(self) -> bool:
        """Whether most of the waiting was for a few slow batches."""
        slow = self.stragglers
        waited_s = sum(batch.waited_s for batch in slow)
        few = len(slow) <= _FEW * self.batches
        return few and waited_s > MOST_OF * self.lost_s

    @property
    def are_at_hand(self) -> bool:
        """Whether batches take almost no time to build, as with a cache."""
        return self.build_s + self.store_s < _LITTLE * self.lost_s

    @property
    def is_transfer_bound(self) -> bool:
        """Whether moving batches takes longer than building them."""
        if self.workers_are is WorkerKind.RAY:
            # Ray's transfers are not measured: all time without builds counts.
            return self.build_s < _IDLE * self.workers * self.wall_s
        taking_s = self.open_s
        if not math.isnan(self.take_s):
            taking_s = max(taking_s, self.batches * self.take_s)
        moving_s = self.store_s + taking_s
        is_moved = self.workers_are is WorkerKind.PROCESS
        return (is_moved and moving_s > self.build_s) or self.are_at_hand

    @property
    def bytes_per_s(self) -> float:
        """The bytes of batches that training gets in a second."""
        return self.nbytes / max(self.wall_s, 1e-9)

    @property
    def is_memory_bound(self) -> bool:
        """Whether builds and steps on the CPU mostly move memory."""
        return (
            self.on_cpu
            and self.workers_are is not WorkerKind.RAY
            and self.computing >= MOST_OF
            and self.bytes_per_s > _MUCH_MEMORY_BYTES_PER_S
        )

    @property
    def is_loading_shared_by_threads(self) -> bool:
        """Whether threads would save what each process loads at its start."""
        return (
            self.starts_late
            and self.workers_are is WorkerKind.PROCESS
            and self.computing < MOST_OF
        )

    @property
    def do_threads_hold_lock(self) -> bool:
        """Whether threads that build keep Python's lock from the steps."""
        is_thread = self.workers_are is WorkerKind.THREAD
        return is_thread and self.gil_held > _GIL_HELD


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
