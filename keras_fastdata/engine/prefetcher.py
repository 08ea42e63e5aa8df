"""Requests batches before they are needed, and collects the results.

A request asks workers for a batch. Its id tells to which epoch the result
belongs. Of a request that was taken back, the pool discards the result.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection
from typing import Any

from keras_fastdata.engine.autotune import SettingsInEffect
from keras_fastdata.engine.cache import Cache
from keras_fastdata.engine.epoch import Completed, Epoch, Pending
from keras_fastdata.engine.open_epochs import OpenEpochs
from keras_fastdata.workers.base import (
    SLOW_START,
    BatchRequest,
    BatchResult,
    WorkerPool,
)

_CACHED_AHEAD = 4  # times the lookahead is how far to look past cached ones


# The epoch, the key in `Epoch.ready` and the id of a request for the cache.
_Asked = tuple[Epoch, int, int]


class Prefetcher:
    """Requests batches from workers, and sorts the results by epoch."""

    def __init__(
        self, in_effect: SettingsInEffect, open_epochs: OpenEpochs
    ) -> None:
        self._in_effect = in_effect
        self._open_epochs = open_epochs
        self._request_ids = itertools.count(1)
        self._pending: dict[int, Pending] = {}  # by request id
        self._asked: dict[int, _Asked] = {}  # by index, with a cache
        self._largest = 0  # bytes of the largest batch so far
        self.apply_settings()

    def apply_settings(self) -> None:
        """Applies the settings that are in effect now."""
        self._auto = self._in_effect.auto
        self._shares_requests = False  # between epochs, as a cache keeps all
        self._look_ahead()

    def fill(
        self, workers: WorkerPool, epoch: Epoch, cache: Cache | None
    ) -> bool:
        """Requests batches as far ahead as the settings allow.

        Those that are in the cache, or are being built for it, need no request.
        Returns whether there is room for batches of the next epoch.
        """
        schedule, allowed = epoch.schedule, self._lookahead
        assert schedule is not None
        # What the cache does not keep, each epoch needs for itself.
        self._shares_requests = cache is not None and cache.keeps_all
        if epoch.ahead > allowed:
            self._recall(workers, epoch, allowed)
        # Of cached batches there may be any number.
        end = epoch.position + _CACHED_AHEAD * allowed
        while (
            # Batches behind it may fill the queue; it must come all the same.
            epoch.issued < end and epoch.ahead < allowed
        ) or epoch.issued == epoch.position:
            index = schedule.index_at(epoch.issued)
            if index is None:
                return True
            if not self._issue_next(workers, epoch, index, cache):
                return False
        return False

    def fill_next(
        self,
        workers: WorkerPool,
        epoch: Epoch,
        next_epoch: Epoch,
        cache: Cache | None,
    ) -> None:
        """Requests batches of `next_epoch`, after all batches of `epoch`."""
        schedule, allowed = next_epoch.schedule, self._lookahead
        assert schedule is not None
        end = _CACHED_AHEAD * allowed
        while epoch.ahead < allowed and next_epoch.issued < end:
            index = schedule.index_at(next_epoch.issued)
            if index is None or not self._issue_next(
                workers, next_epoch, index, cache
            ):
                return

    def should_fill(self, epoch: Epoch, is_thorough: bool = False) -> bool:
        """Returns whether to request more batches now.

        To wake a worker takes longer than all else that is done for a small
        batch. So half of the lookahead is requested together, as a rule.
        """
        if not self._in_effect.now.workers:
            return False  # or the next epoch would build it, and in vain
        room = self._lookahead - epoch.ahead
        is_due = not 0 <= room < self._few or epoch.issued <= epoch.position
        return is_thorough or is_due

    def leaves_little(self, held: int) -> bool:
        """Returns whether `held` batches leave less than half the lookahead."""
        return 1 < self._lookahead < 2 * held

    def issue(
        self, workers: WorkerPool, epoch: Epoch, index: int, *, key: int
    ) -> bool:
        """Requests a batch; returns whether the workers accept the request.

        A request of another epoch for the cache is taken over. `key` is the key
        of the batch in `epoch.ready`.
        """
        asked = self._asked_for(index) if self._shares_requests else None
        if asked is not None:
            self._take_over(asked, epoch, index, key)
            return True
        request_id = next(self._request_ids)
        assert epoch.number is not None
        interval_s = epoch.sampling.interval_s
        if interval_s is not None and not epoch.delivered:
            interval_s = 0.0  # the first one counts, however soon it comes
        if self._auto is not None:
            interval_s = self._auto.interval_s(interval_s)
        # Before `submit`: a worker may begin before that returns.
        queued_s = 0.0 if interval_s is None else time.monotonic()
        if not workers.submit(
            BatchRequest(request_id, epoch.number, index, interval_s)
        ):
            return False
        self._pending[request_id] = Pending(epoch, key, queued_s)
        epoch.waiting[key] = request_id
        if self._shares_requests:
            self._asked[index] = epoch, key, request_id
        return True

    def require(
        self, workers: WorkerPool, epoch: Epoch, key: int, index: int
    ) -> None:
        """Requests the batch that the consumer awaits, if not yet requested.

        The rule for every wait for room: it can make room. Batches that are
        out come, and those that lie ready for any epoch are given up. The rest
        of what takes room is bounded: what the consumer holds (see
        `Arena.crowded`), and what workers keep. Where there is no room yet,
        the caller waits, and requires the batch again.
        """
        while key not in epoch.ready and key not in epoch.waiting:
            if self.issue(workers, epoch, index, key=key):
                return
            if not self._make_room(epoch):
                return
            self.drain_results(workers)

    def _make_room(self, epoch: Epoch) -> bool:
        """Discards a ready batch to free memory; returns whether there was one.

        The batch is the last one of the epoch with the most ready batches.
        This epoch requests it again.
        """
        epochs = {*self._open_epochs, epoch}
        epoch = max(epochs, key=lambda epoch: len(epoch.ready))
        if not epoch.ready:
            return False
        key = max(epoch.ready)
        epoch.ready.pop(key).done.discard()
        epoch.issue_again_from(key)
        return True

    def drain_results(self, workers: WorkerPool) -> None:
        """Collects the workers' results, and sorts the results by epoch."""
        for done in workers.collect():
            self._complete(workers, done)

    def withdraw_slow(
        self, workers: WorkerPool, awaited: Collection[Epoch | None]
    ) -> None:
        """Cancels slow builds that nobody has waited for from their beginning.

        These are requests of epochs that are not `awaited`, and those that an
        epoch has taken over from another one. A slow start counts for all.
        """
        slow = set(workers.slow_requests)
        for request_id, pending in list(self._pending.items()):
            is_slow = request_id in slow or SLOW_START in slow
            is_wanted = pending.epoch in awaited and not pending.is_taken_over
            if is_slow and not is_wanted:
                self._cancel(workers, pending.epoch, [pending.key])

    def forget(self, workers: WorkerPool | None, epoch: Epoch) -> None:
        """Cancels the requests of an epoch, and drops the epoch's results."""
        if epoch.waiting and workers is not None:
            workers.cancel(epoch.waiting.values())
        for request_id in epoch.waiting.values():
            self._pending.pop(request_id, None)
        for completed in epoch.ready.values():
            completed.done.discard()
        epoch.peeked.clear()
        epoch.discard_prefetched()

    def unplan(self, workers: WorkerPool | None) -> None:
        """Undoes the plans of all epochs that have not delivered a batch."""
        for epoch in self._open_epochs:
            if epoch.next_epoch is not None:
                self.forget(workers, epoch.next_epoch)
                epoch.release_next()
            if not epoch.delivered:
                self.forget(workers, epoch)
                epoch.unplan()

    def note_change(self, workers: WorkerPool | None) -> None:
        """Drops what all epochs have from before a change of the dataset."""
        for epoch in self._open_epochs:
            self.forget(workers, epoch)
            epoch.note_change()

    def forget_all(self, workers: WorkerPool | None) -> None:
        """Cancels the requests of all epochs, and drops their results."""
        for epoch in self._open_epochs:
            self.forget(workers, epoch)

    def clear(self) -> None:
        """Drops all requests and results, because the workers have ended."""
        for epoch in self._open_epochs:
            epoch.discard_prefetched()
        self._pending.clear()
        self._asked.clear()
        self._largest = 0

    def results(self) -> list[Any]:
        """Returns all results that were collected but not yet opened."""
        return [
            result
            for epoch in self._open_epochs
            for result in epoch.ready.values()
        ]

    def _issue_next(
        self, workers: WorkerPool, epoch: Epoch, index: int, cache: Cache | None
    ) -> bool:
        """Requests the next batch if necessary; returns `False` if refused."""
        is_out = epoch.issued in epoch.waiting
        if not is_out and not epoch.knows(epoch.issued, index):
            # The batch that is wanted now is taken from the epoch that has
            # asked for it; others are on their way to the cache.
            is_wanted = epoch.issued == epoch.position
            comes = cache is not None and cache.keeps_all and not is_wanted
            if cache is not None and (
                cache.holds(index) or (comes and self._asked_for(index))
            ):
                epoch.cached.add(epoch.issued)
            elif not self.issue(workers, epoch, index, key=epoch.issued):
                return False
        epoch.note_issued()
        return True

    def _asked_for(self, index: int) -> _Asked | None:
        """Returns the existing request for batch `index`; `None` if absent."""
        asked = self._asked.get(index)
        if asked is not None:
            epoch, key, request_id = asked
            completed = epoch.ready.get(key)
            if epoch.waiting.get(key) == request_id or (
                completed and completed.done.request_id == request_id
            ):
                return asked
        return None

    def _take_over(
        self, asked: _Asked, epoch: Epoch, index: int, key: int
    ) -> None:
        """Moves a batch, or its request, from another epoch to `epoch`."""
        other, place, request_id = asked
        other.issue_again_from(place)
        if place in other.waiting:
            epoch.waiting[key] = other.waiting.pop(place)
            self._pending[request_id] = Pending(
                epoch, key, self._pending[request_id].queued_s, True
            )
        else:
            epoch.ready[key] = other.ready.pop(place)
        self._asked[index] = epoch, key, request_id

    def _recall(self, workers: WorkerPool, epoch: Epoch, allowed: int) -> None:
        """Cancels the requests that exceed a reduced lookahead.

        Batches that have come stay, except those of the next epoch.
        """
        if epoch.next_epoch is not None:
            self.forget(workers, epoch.next_epoch)
        end = epoch.position + allowed
        late = [key for key in epoch.waiting if key >= end]
        self._cancel(workers, epoch, late)

    def _cancel(
        self, workers: WorkerPool, epoch: Epoch, keys: Collection[int]
    ) -> None:
        """Cancels requests, which the epoch issues again when it needs them."""
        if keys:
            workers.cancel([epoch.waiting[key] for key in keys])
        for key in keys:
            del self._pending[epoch.waiting.pop(key)]
            epoch.issue_again_from(key)

    def _complete(self, workers: WorkerPool, done: BatchResult) -> None:
        epoch, key, queued_s, _ = self._pending.pop(done.request_id)
        del epoch.waiting[key]
        epoch.ready[key] = Completed(done, queued_s)
        if done.nbytes > self._largest:
            self._largest = done.nbytes
            self._look_ahead()
            workers.expect(self._lookahead)

    def _look_ahead(self) -> None:
        """Computes the lookahead and the number of requests sent together."""
        settings, largest = self._in_effect.now, self._largest
        allowed, nbytes = settings.lookahead, settings.max_queue_bytes
        if not settings.kind.builds_ahead:
            allowed = 1
        elif settings.kind.has_copies and nbytes is not None:
            fitting = nbytes // largest if largest else settings.count
            allowed = max(1, min(allowed, fitting))
        self._lookahead = allowed
        self._few = max(1, min(allowed // 2, allowed - settings.count))
