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
from keras_fastdata.engine import build
from keras_fastdata.engine.passes import Pass, open_pass
from keras_fastdata.errors import LoaderError
from keras_fastdata.health import recorder
from keras_fastdata.keras_bridge import rows
from keras_fastdata.keras_bridge.batches import Batches, ForTensorFlow
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
    is_amid_pass,
    is_keras_step,
    steps_argument,
    trainer_at_work,
    users_stacklevel,
)
from keras_fastdata.workers import failures

if TYPE_CHECKING:
    from keras_fastdata import tensorflow_feed

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
        self._begun: Pass | None = None  # a pass for the next iterator to use
        # Weakly: whoever iterates holds it, and it holds this adapter.
        self._latest: weakref.ref[Batches] | None = None
        self._pass: Pass | None = None  # its, to open the next one after
        self._trains = False  # whether the probe, if there is one, is over
        self.early_end = EarlyEnd()
        self._in_pass = (
            0  # delivered in this pass, in several of Keras's epochs
        )
        self._trained = 0  # steps of this pass in such epochs that are over
        self._passes_due = 0  # that such an epoch is still to begin, itself
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
        self.mark = object()  # what a recorder knows it by

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
        return Batches(self, writable=keras.backend.backend() == "torch")

    def get_tf_dataset(self) -> Any:
        import tensorflow as tf

        from keras_fastdata import tensorflow_feed

        if self._output_signature is None:
            began = time.perf_counter()
            self._output_signature = self._sign()
            if (listener := self.listener()) is not None:
                listener.aside_s += time.perf_counter() - began
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

        if not tensorflow_feed.feeds_directly(signature) or not _walks_itself():
            return plain()
        return tensorflow_feed.DirectDataset(
            signature,
            lambda: Batches(_alive(adapter)),
            self.early_end.put_aside,
            plain,
            _taker,
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
        self._passes_due = 0 if is_amid_pass(iterator) else 1
        if self._trains and iterator is not None and has(Feature.RESUME):
            self._shorten(iterator)
        # What the hooks change is not known before they have run.
        self._another_follows = not self._has_hooks and epoch_follows()
        if (listener := self.listener()) is not None:
            # Of a `fit` that was broken off.
            listener.wants_quiet = listener.is_sampling = False
        self._run_hook("on_epoch_begin", starting=not self._trains)

    def on_epoch_end(self) -> None:
        self.early_end.settle()
        if self._passes_due >= 0:  # or else the next one has begun already
            self._trained += self._steps_run
        resumed = self._resumed
        if resumed is not None and not is_amid_pass(resumed):
            self._resumed = None
            resumed._num_batches = self.num_batches
        # Keras resets before it begins, after the probe; and validation data
        # each time. `predict` does not, where there is no probe.
        is_reset = sys._getframe(1).f_code.co_name == "reset"
        starting = is_reset and not self._trains
        if starting:
            self._trains = True
            self._take_back()
        self._run_hook("on_epoch_end", starting=starting)
        self._within_epoch = False

    def _warn_of_steps(self) -> None:
        """Warns of data that ended before the steps that were asked for.

        In Keras's first words; it goes on with a method of `tf.data`'s.
        """
        name, count = type(self.py_dataset).__name__, self.num_batches
        number = "fewer" if count is None else f"{count}"
        ended = f"{self._in_pass - self._trained}"
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

    def take_pass(self, batches: Batches) -> Pass:
        """The pass for an iterator that is asked for its first batch."""
        self._latest = weakref.ref(batches)
        before, dataset = self._pass, self.py_dataset
        found, self._begun = self._begun, None
        if found is None and before is not None:
            found = before.open_following()
        elif found is None:
            found = open_pass(loader_of(dataset), dataset, self.shuffle)
        self._pass = found
        self._in_pass = self._trained = 0
        self._passes_due -= 1
        found.lead_on(self._another_follows)
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
        return recorder.of(self.fit_thread)

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

    def name_batch(self, error: BaseException, begun: Pass) -> None:
        """Notes which batch an error is about: the one delivered last."""
        self._name_batches(error, f"batch {begun.index}", begun.epoch)

    def _name_batches(
        self, error: BaseException, batches: str, epoch: int
    ) -> None:
        name = type(self.py_dataset).__name__
        failures.note(error, f"In {batches} of epoch {epoch} of {name}.")

    def is_heard_by(
        self, listener: recorder.Recorder | None
    ) -> TypeGuard[recorder.Recorder]:
        """Whether batches count: those of a probe do not."""
        return (
            listener is not None
            and (self._trains or listener.predicts)
            and listener.is_of(self.mark)
        )

    def book(
        self,
        listener: recorder.Recorder | None,
        begun: Pass,
        waited_s: float,
        delivered_s: float,
    ) -> None:
        """Accounts for one batch and the wait for it, which has just ended."""
        self._in_pass += 1
        if listener is None:
            return
        if listener.feed is not self.mark and not self.is_heard_by(listener):
            listener.aside_s += waited_s
            return
        span, settled_s = begun.span, begun.settled_s
        if span is not None:
            listener.hear_from(loader_of(self.py_dataset))
        if settled_s:
            listener.rested_s += settled_s
            waited_s -= settled_s
        listener.add(span, waited_s, delivered_s)

    def may_end_early(self, begun: Pass) -> bool:
        """Whether it is no news to the user that there is nothing more."""
        if begun.has_met_its_end and self._steps is not None:
            return False  # they wanted more
        return self._in_pass > self._trained

    def nothing_good(self) -> LoaderError:
        """The error for a dataset that has none, or only such as raise."""
        name = type(self.py_dataset).__name__
        if self._pass is not None and not self._pass.is_shortened:
            return LoaderError(f"{name} has no batch: it ended at once.")
        return LoaderError(f"{name} has no batch that does not raise.")

    def no_batches(self) -> ValueError:
        """The error for a dataset of length 0."""
        return ValueError(
            f"{type(self.py_dataset).__name__} has length 0: there is no batch "
            "to fetch. Look at what it was made from: it has no samples, or, "
            "with `//` or `drop_remainder=True`, fewer than a batch."
        )

    def book_skipped(self, begun: Pass) -> None:
        """Accounts for the batches newly left out."""
        listener = self.listener()
        if not self.is_heard_by(listener):
            return  # a probe; they are taken when the epoch comes to them
        name = type(self.py_dataset).__name__
        for index, text in begun.take_skipped().items():
            listener.skip(recorder.Skipped(name, index, text))

    def _take_back(self) -> None:
        """Makes as if the batches taken so far had not been taken."""
        latest = None if self._latest is None else self._latest()
        if latest is not None:
            latest.give_up()
        if self._pass is not None:
            self._begun, self._pass = self._pass, None
            self._begun.rewind()

    def state(self, steps: int | None) -> dict[str, Any]:
        """`state_dict()` of the dataset while it trains.

        Args:
            steps: Those that were trained on in Keras's present epoch; `None`
                after its end.
        """
        dataset = self.py_dataset
        if self._pass is None:
            state: dict[str, Any] = dataset.state_dict()
            return state
        behind = 0
        if steps is not None or self._steps is not None:
            trained = self._trained + (steps or 0)
            behind = max(0, self._in_pass - trained)
        return state_dict_of(dataset, self._pass.state(behind))

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
            loader.within_epoch = name == "on_epoch_begin"

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
        self._begun = self.take_pass(Batches(self))
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
    """

    adapter: FastPyDatasetAdapter | None
    initial_epoch: int


def training() -> Training:
    """The `fit` around the caller, a callback."""
    found = call_of_keras("fit") if has(Feature.FIT) else None
    if found is None:
        return Training(None, 0)
    _, known = found
    adapter = getattr(known.get("epoch_iterator"), "data_adapter", None)
    initial_epoch = int(known.get("initial_epoch") or 0)
    forget(known)
    if not isinstance(adapter, FastPyDatasetAdapter):
        adapter = None
    return Training(adapter, initial_epoch)


def is_within_fit() -> bool:
    """Whether the caller is an evaluation's or prediction's, amid a `fit`."""
    names = []
    for name, known in calls_of_keras("fit", "evaluate", "predict"):
        names.append(name)
        forget(known)
    return names[:1] != ["fit"] and "fit" in names


def _taker() -> tensorflow_feed.Taker:
    """Who takes the batches that Keras is about to walk over."""
    import tensorflow as tf

    from keras_fastdata import tensorflow_feed

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
        return tensorflow_feed.Taker(True, False, is_eager)
    return tensorflow_feed.Taker(
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
