"""
Title: Tables in HDF5, with class weights
Author: keras_fastdata contributors
Date created: 2026/11/21
Last modified: 2026/11/21
Description: Train on rows of an HDF5 file without loading all of it.
Accelerator: None
"""

"""
## Introduction

A table that is larger than memory lies in an HDF5 file. `ArrayDataset` takes
the open HDF5 datasets. Every worker opens the file itself, and reads the rows
of a batch in ascending order, which is fast in HDF5, whatever their order in
the batch.

The classes are of unequal size, so `fit` receives class weights, as with any
other dataset.
"""

"""
## Setup

The data are scikit-learn's wines: thirteen measurements of each, and its
grower, one of three. The table has each wine about a hundred times, with a
little noise, but few wines of one grower.
"""

import sys
import tempfile
from pathlib import Path

import h5py
import keras
import numpy as np
from sklearn.datasets import load_wine

from keras_fastdata import ArrayDataset

EPOCHS = 3

keras.utils.set_random_seed(1)


def write_table(path, rng):
    """Writes measurements and growers, in random order."""
    wines = load_wine()
    rare = wines.target == 2
    shares = np.where(rare, 0.05, 1.0)
    rows = rng.choice(len(shares), 20_000, p=shares / shares.sum())
    x = wines.data[rows] * rng.normal(1, 0.05, (len(rows), 13))
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=x.astype("float32"), chunks=(256, 13))
        file["y"] = wines.target[rows].astype("int32")


"""
## Train

`shuffle=True` shuffles rows, in a new order every epoch. `transform` works on a
whole batch, in the workers.
"""


class Standardize:
    """Scales columns to mean 0 and deviation 1."""

    def __init__(self, x):
        self.mean, self.deviation = x.mean(0), x.std(0)

    def __call__(self, x, y):
        return (x - self.mean) / self.deviation, y


def train(path, class_weight):
    """Trains on the first rows; returns each grower's recall on the rest."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((13,)), keras.layers.Dense(3, activation="softmax")]
    )
    model.compile(
        keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy"
    )
    with h5py.File(path) as file:
        x, y = file["x"], file["y"]
        standardize = Standardize(x[:2000])
        with ArrayDataset(
            x,
            y,
            batch_size=128,
            shuffle=True,
            transform=standardize,
            workers=2,
            use_multiprocessing=True,
            seed=1,
        ) as rows:
            model.fit(rows, epochs=EPOCHS, class_weight=class_weight, verbose=0)
        inputs, truth = standardize(x[:5000], y[:5000])
    guess = model.predict(inputs, verbose=0).argmax(1)
    return [float(np.mean(guess[truth == k] == k)) for k in range(3)]


"""
## Look at the result

With weights that are inverse to the sizes of the classes, the rare class is
found more often.
"""

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "wines.h5"
    write_table(path, np.random.default_rng(0))
    with h5py.File(path) as file:
        counts = np.bincount(file["y"][:], minlength=3)
    weights = {k: float(counts.mean() / counts[k]) for k in range(3)}
    plain = train(path, None)
    weighted = train(path, weights)

print(f"{'wines':>17}", *(f"{count:>8,}" for count in counts))
print(f"{'recall, unweighted':>17}", *(f"{share:8.1%}" for share in plain))
print(f"{'weighted':>17}", *(f"{share:8.1%}" for share in weighted))

if weighted[2] < max(0.8, plain[2]):
    sys.exit("Class weights should help to find the rare wines.")
