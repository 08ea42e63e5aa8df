"""Makes the dataset that Keras gets on the TensorFlow backend.

Imported only where TensorFlow is the Keras backend.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from keras_fastdata.keras_bridge.batches import IteratorBatches, writable
from keras_fastdata.keras_bridge.keras_internals import (
    Feature,
    get_tensor_spec,
    has,
    is_keras_step,
    trainer_at_work,
)
from keras_fastdata.keras_bridge.tensorflow_iterator import (
    DirectIterator,
    TensorBatches,
    TensorSource,
    strings_as_tensors,
)

if TYPE_CHECKING:
    from keras_fastdata.keras_bridge.adapter import FastPyDatasetAdapter

_FUNCTIONS = {"fit": "train_function", "evaluate": "test_function"}


def signature_of(batches: list[Any]) -> Any:
    """Returns the nested `tf.TypeSpec`s that describe the batches."""
    return get_tensor_spec(
        keras.tree.map_structure(strings_as_tensors, batches)
    )


def _converted(leaf: Any) -> Any:
    """Converts a leaf of a batch to a type that `from_generator` accepts.

    With a strategy of `tf.distribute`, TensorFlow writes results of a step into
    arrays of the batch. So those of a cache or a read-only file are copied.
    """
    if leaf is None:
        return tf.experimental.Optional.empty(None)
    leaf = writable(leaf)
    if type(leaf).__module__.startswith("scipy.sparse"):
        entries = leaf.tocoo()
        indices = np.stack((entries.row, entries.col), axis=1)
        return tf.SparseTensor(indices, entries.data, entries.shape)
    return strings_as_tensors(leaf)


def make_dataset(adapter: FastPyDatasetAdapter, signature: Any) -> Any:
    """Makes the dataset that an adapter gives to Keras.

    `signature` is the nested `tf.TypeSpec`s of a batch.
    """
    dataset = DirectDataset(adapter, signature)
    _, trainer = trainer_at_work()
    # A strategy of `tf.distribute` would turn the dataset into a graph.
    if (
        has(Feature.DIRECT_FEED)
        and all(type(s) is tf.TensorSpec for s in tf.nest.flatten(signature))
        and trainer is not None
        and not tf.distribute.has_strategy()
        and trainer.distribute_strategy is tf.distribute.get_strategy()
    ):
        return dataset
    return dataset.plain()


class DirectDataset:
    """The dataset that Keras gets in place of a `tf.data.Dataset`.

    Making a `tf.data.Dataset` takes 13 ms, and TensorFlow never frees it.
    """

    def __init__(
        self, adapter: FastPyDatasetAdapter, element_spec: Any
    ) -> None:
        self.element_spec = element_spec
        # TensorFlow keeps generators for ever, in its default graph. They must
        # not keep the dataset, and with it the workers. Keras's EpochIterator
        # keeps the adapter during training.
        self._adapter = weakref.ref(adapter)

    def __iter__(self) -> Iterator[Any]:
        name, trainer = trainer_at_work()
        function = getattr(trainer, _FUNCTIONS.get(name, ""), None)
        if function is not None and not is_keras_step(function):
            plain: Iterator[Any] = iter(self.plain())
            return plain
        adapter = _alive(self._adapter)
        source = TensorSource(IteratorBatches(adapter), self.element_spec)
        if function is not None and trainer.steps_per_execution == 1:
            is_eager = functools.partial(_is_eager, weakref.ref(trainer))
            return TensorBatches(source, is_eager)
        # For a prediction, or to build a model, Keras requests nested tensors.
        return DirectIterator(source, adapter.early_end.put_aside)

    def plain(self) -> tf.data.Dataset:
        """Makes a `tf.data.Dataset` with the same batches as this dataset."""
        reference = self._adapter
        dataset = tf.data.Dataset.from_generator(
            lambda: _ForTensorFlow(_alive(reference)),
            output_signature=self.element_spec,
        )
        # The workers prefetch; `tf.data` must not.
        options = tf.data.Options()
        options.autotune.enabled = False
        options.threading.private_threadpool_size = 1
        return dataset.with_options(options)


def _is_eager(reference: weakref.ref[Any]) -> bool:
    """Returns whether a model currently runs its steps without a graph."""
    model = reference()
    return (
        model is None or model.run_eagerly or tf.config.functions_run_eagerly()
    )


class _ForTensorFlow(Iterator[Any]):
    """Iterates over batches for `from_generator`, in a TensorFlow thread.

    TensorFlow turns an exception into a long text. So the exception is kept,
    the data ends early, and the adapter raises the exception when Keras
    reports the end of the epoch. Outside of Keras's epochs nobody would raise
    it: there it passes through TensorFlow.
    """

    def __init__(self, adapter: FastPyDatasetAdapter) -> None:
        self._batches = IteratorBatches(adapter)
        self._early_end = adapter.early_end

    def __next__(self) -> Any:
        try:
            return keras.tree.map_structure(_converted, next(self._batches))
        except StopIteration:
            raise
        except BaseException as error:
            if not self._early_end.put_aside(error):
                raise
            raise StopIteration from None


def _alive(
    reference: weakref.ref[FastPyDatasetAdapter],
) -> FastPyDatasetAdapter:
    adapter = reference()
    if adapter is None:
        raise ReferenceError("the Keras data adapter has been collected")
    return adapter
