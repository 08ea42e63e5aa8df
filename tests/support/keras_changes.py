"""Changes of Keras's internals, and what a training comes to under each.

Run as a script with the names of changes, in a process of its own; it prints a
JSON object for each. Between changes it imports keras_fastdata anew.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import sys
import tempfile
import types
from unittest import mock

import keras
import numpy as np

_ADAPTERS = "keras.src.trainers.data_adapters"
_ADAPTER = f"{_ADAPTERS}.py_dataset_adapter:PyDatasetAdapter"
_ITERATOR = "keras.src.trainers.epoch_iterator:EpochIterator"
_BACKUP = "keras:callbacks.BackupAndRestore"


def _find(thing):
    module, _, names = thing.partition(":")
    found = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def takes_more(thing):
    """A function that now has another parameter, and other code."""
    module, _, names = thing.partition(":")
    *owner, name = names.split(".")
    found = importlib.import_module(module)
    for each in owner:
        found = getattr(found, each)
    original = vars(found)[name]

    def changed(*arguments, strict=False, **named):
        return original(*arguments, **named)

    return mock.patch.object(found, name, changed)


def is_gone(module):
    """A module that cannot be imported any more; Keras has it already."""
    return mock.patch.dict(sys.modules, {module: None})


@contextlib.contextmanager
def is_called(thing, old, new):
    """An attribute or a local of another name, in a function or a class."""
    found = _find(thing)
    parts = vars(found).values() if isinstance(found, type) else [found]
    functions = []
    for part in parts:
        part = part.fget if isinstance(part, property) else part
        while hasattr(part, "__wrapped__"):
            part = part.__wrapped__
        if isinstance(part, types.FunctionType):
            functions.append((part, part.__code__))
            part.__code__ = _renamed(part.__code__, old, new)
    try:
        yield
    finally:
        for function, code in functions:
            function.__code__ = code


def _renamed(code, old, new):
    def names(found):
        return tuple(new if name == old else name for name in found)

    return code.replace(
        co_names=names(code.co_names),
        co_varnames=names(code.co_varnames),
        co_cellvars=names(code.co_cellvars),
        co_freevars=names(code.co_freevars),
        co_consts=tuple(
            _renamed(c, old, new) if isinstance(c, types.CodeType) else c
            for c in code.co_consts
        ),
    )


# What changes, the feature that is off then, and on which backend alone.
CHANGES = {
    "adapter moved": (
        "LOADER",
        lambda: is_gone(f"{_ADAPTERS}.py_dataset_adapter"),
    ),
    "adapter chosen": (
        "LOADER",
        lambda: takes_more(f"{_ADAPTERS}:get_data_adapter"),
    ),
    **{
        f"adapter {name}": (
            "LOADER",
            lambda name=name: takes_more(f"{_ADAPTER}.{name}"),
        )
        for name in (
            "__init__",
            "_standardize_batch",
            "_get_iterator",
            "get_numpy_iterator",
            "get_jax_iterator",
            "get_torch_dataloader",
            "get_tf_dataset",
            "on_epoch_begin",
            "on_epoch_end",
        )
    },
    "signature": (
        "LOADER",
        lambda: takes_more(f"{_ADAPTERS}.data_adapter_utils:get_tensor_spec"),
        "tensorflow",
    ),
    "reset": ("LOADER", lambda: takes_more(f"{_ITERATOR}.reset")),
    "warning": (
        "QUIET_END",
        lambda: takes_more(f"{_ITERATOR}._interrupted_warning"),
    ),
    **{
        f"iterator {name}": (
            "RESUME",
            lambda name=name: is_called(_ITERATOR, name, f"{name}_so_far"),
        )
        for name in ("_num_batches", "_steps_seen", "_current_iterator")
    },
    "epoch": (None, lambda: is_called("keras:Model.fit", "epoch", "index")),
    "epoch iterator": (
        "FIT",
        lambda: is_called("keras:Model.fit", "epoch_iterator", "batches"),
    ),
    "function": (
        "DIRECT_FEED",
        lambda: takes_more(
            "keras.src.backend.tensorflow.trainer:"
            f"{_trainer().__name__}._make_function"
        ),
        "tensorflow",
    ),
    "strategy": (
        "DIRECT_FEED",
        lambda: is_called(
            "keras.src.backend.tensorflow.trainer:TFEpochIterator",
            "_distribute_strategy",
            "_strategy",
        ),
        "tensorflow",
    ),
    "callbacks": (
        "BESIDE",
        lambda: takes_more("keras:callbacks.CallbackList.set_params"),
    ),
    "backup": ("BACKUP", lambda: takes_more(f"{_BACKUP}._save_model")),
    **{
        f"backup {name}": (
            "BACKUP",
            lambda name=name: is_called(_BACKUP, name, f"{name}_so_far"),
        )
        for name in ("_current_epoch", "_last_batch_seen")
    },
    "seed": (
        "SEED",
        lambda: takes_more("keras.src.utils.rng_utils:get_random_seed"),
    ),
    # Keras itself could not do without the names.
    "weights": ("SYNCHRONIZE", lambda: is_unlike("SYNCHRONIZE"), "jax"),
    "frames": ("FRAMES", lambda: is_unlike("FRAMES")),
    "rows": ("ROWS", lambda: is_unlike("ROWS")),
    "nothing": (None, contextlib.nullcontext),
}


def _trainer():
    """Keras's class that has the name, on TensorFlow."""
    for cls in keras.Model.__mro__:
        if "_make_function" in vars(cls):
            return cls
    raise LookupError("_make_function")


