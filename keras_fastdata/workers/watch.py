"""Noticing work that takes too long, and telling where it is stuck.

With a timeout, work that has had its time is to be replaced. Without one, a
user who waits deserves to know for what: work that takes far longer than any
before is reported once, and again only when it has moved to another place.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable

from keras_fastdata.workers.base import Ticket

START_TIMEOUT_S = 60.0  # to load a dataset and open its files, at least

_LEAST_LIMIT_S = 30.0
_FIRST_LIMIT_S = 60.0  # while there is nothing to compare with
_FAR_BEYOND = 10  # times the slowest batch so far
_INTERVAL_S = 0.25

_log = logging.getLogger("keras_fastdata")


@dataclasses.dataclass(frozen=True)
class Work:
    """What one worker is busy with.

    Attributes:
        worker: Index of the worker.
        what: In words, such as "Batch 3 of epoch 0 of Images, in worker 1,".
        ticket: The batch it builds; `None` for anything else.
        elapsed_s: How long it has been at it.
        stack: Finds out where it is; may take a second.
        starting: Whether it is still loading the dataset.
    """

    worker: int
    what: str
    ticket: Ticket | None
    elapsed_s: float
    stack: Callable[[], str]
    starting: bool = False


def building(dataset: str, ticket: Ticket, worker: str) -> str:
    """The `what` of a worker that builds a batch."""
    return (
        f"Batch {ticket.index} of epoch {ticket.epoch} of {dataset}, in "
        f"{worker},"
    )


def loading(dataset: str, worker: str) -> str:
    """The `what` of a worker that is not ready yet."""
    return f"Loading {dataset}, or its `on_worker_start`, in {worker},"


@dataclasses.dataclass(frozen=True)
class Overdue:
    """Work that has had its time.

    Attributes:
        work: What it is.
        stack: Where it was stuck.
        text: What to tell the user, without the remedy.
    """

    work: Work
    stack: str
    text: str


class Watch:
    """Looks at what workers are busy with, now and then.

    Args:
        timeout_s: Seconds that one batch may take, or `None`. Loading the
            dataset may take `START_TIMEOUT_S`, where that is more.
        remedy: What to do about work that never ends, for warnings.
    """

    def __init__(self, timeout_s: float | None, remedy: str) -> None:
        self._timeout_s = timeout_s
        self._remedy = remedy
        self._slowest_s = 0.0
        self._next_look = 0.0
        # By worker: the work warned about, when to ask again, the stack.
        self._warned: dict[int, tuple[str, float, str]] = {}

    @property
    def interval_s(self) -> float:
        """How long to wait at most between two looks."""
        if self._timeout_s is None:
            return _INTERVAL_S
        return min(_INTERVAL_S, self._timeout_s / 4)

    def learn(self, seconds: float) -> None:
        """Takes note of how long a batch took."""
        self._slowest_s = max(self._slowest_s, seconds)

    def is_due(self) -> bool:
        """Whether it is time for `look`."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + self.interval_s
        return True

    def look(self, works: Iterable[Work]) -> list[Overdue]:
        """Returns work that has had its time, and warns about the rest."""
        overdue = []
        for work in works:
            if self._timeout_s is None:
                self._warn_if_slow(work)
            elif work.elapsed_s > self._limit_s(work, self._timeout_s):
                overdue.append(self._describe(work))
        return overdue

    @staticmethod
    def _limit_s(work: Work, timeout_s: float) -> float:
        return max(timeout_s, START_TIMEOUT_S) if work.starting else timeout_s

    def _describe(self, work: Work) -> Overdue:
        assert self._timeout_s is not None
        limit = f"`batch_timeout={self._timeout_s:g}`"
        if work.starting and self._timeout_s < START_TIMEOUT_S:
            limit = f"the {START_TIMEOUT_S:g} s that a start may take"
        text = (
            f"{work.what} has taken {work.elapsed_s:.3g} s, more than {limit}."
        )
        return Overdue(work, work.stack(), text)

    def _warn_if_slow(self, work: Work) -> None:
        slowest = 0.0 if work.starting else self._slowest_s
        limit = (
            max(_LEAST_LIMIT_S, _FAR_BEYOND * slowest)
            if slowest
            else _FIRST_LIMIT_S
        )
        about, again_s, before = self._warned.get(work.worker, ("", 0.0, ""))
        if about != work.what:
            again_s, before = 0.0, ""
        if work.elapsed_s <= max(limit, again_s):
            return
        stack = work.stack()
        # Rarer and rarer: something slow moves, and is not worth a line each.
        self._warned[work.worker] = work.what, 2 * work.elapsed_s, stack
        if stack == before:
            return
        usual = f"; the slowest before took {slowest:.3g} s" if slowest else ""
        _log.warning(
            "%s has taken %.0f s so far%s. %s\n%s",
            work.what,
            work.elapsed_s,
            usual,
            self._remedy,
            stack,
        )
