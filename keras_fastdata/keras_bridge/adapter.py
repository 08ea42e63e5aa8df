"""Defines the adapter between Keras and a `FastPyDataset`.

Keras 3.15 calls it so:

    TensorFlow   get_tf_dataset; end; [begin, iterator ..., end] per epoch
    JAX, torch   [begin, iterator, 1 batch;] end; [begin, iterator ..., end]

The first bracket on JAX and PyTorch is a probe that builds the model. The
epoch must not lose the batch that the probe takes. The `end` behind the probe
is the data's reset. `fit_progress` keeps track of these calls.
"""

from __future__ import annotations

import functools
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_fastdata._dataset_internals import (
    loader_of,
    run_hook,
    state_dict_of,
    workers_within,
)
from keras_fastdata.building import interface
from keras_fastdata.engine.batch_iterator import BatchIterator, iterate
from keras_fastdata.errors import LoaderError
from keras_fastdata.keras_bridge import rows, shapes
from keras_fastdata.keras_bridge.batches import (
    IteratorBatches,
    check_first,
    spell_out_cause,
)
from keras_fastdata.keras_bridge.early_end import EarlyEnd
from keras_fastdata.keras_bridge.fit_progress import EpochProgress
from keras_fastdata.keras_bridge.keras_internals import (
    KerasIterator,
    PyDatasetAdapter,
    another_epoch_follows,
    calling_iterator,
    is_quiet,
    steps_argument,
    users_stacklevel,
)
from keras_fastdata.metrics import recorder
from keras_fastdata.workers import exceptions

_SPEC_BATCHES = 2  # make TensorFlow's signature, as in Keras
_PROBED = 2  # batches at most that Keras takes to build a model, one ahead


