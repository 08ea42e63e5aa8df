"""Datasets that are resumed, and the training that is killed.

    python resume_samples.py DIRECTORY KIND PLACE DIE_AFTER SAVE_FREQ EPOCHS

trains, notes every batch and kills itself after so many (0: never); with
DIES_AT=saving in the environment, before the weights of that moment are saved.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys

import numpy as np

from keras_fastdata import EndOfData, FastPyDataset

PLACES = {
    "inline": {"workers": 0},
    "2 threads": {"workers": 2},
    "2 processes": {"workers": 2, "use_multiprocessing": True},
    "3 spawned": {
        "workers": 3,
        "use_multiprocessing": True,
        "start_method": "spawn",
    },
}


class Drawn(FastPyDataset):
    """Batches of `self.rng`; their index comes first."""

    def __init__(self, length=7, **kwargs):
        super().__init__(**kwargs)
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        x = self.rng.random((4, 3), "float32")
        x[:, 0] = index
        return x, x.sum(axis=1, keepdims=True)


class Reshuffled(Drawn):
    """The commonest idiom: an index that is shuffled in `on_epoch_end`."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.order = np.arange(4 * self.length)
        self.notes = {"epochs": 0, "kinds": {"a", "b"}}

    def __getitem__(self, index):
        x = self.rng.random((4, 3), "float32")
        x[:, 1] = self.order[4 * index : 4 * index + 4]
        return x, x.sum(axis=1, keepdims=True)

    def on_epoch_end(self):
        np.random.shuffle(self.order)
        self.notes["epochs"] += 1


class Counted:
    """Counts, and keeps what it has counted."""

    def __init__(self):
        self.count, self.numbers = 0, []

    def add(self, number):
        self.count += 1
        self.numbers.append(number)


class Keeping(Drawn):
    """Shuffles an index, and keeps all kinds of things while it builds."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.order = np.arange(self.length)
        self.buffer = np.zeros(2)
        self.count = 0
        self.cache = {}
        self.file = None
        self.counted = Counted()

    def __getitem__(self, index):
        number = self.order[index]
        self.buffer[:] = number
        self.count += 1
        if number not in self.cache:
            self.cache[number] = str(number)
        if self.file is None:
            self.file = {"open": True}
        self._count(number)
        return self.buffer

    def _count(self, number):
        self.counted.add(number)

    def on_epoch_end(self):
        np.random.shuffle(self.order)


class Repairing(Drawn):
    """Shuffles an index, and replaces an item of it while it builds."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.order = np.arange(self.length)

    def __getitem__(self, index):
        if self.order[index] == 5:
            self.order[index] = 0
        return self.order[[index]]

    def on_epoch_end(self):
        self._shuffle()

    def _shuffle(self):
        np.random.shuffle(self.order)


class FailsOnce(Drawn):
    """Raises an error in place of one batch of one epoch."""

    where = None  # the numbers of the epoch and of the batch

    def __getitem__(self, index):
        if (self.epoch, index) == self.where:
            raise ValueError("on purpose")
        return super().__getitem__(index)


class Spoiled(Reshuffled):
    """The last batch of its epochs cannot be built."""

    def __getitem__(self, index):
        if index == self.length - 1:
            raise ValueError("on purpose")
        return super().__getitem__(index)


class Shrinks(Drawn):
    """Each epoch is shorter by a batch; a file is opened on first use."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.file = None

    def __getitem__(self, index):
        if self.file is None:
            self.file = open(os.devnull)  # noqa: SIM115
        self.opened = True
        return super().__getitem__(index)

    def on_epoch_end(self):
        self.length -= 1


class Ends(Drawn):
    """Nobody knows how long it is."""

    num_batches = None

    def __getitem__(self, index):
        if index == self.length:
            raise EndOfData
        return super().__getitem__(index)


class Begun(Reshuffled):
    """It shuffles in both hooks."""

    def on_epoch_begin(self):
        self.order = self.rng.permutation(self.order)


KINDS = {
    kind.__name__: kind for kind in (Drawn, Reshuffled, Begun, Shrinks, Ends)
}


def digest(x):
    return hashlib.sha256(np.asarray(x, "float32").tobytes()).hexdigest()[:16]


def train(directory, kind, place, die_after, save_freq, epochs):
    import keras

    from keras_fastdata import DatasetCheckpoint
    from keras_fastdata.keras_bridge import FastPyDatasetAdapter

    dataset = KINDS[kind](seed=5, **PLACES[place])
    # `keras.utils.set_random_seed` would import TensorFlow on any backend.
    weights = keras.initializers.GlorotUniform(seed=1)
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(1, kernel_initializer=weights)]
    )
    model.compile(
        keras.optimizers.SGD(1e-4, momentum=0.5),
        "mse",
        steps_per_execution=int(os.environ.get("STEPS_PER_EXECUTION", 1)),
    )

    standardize = FastPyDatasetAdapter._standardize_batch

    def noting(adapter, batch):
        notes.write(f"{digest(batch[0])}\n")
        notes.flush()
        return standardize(adapter, batch)

    class Dies(keras.callbacks.Callback):
        """Behind the checkpoints, so that they have saved."""

        def on_train_begin(self, logs=None):
            self.count = 0
            # What is fetched from now on is trained on.
            FastPyDatasetAdapter._standardize_batch = noting

        def on_train_batch_end(self, batch, logs=None):
            self.count += 1
            if self.count == die_after and at != "saving":
                os.kill(os.getpid(), 9)  # SIGKILL, where it has a name

    class Counts(keras.callbacks.Callback):
        """Before the checkpoints."""

        def on_train_begin(self, logs=None):
            self.count = 0

        def on_train_batch_end(self, batch, logs=None):
            self.count += 1

    counts = Counts()
    at = os.environ.get("DIES_AT")
    save_weights = keras.callbacks.BackupAndRestore._save_model

    def save(backup):
        if counts.count == die_after and at == "saving":
            os.kill(os.getpid(), 9)  # SIGKILL, where it has a name
        save_weights(backup)

    keras.callbacks.BackupAndRestore._save_model = save

    freq = save_freq if save_freq == "epoch" else int(save_freq)
    backup = keras.callbacks.BackupAndRestore(
        f"{directory}/backup", save_freq=freq
    )
    checkpoint = DatasetCheckpoint(f"{directory}/data.json", save_freq=freq)
    with dataset, open(f"{directory}/batches", "w") as notes:
        model.fit(
            dataset,
            epochs=epochs,
            verbose=0,
            callbacks=[counts, backup, checkpoint, Dies()],
        )
    weights = [w.tolist() for w in model.get_weights()]
    with open(f"{directory}/weights.json", "w") as file:
        json.dump(weights, file)


if __name__ == "__main__":
    directory, kind, place, die_after, save_freq, epochs = sys.argv[1:]
    train(directory, kind, place, int(die_after), save_freq, int(epochs))
