"""Defines `IteratorBatches`, the iterator that Keras gets batches from."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import keras
import numpy as np

from keras_fastdata.engine.batch_iterator import BatchIterator
from keras_fastdata.errors import DatasetPicklingError
from keras_fastdata.keras_bridge.keras_internals import trainer_at_work
from keras_fastdata.metrics import recorder
from keras_fastdata.metrics.sampling import SamplingState
from keras_fastdata.workers import exceptions

if TYPE_CHECKING:
    from keras_fastdata.keras_bridge.adapter import FastPyDatasetAdapter


class IteratorBatches(Iterator[Any]):
    """Iterates over one epoch, which begins when the first batch is requested.

    With `writable`, arrays that are read-only are copied.
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
        adapter = self._adapter
        listener = recorder.current_for(adapter.fit_thread)
        state = SamplingState.OFF
        if listener is not None:
            state = listener.sampler.state
            if (
                state is SamplingState.ISOLATED
                and threading.get_ident() == adapter.fit_thread
            ):
                listener.sampler.before_wait()
        began_s = time.monotonic()
        if self._iterator is None:
            self._iterator = adapter.take_iterator(self)
        pauses = state is not SamplingState.OFF
        try:
            batch = self._iterator.fetch(pause_after=pauses)
            if adapter.within is not None:
                adapter.within.finish_fetch(pauses)
        except StopIteration:
            self._over = True
            self._check_end(self._iterator)
            raise
        except Exception as error:
            spell_out_cause(error)
            self._over = True
            raise
        finally:
            if self._iterator.is_shortened:
                self._record_skipped(self._iterator)
        if self._writable and self._iterator.is_read_only:
            batch = keras.tree.map_structure(writable, batch)
        now_s = time.monotonic()
        adapter.progress.count_batch()
        if not adapter.progress.has_started:
            adapter.add_probe(now_s - began_s)
        if listener is not None:
            self._record(listener, self._iterator, now_s - began_s, now_s)
        try:
            return adapter.standardize(batch)
        except Exception as error:
            self.name_batch(error)
            raise

    def _check_end(self, iterator: BatchIterator) -> None:
        """Raises an error if an epoch has ended without any batch.

        Suppresses Keras's warning that data ran out, if batches were skipped
        or the dataset has said where it ends: the user knows.
        """
        adapter = self._adapter
        if iterator.is_empty and adapter.num_batches == 0:
            raise adapter.no_batches() from None
        if not iterator.is_shortened and not iterator.has_said_its_end:
            return
        if iterator.is_empty:
            raise adapter.nothing_good() from None
        progress = adapter.progress
        wanted_more = iterator.has_said_its_end and progress.steps is not None
        if not wanted_more and progress.delivered_now > 0:
            adapter.early_end.stop_early()

    def name_batch(self, error: BaseException) -> None:
        """Adds a note about the latest batch to an error."""
        if self._iterator is not None:
            index, epoch = self._iterator.index, self._iterator.epoch
            self._adapter.name_batches(error, f"batch {index}", epoch)

    def finish(self) -> None:
        """Ends the iteration, so that no more batches are delivered."""
        self._over, self._iterator = True, None

    # -- recording -----------------------------------------------------------

    def _should_record(
        self, listener: recorder.Recorder | None
    ) -> TypeGuard[recorder.Recorder]:
        """Returns whether to record the batches of this iterator.

        A probe's batches are not recorded.
        """
        adapter = self._adapter
        return (
            listener is not None
            and (adapter.progress.has_started or listener.predicts)
            and listener.claim_source(adapter.source_id)
        )

    def _record(
        self,
        listener: recorder.Recorder,
        iterator: BatchIterator,
        waited_s: float,
        delivered_s: float,
    ) -> None:
        """Records a delivered batch, and how long training waited for it."""
        adapter = self._adapter
        if listener.source_id is not adapter.source_id and not (
            self._should_record(listener)
        ):
            listener.exclude(waited_s)
            return
        span, quiesce_s = iterator.span, iterator.quiesce_s
        if adapter.within is not None:
            span = adapter.within.span_of(iterator.epoch, iterator.index)
            quiesce_s = adapter.within.quiesce_s()
        if span is not None:
            listener.attach_source(adapter.source, adapter.stacks_before)
        if quiesce_s:
            listener.add_quiesce(quiesce_s)
            waited_s -= quiesce_s
        listener.add(span, waited_s, delivered_s)

    def _record_skipped(self, iterator: BatchIterator) -> None:
        """Records the batches that were skipped since the last call."""
        listener = self._adapter.listener()
        if not self._should_record(listener):
            return  # a probe; they are taken when the epoch comes to them
        name = type(self._adapter.py_dataset).__name__
        for index, text in iterator.take_skipped().items():
            listener.skip(recorder.Skipped(name, index, text))


def writable(leaf: Any) -> Any:
    """Copies a read-only array; returns other leaves unchanged."""
    if isinstance(leaf, np.ndarray) and not leaf.flags.writeable:
        return leaf.copy()
    return leaf


def check_first(dataset: Any, batch: Any) -> None:
    """Raises `ValueError` for a batch that no step of Keras can take.

    That is one without targets, or with strings. A model with a step or a loss
    of its own may take both.
    """
    method, trainer = trainer_at_work()
    steps = {"fit": "train_step", "evaluate": "test_step"}
    if method not in steps or getattr(trainer, "loss", None) is None:
        return
    for name in (steps[method], "compute_loss"):
        own = getattr(type(trainer), name, None)
        if own is not getattr(keras.Model, name):
            return
    kind = type(dataset).__name__
    if not isinstance(batch, (tuple, list)):
        names = ""
        if isinstance(batch, Mapping):
            names = f" A batch is a dict of {', '.join(map(repr, batch))}."
        raise ValueError(
            f"The batches of this {kind} are inputs without targets, and "
            f"`{method}` needs targets for the loss.{names} To "
            "`SampleDataset` and `GeneratorDataset` pass `label=`, the name of "
            "the targets; have others return `(inputs, targets)`."
        )
    backend = keras.backend.backend()
    for path, leaf in keras.tree.flatten_with_path(tuple(batch)):
        dtype = getattr(leaf, "dtype", None)
        is_text = getattr(dtype, "kind", "") in ("S", "U")
        if not is_text or (backend == "tensorflow" and not path[0]):
            continue
        if path[0] and not isinstance(trainer.loss, str):
            continue  # a function of the user's may take strings
        needy = "the loss" if path[0] else f"a model on {backend}"
        where = "".join(f"[{key!r}]" for key in path[1:])
        raise ValueError(
            f"{'y' if path[0] else 'x'}{where} in the batches of this {kind} "
            f"has strings, and {needy} needs numbers. Convert them in the "
            "data or by a `transform=`, or leave them out by `columns=`."
        )


def spell_out_cause(error: Exception) -> None:
    """Adds the cause of an error to the error's notes.

    Keras's traceback filter drops the cause (`raise ... from None`), which
    stays reachable as `__context__`. A `DatasetPicklingError` names its cause.
    """
    if error.__cause__ is not None:
        if not isinstance(error, DatasetPicklingError):
            exceptions.note_causes(error)
        if error.__context__ is None:
            BaseException.__setattr__(error, "__context__", error.__cause__)
