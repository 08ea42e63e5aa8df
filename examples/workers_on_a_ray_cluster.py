"""
Title: Workers on a Ray cluster
Author: keras_fastdata contributors
Date created: 2026/11/21
Last modified: 2026/11/21
Description: Build batches on other machines, with one argument.
Accelerator: GPU, if there is one
"""

"""
## Introduction

If the machine with the accelerator has too few cores, workers can be Ray actors
on other machines: `executor="ray"`. Order, seeds, bytes, tracebacks, restarts
and `LoaderHealth` are the same as with local workers.

This script starts a Ray of its own on this machine. For a cluster, start Ray
(`ray start --head` on one machine, `ray start --address=...` on others), run
the script on one of its machines, and pass the address:

    ray_options={"address": "10.0.0.1:6379"}

Ray can send the script's modules and packages to machines that lack them:

    ray_options={
        "address": "10.0.0.1:6379",
        "runtime_env": {"working_dir": ".", "pip": ["keras-fastdata"]},
    }
"""

"""
## Setup
"""

import sys

import keras
import numpy as np
from sklearn.datasets import load_sample_images

from keras_fastdata import FastPyDataset, LoaderHealth

PHOTOGRAPHS = np.stack(load_sample_images().images)
SIZE = 64

"""
## Define the dataset

The model learns which of two photographs a crop is from. Crops are rotated at
random. Batches are uint8, because they go through a network, and float32 would
have four times the bytes; the model scales them. Each machine has the
photographs in memory once.
"""


class Crops(FastPyDataset):
    def __init__(self, photographs, **kwargs):
        super().__init__(**kwargs)
        self.photographs = photographs

    def __len__(self):
        return 40

    def __getitem__(self, index):
        labels = self.rng.integers(len(self.photographs), size=32)
        crops = self.empty((32, SIZE, SIZE, 3), "uint8")
        for crop, label in zip(crops, labels, strict=True):
            photograph = self.photographs[label]
            top, left = self.rng.integers(
                np.subtract(photograph.shape[:2], SIZE)
            )
            piece = photograph[top : top + SIZE, left : left + SIZE]
            crop[...] = np.rot90(piece, self.rng.integers(4))
        return crops, labels


"""
## Train
"""


def train(**workers):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((SIZE, SIZE, 3)),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Conv2D(16, 5, strides=4, activation="relu"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(2, activation="softmax"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.02),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    health = LoaderHealth(verbose=0)
    with Crops(PHOTOGRAPHS, workers=2, seed=1, **workers) as dataset:
        history = model.fit(dataset, epochs=6, verbose=0, callbacks=[health])
    print(f"{workers}: {health.summary().verdict}")
    return history.history


on_ray = train(executor="ray")
here = train(use_multiprocessing=True)

"""
## The result
"""

print(f"accuracy: {on_ray['accuracy'][-1]:.1%}")
if not np.allclose(on_ray["loss"], here["loss"], rtol=1e-5):
    sys.exit("Workers on Ray should build the same batches as local ones.")
if on_ray["accuracy"][-1] < 0.8:
    sys.exit("An accuracy of 80% or more should be reached.")
