"""The adapter that stands between Keras and a `FastPyDataset`.

What an adapter sees (Keras 3.15, inline):

    TensorFlow   get_tf_dataset; end; [begin, iterator ..., end] per epoch
    JAX, torch   [begin, iterator, 1 batch;] end; [begin, iterator ..., end]

The first bracket on JAX and PyTorch is a probe that builds the model. It takes
a batch of the first epoch and must not cost the epoch that batch. The `end`
behind the probe is the data's reset. `fit_progress` follows all that.
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

from keras_fastdata._dataset_internals import loader_of, state_dict_of
from keras_fastdata.building import build
from keras_fastdata.engine.batch_iterator import BatchIterator, iterate
from keras_fastdata.errors import LoaderError
from keras_fastdata.keras_bridge import rows
from keras_fastdata.keras_bridge.batches import IteratorBatches
from keras_fastdata.keras_bridge.conversions import (
    spell_out_cause,
    strings_as_tensors,
)
from keras_fastdata.keras_bridge.early_end import EarlyEnd
from keras_fastdata.keras_bridge.fit_progress import EpochProgress
from keras_fastdata.keras_bridge.keras_internals import (
    KerasIterator,
    PyDatasetAdapter,
    another_epoch_follows,
    calling_iterator,
    get_random_seed,
    get_tensor_spec,
    steps_argument,
    users_stacklevel,
)
from keras_fastdata.metrics import recorder
from keras_fastdata.workers import exceptions

_SPEC_BATCHES = 2  # that TensorFlow's signature is made of, as in Keras
_PROBED = 2  # batches at most that Keras takes to build a model, one ahead


class FastPyDatasetAdapter(PyDatasetAdapter):  # type: ignore[misc]
    """Gives Keras the batches of our loader.

    `_standardize_batch`, and with it `class_weight`, is Keras's own. So is
    what each backend makes of `_get_iterator`: arrays, tensors, or on JAX, for
    `steps_per_execution`, several batches stacked for one call.

    Attributes:
        fit_thread: The thread that trains, by `threading.get_ident`.
        progress: How far Keras has come.
        early_end: What to do where the data ends before Keras expects it.
        has_hooks: Whether epoch hooks may change the dataset.
        source_id: What a recorder knows the adapter by.
        began_s: When Keras was given the data, by `time.monotonic`.
        probed_s: How long Keras then waited for batches to build the model
            with.
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
        self.fit_thread = threading.get_ident()
        self.progress = EpochProgress()
        self.early_end = EarlyEnd()
        self.has_hooks = any(
            build.overrides(x, name)
            for name in ("on_epoch_begin", "on_epoch_end")
        )
        self.source_id = object()
        self.began_s = time.monotonic()
        self.probed_s = 0.0
        self._signature: Any = None
        # Weakly: whoever iterates holds it, and it holds this adapter.
        self._latest: weakref.ref[IteratorBatches] | None = None
        self._iterator: BatchIterator | None = None  # the latest one's
        self._prepared: BatchIterator | None = None  # for the next one to use
        self._prefetches_next = False
        # After a resumed epoch, whose length Keras was told.
        self._restore_length: Callable[[], None] | None = None
        self._rows = rows.Rows()

    # -- called by Keras -----------------------------------------------------

    @property
    def num_batches(self) -> int | None:
        """Batches in an epoch, of this process.

        Raises:
            NotImplementedError: The dataset does not say. Keras must be told,
                lest a `fit` has no end.
        """
        dataset = self.py_dataset
        if dataset.num_batches is None:
            return None
        length: int | None = loader_of(dataset).length(dataset)
        return length

    def _get_iterator(self) -> Iterator[Any]:
        # PyTorch knows no tensors that cannot be written to.
        return IteratorBatches(
            self, writable=keras.backend.backend() == "torch"
        )

    def get_tf_dataset(self) -> Any:
        from keras_fastdata.keras_bridge import tensorflow_data

        if self._signature is None:
            began = time.perf_counter()
            self._signature = self._sign()
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
            # Of a `fit` that was broken off.
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
        """Tells Keras how long a resumed epoch is.

        If nobody knows, Keras learns from its end, and is to unlearn that.
        """
        checkpoint = loader_of(self.py_dataset).checkpoint
        if not checkpoint.resumes:
            return
        # Keras goes by the length that the data had when `fit` was called.
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
        if not skips and build.overrides(dataset, name):
            began = time.perf_counter()
            loader.hooks.run(dataset, name)
            if (listener := self.listener()) is not None:
                listener.add_hook(time.perf_counter() - began)
        if not starting:
            loader.hooks.note(name)

    def _warn_of_steps(self) -> None:
        """Warns of data that ended before the steps that were asked for.

        In Keras's first words; it goes on with a method of `tf.data`'s.
        """
        name, count = type(self.py_dataset).__name__, self.num_batches
        number = "fewer" if count is None else f"{count}"
        ended = f"{self.progress.delivered_now}"
        if self.progress.steps is not None:
            ended += f" of {self.progress.steps}"
        warnings.warn(
            f"Your input ran out of data; interrupting training. {name} has "
            f"{number} batches, and the epoch ended after {ended} steps. Leave "
            f"out {steps_argument()}, and every epoch has all batches.",
            stacklevel=users_stacklevel(),
        )

    # -- called by our iterators ---------------------------------------------

    def take_iterator(self, batches: IteratorBatches) -> BatchIterator:
        """Returns what an iterator of Keras's side reads its batches from.

        Called when that iterator is asked for its first batch.
        """
        self._latest = weakref.ref(batches)
        before, dataset = self._iterator, self.py_dataset
        found, self._prepared = self._prepared, None
        if found is None and before is not None:
            found = before.iterate_next()
        elif found is None:
            found = iterate(loader_of(dataset), dataset, self.shuffle)
        self._iterator = found
        self.progress.begin_iterator()
        found.prefetch_next(self._prefetches_next)
        started = self.progress.has_started
        if not started:
            found.remember_first(_PROBED)
        listener = self.listener()
        if not started and not (listener and listener.predicts):
            # After a probe comes `on_train_begin`, and maybe a recorder; one
            # that is there by now is of a `fit` that was broken off.
            found.time_batches(0.0)
        else:
            found.time_batches(
                None if listener is None else listener.interval_s
            )
        return found

    def add_probe(self, seconds: float) -> None:
        """Adds a wait for batches to build the model with."""
        self.probed_s += seconds

    def listener(self) -> recorder.Recorder | None:
        """What measures this fit, evaluation or prediction, if anything."""
        return recorder.current_for(self.fit_thread)

    def standardize(self, batch: Any) -> Any:
        """Checks and completes a batch as Keras does, and a little more."""
        if batch is None:
            raise ValueError(
                f"{type(self.py_dataset).__name__}.__getitem__() returned "
                "None. Is a `return` missing? It must return inputs, "
                "(inputs, targets) or (inputs, targets, sample_weights)."
            )
        standardized = self._standardize_batch(batch)
        if rows.may_differ(standardized):
            self._rows.check(standardized)
        return standardized

    def name_batches(
        self, error: BaseException, batches: str, epoch: int
    ) -> None:
        """Notes which batches an error is about."""
        name = type(self.py_dataset).__name__
        exceptions.note(error, f"In {batches} of epoch {epoch} of {name}.")

    def nothing_good(self) -> LoaderError:
        """The error for a dataset that has none, or only such as raise."""
        name = type(self.py_dataset).__name__
        if self._iterator is not None and not self._iterator.is_shortened:
            return LoaderError(f"{name} has no batch: it ended at once.")
        return LoaderError(f"{name} has no batch that does not raise.")

    def no_batches(self) -> ValueError:
        """The error for a dataset of length 0."""
        return ValueError(
            f"{type(self.py_dataset).__name__} has length 0: there is no batch "
            "to fetch. Look at what it was made from: it has no samples, or, "
            "with `//` or `drop_remainder=True`, fewer than a batch."
        )

    def _undo_probe(self) -> None:
        """Rewinds the epoch: batches that built the model come again."""
        latest = None if self._latest is None else self._latest()
        if latest is not None:
            latest.give_up()
        if self._iterator is not None:
            self._prepared, self._iterator = self._iterator, None
            self._prepared.rewind()

    def _sign(self) -> Any:
        """The signature TensorFlow wants, from batches 0 and 1 as in Keras.

        They are built by the workers, and delivered when their turn comes.
        """
        count = self.num_batches
        wanted = _SPEC_BATCHES
        if count is not None:
            wanted = min(wanted, count)
        if not wanted:
            raise self.no_batches()
        prepared = self._prepared = self.take_iterator(IteratorBatches(self))
        try:
            peeked = prepared.peek(wanted)
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
            return get_tensor_spec(
                keras.tree.map_structure(strings_as_tensors, standardized)
            )
        except Exception as error:
            listed = "batch " + " or ".join(map(str, peeked))
            self.name_batches(error, listed, epoch)
            raise

    # -- called by callbacks -------------------------------------------------

    @property
    def is_within_epoch(self) -> bool:
        """Whether Keras is between the begin and the end of an epoch."""
        return self.progress.is_within_epoch

    @property
    def next_epoch(self) -> int:
        """The number of the epoch that is to come, as the dataset counts."""
        if self._prepared is not None:
            return self._prepared.epoch
        number: int = loader_of(self.py_dataset).epoch
        return number

    @property
    def is_seeded(self) -> bool:
        """Whether what draws a seed draws the same one in every run."""
        return get_random_seed() is not None

    def state(self, steps: int | None) -> dict[str, Any]:
        """`state_dict()` of the dataset while it trains.

        Args:
            steps: Those that were trained on in Keras's present epoch; `None`
                after its end.
        """
        dataset = self.py_dataset
        if self._iterator is None:
            state: dict[str, Any] = dataset.state_dict()
            return state
        lag = self.progress.lag(steps)
        return state_dict_of(dataset, self._iterator.state(lag))
