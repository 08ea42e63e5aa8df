"""The first batches of every `fit` are built twice, and thrown away once."""

import sys

import keras
import numpy as np


class Data(keras.utils.PyDataset):
    built = 0

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.built += 1
        return np.zeros((1, 1)), np.zeros((1, 1))


model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
data = Data()
model.fit(data, verbose=0)
print(f"An epoch of {len(data)} batches built {data.built}.")
sys.exit(0 if data.built > 4 else "Mended: each batch is built once.")
