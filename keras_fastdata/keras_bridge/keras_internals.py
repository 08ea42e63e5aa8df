"""What is used of Keras that Keras does not promise to keep.

These are names of `keras.src`, private attributes of Keras's objects, and
locals of Keras's calls that are under way, read from their frames. No other
module touches any of them.

`USES` lists them all, each with the versions of Keras that have it. Each is
looked up, and what it takes and mentions is compared with what we know, when
this module is imported. What is missing or different switches off the
`Feature` that needs it, and nothing else: the value of a `Feature` says what
happens instead. The functions below then return what a caller can go on with.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import json
import logging
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras

from keras_fastdata.workers import exceptions

__all__ = [
    "USES",
    "Feature",
    "FitCall",
    "KerasBackup",
    "KerasIterator",
    "PyDatasetAdapter",
    "Use",
    "another_epoch_follows",
    "callbacks_beside",
    "calling_iterator",
    "dry_run",
    "fit_around",
    "get_random_seed",
    "get_tensor_spec",
    "has",
    "hide_frames",
    "is_asked_whether_to_shuffle",
    "is_keras_step",
    "is_within_fit",
    "set_initial_epoch",
    "show_frames",
    "steps_argument",
    "trainer_at_work",
    "users_stacklevel",
    "values_in_training",
    "warn_of_what_is_off",
]

_log = logging.getLogger("keras_fastdata")

_KERAS = os.path.join(os.path.dirname(keras.__file__), "")

_ADAPTERS = "keras.src.trainers.data_adapters"
_ADAPTER = f"{_ADAPTERS}.py_dataset_adapter:PyDatasetAdapter"
_ITERATOR = "keras.src.trainers.epoch_iterator:EpochIterator"


class Feature(enum.Enum):
    """What needs Keras's internals; the value says what its absence means."""

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
        "DatasetCheckpoint warns of a drawn seed even after "
        "`keras.utils.set_random_seed`"
    )
    DIRECT_FEED = "batches reach TensorFlow through `tf.data`, which copies"


@dataclasses.dataclass(frozen=True)
class Use:
    """A thing of Keras's that is used, and what is known of it.

    Attributes:
        feature: What needs it.
        thing: "module:name.attribute".
        parameters: Those it must take, in this order; `None` if we do not
            call it or take its place.
        mentions: Attributes and locals that its code must use. Of a class,
            any of its methods may.
        backend: The only one where it is used; empty for all.
        seen_in: The versions of Keras that have it so, first and last.
    """

    feature: Feature
    thing: str
    parameters: tuple[str, ...] | None = None
    mentions: tuple[str, ...] = ()
    backend: str = ""
    seen_in: tuple[str, str] = ("3.12", "3.16")

    def find(self) -> Any:
        """The thing.

        Raises:
            ImportError: There is no such module.
            AttributeError: There is no such name in it.
        """
        module, _, names = self.thing.partition(":")
        found: Any = importlib.import_module(module)
        for name in names.split("."):
            found = getattr(found, name)
        return found

    def fault(self) -> str:
        """Says how Keras differs from what is expected here; empty if not."""
        if self.backend not in ("", keras.backend.backend()):
            return ""
        try:
            found = self.find()
        except (ImportError, AttributeError):
            return "is missing"
        if self.parameters is not None:
            taken = _parameters(found)
            if taken != self.parameters:
                return f"takes ({', '.join(taken)})"
        known = _names_in(found)
        lost = [name for name in self.mentions if name not in known]
        return f"has no `{'`, `'.join(lost)}`" if lost else ""


