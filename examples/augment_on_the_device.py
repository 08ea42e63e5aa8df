"""
Title: Augment on the device, and send fewer bytes to it
Author: keras_fastdata contributors
Date created: 2026/11/21
Last modified: 2026/11/21
Description: Send uint8 images to the model and let its first layers augment.
Accelerator: GPU, if there is one
"""

"""
## Introduction

Reading and decoding is work for the workers. Augmentation can run on the device
that trains: an image in uint8 has a quarter of the bytes of one in float32, and
the device flips, brightens and rescales it in almost no time. Augmentation
layers run on every Keras backend, only during training, and are saved with the
model.

Here a model learns which of two photographs a small cut-out is from. It is
trained twice: the workers augment in NumPy, or the model augments.
"""

"""
## Setup

The photographs come with scikit-learn. Cut-outs from their left four fifths are
for training, cut-outs from the right for validation.
"""

import sys
import time

import keras
import numpy as np
from sklearn.datasets import load_sample_images

from keras_fastdata import LoaderHealth, SampleDataset

SIDE = 96
EPOCHS = 5

keras.utils.set_random_seed(1)
photographs = load_sample_images().images
border = photographs[0].shape[1] * 4 // 5

"""
## Define the samples

`get_sample` makes one sample; `SampleDataset` makes batches of them.
`self.rng` is the sample's own generator: its draws depend on the epoch and the
sample, not on the worker or the batch.
"""


class CutOuts(SampleDataset):
    """Pieces of photographs, and the number of the photograph."""

    def __init__(self, photographs, num_samples, augment, **kwargs):
        super().__init__(**kwargs)
        self.photographs = photographs
        self.num_samples = num_samples
        self.augment = augment

    def get_sample(self, index):
        label = index % len(self.photographs)
        photograph = self.photographs[label]
        height, width, _ = photograph.shape
        top = self.rng.integers(height - SIDE)
        left = self.rng.integers(width - SIDE)
        image = photograph[top : top + SIDE, left : left + SIDE]
        if self.augment:
            image = image.astype("float32") / 255
            if self.rng.random() < 0.5:
                image = image[:, ::-1]
            image = image + self.rng.uniform(-0.2, 0.2)
            contrast = self.rng.uniform(0.8, 1.2)
            image = (image - image.mean()) * contrast + image.mean()
            image = np.clip(image, 0, 1)
        return image, label


def cut_outs(augment):
    """A dataset to train on."""
    return CutOuts(
        [photograph[:, :border] for photograph in photographs],
        num_samples=1280,
        augment=augment,
        batch_size=64,
        shuffle=True,
        workers=2,
        use_multiprocessing=True,
    )


"""
## Define the model

With `augment`, its first layers augment in place of the workers.
"""


def make_model(augment):
    layers = []
    if augment:
        layers = [
            keras.layers.Rescaling(1 / 255),
            keras.layers.RandomFlip("horizontal"),
            keras.layers.RandomBrightness(0.2, value_range=(0, 1)),
            keras.layers.RandomContrast(0.2, value_range=(0, 1)),
        ]
    model = keras.Sequential(
        [
            keras.Input((SIDE, SIDE, 3), dtype="uint8" if augment else None),
            *layers,
            keras.layers.Conv2D(16, 5, strides=4, activation="relu"),
            keras.layers.Conv2D(32, 3, strides=2, activation="relu"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(3e-3),
        "binary_crossentropy",
        metrics=["accuracy"],
    )
    return model


"""
## Train both ways

Validation images are uint8 in both cases. They are rescaled here if the model
does not do so.
"""

validation = CutOuts(
    [photograph[:, border:] for photograph in photographs],
    num_samples=256,
    augment=False,
    batch_size=64,
    seed=0,
)
x_validation, y_validation = map(np.concatenate, zip(*validation, strict=True))
validation.close()

results = {}
for where in ("workers", "model"):
    in_workers = where == "workers"
    model = make_model(augment=not in_workers)
    health = LoaderHealth(verbose=0)
    with cut_outs(augment=in_workers) as dataset:
        began = time.perf_counter()
        model.fit(dataset, epochs=EPOCHS, callbacks=[health], verbose=0)
        took = time.perf_counter() - began
    x = x_validation / np.float32(255) if in_workers else x_validation
    _, accuracy = model.evaluate(x, y_validation, verbose=0)
    last = health.summary().epochs[-1]
    results[where] = {
        "MB a batch": last.nbytes / last.batches / 1e6,
        "ms to build one": last.build_s_p50 * 1e3,
        "s in all": took,
        "accuracy": accuracy,
    }

"""
## Look at the result

The bytes and the workers' time are saved in any case. How much faster training
becomes depends on what it was waiting for.
"""

print(f"{'augmented in the':18}", *(f"{name:>16}" for name in results["model"]))
for where, figures in results.items():
    print(f"{where:18}", *(f"{value:16.2f}" for value in figures.values()))

worst = min(figures["accuracy"] for figures in results.values())
if worst < 0.85:
    sys.exit(f"An accuracy is {worst:.0%}; both should be 85% or more.")
