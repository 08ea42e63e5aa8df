"""Contains all code that uses private parts of Keras.

These are names of `keras.src`, private attributes of Keras's objects, and
local variables of Keras's calls, read from their frames. No other module uses
any of them.

`USES` lists them by the `Feature` that needs them, each with the versions of
Keras that have it. When this module is imported, it compares Keras with that
list. A difference switches off the `Feature`, and nothing else. The value of
the `Feature` says what happens then.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
import json
import logging
import os
import sys
import traceback
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras

from keras_fastdata.workers import exceptions

_log = logging.getLogger("keras_fastdata")

_KERAS = os.path.join(os.path.dirname(keras.__file__), "")

_ADAPTERS = "keras.src.trainers.data_adapters"
_ADAPTER = f"{_ADAPTERS}.py_dataset_adapter:PyDatasetAdapter"
_GET_TENSOR_SPEC = f"{_ADAPTERS}.data_adapter_utils:get_tensor_spec"
_ITERATOR = "keras.src.trainers.epoch_iterator:EpochIterator"
_BACKUP = "keras:callbacks.BackupAndRestore"
_FIT = "keras:Model.fit"
_GET_RANDOM_SEED = "keras.src.utils.rng_utils:get_random_seed"

# The backends on which Keras trains; `Model.fit` raises an error on others.
_TRAINING = ("tensorflow", "jax", "torch")


class Feature(enum.Enum):
    """The features that need private parts of Keras.

    The value of a member describes what happens without the feature.
    """

    LOADER = (
        "Keras builds the batches itself, inline: no workers, no prefetching, "
        "no LoaderHealth, no DatasetCheckpoint"
    )
    FIT = (
        "no batch of the next epoch is built ahead; LoaderHealth counts the "
        "batches of nested evaluations as those of `fit`; DatasetCheckpoint "
        "saves and restores nothing"
    )
    RESUME = (
        "no batch of the next epoch is built ahead; DatasetCheckpoint saves "
        "and restores nothing, and `fit` warns that data ran out where a "
        "resumed epoch is shorter"
    )
    BACKUP = (
        "DatasetCheckpoint saves and restores nothing beside BackupAndRestore"
    )
    BESIDE = (
        "callbacks do not see those beside them: DatasetCheckpoint saves and "
        "restores nothing, LoaderHealth writes no TensorBoard summaries"
    )
    QUIET_END = "`fit` warns that data ran out where batches were skipped"
    SYNCHRONIZE = "on JAX, `data_wait` of LoaderHealth is an upper bound"
    FRAMES = "errors show frames of keras_fastdata above those of the user"
    ROWS = "batches whose parts differ in rows fail without their number"
    SEED = (
        "after `keras.utils.set_random_seed`, the seeds of datasets are drawn "
        "from `np.random`, which worker threads may advance"
    )
    DIRECT_FEED = "batches reach TensorFlow through `tf.data`, which copies"


@dataclasses.dataclass(frozen=True)
class Use:
    """A private part of Keras, and the package's expectations of this part."""

    thing: str  # where it is: "module:name.attribute"
    # The names of its parameters, such as "self, x"; `None` if the package
    # neither calls nor replaces it.
    takes: str | None = None
    # Attributes, locals and strings that its code must contain, such as "self
    # epoch". In a class, any method may contain them.
    mentions: str = ""
    backend: str = ""  # the only Keras backend where it is used; empty for all
    # The first and last version of Keras that have it so.
    seen_in: tuple[str, str] = ("3.12", "3.16")

    def fault(self) -> str:
        """Describes how this part of Keras differs from the expectations.

        The text is empty without a difference.
        """
        backend = keras.backend.backend()
        if self.backend not in ("", backend):
            return ""
        if self.thing == _FIT and backend not in _TRAINING:
            return ""
        name = self.thing.replace(":", ".")
        try:
            found = _find(self.thing)
        except (ImportError, AttributeError):
            return f"{name} is missing"
        try:
            taken = ", ".join(inspect.signature(found).parameters)
        except (TypeError, ValueError):
            taken = "?"
        if self.takes not in (None, taken):
            return f"{name} takes ({taken})"
        known = _names_in(found)
        lost = [word for word in self.mentions.split() if word not in known]
        return f"{name} has no `{'`, `'.join(lost)}`" if lost else ""


_on_tensorflow = functools.partial(Use, backend="tensorflow")
_on_jax = functools.partial(Use, backend="jax")

