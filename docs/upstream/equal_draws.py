"""Worker processes draw the same numbers from `np.random`."""

import multiprocessing
import signal
import sys

import keras
import numpy as np

both_build = multiprocessing.get_context("fork").Barrier(2)


class Data(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        if multiprocessing.parent_process():  # a batch for each worker
            both_build.wait(20)
        return np.random.rand(1, 1)


signal.alarm(25)  # ends the script if a forked worker is blocked
multiprocessing.set_start_method("fork", force=True)  # Linux, up to 3.13
model = keras.Sequential([keras.Input((1,)), keras.layers.Identity()])
data = Data(workers=2, use_multiprocessing=True)
first, second = model.predict(data, verbose=0)[:, 0]
print(f"Two workers drew {first} and {second}.")
sys.exit(0 if first == second else "Mended: workers draw other numbers.")
