"""Measures batches for `workers="auto"`, and applies the tuner's choices.

The tuner reads no clock and knows no workers. `AutoTuner` measures for it, and
the loader calls `AutoTuner` when a batch is asked for and when it is delivered.
"""

from __future__ import annotations

import dataclasses
import logging
import time

from keras_fastdata._call_stack import has_gil
from keras_fastdata.building import interface
from keras_fastdata.building.interface import Dataset
from keras_fastdata.engine.settings import Settings
from keras_fastdata.engine.tuner import (
    INLINE,
    Sample,
    Tuner,
    WorkerConfigChoice,
)
from keras_fastdata.metrics import cpu
from keras_fastdata.metrics.pool_stats import TuningDecision
from keras_fastdata.metrics.timing import INTERVAL_S, Timing

_log = logging.getLogger("keras_fastdata")


class AutoTuner:
    """Measures batches for a `Tuner`, which chooses the workers."""

    def __init__(self, settings: Settings, dataset: Dataset) -> None:
        self._settings = settings
        # What a worker opens is its own: it could neither be shared by
        # threads, nor sent to processes.
        opens = any(
            interface.overrides(dataset, name)
            for name in ("on_worker_start", "on_worker_stop")
        )
        self._tuner = Tuner(
            cpu.read().allowed,
            settings.lookahead,
            WorkerConfigChoice(1, True) if opens else INLINE,
            has_gil=has_gil(),
        )
        if opens:
            self._exclude(
                False, "`on_worker_start` opens what is a worker's own."
            )
        self._timing: Timing | None = None
        self._worker = 0
        self._asked_s = self._returned_s = 0.0
        self._asked_cpu_s = self._returned_cpu_s = 0.0

    @property
    def settings(self) -> Settings:
        """The constructor arguments, with the tuner's choice of workers."""
        choice = self._tuner.choice
        return dataclasses.replace(
            self._settings,
            workers=choice.workers,
            use_multiprocessing=choice.are_processes,
        )

    @property
    def decisions(self) -> tuple[TuningDecision, ...]:
        """The tuner's decisions so far, each with its reason."""
        return tuple(self._tuner.decisions)

    def interval_s(self, wanted_s: float | None) -> float:
        """Returns the seconds between two timed batches, at most `wanted_s`."""
        needed_s = INTERVAL_S if self._tuner.has_converged else 0.0
        return needed_s if wanted_s is None else min(needed_s, wanted_s)

    def ask(self) -> None:
        """Records the time at which a batch is requested."""
        self._timing = None
        self._asked_cpu_s = time.process_time()
        self._asked_s = time.perf_counter()

    def opened(self, timing: Timing | None, worker: int) -> None:
        """Records a received batch's build times, and which worker built it."""
        self._timing, self._worker = timing, worker

    def deliver(self, *, counts: bool) -> bool:
        """Measures a delivered batch; returns whether `settings` changed.

        Does not measure the batch if `counts` is false.
        """
        before = self._tuner.choice
        returned_s = time.perf_counter()
        if counts:
            self._tuner.add(
                Sample(
                    self._asked_s - self._returned_s,
                    self._asked_cpu_s - self._returned_cpu_s,
                    returned_s - self._asked_s,
                    self._timing,
                    self._worker,
                )
            )
        self._returned_cpu_s = time.process_time()
        self._returned_s = time.perf_counter()
        return self._tuner.choice != before

    def exclude_failed(self, error: Exception) -> bool:
        """Excludes the current kind of workers because of `error`.

        Returns whether it did. Inline builds cannot be excluded.
        """
        choice = self._tuner.choice
        if not choice.workers:
            return False
        kind = "processes" if choice.are_processes else "threads"
        lines = str(error).strip().splitlines()
        why = lines[0] if lines else repr(error)
        self._exclude(choice.are_processes, f"No {kind}: {why}")
        return True

    @property
    def observes(self) -> bool:
        """Whether to check if inline builds use global random generators."""
        tuner = self._tuner
        if tuner.is_excluded(processes=False):
            return False
        choice = tuner.choice
        return not tuner.has_converged or (
            choice.workers > 0 and not choice.are_processes
        )

    def on_global_rng(self, what: str) -> None:
        """Rules out worker threads, which would share random generators."""
        self._exclude(False, f"No threads, which would share {what}.")

    def _exclude(self, processes: bool, reason: str) -> None:
        self._tuner.exclude(processes=processes, reason=reason)
        _log.info("workers='auto': %s", reason)


class SettingsInEffect:
    """Holds the settings that are in effect for one dataset.

    Attributes:
        now: The constructor arguments, with the workers that "auto" has chosen.
        auto: Chooses the workers; `None` without `workers="auto"`.
    """

    def __init__(self, settings: Settings, dataset: Dataset) -> None:
        self.replace(settings, dataset)

    def replace(self, settings: Settings, dataset: Dataset) -> None:
        """Replaces the settings; with `workers="auto"`, tuning starts again."""
        self.now, self.auto = settings, None
        if settings.workers == "auto":
            self.auto = AutoTuner(settings, dataset)
            self.adopt()

    def adopt(self) -> None:
        """Applies the latest choice of the tuner for `workers="auto"`."""
        if self.auto is not None:
            self.now = self.auto.settings

    @property
    def are_outdated(self) -> bool:
        """Whether the tuner has changed its choice since `adopt`."""
        return self.auto is not None and self.auto.settings != self.now

    def adopt_without(self, error: Exception) -> bool:
        """Chooses another kind of workers after an error, if possible.

        Not without `workers="auto"`, or if builds are inline. Returns whether
        it did.
        """
        if self.auto is None or not self.auto.exclude_failed(error):
            return False
        self.adopt()
        return True
