"""How long each training thread has waited for batches.

A `fit` runs in one thread, and so do its callbacks. The iterators that feed it
may run in TensorFlow's threads; they book their waits on the thread that
called `fit`.
"""

from __future__ import annotations

import dataclasses
import threading


@dataclasses.dataclass(frozen=True)
class Waits:
    """Totals since the process began.

    Attributes:
        seconds: Time spent in our iterators.
        batches: Batches they delivered.
        aside_s: Time of theirs that belongs to no epoch.
    """

    seconds: float = 0.0
    batches: int = 0
    aside_s: float = 0.0


_totals: dict[int, Waits] = {}


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


def of_this_thread() -> Waits:
    """The account of the calling thread."""
    return _totals.get(threading.get_ident(), Waits())
