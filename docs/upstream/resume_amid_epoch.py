"""A training that resumes amid an epoch trains on its first batches again."""

import sys
import tempfile

import keras
import numpy as np

x = np.zeros((6, 1))
folder = tempfile.mkdtemp()


def fit(*callbacks):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    backup = keras.callbacks.BackupAndRestore(folder, save_freq=1)
    model.fit(x, x, 1, callbacks=[backup, *callbacks], verbose=0)
    return int(model.optimizer.iterations)


class Crash(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            raise KeyboardInterrupt


try:
    fit(Crash())
except KeyboardInterrupt:
    print(f"An epoch of 6 batches, resumed after 4, took {(n := fit())} steps.")
    sys.exit(0 if n > 6 else "Mended: the epoch goes on where it was.")
