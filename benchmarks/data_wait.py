"""Whether `data_wait` foretells what free data would bring.

    python -m benchmarks.data_wait [options of python -m benchmarks]

One model is trained twice: on batches that take time to build, and on batches
that are at hand. The ratio of the two epochs is what `LoaderHealth` foretells
from the first training alone. The nearer to 1, the better.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.ours import Ours

FIGURES = (
    harness.Figure("foretold_to_came", "foretold / came"),
    harness.Figure("data_wait", "data_wait"),
    harness.Figure("came", "1 - free / wall"),
)
TIMEOUT_S = 90.0
BATCHES = 60
BATCH = np.ones((4, 3), "float32"), np.ones((4, 1), "float32")
SETTINGS: dict[str, dict[str, Any]] = {
    "inline": {"workers": 0},
    "thread": {"workers": 1},
    "process": {"workers": 1, "use_multiprocessing": True},
}


class Waiting:
    """Returns a batch after some seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        time.sleep(self.seconds)
        return BATCH


def cases() -> Iterator[harness.Case]:
    for build_ms, step_ms in ((30, 10), (15, 19), (0, 10)):
        yield from harness.combine(
            backend=("tensorflow", "jax", "torch"),
            build_ms=[build_ms],
            step_ms=[step_ms],
            workers=tuple(SETTINGS),
        )


def measure(case: harness.Case, seconds: float) -> dict[str, float]:
    from benchmarks.known_steps import model_with_steps_of

    model = model_with_steps_of(case["step_ms"] / 1e3)
    build_s = case["build_ms"] / 1e3
    wall_s, data_wait = _train(model, build_s, case["workers"])
    free_s, _ = _train(model, 0.0, "thread")
    return {
        "foretold_to_came": free_s / wall_s / (1 - data_wait),
        "data_wait": data_wait,
        "came": 1 - free_s / wall_s,
    }


def _train(model: Any, build_s: float, workers: str) -> tuple[float, float]:
    """Returns the wall time of the second epoch, and its `data_wait`."""
    import keras

    from keras_fastdata import LoaderHealth

    class Clock(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
            self.began_s = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: object = None) -> None:
            self.wall_s = time.perf_counter() - self.began_s

    clock, health = Clock(), LoaderHealth(verbose=0)
    with Ours(Waiting(build_s), BATCHES, **SETTINGS[workers]) as dataset:
        model.fit(dataset, epochs=2, verbose=0, callbacks=[health, clock])
    return clock.wall_s, health.summary().epochs[1].data_wait


if __name__ == "__main__":
    harness.main(["data_wait"])
