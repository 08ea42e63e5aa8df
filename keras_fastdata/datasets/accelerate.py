"""`accelerate` adds workers to a Keras dataset without changing its class.

The iterators of Keras's `ImageDataGenerator` count the batches they build, and
seed `np.random` with that count. In several processes the counts would differ,
and each process would draw an order of its own. Here the count is computed from
epoch and index, and the order is drawn in the training process.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_fastdata._dataset_internals import answer, mark_changed
from keras_fastdata._validation import arguments_of, unknown_arguments
from keras_fastdata.building.global_rng import preserved_globals
from keras_fastdata.building.interface import EPOCH_HOOKS
from keras_fastdata.dataset import FastPyDataset
from keras_fastdata.datasets.sampling import for_iterables


def accelerate(dataset: Any, workers: int = 1, **kwargs: Any) -> FastPyDataset:
    """Wraps a Keras dataset so that this package's workers build its batches.

    As with `FastPyDataset`, batches go through shared memory, and each comes
    once, in order, with the same bytes for any number of processes. The
    dataset's class is not changed.

    Args:
        dataset: A `keras.utils.PyDataset` (`keras.utils.Sequence`), such as
            `ImageDataGenerator().flow_from_directory(...)`; or any object
            with `__len__`, and with `__getitem__(index)` that returns a batch.
        workers: See `FastPyDataset`; 0 builds in the caller.
        **kwargs: The other arguments of `FastPyDataset`. For code that draws
            from `np.random`, or runs Python, pass `use_multiprocessing=True`.

    Returns:
        A dataset to pass to `fit` instead. Reading and setting its attributes
        reads and sets those of `dataset`. Call its `mark_changed()` after
        editing `dataset` in place.

    Raises:
        TypeError: `dataset` cannot be indexed or has no length, or an
            argument is unknown or of the wrong type.
        ValueError: An argument is out of range.

    Example:

    >>> import keras
    >>> import numpy as np
    >>> from keras_fastdata import accelerate
    >>> class Old(keras.utils.PyDataset):
    ...     def __len__(self):
    ...         return 3
    ...     def __getitem__(self, index):
    ...         return np.full(2, index)
    >>> with accelerate(Old(), workers=2) as dataset:
    ...     [batch.tolist() for batch in dataset]
    [[0, 0], [1, 1], [2, 2]]
    """
    _check_indexable(dataset)
    allowed = arguments_of(FastPyDataset)
    if unknown := set(kwargs) - set(allowed):
        raise unknown_arguments("accelerate", unknown, allowed)
    hooked = any(_has_hook(dataset, name) for name in EPOCH_HOOKS)
    wrapper = _WrappedWithHooks if hooked else _Wrapped
    return wrapper(dataset, workers=workers, **kwargs)


def _check_indexable(dataset: Any) -> None:
    """Raises `TypeError` for an object that `accelerate` cannot wrap."""
    if isinstance(dataset, type):
        raise TypeError(
            "`dataset` must be a dataset, and not its class. Received the "
            f"class {dataset.__name__}; pass `{dataset.__name__}(...)`."
        )
    if isinstance(dataset, FastPyDataset):
        raise TypeError(
            f"{type(dataset).__name__} is a FastPyDataset already; pass "
            "`workers` and the other arguments to its constructor."
        )
    if not hasattr(dataset, "__getitem__") or not (
        hasattr(dataset, "__len__") or hasattr(dataset, "num_batches")
    ):
        raise TypeError(
            "`dataset` must have `__getitem__(index)`, which returns a batch, "
            f"and `__len__`. Received an object of type "
            f"{type(dataset).__name__}, which lacks one of them: it cannot be "
            "asked for batch 7." + for_iterables("dataset", dataset, "")
        )


def _draw_order(dataset: Any, seed: int | None) -> None:
    """Draws the first order as Keras would draw it for the first batch.

    `seed` counts if Keras's dataset was given none.
    """
    if dataset.seed is not None:
        seed = dataset.seed + dataset.total_batches_seen
    if seed is None:
        dataset._set_index_array()  # noqa: SLF001 - as Keras does
        return
    with preserved_globals():
        np.random.seed(seed % _SEEDS)
        dataset._set_index_array()  # noqa: SLF001 - as Keras does


_SEEDS = 1 << 32  # that `np.random.seed` takes


class _Wrapped(FastPyDataset):
    """A `FastPyDataset` that builds the batches of another dataset."""

    def __init__(self, dataset: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._fastdata_wrapped = dataset
        if _counts_batches(dataset) and dataset.index_array is None:
            _draw_order(dataset, kwargs.get("seed"))

    @property
    def num_batches(self) -> int | None:
        """The number of batches in an epoch of the wrapped dataset."""
        if hasattr(self._fastdata_wrapped, "num_batches"):
            count: int | None = self._fastdata_wrapped.num_batches
            return count
        return len(self._fastdata_wrapped)

    def __len__(self) -> int:
        return len(self._fastdata_wrapped)

    def __getitem__(self, index: int) -> Any:
        dataset = self._fastdata_wrapped
        if _counts_batches(dataset):
            # Worker threads share the dataset, and the count is per batch.
            dataset = copy.copy(dataset)
            dataset.total_batches_seen = (
                answer(self, "epoch") * len(self) + index
            )
        return dataset[index]

    def __getattr__(self, name: str) -> Any:
        # Called if there is no such attribute, also during unpickling.
        dataset = vars(self).get("_fastdata_wrapped")
        if dataset is None or name.startswith("__"):
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}"
            )
        return getattr(dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        dataset = vars(self).get("_fastdata_wrapped")
        # `hasattr` also finds defaults, properties and slots of the class.
        is_there = hasattr(dataset, "__dict__") or hasattr(dataset, name)
        if hasattr(type(self), name) or not is_there:
            super().__setattr__(name, value)
        else:
            setattr(dataset, name, value)
            mark_changed(self)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        if _counts_batches(self._fastdata_wrapped):
            # Only `next` uses it, and a generator cannot be pickled.
            state["_fastdata_wrapped"] = copy.copy(self._fastdata_wrapped)
            state["_fastdata_wrapped"].index_generator = None
        return state


class _WrappedWithHooks(_Wrapped):
    """Wraps a dataset that has epoch hooks, and calls these hooks."""

    def __iter__(self) -> Iterator[Any]:
        # The user may have called hooks of the other dataset.
        mark_changed(self)
        return super().__iter__()

    def on_epoch_begin(self) -> None:
        if _has_hook(self._fastdata_wrapped, "on_epoch_begin"):
            self._fastdata_wrapped.on_epoch_begin()

    def on_epoch_end(self) -> None:
        if _has_hook(self._fastdata_wrapped, "on_epoch_end"):
            self._fastdata_wrapped.on_epoch_end()


def _has_hook(dataset: Any, name: str) -> bool:
    """Returns whether a dataset defines the epoch hook `name`.

    The empty hooks of Keras's `PyDataset` do not count.
    """
    method = getattr(dataset, name, None)
    if method is None:
        return False
    homes = (kind for kind in type(dataset).__mro__ if name in vars(kind))
    home = next(homes, None)
    return home is None or home.__name__ != "PyDataset"


def _counts_batches(dataset: Any) -> bool:
    """Returns whether a dataset counts its batches, as Keras's iterators do."""
    return all(
        hasattr(dataset, name)
        for name in ("total_batches_seen", "index_array", "_set_index_array")
    )
