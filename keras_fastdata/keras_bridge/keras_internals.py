"""What is used of Keras that Keras does not promise to keep.

Imports from `keras.src`, and the locals of Keras's own calls, which are read
from their frames: Keras tells nobody but callbacks how far a `fit` has come.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import keras
from keras.src import backend
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.data_adapters.py_dataset_adapter import (
    PyDatasetAdapter,
)
from keras.src.trainers.epoch_iterator import EpochIterator
from keras.src.trainers.trainer import Trainer
from keras.src.utils import rng_utils, traceback_utils

from keras_fastdata.workers import failures

__all__ = [
    "EpochIterator",
    "PyDatasetAdapter",
    "call_of_keras",
    "calling_iterator",
    "calls_of_keras",
    "data_adapter_utils",
    "dry_run",
    "epoch_follows",
    "forget",
    "hide_frames",
    "is_amid_pass",
    "rng_utils",
    "show_frames",
    "steps_argument",
    "trainer_at_work",
    "users_stacklevel",
]

_KERAS = os.path.join(os.path.dirname(keras.__file__), "")


def hide_frames(folder: str) -> None:
    """Has Keras's traceback filter drop the frames of files in a folder.

    As it drops its own; `keras.config.disable_traceback_filtering()` keeps
    them.
    """
    show_frames(folder)
    hidden = getattr(traceback_utils, "_EXCLUDED_PATHS", ())
    if hidden:
        traceback_utils._EXCLUDED_PATHS = (*hidden, folder)


def show_frames(folder: str) -> None:
    """Has it keep them again."""
    hidden = getattr(traceback_utils, "_EXCLUDED_PATHS", ())
    if folder in hidden:
        kept = tuple(path for path in hidden if path != folder)
        traceback_utils._EXCLUDED_PATHS = kept


def epoch_follows() -> bool:
    """Whether the `fit` around the caller is to run another epoch.

    Keras tells nobody but callbacks, and a dataset is none.
    """
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
        (failures.PACKAGE, _KERAS)
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
            if isinstance(known.get("self"), Trainer):
                yield name, known
        frame = frame.f_back


def calling_iterator() -> EpochIterator | None:
    """The `EpochIterator` that calls the caller."""
    known = sys._getframe(2).f_locals
    caller = known.get("self")
    if not isinstance(caller, EpochIterator):
        return None
    forget(known)
    return caller


def is_amid_pass(iterator: EpochIterator | None) -> bool:
    """Whether the next epoch goes on where the one before has ended."""
    return bool(
        iterator is not None
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
