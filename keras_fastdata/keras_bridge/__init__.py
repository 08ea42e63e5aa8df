"""How `fit`, `evaluate` and `predict` consume a `FastPyDataset`.

Keras wraps a PyDataset in a `PyDatasetAdapter`, and asks that for iterators.
`register` gives `PyDatasetAdapter` a `__new__` that makes our adapter for our
datasets, wherever Keras imported the name, and is Keras's own for all others.
It also has Keras's traceback filter drop our frames with Keras's own. These
are the two things of Keras's that we touch. `keras_internals` is the one module
that knows what Keras does not promise to keep; where that is not as we know
it, training goes on with less, down to Keras's own adapter.
"""

from __future__ import annotations

from typing import Any

import keras

from keras_fastdata.keras_bridge.adapter import FastPyDatasetAdapter
from keras_fastdata.keras_bridge.keras_internals import (
    Feature,
    FitCall,
    KerasBackup,
    PyDatasetAdapter,
    callbacks_beside,
    fit_around,
    has,
    hide_frames,
    is_asked_whether_to_shuffle,
    is_within_fit,
    set_initial_epoch,
    show_frames,
    values_in_training,
    warn_of_what_is_off,
)
from keras_fastdata.workers import exceptions

__all__ = [
    "FastPyDatasetAdapter",
    "Feature",
    "FitCall",
    "KerasBackup",
    "PyDataset",
    "callbacks_beside",
    "has",
    "is_asked_whether_to_shuffle",
    "is_within_fit",
    "register",
    "set_initial_epoch",
    "training",
    "unregister",
    "values_in_training",
]

PyDataset = keras.utils.PyDataset


def training() -> FitCall:
    """The `fit` that calls the caller; no adapter if its data is not ours."""
    call = fit_around()
    if isinstance(call.adapter, FastPyDatasetAdapter):
        return call
    return call._replace(adapter=None)


def register(dataset_class: Any) -> None:
    """Has Keras wrap instances of `dataset_class` in our adapter.

    If this Keras is too different for that, Keras's own adapter builds their
    batches, inline: it is told that there are no workers.
    """
    warn_of_what_is_off()
    if not has(Feature.LOADER):
        dataset_class.workers = _told(dataset_class.workers, 0)
        dataset_class.use_multiprocessing = _told(
            dataset_class.use_multiprocessing, False
        )
        return

    def new(cls: type, x: Any = None, *_: Any, **__: Any) -> Any:
        ours = cls is PyDatasetAdapter and isinstance(x, dataset_class)
        return object.__new__(FastPyDatasetAdapter if ours else cls)

    PyDatasetAdapter.__new__ = new
    hide_frames(exceptions.PACKAGE)


def _told(setting: property, value: Any) -> property:
    """A property that can be set as before, and is told to be `value`."""
    return setting.getter(lambda _: value)


def unregister() -> None:
    """Leaves Keras as it was; a FastPyDataset is then a plain PyDataset."""
    if not has(Feature.LOADER):
        return

    def new(cls: type, *_: Any, **__: Any) -> Any:
        # Not `del`: a class that has had a `__new__` would then refuse the
        # arguments of its `__init__` (CPython's object.__new__).
        return object.__new__(cls)

    PyDatasetAdapter.__new__ = new
    show_frames(exceptions.PACKAGE)
