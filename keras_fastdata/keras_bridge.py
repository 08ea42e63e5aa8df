"""How `fit`, `evaluate` and `predict` consume a `FastPyDataset`.

Keras wraps a PyDataset in a `PyDatasetAdapter`, and asks that for iterators.
`register` gives `PyDatasetAdapter` a `__new__` that makes our adapter for our
datasets, wherever Keras imported the name, and is Keras's own for all others.
This is the one thing of Keras's that we touch, and the one file that imports
from `keras.src`.

What an adapter sees (Keras 3.15, inline):

    TensorFlow   get_tf_dataset; end; [begin, iterator ..., end] per epoch
    JAX, torch   [begin, iterator, 1 batch;] end; [begin, iterator ..., end]

The first bracket on JAX and PyTorch is a probe that builds the model. It takes
a batch of the first epoch and must not cost the epoch that batch.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

import keras
import numpy as np
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.data_adapters.py_dataset_adapter import (
    PyDatasetAdapter,
)
from keras.src.trainers.epoch_iterator import EpochIterator
from keras.src.trainers.trainer import Trainer
from keras.src.utils import rng_utils

from keras_fastdata.engine import build
from keras_fastdata.engine.passes import Pass, open_pass
from keras_fastdata.errors import LoaderError
from keras_fastdata.health import recorder
from keras_fastdata.workers import failures

if TYPE_CHECKING:
    from keras_fastdata import tensorflow_feed

PyDataset = keras.utils.PyDataset

_log = logging.getLogger("keras_fastdata")

# What Keras makes for its train and test functions; a model may have others.
_KERAS_STEP = "TensorFlowTrainer._make_function.<locals>.function"
_FUNCTIONS = {"fit": "train_function", "evaluate": "test_function"}


def register(dataset_class: type) -> None:
    """Has Keras wrap instances of `dataset_class` in our adapter."""

    def new(cls: type, x: Any = None, *_: Any, **__: Any) -> Any:
        ours = cls is PyDatasetAdapter and isinstance(x, dataset_class)
        return object.__new__(FastPyDatasetAdapter if ours else cls)

    PyDatasetAdapter.__new__ = new


def unregister() -> None:
    """Leaves Keras as it was; a FastPyDataset is then a plain PyDataset."""

    def new(cls: type, *_: Any, **__: Any) -> Any:
        # Not `del`: a class that has had a `__new__` would then refuse the
        # arguments of its `__init__` (CPython's object.__new__).
        return object.__new__(cls)

    PyDatasetAdapter.__new__ = new


class FastPyDatasetAdapter(PyDatasetAdapter):  # type: ignore[misc]
    """Gives Keras the batches of our loader.

    `_standardize_batch`, and with it `class_weight`, is Keras's own.

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
        self._latest: weakref.ref[_Batches] | None = None
        self._pass: Pass | None = None  # its, to open the next one after
        self._trains = False  # whether the probe, if there is one, is over
        self.early_end = _EarlyEnd()
        self._delivered = 0  # in this epoch of Keras's
        self._in_pass = 0  # delivered in this pass, through several of those
        self._trained = 0  # steps of this pass in such epochs that are over
        self._passes_due = 0  # that such an epoch is still to begin, itself
        self._resumed: EpochIterator | None = None  # in such a pass
        self._steps: int | None = None  # of an epoch, if the user said
        self._another_follows = False
        self._has_hooks = any(
            build.overrides(x, name)
            for name in ("on_epoch_begin", "on_epoch_end")
        )
        self.fit_thread = threading.get_ident()
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
        number: int = self.py_dataset._loader().epoch
        return number

    @property
    def is_seeded(self) -> bool:
        """Whether what draws a seed draws the same one in every run."""
        return rng_utils.get_random_seed() is not None

    @property
    def num_batches(self) -> int | None:
        """Batches in an epoch, of this process."""
        dataset = self.py_dataset
        length: int | None = dataset._loader().length(dataset)
        return length

    def get_numpy_iterator(self) -> Iterator[Any]:
        return self._as_iterator(data_adapter_utils.get_numpy_iterator)

    def get_jax_iterator(self) -> Iterator[Any]:
        return self._as_iterator(data_adapter_utils.get_jax_iterator)

    def get_torch_dataloader(self) -> Any:
        # PyTorch knows no tensors that cannot be written to.
        batches = _Batches(self, writable=True)
        return data_adapter_utils.get_torch_dataloader(batches)

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
                lambda: _ForTensorFlow(_alive(adapter)),
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
            lambda: _Batches(_alive(adapter)),
            self.early_end.announce,
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
        self._delivered = 0
        iterator = _calling_iterator()
        self.early_end.expect(iterator)
        self._steps = iterator.steps_per_epoch if iterator else None
        self._passes_due = 0 if _is_amid_pass(iterator) else 1
        if self._trains and iterator is not None:
            self._shorten(iterator)
        # What the hooks change is not known before they have run.
        self._another_follows = not self._has_hooks and _epoch_follows()
        if (listener := self.listener()) is not None:
            # Of a `fit` that was broken off.
            listener.wants_quiet = listener.is_sampling = False
        self._run_hook("on_epoch_begin", starting=not self._trains)

    def on_epoch_end(self) -> None:
        self.early_end.settle()
        if self._passes_due >= 0:  # or else the next one has begun already
            self._trained += self._steps or 0
        resumed = self._resumed
        if resumed is not None and not _is_amid_pass(resumed):
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

    def _shorten(self, iterator: EpochIterator) -> None:
        """Tells Keras of a pass that is resumed how long it is.

        If nobody knows, Keras learns from its end, and is to unlearn that.
        """
        loader = self.py_dataset._loader()
        if loader.resumes:
            self._resumed = iterator
            rest = loader.rest(self.py_dataset)
            if rest is not None:
                iterator._num_batches = rest

    def take_pass(self, batches: _Batches) -> Pass:
        """The pass for an iterator that is asked for its first batch."""
        self._latest = weakref.ref(batches)
        before, dataset = self._pass, self.py_dataset
        found, self._begun = self._begun, None
        if found is None and before is not None:
            found = before.open_following()
        elif found is None:
            found = open_pass(dataset._loader(), dataset, self.shuffle)
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
        return self._standardize_batch(batch)

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
        self, listener: recorder.Recorder | None, begun: Pass, waited_s: float
    ) -> None:
        """Accounts for one batch and the wait for it."""
        self._delivered += 1
        self._in_pass += 1
        if listener is None:
            return
        if listener.feed is not self.mark and not self.is_heard_by(listener):
            listener.aside_s += waited_s
            return
        span, settled_s = begun.span, begun.settled_s
        if span is not None:
            listener.hear_from(self.py_dataset._loader())
        if settled_s:
            listener.rested_s += settled_s
            waited_s -= settled_s
        listener.add(span, waited_s)

    def may_end_early(self, begun: Pass) -> bool:
        """Whether it is no news to the user that there is nothing more."""
        if begun.has_met_its_end and self._steps is not None:
            return False  # they wanted more
        return self._delivered > 0

    def nothing_good(self) -> LoaderError:
        """The error for a dataset that has none, or only such as raise."""
        name = type(self.py_dataset).__name__
        if self._pass is not None and not self._pass.is_shortened:
            return LoaderError(f"{name} has no batch: it ended at once.")
        return LoaderError(f"{name} has no batch that does not raise.")

    def book_skipped(self, begun: Pass) -> None:
        """Accounts for the batches newly left out."""
        listener = self.listener()
        if not self.is_heard_by(listener):
            return  # a probe; they are taken when the epoch comes to them
        name = type(self.py_dataset).__name__
        for index, text in begun.take_skipped().items():
            listener.skip(recorder.Skipped(name, index, text))

    def _as_iterator(self, convert: Any) -> Iterator[Any]:
        iterator: Iterator[Any] = convert(_Batches(self))
        return iterator

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
        told: dict[str, Any] = dataset._state_of(self._pass.state(behind))
        return told

    def _run_hook(self, name: str, *, starting: bool) -> None:
        dataset = self.py_dataset
        loader = dataset._loader()
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
        wanted = data_adapter_utils.NUM_BATCHES_FOR_TENSOR_SPEC
        if count is not None:
            wanted = min(wanted, count)
        if not wanted:
            raise ValueError("The PyDataset has length 0")
        self._begun = self.take_pass(_Batches(self))
        try:
            peeked = self._begun.peek(wanted)
        except Exception as error:
            _spell_out_cause(error)
            raise
        if not peeked:
            raise self.nothing_good()
        return data_adapter_utils.get_tensor_spec(
            [
                keras.tree.map_structure(
                    _strings_as_tensors, self.standardize(batch)
                )
                for batch in peeked
            ]
        )


