"""
Title: Resume training after a crash
Author: keras_fastdata contributors
Date created: 2026/11/21
Last modified: 2026/11/21
Description: A killed training goes on with the batches it had not seen.
Accelerator: None
"""

"""
## Introduction

`keras.callbacks.BackupAndRestore` restores weights, optimizer and epoch after a
crash, but not the position in the data: with `save_freq=N` the epoch begins
again, and some batches are trained on twice. `DatasetCheckpoint` also saves the
position in the data. After a restart, the rest of the epoch follows with the
same bytes as without the crash, also with another number of workers.

This script trains twice, in separate processes: once undisturbed, and once
killed within an epoch and started again. Both runs end with the same weights.
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

It draws random numbers and shuffles. The seed makes a run repeatable.
"""


class Noisy(FastPyDataset):
    """Samples of a line, with new noise in every epoch."""

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

The two callbacks save at the same moments. `DatasetCheckpoint` comes after
`BackupAndRestore` in the list. `dies_after` simulates a crash.
"""


class Dies(keras.callbacks.Callback):
    """Kills the process after a number of batches."""

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

Batch 73 is in the second epoch of 50 batches. The first run builds its batches
inline; the run after the crash has four worker processes.
"""


def run(folder, dies_after, workers):
    """Trains in a new process; returns its exit status."""
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

The weights agree to the last digit. Hooks such as `on_epoch_end` are seeded.
Restoring a position runs the hooks of past epochs again; if the dataset then
differs from what it was, an error is raised. In a loop of your own, use
`dataset.state_dict()` and `dataset.load_state_dict(state)`.
"""
