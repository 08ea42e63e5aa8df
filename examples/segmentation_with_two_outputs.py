"""
Title: Segmentation with named inputs and two outputs
Author: keras_fastdata contributors
Date created: 2026/11/21
Last modified: 2026/11/21
Description: Make batches that are nested dicts from single samples.
Accelerator: GPU, if there is one
"""

"""
## Introduction

Models with several inputs and outputs need batches that are dicts of arrays.
`SampleDataset` makes them: `get_sample` returns one sample, in the nested
structure that the model needs. Each array is copied once, into the shared
memory of the batch.

Here a model finds a dark disc on a cut-out of a photograph, and says which
photograph it is. A second input gives the darkness of the disc.
"""

"""
## Setup
"""

import sys

import keras
import numpy as np
from sklearn.datasets import load_sample_images

from keras_fastdata import SampleDataset

SIDE = 32
EPOCHS = 3

keras.utils.set_random_seed(1)
photographs = load_sample_images().images

"""
## Define the samples

The draws of `self.rng` depend on the epoch and the sample: each epoch has new
discs, the same for any number of workers.
"""


class Discs(SampleDataset):
    """Cut-outs of photographs with a disc on each."""

    def __init__(self, photographs, num_samples, **kwargs):
        super().__init__(**kwargs)
        self.photographs = photographs
        self.num_samples = num_samples

    def get_sample(self, index):
        number = index % len(self.photographs)
        photograph = self.photographs[number]
        top = self.rng.integers(photograph.shape[0] - SIDE)
        left = self.rng.integers(photograph.shape[1] - SIDE)
        image = photograph[top : top + SIDE, left : left + SIDE] / 255
        radius = self.rng.uniform(5, 12)
        x, y = self.rng.uniform(8, SIDE - 8, 2)
        rows, columns = np.mgrid[:SIDE, :SIDE]
        mask = np.hypot(rows - y, columns - x) < radius
        darkness = self.rng.uniform(0.5, 0.9)
        image[mask] *= 1 - darkness
        inputs = {
            "image": image.astype("float32"),
            "darkness": np.float32([darkness]),
        }
        targets = {
            "mask": mask[..., np.newaxis].astype("float32"),
            "photograph": number,
        }
        return inputs, targets


"""
## Define the model

Its inputs and outputs have the names that the samples use.
"""


def make_model():
    image = keras.Input((SIDE, SIDE, 3), name="image")
    darkness = keras.Input((1,), name="darkness")
    x = keras.layers.Conv2D(16, 5, 2, padding="same", activation="relu")(image)
    gate = keras.layers.Dense(16, activation="sigmoid")(darkness)
    x = x * keras.layers.Reshape((1, 1, 16))(gate)
    x = keras.layers.Conv2D(32, 3, padding="same", activation="relu")(x)
    mask = keras.layers.Conv2DTranspose(
        1, 4, 2, padding="same", activation="sigmoid", name="mask"
    )(x)
    whole = keras.layers.GlobalAveragePooling2D()(x)
    photograph = keras.layers.Dense(1, activation="sigmoid")(whole)
    model = keras.Model(
        {"image": image, "darkness": darkness},
        {"mask": mask, "photograph": photograph},
    )
    model.compile(
        keras.optimizers.Adam(5e-3),
        loss={
            "mask": "binary_crossentropy",
            "photograph": "binary_crossentropy",
        },
        metrics={
            "mask": keras.metrics.BinaryIoU([1], name="iou"),
            "photograph": keras.metrics.BinaryAccuracy(name="accuracy"),
        },
    )
    return model


"""
## Train, and look at the result

IoU is the area common to disc and mask, divided by the area of their union.
"""

model = make_model()
with Discs(
    photographs, 2560, batch_size=64, workers=2, use_multiprocessing=True
) as discs:
    model.fit(discs, epochs=EPOCHS, verbose=2)

with Discs(photographs, 320, batch_size=64, seed=0, workers=0) as others:
    found = model.evaluate(others, return_dict=True, verbose=0)
print(f"IoU of the masks: {found['mask_iou']:.2f}")
print(f"photographs recognized: {found['photograph_accuracy']:.1%}")

if found["mask_iou"] < 0.4 or found["photograph_accuracy"] < 0.8:
    sys.exit("Discs should be found, and photographs recognized.")