class _Batches(Iterator[Any]):
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
        self._pass: Pass | None = None
        self._over = False

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        listener = recorder.of(self._adapter.fit_thread)
        if (
            listener is not None
            and listener.is_sampling
            and self._adapter.is_fetching_itself()
        ):
            listener.before_wait()
        began = time.perf_counter()
        if self._pass is None:
            self._pass = self._adapter.take_pass(self)
        try:
            batch = self._pass.fetch(
                quietly=listener is not None and listener.wants_quiet
            )
        except StopIteration:
            self._over = True
            if self._pass.is_shortened or self._pass.has_met_its_end:
                if self._pass.is_empty:
                    raise self._adapter.nothing_good() from None
                if self._adapter.may_end_early(self._pass):
                    self._adapter.early_end.announce()
            raise
        except Exception as error:
            _spell_out_cause(error)
            self._over = True
            raise
        finally:
            if self._pass.is_shortened:
                self._adapter.book_skipped(self._pass)
        if self._writable and self._pass.is_read_only:
            batch = keras.tree.map_structure(_own, batch)
        waited_s = time.perf_counter() - began
        self._adapter.book(listener, self._pass, waited_s)
        return self._adapter.standardize(batch)

    def give_up(self) -> None:
        """Ends this iterator."""
        self._over, self._pass = True, None


