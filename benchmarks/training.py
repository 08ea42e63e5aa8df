"""Models and callbacks that let a benchmark see what `fit` does with batches.

Import it where a model is made: it imports Keras and its backend.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import keras
import numpy as np

from benchmarks.meter import Meter
from benchmarks.workloads import Workload, leaves


class Count(keras.callbacks.Callback):
    """Shows a meter every step, and ends `fit` when that has seen enough."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if not self.meter.saw_batch():
            self.model.stop_training = True


class Stamped(keras.Model):
    """A model without weights to speak of, which notes when its steps are.

    Compile it with `run_eagerly=True`: a compiled step runs no Python.

    Args:
        step_s: How long a step is to take.

    Attributes:
        steps: For each step whether it trains, when it had its batch, and
            when it was over.
    """

    def __init__(self, step_s: float = 0.0) -> None:
        super().__init__()
        # Keras would wrap a list.
        self.steps: deque[tuple[bool, float, float]] = deque()
        self.dense = keras.layers.Dense(1)
        self._step_s = step_s

    def call(self, x: Any) -> Any:
        return self.dense(x[:, :1])

    def train_step(self, *arguments: Any) -> Any:
        return self._stamped(True, super().train_step, arguments)

    def test_step(self, *arguments: Any) -> Any:
        return self._stamped(False, super().test_step, arguments)

    def _stamped(self, trains: bool, step: Any, arguments: Any) -> Any:
        began = time.perf_counter()
        time.sleep(self._step_s)
        result = step(*arguments)
        self.steps.append((trains, began, time.perf_counter()))
        return result


def stamped_model(batch: Any, step_s: float = 0.0) -> Stamped:
    """A compiled and built `Stamped`, which has seen one batch."""
    model = Stamped(step_s)
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(*batch, batch_size=len(batch[0]), verbose=0)
    model.steps.clear()
    return model


def tiny_model(batch: Any) -> keras.Model:
    """A compiled model that looks at three values of each sample."""
    inputs = keras.Input(np.shape(leaves(batch)[0])[1:])
    corner = inputs
    while len(corner.shape) > 2:
        corner = corner[:, 0]
    model = keras.Model(inputs, keras.layers.Dense(1)(corner[:, :3]))
    model.compile("sgd", "mse")
    return model


def measure_fit(
    workload: Workload, data: Any, seconds: float, ahead: int
) -> dict[str, float]:
    """Trains a tiny model on what a loader gives to `fit`."""
    model = tiny_model(workload(0))
    meter = Meter(seconds, ahead)
    model.fit(
        data, epochs=10**6, verbose=0, shuffle=False, callbacks=[Count(meter)]
    )
    return meter.figures()
