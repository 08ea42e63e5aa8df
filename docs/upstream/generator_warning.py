"""Keras warns that data ran out where nobody asked for more of it."""

import sys
import warnings

import keras
import numpy as np


def batches():
    for _ in range(3):
        yield np.zeros((1, 1)), np.zeros((1, 1))


model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model.fit(batches(), verbose=0)
for warning in caught:
    if "ran out of data" in str(warning.message):
        print(f"No argument asked for more batches. {warning.message}")
        sys.exit(0)
sys.exit("Mended: no warning.")
