"""A model whose steps take a known time, on each backend.

Where steps are dispatched asynchronously (JAX), so is this time.
"""

from __future__ import annotations

import time

import keras
import numpy as np


class Sleeps(keras.layers.Layer):
    """Scales its inputs by a weight; each forward pass takes `seconds`."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def build(self, shape):
        self.scale = self.add_weight(shape=(1,), initializer="ones")

    def call(self, inputs):
        return self._after_a_nap(inputs) * self.scale

    def _after_a_nap(self, inputs):
        match keras.backend.backend():
            case "jax":
                import jax

                like = jax.ShapeDtypeStruct(inputs.shape, inputs.dtype)
                held = jax.lax.stop_gradient(inputs)
                return jax.pure_callback(self._nap, like, held)
            case "tensorflow":
                import tensorflow as tf

                held = tf.stop_gradient(inputs)
                slept = tf.numpy_function(self._nap, [held], inputs.dtype)
                slept.set_shape(inputs.shape)
                return slept
            case _:
                time.sleep(self.seconds)
                return inputs

    def _nap(self, array):
        time.sleep(self.seconds)
        return np.asarray(array)


def model_with_steps_of(seconds, columns=3):
    """A compiled model for batches `x, y` of shape `(n, columns)` each.

    With 0 seconds, its steps take what Keras takes.
    """
    inputs = keras.Input((columns,))
    outputs = (
        Sleeps(seconds)(inputs)
        if seconds
        else keras.layers.Dense(1)(
            keras.layers.Lambda(lambda x: x[:, :1])(inputs)
        )
    )
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    return model
