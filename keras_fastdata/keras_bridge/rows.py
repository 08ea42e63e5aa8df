"""Checks batches whose parts have different numbers of rows.

Some models take them, such as one whose targets are broadcast, or whose
outputs have rows of their own. Other models fail in the middle of a step, with
an error that does not name the batch. To tell them apart, the model computes
its loss by shapes alone, which fails if the step would.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_fastdata._call_stack import raise_of_handler
from keras_fastdata.keras_bridge.keras_internals import (
    Feature,
    dry_run,
    has,
    trainer_at_work,
)

_PARTS = ("inputs", "targets", "sample weights")


def may_differ(batch: Any) -> bool:
    """Returns whether parts of a batch have no rows, or unequal row counts."""
    if type(batch) is not tuple:
        return False
    count = None
    for leaf in leaves_of(batch):
        rows = _rows_of(leaf)
        if rows is None or count not in (None, rows):
            return True
        count = rows
    return False


def leaves_of(batch: tuple[Any, ...]) -> Iterator[Any]:
    """Yields the arrays of a batch, and what it has in place of arrays."""
    for part in batch:
        is_array = type(part) is np.ndarray
        for leaf in (part,) if is_array else keras.tree.flatten(part):
            if leaf is not None:
                yield leaf


class Rows:
    """Rejects batches that a model cannot use because their row counts differ.

    Remembers the shapes that were checked.
    """

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def check(self, batch: tuple[Any, ...]) -> None:
        """Raises `ValueError` if a batch fails only because of its row counts.

        The model would take the batch if its parts had equal numbers of rows.
        """
        shapes = repr(keras.tree.map_structure(_shape_of, batch))
        if shapes in self._taken or not has(Feature.ROWS):
            return
        name, trainer = trainer_at_work()
        if failure(name, trainer, batch) is not None:
            numbers = sum(map(_is_number, keras.tree.flatten(batch)))
            arrays = keras.tree.traverse(_as_array, batch)
            if numbers and failure(name, trainer, arrays) is None:
                raise ValueError(
                    "A batch has lists of numbers, which Keras takes for "
                    f"{numbers} arrays without rows. Return arrays: "
                    "`np.array(...)` of each list."
                )
            if not numbers and failure(name, trainer, _alike(batch)) is None:
                raise ValueError(
                    "All arrays of a batch must have the same number of rows. "
                    f"Received: {_described(batch)}. Return one row for each "
                    "sample in all of them."
                )
        self._taken.add(shapes)


def failure(
    name: str, trainer: Any, batch: tuple[Any, ...]
) -> Exception | None:
    """Returns the error with which a model fails to compute a batch's loss.

    Returns `None` if the model computes the loss, or in `predict`.
    """
    if name not in ("fit", "evaluate"):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they would come twice
            dry_run(name, trainer, batch)
    except Exception as error:  # of any layer, backend, or code of the user
        raise_of_handler(error)
        return error
    return None


def _alike(batch: tuple[Any, ...]) -> Any:
    """Makes symbolic tensors from a batch; all have the same number of rows."""
    count = next(n for part in batch for n in _counts(part) if n is not None)

    def change(leaf: Any) -> Any:
        if leaf is None or _rows_of(leaf) is None:
            return leaf
        dtype = keras.backend.standardize_dtype(leaf.dtype)
        return keras.KerasTensor((count, *leaf.shape[1:]), dtype)

    return keras.tree.map_structure(change, batch)


def _as_array(part: Any) -> Any:
    """Converts a list of numbers to an array; returns `None` otherwise."""
    if isinstance(part, list) and all(
        map(_is_number, keras.tree.flatten(part))
    ):
        return np.asarray(part, keras.config.floatx())
    return None


def _described(batch: tuple[Any, ...]) -> str:
    parts = zip(_PARTS, map(_counts, batch), strict=False)
    return ", ".join(
        f"{' and '.join(map(str, counts))} in the {name}"
        for name, counts in parts
        if counts
    )


def _counts(part: Any) -> list[int | None]:
    """Returns the distinct numbers of rows among the arrays of a part."""
    leaves = [leaf for leaf in keras.tree.flatten(part) if leaf is not None]
    return list(dict.fromkeys(map(_rows_of, leaves)))


def _rows_of(leaf: Any) -> int | None:
    shape = getattr(leaf, "shape", None)
    return shape[0] if shape is not None and len(shape) else None


def _shape_of(leaf: Any) -> str:
    return str(getattr(leaf, "shape", None))


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, (int, float))
