"""The dataset that Keras gets on TensorFlow: our own, or one of `tf.data`.

Imported only where TensorFlow is the Keras backend.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_fastdata.keras_bridge.batches import IteratorBatches
from keras_fastdata.keras_bridge.conversions import for_tensorflow
from keras_fastdata.keras_bridge.keras_internals import (
    Feature,
    has,
    is_keras_step,
    trainer_at_work,
)
from keras_fastdata.keras_bridge.tensorflow_iterator import (
    Consumer,
    DirectDataset,
    feeds_directly,
)

if TYPE_CHECKING:
    from keras_fastdata.keras_bridge.adapter import FastPyDatasetAdapter

_FUNCTIONS = {"fit": "train_function", "evaluate": "test_function"}


def make_dataset(adapter: FastPyDatasetAdapter, signature: Any) -> Any:
    """Makes the dataset that an adapter gives to Keras.

    Args:
        adapter: The adapter.
        signature: The nested `tf.TypeSpec`s of a batch.
    """
    # TensorFlow keeps these functions for ever, in its default graph. They
    # must not keep the dataset, and with it the workers. Keras's EpochIterator
    # keeps the adapter during training.
    reference = weakref.ref(adapter)

    def plain() -> Any:
        dataset = tf.data.Dataset.from_generator(
            lambda: _ForTensorFlow(_alive(reference)),
            output_signature=signature,
        )
        # The workers prefetch; `tf.data` must not.
        options = tf.data.Options()
        options.autotune.enabled = False
        options.threading.private_threadpool_size = 1
        return dataset.with_options(options)

    if not feeds_directly(signature) or not _walks_itself():
        return plain()
    return DirectDataset(
        signature,
        lambda: IteratorBatches(_alive(reference)),
        adapter.early_end.put_aside,
        plain,
        _consumer,
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
            return keras.tree.map_structure(for_tensorflow, next(self._batches))
        except StopIteration:
            raise
        except BaseException as error:
            if not self._early_end.put_aside(error):
                raise
            raise StopIteration from None


def _consumer() -> Consumer:
    """Describes what takes the batches of the epoch that Keras begins."""
    name, trainer = trainer_at_work()
    living = weakref.ref(trainer)

    def is_eager() -> bool:
        trainer = living()
        return (
            trainer is None
            or trainer.run_eagerly
            or tf.config.functions_run_eagerly()
        )

    function = getattr(trainer, _FUNCTIONS.get(name, ""), None)
    if function is None:
        # For a prediction, or to build a model, Keras asks for a batch itself.
        return Consumer(True, False, is_eager)
    return Consumer(
        is_keras_step(function),
        trainer.steps_per_execution == 1,
        is_eager,
    )


def _walks_itself() -> bool:
    """Whether Keras iterates over a dataset itself, in Python.

    A strategy of `tf.distribute` would turn the dataset into a graph.
    """
    if not has(Feature.DIRECT_FEED):
        return False
    _, trainer = trainer_at_work()
    return (
        trainer is not None
        and not tf.distribute.has_strategy()
        and trainer.distribute_strategy is tf.distribute.get_strategy()
    )


def _alive(
    reference: weakref.ref[FastPyDatasetAdapter],
) -> FastPyDatasetAdapter:
    adapter = reference()
    if adapter is None:
        raise ReferenceError("the Keras data adapter has been collected")
    return adapter
