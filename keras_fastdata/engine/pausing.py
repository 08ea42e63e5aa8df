"""Lets the workers of a dataset pause, so that a training step runs alone.

`Fetcher` does this as it hands out a batch. Here it is for a dataset whose
batches come from several loaders, all of whose workers must pause.
"""

from __future__ import annotations

import dataclasses

from keras_fastdata.engine.pool_handle import PoolHandle
from keras_fastdata.engine.prefetcher import Prefetcher


@dataclasses.dataclass(eq=False)
class Pausing:
    """Pauses the workers of one loader, and lets them go on."""

    _pool: PoolHandle
    _prefetcher: Prefetcher

    def pause(self) -> bool:
        """Pauses the workers, and returns whether one of them still builds."""
        return bool(self._pool.run(self._pause))

    def _pause(self) -> bool:
        workers = self._pool.workers
        if workers is None:
            return False
        workers.pause()
        self._prefetcher.drain_results(workers)
        return workers.busy

    def resume(self) -> None:
        """Ends the pause (idempotent)."""
        self._pool.run(self._resume)

    def _resume(self) -> None:
        if self._pool.workers is not None:
            self._pool.workers.resume()