USES = (
    # The adapter is chosen for a PyDataset, and made with these arguments.
    Use(
        Feature.LOADER,
        f"{_ADAPTERS}:get_data_adapter",
        mentions=("PyDatasetAdapter",),
    ),
    Use(
        Feature.LOADER,
        f"{_ADAPTER}.__init__",
        ("self", "x", "class_weight", "shuffle"),
    ),
    Use(Feature.LOADER, f"{_ADAPTER}._standardize_batch", ("self", "batch")),
    # What each backend asks for is made of this; we take its place.
    Use(Feature.LOADER, f"{_ADAPTER}._get_iterator", ("self",)),
    Use(
        Feature.LOADER,
        f"{_ADAPTER}.get_numpy_iterator",
        mentions=("_get_iterator",),
    ),
    Use(
        Feature.LOADER,
        f"{_ADAPTER}.get_jax_iterator",
        mentions=("_get_iterator",),
    ),
    Use(
        Feature.LOADER,
        f"{_ADAPTER}.get_torch_dataloader",
        mentions=("_get_iterator",),
    ),
    Use(Feature.LOADER, f"{_ADAPTER}.get_tf_dataset", ("self",)),
    Use(
        Feature.LOADER,
        f"{_ADAPTERS}.data_adapter_utils:get_tensor_spec",
        ("batches",),
        backend="tensorflow",
    ),
    # When an epoch begins and ends, and the one that is no epoch's end.
    Use(Feature.LOADER, f"{_ADAPTER}.on_epoch_begin", ("self",)),
    Use(Feature.LOADER, f"{_ADAPTER}.on_epoch_end", ("self",)),
    Use(Feature.LOADER, f"{_ADAPTER}.num_batches"),
    Use(
        Feature.LOADER,
        f"{_ITERATOR}.reset",
        ("self",),
        ("data_adapter", "on_epoch_end", "_epoch_iterator"),
    ),
    Use(
        Feature.RESUME,
        _ITERATOR,
        mentions=(
            "steps_per_epoch",
            "steps_per_execution",
            "_num_batches",
            "_steps_seen",
            "_current_iterator",
        ),
    ),
    Use(Feature.QUIET_END, f"{_ITERATOR}._interrupted_warning", ("self",)),
    # Locals of a `fit` that runs.
    Use(
        Feature.FIT,
        "keras:Model.fit",
        mentions=("self", "epoch_iterator", "initial_epoch"),
    ),
    Use(
        Feature.DIRECT_FEED,
        "keras:Model._make_function",
        ("self", "step_function"),
        ("distribute_strategy", "steps_per_execution", "run_eagerly"),
        backend="tensorflow",
    ),
    Use(
        Feature.DIRECT_FEED,
        "keras.src.backend.tensorflow.trainer:TFEpochIterator",
        mentions=(
            "get_tf_dataset",
            "_distribute_strategy",
            "experimental_distribute_dataset",
        ),
        backend="tensorflow",
    ),
    # Callbacks.
    Use(
        Feature.BESIDE,
        "keras:callbacks.CallbackList.set_params",
        ("self", "params"),
        ("callbacks", "set_params"),
    ),
    Use(
        Feature.BACKUP,
        "keras:callbacks.BackupAndRestore",
        mentions=(
            "_current_epoch",
            "_last_batch_seen",
            "_initial_epoch",
            "backup_dir",
            "training_metadata.json",
        ),
    ),
    Use(
        Feature.BACKUP,
        "keras:callbacks.BackupAndRestore._save_model",
        ("self",),
    ),
    Use(Feature.BACKUP, "keras:Model.fit", mentions=("_initial_epoch",)),
    # Errors.
    Use(Feature.FRAMES, "keras.src.utils.traceback_utils:_EXCLUDED_PATHS"),
    Use(Feature.ROWS, "keras:Model.compute_loss"),
    Use(
        Feature.ROWS,
        "keras:Model.compute_loss_and_updates",
        (
            "self",
            "trainable_variables",
            "non_trainable_variables",
            "metrics_variables",
            "x",
            "y",
            "sample_weight",
            "training",
            "optimizer_variables",
        ),
        backend="jax",
    ),
    *(
        Use(
            Feature.ROWS,
            "keras.src.backend:compute_output_spec",
            ("fn", "args", "kwargs"),
            backend=backend,
        )
        for backend in ("tensorflow", "torch")
    ),
    # Where the weights are while JAX trains.
    Use(
        Feature.SYNCHRONIZE,
        "keras:Model.fit",
        mentions=("_jax_state",),
        backend="jax",
    ),
    Use(
        Feature.SYNCHRONIZE,
        "keras:Variable",
        mentions=("_value",),
        backend="jax",
    ),
    Use(Feature.SEED, "keras.src.utils.rng_utils:get_random_seed", ()),
)


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ("?",)


def _names_in(found: Any) -> set[str]:
    """The names, locals and strings in the code of a function or class."""
    if isinstance(found, property):
        found = found.fget
    if isinstance(found, type):
        parts = [
            part for cls in found.__mro__[:-1] for part in vars(cls).values()
        ]
        return {name for part in parts for name in _names_in(part)}
    code = getattr(inspect.unwrap(found), "__code__", None)
    return set() if code is None else _names_in_code(code)


