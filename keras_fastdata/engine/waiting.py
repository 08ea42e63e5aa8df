"""Shows the user which batch a program is waiting for."""

from __future__ import annotations

from keras_fastdata.engine.epoch import Epoch
from keras_fastdata.metrics import formatting
from keras_fastdata.metrics.notice import LoadedPackages, Notice
from keras_fastdata.workers.base import WorkerPool
from keras_fastdata.workers.inline import InlinePool


class BatchWait:
    """Shows a notice during long waits for one batch of an epoch."""

    def __init__(self, dataset: str, epoch: Epoch) -> None:
        self._dataset = dataset
        self.epoch = epoch
        self._notice = Notice(shows=not epoch.is_quiet)
        self._packages = LoadedPackages()

    def look(self, workers: WorkerPool, keeps: bool) -> None:
        """Shows or updates the notice, if the wait has become long.

        `keeps` says whether a cache keeps the batches for later epochs.
        """
        # A build in the caller lets nobody look before it has ended.
        if not isinstance(workers, InlinePool):
            self._notice.look(lambda: self._text(workers, keeps))

    def end(self) -> None:
        """Removes the notice."""
        self._notice.end()

    def _text(self, workers: WorkerPool, keeps: bool) -> str:
        stats, epoch = workers.pool_stats(), self.epoch
        if stats.starting and stats.starting >= len(stats.pids):
            package = stats.importing or self._packages.latest(
                stats.pids.values()
            )
            importing = f", importing {package}" if package else ""
            named = formatting.workers(stats.kind, stats.count)
            return f"{self._dataset}: starting {named}{importing}"
        what = "the first batch"
        if epoch.delivered and epoch.schedule is not None:
            what = f"batch {epoch.schedule.index_at(epoch.position)}"
        kept = ", which the cache keeps for later epochs" if keeps else ""
        return f"{self._dataset}: waiting for {what}{kept}"
