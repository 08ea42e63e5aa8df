"""Worker threads that draw from generators of Keras, which do not lock."""

from __future__ import annotations

import threading
import time
import types
import weakref

import keras
import numpy as np
import pytest
from samples import Numbered, numbers

pytestmark = pytest.mark.backend


class Slow(keras.random.SeedGenerator):
    """Takes its time between reading its state and assigning the next."""

    def next(self, ordered=True):
        state = np.asarray(self.state)
        time.sleep(0.01)
        self.state.assign(state + np.array([0, 1], state.dtype))
        return state


class Draws(Numbered):
    """Draws in each build from a batch on."""

    def __init__(self, first, **kwargs):
        super().__init__(length=20, **kwargs)
        self.first = first
        self.generator = Slow(4)

    def __getitem__(self, index):
        if index < self.first:
            return np.array([-1, index])
        return np.array(self.generator.next())


@pytest.mark.parametrize("first", [0, 9])
def test_threads_draw_no_number_twice_from_a_generator_of_keras(first):
    with Draws(first, workers=3) as dataset:
        drawn = [tuple(batch.tolist()) for batch in dataset]
        # Whether builds draw is known once one has drawn.
        drawn += [tuple(batch.tolist()) for batch in dataset]
    later = drawn if not first else drawn[20 + first :]
    assert len(set(later)) == len(later)


class MakesLate(Numbered):
    """Has an object to which the first build gives a generator."""

    def __init__(self, **kwargs):
        super().__init__(length=20, **kwargs)
        self.holder = types.SimpleNamespace()
        self.began = threading.Event()

    def __getitem__(self, index):
        if index == 0 and not vars(self.holder):
            assert self.began.wait(60)  # another build, which has searched
            self.holder.generator = Slow(4)
        self.began.set()
        if not vars(self.holder):
            return np.array([-1, index])
        return np.array(self.holder.generator.next())


def test_a_generator_that_a_build_makes_late_is_found():
    with MakesLate(workers=2) as dataset:
        list(dataset)
        drawn = [tuple(batch.tolist()) for batch in dataset]
    assert len(set(drawn)) == len(drawn)


class Meets(Numbered):
    """Has a generator, and lets two builds begin before either ends."""

    def __init__(self, has_generator, **kwargs):
        super().__init__(**kwargs)
        self.has_generator = has_generator
        self.both = threading.Barrier(2)

    def __getitem__(self, index):
        if index > 1:
            self.both.wait(60)
        return super().__getitem__(index)


def test_threads_build_at_once_if_they_do_not_draw_from_it():
    generator = keras.random.SeedGenerator(4)
    with Meets(generator, workers=2) as dataset:
        assert numbers(dataset) == [*range(10)]


def test_threads_build_at_once_while_their_model_is_trained():
    layers = [keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    generator = weakref.ref(layers[0].seed_generator)
    with Meets(model, workers=2) as dataset:
        # Draws while two builds run, as a training step may.
        dataset.both = threading.Barrier(2, lambda: generator().next())
        assert numbers(dataset) == [*range(10)]
