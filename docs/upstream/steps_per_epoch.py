"""With workers and `steps_per_epoch`, some batches never come."""

import sys

import keras
import numpy as np

seen = []


class Model(keras.Model):
    def call(self, x):
        return x

    def train_step(self, *arguments):  # with its state first, on JAX
        *state, batch = arguments
        seen.append(int(keras.tree.flatten(batch)[0][0, 0]))
        return ({"loss": 0.0}, *state) if state else {"loss": 0.0}


class Data(keras.utils.PyDataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return np.full((1, 1), index)


model = Model()
model(np.zeros((1, 1)))  # so that Keras takes no batch to build it
model.compile("sgd", run_eagerly=True)
steps = {"epochs": 10, "steps_per_epoch": 10, "shuffle": False, "verbose": 0}
model.fit(Data(workers=2), **steps)
print(f"10 x 10 steps over 100 batches had {len(set(seen))} of them.")
sys.exit(0 if len(set(seen)) < 100 else "Mended: each batch came once.")
