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


def model_with_steps_of(seconds):
    """A compiled model for batches of float32 `x, y` of three columns each."""
    inputs = keras.Input((3,))
    model = keras.Model(inputs, Sleeps(seconds)(inputs))
    model.compile("sgd", "mse")
    return model


def model_of_the_first_column(columns, dtype):
    """A compiled model that hardly looks at its inputs."""
    inputs = keras.Input((columns,), dtype=dtype)
    first = keras.layers.Lambda(
        lambda x: keras.ops.cast(x[:, :1], "float32"), output_shape=(1,)
    )(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(first))
    model.compile("sgd", "mse")
    return model
