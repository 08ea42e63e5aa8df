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
        name: What to call it, such as "worker 1 (pid 77)".
        ticket: The batch it builds; `None` while it loads the dataset.
        elapsed_s: How long it has been at it.
        stack: Finds out where it is; may take a second.
    """

    worker: int
    name: str
    ticket: Ticket | None
    elapsed_s: float
    stack: Callable[[], str]


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
        dataset: The dataset's class name, for messages.
        timeout_s: Seconds that one batch may take, or `None`. Loading the
            dataset may take `START_TIMEOUT_S`, where that is more.
        remedy: What to do about work that never ends, for warnings.
    """

    def __init__(
        self, dataset: str, timeout_s: float | None, remedy: str
    ) -> None:
        self._dataset = dataset
        self._timeout_s = timeout_s
        self._remedy = remedy
        self._slowest_s = 0.0
        self._next_look = 0.0
        # By worker: the ticket warned about, when to ask again, the stack.
        self._warned: dict[int, tuple[Ticket | None, float, str]] = {}

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
        if work.ticket is None:
            return max(timeout_s, START_TIMEOUT_S)
        return timeout_s

    def _describe(self, work: Work) -> Overdue:
        stack = work.stack()
        assert self._timeout_s is not None
        if work.ticket is None:
            text = (
                f"{self._what(work)} has taken {work.elapsed_s:.3g} s, more "
                f"than the {self._limit_s(work, self._timeout_s):.3g} s that "
                f"`batch_timeout={self._timeout_s:g}` leaves for a start."
            )
        else:
            text = (
                f"{self._what(work)} has taken {work.elapsed_s:.3g} s, more "
                f"than `batch_timeout={self._timeout_s:g}`."
            )
        return Overdue(work, stack, text)

    def _warn_if_slow(self, work: Work) -> None:
        slowest = self._slowest_s if work.ticket else 0.0
        limit = (
            max(_LEAST_LIMIT_S, _FAR_BEYOND * slowest)
            if slowest
            else _FIRST_LIMIT_S
        )
        about, again_s, before = self._warned.get(work.worker, (None, 0.0, ""))
        if about != work.ticket:
            again_s, before = 0.0, ""
        if work.elapsed_s <= max(limit, again_s):
            return
        stack = work.stack()
        # Rarer and rarer: something slow moves, and is not worth a line each.
        self._warned[work.worker] = work.ticket, 2 * work.elapsed_s, stack
        if stack == before:
            return
        usual = f"; the slowest before took {slowest:.3g} s" if slowest else ""
        _log.warning(
            "%s has taken %.0f s so far%s. %s\n%s",
            self._what(work),
            work.elapsed_s,
            usual,
            self._remedy,
            stack,
        )

    def _what(self, work: Work) -> str:
        if work.ticket is None:
            return (
                f"Loading {self._dataset}, or its `on_worker_start`, in "
                f"{work.name},"
            )
        return (
            f"Batch {work.ticket.index} of epoch {work.ticket.epoch} of "
            f"{self._dataset}, in {work.name},"
        )
