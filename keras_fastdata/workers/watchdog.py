"""Detects work that takes too long, and reports where it is stuck.

With a timeout, a worker whose work has had its time is to be replaced. Without
one, a user who waits deserves to know for what: work that takes far longer than
any before is reported once, and again only when it has moved to another place.

Work that nobody waits for any more, as after Ctrl-C, keeps its worker from the
work that somebody waits for. Without a timeout, that worker is to be replaced
where work that somebody waits for would be reported.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterable

from keras_fastdata.workers.base import SLOW_START, BatchRequest

START_TIMEOUT_S = 60.0  # to load a dataset and open its files, at least

_LEAST_LIMIT_S = 30.0
_FIRST_LIMIT_S = 60.0  # while there is nothing to compare with
_FAR_BEYOND = 10  # times the slowest batch so far
_INTERVAL_S = 0.25
_LATE_S = 1.0  # if a look is later than this, earlier time does not count

_log = logging.getLogger("keras_fastdata")


@dataclasses.dataclass(frozen=True)
class Activity:
    """The current work of one worker, such as building a batch."""

    worker: int
    what: str  # in words, such as "Batch 3 of epoch 0 of Images, in worker 1,"
    # The batch it builds; `None` for anything else.
    request: BatchRequest | None
    elapsed_s: float  # how long it has been at it
    stack: Callable[[], str]  # finds out where it is; may take a second
    starting: bool = False  # whether it is still loading the dataset
    is_wanted: bool = True  # whether somebody waits for its result


def building(dataset: str, request: BatchRequest, worker: str) -> str:
    """Describes the build of a batch, for an error message."""
    return (
        f"Batch {request.index} of epoch {request.epoch} of {dataset}, in "
        f"{worker},"
    )


def loading(dataset: str, worker: str) -> str:
    """Describes the loading of a dataset, for an error message."""
    return f"Loading {dataset}, or its `on_worker_start`, in {worker},"


@dataclasses.dataclass(frozen=True)
class Expired:
    """An activity that has exceeded its time limit."""

    activity: Activity  # what it is
    stack: str  # where it was stuck
    text: str  # what to tell the user, without the remedy


class Watchdog:
    """Finds workers that take too long to start or to build a batch.

    Args:
        timeout_s: Seconds that one batch may take, or `None`. Loading the
            dataset may take `START_TIMEOUT_S`, where that is more.
        remedy: What to do about work that never ends, for warnings.
    """

    def __init__(self, timeout_s: float | None, remedy: str) -> None:
        self._timeout_s = timeout_s
        self._remedy = remedy
        self.slowest_s = 0.0  # seconds that the slowest batch took so far
        # See `WorkerPool.slow_requests`.
        self.slow: set[int] = set()
        self._next_look_s = time.monotonic()
        self._watched_since_s = -math.inf  # time before it does not count
        # By worker: the work warned about, when to ask again, the stack.
        self._warned: dict[int, tuple[str, float, str]] = {}

    @property
    def interval_s(self) -> float:
        """The maximum number of seconds between two calls of `look`."""
        if self._timeout_s is None:
            return _INTERVAL_S
        return min(_INTERVAL_S, self._timeout_s / 4)

    def learn(self, seconds: float) -> None:
        """Updates the maximum build time with the time of a new batch."""
        self.slowest_s = max(self.slowest_s, seconds)

    def begin_look(self) -> bool:
        """Returns whether `look` is due; if so, starts a new interval."""
        now_s = time.monotonic()
        late_s = now_s - self._next_look_s
        if late_s < 0:
            return False
        if late_s > _LATE_S:
            self._watched_since_s = now_s
        self._next_look_s = now_s + self.interval_s
        return True

    def look(self, activities: Iterable[Activity]) -> list[Expired]:
        """Returns the activities that exceed their limit.

        Those that have none are reported if they are slow. If a look came much
        too late, because the program was suspended or the consumer was busy,
        only the time since that look counts.
        """
        expired = []
        slow = set()
        watched_s = time.monotonic() - self._watched_since_s
        for activity in activities:
            counted_s = min(activity.elapsed_s, watched_s)
            limit_s, why = self._limit(activity)
            if counted_s > limit_s:
                text = (
                    f"{activity.what} has taken {activity.elapsed_s:.3g} s, "
                    f"{why}."
                )
                expired.append(Expired(activity, activity.stack(), text))
            elif limit_s == math.inf and counted_s > self._slow_s(activity):
                self._warn(activity)
                request = activity.request
                slow.add(request.request_id if request else SLOW_START)
        self.slow = slow
        return expired

    def _limit(self, activity: Activity) -> tuple[float, str]:
        """Returns the seconds that an activity may take, and why no more."""
        limit_s, starting = self._timeout_s, activity.starting
        if limit_s is not None:
            if starting and limit_s < START_TIMEOUT_S:
                may_take = f"the {START_TIMEOUT_S:g} s that a start may take"
                return START_TIMEOUT_S, f"more than {may_take}"
            return limit_s, f"more than `batch_timeout={limit_s:g}`"
        if activity.is_wanted:
            return math.inf, ""
        return self._slow_s(activity), "and nobody waits for it any more"

    def _slow_s(self, activity: Activity) -> float:
        """Returns how many seconds an activity may take and not be slow."""
        if activity.starting or not self.slowest_s:
            return _FIRST_LIMIT_S
        return max(_LEAST_LIMIT_S, _FAR_BEYOND * self.slowest_s)

    def _warn(self, activity: Activity) -> None:
        """Warns of a slow activity, unless it was warned of where it is."""
        slowest = 0.0 if activity.starting else self.slowest_s
        known = self._warned.get(activity.worker, ("", 0.0, ""))
        about, again_s, before = known
        if about != activity.what:
            again_s, before = 0.0, ""
        if activity.elapsed_s <= again_s:
            return
        stack = activity.stack()
        # Rarer and rarer: something slow moves, and is not worth a line each.
        again_s = 2 * activity.elapsed_s
        self._warned[activity.worker] = activity.what, again_s, stack
        if stack == before:
            return
        usual = f"; the slowest before took {slowest:.3g} s" if slowest else ""
        _log.warning(
            "%s has taken %.0f s so far%s. %s\n%s",
            activity.what,
            activity.elapsed_s,
            usual,
            self._remedy,
            stack,
        )
