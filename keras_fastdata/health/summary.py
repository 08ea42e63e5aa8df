"""Defines `HealthSummary`, the result of `LoaderHealth.summary()`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from keras_fastdata.health import comparison
from keras_fastdata.health.account import TimeAccount
from keras_fastdata.health.comparison import Figures
from keras_fastdata.health.facts import Facts, merge
from keras_fastdata.health.hot_lines import HotLine, hot_lines
from keras_fastdata.health.reasons import OF_EVERY_BATCH, WORTH_S, Kind
from keras_fastdata.health.verdict import Verdict, judge, with_call_of
from keras_fastdata.metrics import formatting
from keras_fastdata.metrics.cost_model import WORTH
from keras_fastdata.metrics.pool_stats import PoolStats, TuningDecision

_MOST_ROWS = 12  # of a table; of more epochs, the first and the last
_MOST_NAMES = 4  # of epochs that do not follow each other; of more, how many
_COLUMNS = (
    "",
    "took",
    "waiting",
    "data_wait",
    "verdict",
    "build",
    "busy",
)
_NOTE = (
    "took: steps and their waits, without compiling; data_wait = waiting / took"
)
_LEGEND = (
    "build: the median of a batch; busy: how much of the time workers build"
)


@dataclasses.dataclass(frozen=True)
class EpochHealth:
    """The measurements of one epoch, validation, evaluation or prediction.

    Attributes:
        phase: "train", "validation", "evaluate" or "predict".
        epoch: Keras's number of the epoch, from 0.
        batches: The number of delivered batches.
        verdict: Why the epoch took longer than its steps. The reason stays as
            it was in the epoch before, unless this epoch is clearly different
            (waiting, for example, by a quarter of its time, or by 5% and a
            second), or the new reason comes for the second time in a row.
        data_wait: The share of `wall_s` that is waiting for data: what would
            be saved if batches took no time to build.
        wall_s: Duration of steps and waits in seconds, without validation, and
            without steps that compiled. `data_wait` is a share of this.
        free_s: The duration to expect if batches took no time to build.
        step_s: The time that one step needs by itself; NaN if unknown.
        build_s_p50: Median time of `__getitem__`, in seconds.
        build_s_p95: The time that 95% of the calls did not exceed.
        wait_s_p95: The time that 95% of the waits for a batch did not exceed.
        queue_depth_mean: How many batches were ready when one was requested,
            on average.
        worker_utilization: The share of the time that workers built batches.
        nbytes: Bytes of the arrays of all batches.
        restarts: How many workers died or were replaced.
        skipped: Batches left out by `on_error="skip"`.
        retried: Batches that were built again after a worker was lost.
        cores: Cores that this process may use.
        busy_cores: How many of these were busy, on average; `None` if
            unknown.
        workers_nbytes: Memory of the worker processes (PSS, which divides
            shared memory among them); `None` if it was not measured.
        shared_nbytes: Bytes of shared memory for batches.
        account: Where the time of an epoch of `fit` went, from the end of the
            epoch before, or from the call of `fit`; `None` if unknown.
        facts: What `verdict` was found from; `None` if unknown.
    """

    phase: str
    epoch: int
    batches: int
    verdict: Verdict
    data_wait: float
    wall_s: float
    free_s: float
    step_s: float
    build_s_p50: float
    build_s_p95: float
    wait_s_p95: float
    queue_depth_mean: float
    worker_utilization: float
    nbytes: int
    restarts: int
    skipped: int
    retried: int
    cores: float
    busy_cores: float | None
    workers_nbytes: int | None
    shared_nbytes: int
    account: TimeAccount | None = None
    facts: Facts | None = dataclasses.field(default=None, repr=False)

    @property
    def start_s(self) -> float:
        """Seconds for starting the workers and building the first batch.

        It is 0 except in the first epoch of a `fit`.
        """
        return 0.0 if self.facts is None else self.facts.start_s

    @property
    def waited_s(self) -> float:
        """The seconds of `wall_s` that are waiting for data.

        These are the waits between the steps, and `slowed_s`.
        """
        return self.wall_s * self.data_wait

    @property
    def slowed_s(self) -> float:
        """The seconds of `waited_s` by which builds slow down the steps."""
        return 0.0 if self.facts is None else self.facts.slowed_s

    @property
    def lost_s(self) -> float:
        """The sum of `waited_s` and `start_s`."""
        return self.waited_s + self.start_s

    @property
    def late_s(self) -> float:
        """The seconds of `lost_s` before the first batch, with epoch hooks."""
        if self.facts is None:
            return self.lost_s
        facts = self.facts
        late_s = self.start_s + facts.first_wait_s + facts.hook_s
        return min(late_s, self.lost_s)

    @property
    def batches_per_s(self) -> float:
        """Batches delivered per second of wall time."""
        return self.batches / self.wall_s if self.wall_s > 0 else math.nan

    @property
    def name(self) -> str:
        """A name such as "epoch 3"; epochs count from 1, as in Keras's logs."""
        return name_of(self.phase, self.epoch)