class _ForTensorFlow(Iterator[Any]):
    """What `from_generator` iterates over, in a thread of TensorFlow's.

    An exception that passes through TensorFlow comes out as a wall of text.
    So it is put aside, the data ends early, and the adapter raises it where
    Keras reports the end of the epoch.
    """

    def __init__(self, adapter: FastPyDatasetAdapter) -> None:
        self._batches = _Batches(adapter)
        self._early_end = adapter.early_end

    def __next__(self) -> Any:
        try:
            return keras.tree.map_structure(
                _for_tensorflow, next(self._batches)
            )
        except StopIteration:
            raise
        except BaseException as error:
            self._early_end.announce(error)
            raise StopIteration from None


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
    found = _call_of_keras("fit")
    if found is None:
        return Training(None, 0)
    _, known = found
    adapter = getattr(known.get("epoch_iterator"), "data_adapter", None)
    initial_epoch = int(known.get("initial_epoch") or 0)
    _forget(known)
    if not isinstance(adapter, FastPyDatasetAdapter):
        adapter = None
    return Training(adapter, initial_epoch)


def is_within_fit() -> bool:
    """Whether the caller is an evaluation's or prediction's, amid a `fit`."""
    names = []
    for name, known in _calls_of_keras("fit", "evaluate", "predict"):
        names.append(name)
        _forget(known)
    return names[:1] != ["fit"] and "fit" in names


def _epoch_follows() -> bool:
    """Whether the `fit` around the caller is to run another epoch.

    Keras tells nobody but callbacks, and a dataset is none.
    """
    found = _call_of_keras("fit", "evaluate", "predict")
    if found is None:
        return False
    name, known = found
    epochs = known.get("epochs") if name == "fit" else None
    epoch = known.get("epoch", known.get("initial_epoch"))
    # With steps, an epoch may end anywhere in the dataset.
    steps = known.get("steps_per_epoch")
    _forget(known)
    return (
        isinstance(epochs, int)
        and isinstance(epoch, int)
        and epoch + 1 < epochs
        and steps is None
    )


def _taker() -> tensorflow_feed.Taker:
    """Who takes the batches that Keras is about to walk over."""
    import tensorflow as tf

    from keras_fastdata import tensorflow_feed

    name, trainer = _trainer()
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
    code = getattr(function, "__code__", None)
    return tensorflow_feed.Taker(
        getattr(code, "co_qualname", "") == _KERAS_STEP,
        trainer.steps_per_execution == 1,
        is_eager,
    )


def _walks_itself() -> bool:
    """Whether Keras walks over a dataset as it is, on TensorFlow.

    The strategies of `tf.distribute` make a graph of it.
    """
    import tensorflow as tf

    _, trainer = _trainer()
    return (
        trainer is not None
        and not tf.distribute.has_strategy()
        and trainer.distribute_strategy is tf.distribute.get_strategy()
    )


def _trainer() -> tuple[str, Any]:
    """The model that Keras is at work with, and what it was asked to do."""
    found = _call_of_keras("fit", "evaluate", "predict")
    if found is None:
        return "", None
    name, known = found
    trainer = known["self"]
    _forget(known)
    return name, trainer


def _call_of_keras(*names: str) -> tuple[str, dict[str, Any]] | None:
    """The innermost of `_calls_of_keras`, if there is any."""
    return next(_calls_of_keras(*names), None)


