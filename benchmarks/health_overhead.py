"""What `LoaderHealth` costs a training step.

    python -m benchmarks.health_overhead [--steps N] [--rounds N]

One process trains a model whose step takes a fraction of a millisecond, on
batches of 1 KB that are at hand, with the callback and without it in turns.
What a step takes is that of whole epochs, so all that the callback does
counts, also at the end of an epoch.
"""

from __future__ import annotations

import argparse
import statistics
import time

import keras
import numpy as np

from keras_fastdata import FastPyDataset, LoaderHealth

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    model = keras.Sequential([keras.Input((7,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    print(
        f"Keras {keras.__version__} on {keras.backend.backend()}; us per step, "
        f"median of {arguments.rounds} epochs of {arguments.steps} steps"
    )
    print(f"{'':12} {'without':>9} {'with':>9} {'cost':>8}")
    for name, place in PLACES.items():
        with AtHand(arguments.steps, **place) as dataset:
            costs = _take_turns(model, dataset, arguments)
        without, measured = map(statistics.median, zip(*costs, strict=True))
        print(
            f"{name:12} {without:>9.1f} {measured:>9.1f} "
            f"{measured / without - 1:>8.1%}"
        )


def _take_turns(
    model: keras.Model, dataset: AtHand, arguments: argparse.Namespace
) -> list[tuple[float, float]]:
    """Microseconds per step without and with the callback, by round."""

    def us_per_step(*callbacks: keras.callbacks.Callback) -> float:
        clock = _Clock()
        model.fit(dataset, verbose=0, callbacks=[clock, *callbacks])
        return clock.elapsed_s / arguments.steps * 1e6

    us_per_step(LoaderHealth(verbose=0))  # compiles, and starts the workers
    return [
        (us_per_step(), us_per_step(LoaderHealth(verbose=0)))
        for _ in range(arguments.rounds)
    ]


class _Clock(keras.callbacks.Callback):
    """Times an epoch; its end is called first, so that ours counts."""

    elapsed_s = 0.0

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        self._began = time.perf_counter()

    def on_train_end(self, logs: object = None) -> None:
        self.elapsed_s = time.perf_counter() - self._began


if __name__ == "__main__":
    main()