def name_of(phase: str, epoch: int) -> str:
    """Returns a name such as "epoch 3"; `epoch` counts from 0."""
    if phase == "train":
        return f"epoch {epoch + 1}"
    return f"validation {epoch + 1}" if phase == "validation" else phase


class Finding(NamedTuple):
    """A reason why training or validation waited for data, with advice.

    Attributes:
        phase: "Training", "Validation", "The evaluation" or "The prediction".
        verdict: The reason.
        headline: The seconds of waiting out of those of the whole `fit`, how
            much of it is steps that builds slow down, if it is most, and the
            longest other part if it took longer, as a sentence without a full
            stop.
        evidence: The figures that support the verdict, as text.
        advice: What to change, as text; "Nothing to change" if it would save
            little.
        saves_s: The seconds that the advice would save in all epochs.
        hot_lines: The lines of the dataset's code that builds took longest in.
    """

    phase: str
    verdict: Verdict
    headline: str
    evidence: str
    advice: str
    saves_s: float
    hot_lines: tuple[HotLine, ...]


_PHASES = {
    "train": "Training",
    "validation": "Validation",
    "evaluate": "The evaluation",
    "predict": "The prediction",
}


@dataclasses.dataclass(frozen=True, repr=False)
class HealthSummary:
    """The results of one `fit`, `evaluate` or `predict`, with a verdict.

    Attributes:
        verdict: Why the later half of the epochs waited, or the first batch,
            if that cost more; `None` if no batch of a `FastPyDataset` was
            delivered.
        data_wait: The share of `wall_s` that is waiting for data.
        wall_s: Duration of the steps and waits of all epochs, in seconds.
        epochs: The epochs, without validations.
        validations: The validations of a `fit`.
        decisions: The decisions of `workers="auto"`; in a `fit`, for the
            training data.
        shard: The shard of the training data that this process used, in
            words; empty without a shard.
        hot_lines: The lines of the dataset's code that builds took longest in,
            the hottest first; of a `fit`, builds of training batches. None
            where builds take less than 5 ms.
        validation_hot_lines: The same for builds of validation batches.
        account: Where the time of the `fit` went, from its call to the end of
            the latest epoch; `None` for other calls.
        began: The date and time of the beginning, as text.
        compared: The figures of an earlier run; `None` without one.
    """

    verdict: Verdict | None
    data_wait: float
    wall_s: float
    epochs: tuple[EpochHealth, ...]
    validations: tuple[EpochHealth, ...] = ()
    decisions: tuple[TuningDecision, ...] = ()
    shard: str = ""
    hot_lines: tuple[HotLine, ...] = ()
    validation_hot_lines: tuple[HotLine, ...] = ()
    account: TimeAccount | None = None
    began: str = ""
    compared: Figures | None = None

    @property
    def figures(self) -> Figures:
        """The main measured values, for the comparison with a later run."""
        recent = self.epochs[len(self.epochs) // 2 :]
        if not recent:
            return Figures(began=self.began)
        facts = recent[-1].facts
        walls = sorted(epoch.wall_s for epoch in recent)
        wall_s = sum(walls)
        free_s = sum(e.wall_s * (1 - e.data_wait) for e in recent)
        account = self.account or TimeAccount(math.nan, math.nan)
        return Figures(
            dataset=facts.dataset if facts else "",
            began=self.began,
            workers=formatting.workers(facts.workers_are, facts.workers)
            if facts
            else "",
            verdict=str(self.verdict.kind) if self.verdict else "",
            epoch_s=walls[len(walls) // 2],
            data_wait=1 - free_s / max(wall_s, 1e-9),
            batches_per_s=sum(e.batches for e in recent) / max(wall_s, 1e-9),
            build_s=recent[-1].build_s_p50,
            first_batch_s=account.first_batch_s,
            total_s=account.total_s,
        )

    @property
    def note(self) -> str:
        """What the columns of a table of epochs mean, without a full stop.

        It names what the epochs count as waiting, and `account` by itself.
        """
        account = self.account
        if account is None or not self.epochs:
            return _NOTE
        first_s = account.first_batch_s - self.epochs[0].start_s
        both = {
            "the first batch of the fit": first_s,
            "epoch hooks": account.hooks_s,
        }
        least_s = WORTH * sum(phase.waited_s for phase in self.phases)
        found = " and ".join(
            f"{name} ({formatting.duration(seconds)})"
            for name, seconds in both.items()
            if seconds > least_s
        )
        return f"{_NOTE}; waiting includes {found}" if found else _NOTE

    @property
    def validation_verdict(self) -> Verdict | None:
        """The verdict on the validations, or `None` without validations."""
        return _verdict_on(list(self.validations))

    @property
    def saves_s(self) -> float:
        """The seconds that the verdict's advice would save in all epochs."""
        return _saves_s(self.verdict, self.epochs)

    @property
    def is_worth_a_change(self) -> bool:
        """Whether the advice would save at least 1 s and 5% of the time."""
        return self._is_worth(self.saves_s)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings, those with the largest possible saving of time first.

        There is one on the epochs, and one on the validations if a change of
        their data is worth while.
        """
        if self.verdict is None:
            return ()
        found = [self._find(self.verdict, self.epochs, self.hot_lines)]
        validation = self.validation_verdict
        if validation is not None and self._is_worth(
            _saves_s(validation, self.validations)
        ):
            lines = self.validation_hot_lines
            found.append(self._find(validation, self.validations, lines))
        found.sort(key=lambda finding: -finding.saves_s)
        return tuple(found)

    def _find(
        self,
        verdict: Verdict,
        phases: tuple[EpochHealth, ...],
        lines: tuple[HotLine, ...],
    ) -> Finding:
        saves_s = _saves_s(verdict, phases)
        return Finding(
            _PHASES[phases[0].phase],
            verdict,
            self._headline(verdict, phases),
            *self._conclude(verdict, saves_s),
            saves_s,
            () if verdict.kind is Kind.COMPUTE_BOUND else lines,
        )

    def _headline(
        self, verdict: Verdict, phases: tuple[EpochHealth, ...]
    ) -> str:
        """Returns a finding's headline, which says how long a phase waited."""
        account = self.account
        waited_s, awaited = sum(phase.waited_s for phase in phases), "data"
        start_s = phases[0].start_s
        if account is not None and phases[0].phase == "validation":
            waited_s = account.validation_wait_s
        elif account is not None:
            waited_s, start_s = account.waiting_s, account.first_batch_s
        if verdict.kind not in OF_EVERY_BATCH and start_s > waited_s:
            waited_s, awaited = start_s, "its first batch"
        text = (
            f"{_PHASES[phases[0].phase]} waited "
            f"{formatting.duration(waited_s)} of "
            f"{formatting.duration(self.whole_s)} for {awaited}"
        )
        if awaited == "data":
            slowed_s = min(waited_s, sum(phase.slowed_s for phase in phases))
            text += slower_steps(slowed_s, waited_s, self.whole_s)
        for name, seconds in account.parts[:1] if account else ():
            if seconds > waited_s:
                text += f"; {name} took {formatting.duration(seconds)}"
        return text

    def _conclude(self, verdict: Verdict, saves_s: float) -> tuple[str, str]:
        always = Kind.COMPUTE_BOUND, Kind.UNSTABLE_WORKERS
        if verdict.kind in always or self._is_worth(saves_s):
            return verdict.evidence, verdict.advice
        advice = (
            f"Nothing to change in the data: at most "
            f"{formatting.duration(saves_s)} of "
            f"{formatting.duration(self.whole_s)} would be saved."
        )
        return verdict.evidence, f"{verdict.others} {advice}".lstrip()

    def _is_worth(self, saves_s: float) -> bool:
        return not saves_s < max(WORTH_S, WORTH * self.whole_s)

    @property
    def whole_s(self) -> float:
        """The duration of the whole Keras call, in seconds.

        For `evaluate` and `predict`, only steps and waits count.
        """
        if self.account is not None:
            return self.account.total_s
        return sum(phase.wall_s + phase.start_s for phase in self.phases)

    @property
    def free_s(self) -> float:
        """Expected seconds of all epochs if building batches took no time."""
        return self.wall_s * (1.0 - self.data_wait)

    @property
    def phases(self) -> list[EpochHealth]:
        """All epochs, each followed by its validation."""
        phases = [*self.epochs, *self.validations]
        return sorted(phases, key=lambda phase: phase.epoch)

    def __repr__(self) -> str:
        kind = "no verdict" if self.verdict is None else self.verdict.kind
        return (
            f"<HealthSummary: {kind}, data_wait {self.data_wait:.2f} of "
            f"{formatting.duration(self.wall_s)}, "
            f"{formatting.count(len(self.epochs), 'epoch')}>"
        )

    def _repr_html_(self) -> str:
        """Returns the summary as HTML, for display in a notebook."""
        from keras_fastdata.health.report.notebook import summary_html

        return summary_html(self)

    def __str__(self) -> str:
        if self.verdict is None:
            return "LoaderHealth: no batch of a FastPyDataset was seen."
        parts = []
        if len(self.phases) > 1:
            parts = [*_table(self.phases), formatting.wrapped(self.note)]
            parts.append(_LEGEND)
        if self.account is not None:
            parts.append(formatting.wrapped(str(self.account)))
        if self.shard:
            parts.append(f"This process has {self.shard}.")
        if self.decisions:
            parts.append(formatting.wrapped(str(self.decisions[-1])))
        if self.compared is not None:
            parts.append(comparison.text(self.compared, self.figures))
        # What is printed last is read first: what to change.
        findings = self.findings
        for finding in reversed(findings):
            texts = [f"{finding.verdict.kind}: {finding.headline}."]
            needs_change = finding.verdict.kind is not Kind.COMPUTE_BOUND
            if needs_change or finding is findings[0]:
                hottest = finding.hot_lines[:1]
                texts.append(finding.evidence)
                texts += [f"Hottest line: {line}." for line in hottest]
                texts.append(finding.advice)
            parts += map(formatting.wrapped, filter(None, texts))
        return "\n".join(parts)


def summarize(
    epochs: list[EpochHealth],
    validations: list[EpochHealth],
    pool_stats: PoolStats | None = None,
    account: TimeAccount | None = None,
    began: str = "",
    compared: Figures | None = None,
    validation_stats: PoolStats | None = None,
) -> HealthSummary:
    """Combines the measurements of epochs and validations into a summary."""
    return HealthSummary(
        verdict=_verdict_on(epochs),
        data_wait=_data_wait(epochs),
        wall_s=sum(epoch.wall_s for epoch in epochs),
        epochs=tuple(epochs),
        validations=tuple(validations),
        decisions=() if pool_stats is None else pool_stats.decisions,
        shard="" if pool_stats is None else pool_stats.shard,
        hot_lines=_hot_lines(pool_stats),
        validation_hot_lines=_hot_lines(validation_stats),
        account=account,
        began=began,
        compared=compared,
    )


def _hot_lines(pool_stats: PoolStats | None) -> tuple[HotLine, ...]:
    return () if pool_stats is None else hot_lines(pool_stats.stacks)


def _data_wait(phases: Sequence[EpochHealth]) -> float:
    """Returns the share of all phases' time that was spent waiting for data."""
    wall_s = sum(phase.wall_s for phase in phases)
    waited_s = sum(phase.waited_s for phase in phases)
    return waited_s / wall_s if wall_s > 0 else 0.0


def _saves_s(verdict: Verdict | None, phases: Sequence[EpochHealth]) -> float:
    """Returns the seconds that a verdict's advice would save in all phases."""
    if verdict is None or verdict.kind is Kind.COMPUTE_BOUND:
        return 0.0
    lost_s = sum(phase.lost_s for phase in phases)
    if verdict.kind in OF_EVERY_BATCH:
        waited_s = sum(phase.waited_s for phase in phases)
        return min(verdict.saves_s * len(phases), waited_s)
    if verdict.kind is not Kind.LATE_START:
        return min(verdict.saves_s * len(phases), lost_s)
    saves_s = sum(phase.late_s for phase in phases)
    if verdict.call:
        later = phases[1:]
        saves_s += sum(max(0, e.wall_s - verdict.forecast_s) for e in later)
    return min(saves_s, lost_s)


def _verdict_on(epochs: list[EpochHealth]) -> Verdict | None:
    """Returns a verdict on the later half of the epochs.

    The next epochs will most likely resemble this half. Where its epochs have
    one reason, so have they together.

    The first epoch decides where its first batch cost more than all the rest.

    If an epoch has another reason than the whole, the evidence says which
    epochs the verdict is on.
    """
    if not epochs:
        return None
    first, recent = epochs[0], epochs[len(epochs) // 2 :]
    facts = [epoch.facts for epoch in recent if epoch.facts is not None]
    if len(facts) < len(recent):
        return max(recent, key=lambda epoch: epoch.lost_s).verdict
    kinds = {epoch.verdict.kind for epoch in recent}
    name = _names(recent)
    starts_late = False
    if first.facts is not None and first.verdict.kind not in OF_EVERY_BATCH:
        late_s = first.start_s + first.facts.first_wait_s
        starts_late = late_s > sum(epoch.lost_s for epoch in epochs) / 2
    verdict = judge(
        dataclasses.replace(merge(facts), starts_late=starts_late),
        kinds.pop() if len(kinds) == 1 else None,
        name,
    )
    note = _note(verdict.kind, recent, name)
    if starts_late:
        verdict = with_call_of(first.verdict, verdict, name)
        note = (
            f"This verdict is on {first.name}, whose first batch was "
            "waited for longer than all others of the fit together."
        )
    if all(epoch.verdict.kind is verdict.kind for epoch in epochs):
        return verdict
    return dataclasses.replace(verdict, evidence=f"{verdict.evidence} {note}")


def _note(kind: Kind, recent: Sequence[EpochHealth], name: str) -> str:
    """Says which epochs a verdict is on, and which of these differ from it."""
    together = " together" if len(recent) > 1 else ""
    note = (
        f"This verdict is on {name}{together}: "
        f"{formatting.share(_data_wait(recent))} of the time is waiting."
    )
    apart: dict[Kind, list[EpochHealth]] = {}
    for epoch in recent:
        if epoch.verdict.kind is not kind:
            apart.setdefault(epoch.verdict.kind, []).append(epoch)
    if not apart:
        return note
    own = ", ".join(
        f"{_names(epochs)} {'is' if len(epochs) == 1 else 'are'} `{other}`"
        for other, epochs in apart.items()
    )
    return f"{note} Looked at one by one, {own}."


def _names(phases: Sequence[EpochHealth]) -> str:
    """Names epochs: "epoch 3", "epochs 2 and 3", "epochs 2 to 5"."""
    if len(phases) == 1:
        return phases[0].name
    noun = phases[0].name.split()[0]
    numbers = [phase.epoch + 1 for phase in phases]
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 2 and last - first == len(numbers) - 1:
        return f"{noun}s {first} to {last}"
    if len(numbers) > _MOST_NAMES:
        return f"{len(numbers)} {noun}s from {first} to {last}"
    return f"{noun}s {', '.join(map(str, numbers[:-1]))} and {last}"


def slower_steps(slowed_s: float, waited_s: float, whole_s: float) -> str:
    """Returns such as ", 3.1 s of it in steps that builds slow down".

    Empty if that is not most of the waiting, or little of the whole time.
    """
    if slowed_s <= max(waited_s / 2, WORTH * whole_s):
        return ""
    slowed = formatting.duration(slowed_s)
    return f", {slowed} of it in steps that builds slow down"


def abridged(
    phases: Sequence[EpochHealth],
) -> list[EpochHealth | None]:
    """Shortens a long list of epochs: `None` replaces the middle epochs."""
    if len(phases) <= _MOST_ROWS:
        return list(phases)
    half = _MOST_ROWS // 2
    return [*phases[:half], None, *phases[-half:]]


def _table(phases: Sequence[EpochHealth]) -> list[str]:
    """Returns the lines of a table of the phases, at most 80 columns wide."""
    rest = ("",) * (len(_COLUMNS) - 1)
    rows = [_COLUMNS] + [
        ("...", *rest) if phase is None else _row(phase)
        for phase in abridged(phases)
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place in (0, 4) else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _row(phase: EpochHealth) -> tuple[str, ...]:
    name = "validation" if phase.phase == "validation" else phase.name
    return (
        name,
        formatting.duration(phase.wall_s),
        formatting.duration(phase.waited_s),
        formatting.share(phase.data_wait),
        str(phase.verdict.kind),
        formatting.duration(phase.build_s_p50),
        formatting.share(phase.worker_utilization),
    )
