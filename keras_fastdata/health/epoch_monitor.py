"""Measures the epochs of one training, and makes an `EpochHealth` of each.

A recorder hears of batches, a step clock of training steps; at the end of an
epoch (or a validation, an evaluation, a prediction) both are read, together
with what the machine and the workers say, and judged.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from keras_fastdata._call_stack import has_gil
from keras_fastdata._dataset_internals import worker_limit
from keras_fastdata.display.description import dataset_text
from keras_fastdata.health.account import EpochTimes
from keras_fastdata.health.facts import Facts
from keras_fastdata.health.pool_reader import PoolReader
from keras_fastdata.health.reasons import Kind, kind_after, kind_of
from keras_fastdata.health.step_clock import EpochTiming, Step, StepClock
from keras_fastdata.health.summary import EpochHealth, name_of
from keras_fastdata.health.verdict import judge
from keras_fastdata.metrics import cpu, ram
from keras_fastdata.metrics.gil import GilProbe
from keras_fastdata.metrics.pool_stats import PoolStats
from keras_fastdata.metrics.recorder import BatchSource, BatchStats, Recorder
from keras_fastdata.metrics.timing import INTERVAL_S

STEPS_KEPT = 8192


@dataclasses.dataclass(frozen=True)
class MonitoredDataset:
    """The name, settings and workers of a dataset that was measured.

    Attributes:
        name: Its class name.
        text: Its description, as its `repr` has it.
        settings: Its constructor arguments (`engine.settings.Settings`).
        pool_stats: Its workers, at the end of what was measured last, with
            the stacks that were met while it was measured.
    """

    name: str
    text: str
    settings: Any
    pool_stats: PoolStats | None


class Sink(Protocol):
    """Receives the times of all batches and steps, for example for a trace.

    Called by the thread that trains. Between `begin` and `end`, the batches
    come in the order of their delivery and the steps in theirs; either may
    be far ahead of the other.
    """

    def begin(self, phase: str, epoch: int) -> None:
        """Begins an epoch of a phase such as "train"."""
        ...

    def batches(self, spans: npt.NDArray[np.float64]) -> None:
        """Receives delivered batches; each row of `spans` is one batch.

        The shape of `spans` is `(n, len(Span._fields))`.
        """
        ...

    def step(self, step: Step) -> None:
        """Receives a step that has ended."""
        ...

    def end(self) -> None:
        """Ends the epoch.

        All its batches and steps were received before.
        """
        ...


class EpochMonitor:
    """Measures epochs in the calling thread, until `close` is called.

    Args:
        synchronize: Waits until the device has done all it was asked for;
            `None` where steps end only when they have been computed.
        fetches_ahead: Whether the batch of a step is fetched before
            `on_train_batch_begin`.
        sink: What wants to know of every batch and step, if anything does.
        read_compiling_s: Returns how many seconds the backend has compiled
            so far; `None` where the backend does not tell.
        on_cpu: Whether training steps run on the CPU.

    Attributes:
        step: To be called with its number when a step begins.
        recorder: What hears of the batches.
        steps: The latest steps.
        datasets: What was measured, by phase.
        times: The parts of what was measured last.
        ended_s: When that ended, by `time.monotonic`.
    """

    def __init__(
        self,
        synchronize: Callable[[], None] | None,
        fetches_ahead: bool,
        sink: Sink | None = None,
        read_compiling_s: Callable[[], float] | None = None,
        on_cpu: bool = True,
    ) -> None:
        self._on_cpu = on_cpu
        self._read_compiling_s = read_compiling_s
        # A sink wants all of them.
        self.recorder = Recorder(
            0.0 if sink is not None else INTERVAL_S,
            on_source=self._meet,
            on_spans=None if sink is None else sink.batches,
        )
        self.steps: collections.deque[Step] = collections.deque(
            maxlen=STEPS_KEPT
        )
        self.datasets: dict[str, MonitoredDataset] = {}
        self.times = EpochTimes()
        self.ended_s = 0.0
        self._sink = sink
        self._synchronize = synchronize
        self._fetches_ahead = fetches_ahead
        self._clocks: dict[str, StepClock] = {}  # by phase
        self._clock: StepClock | None = None
        self.step: Callable[[int], None] = no_step
        self._phase = ""
        self._probe = GilProbe(self.recorder)
        self._settings: Any = None
        self._saving_s = 0.0  # within what is measured
        self._latest: dict[str, tuple[Facts, Kind]] = {}  # by phase
        self._pool_reader = PoolReader()

    @property
    def phase(self) -> str:
        """The phase that is being measured, such as "train"; "" if none."""
        return self._phase

    def begin(self, phase: str, epoch: int, start_s: float = 0.0) -> None:
        """Starts the measurement of one epoch.

        Args:
            phase: "train", "validation", "evaluate" or "predict".
            epoch: Keras's number of the epoch.
            start_s: The time that the first batch took before.
        """
        if phase not in self._clocks:
            self._clocks[phase] = StepClock(
                phase,
                self.recorder,
                self._synchronize,
                self._fetches_ahead,
                self._note_step,
                self._read_compiling_s,
            )
        self._phase, self._epoch = phase, epoch
        self._clock = self._clocks[phase]
        self.step = self._clock.step
        self.recorder.begin(predicts=phase == "predict", sampler=self._clock)
        self._watch_lock()
        self._skips = self.recorder.skips
        self._probe.take()
        self._cores = cpu.read()
        self._began_s = time.monotonic()
        self._trainer_cpu_s = time.process_time()
        self._start_s, self._excluded_s = start_s, self.recorder.excluded_s
        self._saving_s = 0.0
        if self._sink is not None:
            self._sink.begin(phase, epoch)
        self._clock.begin(epoch)

    def end(self, *, is_broken_off: bool = False) -> EpochHealth | None:
        """Ends the measurement of an epoch, and returns the `EpochHealth`.

        Args:
            is_broken_off: Whether an exception has ended it, at any time since
                the beginning of the latest step.

        Returns:
            Its figures; `None` if no batch of ours was delivered in it.
        """
        clock, self._clock, self.step = self._clock, None, no_step
        if clock is None:
            return None
        timing = clock.end(is_broken_off=is_broken_off)
        self._mark_compiled(timing.compiled)
        self.recorder.flush()
        self.ended_s = clock.at_s if is_broken_off else time.monotonic()
        batch_stats = self.recorder.batch_stats
        self.times = EpochTimes(
            hook_s=batch_stats.hook_s,
            compiling_s=timing.compiling_s,
            excluded_s=self.recorder.excluded_s
            - self._excluded_s
            - self._saving_s,
        )
        phase, self._phase = self._phase, ""
        if self._sink is not None:
            self._sink.end()
        source = self.recorder.source
        if source is not None:
            self._settings = source.settings  # "auto" may have changed them
        if not batch_stats.batches:
            return None
        pool_stats = self._pool_reader.read(phase, source)
        dataset = None if source is None else source.dataset
        self.datasets[phase] = MonitoredDataset(
            self._name,
            self._name if dataset is None else dataset_text(dataset),
            self._settings,
            pool_stats,
        )
        facts = self._facts(phase, timing, pool_stats)
        self.times = self.times._replace(
            first_wait_s=facts.first_wait_s,
            wait_s=max(0.0, facts.lost_s - facts.hook_s),
        )
        return self._health(phase, facts, timing, pool_stats)

    def _facts(
        self, phase: str, timing: EpochTiming, pool_stats: PoolStats | None
    ) -> Facts:
        """Returns the measurements that the verdict is based on."""
        settings, batch_stats = self._settings, self.recorder.batch_stats
        source = self.recorder.source
        losses = () if pool_stats is None else pool_stats.losses
        restarts = sum(loss.at_s >= self._began_s for loss in losses)
        now = cpu.read()
        allowed, busy_cores = now.allowed, cpu.busy_cores(self._cores, now)
        if pool_stats is not None and pool_stats.cores is not None:
            allowed, busy_cores = pool_stats.cores, None  # nobody tells
        return Facts(
            workers_are=settings.kind,
            workers=settings.count,
            max_queue_size=settings.lookahead,
            batches=batch_stats.batches,
            nbytes=batch_stats.nbytes,
            wall_s=timing.wall_s,
            free_s=_free_s(timing, batch_stats, self._busy_s()),
            build_s=batch_stats.build_s,
            cpu_s=batch_stats.cpu_s,
            delay_s=batch_stats.delay_s,
            store_s=batch_stats.store_s,
            open_s=batch_stats.open_s,
            wait_s=batch_stats.wait_s,
            build_s_p50=batch_stats.build.quantile(0.5),
            first_wait_s=batch_stats.first_wait_s,
            hook_s=batch_stats.hook_s,
            retried=batch_stats.retried,
            retried_wait_s=batch_stats.retried_wait_s,
            restarts=restarts,
            slowest=tuple(batch_stats.slowest),
            cores=allowed,
            busy_cores=busy_cores,
            gil_held=self._probe.take(),
            has_gil=has_gil(),
            memory=ram.left_now() if restarts else "",
            dataset=self._name,
            trainer_cpu_s=time.process_time() - self._trainer_cpu_s,
            elapsed_s=now.at_s - self._cores.at_s,
            start_s=self._start_s,
            auto=pool_stats is not None and bool(pool_stats.decisions),
            take_s=batch_stats.take_s,
            phase=phase,
            limit=worker_limit(None if source is None else source.dataset),
            on_cpu=self._on_cpu,
        )

    def _health(
        self,
        phase: str,
        facts: Facts,
        timing: EpochTiming,
        pool_stats: PoolStats | None,
    ) -> EpochHealth:
        batch_stats = self.recorder.batch_stats
        had_s = max(self.ended_s - self._began_s, 1e-9) * max(facts.workers, 1)
        latest = self._latest.get(phase)
        kind = kind_after(facts, *latest) if latest else kind_of(facts)
        self._latest[phase] = facts, kind
        return EpochHealth(
            phase=phase,
            epoch=self._epoch,
            batches=batch_stats.batches,
            verdict=judge(facts, kind, name_of(phase, self._epoch)),
            data_wait=facts.data_wait,
            wall_s=facts.wall_s,
            free_s=facts.free_s,
            step_s=timing.step_s,
            build_s_p50=facts.build_s_p50,
            build_s_p95=batch_stats.build.quantile(0.95),
            wait_s_p95=batch_stats.wait.quantile(0.95),
            queue_depth_mean=batch_stats.depth / batch_stats.batches,
            worker_utilization=min(1.0, self._busy_s() / had_s),
            nbytes=batch_stats.nbytes,
            restarts=facts.restarts,
            skipped=self.recorder.skips - self._skips,
            retried=batch_stats.retried,
            cores=facts.cores,
            busy_cores=facts.busy_cores,
            workers_nbytes=self._pool_reader.memory_nbytes(pool_stats),
            shared_nbytes=0 if pool_stats is None else pool_stats.shared_nbytes,
            facts=facts,
        )

    def _busy_s(self) -> float:
        """Returns the time of all builds, without those before the epoch."""
        stats = self.recorder.batch_stats
        # Workers started then, too; a model is built from two batches at most.
        before_s = sum(slow.build_s for slow in stats.slowest[:2])
        before_s = min(before_s, self._start_s)
        return max(0.0, stats.build_s + stats.store_s - before_s)

    def add_saving(self, seconds: float) -> None:
        """Excludes the time of a callback's save from the training steps."""
        self.recorder.exclude(seconds)
        self._saving_s += seconds

    def close(self) -> None:
        """Stops the thread that measures waits for the GIL. Idempotent."""
        self._probe.close()

    def _note_step(self, step: Step) -> None:
        self.steps.append(step)
        if self._sink is not None:
            self._sink.step(step)

    def _mark_compiled(self, numbers: frozenset[int]) -> None:
        """Marks the steps of this epoch in which Keras compiled a function."""
        for place in range(len(self.steps) - 1, -1, -1):
            step = self.steps[place]
            if (step.phase, step.epoch) != (self._phase, self._epoch):
                break
            if step.number in numbers:
                self.steps[place] = step._replace(compiled=True)

    def _meet(self, source: BatchSource, stacks_before: dict[str, int]) -> None:
        self._name, self._settings = source.name, source.settings
        self._pool_reader.meet(source, stacks_before)
        self._watch_lock()

    def _watch_lock(self) -> None:
        """Starts to measure waits for the GIL if this process builds batches.

        What builds hold of it tells what threads would bring.
        """
        settings = self._settings
        if settings and not settings.kind.has_copies:
            self._probe.watch()


def _free_s(
    timing: EpochTiming, batch_stats: BatchStats, busy_s: float
) -> float:
    """Estimates an epoch's duration if building batches took no time.

    The result is at most the measured time.

    That saves no more than the waits, and what may have slowed the steps down:
    building. All else that took time is of others' doing.
    """
    most_s = batch_stats.wait_s + batch_stats.hook_s + busy_s
    free_s = max(timing.free_s, timing.wall_s - most_s)
    return min(free_s, timing.wall_s)


def no_step(number: int) -> None:
    """Ignores a step, because no epoch is being measured."""
