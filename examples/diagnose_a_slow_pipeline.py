"""
Title: Diagnose a slow input pipeline
Author: keras_fastdata contributors
Date created: 2026/11/20
Last modified: 2026/11/20
Description: Ask LoaderHealth why training waits, and follow its advice.
Accelerator: None
"""

"""
## Introduction

Is data the bottleneck, and what can be done about it? `LoaderHealth` measures
every batch and every training step. After each epoch it says why training
waited, what to change, and how much faster training could be at most.

The dataset of this example is of a common kind: it reads small files from slow
storage, one after the other, in one thread. All figures are measured when the
example runs; expect other figures on another machine.
"""

"""
## Setup

The data are handwritten digits, each in a file of its own. The files are on a
local disk; a pause per file simulates a network.
"""

import tempfile
import time
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits

from keras_fastdata import FastPyDataset, LoaderHealth

keras.utils.set_random_seed(0)

ROUND_TRIP_S = 0.002  # per file, as through a network
BATCH_SIZE = 32

folder = Path(tempfile.mkdtemp())
digits, labels = load_digits(return_X_y=True)
digits, labels = digits[:1280], labels[:1280]
for number, digit in enumerate(digits):
    np.save(folder / f"{number}.npy", digit.astype("uint8").reshape(8, 8, 1))

"""
## A slow dataset
"""


class Digits(FastPyDataset):
    """Batches of 32 digits, read from their files."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.labels = labels

    def __len__(self):
        return len(self.labels) // BATCH_SIZE

    def __getitem__(self, index):
        numbers = range(index * BATCH_SIZE, (index + 1) * BATCH_SIZE)
        images = [self.read(folder / f"{number}.npy") for number in numbers]
        return np.stack(images).astype("float32") / 16, self.labels[numbers]

    def read(self, path):
        time.sleep(ROUND_TRIP_S)
        return np.load(path)


def make_model():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        "adam",
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


"""
## Why does training wait?

`fit` takes one more callback. The line after each epoch says how much of it was
spent waiting; the last lines say why, and what to change.
"""

slow = LoaderHealth()
with Digits(workers=1) as dataset:
    make_model().fit(dataset, epochs=3, verbose=2, callbacks=[slow])

before = slow.summary()
assert before.verdict.kind == "io_bound"

"""
Builds wait for files, and waiting needs no core. So more threads help, on a
machine of any size. More threads than advised do no harm here, because waiting
costs nothing.

## The change

To see what each worker did and when, pass `report="health.html"` (it needs the
extra `report`: `pip install 'keras-fastdata[report]'`), or `trace="trace.json"`
for https://ui.perfetto.dev.
"""

quick = LoaderHealth()
with Digits(workers=16, max_queue_size=32) as dataset:
    make_model().fit(dataset, epochs=3, verbose=2, callbacks=[quick])

after = quick.summary()

"""
## The gain

The gain is at most `1 / (1 - data_wait)`: no dataset can make an epoch quicker
than its steps.
"""

epoch_before, epoch_after = before.epochs[-1], after.epochs[-1]
gain = epoch_before.wall_s / epoch_after.wall_s
print(f"{'':10}{'one thread':>14}{'16 threads':>14}")
for name, show in {
    "epoch": lambda e: f"{e.wall_s:.2f} s",
    "data wait": lambda e: f"{e.data_wait:.0%}",
    "verdict": lambda e: str(e.verdict.kind),
}.items():
    print(f"{name:10}{show(epoch_before):>14}{show(epoch_after):>14}")
print(
    f"{gain:.1f} times faster; at most "
    f"{epoch_before.verdict.ceiling_speedup:.1f} times was predicted."
)
