"""`predict` waits for ever if `__getitem__` raises `queue.Empty`."""

import os
import queue
import threading

import keras
import numpy as np


class Data(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        if index == 2:
            queue.Queue().get(timeout=0.1)  # such as a slow camera's
        return np.zeros((1, 1))


def still_waiting():
    print("`__getitem__` raised; 6 s later `predict` waits.", flush=True)
    os._exit(0)


threading.Timer(6, still_waiting).start()
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
try:
    model.predict(Data(workers=2), verbose=0)
finally:
    print("Mended: `predict` ends after `queue.Empty`.", flush=True)
    os._exit(1)
