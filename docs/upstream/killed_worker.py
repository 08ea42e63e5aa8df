"""`fit` and `predict` wait for ever if a worker process is killed."""

import multiprocessing
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
        return np.zeros((1, 1))


model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
data = Data(workers=2, use_multiprocessing=True)
thread = threading.Thread(target=model.predict, args=[data, None, 0])
thread.start()
thread.join(8)
waits = "still waits" if thread.is_alive() else "has ended (mended)"
print(f"A worker was killed; `predict` {waits}.", flush=True)
for worker in multiprocessing.active_children():
    worker.kill()
os._exit(0 if waits == "still waits" else 1)