USES: dict[Feature, tuple[Use, ...]] = {
    Feature.LOADER: (
        # Keras chooses the adapter of a PyDataset, and makes it so.
        Use(f"{_ADAPTERS}:get_data_adapter", mentions="PyDatasetAdapter"),
        Use(f"{_ADAPTER}.__init__", "self, x, class_weight, shuffle"),
        # Our adapter overrides these, or calls them.
        Use(f"{_ADAPTER}._standardize_batch", "self, batch"),
        Use(f"{_ADAPTER}._get_iterator", "self"),
        Use(f"{_ADAPTER}.get_numpy_iterator", mentions="_get_iterator"),
        Use(f"{_ADAPTER}.get_jax_iterator", mentions="_get_iterator"),
        Use(f"{_ADAPTER}.get_torch_dataloader", mentions="_get_iterator"),
        Use(f"{_ADAPTER}.get_tf_dataset", "self"),
        _on_tensorflow(_GET_TENSOR_SPEC, "batches"),
        Use(f"{_ADAPTER}.on_epoch_begin", "self"),
        Use(f"{_ADAPTER}.on_epoch_end", "self"),
        Use(f"{_ADAPTER}.num_batches"),
        # Tells the data's reset from the end of an epoch.
        Use(
            f"{_ITERATOR}.reset",
            "self",
            "data_adapter on_epoch_end _epoch_iterator",
        ),
    ),
    Feature.RESUME: (
        Use(
            _ITERATOR,
            mentions="steps_per_epoch steps_per_execution _num_batches "
            "_steps_seen _current_iterator",
        ),
    ),
    Feature.QUIET_END: (Use(f"{_ITERATOR}._interrupted_warning", "self"),),
    Feature.FIT: (
        # Locals of a `fit` that runs.
        Use(_FIT, mentions="self epoch_iterator initial_epoch"),
    ),
    Feature.DIRECT_FEED: (
        _on_tensorflow(
            "keras:Model._make_function",
            "self, step_function",
            "distribute_strategy steps_per_execution run_eagerly",
        ),
        _on_tensorflow(
            "keras.src.backend.tensorflow.trainer:TFEpochIterator",
            mentions="get_tf_dataset _distribute_strategy "
            "experimental_distribute_dataset",
        ),
    ),
    Feature.BESIDE: (
        Use(
            "keras:callbacks.CallbackList.set_params",
            "self, params",
            "callbacks set_params",
        ),
    ),
    Feature.BACKUP: (
        Use(
            _BACKUP,
            mentions="_current_epoch _last_batch_seen _initial_epoch "
            "backup_dir training_metadata.json latest.weights.h5",
        ),
        Use(f"{_BACKUP}._save_model", "self"),
        Use(_FIT, mentions="_initial_epoch"),
    ),
    Feature.FRAMES: (Use("keras.src.utils.traceback_utils:_EXCLUDED_PATHS"),),
    Feature.ROWS: (
        _on_jax(
            "keras:Model.compute_loss_and_updates",
            "self, trainable_variables, non_trainable_variables, "
            "metrics_variables, x, y, sample_weight, training, "
            "optimizer_variables",
        ),
    ),
    Feature.SYNCHRONIZE: (
        # Where the weights are while JAX trains.
        _on_jax(_FIT, mentions="_jax_state"),
        _on_jax("keras:Variable", mentions="_value"),
    ),
    Feature.SEED: (Use(_GET_RANDOM_SEED, ""),),
}


def _find(thing: str) -> Any:
    """Imports and returns the object that `Use.thing` names."""
    module, _, names = thing.partition(":")
    return functools.reduce(
        getattr, names.split("."), importlib.import_module(module)
    )


def _names_in(found: Any) -> set[str]:
    """Returns the names, locals and strings that occur in an object's code."""
    if isinstance(found, property):
        found = found.fget
    if isinstance(found, type):
        parts = [
            part for cls in found.__mro__[:-1] for part in vars(cls).values()
        ]
        return set().union(*map(_names_in, parts))
    if isinstance(found, str):
        return {found}
    if not isinstance(found, types.CodeType):
        found = getattr(inspect.unwrap(found), "__code__", None)
        if found is None:
            return set()
    names = {*found.co_names, *found.co_varnames, *found.co_cellvars}
    return names.union(*map(_names_in, found.co_consts))


# The first fault of each feature that has one.
_off = {
    feature: fault
    for feature, uses in USES.items()
    if (fault := next(filter(None, map(Use.fault, uses)), ""))
}


def has(feature: Feature) -> bool:
    """Returns whether this version of Keras supports a feature."""
    return feature not in _off and Feature.LOADER not in _off


