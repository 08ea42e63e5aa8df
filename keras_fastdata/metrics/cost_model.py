"""Predicts the time per batch for other numbers and kinds of workers.

`LoaderHealth`, `profile` and `workers="auto"` advise by this model. A build is
made of three kinds of time, which are measured apart:

    computing   on a core: limited by the cores; in threads, also by Python's
                lock (the GIL)
    blocked     waits for a disk, a network, a sleep: limited by the workers
                alone, however few cores there are
    delayed     ready to run without a core: says how busy the machine is.
                Neither workers nor cores divide it, so no forecast counts it.

Each limit is a time per batch that the workers cannot be quicker than; the
longest one counts.

    workers     (computing + blocked) / workers
    cores       (computing + computing of a step + receiving) / cores
    lock        the time that a build and a step hold Python's lock
    shared      the time that a build uses what one worker at a time can use
    step        a training step + receiving

Batches are delivered in order, so all wait for a straggler, a batch that takes
far longer than the others, unless the queue holds enough batches to go on with.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, NamedTuple

TAKE_S = 40e-6  # receiving a batch from a worker, if that was not measured
MOST = 16  # workers to advise, where there are no more cores
WORTH = 0.05  # of the time: a change that wins less is not advised
WAITS = 0.5  # of a build that is computing: less is waiting
COMPUTES = 0.8  # of a build: more does not wait to speak of

_SPARE = 0.1  # of a worker: so little more is no reason for another
_NEARLY = 0.9  # of the time: the other kind of workers must be as much quicker
_NOTICED = 0.2  # of a build: shorter extra time beside a worker is ignored


@dataclasses.dataclass(frozen=True)
class Costs:
    """The cost of one batch with one kind of workers, in seconds."""

    cpu_s: float  # CPU time of building it, and of storing it in shared memory
    blocked_s: float  # time in which the build waits, but not for a core
    # How long a build, and a step if that is known, hold Python's lock, which
    # all threads share; 0 for processes.
    lock_s: float = 0.0
    # How long a build uses what one worker at a time can use, such as a disk or
    # the memory bus.
    shared_s: float = 0.0
    step_s: float = 0.0  # what a training step takes without waiting for data
    step_cpu_s: float = 0.0  # CPU time of that
    # CPU time in the training process to receive the batch.
    take_s: float = TAKE_S
    # The time to build a straggler; 0 if there are none.
    straggler_s: float = 0.0
    every: float = 1.0  # the number of batches from one straggler to the next

    @property
    def build_s(self) -> float:
        """The time of a build without waits for a core, in seconds."""
        return self.cpu_s + self.blocked_s

    @property
    def computing(self) -> float:
        """The share of the build time that is computing, from 0 to 1."""
        return self.cpu_s / self.build_s if self.build_s > 0 else 1.0

    def limits(self, workers: int, cores: float) -> dict[str, float]:
        """Returns the minimum seconds per batch that each resource allows.

        `workers` must be at least 1.
        """
        cpu_s = self.cpu_s + self.step_cpu_s + self.take_s
        return {
            "workers": self.build_s / workers,
            "cores": cpu_s / cores,
            "lock": self.lock_s,
            "shared": self.shared_s,
            "step": self.step_s + self.take_s,
        }

    def period_s(
        self,
        workers: int,
        cores: float,
        lookahead: float = math.inf,
        longer: float = 1.0,
    ) -> float:
        """Returns the shortest possible time between two batches.

        Args:
            workers: The number of workers; 0 for inline.
            cores: The cores for builds and steps.
            lookahead: How many batches may be requested but not delivered.
            longer: How many times longer builds take than the costs tell.
        """
        if not workers:
            return self.step_s + longer * self.build_s
        limits = self.limits(workers, cores)
        step_s = limits.pop("step")
        period_s = max(step_s, longer * max(limits.values()))
        if lookahead == math.inf or not self.straggler_s:
            return period_s
        # From the request of a straggler, so many batches pass before all wait.
        stretch = max(self.every, lookahead)
        behind_s = (stretch - lookahead) * period_s
        return max(period_s, (self.straggler_s + behind_s) / stretch)

    def corrected(
        self, seen: Costs, came_s: float, workers: int, cores: float
    ) -> Costs:
        """Returns corrected costs, after a trial that was slower than forecast.

        If builds wait, they may wait longer with several workers, and more
        workers make up for that. Other time that the forecast lacked counts as
        time with something that one worker at a time can use.

        Args:
            seen: The costs that were measured in the trial.
            came_s: The time per batch of the trial.
            workers: The number of workers of the trial, at least 1.
            cores: The cores for builds and steps.
        """
        costs = self
        if self.computing < WAITS:
            costs = dataclasses.replace(
                self,
                cpu_s=max(self.cpu_s, seen.cpu_s),
                blocked_s=max(self.blocked_s, seen.blocked_s),
            )
        if costs.period_s(workers, cores) >= _NEARLY * came_s:
            return costs
        return dataclasses.replace(costs, shared_s=came_s)

    def bridging(self, period_s: float) -> int:
        """Returns the queue size that covers the build time of a slow batch."""
        return math.ceil(self.straggler_s / max(period_s, 1e-9))

    def useful(self, cores: float, most: int) -> int:
        """Returns the least number of workers for full speed, at most `most`.

        As many as are building at any time (Little's law); and some more if
        builds wait, since at times more of them do.
        """
        limits = self.limits(1, cores)
        del limits["workers"]
        period_s = max(limits.values())
        if period_s * most <= self.build_s:
            return max(1, most)
        workers = self.build_s / period_s
        if self.computing < COMPUTES and limits["shared"] < period_s:
            workers += math.sqrt(workers)
        elif self.computing >= COMPUTES:
            most = min(most, math.ceil(cores))
        return max(1, min(most, math.ceil(workers - _SPARE)))

    def why_no_more(self, workers: int, cores: float) -> str:
        """Returns a sentence on what would limit twice as many workers."""
        limits = self.limits(2 * workers, cores)
        return _NO_MORE[max(limits, key=lambda limit: limits[limit])]


_NO_MORE = {
    "workers": "More workers build more, if training needs more.",
    "cores": "More workers would wait for a core.",
    "lock": "More threads would wait for Python's lock.",
    "shared": (
        "More workers would wait for each other: builds share something that "
        "one can use at a time, such as a disk, a lock or the memory bus."
    ),
    "step": "Training could not take more batches from workers.",
}


def shared_s(alone_s: float, beside_s: float) -> float:
    """Estimates how long a build uses an exclusive resource, such as a disk.

    Two workers that each need the resource for s seconds of a build of b
    seconds take turns: a build then takes 2 s instead of b. If 2 s is not more
    than b, s cannot be measured, and 0 is assumed.

    Args:
        alone_s: The time of a build by one worker, without delays.
        beside_s: The same while a second worker builds too.
    """
    longer_s = beside_s - alone_s
    if not longer_s > _NOTICED * alone_s:
        return 0.0
    return min(alone_s, (alone_s + longer_s) / 2)


def lock_s(held: float, period_s: float, cpu_s: float) -> float:
    """Returns how many seconds a build holds the GIL.

    Args:
        held: Share of the time the lock was held while threads built; NaN if
            unknown, and then all computing counts.
        period_s: The time per batch of these threads.
        cpu_s: CPU time of a build, which holds the lock at most this long.
    """
    return cpu_s if math.isnan(held) else min(cpu_s, held * period_s)


class Choice(NamedTuple):
    """The chosen number and kind of workers, with the expected speed."""

    workers: int
    are_processes: bool
    period_s: float  # the time per batch to expect, in seconds


def choose(
    kinds: dict[bool, Costs], cores: float, most: int, present: bool
) -> Choice:
    """Chooses the kind and the number of workers.

    The kind in use is kept unless the other one is a tenth quicker.

    Args:
        kinds: The costs with processes (`True`) and with threads (`False`), or
            with one of these kinds.
        cores: The cores for builds and steps.
        most: The number of workers not to exceed.
        present: The kind in use.
    """
    choices = {}
    for are_processes, costs in kinds.items():
        workers = costs.useful(cores, most)
        period_s = costs.period_s(workers, cores)
        choices[are_processes] = Choice(workers, are_processes, period_s)
    quickest = min(choices.values(), key=lambda choice: choice.period_s)
    kept = choices.get(present, quickest)
    return kept if quickest.period_s > _NEARLY * kept.period_s else quickest


def queue_for(workers: int, lookahead: int) -> int | None:
    """Returns the queue size to advise; `None` if `lookahead` is enough."""
    return 2 * workers if workers > lookahead else None


def call(
    dataset: str,
    workers: int | Literal["auto"],
    use_multiprocessing: bool = False,
    max_queue_size: int | None = None,
) -> str:
    """Returns the recommended constructor call as Python code."""
    value = f'"{workers}"' if isinstance(workers, str) else workers
    arguments = f"workers={value}"
    if use_multiprocessing:
        arguments += ", use_multiprocessing=True"
    if max_queue_size is not None:
        arguments += f", max_queue_size={max_queue_size}"
    return f"{dataset}(..., {arguments})"
