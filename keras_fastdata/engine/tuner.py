"""Chooses the workers for `workers="auto"` from measured batch times.

From the times of builds and steps follows how many workers could be of use, and
of which kind. These are tried, one choice after the other, and the cheapest
that is nearly as quick as the quickest is kept:

    first choice: what a build and a step need         some 30 batches
    each choice: warm up, then time per batch          some 40 batches
    if a trial took longer than forecast, the model is corrected by it; if
    more workers of that kind then promise more, they are tried, once
    the best one is kept; another look only when builds or steps change

The time per batch counts, not the time spent waiting: if a device works in the
background, or builds and steps compete for cores, waiting does not tell what
workers bring.

Nothing here knows a worker, and no clock is read.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Generator
from typing import NamedTuple

from keras_fastdata.metrics import formatting
from keras_fastdata.metrics.cost_model import MOST, WAITS, Costs
from keras_fastdata.metrics.pool_stats import TuningDecision
from keras_fastdata.metrics.timing import Timing
from keras_fastdata.metrics.worker_kinds import WorkerKind

_WORTH = 0.93  # of the time per batch: a choice must be as much quicker
_NEAR = 1.15  # times what can be expected at best: good enough to stop
_NOTICED = 0.2  # of the time per batch: less does not matter
_CHEAP = 0.15  # of the time per batch: hiding a build would bring no more
_MISTAKEN = 3.0  # times longer or shorter than a trial has said
_CHANGED = 1.5  # times longer or shorter: another situation

_FEWEST = 4  # batches by which builds and steps are known, if they take long
_TRIAL = 24  # batches by which a choice is known, or
_LONG_TRIAL = 40  # where they are quick
_TRIAL_S = 0.1  # that is, where a trial would be shorter than this
_ENOUGH_S = 1.0  # a trial of few batches may end then
_WATCHED = 256  # batches between two looks at what has been settled
_MOST_PATIENCE = 16  # times that
_BLOCKS = 4  # of samples; what disturbs one of them does not count


class WorkerConfigChoice(NamedTuple):
    """The number and kind of workers that build the batches."""

    workers: int  # how many workers; 0 for the caller
    are_processes: bool

    def __str__(self) -> str:
        return formatting.workers(
            WorkerKind.local(self.workers, self.are_processes), self.workers
        )


INLINE = WorkerConfigChoice(0, False)


class Sample(NamedTuple):
    """The measurements of one batch in the training process."""

    gap_s: float  # from the batch before it until it was asked for: a step
    gap_cpu_s: float  # CPU time of the process meanwhile, of all its threads
    wait_s: float  # from then until it was there
    timing: Timing | None  # how it was built, if that is known
    worker: int = 0  # who built it


class Situation(NamedTuple):
    """The typical times of several measured batches, in seconds."""

    period_s: float  # from one batch to the next, all in all
    costs: Costs

    def is_unlike(self, other: Situation, times: float) -> bool:
        """Returns whether `other` has very different build or step times."""
        ours, theirs = self.costs, other.costs
        pairs = (ours.build_s, theirs.build_s), (ours.step_s, theirs.step_s)
        least_s = _NOTICED * max(self.period_s, other.period_s)
        return any(
            max(pair) > least_s and max(pair) > times * min(pair)
            for pair in pairs
        )


class ExcludedError(Exception):
    """Raised inside the tuner when the current choice becomes excluded."""


class Tuner:
    """Chooses the number and kind of workers for one dataset.

    Args:
        cores: Cores that this process may use; 1.5 is possible.
        most: Workers that may be of use: the length of the queue.
        first: Where to begin.
        has_gil: Whether threads take turns at running Python code.
    """

    def __init__(
        self,
        cores: float,
        most: int,
        first: WorkerConfigChoice = INLINE,
        *,
        has_gil: bool = True,
    ) -> None:
        self.choice = self._first = first  # where batches are to be built now
        self.has_converged = False  # whether `choice` is final
        self.decisions: list[TuningDecision] = []  # what was decided, and why
        self._cores = max(cores, 0.1)
        self._most = min(most, MOST)
        self._has_gil = has_gil
        self._excluded: dict[bool, str] = {}  # processes or threads, and why
        self._batches = 0
        self._set_out()

    def _set_out(self) -> None:
        self._course = self._tune()
        next(self._course)

    def add(self, sample: Sample) -> None:
        """Adds the measurements of a batch, and updates `choice` if needed."""
        self._batches += 1
        try:
            self._course.send(sample)
        except BaseException:
            self._set_out()  # Ctrl-C has ended it
            raise

    def is_excluded(self, *, processes: bool) -> bool:
        """Returns whether processes, or threads, must not be chosen."""
        return processes in self._excluded

    def exclude(self, *, processes: bool, reason: str) -> None:
        """Excludes a kind of workers, and changes `choice` if necessary."""
        self._excluded[processes] = reason
        if self.choice.workers and self.choice.are_processes == processes:
            self._course.throw(ExcludedError())

    # -- the course of it -----------------------------------------------------

    def _tune(self) -> Generator[None, Sample, None]:
        patience = 1
        while True:
            try:
                expected = yield from self._search()
                known = yield from self._watch(_WATCHED)
                seen = known
                if patience > 1 or not expected.is_unlike(known, _MISTAKEN):
                    # Ever longer looks: what changes often cannot be followed.
                    while not known.is_unlike(seen, _CHANGED):
                        seen = yield from self._watch(patience * _WATCHED)
                else:
                    known = expected  # by too few batches
                patience = min(2 * patience, _MOST_PATIENCE)
                why = _what_changed(known, seen)
            except ExcludedError:
                why = self._excluded[self.choice.are_processes]
            if self._excluded.get(self._first.are_processes):
                self._first = INLINE
            self._move(self._first, why, settled=False)

    def _search(self) -> Generator[None, Sample, Situation]:
        """Tries several kinds and numbers of workers, and applies the best.

        Returns the times that were measured with the best.
        """
        found = yield from self._measure(2, _FEWEST)
        costs, best, at_best = found.costs, self.choice, found
        best_s = found.period_s
        if not best.workers:  # looking at what it draws from takes time
            best_s = min(best_s, costs.period_s(0, self._cores))
        reasons = [_describe(costs)]
        kinds = dict.fromkeys((False, True), costs)
        choices = self._choices(found)
        while choices:
            choice = choices.pop(0)
            if choice.are_processes in self._excluded:
                continue
            known = kinds[choice.are_processes]
            ideal_s = known.period_s(choice.workers, self._cores)
            if ideal_s > _WORTH * best_s or choice == best:
                continue
            self._move(
                choice, f"{_describe(costs)} To be tried.", settled=False
            )
            try:
                # Memory that was never used before is slow: all of the queue.
                found = yield from self._measure(self._most + 2)
            except ExcludedError:
                reasons.append(self._excluded[choice.are_processes])
                continue
            reasons.append(
                f"{choice}: {formatting.duration(found.period_s)} "
                f"({formatting.duration(ideal_s)} expected)."
            )
            if found.period_s < _WORTH * best_s:
                best, at_best, best_s = choice, found, found.period_s
            if best_s <= _NEAR * ideal_s:
                break
            kinds[choice.are_processes] = learned = known.corrected(
                found.costs, found.period_s, choice.workers, self._cores
            )
            more = choice._replace(workers=self._useful(learned))
            if known is costs and more.workers > choice.workers:
                choices.insert(0, more)
        if len(reasons) == 1:
            reasons.append("Workers would bring nothing.")
        self._move(best, " ".join(reasons), settled=True)
        return at_best

    def _choices(self, found: Situation) -> list[WorkerConfigChoice]:
        """Returns which workers to try, the most promising first.

        Threads suit builds that wait, and processes those that compute if the
        GIL makes threads take turns.
        """
        costs = found.costs
        if costs.build_s < _CHEAP * found.period_s:
            return []
        workers = self._useful(costs)
        processes_first = self._has_gil and costs.computing >= WAITS
        return [
            WorkerConfigChoice(workers, are_processes)
            for are_processes in (processes_first, not processes_first)
        ]

    def _useful(self, costs: Costs) -> int:
        # What receiving takes is a guess, and one too many does no harm.
        return dataclasses.replace(costs, take_s=0.0).useful(
            self._cores, self._most
        )

    def _move(
        self, choice: WorkerConfigChoice, reason: str, *, settled: bool
    ) -> None:
        self.choice, self.has_converged = choice, settled
        decision = TuningDecision(self._batches, str(choice), settled, reason)
        self.decisions.append(decision)

    def _watch(self, count: int) -> Generator[None, Sample, Situation]:
        """Measures `count` batches, however long they take."""
        return self._measure(0, count, count, count)

    def _measure(
        self,
        skip: int,
        fewest: int = 8,
        count: int = _TRIAL,
        most: int = _LONG_TRIAL,
    ) -> Generator[None, Sample, Situation]:
        """Measures `count` batches, fewer if slow, or more if quick.

        `skip` batches do not count, to begin with; and up to as many again,
        until each worker has built one.
        """
        workers: set[int] = set()
        for skipped in range(2 * skip):
            if skipped >= skip and len(workers) >= self.choice.workers:
                break
            workers.add((yield).worker)
        samples: list[Sample] = []
        spent_s = 0.0
        while (
            len(samples) < count or (len(samples) < most and spent_s < _TRIAL_S)
        ) and (len(samples) < fewest or spent_s < _ENOUGH_S):
            sample = yield
            samples.append(sample)
            spent_s += sample.gap_s + sample.wait_s
        return _situation_of(samples)


def _situation_of(samples: list[Sample]) -> Situation:
    timings = [s.timing for s in samples if s.timing is not None]
    asked = [t for t in timings if not math.isnan(t.cpu_s)]
    cpu_s = sum(t.cpu_s for t in asked)
    # Time without a core says how busy the machine was.
    built_s = sum(t.stored_s - t.began_s - t.delay_s for t in asked)
    computing = min(1.0, cpu_s / built_s) if built_s > 0 else 1.0
    build_s = _steady([t.stored_s - t.began_s for t in timings])
    costs = Costs(
        cpu_s=build_s * computing,
        blocked_s=build_s * (1 - computing),
        step_s=_steady([s.gap_s for s in samples]),
        step_cpu_s=_steady([s.gap_cpu_s for s in samples]),
    )
    return Situation(_steady([s.gap_s + s.wait_s for s in samples]), costs)


def _steady(values: list[float]) -> float:
    """Splits a series into parts, and returns the median of their means."""
    if not values:
        return 0.0
    size = math.ceil(len(values) / _BLOCKS)
    return statistics.median(
        statistics.fmean(values[n : n + size])
        for n in range(0, len(values), size)
    )


def _describe(costs: Costs) -> str:
    return (
        f"A batch takes {formatting.duration(costs.build_s)} to build, "
        f"{formatting.share(costs.computing)} of it on a core, and a step "
        f"{formatting.duration(costs.step_s)}."
    )


def _what_changed(known: Situation, seen: Situation) -> str:
    before, now = known.costs, seen.costs
    return (
        f"Builds took {formatting.duration(before.build_s)} and steps "
        f"{formatting.duration(before.step_s)}; now it is "
        f"{formatting.duration(now.build_s)} and "
        f"{formatting.duration(now.step_s)}."
    )
