"""
Title: Image classification from files with FastPyDataset
Author: keras_fastdata contributors
Date created: 2026/11/20
Last modified: 2026/11/20
Description: Read and augment PNG files in worker processes, and train on them.
Accelerator: None
"""

"""
## Introduction

A `FastPyDataset` is used like a `keras.utils.PyDataset`: it has a length, and
`dataset[i]` is batch `i`. It differs in how batches reach the model. Here two
worker processes open the image files, augment them, and write the batches into
memory that they share with the training process.

The images are the 1,797 handwritten digits that come with scikit-learn, so
nothing is downloaded. The example runs on any Keras backend, and it needs no
GPU and no `if __name__ == "__main__"`.
"""

"""
## Setup
"""

import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from keras_fastdata import FastPyDataset, LoaderHealth

# Seeds the weights, the order of the batches and the augmentation.
keras.utils.set_random_seed(42)

"""
## Write the images to files

There is a folder for each class, and a small grayscale PNG for each digit.
scikit-learn has gray levels from 0 to 16.
"""

folder = tempfile.TemporaryDirectory()

digits = load_digits()
paths = []
for number, (image, label) in enumerate(
    zip(digits.images, digits.target, strict=True)
):
    path = Path(folder.name, str(label), f"{number:04}.png")
    path.parent.mkdir(exist_ok=True)
    gray = np.minimum(image * 16, 255).astype("uint8")
    Image.fromarray(gray).save(path)
    paths.append(path)

train_paths, validation_paths = train_test_split(
    paths, test_size=0.2, stratify=digits.target, random_state=42
)
print(f"{len(train_paths)} files to train on")
print(f"{len(validation_paths)} files to validate on")

"""
## Define the dataset

`__getitem__` runs in the workers. All its random numbers come from `self.rng`,
a NumPy generator that belongs to the batch: the draws differ from batch to
batch and from epoch to epoch, and do not depend on which worker makes them.

`on_epoch_end` runs in the training process, before the first epoch and after
each one. The new order of the files reaches the workers before they build the
next batch.
"""


class DigitFiles(FastPyDataset):
    def __init__(self, paths, batch_size, augment=False, **kwargs):
        super().__init__(**kwargs)
        self.paths = list(paths)
        self.batch_size = batch_size
        self.augment = augment

    def __len__(self):
        return -(-len(self.paths) // self.batch_size)

    def __getitem__(self, index):
        start = index * self.batch_size
        paths = self.paths[start : start + self.batch_size]
        images = np.stack([self.read(path) for path in paths])
        if self.augment:
            images += self.rng.normal(0, 0.05, images.shape)
        labels = np.array([int(path.parent.name) for path in paths])
        return images, labels

    def read(self, path):
        with Image.open(path) as file:
            image = file.resize((16, 16), Image.Resampling.BICUBIC)
        if self.augment:
            image = image.rotate(
                self.rng.uniform(-12, 12),
                Image.Resampling.BILINEAR,
                translate=tuple(self.rng.uniform(-1.5, 1.5, 2)),
            )
        return np.asarray(image, "float32")[..., None] / 255

    def on_epoch_end(self):
        if self.augment:
            np.random.shuffle(self.paths)


train_data = DigitFiles(
    train_paths,
    batch_size=96,
    augment=True,
    workers=2,
    use_multiprocessing=True,
)
validation_data = DigitFiles(
    validation_paths, batch_size=180, workers=2, use_multiprocessing=True
)

"""
## Build the model
"""

EPOCHS = 12

model = keras.Sequential(
    [
        keras.Input((16, 16, 1)),
        keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(128, 3, padding="same", activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.4),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
model.compile(
    optimizer=keras.optimizers.Adam(
        keras.optimizers.schedules.CosineDecay(3e-3, EPOCHS * len(train_data))
    ),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
)

"""
## Train

`LoaderHealth` adds `data_wait` to the logs, the share of the epoch that
training spent waiting for batches, and says after each epoch whether data or
compute is the bottleneck.
"""

model.fit(
    train_data,
    validation_data=validation_data,
    epochs=EPOCHS,
    callbacks=[LoaderHealth()],
    verbose=2,
)

"""
## Look at the result

Batches arrive in order, so the predictions line up with `validation_paths`. The
first row shows the first four digits, the second row the four that the model
is least sure of.
"""

probabilities = model.predict(validation_data, verbose=0)
predicted = probabilities.argmax(axis=-1)
true = np.array([int(path.parent.name) for path in validation_paths])


def draw(path):
    """Returns the image as lines of text; bright pixels are dense letters."""
    with Image.open(path) as file:
        levels = np.asarray(file) // 26
    return ["".join(" .:-=+*#%@"[level] * 2 for level in row) for row in levels]


least_sure = np.argsort(probabilities.max(axis=-1))
for four in (range(4), least_sure[:4]):
    drawings = [draw(validation_paths[i]) for i in four]
    captions = [f"true {true[i]}, predicted {predicted[i]}" for i in four]
    for line in [*zip(*drawings, strict=True), captions]:
        print("".join(f"{part:22}" for part in line).rstrip())
    print()

accuracy = np.mean(predicted == true)
print(f"{np.sum(predicted != true)} of {len(true)} digits are misread.")
print(f"Final validation accuracy: {accuracy:.2%}")

"""
The workers end, and the files are deleted, when the program ends. In a
notebook, which goes on, do both yourself.
"""

train_data.close()
validation_data.close()
folder.cleanup()

if accuracy < 0.97:
    sys.exit(
        f"Validation accuracy is {accuracy:.2%}; it should be 97% or more."
    )
