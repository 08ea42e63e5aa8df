"""
Title: Ten reasons why training waits, and what helps
Author: keras_fastdata contributors
Date created: 2026/11/22
Last modified: 2026/11/22
Description: Each verdict of LoaderHealth, before and after a change.
Accelerator: None
"""

"""
## Introduction

`LoaderHealth` names one of ten reasons. This example has a small dataset for
each of them, changes one thing, trains again, and prints what the change has
brought. It takes about a minute. All figures are measured when it runs: on a
busy machine, or on one with many cores, some verdicts will be others.
"""

"""
## Setup

A step of the model takes next to no time. A callback makes it as long as the
situation needs.
"""

import functools
import logging
import os
import tempfile
import time
from typing import NamedTuple

import keras
import numpy as np

from keras_fastdata import FastPyDataset, LoaderHealth

logging.getLogger("keras_fastdata").setLevel(logging.ERROR)  # of lost workers
BATCH = np.ones((4, 3), "float32"), np.ones((4, 1), "float32")


class Step(keras.callbacks.Callback):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(self.seconds)


def compute(seconds):
    """Runs Python code for so much CPU time."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        sum(range(200))


"""
## The datasets

Each of them spends its time in another way.
"""


class Ready(FastPyDataset):
    def __init__(self, length=30, seconds=0.0, **kwargs):
        super().__init__(**kwargs)
        self.length = length
        self.seconds = seconds

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.spend_time(index)
        return BATCH

    def spend_time(self, index):
        """What a batch costs."""


class Waiting(Ready):
    def spend_time(self, index):
        time.sleep(self.seconds)


class Computing(Ready):
    def spend_time(self, index):
        compute(self.seconds)


class Straggling(Ready):
    def spend_time(self, index):
        time.sleep(0.3 if index % 13 == 12 else 0.001)


class Shuffling(Waiting):
    """Shuffles in a hook: no batch is built before the hook has run."""

    def on_epoch_end(self):
        self.order = np.random.permutation(self.length)


class Strided(Ready):
    """Returns a view with large strides, which is slow to copy."""

    side = 2048

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.images = np.ones((self.side, 64 * self.side), "uint8")[:, ::64].T

    def __getitem__(self, index):
        return self.images, np.ones((self.side, 1), "float32")


class Contiguous(Strided):
    """Puts the values side by side once, rather than in every batch."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.images = np.ascontiguousarray(self.images)


class Crashing(Ready):
    """Ends its process over every fourth batch, the first time."""

    def __init__(self, folder, **kwargs):
        super().__init__(**kwargs)
        self.folder = folder

    def spend_time(self, index):
        mark = f"{self.folder}/{self.epoch}-{index}"
        if index % 4 == 3 and not os.path.exists(mark):
            open(mark, "w").close()
            os._exit(3)


"""
## Ten situations

Each has a dataset before and after a change of one thing, and the length of a
training step.
"""


class Situation(NamedTuple):
    verdict: str
    change: str
    before: functools.partial
    after: functools.partial
    step_s: float = 0.002


call = functools.partial
PROCESS = {"workers": 1, "use_multiprocessing": True}
PROCESSES = {"workers": 2, "use_multiprocessing": True}
folder = tempfile.TemporaryDirectory()

SITUATIONS = [
    Situation(
        "compute_bound",
        "none: 4 threads in place of 1",
        call(Ready, workers=1),
        call(Ready, workers=4),
        step_s=0.02,
    ),
    Situation(
        "io_bound",
        "16 threads in place of 1",
        call(Waiting, seconds=0.02, workers=1),
        call(Waiting, seconds=0.02, workers=16, max_queue_size=32),
    ),
    Situation(
        "build_cpu_bound",
        "2 processes in place of 1",
        call(Computing, seconds=0.015, **PROCESS),
        call(Computing, seconds=0.015, **PROCESSES),
    ),
    Situation(
        "gil_bound",
        "2 processes in place of 2 threads",
        call(Computing, seconds=0.01, workers=2),
        call(Computing, seconds=0.01, **PROCESSES),
    ),
    Situation(
        "cores_full",
        'cache="memory"',
        call(Computing, seconds=0.02, **PROCESSES),
        call(Computing, seconds=0.02, cache="memory", **PROCESSES),
    ),
    Situation(
        "transfer_bound",
        "a contiguous array",
        call(Strided, length=12, **PROCESS),
        call(Contiguous, length=12, **PROCESS),
        step_s=0.0,
    ),
    Situation(
        "stragglers",
        "4 threads, so that one can be late",
        call(Straggling, workers=1),
        call(Straggling, workers=4, max_queue_size=20),
        step_s=0.02,
    ),
    Situation(
        "late_start",
        "shuffle=True in place of a hook",
        call(Shuffling, seconds=0.2, workers=8),
        call(Waiting, seconds=0.2, workers=8, shuffle=True),
        step_s=0.027,
    ),
    Situation(
        "too_few_batches",
        "24 smaller batches in place of 3",
        call(Shuffling, seconds=0.4, length=3, workers=8),
        call(Shuffling, seconds=0.05, length=24, workers=8),
    ),
    Situation(
        "unstable_workers",
        "the crash is repaired",
        call(Crashing, folder.name, max_worker_restarts=1000, **PROCESSES),
        call(Ready, **PROCESSES),
    ),
]


"""
## Training

The figures are those of the later epochs: the first one also starts workers,
compiles, and fills a cache.
"""


def make_model():
    inputs = keras.Input((None,))
    first = keras.layers.Lambda(lambda x: x[:, :1], output_shape=(1,))(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(first))
    model.compile("sgd", "mse")
    return model


def figures_of(make_dataset, step_s):
    health = LoaderHealth(verbose=0)
    with make_dataset() as dataset:
        callbacks = [health, Step(step_s)]
        make_model().fit(dataset, epochs=3, verbose=0, callbacks=callbacks)
    return health.summary().figures


print(f"{'verdict':17}{'change':37}{'epoch before':>13}{'after':>9}")
for verdict, change, before, after, step_s in SITUATIONS:
    old, new = figures_of(before, step_s), figures_of(after, step_s)
    print(
        f"{old.verdict:17}{change:37}{old.epoch_s * 1000:>10.0f} ms"
        f"{new.epoch_s * 1000:>6.0f} ms"
        + ("" if old.verdict == verdict else f"  (usually {verdict})")
    )
folder.cleanup()

"""
## The rule

Follow the advice of the verdict, and train again: when one reason is gone, the
next one shows. At `compute_bound` the data cost nothing any more.
"""