def warn_of_what_is_off() -> None:
    """Logs a warning that lists the disabled features, with the reasons."""
    off = _off
    if Feature.LOADER in off:
        off = {Feature.LOADER: off[Feature.LOADER]}
    if off:
        _log.warning(
            "keras_fastdata does not know Keras %s: %s. Training goes on. "
            "Look for a newer keras_fastdata.",
            keras.__version__,
            "; ".join(f"{why}, so {what.value}" for what, why in off.items()),
        )


def _class_at(thing: str) -> Any:
    """Returns a class of Keras, or a placeholder if Keras has no such class."""
    try:
        return _find(thing)
    except (ImportError, AttributeError):
        return type("Missing", (), {})


PyDatasetAdapter = _class_at(_ADAPTER)
_EpochIterator = _class_at(_ITERATOR)


# -- the adapter -------------------------------------------------------------


def is_asked_whether_to_shuffle() -> bool:
    """Returns whether Keras is only checking the argument `shuffle`.

    `get_data_adapter` does so for a dataset of unknown length: it warns that
    `shuffle=True`, Keras's default, has no effect.
    """
    return sys._getframe(2).f_code.co_name == "get_data_adapter"


class KerasIterator:
    """A weak reference to Keras's `EpochIterator` over an adapter's data.

    Without an iterator, or without the `Feature`, epochs have no limit of
    steps, and the setters do nothing.
    """

    def __init__(self, iterator: Any = None) -> None:
        self._iterator = None if iterator is None else weakref.ref(iterator)

    def _get(self, feature: Feature) -> Any:
        return self._iterator() if self._iterator and has(feature) else None

    @property
    def steps_per_epoch(self) -> int | None:
        """The number of steps in each epoch, or `None` for no limit."""
        return getattr(self._get(Feature.RESUME), "steps_per_epoch", None)

    @property
    def steps_per_execution(self) -> int:
        """The number of steps in one call of the train function."""
        return getattr(self._get(Feature.RESUME), "steps_per_execution", 1)

    @property
    def continues(self) -> bool:
        """Whether the next epoch also uses the previous epoch's iterator."""
        iterator = self._get(Feature.RESUME)
        return bool(
            iterator is not None
            and iterator.steps_per_epoch
            and iterator._steps_seen
            and iterator._current_iterator is not None
        )

    @property
    def is_resetting(self) -> bool:
        """Whether Keras calls `on_epoch_end` because it resets the data.

        A reset drops the generator of the epoch first.
        """
        iterator = self._get(Feature.LOADER)
        return iterator is not None and iterator._epoch_iterator is None

    @property
    def num_batches(self) -> int | None:
        """The number of batches in an epoch, or `None` if it is unknown."""
        return getattr(self._get(Feature.RESUME), "_num_batches", None)

    def set_num_batches(self, count: int | None) -> None:
        """Sets Keras's number of batches; `None` makes Keras count batches."""
        iterator = self._get(Feature.RESUME)
        if iterator is not None:
            iterator._num_batches = count

    @property
    def can_warn(self) -> bool:
        """Whether `warn_by` can replace Keras's warning."""
        return self._get(Feature.QUIET_END) is not None

    def warn_by(self, warn: Callable[[], None] | None) -> None:
        """Makes Keras call `warn` in place of its warning that data ran out.

        With `None`, Keras warns again by itself.
        """
        iterator = self._get(Feature.QUIET_END)
        if iterator is not None and warn is not None:
            iterator._interrupted_warning = warn
        elif iterator is not None:
            vars(iterator).pop("_interrupted_warning", None)


def calling_iterator() -> KerasIterator:
    """Returns the `EpochIterator` of Keras that called the adapter.

    For any other caller, the result is an empty `KerasIterator`.
    """
    known = sys._getframe(2).f_locals
    caller = known.get("self")
    if not isinstance(caller, _EpochIterator):
        return KerasIterator()
    _forget(known)
    return KerasIterator(caller)


def get_tensor_spec(batches: list[Any]) -> Any:
    """Returns the nested `tf.TypeSpec`s that describe the batches."""
    return _find(_GET_TENSOR_SPEC)(batches)


def get_random_seed() -> int | None:
    """Returns the seed of `keras.utils.set_random_seed`; `None` if not set."""
    if not has(Feature.SEED):
        return None
    seed: int | None = _find(_GET_RANDOM_SEED)()
    return seed


