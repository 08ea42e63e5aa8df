"""
Title: A training loop of your own, in JAX
Author: keras_fastdata contributors
Date created: 2026/11/21
Last modified: 2026/11/21
Description: `for batch in dataset` without Keras's `fit`.
Accelerator: GPU, if there is one
"""

"""
## Introduction

A dataset can be used without `fit`: `for batch in dataset` is one epoch. The
workers build its batches, which are NumPy arrays. JAX dispatches steps: while
the device computes one step, the loop fetches the next batch.

The workers generate the sounds of this example. They are new in every epoch.
"""

"""
## Setup
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from keras_fastdata import FastPyDataset

EPOCHS = 4
BATCH = 64
LENGTH = 1024  # samples of a sound
CLASSES = ("sine", "square", "noise")

"""
## Define the dataset

Batch `index` is a function of the seed, the epoch and `index`: `self.rng` is a
generator for this batch, whichever worker builds it. `self.empty` makes an
array in the shared memory of the batch.
"""


class Sounds(FastPyDataset):
    """Waves of random pitch and loudness, with their class."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        label = self.rng.integers(len(CLASSES), size=BATCH)
        pitch = self.rng.uniform(0.02, 0.2, (BATCH, 1))
        phase = self.rng.uniform(0, 2 * np.pi, (BATCH, 1))
        wave = np.sin(pitch * np.arange(LENGTH) + phase)
        wave[label == 1] = np.sign(wave[label == 1])
        wave[label == 2] = self.rng.normal(size=(np.sum(label == 2), LENGTH))
        wave *= self.rng.uniform(0.2, 1, (BATCH, 1))
        sounds = self.empty((BATCH, LENGTH), "float32")
        sounds[...] = wave + self.rng.normal(0, 0.05, wave.shape)
        return sounds, label


"""
## Define the model: a spectrum, and two layers
"""


def predict(weights, sounds):
    spectrum = jnp.abs(jnp.fft.rfft(sounds))
    spectrum = spectrum / jnp.sum(spectrum, axis=1, keepdims=True)
    spectrum = jnp.sort(spectrum, axis=1)[:, ::-1][:, :64]
    hidden = jax.nn.relu(10 * spectrum @ weights["first"])
    return hidden @ weights["second"]


def loss_of(weights, sounds, labels):
    scores = jax.nn.log_softmax(predict(weights, sounds))
    return -jnp.mean(jnp.take_along_axis(scores, labels[:, None], axis=1))


@jax.jit
def step(weights, sounds, labels):
    loss, slopes = jax.value_and_grad(loss_of)(weights, sounds, labels)
    weights = jax.tree.map(lambda w, slope: w - 0.5 * slope, weights, slopes)
    return weights, loss


"""
## Train, and look at the result
"""

keys = jax.random.split(jax.random.key(0))
weights = {
    "first": jax.random.normal(keys[0], (64, 32)) / 8,
    "second": jax.random.normal(keys[1], (32, len(CLASSES))) / 6,
}

with Sounds(workers=2, use_multiprocessing=True, seed=1) as sounds:
    for epoch in range(EPOCHS):
        losses = []
        for batch in sounds:
            weights, loss = step(weights, *batch)
            losses.append(loss)
        print(f"epoch {epoch + 1}: loss {float(np.mean(losses)):.3f}")
    right = [np.asarray(predict(weights, x).argmax(1)) == y for x, y in sounds]

accuracy = np.mean(right)
print(f"accuracy on new sounds: {accuracy:.1%}")
if accuracy < 0.85:
    sys.exit("An accuracy of 85% or more should be reached.")
