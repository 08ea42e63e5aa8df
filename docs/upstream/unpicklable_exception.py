"""`predict` waits for ever for an exception that pickle cannot restore."""

import os
import threading

import keras
import numpy as np


class BadSample(Exception):
    def __init__(self, path, reason):
        super().__init__(path)  # all that pickle passes to __init__


class Data(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        if index < 2:
            return np.zeros((1, 1))
        raise BadSample("2.png", "empty")


def still_waiting():
    print("`__getitem__` raised; 6 s later `predict` waits.", flush=True)
    os._exit(0)


threading.Timer(6, still_waiting).start()
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
try:
    model.predict(Data(workers=2, use_multiprocessing=True), verbose=0)
finally:
    print("Mended: `predict` ends when `__getitem__` raises.", flush=True)
    os._exit(1)
