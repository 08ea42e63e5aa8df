"""`predict` waits for ever if `__getitem__` forgets to return a batch."""

import os
import threading

import keras
import numpy as np


class Data(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index != 2:
            return np.zeros((1, 1))


def still_waiting():
    print("A batch is None; 6 s later `predict` still waits.", flush=True)
    os._exit(0)


threading.Timer(6, still_waiting).start()
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
try:
    model.predict(Data(workers=2), verbose=0)
finally:
    print("Mended: `predict` ends if a batch is None.", flush=True)
    os._exit(1)
