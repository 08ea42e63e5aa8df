"""After a `fit` that was resumed, the next `fit` of the model is too short."""

import sys
import tempfile

import keras
import numpy as np

x = np.zeros((6, 1))
folder = tempfile.mkdtemp()


class Crash(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise KeyboardInterrupt


def resumable(*callbacks):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    backup = keras.callbacks.BackupAndRestore(folder)
    model.fit(x, x, epochs=3, callbacks=[backup, *callbacks], verbose=0)
    return model


try:
    resumable(Crash())
except KeyboardInterrupt:
    epochs = resumable().fit(x, x, epochs=3, verbose=0).epoch
    print(f"The second `fit`, of 3 epochs, had the epochs {epochs}.")
    sys.exit(0 if epochs == [2] else "Mended: it has all epochs.")
