"""Predicts batches per second for a number of workers: pure functions.

The inputs are `profile`'s measurements with one and two workers. Five limits,
in batches per second, apply to more workers; the lowest one counts.

    workers     workers / (time of one build)
    cores       cores / (CPU time per batch, in worker and training process)
    lock        1 / (time per batch that a thread holds Python's lock)
    shared      1 / (time per batch at a resource that one worker uses at once)
    transfer    1 / (time in which the training process receives a batch)

CPU time separates computing from waiting. Time without a core counts as
neither: it depends on the load of the machine, and not on the build. Memory
bandwidth and shared caches are not modelled.
"""

from __future__ import annotations

import dataclasses
import math

from keras_fastdata.metrics import formatting

_FAR = 16  # workers that are considered even with fewer cores
_MOST_WORTH = 0.9  # of the best rate: more workers would gain too little
_INLINE = 1.25  # times the best rate: building inline is then advised
_NOTICED = 0.2  # of a build: shorter extra waits beside a worker are ignored
_WAITS = 0.5  # share of a build, or of the time a lock is held


def counts(cores: float) -> list[int]:
    """Returns numbers of workers to consider: 1, 2, 4 ... and the cores."""
    most = max(_FAR, int(cores))
    powers = {1 << n for n in range(most.bit_length())}
    return sorted({n for n in powers if n <= most} | {max(1, int(cores))})


@dataclasses.dataclass(frozen=True)
class BuildCosts:
    """The cost of one batch with one kind of workers, in seconds.

    Attributes:
        cpu_s: CPU time in the worker, including storing the batch.
        idle_s: Time in which the build waits: for a disk, a network, a sleep.
        second_idle_s: `idle_s` while a second worker builds too; NaN if it
            was not measured.
        take_s: CPU time in the training process to receive a batch.
        lock_s: How long a build holds Python's lock (the GIL), which all
            threads share; 0 for processes.
    """

    cpu_s: float
    idle_s: float
    second_idle_s: float = math.nan
    take_s: float = 0.0
    lock_s: float = 0.0

    @property
    def build_s(self) -> float:
        """Time of a build by one worker that always has a core."""
        return self.cpu_s + self.idle_s

    @property
    def computing(self) -> float:
        """The share of a build that needs a core: 0 to 1."""
        return self.cpu_s / self.build_s if self.build_s > 0 else 1.0

    @property
    def shared_s(self) -> float:
        """Time per batch at a resource that one worker can use at a time.

        Two workers that each need the resource for s seconds of a build of b
        seconds take turns: a build then takes 2 s instead of b. If 2 s is not
        more than b, s cannot be measured, and 0 is assumed.
        """
        longer_s = self.second_idle_s - self.idle_s
        if math.isnan(longer_s) or longer_s <= _NOTICED * self.build_s:
            return 0.0
        return min(self.build_s, (self.build_s + longer_s) / 2)


def lock_s(held: float, batches_per_s: float, cpu_s: float) -> float:
    """Returns how long building a batch holds Python's lock.

    Args:
        held: Share of the time the lock was held while two threads built;
            NaN if unknown.
        batches_per_s: The rate of these two threads.
        cpu_s: CPU time per batch; a build holds the lock at most this long.

    Returns:
        Seconds; all of `cpu_s` where `held` is unknown.
    """
    if math.isnan(held) or batches_per_s <= 0:
        return cpu_s
    return min(cpu_s, held / batches_per_s)


def limits(costs: BuildCosts, workers: int, cores: float) -> dict[str, float]:
    """Returns each of the five limits, in batches per second."""
    return {
        "workers": _rate(workers, costs.build_s),
        "cores": _rate(cores, costs.cpu_s + costs.take_s),
        "lock": _rate(1, costs.lock_s),
        "shared": _rate(1, costs.shared_s),
        "transfer": _rate(1, costs.take_s),
    }


def expected(costs: BuildCosts, workers: int, cores: float) -> float:
    """Returns the batches per second to expect of some workers."""
    return min(limits(costs, workers, cores).values())