def hide_frames(folder: str) -> None:
    """Makes Keras's traceback filter drop the frames of files in a folder.

    Keras drops its own frames likewise, unless the user calls
    `keras.config.disable_traceback_filtering()`.
    """
    if has(Feature.FRAMES):
        from keras.src.utils import traceback_utils

        hidden = traceback_utils._EXCLUDED_PATHS
        if folder not in hidden:
            traceback_utils._EXCLUDED_PATHS = (*hidden, folder)


# -- the calls under way -----------------------------------------------------


class FitCall(NamedTuple):
    """Describes the innermost running `fit`."""

    adapter: Any = None  # the adapter of its training data
    # Its first epoch: the one that a callback has restored, or else its
    # argument.
    initial_epoch: int = 0
    has_steps: bool = False  # whether it was called with `steps_per_epoch`
    # The number of batches in an epoch; `None` if only the end of the data
    # tells.
    num_batches: int | None = None


def fit_around() -> FitCall:
    """Returns the innermost running `fit`; an empty `FitCall` without `fit`."""
    for name, known in _calls_of_keras() if has(Feature.FIT) else ():
        if name == "fit":
            iterator = known.get("epoch_iterator")
            restored = getattr(known["self"], "_initial_epoch", None)
            return FitCall(
                getattr(iterator, "data_adapter", None),
                int(restored or known.get("initial_epoch") or 0),
                getattr(iterator, "steps_per_epoch", None) is not None,
                getattr(iterator, "_num_batches", None),
            )
    return FitCall()


def another_epoch_follows(iterator: KerasIterator) -> bool:
    """Returns whether the running `fit` will begin another epoch.

    `History`, which every `fit` has among its callbacks, knows how many
    epochs there are, and which have ended.

    With `steps_per_epoch`, an epoch may end anywhere in the data: `False`.
    """
    name, trainer = trainer_at_work()
    if name != "fit" or iterator.steps_per_epoch:
        return False
    if not has(Feature.FIT) or not has(Feature.RESUME):
        return False  # which epoch, or with how many steps, nobody knows
    history = getattr(trainer, "history", None)
    epochs = (getattr(history, "params", None) or {}).get("epochs")
    if not isinstance(epochs, int):
        return False
    past = getattr(history, "epoch", None)
    epoch = past[-1] + 1 if past else fit_around().initial_epoch
    return epoch + 1 < epochs


def is_within_fit() -> bool:
    """Returns whether an evaluation or prediction runs within a `fit`."""
    names = [name for name, _ in _calls_of_keras()]
    return names[:1] != ["fit"] and "fit" in names


def steps_argument() -> str:
    """Returns the name of Keras's argument for the number of steps."""
    names = [name for name, _ in _calls_of_keras()]
    if names[:1] == ["fit"]:
        return "`steps_per_epoch`"
    return "`validation_steps`" if "fit" in names else "`steps`"


def trainer_at_work() -> tuple[str, Any]:
    """Returns the name and the model of the innermost running Keras method.

    The name is "fit", "evaluate" or "predict".

    If none runs, the result is "" and `None`.
    """
    for name, known in _calls_of_keras():
        return name, known["self"]
    return "", None


def is_quiet() -> bool:
    """Returns whether the running method of Keras was called with `verbose=0`.

    If several run, one within the other, the innermost counts.
    """
    for _, known in _calls_of_keras():
        verbose = known.get("verbose")
        return isinstance(verbose, int) and not verbose
    return False


def _calls_of_keras() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the running calls of Keras's models, innermost first.

    Each is "fit", "evaluate" or "predict", and its local variables.
    """
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        name = frame.f_code.co_name
        if name in ("fit", "evaluate", "predict"):
            known = frame.f_locals
            if isinstance(known.get("self"), keras.Model):
                copy = dict(known)
                _forget(known)
                yield name, copy


def callbacks_beside() -> list[Any]:
    """Returns all callbacks of the list that contains the calling callback.

    Call it in `set_params` of a callback.
    """
    if not has(Feature.BESIDE):
        return []
    known = sys._getframe(2).f_locals
    caller = known.get("self")
    if not isinstance(caller, keras.callbacks.CallbackList):
        return []
    return list(caller.callbacks)


def _forget(known: dict[str, Any]) -> None:
    """Empties the copy of a frame's locals that Python keeps in the frame.

    The copy lives as long as the frame, and would keep the weights in memory.
    """
    if sys.version_info < (3, 13):
        known.clear()


def users_stacklevel() -> int:
    """Returns the `stacklevel` with which a warning shows the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(
        (exceptions.PACKAGE, _KERAS)
    ):
        level, frame = level + 1, frame.f_back
    return level