def _calls_of_keras(*names: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Calls of such methods of a model, and their locals, innermost first.

    Pass those to `_forget` when they have been read.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_name
        if name in names:
            known = frame.f_locals
            if isinstance(known.get("self"), Trainer):
                yield name, known
        frame = frame.f_back


def _calling_iterator() -> EpochIterator | None:
    """The `EpochIterator` that calls the caller."""
    known = sys._getframe(2).f_locals
    caller = known.get("self")
    if not isinstance(caller, EpochIterator):
        return None
    _forget(known)
    return caller


def _is_amid_pass(iterator: EpochIterator | None) -> bool:
    """Whether the next epoch goes on where the one before has ended."""
    return bool(
        iterator is not None
        and iterator.steps_per_epoch
        and iterator._steps_seen
        and iterator._current_iterator is not None
    )


def _forget(known: dict[str, Any]) -> None:
    """Empties the copy of its locals that a frame of Keras's has given.

    It lives as long as the frame, and would keep what is in it until it is
    asked for again: a copy of the weights.
    """
    if sys.version_info < (3, 13):
        known.clear()


def _alive(
    reference: weakref.ref[FastPyDatasetAdapter],
) -> FastPyDatasetAdapter:
    adapter = reference()
    if adapter is None:
        raise ReferenceError("the Keras data adapter has been collected")
    return adapter


class _EarlyEnd:
    """Data that ends before Keras expects it, and why.

    Either an exception is on its way around TensorFlow, or batches were left
    out. Keras warns that the data ran out, which would be out of place, and
    then reports the end of the epoch to the adapter.
    """

    def __init__(self) -> None:
        self._unraised: _Unraised | None = None
        self._iterator: Callable[[], EpochIterator | None] = _nobody

    def expect(self, iterator: EpochIterator | None) -> None:
        """Says who would warn."""
        self._iterator = _nobody if iterator is None else weakref.ref(iterator)

    def announce(self, error: BaseException | None = None) -> None:
        if error is not None and self._unraised is None:
            self._unraised = _Unraised(error)
        iterator = self._iterator()
        if iterator is not None:
            iterator._interrupted_warning = _nobody

    def settle(self) -> None:
        """Ends the quiet, and raises the exception if there was one."""
        iterator = self._iterator()
        if iterator is not None:
            vars(iterator).pop("_interrupted_warning", None)
        unraised, self._unraised = self._unraised, None
        if unraised is not None:
            error = unraised.take()
            context = error.__context__
            try:
                raise error
            finally:
                # Not TensorFlow's end of data, which is being handled here.
                BaseException.__setattr__(error, "__context__", context)


class _Unraised:
    """An exception that is logged, if it is never taken.

    The only thing here with code that runs when it is collected: there a
    KeyboardInterrupt would be lost.
    """

    def __init__(self, error: BaseException) -> None:
        self._error: BaseException | None = error

    def take(self) -> BaseException:
        error, self._error = self._error, None
        assert error is not None
        return error

    def __del__(self) -> None:
        if self._error is not None:
            _log.error(
                "Training was stopped before it came to this error, which its "
                "data raised:",
                exc_info=self._error,
            )


def _nobody() -> None:
    """In place of who might warn, or of the warning."""


def _for_tensorflow(leaf: Any) -> Any:
    """What `from_generator` takes in place of a leaf it does not know."""
    if leaf is None:
        import tensorflow as tf

        return tf.experimental.Optional.empty(None)
    if data_adapter_utils.is_scipy_sparse(leaf):
        return data_adapter_utils.scipy_sparse_to_tf_sparse(leaf)
    return _strings_as_tensors(leaf)


def _own(leaf: Any) -> Any:
    """An array that may be written to, for frameworks that insist."""
    if isinstance(leaf, np.ndarray) and not leaf.flags.writeable:
        return leaf.copy()
    return leaf


def _strings_as_tensors(leaf: Any) -> Any:
    """A string tensor for an array of strings, which Keras cannot name."""
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OSTU":
        import tensorflow as tf

        return tf.constant(leaf.tolist(), shape=leaf.shape, dtype=tf.string)
    return leaf


def _spell_out_cause(error: Exception) -> None:
    """Adds the cause to the notes: Keras's traceback filter drops it.

    (`raise ... from None` in `keras.src.utils.traceback_utils`; it stays
    reachable as `__context__`.)
    """
    if error.__cause__ is not None:
        lines = traceback.format_exception(error.__cause__)
        failures.note(error, "Caused by:\n" + "".join(lines).rstrip())
        if error.__context__ is None:
            BaseException.__setattr__(error, "__context__", error.__cause__)