def _names_in_code(code: types.CodeType) -> set[str]:
    names = {*code.co_names, *code.co_varnames, *code.co_cellvars}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in_code(constant)
        elif isinstance(constant, str):
            names.add(constant)
    return names


def _faults() -> dict[Feature, str]:
    """What is off, and for which thing's sake: the first of each feature's."""
    faults: dict[Feature, str] = {}
    for use in USES:
        if use.feature not in faults and (fault := use.fault()):
            faults[use.feature] = f"{use.thing.replace(':', '.')} {fault}"
    return faults


_off = _faults()


def has(feature: Feature) -> bool:
    """Whether Keras has what a feature needs."""
    return feature not in _off and Feature.LOADER not in _off


def warn_of_what_is_off() -> None:
    """Says once what this version of Keras does not allow, and why."""
    off = _off
    if Feature.LOADER in off:
        off = {Feature.LOADER: off[Feature.LOADER]}
    if off:
        told = "; ".join(
            f"{thing}, so {feature.value}" for feature, thing in off.items()
        )
        _log.warning(
            "keras_fastdata does not know Keras %s: %s. Training goes on. "
            "Look for a newer keras_fastdata.",
            keras.__version__,
            told,
        )


def _of(module: str, name: str) -> Any:
    """What is there; a class that nothing is an instance of, if nothing is."""
    try:
        return Use(Feature.LOADER, f"{module}:{name}").find()
    except (ImportError, AttributeError):
        return type(name, (), {})


PyDatasetAdapter = _of(f"{_ADAPTERS}.py_dataset_adapter", "PyDatasetAdapter")
_EpochIterator = _of("keras.src.trainers.epoch_iterator", "EpochIterator")


# -- the adapter -------------------------------------------------------------


def is_asked_whether_to_shuffle() -> bool:
    """Whether Keras asks the caller for `num_batches`, to warn of `shuffle`.

    Keras warns that `shuffle=True`, its own default, is ignored for a dataset
    that does not say its length.
    """
    return sys._getframe(2).f_code.co_name == "get_data_adapter"


class KerasIterator:
    """Keras's `EpochIterator` over an adapter's data, held weakly.

    Without one, or where Keras's is not as we know it, an epoch has no limit
    of steps, and what would be told to Keras is told to nobody.

    Args:
        iterator: Keras's; `None` for none.
    """

    def __init__(self, iterator: Any = None) -> None:
        self._iterator: Callable[[], Any] = _no_iterator
        if iterator is not None:
            self._iterator = weakref.ref(iterator)

    def _get(self, feature: Feature) -> Any:
        return self._iterator() if has(feature) else None

    @property
    def steps_per_epoch(self) -> int | None:
        """The steps that the user wants of each epoch, if any were named."""
        iterator = self._get(Feature.RESUME)
        steps: int | None = getattr(iterator, "steps_per_epoch", None)
        return steps

    @property
    def steps_per_execution(self) -> int:
        """Steps in one call of the train function."""
        iterator = self._get(Feature.RESUME)
        return 1 if iterator is None else int(iterator.steps_per_execution)

    @property
    def continues(self) -> bool:
        """Whether the next epoch goes on where the one before has ended."""
        iterator = self._get(Feature.RESUME)
        return bool(
            iterator is not None
            and iterator.steps_per_epoch
            and iterator._steps_seen
            and iterator._current_iterator is not None
        )

    @property
    def is_resetting(self) -> bool:
        """Whether it is the data's reset that Keras calls the end of an epoch.

        A reset drops the generator of the epoch first.
        """
        iterator = self._get(Feature.LOADER)
        return iterator is not None and iterator._epoch_iterator is None

    @property
    def num_batches(self) -> int | None:
        """How many batches Keras takes in an epoch; `None`: all there are."""
        iterator = self._get(Feature.RESUME)
        count: int | None = getattr(iterator, "_num_batches", None)
        return count

    def set_num_batches(self, count: int | None) -> None:
        """Tells Keras how many batches the data has; `None`: to find out."""
        iterator = self._get(Feature.RESUME)
        if iterator is not None:
            iterator._num_batches = count

    @property
    def can_warn(self) -> bool:
        """Whether `warn_by` has an effect."""
        return self._get(Feature.QUIET_END) is not None

    def warn_by(self, warn: Callable[[], None] | None) -> None:
        """Says what warns that data ran out; `None`: Keras itself."""
        iterator = self._get(Feature.QUIET_END)
        if iterator is not None and warn is not None:
            iterator._interrupted_warning = warn
        elif iterator is not None:
            vars(iterator).pop("_interrupted_warning", None)


