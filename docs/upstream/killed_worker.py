"""`fit` waits for ever if a worker process is killed."""

import os
import threading

import keras
import numpy as np


class Data(keras.utils.PyDataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index == 3:  # as Linux does when memory is short
            os.kill(os.getpid(), 9)
        return np.zeros((1, 1)), np.zeros((1, 1))


def still_waiting():
    print("A worker was killed; 6 s later `fit` still waits.", flush=True)
    os._exit(0)


threading.Timer(6, still_waiting).start()
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
try:
    model.fit(Data(workers=2, use_multiprocessing=True), verbose=0)
finally:
    print("Mended: `fit` ends after a worker was killed.", flush=True)
    os._exit(1)
