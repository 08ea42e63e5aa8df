"""Measures the workers of a `GeneratorDataset`, each of which has a loader."""

from __future__ import annotations

import collections
import dataclasses
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from keras_fastdata._dataset_internals import internals_of, loader_of
from keras_fastdata.dataset import FastPyDataset
from keras_fastdata.engine.batch_iterator import BatchIterator
from keras_fastdata.engine.settings import Settings
from keras_fastdata.metrics.pool_stats import PoolStats
from keras_fastdata.metrics.recorder import Span

_SPANS = 8  # of the latest batches; `fit` may get its first ones again
_QUIESCE_S = 1.0  # for workers to finish what they are at
_LOOK_S = 0.0005  # between two looks at workers that finish


class GeneratorWorkers:
    """The workers of a `GeneratorDataset`, as `LoaderHealth` measures them.

    Args:
        dataset: Held weakly.
        shards: The dataset of each worker.
    """

    def __init__(
        self, dataset: FastPyDataset, shards: Sequence[FastPyDataset]
    ) -> None:
        self.name = type(dataset).__name__
        self._dataset = weakref.ref(dataset)
        self._shards = shards
        self._interval_s: float | None = None
        self._is_paused = False
        self._quiesce_s = 0.0
        # The worker of the latest batch, and what iterates over its batches.
        self._worker = 0
        self._iterator: Iterator[Any] | None = None
        # The latest spans, by epoch and index.
        self._spans: dict[tuple[int, int], Span] = {}

    @property
    def settings(self) -> Settings:
        """The constructor arguments, with the workers that are in use."""
        dataset = self._dataset() or self._shards[0]
        settings = internals_of(dataset).settings
        return dataclasses.replace(settings, workers=len(self._shards))

    @property
    def dataset(self) -> Any:
        """The dataset, or `None` if it was garbage-collected."""
        return self._dataset()

    @property
    def stacks(self) -> dict[str, int]:
        """The number of times that each call stack was seen in slow builds."""
        found: collections.Counter[str] = collections.Counter()
        for shards in self._shards:
            found.update(loader_of(shards).stacks)
        return dict(found)

    def pool_stats(self) -> PoolStats | None:
        """Returns statistics of the workers, or `None` if there are none."""
        found = {
            worker: pool_stats
            for worker, shards in enumerate(self._shards)
            if (pool_stats := loader_of(shards).pool_stats()) is not None
        }
        if not found:
            return None
        losses = [
            dataclasses.replace(loss, worker=worker)
            for worker, pool_stats in found.items()
            for loss in pool_stats.losses
        ]
        return dataclasses.replace(
            next(iter(found.values())),
            count=len(self._shards),
            pids={
                worker: pid
                for worker, pool_stats in found.items()
                for pid in pool_stats.pids.values()
            },
            losses=tuple(sorted(losses, key=lambda loss: loss.at_s)),
            shared_nbytes=sum(each.shared_nbytes for each in found.values()),
            shard="",
            stacks=self.stacks,
            starting=sum(each.starting for each in found.values()),
        )

    # -- as `WorkersWithin` --------------------------------------------------

    def time_batches(self, interval_s: float | None) -> None:
        self._interval_s = interval_s

    def finish_fetch(self, pauses: bool) -> None:
        self._quiesce_s = 0.0
        if pauses:
            self._pause()
        else:
            self._resume()

    def quiesce_s(self) -> float:
        return self._quiesce_s

    def span_of(self, epoch: int, index: int | None) -> Span | None:
        return None if index is None else self._spans.get((epoch, index))

    # -- as the dataset builds -----------------------------------------------

    def begin_wait(self, worker: int, shards: Iterator[Any]) -> None:
        """Prepares a worker's iterator, before its next batch is waited for."""
        self._worker, self._iterator = worker, shards
        if isinstance(shards, BatchIterator):
            shards.time_batches(self._interval_s)
        self._resume()

    def note(self, epoch: int, index: int) -> None:
        """Takes the times of a batch."""
        self._spans.pop((epoch, index), None)
        iterator = self._iterator
        if isinstance(iterator, BatchIterator) and iterator.span is not None:
            span = iterator.span
            self._spans[epoch, index] = span._replace(
                epoch=epoch, batch=index, worker=self._worker
            )
            while len(self._spans) > _SPANS:
                del self._spans[next(iter(self._spans))]

    def _pause(self) -> None:
        """Pauses the workers, and waits until they have finished a batch."""
        self._is_paused = True
        began_s = time.monotonic()
        while sum(loader_of(each).pausing.pause() for each in self._shards):
            if time.monotonic() - began_s > _QUIESCE_S:
                break
            time.sleep(_LOOK_S)
        self._quiesce_s = time.monotonic() - began_s

    def _resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            for each in self._shards:
                loader_of(each).pausing.resume()