# -- BackupAndRestore --------------------------------------------------------


class KerasBackup:
    """Gives access to the private parts of a `BackupAndRestore`."""

    def __init__(self, callback: Any) -> None:
        self._callback = callback

    @property
    def folder(self) -> str:
        """The folder in which Keras saves the weights."""
        return str(self._callback.backup_dir)

    @property
    def has_weights(self) -> bool:
        """Whether that folder has the weights that Keras saved last."""
        path = os.path.join(self.folder, "latest.weights.h5")
        return os.path.exists(path)

    @property
    def position(self) -> tuple[int, int]:
        """The number of the current epoch, and of the latest batch in it."""
        return self._callback._current_epoch, self._callback._last_batch_seen

    def restored(self) -> tuple[int, int] | None:
        """Returns the epoch and batch at which Keras resumes training.

        They are older than the weights if Keras was killed after it saved the
        weights. Returns `None` if there are no saved weights.
        """
        path = os.path.join(self.folder, "training_metadata.json")
        try:
            with open(path) as file:
                found = json.load(file)
            return int(found["epoch"]), int(found["batch"])
        except FileNotFoundError:
            return (0, 0) if self.has_weights else None

    def save_first(self, save: Callable[[], None]) -> None:
        """Makes Keras call `save` each time before it saves the weights."""
        callback = self._callback
        save_weights = type(callback)._save_model

        def save_both() -> None:
            save()
            save_weights(callback)

        callback._save_model = save_both


def set_initial_epoch(model: Any, epoch: int | None) -> None:
    """Sets the epoch at which the current or next `fit` begins.

    `None`: the argument of `fit` decides, as in a new model.
    """
    model._initial_epoch = epoch


# -- the model ---------------------------------------------------------------


class _StepLoss(keras.Operation):  # type: ignore[misc]
    """A Keras operation that computes a model's loss for a batch.

    Keras can run an operation on shapes alone.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self._trainer = trainer

    def call(self, x: Any, y: Any, sample_weight: Any) -> Any:
        y_pred = self._trainer(x, training=False)
        return self._trainer.compute_loss(
            x, y, y_pred, sample_weight, training=False
        )


def dry_run(name: str, trainer: Any, batch: tuple[Any, ...]) -> None:
    """Computes the shape of a model's loss; skips models with a custom step.

    Raises what Keras, or a layer or loss, raises.
    """
    kind = type(trainer)
    step = kind.train_step if name == "fit" else kind.test_step
    if not step.__module__.startswith("keras.src."):
        return
    parts = keras.utils.unpack_x_y_sample_weight(
        keras.tree.map_structure(_symbolic, batch)
    )
    if keras.backend.backend() == "jax" and trainer.built:
        # Between steps the model's variables have no values.
        _dry_run_in_jax(trainer, parts)
    else:
        _StepLoss(trainer).compute_output_spec(*parts)


def _dry_run_in_jax(trainer: Any, parts: tuple[Any, ...]) -> None:
    import jax

    def of(tensor: Any) -> Any:
        if tensor is None:
            return None
        return jax.ShapeDtypeStruct(tensor.shape, tensor.dtype)

    variables = (
        trainer.trainable_variables,
        trainer.non_trainable_variables,
        trainer.metrics_variables,
    )
    jax.eval_shape(
        trainer.compute_loss_and_updates,
        *(list(map(of, group)) for group in variables),
        *(keras.tree.map_structure(of, part) for part in parts),
    )


def _symbolic(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, keras.KerasTensor):
        return leaf
    shape = getattr(leaf, "shape", ())
    dtype = getattr(leaf, "dtype", None) or keras.config.floatx()
    return keras.KerasTensor(shape, keras.backend.standardize_dtype(dtype))


def is_keras_step(function: Any) -> bool:
    """Returns whether a train or test function is Keras's, not the user's."""
    code = getattr(function, "__code__", None)
    maker = inspect.unwrap(keras.Model._make_function)
    name = f"{maker.__qualname__}.<locals>.function"
    return getattr(code, "co_qualname", "") == name


def values_in_training(model: Any) -> list[Any]:
    """Returns the arrays that the latest step of a JAX model computes."""
    if not has(Feature.SYNCHRONIZE):
        return []
    # While `fit` runs, the variables' values are in here, and only here. (It
    # is a dict of Keras's own kind, in which JAX would find no arrays.)
    state = getattr(model, "_jax_state", None)
    if state:
        return [value for part in state.values() for value in part]
    variables = getattr(model, "variables", ())
    return [getattr(variable, "_value", None) for variable in variables]