def _no_iterator() -> None:
    """In place of a reference to an iterator."""


def calling_iterator() -> KerasIterator:
    """The iterator of Keras's that calls the caller, if one does."""
    known = sys._getframe(2).f_locals
    caller = known.get("self")
    if not isinstance(caller, _EpochIterator):
        return KerasIterator()
    _forget(known)
    return KerasIterator(caller)


def get_tensor_spec(batches: list[Any]) -> Any:
    """What TensorFlow is to know of batches, from these, as Keras sees it."""
    return _of(f"{_ADAPTERS}.data_adapter_utils", "get_tensor_spec")(batches)


def get_random_seed() -> int | None:
    """Returns the seed set by `keras.utils.set_random_seed`, or `None`."""
    if not has(Feature.SEED):
        return None
    seed: int | None = _of("keras.src.utils.rng_utils", "get_random_seed")()
    return seed


def hide_frames(folder: str) -> None:
    """Has Keras's traceback filter drop the frames of files in a folder.

    As it drops its own; `keras.config.disable_traceback_filtering()` keeps
    them.
    """
    show_frames(folder)
    if has(Feature.FRAMES):
        from keras.src.utils import traceback_utils

        hidden = traceback_utils._EXCLUDED_PATHS
        traceback_utils._EXCLUDED_PATHS = (*hidden, folder)


def show_frames(folder: str) -> None:
    """Has it keep them again."""
    if has(Feature.FRAMES):
        from keras.src.utils import traceback_utils

        hidden = traceback_utils._EXCLUDED_PATHS
        kept = tuple(path for path in hidden if path != folder)
        traceback_utils._EXCLUDED_PATHS = kept


# -- the calls under way -----------------------------------------------------


class FitCall(NamedTuple):
    """The innermost `fit` that calls the caller.

    Attributes:
        adapter: The adapter of its training data.
        initial_epoch: The epoch that it begins with: the one that a callback
            has restored, or else the one that it was told.
        has_steps: Whether it was told how many steps an epoch has.
        num_batches: How many batches it takes in an epoch; `None` if only the
            end of the data tells.
    """

    adapter: Any = None
    initial_epoch: int = 0
    has_steps: bool = False
    num_batches: int | None = None


def fit_around() -> FitCall:
    """The innermost `fit` that calls the caller; an empty one for none."""
    for call in _calls_of_keras() if has(Feature.FIT) else ():
        if call.name == "fit":
            iterator = call.epoch_iterator
            restored = getattr(call.trainer, "_initial_epoch", None)
            return FitCall(
                getattr(iterator, "data_adapter", None),
                int(restored or call.initial_epoch or 0),
                getattr(iterator, "steps_per_epoch", None) is not None,
                getattr(iterator, "_num_batches", None),
            )
    return FitCall()


def another_epoch_follows(iterator: KerasIterator) -> bool:
    """Whether the `fit` that calls the caller is to run another epoch.

    `History`, which every `fit` has among its callbacks, knows how many
    epochs there are, and which have ended.

    Args:
        iterator: Keras's, over the training data. With a limit of steps, an
            epoch may end anywhere in the data, so nothing is to follow.
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
    """Whether the caller is an evaluation's or prediction's, amid a `fit`."""
    names = [call.name for call in _calls_of_keras()]
    return names[:1] != ["fit"] and "fit" in names


def steps_argument() -> str:
    """Which argument of Keras's says how many steps there are."""
    names = [call.name for call in _calls_of_keras()]
    if names[:1] == ["fit"]:
        return "`steps_per_epoch`"
    return "`validation_steps`" if "fit" in names else "`steps`"


def trainer_at_work() -> tuple[str, Any]:
    """What Keras was asked to do, and the model; an empty name for nothing."""
    for call in _calls_of_keras():
        return call.name, call.trainer
    return "", None


class _Call(NamedTuple):
    """A call of a model's `fit`, `evaluate` or `predict` that is under way.

    Attributes:
        name: The method's name.
        trainer: The model.
        epoch_iterator: What `fit` has under this name; `None` if it has none.
        initial_epoch: Likewise.
    """

    name: str
    trainer: Any
    epoch_iterator: Any
    initial_epoch: Any


