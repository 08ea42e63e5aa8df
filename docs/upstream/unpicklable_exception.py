"""`predict` waits for ever for an exception that pickle cannot restore."""

import multiprocessing
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


model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
thread = threading.Thread(target=model.predict, args=[Data(2, True), None, 0])
thread.start()
thread.join(8)
waits = "still waits" if thread.is_alive() else "has ended (mended)"
print(f"`__getitem__` raised; `predict` {waits}.", flush=True)
for worker in multiprocessing.active_children():
    worker.kill()
os._exit(0 if waits == "still waits" else 1)
