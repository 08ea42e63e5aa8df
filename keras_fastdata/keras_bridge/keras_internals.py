"""What is used of Keras that Keras does not promise to keep.

These are names of `keras.src`, attributes of Keras's objects, and locals of
Keras's own calls, which are read from their frames: Keras tells nobody but
callbacks how far a `fit` has come.

`USES` lists them all. Each is looked up, and what it takes and mentions is
compared with what we know, when this module is imported. What is missing or
different switches off the `Feature` that needs it, and nothing else. Whoever
provides a feature asks `has(feature)` first.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import logging
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_fastdata.workers import exceptions

__all__ = [
    "USES",
    "EpochIterator",
    "Feature",
    "PyDatasetAdapter",
    "Use",
    "call_of_keras",
    "callbacks_beside",
    "calling_iterator",
    "calls_of_keras",
    "dry_run",
    "epoch_follows",
    "forget",
    "get_random_seed",
    "get_tensor_spec",
    "has",
    "hide_frames",
    "is_amid_iteration",
    "is_keras_step",
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
    NEXT_EPOCH = "no batch of the next epoch is built ahead"
    FIT = (
        "LoaderHealth counts the batches of nested evaluations as those of "
        "`fit`; DatasetCheckpoint saves and restores nothing"
    )
    RESUME = (
        "DatasetCheckpoint saves and restores nothing, and `fit` warns that "
        "data ran out where a resumed epoch is shorter"
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
    """

    feature: Feature
    thing: str
    parameters: tuple[str, ...] | None = None
    mentions: tuple[str, ...] = ()
    backend: str = ""

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
        """How it differs from what is known; empty if it does not."""
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
        ("data_adapter", "on_epoch_end"),
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
        Feature.NEXT_EPOCH,
        "keras:Model.fit",
        mentions=("epoch", "epochs", "initial_epoch", "steps_per_epoch"),
    ),
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
EpochIterator = _of("keras.src.trainers.epoch_iterator", "EpochIterator")


def get_tensor_spec(batches: list[Any]) -> Any:
    """What TensorFlow is to know of batches, from these, as Keras sees it."""
    return _of(f"{_ADAPTERS}.data_adapter_utils", "get_tensor_spec")(batches)


def get_random_seed() -> int | None:
    """What `keras.utils.set_random_seed` was called with, if it was."""
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


def epoch_follows() -> bool:
    """Whether the `fit` around the caller is to run another epoch.

    Keras tells nobody but callbacks, and a dataset is none.
    """
    if not has(Feature.NEXT_EPOCH):
        return False
    found = call_of_keras("fit", "evaluate", "predict")
    if found is None:
        return False
    name, known = found
    epochs = known.get("epochs") if name == "fit" else None
    epoch = known.get("epoch", known.get("initial_epoch"))
    # With steps, an epoch may end anywhere in the dataset.
    steps = known.get("steps_per_epoch")
    forget(known)
    return (
        isinstance(epochs, int)
        and isinstance(epoch, int)
        and epoch + 1 < epochs
        and steps is None
    )


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


def steps_argument() -> str:
    """Which argument of Keras's says how many steps there are."""
    calls = []
    for name, known in calls_of_keras("fit", "evaluate", "predict"):
        forget(known)
        calls.append(name)
    if calls[:1] == ["fit"]:
        return "`steps_per_epoch`"
    return "`validation_steps`" if "fit" in calls else "`steps`"


def users_stacklevel() -> int:
    """The `stacklevel` of a warning, for the caller, at the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(
        (exceptions.PACKAGE, _KERAS)
    ):
        level, frame = level + 1, frame.f_back
    return level


def trainer_at_work() -> tuple[str, Any]:
    """The model that Keras is at work with, and what it was asked to do."""
    found = call_of_keras("fit", "evaluate", "predict")
    if found is None:
        return "", None
    name, known = found
    trainer = known["self"]
    forget(known)
    return name, trainer


def is_keras_step(function: Any) -> bool:
    """Whether Keras made a train or test function; a model may have others."""
    code = getattr(function, "__code__", None)
    maker = inspect.unwrap(keras.Model._make_function)
    name = f"{maker.__qualname__}.<locals>.function"
    return getattr(code, "co_qualname", "") == name


def call_of_keras(*names: str) -> tuple[str, dict[str, Any]] | None:
    """The innermost of `calls_of_keras`, if there is any."""
    return next(calls_of_keras(*names), None)


def calls_of_keras(*names: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Calls of such methods of a model, and their locals, innermost first.

    Pass those to `forget` when they have been read.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_name
        if name in names:
            known = frame.f_locals
            if isinstance(known.get("self"), keras.Model):
                yield name, known
        frame = frame.f_back


def calling_iterator() -> Any:
    """The `EpochIterator` that calls the caller; `None` if none does."""
    known = sys._getframe(2).f_locals
    caller = known.get("self")
    if not isinstance(caller, EpochIterator):
        return None
    forget(known)
    return caller


def callbacks_beside() -> list[Any]:
    """The callbacks in a list with the caller, whose `set_params` this is."""
    if not has(Feature.BESIDE):
        return []
    known = sys._getframe(2).f_locals
    caller = known.get("self")
    if not isinstance(caller, keras.callbacks.CallbackList):
        return []
    return list(caller.callbacks)


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


def is_amid_iteration(iterator: Any) -> bool:
    """Whether the next epoch goes on where the one before has ended."""
    return bool(
        has(Feature.RESUME)
        and iterator is not None
        and iterator.steps_per_epoch
        and iterator._steps_seen
        and iterator._current_iterator is not None
    )


def forget(known: dict[str, Any]) -> None:
    """Empties the copy of its locals that a frame of Keras's has given.

    It lives as long as the frame, and would keep what is in it until it is
    asked for again: a copy of the weights.
    """
    if sys.version_info < (3, 13):
        known.clear()