def _calls_of_keras() -> Iterator[_Call]:
    """The calls that have led to the caller, innermost first."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_name
        if name in ("fit", "evaluate", "predict"):
            known = frame.f_locals
            if isinstance(known.get("self"), keras.Model):
                call = _Call(
                    name,
                    known["self"],
                    known.get("epoch_iterator"),
                    known.get("initial_epoch"),
                )
                _forget(known)
                yield call
        frame = frame.f_back


def callbacks_beside() -> list[Any]:
    """The callbacks in a list with the caller, whose `set_params` this is."""
    if not has(Feature.BESIDE):
        return []
    known = sys._getframe(2).f_locals
    caller = known.get("self")
    if not isinstance(caller, keras.callbacks.CallbackList):
        return []
    return list(caller.callbacks)


def _forget(known: dict[str, Any]) -> None:
    """Empties the copy of its locals that a frame of Keras's has given.

    It lives as long as the frame, and would keep what is in it until it is
    asked for again: a copy of the weights.
    """
    if sys.version_info < (3, 13):
        known.clear()


def users_stacklevel() -> int:
    """The `stacklevel` of a warning, for the caller, at the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(
        (exceptions.PACKAGE, _KERAS)
    ):
        level, frame = level + 1, frame.f_back
    return level


# -- BackupAndRestore --------------------------------------------------------


class KerasBackup:
    """Keras's `BackupAndRestore`, for a callback that saves when that does.

    Args:
        callback: Keras's.
    """

    def __init__(self, callback: Any) -> None:
        self._callback = callback

    @property
    def folder(self) -> str:
        """The folder that it saves to."""
        return str(self._callback.backup_dir)

    @property
    def position(self) -> tuple[int, int]:
        """The epoch, and the latest batch in it, that it has seen."""
        return self._callback._current_epoch, self._callback._last_batch_seen

    def restored(self) -> tuple[int, int] | None:
        """The `position` that it has restored; `None` if there was none."""
        path = os.path.join(self.folder, "training_metadata.json")
        try:
            with open(path) as file:
                found = json.load(file)
            return int(found["epoch"]), int(found["batch"])
        except FileNotFoundError:
            return None

    def save_first(self, save: Callable[[], None]) -> None:
        """Has `save` called each time just before it saves the weights."""
        callback = self._callback
        save_weights = type(callback)._save_model

        def save_both() -> None:
            save()
            save_weights(callback)

        callback._save_model = save_both


def set_initial_epoch(model: Any, epoch: int) -> None:
    """Has the `fit` that begins, or the next one, begin with that epoch."""
    model._initial_epoch = epoch


# -- the model ---------------------------------------------------------------


def dry_run(name: str, trainer: Any, batch: tuple[Any, ...]) -> None:
    """Has a model compute its loss for a batch, by shapes alone.

    Does nothing where the steps are not Keras's own.

    Raises:
        Exception: What Keras, or a layer or loss, has against it.
    """
    step = getattr(
        type(trainer), "train_step" if name == "fit" else "test_step"
    )
    if not step.__module__.startswith("keras.src."):
        return
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(
        keras.tree.map_structure(_symbolic, batch)
    )
    if keras.backend.backend() == "jax":
        # Between steps its variables have no values.
        _dry_run_in_jax(trainer, x, y, sample_weight)
        return
    from keras.src import backend

    y_pred = backend.compute_output_spec(trainer, x, training=False)
    backend.compute_output_spec(
        trainer.compute_loss, x, y, y_pred, sample_weight, training=False
    )


def _dry_run_in_jax(trainer: Any, *parts: Any) -> None:
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
    """Whether Keras made a train or test function; a model may have others."""
    code = getattr(function, "__code__", None)
    maker = inspect.unwrap(keras.Model._make_function)
    name = f"{maker.__qualname__}.<locals>.function"
    return getattr(code, "co_qualname", "") == name


def values_in_training(model: Any) -> list[Any]:
    """The arrays that the steps of a model on JAX have been asked for.

    Args:
        model: The model; may be `None`.
    """
    if not has(Feature.SYNCHRONIZE):
        return []
    # While `fit` runs, the variables' values are in here, and only here. (It
    # is a dict of Keras's own kind, in which JAX would find no arrays.)
    state = getattr(model, "_jax_state", None)
    if state:
        return [value for part in state.values() for value in part]
    variables = getattr(model, "variables", ())
    return [getattr(variable, "_value", None) for variable in variables]
