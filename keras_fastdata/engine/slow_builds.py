"""Cancels slow builds that keep a worker from what somebody waits for.

An interrupted `fit` leaves requests that nobody waits for any more. A traceback
keeps its iterator, so the loader cannot know that it is over. If a build of
these requests never ends, the next `fit` would wait for it.
"""

from __future__ import annotations

import weakref

from keras_fastdata.engine.fetcher import ENDED, Fetch
from keras_fastdata.engine.prefetcher import Prefetcher
from keras_fastdata.workers.base import WorkerPool


class SlowBuilds:
    """Knows which epochs somebody waits for; cancels slow builds of others."""

    def __init__(self, prefetcher: Prefetcher) -> None:
        self._prefetcher = prefetcher
        # The fetches that have waited, beside those that have ended.
        self._waiting: weakref.WeakSet[Fetch] = weakref.WeakSet()

    def withdraw(self, workers: WorkerPool, fetch: Fetch) -> None:
        """Cancels slow builds, if this fetch waits and nobody waits for them.

        Their epochs request them again. The pool replaces their workers.
        """
        if fetch.wait is None:
            return
        self._waiting.add(fetch)
        if workers.slow_requests:
            epochs = [
                other.wait.epoch
                for other in self._waiting
                if other.wait is not None and other.phase is not ENDED
            ]
            next_epochs = [epoch.next_epoch for epoch in epochs]
            self._prefetcher.withdraw_slow(workers, epochs + next_epochs)
