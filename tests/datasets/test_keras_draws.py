"""Worker threads that draw from generators of Keras, which do not lock."""

from __future__ import annotations

import signal
import threading
import time

import keras
import numpy as np
import pytest
from samples import Numbered

from keras_fastdata import GeneratorDataset
from keras_fastdata.building import keras_draws

pytestmark = pytest.mark.backend


class Slow(keras.random.SeedGenerator):
    """Takes its time to read its state, and before it assigns the next."""

    @property
    def state(self):
        time.sleep(0.005)
        return self._state

    @state.setter
    def state(self, value):
        self._state = value


@pytest.fixture
def generator():
    return Slow(4)


def _drawn(generator):
    return np.asarray(keras.random.uniform((1, 2), seed=generator))


class Draws(Numbered):
    """Draws from a generator, which it may hold or make in a build."""

    def __init__(self, generator=None, **kwargs):
        super().__init__(length=20, **kwargs)
        self.generator = generator

    def __getitem__(self, index):
        return _drawn(self.generator)


def _count_of_equal(batches):
    drawn = [np.asarray(batch).tobytes() for batch in batches]
    return len(drawn) - len(set(drawn))


@pytest.mark.parametrize("threads", [2, 4])
def test_threads_draw_no_number_twice(threads, generator):
    with Draws(generator, workers=threads) as dataset:
        assert _count_of_equal([*dataset, *dataset]) == 0


def test_threads_of_two_datasets_draw_no_number_twice(generator):
    with Draws(generator) as photos, Draws(generator) as sketches:
        pairs = zip(photos, sketches, strict=True)
        assert _count_of_equal([batch for pair in pairs for batch in pair]) == 0


def test_threads_of_a_stream_draw_no_number_twice(generator):
    def numbers(shard_index, num_shards):
        for _ in range(20):
            yield _drawn(generator)[0]

    with GeneratorDataset(numbers, batch_size=1, workers=2) as dataset:
        assert _count_of_equal(dataset) == 0


class Interrupted(keras.random.SeedGenerator):
    """Gets a signal when the main thread draws."""

    @property
    def state(self):
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGUSR1)
        return self._state

    @state.setter
    def state(self, value):
        self._state = value


def test_a_signal_handler_reads_threads_that_draw_though_it_interrupts_a_draw(
    monkeypatch,
):
    """The threads would wait for the end of that draw, and so for ever."""
    monkeypatch.setattr(keras_draws, "_STUCK_S", 0.1)
    counts = []
    interrupted = Interrupted(5)
    with Draws(keras.random.SeedGenerator(4), workers=2) as dataset:
        assert len(list(dataset)) == 20  # draws take turns from now on

        def read(number, frame):
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            counts.append(len(list(dataset)))

        before = signal.signal(signal.SIGUSR1, read)
        try:
            _drawn(interrupted)
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert counts == [20]
        assert _count_of_equal(dataset) == 0


def test_a_model_that_draws_is_trained_while_threads_draw_from_it():
    dropout = keras.layers.Dropout(0.5)
    model = keras.Sequential([dropout, keras.layers.Dense(1)])
    model.compile("sgd", "mse")

    class Trained(Numbered):
        def __getitem__(self, index):
            augment = keras.layers.GaussianNoise(1.0, seed=index)
            x, y = super().__getitem__(index)
            return keras.ops.convert_to_numpy(augment(x, training=True)), y

    with Trained(workers=2) as dataset:
        history = model.fit(dataset, epochs=2, verbose=0).history
    assert np.isfinite(history["loss"]).all()
