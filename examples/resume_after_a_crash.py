"""
Title: Going on after a crash
Author: keras_fastdata contributors
Date created: 2026/11/21
Last modified: 2026/11/21
Description: A killed training goes on with the batches it had not seen.
Accelerator: None
"""

"""
## Introduction

`keras.callbacks.BackupAndRestore` brings back weights, optimizer and epoch
after a crash, but not the data: with `save_freq=N` the epoch begins anew, and
some batches are trained on twice. `DatasetCheckpoint` beside it saves where the
data stands. The rest of the epoch follows, with the bytes it would have had,
also with another number of workers.

This script trains twice, in processes of its own: undisturbed, and killed in
the middle of an epoch and started again. Both come to the same weights.
"""

"""
## Setup
"""

import os
import signal
import subprocess
import sys
import tempfile

import keras
import numpy as np

from keras_fastdata import DatasetCheckpoint, FastPyDataset

EPOCHS = 3
SAVE_FREQ = 10  # batches

"""
## Define the dataset

It draws and shuffles, as training data does. The seed makes a run repeatable.
"""


class Noisy(FastPyDataset):
    """Samples of a line, with noise that is another one in every epoch."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.order = np.arange(50 * 32)

    def __len__(self):
        return 50

    def __getitem__(self, index):
        rows = self.order[32 * index : 32 * index + 32]
        x = np.stack([rows / 1600, self.rng.normal(size=32)], axis=1)
        return x.astype("float32"), x[:, :1].astype("float32") * 3 - 1

    def on_epoch_end(self):
        np.random.shuffle(self.order)


"""
## Train

The two callbacks save at the same moments, the one for the data behind that for
the model. `dies_after` is what happens to the best of us.
"""


class Dies(keras.callbacks.Callback):
    """Kills the process after so many batches."""

    def __init__(self, after):
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder, dies_after=0, **settings):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    with Noisy(seed=1, **settings) as dataset:
        model.fit(
            dataset,
            epochs=EPOCHS,
            verbose=0,
            callbacks=[
                keras.callbacks.BackupAndRestore(
                    os.path.join(folder, "model"), save_freq=SAVE_FREQ
                ),
                DatasetCheckpoint(
                    os.path.join(folder, "data.json"), save_freq=SAVE_FREQ
                ),
                Dies(dies_after),
            ],
        )
        state = dataset.state_dict()
    print(f"  ended in epoch {state['epoch']}: ", end="")
    print([f"{weight:.6f}" for weight in np.ravel(model.get_weights()[0])])


"""
## Undisturbed, and killed after 73 batches

That is in the second epoch of 50. The second run of the two has four worker
processes where the first built its batches inline.
"""


def run(folder, dies_after, workers):
    """Trains in a process of its own; returns its exit status."""
    arguments = [folder, str(dies_after), str(workers)]
    done = subprocess.run([sys.executable, __file__, *arguments], check=False)
    return done.returncode


def main():
    with tempfile.TemporaryDirectory() as folder:
        print("undisturbed", flush=True)
        assert run(folder, 0, 0) == 0
    with tempfile.TemporaryDirectory() as folder:
        print("killed after 73 batches", flush=True)
        assert run(folder, 73, 0) == -signal.SIGKILL
        print("and again", flush=True)
        assert run(folder, 0, 4) == 0


if len(sys.argv) > 1:
    directory, after, workers = sys.argv[1:]
    train(
        directory,
        int(after),
        workers=int(workers),
        use_multiprocessing=workers != "0",
    )
else:
    main()

"""
## Conclusion

The weights agree to the last digit. Hooks such as `on_epoch_end` are seeded:
those of the epochs gone by are run again when the data is restored, and if the
dataset is not what it was then, it is an error. For a loop of your own,
`dataset.state_dict()` and `dataset.load_state_dict(state)` do the same.
"""
