"""The adapter that stands between Keras and a `FastPyDataset`.

What an adapter sees (Keras 3.15, inline):

    TensorFlow   get_tf_dataset; end; [begin, iterator ..., end] per epoch
    JAX, torch   [begin, iterator, 1 batch;] end; [begin, iterator ..., end]

The first bracket on JAX and PyTorch is a probe that builds the model. It takes
a batch of the first epoch and must not cost the epoch that batch.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

import keras

from keras_fastdata._dataset_internals import loader_of, state_dict_of
from keras_fastdata.building import build
from keras_fastdata.engine.batch_iterator import BatchIterator, iterate
from keras_fastdata.errors import LoaderError
from keras_fastdata.keras_bridge import rows
from keras_fastdata.keras_bridge.batches import ForTensorFlow, IteratorBatches
from keras_fastdata.keras_bridge.conversions import (
    spell_out_cause,
    strings_as_tensors,
)
from keras_fastdata.keras_bridge.early_end import EarlyEnd
from keras_fastdata.keras_bridge.keras_internals import (
    EpochIterator,
    Feature,
    PyDatasetAdapter,
    call_of_keras,
    calling_iterator,
    calls_of_keras,
    epoch_follows,
    forget,
    get_random_seed,
    get_tensor_spec,
    has,
    is_amid_iteration,
    is_keras_step,
    steps_argument,
    trainer_at_work,
    users_stacklevel,
)
from keras_fastdata.metrics import recorder
from keras_fastdata.workers import exceptions

if TYPE_CHECKING:
    from keras_fastdata.keras_bridge import tensorflow_iterator

_SPEC_BATCHES = 2  # that TensorFlow's signature is made of, as in Keras
_FUNCTIONS = {"fit": "train_function", "evaluate": "test_function"}


class FastPyDatasetAdapter(PyDatasetAdapter):  # type: ignore[misc]
    """Gives Keras the batches of our loader.

    `_standardize_batch`, and with it `class_weight`, is Keras's own. So is
    what each backend makes of `_get_iterator`: arrays, tensors, or on JAX, for
    `steps_per_execution`, several batches stacked for one call.

    Attributes:
        fit_thread: The thread that trains, by `threading.get_ident`.
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
        self._output_signature: Any = None
        self._within_epoch = False
        self._begun: BatchIterator | None = (
            None  # a pass for the next iterator to use
        )
        # Weakly: whoever iterates holds it, and it holds this adapter.
        self._latest: weakref.ref[IteratorBatches] | None = None
        self._iterator: BatchIterator | None = (
            None  # its, to open the next one after
        )
        self._trains = False  # whether the probe, if there is one, is over
        self.early_end = EarlyEnd()
        self._in_iterator = (
            0  # delivered in this pass, in several of Keras's epochs
        )
        self._trained = 0  # steps of this pass in such epochs that are over
        self._iterations_due = 0  # that such an epoch is still to begin, itself
        self._resumed: EpochIterator | None = None  # in such a pass
        self._steps: int | None = None  # of an epoch, if the user said
        self._steps_run = 0  # those, in whole executions
        self._another_follows = False
        self._has_hooks = any(
            build.overrides(x, name)
            for name in ("on_epoch_begin", "on_epoch_end")
        )
        self.fit_thread = threading.get_ident()
        self._rows = rows.Rows()
        self.source_id = object()  # what a recorder knows it by

    @property
    def is_within_epoch(self) -> bool:
        """Whether Keras is between the begin and the end of an epoch."""
        return self._within_epoch

    @property
    def has_hooks(self) -> bool:
        """Whether epoch hooks may change the dataset."""
        return self._has_hooks

    @property
    def next_epoch(self) -> int:
        """The number of the epoch that is to come, as the dataset counts."""
        if self._begun is not None:
            return self._begun.epoch
        number: int = loader_of(self.py_dataset).epoch
        return number

    @property
    def is_seeded(self) -> bool:
        """Whether what draws a seed draws the same one in every run."""
        return get_random_seed() is not None

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
        import tensorflow as tf

        from keras_fastdata.keras_bridge import tensorflow_iterator

        if self._output_signature is None:
            began = time.perf_counter()
            self._output_signature = self._sign()
            if (listener := self.listener()) is not None:
                listener.exclude(time.perf_counter() - began)
        # TensorFlow keeps this function for ever (in its default graph); it
        # must not keep the dataset, and with it the workers. The caller's
        # EpochIterator keeps the adapter while it trains.
        adapter = weakref.ref(self)
        signature = self._output_signature

        def plain() -> Any:
            dataset = tf.data.Dataset.from_generator(
                lambda: ForTensorFlow(_alive(adapter)),
                output_signature=signature,
            )
            # The workers prefetch; tf.data is to ask for a batch when due.
            options = tf.data.Options()
            options.autotune.enabled = False
            options.threading.private_threadpool_size = 1
            return dataset.with_options(options)

        if (
            not tensorflow_iterator.feeds_directly(signature)
            or not _walks_itself()
        ):
            return plain()
        return tensorflow_iterator.DirectDataset(
            signature,
            lambda: IteratorBatches(_alive(adapter)),
            self.early_end.put_aside,
            plain,
            _consumer,
        )

    def on_epoch_begin(self) -> None:
        if self._within_epoch:
            raise ValueError(
                "`on_epoch_begin` was called twice without `on_epoch_end` "
                "having been called."
            )
        self._within_epoch = True
        iterator = calling_iterator()
        self.early_end.expect(iterator, self._warn_of_steps)
        self._steps, self._steps_run = None, 0
        if iterator is not None and has(Feature.RESUME):
            self._steps = iterator.steps_per_epoch
            each = iterator.steps_per_execution
            self._steps_run = -(-(self._steps or 0) // each) * each
        self._iterations_due = 0 if is_amid_iteration(iterator) else 1
        if self._trains and iterator is not None and has(Feature.RESUME):
            self._shorten(iterator)
        # What the hooks change is not known before they have run.
        self._another_follows = not self._has_hooks and epoch_follows()
        if (listener := self.listener()) is not None:
            # Of a `fit` that was broken off.
            listener.stop_sampling()
        self._run_hook("on_epoch_begin", starting=not self._trains)

    def on_epoch_end(self) -> None:
        self.early_end.raise_pending()
        if self._iterations_due >= 0:  # or else the next one has begun already
            self._trained += self._steps_run
        resumed = self._resumed
        if resumed is not None and not is_amid_iteration(resumed):
            self._resumed = None
            resumed._num_batches = self.num_batches
        # Keras resets before it begins, after the probe; and validation data
        # each time. `predict` does not, where there is no probe.
        is_reset = sys._getframe(1).f_code.co_name == "reset"
        starting = is_reset and not self._trains
        if starting:
            self._trains = True
            self._undo_probe()
        self._run_hook("on_epoch_end", starting=starting)
        self._within_epoch = False

    def _warn_of_steps(self) -> None:
        """Warns of data that ended before the steps that were asked for.

        In Keras's first words; it goes on with a method of `tf.data`'s.
        """
        name, count = type(self.py_dataset).__name__, self.num_batches
        number = "fewer" if count is None else f"{count}"
        ended = f"{self._in_iterator - self._trained}"
        if self._steps is not None:
            ended += f" of {self._steps}"
        warnings.warn(
            f"Your input ran out of data; interrupting training. {name} has "
            f"{number} batches, and the epoch ended after {ended} steps. Leave "
            f"out {steps_argument()}, and every epoch has all batches.",
            stacklevel=users_stacklevel(),
        )

    def _shorten(self, iterator: EpochIterator) -> None:
        """Tells Keras of a pass that is resumed how long it is.

        If nobody knows, Keras learns from its end, and is to unlearn that.
        """
        loader = loader_of(self.py_dataset)
        if loader.resumes:
            self._resumed = iterator
            rest = loader.rest(self.py_dataset)
            if rest is not None:
                iterator._num_batches = rest

    def take_iterator(self, batches: IteratorBatches) -> BatchIterator:
        """The pass for an iterator that is asked for its first batch."""
        self._latest = weakref.ref(batches)
        before, dataset = self._iterator, self.py_dataset
        found, self._begun = self._begun, None
        if found is None and before is not None:
            found = before.iterate_next()
        elif found is None:
            found = iterate(loader_of(dataset), dataset, self.shuffle)
        self._iterator = found
        self._in_iterator = self._trained = 0
        self._iterations_due -= 1
        found.prefetch_next(self._another_follows)
        if not self._trains:
            found.remember_first()
        listener = self.listener()
        if not self._trains and not (listener and listener.predicts):
            # After a probe comes `on_train_begin`, and maybe a recorder; one
            # that is there by now is of a `fit` that was broken off.
            found.time_batches(0.0)
        else:
            found.time_batches(
                None if listener is None else listener.interval_s
            )
        return found

    def listener(self) -> recorder.Recorder | None:
        """What measures this fit, evaluation or prediction, if anything."""
        return recorder.current_for(self.fit_thread)

    def is_fetching_itself(self) -> bool:
        """Whether the thread that trains is the one that asks for a batch."""
        return threading.get_ident() == self.fit_thread

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

    def name_batch(self, error: BaseException, begun: BatchIterator) -> None:
        """Notes which batch an error is about: the one delivered last."""
        self._name_batches(error, f"batch {begun.index}", begun.epoch)

    def _name_batches(
        self, error: BaseException, batches: str, epoch: int
    ) -> None:
        name = type(self.py_dataset).__name__
        exceptions.note(error, f"In {batches} of epoch {epoch} of {name}.")

    def should_record(
        self, listener: recorder.Recorder | None
    ) -> TypeGuard[recorder.Recorder]:
        """Whether batches count: those of a probe do not."""
        return (
            listener is not None
            and (self._trains or listener.predicts)
            and listener.is_of(self.source_id)
        )

    def record_batch(
        self,
        listener: recorder.Recorder | None,
        begun: BatchIterator,
        waited_s: float,
        delivered_s: float,
    ) -> None:
        """Accounts for one batch and the wait for it, which has just ended."""
        self._in_iterator += 1
        if listener is None:
            return
        if listener.source_id is not self.source_id and not self.should_record(
            listener
        ):
            listener.exclude(waited_s)
            return
        span, quiesce_s = begun.span, begun.quiesce_s
        if span is not None:
            listener.attach_source(loader_of(self.py_dataset))
        if quiesce_s:
            listener.add_quiesce(quiesce_s)
            waited_s -= quiesce_s
        listener.add(span, waited_s, delivered_s)

    def may_end_early(self, begun: BatchIterator) -> bool:
        """Whether it is no news to the user that there is nothing more."""
        if begun.has_said_its_end and self._steps is not None:
            return False  # they wanted more
        return self._in_iterator > self._trained

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

    def record_skipped(self, begun: BatchIterator) -> None:
        """Accounts for the batches newly left out."""
        listener = self.listener()
        if not self.should_record(listener):
            return  # a probe; they are taken when the epoch comes to them
        name = type(self.py_dataset).__name__
        for index, text in begun.take_skipped().items():
            listener.skip(recorder.Skipped(name, index, text))

    def _undo_probe(self) -> None:
        """Makes as if the batches taken so far had not been taken."""
        latest = None if self._latest is None else self._latest()
        if latest is not None:
            latest.give_up()
        if self._iterator is not None:
            self._begun, self._iterator = self._iterator, None
            self._begun.rewind()

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
        lag = 0
        if steps is not None or self._steps is not None:
            trained = self._trained + (steps or 0)
            lag = max(0, self._in_iterator - trained)
        return state_dict_of(dataset, self._iterator.state(lag))

    def _run_hook(self, name: str, *, starting: bool) -> None:
        dataset = self.py_dataset
        loader = loader_of(dataset)
        skips = loader.skips_hook(name, starting=starting)
        if not skips and build.overrides(dataset, name):
            began = time.perf_counter()
            loader.run_hook(dataset, name)
            if (listener := self.listener()) is not None:
                listener.add_hook(time.perf_counter() - began)
        if not starting:
            loader.note_hook(name)

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
        self._begun = self.take_iterator(IteratorBatches(self))
        try:
            peeked = self._begun.peek(wanted)
        except Exception as error:
            spell_out_cause(error)
            raise
        if not peeked:
            raise self.nothing_good()
        epoch, indices = self._begun.epoch, self._begun.peeked
        standardized = []
        for index, batch in zip(indices, peeked, strict=True):
            try:
                standardized.append(self.standardize(batch))
            except Exception as error:
                self._name_batches(error, f"batch {index}", epoch)
                raise
        try:
            return get_tensor_spec(
                keras.tree.map_structure(strings_as_tensors, standardized)
            )
        except Exception as error:
            listed = "batch " + " or ".join(map(str, indices))
            self._name_batches(error, listed, epoch)
            raise


@dataclasses.dataclass(frozen=True)
class Training:
    """The `fit` around a callback.

    Attributes:
        adapter: Of its training data; `None` if that is not ours.
        initial_epoch: What it was told to begin with.
        has_steps: Whether it was told how many steps an epoch has.
    """

    adapter: FastPyDatasetAdapter | None
    initial_epoch: int
    has_steps: bool


def training() -> Training:
    """The `fit` around the caller, a callback."""
    found = call_of_keras("fit") if has(Feature.FIT) else None
    if found is None:
        return Training(None, 0, False)
    _, known = found
    iterator = known.get("epoch_iterator")
    adapter = getattr(iterator, "data_adapter", None)
    has_steps = getattr(iterator, "steps_per_epoch", None) is not None
    initial_epoch = int(known.get("initial_epoch") or 0)
    forget(known)
    if not isinstance(adapter, FastPyDatasetAdapter):
        adapter = None
    return Training(adapter, initial_epoch, has_steps)


def is_within_fit() -> bool:
    """Whether the caller is an evaluation's or prediction's, amid a `fit`."""
    names = []
    for name, known in calls_of_keras("fit", "evaluate", "predict"):
        names.append(name)
        forget(known)
    return names[:1] != ["fit"] and "fit" in names


def _consumer() -> tensorflow_iterator.Consumer:
    """Who takes the batches that Keras is about to walk over."""
    import tensorflow as tf

    from keras_fastdata.keras_bridge import tensorflow_iterator

    name, trainer = trainer_at_work()
    living = weakref.ref(trainer)

    def is_eager() -> bool:
        trainer = living()
        return (
            trainer is None
            or trainer.run_eagerly
            or tf.config.functions_run_eagerly()
        )

    function = getattr(trainer, _FUNCTIONS.get(name, ""), None)
    if function is None:
        # For a prediction, or to build a model, Keras asks for a batch itself.
        return tensorflow_iterator.Consumer(True, False, is_eager)
    return tensorflow_iterator.Consumer(
        is_keras_step(function),
        trainer.steps_per_execution == 1,
        is_eager,
    )


def _walks_itself() -> bool:
    """Whether Keras walks over a dataset as it is, on TensorFlow.

    The strategies of `tf.distribute` make a graph of it.
    """
    if not has(Feature.DIRECT_FEED):
        return False
    import tensorflow as tf

    _, trainer = trainer_at_work()
    return (
        trainer is not None
        and not tf.distribute.has_strategy()
        and trainer.distribute_strategy is tf.distribute.get_strategy()
    )


def _alive(
    reference: weakref.ref[FastPyDatasetAdapter],
) -> FastPyDatasetAdapter:
    adapter = reference()
    if adapter is None:
        raise ReferenceError("the Keras data adapter has been collected")
    return adapter
