"""Keras removes the cause of an exception."""

import sys

import keras
import numpy as np


class Reader(keras.callbacks.Callback):
    def on_predict_begin(self, logs=None):
        try:
            open("/data/3.png")
        except OSError as error:
            raise ValueError("sample 3 cannot be read") from error


model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
try:
    model.predict(np.zeros((1, 1)), callbacks=[Reader()], verbose=0)
except ValueError as error:
    print(f"Raised from FileNotFoundError; the cause is {error.__cause__}.")
    sys.exit("Mended: the cause is there." if error.__cause__ else 0)
