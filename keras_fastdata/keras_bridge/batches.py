"""The iterators that Keras is given."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import keras

from keras_fastdata.engine.batch_iterator import BatchIterator
from keras_fastdata.keras_bridge.conversions import (
    for_tensorflow,
    own,
    spell_out_cause,
)
from keras_fastdata.metrics import recorder

if TYPE_CHECKING:
    from keras_fastdata.keras_bridge.adapter import FastPyDatasetAdapter


class IteratorBatches(Iterator[Any]):
    """The batches of one pass, which begins when the first is asked for.

    Args:
        adapter: Whose they are.
        writable: Whether to copy arrays that are read-only.
    """

    def __init__(
        self, adapter: FastPyDatasetAdapter, *, writable: bool = False
    ) -> None:
        self._adapter = adapter
        self._writable = writable
        self._iterator: BatchIterator | None = None
        self._over = False

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        listener = recorder.current_for(self._adapter.fit_thread)
        if (
            listener is not None
            and listener.is_sampling
            and self._adapter.is_fetching_itself()
        ):
            listener.before_wait()
        began_s = time.monotonic()
        if self._iterator is None:
            self._iterator = self._adapter.take_iterator(self)
        try:
            batch = self._iterator.fetch(
                pause_after=listener is not None and listener.wants_quiet
            )
        except StopIteration:
            self._over = True
            if self._iterator.is_empty and self._adapter.num_batches == 0:
                raise self._adapter.no_batches() from None
            if self._iterator.is_shortened or self._iterator.has_said_its_end:
                if self._iterator.is_empty:
                    raise self._adapter.nothing_good() from None
                if self._adapter.may_end_early(self._iterator):
                    self._adapter.early_end.stop_early()
            raise
        except Exception as error:
            spell_out_cause(error)
            self._over = True
            raise
        finally:
            if self._iterator.is_shortened:
                self._adapter.record_skipped(self._iterator)
        if self._writable and self._iterator.is_read_only:
            batch = keras.tree.map_structure(own, batch)
        now_s = time.monotonic()
        self._adapter.record_batch(
            listener, self._iterator, now_s - began_s, now_s
        )
        try:
            return self._adapter.standardize(batch)
        except Exception as error:
            self.name_batch(error)
            raise

    def name_batch(self, error: BaseException) -> None:
        """Notes which batch an error is about: the one given last."""
        if self._iterator is not None:
            self._adapter.name_batch(error, self._iterator)

    def give_up(self) -> None:
        """Ends this iterator."""
        self._over, self._iterator = True, None


class ForTensorFlow(Iterator[Any]):
    """What `from_generator` iterates over, in a thread of TensorFlow's.

    An exception that passes through TensorFlow comes out as a wall of text.
    So it is put aside, the data ends early, and the adapter raises it where
    Keras reports the end of the epoch. Outside of Keras's epochs nobody
    would: there it does pass through TensorFlow.
    """

    def __init__(self, adapter: FastPyDatasetAdapter) -> None:
        self._batches = IteratorBatches(adapter)
        self._early_end = adapter.early_end

    def __next__(self) -> Any:
        try:
            return keras.tree.map_structure(for_tensorflow, next(self._batches))
        except StopIteration:
            raise
        except BaseException as error:
            if not self._early_end.put_aside(error):
                raise
            raise StopIteration from None
