"""Has `workers="auto"` go on with other workers where the chosen ones fail.

They fail where they cannot be created or started, where the dataset cannot be
sent to them, or where they lack global state. The tuner excludes their kind.
Without `workers="auto"`, and where batches are built inline, the error is
raised.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from keras_fastdata._call_stack import raise_of_handler
from keras_fastdata.engine.autotune import SettingsInEffect
from keras_fastdata.engine.hook_replay import Changes
from keras_fastdata.engine.pool_factory import PoolFactory
from keras_fastdata.engine.pool_handle import PoolHandle
from keras_fastdata.engine.prefetcher import Prefetcher
from keras_fastdata.engine.told_state import StateLostError
from keras_fastdata.errors import DatasetPicklingError, LoaderError
from keras_fastdata.workers.base import WorkerPool


@dataclasses.dataclass(eq=False)
class Fallback:
    """Replaces workers that fail by workers of another kind."""

    _in_effect: SettingsInEffect
    _prefetcher: Prefetcher
    _factory: PoolFactory
    _pool: PoolHandle
    _changes: Changes

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """Takes a step under the lock of the workers; see `PoolHandle.run`."""
        return self._pool.run(self._attempt, step, *args)

    def create_pool(self) -> WorkerPool:
        """Creates workers."""
        try:
            return self._factory.create()
        except (LoaderError, OSError) as error:
            raise_of_handler(error)
            if not self._adopt_without(error):
                raise
        return self._factory.create()

    def change(self, workers: WorkerPool, *, anew: bool) -> None:
        """Sends the changed dataset to the workers; see `WorkerPool.change`."""
        try:
            self._factory.change(workers, anew=anew)
        except DatasetPicklingError as error:
            if not self._adopt_without(error):
                raise
            self._pool.replace()

    def _attempt(self, step: Callable[..., Any], *args: Any) -> Any:
        try:
            return step(*args)
        except Exception as error:
            workers = self._pool.workers
            is_lost = isinstance(error, StateLostError)
            has_failed = workers is not None and workers.has_failed_to_start
            if not (is_lost or has_failed) or not self._adopt_without(error):
                raise
            if is_lost:
                self._factory.note_lost_state()
                self._changes.mark()
            self._pool.replace()
            raise  # there was nothing to replace

    def _adopt_without(self, error: Exception) -> bool:
        """Chooses another kind of workers, if that is possible."""
        is_possible = self._in_effect.adopt_without(error)
        if is_possible:
            self._prefetcher.apply_settings()
        return is_possible
