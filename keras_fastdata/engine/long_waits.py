"""Frees workers for a consumer that has waited long for a batch.

An interrupted `fit` leaves requests that nobody waits for any more. A traceback
keeps its iterator, so the loader cannot know that it is over. If a build of
these requests never ends, the next `fit` would wait for it.
"""

from __future__ import annotations

import weakref

from keras_fastdata.engine.epoch import Epoch
from keras_fastdata.engine.fetcher import ENDED, Fetch
from keras_fastdata.engine.prefetcher import Prefetcher
from keras_fastdata.workers.base import WorkerPool


class LongWaits:
    """Knows which epochs are waited for, and withdraws requests of others."""

    def __init__(self, prefetcher: Prefetcher) -> None:
        self._prefetcher = prefetcher
        # The fetches that have waited, beside those that have ended.
        self._waiting: weakref.WeakSet[Fetch] = weakref.WeakSet()

    def look(self, workers: WorkerPool, epoch: Epoch, fetch: Fetch) -> None:
        """Withdraws what nobody waits for, if a wait has become long."""
        if fetch.wait is None:
            return
        self._waiting.add(fetch)
        if fetch.wait.becomes_long():
            awaited = [
                other.wait.epoch
                for other in self._waiting
                if other.wait is not None and other.phase is not ENDED
            ]
            self._prefetcher.withdraw(workers, epoch, awaited)