@dataclasses.dataclass(frozen=True)
class Advice:
    """The workers to use, and why.

    Attributes:
        workers: The number of workers.
        use_multiprocessing: Whether the workers are processes.
        reason: The reason, in a sentence or two.
    """

    workers: int
    use_multiprocessing: bool
    reason: str


def advise(
    inline_s: float,
    threads: BuildCosts,
    processes: BuildCosts | None,
    cores: float,
    held: float = math.nan,
) -> Advice:
    """Advises the fewest workers that are nearly as quick as the best choice.

    Threads are preferred to processes. Building inline, which does nothing
    ahead of training, is advised only if handing a batch over costs more than
    building it.

    Args:
        inline_s: Time of a build in the calling thread.
        threads: The costs with threads.
        processes: The costs with processes; `None` if these are impossible.
        cores: Cores that this process may use.
        held: Share of the time two threads held Python's lock; for the text.
    """
    kinds = {False: threads, True: processes}
    choices = [
        (workers, are_processes, expected(costs, workers, cores))
        for workers in counts(cores)
        for are_processes, costs in kinds.items()
        if costs is not None and workers <= _useful(costs, cores)
    ]
    best = max(rate for _, _, rate in choices)
    if _rate(1, inline_s) > _INLINE * best:
        return Advice(0, False, _why_inline(inline_s, best))
    workers, are_processes = min(
        (workers, are_processes)
        for workers, are_processes, rate in choices
        if rate >= _MOST_WORTH * best
    )
    costs = kinds[are_processes]
    assert costs is not None
    why = (
        _why_processes(held)
        if are_processes
        else _why_threads(threads, processes, held)
    )
    reason = f"{why} {_why_no_more(costs, workers, cores)}"
    return Advice(workers, are_processes, reason)


def _useful(costs: BuildCosts, cores: float) -> int:
    """Returns how many workers keep all cores busy."""
    most = max(counts(cores))
    return max(1, round(min(most, _rate(cores, costs.computing))))


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else math.inf


# -- the text -----------------------------------------------------------------


def _why_inline(inline_s: float, best: float) -> str:
    return (
        f"A batch is built in {formatting.duration(inline_s)}; handing it over "
        "from a worker takes more than that "
        f"({formatting.duration(1 / best)} a batch at best)."
    )


def _why_processes(held: float) -> str:
    if math.isnan(held) or held < _WAITS:
        return "Processes build faster than threads here."
    return f"{_in_turn(held)} Processes have a lock each."


def _why_threads(
    threads: BuildCosts, processes: BuildCosts | None, held: float
) -> str:
    if threads.computing < _WAITS:
        return (
            f"A build waits {formatting.share(1 - threads.computing)} of its "
            "time, for files, a network or the like; that needs no core, and "
            "threads do it at once."
        )
    if processes is not None:
        return "Builds compute, and processes bring no more than threads here."
    return _in_turn(held) if held >= _WAITS else "Builds compute."


def _in_turn(held: float) -> str:
    return (
        "Builds run Python code, and threads take turns at that: its lock "
        f"(the GIL) is held {formatting.share(held)} of the time two of them "
        "build."
    )


def _why_no_more(costs: BuildCosts, workers: int, cores: float) -> str:
    """Says what limits the rate of more workers."""
    if workers >= _useful(costs, cores) and costs.computing >= _WAITS:
        return f"More workers would wait for a core; {_there_are(cores)}."
    allowed = limits(costs, 2 * workers, cores)
    return _NO_MORE[min(allowed, key=lambda limit: allowed[limit])]


_NO_MORE = {
    "workers": "More workers build more, if training needs more.",
    "cores": "More workers would wait for a core.",
    "lock": "More threads would wait for Python's lock.",
    "shared": (
        "More workers would wait for each other: builds share something that "
        "one can use at a time, such as a disk or a lock."
    ),
    "transfer": "Training could not take more batches from workers.",
}


def _there_are(cores: float) -> str:
    return "there is 1" if cores == 1 else f"there are {cores:g}"
