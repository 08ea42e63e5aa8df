"""`data_wait` against wall time: what training without waits really takes.

The same model is trained on a loader and on data that is at hand; the ratio of
the two wall times is what `data_wait` foretells. They run alone.
"""

from __future__ import annotations

import time

import keras
import pytest
from known_steps import model_with_steps_of
from situations import Sleeping

from keras_fastdata import LoaderHealth

pytestmark = [
    pytest.mark.backend,
    pytest.mark.alone,
    pytest.mark.long,
]

BATCHES = 60
PLACES = {
    "inline": {"workers": 0},
    "thread": {"workers": 1},
    "process": {"workers": 1, "use_multiprocessing": True},
}


class Clock(keras.callbacks.Callback):
    """Takes the wall time of each epoch."""

    def __init__(self):
        super().__init__()
        self.walls_s = []

    def on_epoch_begin(self, epoch, logs=None):
        self.began_s = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.walls_s.append(time.perf_counter() - self.began_s)


def _train(model, load_s, place):
    """Wall time and health of the second epoch."""
    clock, health = Clock(), LoaderHealth(verbose=0)
    with Sleeping(load_s, length=BATCHES, **place) as dataset:
        model.fit(dataset, epochs=2, verbose=0, callbacks=[health, clock])
    return clock.walls_s[1], health.summary().epochs[1]


def _pair(load_ms, step_ms, place):
    return pytest.param(
        load_ms / 1000,
        step_ms / 1000,
        place,
        id=f"{load_ms}-{step_ms}-{place}",
    )


@pytest.mark.parametrize(
    ("load_s", "step_s", "place"),
    [
        _pair(load_ms, step_ms, place)
        for load_ms, step_ms in [(30, 10), (15, 19), (0, 10)]
        for place in PLACES
    ],
)
def test_it_foretells_what_free_data_brings(load_s, step_s, place):
    model = model_with_steps_of(step_s)
    wall_s, health = _train(model, load_s, PLACES[place])
    free_s, _ = _train(model, 0, PLACES["thread"])
    assert health.batches == BATCHES
    assert health.data_wait == pytest.approx(1 - free_s / wall_s, abs=0.1)
    foretold = 1 / (1 - health.data_wait)
    assert foretold == pytest.approx(wall_s / free_s, rel=0.15)
    assert health.step_s >= step_s