@contextlib.contextmanager
def is_unlike(feature):
    """As if Keras did not have what a feature needs."""
    internals = importlib.import_module(
        "keras_fastdata.keras_bridge.keras_internals"
    )
    internals._off[internals.Feature[feature]] = "what it needs is missing"
    yield


def names_here():
    """The changes that make a difference on this backend."""
    here = keras.backend.backend()
    return [
        name for name, (_, _, *only) in CHANGES.items() if only in ([], [here])
    ]


NOTES = []


class Noting(keras.Model):
    """Notes the first number of every batch, and learns nothing.

    Args:
        built: Whether Keras need not build it, from a batch it probes for.
    """

    def __init__(self, built):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        if built:
            self(np.zeros((2, 1), "float32"))
        self.compile("sgd", run_eagerly=True)

    def call(self, x):
        return self.dense(x)

    def train_step(self, *arguments):
        *state, data = arguments
        x = keras.tree.flatten(data)[0]
        NOTES.append(int(keras.ops.convert_to_numpy(x)[0, 0]))
        return ({"loss": 0.0}, *state) if state else {"loss": 0.0}

    test_step = train_step


def train(folder):
    """The batches that three trainings are given, each a string."""
    import keras_fastdata

    class Numbers(keras_fastdata.FastPyDataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            x = np.full((2, 1), index, "float32")
            return x, x

    def fit(built=True, **arguments):
        NOTES.clear()
        with Numbers(workers=2, seed=1) as dataset:
            Noting(built).fit(dataset, shuffle=False, verbose=0, **arguments)
        return " ".join(map(str, NOTES))

    return [
        fit(built=False, epochs=2),
        fit(epochs=2, steps_per_epoch=3),
        fit(
            epochs=2,
            validation_data=Numbers(workers=2, use_multiprocessing=True),
            callbacks=[
                keras.callbacks.BackupAndRestore(os.path.join(folder, "b")),
                keras_fastdata.DatasetCheckpoint(os.path.join(folder, "d")),
                keras_fastdata.LoaderHealth(verbose=0),
            ],
        ),
    ]


class _Kept(logging.Handler):
    """Keeps what is logged at WARNING and above."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.told = []

    def emit(self, record):
        self.told.append(record.getMessage())


def under(name):
    """What becomes of keras_fastdata when Keras has changed so."""
    for module in [m for m in sys.modules if m.startswith("keras_fastdata")]:
        del sys.modules[module]
    kept = _Kept()
    logger = logging.getLogger("keras_fastdata")
    logger.addHandler(kept)
    _, change, *_ = CHANGES[name]
    try:
        with change(), tempfile.TemporaryDirectory() as folder:
            batches = train(folder)
            from keras_fastdata import keras_bridge

            features = keras_bridge.Feature
            off = [f.name for f in features if not keras_bridge.has(f)]
    finally:
        logger.removeHandler(kept)
    return {"name": name, "batches": batches, "off": off, "told": kept.told}


if __name__ == "__main__":
    for name in sys.argv[1:] or names_here():
        print(json.dumps(under(name)), flush=True)
