"""
Title: ImageDataGenerator, accelerated
Author: keras_fastdata contributors
Date created: 2026/11/21
Last modified: 2026/11/21
Description: Run old augmentation code in several processes; change one line.
Accelerator: None
"""

"""
## Introduction

Much code still augments with `ImageDataGenerator`, which Keras keeps for such
code. Its iterators are slow, and Keras's worker processes all augment with the
same random numbers. `accelerate` takes such an iterator, or any other
`keras.utils.PyDataset`, unchanged. This package's workers build its batches,
send them through shared memory, and produce the same bytes for any number of
workers.
"""

"""
## Setup

The images are cut-outs of scikit-learn's two photographs.
"""

import sys
import tempfile
import time
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_sample_images

from keras_fastdata import accelerate

SIDE = 128
IMAGES = 320  # of each photograph
EPOCHS = 2


def write_images(folder, rng):
    """Writes a folder of JPEG files for each photograph."""
    for number, photograph in enumerate(load_sample_images().images):
        place = folder / f"photograph {number}"
        place.mkdir()
        for index in range(IMAGES):
            top = rng.integers(photograph.shape[0] - SIDE)
            left = rng.integers(photograph.shape[1] - SIDE)
            keras.utils.save_img(
                place / f"{index}.jpg",
                photograph[top : top + SIDE, left : left + SIDE],
            )


"""
## The old code
"""


def make_images(folder):
    """Makes batches of augmented images, as code of 2017 did."""
    augment = keras.src.legacy.preprocessing.image.ImageDataGenerator(
        rescale=1 / 255,
        rotation_range=20,
        zoom_range=0.2,
        horizontal_flip=True,
    )
    return augment.flow_from_directory(
        folder,
        target_size=(96, 96),
        batch_size=32,
        class_mode="binary",
        seed=1,
    )


"""
## Train without and with `accelerate`
"""


def train(images):
    """Trains a model; returns the last epoch's accuracy, and the time."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((96, 96, 3)),
            keras.layers.Conv2D(16, 5, strides=4, activation="relu"),
            keras.layers.Conv2D(32, 3, strides=2, activation="relu"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(3e-3), "binary_crossentropy", metrics=["accuracy"]
    )
    model.fit(images, epochs=1, verbose=0)  # compiles, and starts workers
    began = time.perf_counter()
    history = model.fit(images, epochs=EPOCHS, verbose=0)
    return history.history["accuracy"][-1], time.perf_counter() - began


"""
## Look at the result
"""

with tempfile.TemporaryDirectory() as folder:
    write_images(Path(folder), np.random.default_rng(0))
    results = {"as it is": train(make_images(folder))}
    with accelerate(
        make_images(folder), workers=2, use_multiprocessing=True
    ) as images:
        results["accelerated"] = train(images)

for name, (accuracy, took) in results.items():
    print(f"{name:12} {took:5.1f} s  accuracy {accuracy:.1%}")
if min(accuracy for accuracy, _ in results.values()) < 0.7:
    sys.exit("Both should learn to tell the photographs apart.")
