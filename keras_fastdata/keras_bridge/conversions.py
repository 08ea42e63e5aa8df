"""Leaves of batches as a framework wants them; errors as Keras shows them."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_fastdata.errors import DatasetPicklingError
from keras_fastdata.workers import exceptions


def for_tensorflow(leaf: Any) -> Any:
    """What `from_generator` takes in place of a leaf it does not know."""
    if leaf is None:
        import tensorflow as tf

        return tf.experimental.Optional.empty(None)
    if type(leaf).__module__.startswith("scipy.sparse"):
        import tensorflow as tf

        entries = leaf.tocoo()
        indices = np.stack((entries.row, entries.col), axis=1)
        return tf.SparseTensor(indices, entries.data, entries.shape)
    return strings_as_tensors(leaf)


def own(leaf: Any) -> Any:
    """An array that may be written to, for frameworks that insist."""
    if isinstance(leaf, np.ndarray) and not leaf.flags.writeable:
        return leaf.copy()
    return leaf


def strings_as_tensors(leaf: Any) -> Any:
    """A string tensor for an array of strings, which Keras cannot name."""
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OSTU":
        import tensorflow as tf

        return tf.constant(leaf.tolist(), shape=leaf.shape, dtype=tf.string)
    return leaf


def spell_out_cause(error: Exception) -> None:
    """Names the cause in the notes: Keras's traceback filter drops it.

    (`raise ... from None` in `keras.src.utils.traceback_utils`; it stays
    reachable as `__context__`.) A `DatasetPicklingError` names it itself.
    """
    if error.__cause__ is not None:
        if not isinstance(error, DatasetPicklingError):
            exceptions.note_causes(error)
        if error.__context__ is None:
            BaseException.__setattr__(error, "__context__", error.__cause__)
