"""What `LoaderHealth` costs a training step.

    python -m benchmarks.health_overhead [--blocks N] [--step-us US]

Batches of 1 KB that are at hand are trained on. A step takes the batch, sleeps
without the GIL for half of a given time, as a model computes without it, and
then waits in a loop until this time is over: the steps of a model differ by
more than what is to be measured. In one `fit`, blocks of 400 steps that are
measured take turns with blocks that are not. Of each block, steps that took
more than twice the median are left out: the machine was busy with something
else. Their number is printed, because LoaderHealth must not have more of them.
The cost is the mean of the middle half of all differences between neighbouring
blocks. What LoaderHealth does once an epoch is not in these figures.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import keras
import numpy as np

from keras_fastdata import FastPyDataset, LoaderHealth
from keras_fastdata.metrics import recorder

BLOCK = 400  # steps
WARM_UP = 8  # blocks, in which steps compile and workers start
PLACES = {
    "inline": {"workers": 0},
    "2 threads": {"workers": 2},
    "2 processes": {"workers": 2, "use_multiprocessing": True},
}


class AtHand(FastPyDataset):
    """The same small batch again and again."""

    def __init__(self, length: int, **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self.length = length
        self.batch = np.ones((32, 7), "float32"), np.ones((32, 1), "float32")

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.batch


class Steps(keras.Model):
    """A model whose steps take a given time, and compute nothing."""

    def __init__(self, step_us: float) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.step_s = step_us / 1e6

    def call(self, x: object) -> object:
        return self.dense(x)

    def make_train_function(self, force: bool = False) -> None:
        def wait() -> None:
            until_s = time.perf_counter() + self.step_s
            time.sleep(self.step_s / 2)
            while time.perf_counter() < until_s:
                pass

        def jax_step(state: object, batches: Iterator[object]) -> object:
            next(batches)
            wait()
            return {}, state

        def tensorflow_step(batches: Iterator[object]) -> object:
            next(batches)
            wait()
            return {}

        def torch_step(batch: object) -> object:
            wait()
            return {}

        self.train_function = {
            "jax": jax_step,
            "tensorflow": tensorflow_step,
            "torch": torch_step,
        }[keras.backend.backend()]


class Turns(keras.callbacks.Callback):
    """Has every other block of steps measured; to be the callback before it.

    Where steps are not measured, `LoaderHealth` is not there at all.

    Args:
        dataset: What is trained on.
        health: What measures.

    Attributes:
        callbacks: The list that both are in.
        blocks: Microseconds per step in each block: those that were not
            measured, and those that were.
        left_out: How many steps were left out of either.
    """

    async_safe = True

    def __init__(self, dataset: AtHand, health: LoaderHealth) -> None:
        super().__init__()
        self.callbacks: list[keras.callbacks.Callback] = []
        self.blocks: tuple[list[float], list[float]] = [], []
        self.left_out = [0, 0]
        self._dataset = dataset
        self._health = health
        self._measures = True
        self._begun_s: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        self._begun_s.append(time.perf_counter())
        if not batch or batch % BLOCK:
            return
        if batch // BLOCK > WARM_UP:
            steps_us = np.diff(self._begun_s) * 1e6
            kept = steps_us[steps_us < 2 * np.median(steps_us)]
            self.blocks[self._measures].append(float(kept.mean()))
            self.left_out[self._measures] += len(steps_us) - len(kept)
        self._measure(not self._measures)
        self._begun_s = [time.perf_counter()]

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        if not self._measures:
            self._measure(True)

    def _measure(self, measures: bool) -> None:
        self._measures = measures
        heard = self._health._monitor.recorder
        if measures:
            self.callbacks.append(self._health)
            recorder.attach(heard)
        else:
            self.callbacks.remove(self._health)
            recorder.detach(heard)
        for walk in self._dataset._fastdata.loader._epochs:
            walk.interval_s = heard.interval_s if measures else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=200)
    parser.add_argument("--step-us", type=float, default=300.0)
    arguments = parser.parse_args()
    model = Steps(arguments.step_us)
    model.compile("sgd", "mse")
    print(
        f"Keras {keras.__version__} on {keras.backend.backend()}; us per step, "
        f"over {arguments.blocks} blocks of {BLOCK} steps, the cost of each "
        "against the one before it"
    )
    print(f"{'':12} {'without':>9} {'cost':>6}  {'quartiles':16} left out")
    for name, place in PLACES.items():
        with AtHand(BLOCK * arguments.blocks, **place) as dataset:
            health = LoaderHealth(verbose=0)
            turns = Turns(dataset, health)
            both = keras.callbacks.CallbackList(
                [keras.callbacks.History(), turns, health], model=model
            )
            turns.callbacks = both.callbacks
            model.fit(dataset, verbose=0, callbacks=both)
        without, measured = turns.blocks
        costs = [m - w for w, m in zip(without, measured, strict=False)]
        low, _, high = statistics.quantiles(costs, n=4)
        cost = statistics.fmean(c for c in costs if low <= c <= high)
        print(
            f"{name:12} {statistics.median(without):>9.1f} {cost:>6.1f}  "
            f"{f'{low:.1f} to {high:.1f}':16} "
            f"{turns.left_out[0]}, {turns.left_out[1]}",
            flush=True,
        )


if __name__ == "__main__":
    main()
