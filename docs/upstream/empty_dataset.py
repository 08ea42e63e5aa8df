"""On JAX and PyTorch, `fit` waits for ever for a dataset of length 0."""

import os
import threading

os.environ.setdefault("KERAS_BACKEND", "jax")
import keras


class Empty(keras.utils.PyDataset):
    def __len__(self):
        return 0

    def __getitem__(self, index):
        raise IndexError(index)


def still_waiting():
    print("The dataset is empty; 6 s later `fit` still waits.", flush=True)
    os._exit(0)


threading.Timer(6, still_waiting).start()
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
try:
    model.fit(Empty(workers=2), verbose=0)
finally:
    print("Mended: `fit` ends if a dataset is empty.", flush=True)
    os._exit(1)
