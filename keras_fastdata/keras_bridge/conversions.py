"""Conversions of arrays and errors into what a framework or Keras takes."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_fastdata.errors import DatasetPicklingError
from keras_fastdata.workers import exceptions


def for_tensorflow(leaf: Any) -> Any:
    """Converts a leaf of a batch into one that `from_generator` takes."""
    import tensorflow as tf

    if leaf is None:
        return tf.experimental.Optional.empty(None)
    if type(leaf).__module__.startswith("scipy.sparse"):
        entries = leaf.tocoo()
        indices = np.stack((entries.row, entries.col), axis=1)
        return tf.SparseTensor(indices, entries.data, entries.shape)
    return strings_as_tensors(leaf)


def own(leaf: Any) -> Any:
    """Copies an array if it is read-only."""
    if isinstance(leaf, np.ndarray) and not leaf.flags.writeable:
        return leaf.copy()
    return leaf


def strings_as_tensors(leaf: Any) -> Any:
    """Converts an array of strings, whose type Keras does not know."""
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OSTU":
        import tensorflow as tf

        return tf.constant(leaf.tolist(), shape=leaf.shape, dtype=tf.string)
    return leaf


def spell_out_cause(error: Exception) -> None:
    """Adds the cause of an error to its notes.

    Keras's traceback filter drops the cause (`raise ... from None`), which
    stays reachable as `__context__`. A `DatasetPicklingError` names its cause.
    """
    if error.__cause__ is not None:
        if not isinstance(error, DatasetPicklingError):
            exceptions.note_causes(error)
        if error.__context__ is None:
            BaseException.__setattr__(error, "__context__", error.__cause__)
