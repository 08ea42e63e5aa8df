"""The tickets of one dataset: which are out, and how many there may be.

A ticket asks workers for a batch. What comes back belongs to a walk through
its serial number; whatever else arrives is discarded.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable

from keras_fastdata.engine.auto import Auto
from keras_fastdata.engine.cache import Cache
from keras_fastdata.engine.schedule import Schedule
from keras_fastdata.engine.settings import Settings
from keras_fastdata.engine.walk import Arrival, Route, Walk
from keras_fastdata.workers.base import Done, Ticket, Workers

_CACHED_AHEAD = 4  # times the lookahead is how far to look past cached ones


class Tickets:
    """Asks workers for batches, and puts what comes to where it belongs.

    Args:
        settings: The constructor arguments, as they are in effect.
        auto: What wants builds timed, if anything does.
    """

    def __init__(self, settings: Settings, auto: Auto | None) -> None:
        self._serials = itertools.count(1)
        self._routes: dict[int, Route] = {}  # by serial
        # Of a dataset with a cache: whose each batch is, or was, by index.
        self._asked: dict[int, tuple[Walk, int, int]] = {}
        self._largest = 0  # bytes of the largest batch so far
        self.take_up(settings, auto)

    def take_up(self, settings: Settings, auto: Auto | None) -> None:
        """Goes by other settings from now on."""
        self._settings, self._auto = settings, auto
        self._look_ahead()

    def refill(
        self,
        workers: Workers,
        walk: Walk,
        schedule: Schedule,
        cache: Cache | None,
    ) -> bool:
        """Issues tickets as far ahead as the settings allow.

        Args:
            workers: Who gets them.
            walk: For what walk.
            schedule: Its own.
            cache: Batches in it need no ticket, nor do those that are on
                their way to it: each is built once.

        Returns:
            Whether that is as far as the schedule goes, and there is room for
            those of a walk that follows.
        """
        allowed = self._lookahead
        if walk.ahead > allowed:
            self._take_back(workers, walk, allowed)
        # Of cached batches there may be any number.
        end = walk.position + _CACHED_AHEAD * allowed
        while (
            # Batches behind it may fill the queue; it must come all the same.
            walk.issued < end and walk.ahead < allowed
        ) or walk.issued == walk.position:
            index = schedule.index_at(walk.issued)
            if index is None:
                return True
            if not self._issue_next(workers, walk, index, cache):
                return False
        return False

    def refill_following(
        self,
        workers: Workers,
        walk: Walk,
        following: Walk,
        cache: Cache | None,
    ) -> None:
        """Issues tickets of the next walk, behind the last ones of this."""
        schedule, allowed = following.schedule, self._lookahead
        assert schedule is not None
        end = _CACHED_AHEAD * allowed
        while walk.ahead < allowed and following.issued < end:
            index = schedule.index_at(following.issued)
            if index is None or not self._issue_next(
                workers, following, index, cache
            ):
                return

    def has_room(self, walk: Walk) -> bool:
        """Whether it is worth while to issue tickets now.

        Waking a worker takes longer than all else that is done for a small
        batch, so up to half of the lookahead goes out together. While batches
        lie ready, a worker may wait for that.
        """
        room = self._lookahead - walk.ahead
        return not 0 <= room < self._few or walk.issued <= walk.position

    def leaves_little(self, held: int) -> bool:
        """Whether so many batches take most of what may be ahead."""
        return 1 < self._lookahead < 2 * held

    def issue(
        self, workers: Workers, walk: Walk, index: int, *, key: int
    ) -> bool:
        """Asks for a batch; `False`: there is no room for it.

        One that is to be cached, and that another walk has asked for, is
        taken over from that walk.

        Args:
            workers: Who is asked.
            walk: What walk it is for.
            index: Of the batch.
            key: What it is to lie ready under.
        """
        if self._is_asked_for(index):
            self._take_over(walk, index, key)
            return True
        serial = next(self._serials)
        assert walk.epoch is not None
        interval_s = walk.interval_s
        if interval_s is not None and not walk.delivered:
            interval_s = 0.0  # the first one counts, however soon it comes
        if self._auto is not None:
            interval_s = self._auto.interval_s(interval_s)
        if not workers.submit(Ticket(serial, walk.epoch, index, interval_s)):
            return False
        queued_s = 0.0 if interval_s is None else time.monotonic()
        self._routes[serial] = Route(walk, key, queued_s)
        walk.waiting[key] = serial
        if self._settings.cache is not None:
            self._asked[index] = walk, key, serial
        return True

    def make_room(self, walks: Iterable[Walk]) -> bool:
        """Gives up the ready batch that is farthest from its turn.

        It is asked for again when its walk goes on.

        Args:
            walks: Those that may have one; the one with most of them loses it.

        Returns:
            Whether there was one.
        """
        walk = max(walks, key=lambda walk: len(walk.ready))
        if not walk.ready:
            return False
        key = max(walk.ready)
        walk.ready.pop(key).done.discard()
        walk.issued = min(walk.issued, key)
        return True

    def take_in(self, workers: Workers) -> None:
        """Puts every batch that has come to where it belongs."""
        for done in workers.collect():
            self._route(workers, done)

    def forget(self, workers: Workers | None, walk: Walk) -> None:
        """Takes back the tickets of a walk and drops what came of others."""
        if walk.waiting and workers is not None:
            workers.cancel(walk.waiting.values())
        for serial in walk.waiting.values():
            self._routes.pop(serial, None)
        for arrival in walk.ready.values():
            arrival.done.discard()
        walk.peeked.clear()
        walk.let_go()

    def clear(self) -> None:
        """Forgets them all: there is nobody left to answer."""
        self._routes.clear()
        self._asked.clear()

    def _issue_next(
        self, workers: Workers, walk: Walk, index: int, cache: Cache | None
    ) -> bool:
        """Has the next batch built, unless it is known; `False`: no room."""
        is_out = walk.issued in walk.waiting
        if not is_out and not walk.knows(walk.issued, index):
            if cache is not None and (
                cache.holds(index)
                or (cache.keeps_all and self._is_asked_for(index))
            ):
                walk.cached.add(walk.issued)
            elif not self.issue(workers, walk, index, key=walk.issued):
                return False
        walk.issued += 1
        return True

    def _is_asked_for(self, index: int) -> bool:
        """Whether a batch that is to be cached is out, or lies ready."""
        if index not in self._asked:
            return False
        walk, key, serial = self._asked[index]
        if walk.waiting.get(key) == serial:
            return True
        if key in walk.ready and walk.ready[key].done.serial == serial:
            return True
        del self._asked[index]
        return False

    def _take_over(self, walk: Walk, index: int, key: int) -> None:
        """Has a walk get a batch that another one has asked for."""
        other, place, serial = self._asked[index]
        other.issued = min(other.issued, place)
        if place in other.waiting:
            walk.waiting[key] = other.waiting.pop(place)
            self._routes[serial] = Route(
                walk, key, self._routes[serial].queued_s
            )
        else:
            walk.ready[key] = other.ready.pop(place)
        self._asked[index] = walk, key, serial

    def _take_back(self, workers: Workers, walk: Walk, allowed: int) -> None:
        """Recalls tickets that a larger batch than any before makes too many.

        A batch that has come already stays, at its position; but those of
        the next walk, which has not begun, are dropped.
        """
        if walk.following is not None:
            self.forget(workers, walk.following)
        end = walk.position + allowed
        late = [key for key in walk.waiting if key >= end]
        workers.cancel([walk.waiting[key] for key in late])
        for key in late:
            del self._routes[walk.waiting.pop(key)]
            walk.issued = min(walk.issued, key)

    def _route(self, workers: Workers, done: Done) -> None:
        walk, key, queued_s = self._routes.pop(done.serial)
        del walk.waiting[key]
        walk.ready[key] = Arrival(done, queued_s)
        if done.nbytes > self._largest:
            self._largest = done.nbytes
            self._look_ahead()
            workers.expect(self._lookahead)

    def _look_ahead(self) -> None:
        """Decides how far, and how many tickets go out together."""
        settings = self._settings
        allowed = _lookahead(settings, self._largest)
        self._lookahead = allowed
        self._few = max(1, min(allowed // 2, allowed - settings.count))


def _lookahead(settings: Settings, largest: int) -> int:
    """How many batches may be asked for and not delivered.

    Args:
        settings: The constructor arguments.
        largest: Bytes of the largest batch; 0 where none is known.
    """
    if settings.kind == "inline":
        return 1
    apart = settings.kind in ("process", "ray")
    if not apart or settings.max_queue_bytes is None:
        return settings.lookahead
    if not largest:
        return min(settings.lookahead, settings.count)
    fitting = settings.max_queue_bytes // largest
    return max(1, min(settings.lookahead, fitting))
