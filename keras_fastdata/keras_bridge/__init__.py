"""Connects `FastPyDataset` to `fit`, `evaluate` and `predict` of Keras.

Keras wraps a PyDataset in a `PyDatasetAdapter`, and asks the adapter for
iterators. `register` gives `PyDatasetAdapter` a `__new__` that makes our
adapter for our datasets, and Keras's own for all others. It also makes Keras's
traceback filter drop our frames. Nothing else of Keras is changed.
`keras_internals` is the one module that uses what Keras does not promise to
keep. Where Keras differs from what that module expects, training goes on with
less, down to Keras's own adapter.
"""

from __future__ import annotations

from typing import Any

import keras

from keras_fastdata.building import drawn_seed
from keras_fastdata.keras_bridge.adapter import FastPyDatasetAdapter
from keras_fastdata.keras_bridge.keras_internals import (
    Feature,
    FitCall,
    KerasBackup,
    PyDatasetAdapter,
    callbacks_beside,
    fit_around,
    get_random_seed,
    has,
    hide_frames,
    is_asked_whether_to_shuffle,
    is_within_fit,
    set_initial_epoch,
    trainer_at_work,
    values_in_training,
    warn_of_what_is_off,
)
from keras_fastdata.workers import exceptions

__all__ = [
    "FastPyDatasetAdapter",
    "Feature",
    "KerasBackup",
    "PyDataset",
    "callbacks_beside",
    "has",
    "image_data_format",
    "is_asked_whether_to_shuffle",
    "is_within_fit",
    "register",
    "set_initial_epoch",
    "spec_of",
    "trainer_at_work",
    "training",
    "values_in_training",
]

PyDataset = keras.utils.PyDataset
image_data_format = keras.config.image_data_format


def training() -> FitCall:
    """Describes the running `fit`, including this package's data adapter.

    `adapter` is `None` if no `fit` runs, or if its data is no `FastPyDataset`.
    """
    call = fit_around()
    if isinstance(call.adapter, FastPyDatasetAdapter):
        return call
    return call._replace(adapter=None)


def spec_of(batches: list[Any]) -> Any:
    """Returns the structure of batches, with a `KerasTensor` for each array.

    The first axis, and those whose length differs, have the length `None`.
    """

    def spec(*leaves: Any) -> Any:
        if not hasattr(leaves[0], "shape"):
            return leaves[0]
        shapes = [tuple(leaf.shape) for leaf in leaves]
        shape = [
            lengths[0] if axis and len(set(lengths)) == 1 else None
            for axis, lengths in enumerate(zip(*shapes, strict=True))
        ]
        dtype = leaves[0].dtype
        is_text = getattr(dtype, "kind", "") in ("O", "S", "T", "U")
        return keras.KerasTensor(
            shape,
            "string" if is_text else keras.backend.standardize_dtype(dtype),
            sparse=hasattr(leaves[0], "tocsr"),
        )

    return keras.tree.map_structure(spec, *batches)


def register(dataset_class: Any) -> None:
    """Makes Keras use this package's adapter for datasets of a class.

    If this Keras is too different, Keras's own adapter builds the batches
    inline: the properties of the dataset tell Keras that there are no workers.
    """
    warn_of_what_is_off()
    drawn_seed.trust_random_where(lambda: get_random_seed() is not None)
    if not has(Feature.LOADER):
        dataset_class.workers = dataset_class.workers.getter(lambda _: 0)
        dataset_class.use_multiprocessing = (
            dataset_class.use_multiprocessing.getter(lambda _: False)
        )
        return

    def new(cls: type, x: Any = None, *_: Any, **__: Any) -> Any:
        ours = cls is PyDatasetAdapter and isinstance(x, dataset_class)
        return object.__new__(FastPyDatasetAdapter if ours else cls)

    PyDatasetAdapter.__new__ = new
    hide_frames(exceptions.PACKAGE)
