"""On TensorFlow, an exception arrives as another, of dozens of lines."""

import os
import sys

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
import keras
import numpy as np


class Data(keras.utils.PyDataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 4:
            raise FileNotFoundError("/data/4.png")
        return np.zeros((1, 1)), np.zeros((1, 1))


model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
try:
    model.fit(Data(workers=2), verbose=0)
except FileNotFoundError:
    sys.exit("Mended: `except FileNotFoundError` gets the exception.")
except Exception as error:
    lines = len(str(error).splitlines())
    print(f"A FileNotFoundError became {type(error).__name__}, {lines} lines.")
