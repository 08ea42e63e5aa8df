"""The results of workers: each becomes a batch, an error, or an `Outcome`."""

from __future__ import annotations

import collections
import logging
import time
from typing import Any

from keras_fastdata.building import build
from keras_fastdata.engine.autotune import SettingsInEffect
from keras_fastdata.engine.cached_batches import CachedBatches
from keras_fastdata.engine.epoch import Completed, Epoch, size_of, span_of
from keras_fastdata.engine.fetch import Outcome
from keras_fastdata.errors import EndOfData, LoaderError
from keras_fastdata.metrics import formatting
from keras_fastdata.workers import exceptions

_MOST_STACKS = 4096  # different ones that are kept
_MOST_SKIPPED = 0.1  # of the batches of an epoch; one is always allowed

_log = logging.getLogger("keras_fastdata")


class Results:
    """Opens the results of the workers of one dataset.

    Args:
        name: The class name of the dataset.
        in_effect: The settings.
        cached: Gets every batch.

    Attributes:
        stacks: How often each stack was met in slow builds.
    """

    def __init__(
        self, name: str, in_effect: SettingsInEffect, cached: CachedBatches
    ) -> None:
        self._name = name
        self._in_effect = in_effect
        self._cached = cached
        self.stacks: collections.Counter[str] = collections.Counter()

    def open(self, epoch: Epoch, completed: Completed, index: int) -> Any:
        """Returns the batch of a result, or an `Outcome`.

        Args:
            epoch: The epoch that the batch is for.
            completed: The result.
            index: The index of the batch.

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
            if timing is None or not epoch.wants_span(timing):
                batch = done.open()
            else:
                began_s = time.monotonic()
                batch = done.open()
                opened_s = time.monotonic() - began_s
                nbytes = done.nbytes or size_of(batch)
                epoch.spans[index] = span_of(
                    epoch, index, completed, opened_s, nbytes
                )
            if self._cached.cache is not None:
                self._cached.cache.put(index, batch)
        except build.GlobalRngUsedError:
            return Outcome.RETRY_INLINE
        except Exception as error:
            if _is_the_end(epoch, error):
                return Outcome.END
            if (
                self._in_effect.now.on_error == "raise"
                or not done.by_dataset
                or isinstance(error, LoaderError)
            ):
                raise
            self._skip(epoch, index, error)
            return Outcome.SKIPPED
        return batch

    def _count_stacks(self, stacks: tuple[str, ...]) -> None:
        """Counts stacks; of too many different ones, the rarest are dropped."""
        self.stacks.update(stacks)
        if len(self.stacks) > _MOST_STACKS:
            kept = dict(self.stacks.most_common(_MOST_STACKS // 2))
            self.stacks = collections.Counter(kept)

    def _skip(self, epoch: Epoch, index: int, error: Exception) -> None:
        """Leaves a batch out, unless there have been too many.

        Raises:
            LoaderError: More than a tenth of the batches of the epoch.
        """
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


def _is_the_end(epoch: Epoch, error: Exception) -> bool:
    """Returns whether this ends an epoch whose length nobody knew."""
    assert epoch.schedule is not None
    return isinstance(error, EndOfData) and epoch.schedule.num_batches is None
