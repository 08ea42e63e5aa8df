"""
Title: One model on two devices
Author: keras_fastdata contributors
Date created: 2026/11/21
Last modified: 2026/11/21
Description: Data parallel training with one dataset.
Accelerator: GPU, if there are two
"""

"""
## Introduction

In data parallel training every device has a copy of the model and gets a part
of each batch. With `keras.distribution` in one process, Keras splits the
batches, and the dataset does not change: the same workers build for both
devices. (With several processes, each takes its shard of the batches:
`shard="auto"`.)

This example runs on JAX. If there are not two devices, JAX splits the CPU in
two.
"""

"""
## Setup
"""

import os
import sys

os.environ["KERAS_BACKEND"] = "jax"
flags = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=2"

import keras
import numpy as np
from sklearn.datasets import load_digits

from keras_fastdata import ArrayDataset, LoaderHealth

"""
## Prepare the data

`transform` runs in the workers, on one batch at a time. Here it moves digits by
up to a pixel, at random in every epoch. Every batch must split evenly among the
devices, so a smaller last one is dropped.
"""

images, labels = load_digits(return_X_y=True)
images = (images / 16).reshape(-1, 8, 8, 1).astype("float32")


def moved(x, y, rng):
    return np.roll(x, rng.integers(-1, 2, size=2), axis=(1, 2)), y


"""
## Train on one device, and on two
"""


def train(devices):
    if devices > 1:
        keras.distribution.set_distribution(
            keras.distribution.DataParallel(
                devices=keras.distribution.list_devices()[:devices],
                auto_shard_dataset=False,
            )
        )
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.01),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    health = LoaderHealth(verbose=0)
    with ArrayDataset(
        images,
        labels,
        batch_size=64,
        drop_remainder=True,
        transform=moved,
        workers=2,
        use_multiprocessing=True,
        seed=1,
    ) as dataset:
        history = model.fit(dataset, epochs=10, verbose=0, callbacks=[health])
    kernel = model.layers[0].kernel.value
    print(
        f"{len(kernel.devices())} device(s): "
        f"loss {history.history['loss'][-1]:.4f}, "
        f"accuracy {history.history['accuracy'][-1]:.1%}; "
        f"{health.summary().verdict.kind}"
    )
    return history.history["loss"]


alone, together = train(1), train(2)

"""
## The result

The batches and their order are the same, so the losses agree up to rounding.
"""

apart = np.abs(np.subtract(alone, together)).max()
print(f"The losses of the epochs differ by {apart:.1e} at most.")
if apart > 0.01:
    sys.exit("Two devices should reach the losses of one.")
