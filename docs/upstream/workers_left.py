"""Worker processes stay after training that ends amid an epoch."""

import gc
import multiprocessing
import os
import signal
import time

import keras
import numpy as np


class Data(keras.utils.PyDataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return np.zeros((1, 1)), np.full((1, 1), np.nan)


signal.alarm(25)  # ends the script if a forked worker is blocked
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
stop = [keras.callbacks.TerminateOnNaN()]
model.fit(Data(workers=2, use_multiprocessing=True), callbacks=stop, verbose=0)
gc.collect()
time.sleep(2)
left = multiprocessing.active_children()
print(f"{len(left)} workers are left 2 s after `fit`.", flush=True)
for worker in left:
    worker.kill()
os._exit(0 if left else 1)
