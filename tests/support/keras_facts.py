"""What the installed Keras does, where versions of it differ."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest

# It builds a model on JAX without beginning an epoch, takes
# `steps_per_execution` on PyTorch, and warns of missing batches only where
# `steps_per_epoch` asked for them.
IS_316 = tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 16)


with_steps_per_execution = pytest.mark.skipif(
    keras.backend.backend() == "torch" and not IS_316,
    reason="Keras refuses it on PyTorch",
)


class _Counted(keras.utils.PyDataset):
    """Counts what is fetched; a stock dataset that builds nothing ahead."""

    fetched = 0

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.fetched += 1
        return np.zeros((2, 1)), np.zeros((2, 1))


@functools.cache
def fetches_ahead():
    """Whether Keras has a batch before its step is due, of our datasets too.

    It does so on JAX: up to 3.14, and later on accelerators.
    """
    if keras.backend.backend() != "jax":
        return False
    dataset, seen = _Counted(), []
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    looking = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(dataset.fetched)
    )
    model.fit(dataset, shuffle=False, callbacks=[looking], verbose=0)
    for_the_model = seen[-1] - len(dataset)  # to build what is compiled
    return seen[0] - for_the_model > 1
