"""
Title: Streaming compressed text files with generators
Author: keras_fastdata contributors
Date created: 2026/11/21
Last modified: 2026/11/21
Description: Read files without an index in several processes, each line once.
Accelerator: None
"""

"""
## Introduction

Logs, exports and crawls are often compressed text. The position of line 7,000
is unknown, so a worker cannot read that line alone. A generator is the natural
reader. But if several processes run the same generator, every line comes
several times, and stock Keras does not notice.

`GeneratorDataset` runs one generator per shard in the workers, tells each its
share of the files, and lets them take turns. Every line comes once, in an order
that depends only on the seed and the number of shards, even if a worker dies.
"""

"""
## Setup

The data are scikit-learn's handwritten digits, as lines of JSON in compressed
files.
"""

import gzip
import json
import sys
import tempfile
import time
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits

from keras_fastdata import GeneratorDataset

FILES = 8
LINES = 3000  # in a file
EPOCHS = 3

digits = load_digits()
pixels = digits.images.astype("uint8")
for_training = len(pixels) * 4 // 5

"""
## Write the files

Each line has the image of a digit, moved a little, and its label.
"""


def write_files(folder):
    """Writes compressed files of lines, and returns their paths."""
    rng = np.random.default_rng(0)
    paths = []
    for number in range(FILES):
        path = folder / f"digits-{number}.jsonl.gz"
        with gzip.open(path, "wt", compresslevel=1) as file:
            for index in rng.integers(for_training, size=LINES):
                image = np.roll(pixels[index], rng.integers(-1, 2, 2), (0, 1))
                digit = {
                    "image": image.tolist(),
                    "label": int(digits.target[index]),
                }
                file.write(json.dumps(digit) + "\n")
        paths.append(path)
    return paths


"""
## Define the generator

It reads its share of the files, in a new random order for every epoch. It
receives `rng` because it has a parameter of that name.
"""


class Lines:
    """Makes generators of images and labels from lines of JSON."""

    def __init__(self, paths):
        self.paths = paths

    def __call__(self, shard_index, num_shards, rng):
        mine = self.paths[shard_index::num_shards]
        for place in rng.permutation(len(mine)):
            with gzip.open(mine[place], "rt") as file:
                for line in file:
                    digit = json.loads(line)
                    image = np.array(digit["image"], "float32") / 16
                    yield image, digit["label"]


"""
## Train

The number of batches is not given: an epoch ends with the files. The generators
decide the order, hence `shuffle=False`.
"""


def make_model():
    model = keras.Sequential(
        [
            keras.Input((8, 8)),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(5e-3),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def train(paths, **places):
    """Trains a model; returns its accuracy on other digits, and the time."""
    keras.utils.set_random_seed(1)
    model = make_model()
    with GeneratorDataset(
        Lines(paths), batch_size=200, num_shards=2, seed=1, **places
    ) as dataset:
        began = time.perf_counter()
        model.fit(dataset, epochs=EPOCHS, shuffle=False, verbose=0)
        took = time.perf_counter() - began
    x = pixels[for_training:] / np.float32(16)
    _, accuracy = model.evaluate(x, digits.target[for_training:], verbose=0)
    return accuracy, took


"""
## Look at the result

The batches are the same in both cases, byte for byte; two processes read them
in less time.
"""

with tempfile.TemporaryDirectory() as folder:
    paths = write_files(Path(folder))
    results = {
        "in the caller": train(paths, workers=0),
        "in two processes": train(paths, workers=2, use_multiprocessing=True),
    }

for where, (accuracy, took) in results.items():
    print(f"{where:18} {took:5.1f} s  accuracy {accuracy:.1%}")

worst = min(accuracy for accuracy, _ in results.values())
if worst < 0.85:
    sys.exit(f"An accuracy is {worst:.0%}; both should be 85% or more.")
