"""Defines `LoaderHealth`, which reports why training waits for data."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from keras_fastdata.callbacks import device
from keras_fastdata.callbacks.base import Callback, registered
from keras_fastdata.callbacks.saving_time import SavingTimer, savers_among
from keras_fastdata.callbacks.tensorboard import EventFiles, log_dirs_among
from keras_fastdata.health import comparison, hot_lines
from keras_fastdata.health.account import FitTimer
from keras_fastdata.health.comparison import Figures
from keras_fastdata.health.epoch_monitor import (
    STEPS_KEPT,
    EpochMonitor,
    no_step,
)
from keras_fastdata.health.measured import Measured
from keras_fastdata.health.reasons import kind_of
from keras_fastdata.health.record import Record
from keras_fastdata.health.report import figure
from keras_fastdata.health.report import html as pages
from keras_fastdata.health.report.trace import TraceWriter
from keras_fastdata.health.step_clock import Step
from keras_fastdata.health.summary import (
    EpochHealth,
    HealthSummary,
    slower_steps,
    summarize,
)
from keras_fastdata.metrics import formatting, recorder
from keras_fastdata.metrics.cost_model import WORTH
from keras_fastdata.metrics.pool_stats import PoolStats

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_log = logging.getLogger("keras_fastdata")
_WORTH_S = 0.1  # what takes less is not mentioned after an epoch
_DATA = {"train": "training data", "validation": "validation data"}


@registered
class LoaderHealth(Callback):
    """Reports why training waits for its data, and what to change.

    Adds `data_wait` to the logs of every epoch: the share of its wall time,
    from 0 to 1, that is waiting for data, and would be saved if batches took
    no time to build. The wall time here is that of the steps and their waits
    (`wall_s` in `summary()`), without validation, saving, steps that compile,
    and what comes before the first epoch. The progress bar, `History` and
    every callback that is listed after this one have it; so list it first.
    A line after each epoch has the seconds of which it is the share, the
    reason, and what else took long. After the last epoch, a table follows, an
    account of the time since `fit` was called, whose parts add up (also in
    `summary()`, for each epoch too), and what to change; advice that would
    save less than a second, or 5%, is left out. The seconds of waiting are the
    same everywhere; the first batch of a `fit`, and epoch hooks, which an
    epoch counts as waiting, are parts of their own in the account. In a `fit`
    without a `FastPyDataset` nothing is added and nothing printed. After
    `evaluate` or `predict` ask for `summary()`.

    With `on_error="skip"`, `skipped` in the logs is the number of batches
    that the epoch and its validation left out, once there was one; and the
    attribute `skipped` lists those of the latest `fit`, at most 1,000, each
    with `dataset`, `index` and `traceback`.

    What the steps alone would take is known from sampled steps, the first few
    and then so many that it costs at most 1% of the time: the workers rest,
    and the device is synchronized before and after. So time in which the
    device computes while a batch is fetched is not taken for waiting, and what
    builds cost the steps beside them is: that is waiting too, and where it is
    most of it, console and page say how many seconds of waiting are steps that
    builds slow down. Steps that compile are left out, and so is validation,
    which is measured on its own. A `GeneratorDataset` is measured in the
    workers that run its generators.

    If the verdict on the whole differs from that on an epoch, it says which
    epochs it is on. Each verdict says so if other programs leave no core free.

    With a `keras.callbacks.TensorBoard` beside it, scalars named `loader/...`
    are in its event files: `data_wait`, `batches_per_s`, `build_s_p50`,
    `build_s_p95`, `queue_depth`, `worker_utilization`, `restarts`; and the
    parts of the epoch's time, such as `account/waiting_s`.

    Args:
        verbose: 1 prints; 0 is silent. Defaults to 1.
        report: A path; `fit`, `evaluate` and `predict` leave a page of HTML
            there when they end. It needs no network. Needs the extra
            `report`.
        trace: A path; they leave a trace of every batch and step there, for
            https://ui.perfetto.dev or chrome://tracing.
        stacks: A path; they leave the stacks there that builds were met in,
            for https://www.speedscope.app or `flamegraph.pl`. The page has
            their flame graph. Builds of less than 5 ms are not looked at.
        compare: A page that `report` wrote before, by its path, or an earlier
            `summary()`. Console, page and `summary()` then show before and
            now. The path may be that of `report`: each run is then compared
            with the run before, if there was one.

    Raises:
        ValueError: `verbose` is neither 0 nor 1, or `compare` is no page of
            `LoaderHealth`. In `fit`: there are two of these callbacks.
        OSError: The page to compare with cannot be read.
        ImportError: `report` is given, and Jinja2 is not installed.

    Example:

    >>> from keras_fastdata import LoaderHealth
    >>> LoaderHealth(report="health.html").get_config()["report"]
    'health.html'
    """

    model: Any
    # Nothing here needs Keras to wait for a step; see `keras.callbacks`.
    async_safe = True

    def __init__(
        self,
        verbose: int = 1,
        report: str | os.PathLike[str] | None = None,
        trace: str | os.PathLike[str] | None = None,
        stacks: str | os.PathLike[str] | None = None,
        compare: str | os.PathLike[str] | HealthSummary | None = None,
    ) -> None:
        super().__init__()
        if verbose not in (0, 1):
            raise ValueError(f"`verbose` must be 0 or 1. Received: {verbose!r}")
        self.verbose = int(verbose)
        self.report = None if report is None else os.fspath(report)
        self.trace = None if trace is None else os.fspath(trace)
        self.stacks = None if stacks is None else os.fspath(stacks)
        if self.report is not None:
            pages.require()
        self.compare = compare
        self._compared = self._figures_before()
        self._monitor: EpochMonitor | None = None
        self._measured = Measured.IDLE
        # Told of each step; of one of training, after an evaluation amid it.
        self._step: Callable[[int], None] = no_step
        self._train_step: Callable[[int], None] = no_step
        self._has_reported = False
        self._epochs: list[EpochHealth] = []
        self._validations: list[EpochHealth] = []
        self._pool_stats: dict[str, PoolStats | None] = {}  # by phase
        self._trained: EpochHealth | None = None  # the epoch under way
        self._timer: FitTimer | None = None  # of a `fit` that has begun
        self._began_s = self._called_s = 0.0
        self._thread = 0  # that trains
        self._validates = False  # in the epoch under way
        self._epoch = 0
        self._skipped: list[recorder.Skipped] = []
        self._companions: list[str] = []  # folders of TensorBoard's
        self._line: str | None = None
        self._record: Record | None = None
        self._writer: TraceWriter | None = None
        self._event_files = EventFiles([])
        self._savers: list[Any] = []  # the callbacks beside it that save
        self._saving: SavingTimer | None = None

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments, for `keras.saving`."""
        return {
            "verbose": self.verbose,
            "report": self.report,
            "trace": self.trace,
            "stacks": self.stacks,
            "compare": None
            if isinstance(self.compare, HealthSummary)
            else self.compare,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> LoaderHealth:
        """Makes a callback from the result of `get_config`."""
        return cls(**config)

    def summary(self) -> HealthSummary:
        """Returns the results of the latest `fit`, `evaluate` or `predict`.

        While that runs: of the epochs that have ended. After an exception in
        it, also of the epoch that the exception has ended.
        """
        self._end_broken_off()
        timer = self._timer
        # Of a fit, the training rather than the validation.
        pool_stats = next(iter(self._pool_stats.values()), None)
        return summarize(
            self._epochs,
            self._validations,
            pool_stats,
            None if timer is None else timer.account,
            f"{self._began:%Y-%m-%d %H:%M:%S}" if self._epochs else "",
            self._compared,
            self._pool_stats.get("validation"),
        )

    def plot(self) -> Figure:
        """Plots the measurements of the latest `fit`, `evaluate` or `predict`.

        Returns:
            A `matplotlib.figure.Figure`: what training and each worker did,
            how long batches took to build and were waited for, and how many
            were ready. `figure.savefig(path)` writes it.

        Raises:
            ImportError: Matplotlib is not installed (the extra `report`).
            RuntimeError: Nothing has been measured yet.
        """
        self._end_broken_off()
        record = self._record
        if record is None and self._monitor is not None:
            record = self._make_record(self._monitor)  # as far as it has come
        if record is None:
            raise RuntimeError(
                "There is nothing to plot yet: pass this callback to `fit`, "
                "`evaluate` or `predict`."
            )
        return figure.plot(record)

    def _repr_html_(self) -> str:
        """Returns the summary as HTML, for display in a notebook."""
        return self.summary()._repr_html_()

    @property
    def skipped(self) -> list[recorder.Skipped]:
        """The skipped batches of the latest `fit`, at most 1,000."""
        return list(self._skipped)

    # -- called by Keras ----------------------------------------------------

    def set_params(self, params: Any) -> None:
        """Accepts Keras's parameters, and prepares for a new measurement.

        Keras calls this method first. It ends an interrupted measurement.

        Raises:
            ValueError: There are two `LoaderHealth` in `callbacks`.
        """
        super().set_params(params)  # type: ignore[misc]
        from keras_fastdata import keras_bridge

        fits = self._measured in (Measured.FIT, Measured.FIT_NESTED)
        if fits and keras_bridge.is_within_fit():
            # One of its callbacks evaluates, with this one: the fit goes on.
            self._move_to(Measured.FIT_NESTED)
            self._step, self._train_step = no_step, self._resume_fit
            return
        beside = keras_bridge.callbacks_beside()
        if any(isinstance(c, LoaderHealth) and c is not self for c in beside):
            raise ValueError(
                "There are two LoaderHealth in `callbacks`. Leave one out: it "
                "can have `report` and `trace` both."
            )
        self._companions = log_dirs_among(beside)
        self._savers = savers_among(beside)
        self._move_to(Measured.IDLE)  # what was broken off did not end
        self._stop()

    def on_train_begin(self, logs: Any = None) -> None:
        self._start()
        self._move_to(Measured.FIT)
        self._saving = SavingTimer(self._savers, self._note_saving)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        from keras_fastdata import keras_bridge

        self._print_line()
        self._epoch = epoch
        self._trained = None
        self._validates = False
        adapter = keras_bridge.training().adapter
        start_s = 0.0
        if self._timer is None:
            if adapter is not None:
                start_s = adapter.probed_s
                self._called_s = min(self._called_s, adapter.began_s)
            self._timer = FitTimer(self._called_s)
            self._timer.end_start(self._began_s, start_s)
        self._timer.end_callbacks(time.monotonic())
        self._begin("train", start_s)
        if adapter is not None and self._monitor is not None:
            # Not the data that another callback evaluates on by now.
            self._monitor.recorder.expect(adapter.source_id)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._train_step(batch)

    def on_test_begin(self, logs: Any = None) -> None:
        if self._measured is Measured.FIT_NESTED:
            return
        if self._measured is Measured.FIT:
            self._validates = True
            self._end_training()
            self._begin("validation")
        else:
            self._start()
            self._move_to(Measured.EVALUATE)
            self._begin("evaluate")

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._step(batch)

    def on_test_end(self, logs: Any = None) -> None:
        if self._measured is Measured.FIT_NESTED:
            self._end_nested()
            return
        found = self._end()
        if self._measured is Measured.FIT:
            if found is not None:
                self._validations.append(found)
            if self._timer is not None and self._monitor is not None:
                self._timer.end_validation(
                    time.monotonic(), self._monitor.times
                )
        else:
            self._conclude(found)

    def on_predict_begin(self, logs: Any = None) -> None:
        if self._measured is Measured.FIT_NESTED:
            return
        self._start()
        self._move_to(Measured.PREDICT)
        self._begin("predict")

    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._step(batch)

    def on_predict_end(self, logs: Any = None) -> None:
        if self._measured is Measured.FIT_NESTED:
            self._end_nested()
            return
        self._conclude(self._end())

    def on_epoch_end(
        self, epoch: int, logs: dict[str, Any] | None = None
    ) -> None:
        self._end_training()
        account = None
        if self._timer is not None:
            account = self._timer.end_epoch(time.monotonic())
        health, self._trained = self._trained, None
        if health is None:
            return
        health = dataclasses.replace(health, account=account)
        self._epochs.append(health)
        self._event_files.write(health)
        if logs is not None:
            logs["data_wait"] = health.data_wait
            if self._skipped:
                logs["skipped"] = self._skipped_in(epoch)
        self._line = _describe(health, self._skipped_in(epoch))

    def on_train_end(self, logs: Any = None) -> None:
        self._print_line()
        if self._timer is not None:
            self._timer.end_callbacks(time.monotonic())
        self._stop()
        if self._timer is not None:
            self._timer.end_callbacks(time.monotonic())
        self._move_to(Measured.IDLE)
        summary = self.summary()
        if self._record is not None:
            # The page accounts for the same time as the console.
            self._record = dataclasses.replace(
                self._record, summary=summary, ended_s=time.monotonic()
            )
        if self.verbose and summary.verdict is not None:
            print(summary, flush=True)
        self._write_files()

    # -- measuring ----------------------------------------------------------

    def _figures_before(self) -> Figures | None:
        """Returns the measured values of the run to compare with, if any."""
        if self.compare is None:
            return None
        if isinstance(self.compare, HealthSummary):
            return self.compare.figures
        self.compare = os.fspath(self.compare)
        if self.compare == self.report and not os.path.exists(self.compare):
            return None  # this is the first run
        return comparison.read(self.compare)

    def _move_to(self, measured: Measured) -> None:
        """Changes the state; no other method changes it."""
        self._measured = measured

    def _start(self) -> None:
        import keras

        self._stop()
        self._epochs, self._validations = [], []
        self._pool_stats = {}
        self._timer = None
        self._epoch = 0
        self._line = None
        self._record = None
        self._began = datetime.datetime.now().astimezone()
        self._began_s = self._called_s = time.monotonic()
        self._thread = threading.get_ident()
        if self.trace is not None:
            self._writer = TraceWriter(self.trace)
        self._event_files = EventFiles(self._companions)
        self._monitor = EpochMonitor(
            functools.partial(device.synchronize, self.model)
            if device.is_asynchronous()
            else None,
            # Where `fit` walks over batches rather than over steps.
            fetches_ahead=keras.backend.backend() == "torch",
            sink=self._writer,
            read_compiling_s=device.compiling_clock(),
            on_cpu=device.is_on_cpu(),
        )
        self._skipped = self._monitor.recorder.skipped
        recorder.attach(self._monitor.recorder)

    def _make_record(self, monitor: EpochMonitor) -> Record:
        """Makes a `Record` of everything that was measured so far."""
        import keras

        # Of a fit, the training rather than the validation.
        subject = next(iter(monitor.datasets.values()), None)
        pool_stats = subject.pool_stats if subject else None
        return Record(
            dataset=subject.name if subject else "",
            settings=dataclasses.asdict(subject.settings) if subject else {},
            backend=keras.backend.backend(),
            began=self._began,
            began_s=self._called_s,
            ended_s=time.monotonic(),
            summary=self.summary(),
            spans=monitor.recorder.spans(),
            steps=self._steps(monitor),
            lost=pool_stats.losses if pool_stats else (),
            pids=pool_stats.pids if pool_stats else {},
            skipped=tuple(self._skipped),
            slowest=tuple(monitor.recorder.batch_stats.slowest),
            stacks=pool_stats.stacks if pool_stats else {},
            machine=device.machine(),
            datasets={
                _DATA.get(phase, "data"): dataset.text
                for phase, dataset in monitor.datasets.items()
            },
        )

    def _steps(self, monitor: EpochMonitor) -> tuple[Step, ...]:
        """Returns the recorded steps; step -1 is the time before these steps.

        That time, as a step with number -1 that waits for the first batch and
        builds the model, is left out if later steps are no longer known.
        """
        steps = tuple(monitor.steps)
        if not self._epochs or len(steps) >= STEPS_KEPT:
            return steps
        start = Step(
            self._epochs[0].phase,
            self._epochs[0].epoch,
            -1,
            self._called_s,
            self._began_s,
            self._epochs[0].start_s,
            sampled=False,
            compiled=True,
        )
        return (start, *steps) if start.waited_s else steps

    def _note_saving(self, seconds: float) -> None:
        """Records how many seconds another callback took to save."""
        if self._monitor is not None:
            self._monitor.add_saving(seconds)
        if self._timer is not None:
            self._timer.add_saving(seconds)

    def _stop(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.close()
        monitor, self._monitor = self._monitor, None
        self._step = self._train_step = no_step
        if monitor is not None:
            recorder.detach(monitor.recorder)
            monitor.close()
            self._record = record = self._make_record(monitor)
            self._event_files.close()
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close(record.pids, record.dataset, losses=record.lost)

    def _write_files(self) -> None:
        record = self._record
        if record is None:
            return
        if self.stacks is not None and record.stacks:
            try:
                hot_lines.write_folded(record.stacks, self.stacks)
            except OSError as error:
                _log.error("The stacks could not be written: %s", error)
        if self.report is None:
            return
        if self._has_reported and not record.dataset:
            return  # of other data; there is a page of ours already
        self._has_reported = True
        try:
            pages.write_report(record, self.report)
        except (OSError, ValueError) as error:  # the training is worth more
            _log.error("The report could not be written: %s", error)

    def _begin(self, phase: str, start_s: float = 0.0) -> None:
        if self._monitor is not None:
            self._monitor.begin(phase, self._epoch, start_s)
            self._step = self._train_step = self._monitor.step

    def _end_nested(self) -> None:
        """Resumes the measurement of a `fit` after a nested evaluation."""
        self._move_to(Measured.FIT)
        if self._monitor is not None:
            self._step = self._train_step = self._monitor.step

    def _resume_fit(self, batch: int) -> None:
        """Resumes measuring `fit` after a nested call raised an exception."""
        self._end_nested()
        self._train_step(batch)

    def _end_broken_off(self) -> None:
        """Ends what an exception has ended: Keras then calls no hook."""
        from keras_fastdata import keras_bridge

        monitor, is_idle = self._monitor, self._measured is Measured.IDLE
        if is_idle or monitor is None or self._thread != threading.get_ident():
            return
        if keras_bridge.trainer_at_work()[0]:
            return
        trains = monitor.phase == "train"
        health, account = self._end(is_broken_off=True), None
        if trains and self._timer is not None:
            self._timer.end_steps(
                monitor.ended_s, monitor.times, validates=False
            )
            account = self._timer.end_epoch(monitor.ended_s)
        elif self._measured is Measured.FIT:
            health = self._trained  # it has ended before the validation
        self._move_to(Measured.IDLE)
        if health is not None:
            self._epochs.append(dataclasses.replace(health, account=account))
        self._stop()

    def _end(self, *, is_broken_off: bool = False) -> EpochHealth | None:
        monitor = self._monitor
        self._step = self._train_step = no_step
        if monitor is None:
            return None
        health = monitor.end(is_broken_off=is_broken_off)
        for phase, dataset in monitor.datasets.items():
            self._pool_stats[phase] = dataset.pool_stats
        return health

    def _end_training(self) -> None:
        """Ends the measurement of an epoch's training, if still in progress."""
        if self._monitor is not None and self._monitor.phase == "train":
            self._trained = self._end()
            if self._timer is not None:
                self._timer.end_steps(
                    time.monotonic(),
                    self._monitor.times,
                    validates=self._validates,
                )

    def _conclude(self, health: EpochHealth | None) -> None:
        """Ends the measurement of an evaluation or prediction; writes files.

        Prints nothing: the progress bar's last line is yet to come.
        """
        if health is not None:
            self._epochs.append(health)
        self._stop()
        self._move_to(Measured.IDLE)
        self._write_files()

    def _skipped_in(self, epoch: int) -> int:
        """Returns how many batches an epoch and its validation skipped."""
        phases = [*self._epochs, *self._validations]
        return sum(h.skipped for h in phases if h.epoch == epoch)

    def _print_line(self) -> None:
        # One epoch late, when the progress bar has ended its line.
        line, self._line = self._line, None
        if line and self.verbose:
            print(line, flush=True)


def _describe(health: EpochHealth, skipped: int) -> str:
    """Describes an epoch in a few sentences.

    They have its waiting, the whole of which `data_wait` is a share, what else
    took at least 0.1 s and 5% of the epoch, and the number of skipped batches.
    """
    slower = slower_steps(health.slowed_s, health.waited_s, health.wall_s)
    kind = str(health.verdict.kind)
    if health.facts is not None and kind != kind_of(health.facts):
        kind = f"still {kind}"  # this epoch alone would have another one
    lines = [
        f"LoaderHealth: {health.name} waited "
        f"{formatting.duration(health.waited_s)} of "
        f"{formatting.duration(health.wall_s)} for data "
        f"({formatting.share(health.data_wait)}, {kind})"
        f"{slower}."
    ]
    if health.account is not None:
        others = dataclasses.replace(
            health.account,
            first_batch_s=health.start_s,
            steps_s=0.0,
            waiting_s=0.0,
            hooks_s=0.0,
        )
        least_s = max(_WORTH_S, WORTH * health.account.total_s)
        if besides := others.text(least_s):
            lines.append(f"Besides: {besides}.")
    if skipped:
        were = "was" if skipped == 1 else "were"
        lines[-1] += f" {formatting.count(skipped, 'batch')} {were} skipped."
    return "\n".join(map(formatting.wrapped, lines))
