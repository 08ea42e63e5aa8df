"""With workers, each epoch ends with a pause of 0.1 s."""

import sys
import time

import keras
import numpy as np


class Data(keras.utils.PyDataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return np.zeros((1, 1)), np.zeros((1, 1))


class Clock(keras.callbacks.Callback):
    pauses = []

    def on_train_batch_end(self, batch, logs=None):
        self.end = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.pauses.append(time.perf_counter() - self.end)


model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(Data(workers=2), epochs=9, callbacks=[Clock()], verbose=0)
print(f"Pauses of {min(Clock.pauses):.2f} s or more after the last batch.")
sys.exit(0 if min(Clock.pauses) > 0.09 else "Mended: there is no pause.")
