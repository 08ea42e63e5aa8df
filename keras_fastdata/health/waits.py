"""How long each training thread has waited for batches, and which it lacks.

A `fit` runs in one thread, and so do its callbacks. The iterators that feed it
may run in TensorFlow's threads; they book their waits on the thread that
called `fit`.
"""

from __future__ import annotations

import collections
import dataclasses
import threading

_MOST_SKIPPED = 1000  # remembered in full; all are counted


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A batch that was left out, because building it raised.

    Attributes:
        dataset: Class name of the dataset.
        index: The batch's index.
        traceback: What was raised, as text.
    """

    dataset: str
    index: int
    traceback: str


@dataclasses.dataclass(frozen=True)
class Waits:
    """Totals since the process began.

    Attributes:
        seconds: Time spent in our iterators.
        batches: Batches they delivered.
        aside_s: Time of theirs that belongs to no epoch.
        skipped: How many batches they left out.
    """

    seconds: float = 0.0
    batches: int = 0
    aside_s: float = 0.0
    skipped: int = 0


_totals: dict[int, Waits] = {}
_skipped: dict[int, collections.deque[Skipped]] = {}


def book(thread: int, seconds: float) -> None:
    """Adds the wait for one batch to a thread's account.

    Args:
        thread: `threading.get_ident()` of the thread that called `fit`.
        seconds: How long it waited.
    """
    before = _totals.get(thread, Waits())
    _totals[thread] = dataclasses.replace(
        before, seconds=before.seconds + seconds, batches=before.batches + 1
    )


def set_aside(thread: int, seconds: float) -> None:
    """Has time that belongs to no epoch not counted."""
    before = _totals.get(thread, Waits())
    _totals[thread] = dataclasses.replace(
        before, aside_s=before.aside_s + seconds
    )


def book_skipped(thread: int, batch: Skipped) -> None:
    """Adds a batch that was left out to a thread's account."""
    before = _totals.get(thread, Waits())
    _totals[thread] = dataclasses.replace(before, skipped=before.skipped + 1)
    latest = collections.deque[Skipped](maxlen=_MOST_SKIPPED)
    _skipped.setdefault(thread, latest).append(batch)


def latest_skipped(before: int, after: int) -> list[Skipped]:
    """What the calling thread left out between two totals of `skipped`.

    Of the last 1,000 batches; older ones are counted only.
    """
    found = list(_skipped.get(threading.get_ident(), ()))
    oldest = of_this_thread().skipped - len(found)
    return found[max(0, before - oldest) : max(0, after - oldest)]


def of_this_thread() -> Waits:
    """The account of the calling thread."""
    return _totals.get(threading.get_ident(), Waits())
