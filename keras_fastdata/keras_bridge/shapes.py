"""Names a batch whose shape the model does not take.

On JAX and PyTorch, the error of a layer does not say which batch it is about.
On TensorFlow, `tensorflow_iterator` compares each batch with the first ones.
"""

from __future__ import annotations

from typing import Any

import keras

from keras_fastdata.keras_bridge.keras_internals import (
    Feature,
    has,
    trainer_at_work,
)
from keras_fastdata.keras_bridge.rows import failure, leaves_of

_MOST_CHECKED = 3  # a model that takes so many other shapes may take all

_Shapes = list[tuple[int, ...]]


class Shapes:
    """Compares the shapes of batches with those of the first batch."""

    def __init__(self) -> None:
        self._first: tuple[Any, ...] = ()  # its shapes and dtypes
        self._known: set[Any] = set()

    def check(self, batch: Any) -> None:
        """Raises `ValueError` if a model takes the first batch and not this.

        The numbers of rows may differ.
        """
        if keras.backend.backend() == "tensorflow":
            return
        if type(batch) is not tuple or len(self._known) > _MOST_CHECKED:
            return
        key = tuple(shape[1:] for shape in _shapes_of(batch))
        if key in self._known:
            return
        self._known.add(key)
        if not self._first:
            self._first = keras.tree.map_structure(_spec_of, batch)
            return
        if not has(Feature.ROWS):
            return
        name, trainer = trainer_at_work()
        error = failure(name, trainer, batch)
        if error is None or failure(name, trainer, self._first) is not None:
            return
        found, first = _difference(_shapes_of(batch), _shapes_of(self._first))
        raise ValueError(
            f"A batch has an array of shape {found} where the first batch had "
            f"{first}, and the model takes only the latter. Return arrays of "
            "the same shape for every index."
        ) from error


class _ArraySpec:
    """Stands for an array, without its values."""

    def __init__(self, leaf: Any) -> None:
        self.shape = getattr(leaf, "shape", ())
        self.dtype = getattr(leaf, "dtype", None)


def _spec_of(leaf: Any) -> _ArraySpec | None:
    return None if leaf is None else _ArraySpec(leaf)


def _shapes_of(batch: tuple[Any, ...]) -> _Shapes:
    return [getattr(leaf, "shape", ()) for leaf in leaves_of(batch)]


def _difference(found: _Shapes, first: _Shapes) -> tuple[Any, Any]:
    """Returns the shapes of the first arrays that differ in more than rows."""
    for pair in zip(found, first, strict=False):
        if pair[0][1:] != pair[1][1:]:
            return pair
    return found, first
