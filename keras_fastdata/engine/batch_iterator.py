"""The iterator over the batches of one epoch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from keras_fastdata.building import build_context, interface
from keras_fastdata.building.interface import Dataset
from keras_fastdata.engine import state_dict
from keras_fastdata.engine.epoch import Epoch, Finish
from keras_fastdata.engine.loader import Loader
from keras_fastdata.engine.results import Outcome
from keras_fastdata.metrics.recorder import Span
from keras_fastdata.workers import exceptions


def iterate(loader: Loader, dataset: Dataset, shuffle: bool) -> BatchIterator:
    """Returns an iterator over one epoch; the first `next` begins the epoch."""
    if loader.settings.shuffle is not None:
        shuffle = loader.settings.shuffle
    return BatchIterator(loader, dataset, Epoch(shuffle))


def has_rest(loader: Loader, dataset: Dataset, length: int | None) -> bool:
    """Returns whether the resumed epoch has more batches to deliver.

    Where nothing else tells, the batch is built. So the state must be loaded
    once more. `length` is how many batches the consumer takes in an epoch.
    """
    if length is not None and loader.checkpoint.num_done >= length:
        return False
    settings = loader.settings
    if interface.length_of(dataset) is not None and settings.on_error != "skip":
        return True
    number = loader.epoch
    opened = BatchIterator(
        loader, dataset, Epoch(loader.checkpoint.resumed_order)
    )
    next(opened, None)
    # An epoch that had none left has given way to the next one.
    return opened.epoch == number


class BatchIterator(Iterator[Any]):
    """An iterator over the batches of one epoch."""

    _fastdata_passing = ("_loader", "_epoch", "span")

    def __init__(self, loader: Loader, dataset: Dataset, epoch: Epoch) -> None:
        # How the latest batch came about, if it was timed.
        self.span: Span | None = None
        # How long the latest `fetch` waited for the workers to rest.
        self.quiesce_s = 0.0
        self._loader = loader
        # The dataset must not be collected while it is being walked through.
        self._dataset = dataset
        self._epoch = epoch
        self._taken = 0  # of the skipped batches
        loader.register(self, epoch)

    def __next__(self) -> Any:
        try:
            return self.fetch()
        except StopIteration:
            raise
        except Exception as error:
            exceptions.shorten(error)
            raise

    def fetch(self, *, pause_after: bool = False) -> Any:
        """Returns the next batch; raises `StopIteration` after the last batch.

        With `pause_after`, workers pause until the next call, so that they slow
        nothing down meanwhile.
        """
        build_context.consume(self._dataset)
        batch: Any = Outcome.PENDING
        acknowledgements, counted = self._epoch.acknowledgements, None
        try:
            batch = self._loader.deliver(
                self._epoch, self._dataset, pause_after
            )
            if batch is Outcome.END:
                raise StopIteration
            self.span, self.quiesce_s = self._epoch.span, self._epoch.quiesce_s
            counted = acknowledgements.latest
            acknowledgements.acknowledge()
            return batch
        except StopIteration as error:
            if batch is Outcome.END:
                raise
            raise _not_the_end(error) from error
        except BaseException:
            # A signal handler may raise an error when the batch is counted.
            if counted := counted or acknowledgements.latest:
                acknowledgements.requeue(counted)
            raise

    def request(self) -> None:
        """Begins the epoch, and requests its first batches from the workers."""
        self._loader.request(self._epoch, self._dataset)

    def prefetch_next(self, prefetches_next: bool) -> None:
        """Sets whether batches of the next epoch are prefetched."""
        self._epoch.set_prefetching(prefetches_next)

    def iterate_next(self) -> BatchIterator:
        """Returns an iterator over the next epoch, with the same `shuffle`."""
        next_epoch = self._epoch.prepare_next()
        opened = BatchIterator(self._loader, self._dataset, next_epoch)
        # Only now: an interrupt must not leave it to nobody.
        self._epoch.release_next()
        return opened

    def time_batches(self, interval_s: float | None) -> None:
        """Sets how often the times of a batch are recorded in `span`.

        Once in `interval_s`, and for all batches that take as long; `None`:
        never.
        """
        self._epoch.sampling.set_interval(interval_s)

    def silence(self, is_quiet: bool) -> None:
        """Sets whether to hide messages about long waits for a batch."""
        self._epoch.silence(is_quiet)

    @property
    def is_shortened(self) -> bool:
        """Whether this iterator delivers fewer batches than the epoch has."""
        return bool(self._epoch.skipped) or self._epoch.start > 0

    def state(self, lag: int) -> state_dict.State:
        """Returns the dataset's state as it was `lag` batches ago."""
        return self._loader.checkpoint.save(self._dataset, self._epoch, lag)

    @property
    def epoch(self) -> int:
        """The number of this epoch, which can change until the epoch begins."""
        epoch = self._epoch
        if epoch.has_begun and epoch.number is not None:
            return epoch.number
        return self._loader.epoch

    @property
    def index(self) -> int | None:
        """The index of the latest batch; `None` before the first batch."""
        return self._epoch.latest

    @property
    def is_empty(self) -> bool:
        """Whether no batch has been delivered yet."""
        return not self._epoch.delivered

    @property
    def has_said_its_end(self) -> bool:
        """Whether the dataset ended the epoch by raising `EndOfData`."""
        return self._epoch.finished_by is Finish.END_OF_DATA

    @property
    def has_failed(self) -> bool:
        """Whether a batch has raised an error, which ended the epoch."""
        return self._epoch.finished_by is Finish.FAILED

    @property
    def is_read_only(self) -> bool:
        """Whether the latest batch is read-only."""
        kind = self._loader.settings.kind
        return self._epoch.is_from_cache or kind.lends_read_only

    def take_skipped(self) -> dict[int, str]:
        """Returns the tracebacks of batches skipped since the last call.

        The keys are the indices of the batches.
        """
        skipped = self._epoch.skipped
        new = dict(itertools.islice(skipped.items(), self._taken, None))
        self._taken += len(new)
        return new

    def peek(self, count: int) -> dict[int, Any]:
        """Returns batches 0 to `count` - 1 early; the epoch reuses them later.

        When their turn comes, they are not built again. There are fewer if the
        dataset has no more that are good.
        """
        try:
            return self._loader.peek(self._epoch, self._dataset, count)
        except StopIteration as error:
            raise _not_the_end(error) from error

    def remember_first(self, count: int) -> None:
        """Keeps the first `count` delivered batches for `rewind`.

        Drops them when a further batch is delivered.
        """
        self._epoch.remember_first(count)

    def rewind(self) -> None:
        """Restarts the epoch in the same order."""
        self._loader.rewind(self._epoch)


def _not_the_end(error: StopIteration) -> RuntimeError:
    """Returns the error to raise in place of a dataset's `StopIteration`."""
    return RuntimeError(
        f"The dataset raised StopIteration{error.args}; its epoch is not over."
    )
