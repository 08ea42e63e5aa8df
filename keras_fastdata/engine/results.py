"""Converts each result into a batch, an error, or an `Outcome`.

Batches come from the results of workers, or from the cache of the dataset.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import logging
import time
from collections.abc import Collection
from typing import Any

from keras_fastdata._call_stack import ignoring_errors, raise_of_handler
from keras_fastdata.building import rng_monitor
from keras_fastdata.building.interface import Dataset
from keras_fastdata.engine import slow_descriptions
from keras_fastdata.engine.autotune import SettingsInEffect
from keras_fastdata.engine.cache import Cache, DiskCache, MemoryCache
from keras_fastdata.engine.epoch import Completed, Epoch
from keras_fastdata.engine.fingerprint import open_cache
from keras_fastdata.engine.pool_factory import PoolFactory
from keras_fastdata.errors import EndOfData, LoaderError
from keras_fastdata.metrics import formatting
from keras_fastdata.metrics.recorder import Span
from keras_fastdata.metrics.timing import Timing
from keras_fastdata.workers import exceptions
from keras_fastdata.workers.base import LocalResult

_MOST_STACKS = 4096  # different ones that are kept
_MOST_SKIPPED = 0.1  # of the batches of an epoch; one is always allowed

_LACKS_VALUES = (
    "The cache of %s is in memory now, and not in the directory, because "
    "worker processes lack a value that this process has set. A warning has "
    "named the value."
)

_log = logging.getLogger("keras_fastdata")


class Outcome(enum.Enum):
    """The result of a fetch step that does not return a batch."""

    PENDING = enum.auto()  # the batch is still to come: wait, and fetch again
    SKIPPED = enum.auto()  # the batch is left out: fetch the next position
    CACHE_MISS = enum.auto()  # look again whether the cache has the batch
    RETRY_INLINE = enum.auto()  # threads may not build it: the caller does
    END = enum.auto()  # the epoch has no more batches


class _Directory(enum.Enum):
    """Whether a directory may be the cache, after changes that are not seen.

    VALID --a change, before it is open--> OUTDATED --opened, emptied--> VALID
    VALID --a change, while it is open: emptied--> UNUSED
    VALID --workers lack values--> UNUSED
    """

    VALID = enum.auto()
    OUTDATED = enum.auto()
    UNUSED = enum.auto()  # until the end of the run: the cache is in memory


class Results:
    """Opens the workers' results, and manages the dataset's cache."""

    def __init__(
        self, name: str, in_effect: SettingsInEffect, factory: PoolFactory
    ) -> None:
        # The cache; `None` before it is open, or without one.
        self.cache: Cache | None = None
        # How often each stack was met in slow builds.
        self.stacks: collections.Counter[str] = collections.Counter()
        # The dtypes and shapes of the dataset's first batch, as text; empty
        # before a batch was delivered.
        self.structure = ""
        self._name = name
        self._in_effect = in_effect
        self._factory = factory
        self._directory = _Directory.VALID
        # The digests of the dataset's attributes before any build.
        self._before: dict[str, bytes] = {}

    # -- the cache -----------------------------------------------------------

    def open_cache(self, dataset: Dataset, built: Collection[str]) -> None:
        """Opens the cache that the settings specify, unless already open.

        `built` are the attributes that builds have set.
        """
        settings = self._in_effect.now
        if self.cache is None and settings.cache is not None:
            if self._directory is _Directory.UNUSED:
                settings = dataclasses.replace(settings, cache="memory")
            outside = self._factory.values_for_directory(dataset)
            self.cache = open_cache(
                dataset, settings, built, self._before, *outside
            )
            if self._directory is _Directory.OUTDATED:
                if isinstance(self.cache, DiskCache):
                    self.cache.empty()
                self._directory = _Directory.VALID

    def note_unseen_change(self) -> None:
        """Empties the directory that is the cache, and uses it no more.

        Nothing tells which state it would be for. Before the first batch, the
        state is that of the whole run.
        """
        slow_descriptions.forget()
        if isinstance(self.cache, DiskCache):
            self.cache.empty()
            self._directory = _Directory.UNUSED
        elif self.cache is None and self._directory is _Directory.VALID:
            self._directory = _Directory.OUTDATED

    def note_change(self) -> None:
        """Drops the cache and `structure`, because the dataset has changed."""
        self.cache = None
        self.structure = ""

    def note_structure(self, batch: Any) -> None:
        """Sets `structure` to the dtypes and shapes of a batch."""
        try:
            self.structure = formatting.structure(batch)
        except Exception as error:  # of an object that only looks like an array
            raise_of_handler(error)
            self.structure = type(batch).__name__

    def store_ready(self, epoch: Epoch) -> None:
        """Caches the ready batches of an abandoned epoch."""
        while self.cache is not None and epoch.ready:
            assert epoch.schedule is not None
            position, completed = epoch.ready.popitem()
            index = epoch.schedule.index_at(position)
            assert index is not None
            # An error is raised when the batch is requested again.
            with ignoring_errors():
                self._keep(index, completed.done.open())

    def _keep(self, index: int, batch: Any) -> None:
        """Caches a batch, unless a directory is for another state.

        The program may have changed something amid the epoch. Memory is emptied
        when the next epoch begins; a directory is for later runs, too.
        """
        assert self.cache is not None
        is_in_memory = isinstance(self.cache, MemoryCache)
        if self._directory is _Directory.UNUSED and not is_in_memory:
            return  # the batch is from before the change
        if not is_in_memory and self._factory.lacks_values:
            _log.warning(_LACKS_VALUES, self._name)
            self._directory, self.cache = _Directory.UNUSED, None
            return
        if is_in_memory or not self._factory.has_drifted():
            self.cache.put(index, batch)

    def is_cached(self, index: int, *, is_wanted: bool = False) -> bool:
        """Returns whether a batch is in the cache; see `MemoryCache.holds`."""
        cache = self.cache
        return cache is not None and cache.holds(index, is_wanted=is_wanted)

    def check_cached(self, epoch: Epoch, index: int) -> None:
        """Marks the current batch as not cached if it cannot be served."""
        if epoch.position in epoch.cached and not self.is_cached(
            index, is_wanted=True
        ):
            epoch.cached.discard(epoch.position)

    def take_cached(self, epoch: Epoch, index: int) -> Any:
        """Returns a batch from the cache, or `CACHE_MISS` if it cannot."""
        assert self.cache is not None
        epoch.cached.discard(epoch.position)
        if not self.is_cached(index, is_wanted=True):
            return Outcome.CACHE_MISS
        began_s = time.monotonic()
        try:
            batch = self.cache.get(index)
        except (OSError, ValueError) as error:
            raise_of_handler(error)
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
        if epoch.sampling.takes(timing):
            built = LocalResult(0, 0, timing=timing)
            _add_span(epoch, index, Completed(built, began_s), began_s, batch)
        return batch

    # -- results of workers --------------------------------------------------

    def open(self, epoch: Epoch, completed: Completed, index: int) -> Any:
        """Returns the batch in a result, or an `Outcome` if there is none.

        Raises:
            Exception: What building the batch has raised, unless it is
                skipped.
            LoaderError: Too many batches are skipped.
        """
        done, auto = completed.done, self._in_effect.auto
        try:
            timing = done.timing
            if auto is not None:
                auto.opened(timing, done.worker)
            if timing is not None and timing.stacks:
                self._count_stacks(timing.stacks)
            if timing is None or not epoch.sampling.takes(timing):
                batch = done.open()
            else:
                began_s = time.monotonic()
                batch = done.open()
                _add_span(epoch, index, completed, began_s, batch)
            if self.cache is not None:
                self._keep(index, batch)
        except rng_monitor.GlobalRngUsedError:
            return Outcome.RETRY_INLINE
        except Exception as error:
            assert epoch.schedule is not None
            has_length = epoch.schedule.num_batches is not None
            if isinstance(error, EndOfData) and not has_length:
                return Outcome.END
            if not done.by_dataset or isinstance(error, LoaderError):
                raise
            if self.cache is not None and self.cache.note_failed_build(
                index, error
            ):
                epoch.cached.add(epoch.position)
                return Outcome.CACHE_MISS
            if self._in_effect.now.on_error == "raise":
                raise
            self._skip(epoch, index, error)
            return Outcome.SKIPPED
        return batch

    def _count_stacks(self, stacks: tuple[str, ...]) -> None:
        """Counts call stacks; drops the rarest if there are too many."""
        self.stacks.update(stacks)
        if len(self.stacks) > _MOST_STACKS:
            kept = dict(self.stacks.most_common(_MOST_STACKS // 2))
            self.stacks = collections.Counter(kept)

    def _skip(self, epoch: Epoch, index: int, error: Exception) -> None:
        """Skips a batch; raises `LoaderError` if too many were skipped."""
        epoch.skipped[index] = exceptions.text_of(error)
        _log.warning(
            "Batch %d of epoch %d of %s is skipped (`on_error='skip'`):\n%s",
            index,
            epoch.number,
            self._name,
            epoch.skipped[index].rstrip(),
        )
        assert epoch.schedule is not None
        length = epoch.schedule.num_batches
        of = f"{length} batches"
        if length is None:
            length = epoch.delivered + len(epoch.skipped)
            of = f"the first {length} batches"
        if len(epoch.skipped) > max(1, int(_MOST_SKIPPED * length)):
            listed = formatting.listed(sorted(epoch.skipped), most=10)
            raise LoaderError(
                f"{len(epoch.skipped)} of {of} of {self._name} have raised "
                f"({listed}), more than the tenth that "
                f"`on_error='skip'` leaves out. The error of batch {index} is "
                "the cause of this one."
            ) from error


def _add_span(
    epoch: Epoch, index: int, completed: Completed, began_s: float, batch: Any
) -> None:
    """Records the times of a batch; reading its result began at `began_s`."""
    opened_s = time.monotonic() - began_s
    done, timing = completed.done, completed.done.timing
    assert timing is not None
    assert epoch.number is not None
    built_began_s, built_s, stored_s, cpu_s, delay_s, retries, _ = timing
    # By position: by name it takes twice as long, and there is one per batch.
    epoch.spans[index] = Span(
        epoch.number,
        index,
        done.worker,
        retries,
        done.nbytes or _size_of(batch),
        epoch.depth,
        completed.queued_s,
        built_began_s,
        built_s,
        stored_s,
        0.0,
        opened_s,
        0.0,
        cpu_s,
        delay_s,
    )


def _size_of(batch: Any) -> int:
    """Returns the total size in bytes of the arrays in a batch."""
    # Not `optree`, which takes ten times as long for the few there are.
    if isinstance(batch, tuple | list):
        return sum(map(_size_of, batch))
    if isinstance(batch, dict):
        return sum(map(_size_of, batch.values()))
    return int(getattr(batch, "nbytes", 0) or 0)
