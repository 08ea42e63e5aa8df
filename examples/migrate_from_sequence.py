"""
Title: Migrate from keras.utils.Sequence to FastPyDataset
Author: keras_fastdata contributors
Date created: 2026/11/20
Last modified: 2026/11/20
Description: Change two lines of a Sequence, and time `fit` before and after.
Accelerator: None
"""

"""
## Introduction

`FastPyDataset` replaces `keras.utils.Sequence`, which Keras 3 also calls
`keras.utils.PyDataset`. The methods do not change, nor do `workers`,
`use_multiprocessing` and `max_queue_size`.

This example has two versions of one dataset class. It prints their difference,
trains the same model on both, and prints the times. All figures are measured
when the example runs; expect other figures on another machine.
"""

"""
## Setup

The data are the two photos that come with scikit-learn: a temple and a flower.
The model learns which of them a crop is from.
"""

import difflib
import inspect
import textwrap
import time

import keras
import numpy as np
from sklearn.datasets import load_sample_images

PHOTOS = np.stack(load_sample_images().images)
CROP = 128
BATCH_SIZE = 64
STEPS = 40
EPOCHS = 2

"""
## The work for one image

A random crop is flipped, brightened and changed in contrast at random, and
standardized, all in NumPy.
"""


def random_crop(photo):
    height, width, _ = photo.shape
    top = np.random.randint(height - CROP + 1)
    left = np.random.randint(width - CROP + 1)
    image = photo[top : top + CROP, left : left + CROP].astype("float32")
    if np.random.random() < 0.5:
        image = image[:, ::-1]
    image *= np.random.uniform(0.7, 1.3)
    image += np.random.uniform(-30, 30)
    image -= image.mean()
    image /= image.std() + 1
    return image


"""
## The dataset, before and after

Each version is in a function of its own, with its import, so that both classes
can have the same name in one file.
"""


def before():
    from keras.utils import Sequence

    class Crops(Sequence):
        def __init__(self, photos, steps, **kwargs):
            super().__init__(**kwargs)
            self.photos = photos
            self.steps = steps

        def __len__(self):
            return self.steps

        def __getitem__(self, index):
            labels = np.random.randint(len(self.photos), size=BATCH_SIZE)
            crops = [random_crop(self.photos[label]) for label in labels]
            return np.stack(crops), labels

    return Crops


def after():
    from keras_fastdata import FastPyDataset

    class Crops(FastPyDataset):
        def __init__(self, photos, steps, **kwargs):
            super().__init__(**kwargs)
            self.photos = photos
            self.steps = steps

        def __len__(self):
            return self.steps

        def __getitem__(self, index):
            labels = np.random.randint(len(self.photos), size=BATCH_SIZE)
            crops = [random_crop(self.photos[label]) for label in labels]
            return np.stack(crops), labels

    return Crops


"""
The difference between the two is computed from the code above.
"""


def body(function):
    lines = inspect.getsource(function).splitlines()
    return textwrap.dedent("\n".join(lines[1:])).splitlines()


for line in difflib.unified_diff(
    body(before), body(after), "before", "after", lineterm="", n=1
):
    print(line)

"""
## Train on both

The model is small, so that most of the work is in the dataset. A first `fit` on
two batches compiles the model. The time is that of the whole second `fit`,
including the start of the workers.

Keras's own `use_multiprocessing` forks the training process. If Python or JAX
warns about that, the warning is about the run of the `Sequence`.
"""


def build_model():
    model = keras.Sequential(
        [
            keras.Input((CROP, CROP, 3)),
            keras.layers.Conv2D(16, 8, strides=8, activation="relu"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(1e-2),
        loss="binary_crossentropy",
        metrics=["accuracy"],
    )
    return model


def timed_fit(dataset_class):
    keras.utils.set_random_seed(1)
    options = {"workers": 2, "use_multiprocessing": True}
    model = build_model()
    model.fit(dataset_class(PHOTOS, 2, **options), verbose=0)
    dataset = dataset_class(PHOTOS, STEPS, **options)
    start = time.perf_counter()
    history = model.fit(dataset, epochs=EPOCHS, verbose=0)
    seconds = time.perf_counter() - start
    return seconds, history.history["accuracy"][-1]


versions = {"Sequence": before(), "FastPyDataset": after()}
times = {name: [] for name in versions}
megabytes = BATCH_SIZE * CROP * CROP * 3 * 4 / 1e6
print(f"\n{EPOCHS} epochs of {STEPS} batches, {megabytes:.1f} MB each")
for _ in range(2):
    for name, dataset_class in versions.items():
        seconds, accuracy = timed_fit(dataset_class)
        times[name].append(seconds)
        print(f"{name:14}{seconds:6.1f} s   final accuracy {accuracy:.3f}")

"""
## The result

The faster of the two runs of each version counts.
"""

best = {name: min(seconds) for name, seconds in times.items()}
for name, seconds in best.items():
    rate = EPOCHS * STEPS / seconds
    print(f"{name:14}{seconds:6.1f} s   {rate:5.1f} batches per second")
speed_up = best["Sequence"] / best["FastPyDataset"]
print(f"\nWith FastPyDataset, fit was {speed_up:.1f} times as fast.")
