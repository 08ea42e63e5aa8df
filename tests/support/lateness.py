"""Who is late, to the watchdog, where a test says who is stuck."""

from __future__ import annotations

import dataclasses

from keras_fastdata.workers import watchdog
from keras_fastdata.workers.slot_channel import SlotWorker

_LATE_S = 1000.0
_SETTLED_S = 0.3  # from where it says that it is stuck, to where it is stuck


def only_the_stuck_are_late(monkeypatch, is_stuck, *, without_timeout=False):
    """Has the watchdog find late who is stuck, and nobody else.

    So it does not matter how busy the machine is. A start that is not stuck
    has taken as long as it has.

    Args:
        monkeypatch: Of the test.
        is_stuck: A function of what the watchdog looks at, an `Activity`.
        without_timeout: Whether this holds without a `batch_timeout`, too.
    """
    look = watchdog.Watchdog.look

    def seen(activity):
        if activity.elapsed_s > _SETTLED_S and is_stuck(activity):
            return dataclasses.replace(activity, elapsed_s=_LATE_S)
        if activity.starting:
            return activity
        return dataclasses.replace(activity, elapsed_s=0.0)

    def look_at_the_stuck(guard, activities):
        if without_timeout or guard._timeout_s is not None:
            activities = map(seen, activities)
        return look(guard, activities)

    monkeypatch.setattr(watchdog.Watchdog, "look", look_at_the_stuck)


def worker_of(activity):
    """The process id of a worker, the identity of a thread, or an actor."""
    found = activity.stack.args[0]
    return found.pid if isinstance(found, SlotWorker) else found
