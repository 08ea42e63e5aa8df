"""Datasets of numbered batches, for `test_stock_trace.py`.

What they do is in mixins, so that the same `__getitem__` and hooks serve a
stock PyDataset and a FastPyDataset. They are in a file of their own because
worker processes import it, and should not have to import Keras.
"""

from __future__ import annotations

import numpy as np

from keras_fastdata import FastPyDataset

# What happened in the training process, in order: hooks, and (noted by the
# tests) the batches that reached a step.
EVENTS: list[str] = []

ROWS = 2


def pair(x, y):
    return x, y


def triple(x, y):
    return x, y, np.linspace(0.5, 1.5, ROWS, dtype="float32") + y[0, 0]


def pair_and_none(x, y):
    return x, y, None


def as_list(x, y):
    return [x, y]


def inputs_only(x, y):
    return (x,)


def bare(x, y):
    return x


def as_dict(x, y):
    return {"features": x, "label": y}


def nested(x, y):
    return {"a": x, "b": (x + 1, (x + 2,))}, (y, {"c": y + 1})


def number_as_target(x, y):
    return x, x[:, :1]


def too_long(x, y):
    return x, y, y, y


class _Batches:
    """Batch `index` has its number, and the dataset's level, in its `x`."""

    level = 0

    def __init__(self, size=10, form=pair, **settings):
        super().__init__(**settings)
        self.form = form
        self.order = list(range(size))
        self.notes = {"level": 0}

    def __getitem__(self, index):
        number = index if index >= len(self.order) else self.order[index]
        level = self.level + self.notes["level"]
        x = np.full((ROWS, 2), (number, level), "float32")
        return self.form(x, np.full((ROWS, 1), number % 3, "float32"))


class Sized(_Batches):
    def __len__(self):
        return len(self.order)


class ByProperty(_Batches):
    @property
    def num_batches(self):
        return len(self.order)


class Endless(_Batches):
    @property
    def num_batches(self):
        return None


class Forgetful(Sized):
    def __init__(self):
        self.form = pair
        self.order = [0, 1, 2, 3]
        self.notes = {"level": 0}


class Told(Sized):
    """Notes when its hooks are called."""

    name = ""

    def on_epoch_begin(self):
        EVENTS.append(f"{self.name}begin")

    def on_epoch_end(self):
        EVENTS.append(f"{self.name}end")


class EndlessTold(Told):
    @property
    def num_batches(self):
        return None


class Reversing(Sized):
    def on_epoch_end(self):
        self.order = self.order[::-1]


class ReversingInPlace(Sized):
    def on_epoch_end(self):
        self.order.reverse()


class ReversingAtTheBegin(Sized):
    def on_epoch_begin(self):
        self.order.reverse()


class Growing(Sized):
    def on_epoch_end(self):
        self.order.append(len(self.order))


class Shrinking(Sized):
    def on_epoch_end(self):
        del self.order[-1]


class Rising(Sized):
    def on_epoch_begin(self):
        self.level += 1


class FastSized(Sized, FastPyDataset):
    pass


class FastByProperty(ByProperty, FastPyDataset):
    pass


class FastEndless(Endless, FastPyDataset):
    pass


class FastForgetful(Forgetful, FastPyDataset):
    pass


class FastTold(Told, FastPyDataset):
    pass


class FastEndlessTold(EndlessTold, FastPyDataset):
    pass


class FastReversing(Reversing, FastPyDataset):
    pass


class FastReversingInPlace(ReversingInPlace, FastPyDataset):
    pass


class FastReversingAtTheBegin(ReversingAtTheBegin, FastPyDataset):
    pass


class FastGrowing(Growing, FastPyDataset):
    pass


class FastShrinking(Shrinking, FastPyDataset):
    pass


class FastRising(Rising, FastPyDataset):
    pass
