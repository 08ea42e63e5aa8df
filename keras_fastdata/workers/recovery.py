"""What to do about the requests of a worker that died: a pure function.

A worker takes a task off the task socket, then writes it in its heartbeat. A
worker that is killed in between leaves a task that is neither in the socket nor
in a heartbeat, so the heartbeat alone proves nothing. This does: the training
process empties the socket itself. Then every task without a result was in the
socket, is in the heartbeat of a living worker, or is lost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping


@dataclasses.dataclass(frozen=True)
class Losses:
    """Which requests a death has cost.

    Attributes:
        suspect: The request that the dead worker was building, or `None`.
        unclaimed: Requests that nobody admits to, lowest first. The dead
            worker may have taken one, or a living one may have, a moment
            before noting it: they must be built again, but not in the same
            slot.
    """

    suspect: int | None
    unclaimed: tuple[int, ...]


def losses_of(
    outstanding: Collection[int],
    queued: Collection[int],
    last_heartbeat: int,
    heartbeats: Mapping[int, int],
) -> Losses:
    """Finds what a dead worker took with it.

    Args:
        outstanding: Requests that were sent and have no result, after every
            result there is has been received.
        queued: Requests found when the queue was emptied, after the death.
        last_heartbeat: The dead worker's last note; 0 for none.
        heartbeats: The note of each living worker, read after the queue
            was emptied; 0 for none.
    """
    suspect = last_heartbeat if last_heartbeat in outstanding else None
    accounted = {suspect, *queued, *heartbeats.values()}
    return Losses(
        suspect, tuple(sorted(s for s in outstanding if s not in accounted))
    )
