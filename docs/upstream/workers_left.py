"""Worker processes stay after training that ends amid an epoch."""

import gc
import multiprocessing
import os
import time

import keras
import numpy as np


class Data(keras.utils.PyDataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return np.zeros((1, 1)), np.zeros((1, 1))


class Stop(keras.callbacks.Callback):  # as TerminateOnNaN does
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = True


model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
stop = [Stop()]
model.fit(Data(workers=2, use_multiprocessing=True), callbacks=stop, verbose=0)
gc.collect()
time.sleep(2)
left = multiprocessing.active_children()
print(f"{len(left)} workers are left 2 s after `fit`.", flush=True)
os._exit(0 if left else 1)