class FastPyDatasetAdapter(PyDatasetAdapter):  # type: ignore[misc]
    """Gives Keras the batches of a `FastPyDataset`.

    `_standardize_batch`, and with it `class_weight`, is Keras's own. So is
    what each backend makes of `_get_iterator`: arrays, tensors, or on JAX, for
    `steps_per_execution`, several batches stacked for one call.
    """

    def __init__(
        self,
        x: Any,
        class_weight: dict[int, float] | None = None,
        shuffle: bool = False,
    ) -> None:
        # Not super().__init__, which would start Keras's own workers.
        self.py_dataset = x
        self.class_weight = class_weight
        self.enqueuer = None
        self.shuffle = shuffle
        # The `threading.get_ident` of the thread that trains.
        self.fit_thread = threading.get_ident()
        self.progress = EpochProgress()  # how far Keras has come
        # What to do where the data ends before Keras expects it.
        self.early_end = EarlyEnd()
        # Whether epoch hooks may change the dataset.
        self.has_hooks = any(
            interface.overrides(x, name) for name in interface.EPOCH_HOOKS
        )
        # An object that identifies the adapter to a recorder.
        self.source_id = object()
        self._is_quiet = is_quiet()
        # The `time.monotonic` at which Keras got the data.
        self.began_s = time.monotonic()
        # How many seconds Keras then waited for batches, to build the model
        # with.
        self.probed_s = 0.0
        # The workers of the dataset itself, if it waits for them in builds.
        self.within = workers_within(x)
        # What a recorder is told of, and how often each stack was met in its
        # slow builds before.
        self.source: recorder.BatchSource = self.within or loader_of(x)
        self.stacks_before = self.source.stacks
        self._signature: Any = None
        self._has_checked_first = False
        # Weakly: whoever iterates holds it, and it holds this adapter.
        self._latest: weakref.ref[IteratorBatches] | None = None
        self._iterator: BatchIterator | None = None  # the latest one's
        self._prepared: BatchIterator | None = None  # for the next one to use
        self._prefetches_next = False
        # Called after a resumed epoch, whose length Keras was told.
        self._restore_length: Callable[[], None] | None = None
        self._rows = rows.Rows()
        self._shapes = shapes.Shapes()

    # -- called by Keras -----------------------------------------------------

    @property
    def num_batches(self) -> int | None:
        """The number of batches that this process trains on in each epoch."""
        dataset = self.py_dataset
        if dataset.num_batches is None:
            return None
        length: int | None = loader_of(dataset).length(dataset)
        return length

    def _get_iterator(self) -> Iterator[Any]:
        # PyTorch has no read-only tensors.
        return IteratorBatches(
            self, writable=keras.backend.backend() == "torch"
        )

    def get_tf_dataset(self) -> Any:
        from keras_fastdata.keras_bridge import tensorflow_data

        if self._signature is None:
            began = time.perf_counter()
            self._signature = self._sign(tensorflow_data.signature_of)
            self.add_probe(time.perf_counter() - began)
            if (listener := self.listener()) is not None:
                listener.exclude(time.perf_counter() - began)
        return tensorflow_data.make_dataset(self, self._signature)

    def on_epoch_begin(self) -> None:
        iterator = calling_iterator()
        self.progress.begin_epoch(
            iterator.steps_per_epoch,
            iterator.steps_per_execution,
            continues=iterator.continues,
        )
        self.early_end.expect(iterator, self._warn_of_steps)
        if self.progress.has_started:
            self._tell_length(iterator)
        # What the hooks change is not known before they have run.
        self._prefetches_next = not self.has_hooks and another_epoch_follows(
            iterator
        )
        if (listener := self.listener()) is not None:
            # A `fit` that was broken off may have left a step half measured.
            listener.sampler.interrupt()
        self._run_hook("on_epoch_begin", starting=not self.progress.has_started)

    def on_epoch_end(self) -> None:
        self.early_end.raise_pending()
        iterator = calling_iterator()
        if self._restore_length is not None and not iterator.continues:
            self._restore_length()
            self._restore_length = None
        # Keras resets before it begins, after the probe; and validation data
        # each time. `predict` does not, where there is no probe.
        starting = self.progress.end_epoch(is_reset=iterator.is_resetting)
        if starting:
            self._undo_probe()
        self._run_hook("on_epoch_end", starting=starting)

    def _tell_length(self, iterator: KerasIterator) -> None:
        """Sets Keras's batch count to the remaining batches of a resumed epoch.

        `on_epoch_end` restores the number; or `None`, if Keras has learned the
        number at the end of the epoch.
        """
        if self.py_dataset.num_batches is None:
            iterator.set_num_batches(None)  # not those of the first epoch
        checkpoint = loader_of(self.py_dataset).checkpoint
        if checkpoint.resumes:
            # The length that the data had when `fit` was called.
            length = iterator.num_batches
            self._restore_length = functools.partial(
                iterator.set_num_batches, length
            )
            if length is not None:
                iterator.set_num_batches(length - checkpoint.num_done)

    def _run_hook(self, name: str, *, starting: bool) -> None:
        dataset = self.py_dataset
        loader = loader_of(dataset)
        skips = loader.hooks.skips(name, starting=starting)
        if not skips and interface.overrides(dataset, name):
            began = time.perf_counter()
            run_hook(dataset, name)
            if (listener := self.listener()) is not None:
                listener.add_hook(time.perf_counter() - began)
        if not starting:
            loader.hooks.note(name)

    def _warn_of_steps(self) -> None:
        """Warns that the data ended before the requested number of steps.

        Begins as Keras's own warning, which then advises a method of `tf.data`.
        """
        name, count = type(self.py_dataset).__name__, self.num_batches
        number = "fewer" if count is None else f"{count}"
        warnings.warn(
            f"Your input ran out of data; interrupting training. {name} has "
            f"{number} batches, and the epoch ended after "
            f"{_steps_of(self.progress)}",
            stacklevel=users_stacklevel(),
        )

    # -- called by our iterators ---------------------------------------------

    def take_iterator(
        self, batches: IteratorBatches | None = None
    ) -> BatchIterator:
        """Returns the loader's iterator over the next epoch.

        `batches` is what Keras iterates over, if it does so already.
        """
        self._latest = None if batches is None else weakref.ref(batches)
        before, dataset = self._iterator, self.py_dataset
        found, self._prepared = self._prepared, None
        if found is None and before is not None:
            found = before.iterate_next()
        elif found is None:
            found = iterate(loader_of(dataset), dataset, self.shuffle)
        self._iterator = found
        self.progress.begin_iterator()
        found.prefetch_next(self._prefetches_next)
        found.silence(self._is_quiet)
        started = self.progress.has_started
        if not started:
            found.remember_first(_PROBED)
        listener = self.listener()
        interval_s = None if listener is None else listener.interval_s
        if not started and not (listener and listener.predicts):
            # After a probe comes `on_train_begin`, and maybe a recorder. One
            # that exists by now belongs to a `fit` that was broken off.
            interval_s = 0.0
        found.time_batches(interval_s)
        if self.within is not None:
            self.within.time_batches(interval_s)
        return found

    def add_probe(self, seconds: float) -> None:
        """Adds `seconds` to the wait for data before the first step."""
        self.probed_s += seconds

    def listener(self) -> recorder.Recorder | None:
        """Returns the recorder attached to this `fit`, or `None` if none is."""
        return recorder.current_for(self.fit_thread)

    def standardize(self, batch: Any) -> Any:
        """Checks a batch, and converts it to the form that Keras expects."""
        if batch is None:
            raise ValueError(
                f"{type(self.py_dataset).__name__}.__getitem__() returned "
                "None. Is a `return` missing? It must return inputs, "
                "(inputs, targets) or (inputs, targets, sample_weights)."
            )
        if not self._has_checked_first:
            self._has_checked_first = True
            check_first(self.py_dataset, batch)
        standardized = self._standardize_batch(batch)
        if rows.may_differ(standardized):
            self._rows.check(standardized)
        else:
            self._shapes.check(standardized)
        return standardized

    def name_batches(
        self, error: BaseException, batches: str, epoch: int
    ) -> None:
        """Adds the numbers of the faulty batches to an error, as a note."""
        name = type(self.py_dataset).__name__
        exceptions.note(error, f"In {batches} of epoch {epoch} of {name}.")

    def nothing_good(self) -> LoaderError:
        """Returns the error to raise if an epoch delivers no batch."""
        name = type(self.py_dataset).__name__
        if self._iterator is not None and not self._iterator.is_shortened:
            return LoaderError(f"{name} has no batch: it ended at once.")
        return LoaderError(f"{name} has no batch that does not raise.")

    def no_batches(self) -> ValueError:
        """Returns the error to raise for a dataset of length 0."""
        return ValueError(
            f"{type(self.py_dataset).__name__} has length 0: there is no batch "
            "to fetch. Look at what it was made from: it has no samples, or, "
            "with `//` or `drop_remainder=True`, fewer than a batch."
        )

    def _undo_probe(self) -> None:
        """Rewinds the epoch, so that it delivers the probe's batches again."""
        latest = None if self._latest is None else self._latest()
        if latest is not None:
            latest.finish()
        if self._iterator is not None:
            self._prepared, self._iterator = self._iterator, None
            self._prepared.rewind()

    def _sign(self, signature_of: Callable[[list[Any]], Any]) -> Any:
        """Derives the TensorFlow signature of batches from batches 0 and 1.

        The workers build these two. They are delivered in their turn.
        """
        count = self.num_batches
        if count == 0:
            raise self.no_batches()
        prepared = self._prepared = self.take_iterator()
        try:
            peeked = prepared.peek(min(_SPEC_BATCHES, count or _SPEC_BATCHES))
        except Exception as error:
            spell_out_cause(error)
            raise
        if not peeked:
            raise self.nothing_good()
        epoch = prepared.epoch
        standardized = []
        for index, batch in peeked.items():
            try:
                standardized.append(self.standardize(batch))
            except Exception as error:
                self.name_batches(error, f"batch {index}", epoch)
                raise
        try:
            return signature_of(standardized)
        except Exception as error:
            listed = "batch " + " or ".join(map(str, peeked))
            self.name_batches(error, listed, epoch)
            raise

    # -- called by callbacks -------------------------------------------------

    @property
    def next_epoch(self) -> int:
        """The number of the next epoch, as the dataset counts epochs."""
        if self._prepared is not None:
            return self._prepared.epoch
        return int(loader_of(self.py_dataset).epoch)

    def state(self, steps: int | None) -> dict[str, Any]:
        """Returns the dataset's `state_dict()` after some steps of an epoch.

        `steps` counts those of Keras's present epoch; `None` after its end.
        """
        dataset = self.py_dataset
        if self._iterator is None:
            state: dict[str, Any] = dataset.state_dict()
            return state
        lag = self.progress.lag(steps)
        return state_dict_of(dataset, self._iterator.state(lag))


def _steps_of(progress: EpochProgress) -> str:
    """Returns after how many steps the data ended, and why or what to do."""
    ended = f"{progress.delivered_now}"
    if progress.steps is None:
        return (
            f"{ended} steps. Its length has changed since Keras asked for it."
        )
    return (
        f"{ended} of {progress.steps} steps. Leave out {steps_argument()}, and "
        "every epoch has all batches."
    )
