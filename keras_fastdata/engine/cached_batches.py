"""The cache of a dataset, as fetching sees it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection
from typing import Any

from keras_fastdata.building import build
from keras_fastdata.engine.autotune import SettingsInEffect
from keras_fastdata.engine.cache import Cache
from keras_fastdata.engine.epoch import Completed, Epoch, size_of, span_of
from keras_fastdata.engine.fetch import Outcome
from keras_fastdata.engine.fingerprint import open_cache
from keras_fastdata.metrics.timing import Timing
from keras_fastdata.workers.base import LocalResult

_log = logging.getLogger("keras_fastdata")


class CachedBatches:
    """Opens the cache of a dataset, and takes batches from there.

    Args:
        name: The class name of the dataset.
        in_effect: The settings.

    Attributes:
        cache: The cache; `None` before it is open, or without one.
    """

    def __init__(self, name: str, in_effect: SettingsInEffect) -> None:
        self.cache: Cache | None = None
        self._name = name
        self._in_effect = in_effect
        self._before: dict[str, bytes] = {}  # what attributes were before

    def holds(self, index: int) -> bool:
        """Returns whether a batch is in the cache."""
        return self.cache is not None and self.cache.holds(index)

    def open(self, dataset: build.Dataset, built: Collection[str]) -> None:
        """Opens the cache that the settings ask for, if it is not open.

        Args:
            dataset: The dataset.
            built: The attributes that builds have set.
        """
        settings = self._in_effect.now
        if self.cache is None and settings.cache is not None:
            self.cache = open_cache(dataset, settings, built, self._before)

    def drop(self) -> None:
        """Leaves the cache: it belongs to an earlier state of the dataset."""
        self.cache = None

    def store_ready(self, epoch: Epoch) -> None:
        """Caches the ready batches of an epoch that nobody goes on with."""
        while self.cache is not None and epoch.ready:
            assert epoch.schedule is not None
            position, completed = epoch.ready.popitem()
            index = epoch.schedule.index_at(position)
            assert index is not None
            # Who asks for the batch again gets the error.
            with contextlib.suppress(Exception):
                self.cache.put(index, completed.done.open())

    def check(self, epoch: Epoch, index: int) -> None:
        """Looks for a batch elsewhere if it is not in the cache yet."""
        if epoch.position in epoch.cached and not self.holds(index):
            epoch.cached.discard(epoch.position)

    def take(self, epoch: Epoch, index: int) -> Any:
        """Returns a batch that an earlier epoch has built, or `CACHE_MISS`."""
        assert self.cache is not None
        epoch.cached.discard(epoch.position)
        began_s = time.monotonic()
        try:
            batch = self.cache.get(index)
        except (OSError, ValueError) as error:
            _log.warning(
                "Batch %d of %s cannot be had from the cache any more (%s); "
                "it is built again.",
                index,
                self._name,
                str(error),  # not the error, whose frames a record would keep
            )
            self.cache.lose(index)
            return Outcome.CACHE_MISS
        epoch.note_cached()
        timing = Timing(began_s, began_s, began_s, 0.0, 0.0)
        if epoch.wants_span(timing):
            built = LocalResult(0, 0, timing=timing)
            opened_s = time.monotonic() - began_s
            epoch.spans[index] = span_of(
                epoch,
                index,
                Completed(built, began_s),
                opened_s,
                size_of(batch),
            )
        return batch
