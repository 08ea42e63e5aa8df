"""Batches per second, against stock Keras worker processes, in one run.

    python -m benchmarks.against_stock [--rounds N] [--json FILE]

Two workloads: one that takes time to build (`np.random.rand`), one that takes
next to none (`np.full`), so that it shows what moving a batch costs. Each is
consumed in a plain loop and through `fit` with a model that does almost
nothing. Every measurement runs in a fresh process, and the configurations take
turns, so that a slow minute of the machine is shared by all.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time

WORKLOADS = {
    # name: (batches with processes of stock Keras, with ours)
    "rand 64x224x224x3": (24, 120),
    "full 64x224x224x3": (24, 400),
}
CONSUMERS = ("loop", "fit")
LOADERS = ("stock", "fastdata")
WORKERS = 2


def measure(workload: str, consumer: str, loader: str) -> float:
    """Batches per second of one configuration, the first batch left out."""
    import keras
    import numpy as np

    from keras_fastdata import FastPyDataset

    base = FastPyDataset if loader == "fastdata" else keras.utils.PyDataset
    count = WORKLOADS[workload][LOADERS.index(loader)]

    class Dataset(base):  # type: ignore[misc, valid-type]
        def __len__(self) -> int:
            return count

        def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
            if workload.startswith("rand"):
                x = np.random.rand(64, 224, 224, 3).astype("float32")
            else:
                x = np.full((64, 224, 224, 3), index, "float32")
            return x, np.zeros((64, 1), "float32")

    dataset = Dataset(workers=WORKERS, use_multiprocessing=True)
    run = _loop if consumer == "loop" else _fit
    return run(dataset, count)


def _loop(dataset: object, count: int) -> float:
    times = []
    for _ in _batches(dataset, count):
        times.append(time.perf_counter())
    return (len(times) - 1) / (times[-1] - times[0])


def _batches(dataset: object, count: int):  # type: ignore[no-untyped-def]
    """The batches of one epoch, from the workers."""
    from keras.src.trainers.data_adapters import py_dataset_adapter

    from keras_fastdata import FastPyDataset

    if isinstance(dataset, FastPyDataset):
        yield from dataset
    else:
        # A plain `for` over a stock PyDataset uses no workers; its adapter,
        # which `fit` uses, does.
        adapter = py_dataset_adapter.PyDatasetAdapter(dataset)
        adapter.on_epoch_begin()
        yield from adapter._get_iterator()
        adapter.on_epoch_end()


def _fit(dataset: object, count: int) -> float:
    import keras

    class Clock(keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.times: list[float] = []

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            self.times.append(time.perf_counter())

    # The least a model can do with a batch: look at one value of each image.
    inputs = keras.Input((224, 224, 3))
    outputs = keras.layers.Dense(1)(inputs[:, 0, 0, :])
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    clock = Clock()
    model.fit(dataset, epochs=1, verbose=0, shuffle=False, callbacks=[clock])
    # The first steps compile.
    times = clock.times[2:]
    return (len(times) - 1) / (times[-1] - times[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(*arguments.one)))
        return
    figures = _take_turns(arguments.rounds)
    _print_table(figures, arguments.rounds)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"machine": _machine(), "rates": figures}, file, indent=1)


def _take_turns(rounds: int) -> dict[str, list[float]]:
    figures: dict[str, list[float]] = {}
    for _ in range(rounds):
        for workload in WORKLOADS:
            for consumer in CONSUMERS:
                for loader in LOADERS:
                    one = [workload, consumer, loader]
                    out = subprocess.run(
                        [sys.executable, "-m", __spec__.name, "--one", *one],
                        check=True,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.DEVNULL,
                        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
                    ).stdout
                    rate = json.loads(out.splitlines()[-1])
                    figures.setdefault(" | ".join(one), []).append(rate)
    return figures


def _print_table(figures: dict[str, list[float]], rounds: int) -> None:
    print(_machine())
    print(f"batches/s, median of {rounds} (min to max); {WORKERS} processes\n")
    head = f"{'workload':20} {'consumer':9} {'stock':>20} {'fastdata':>22}"
    print(f"{head} {'ratio':>7}")
    for workload in WORKLOADS:
        for consumer in CONSUMERS:
            rates = [
                figures[f"{workload} | {consumer} | {loader}"]
                for loader in LOADERS
            ]
            stock, ours = map(statistics.median, rates)
            cells = [
                f"{statistics.median(r):.1f} ({min(r):.1f} to {max(r):.1f})"
                for r in rates
            ]
            print(
                f"{workload:20} {consumer:9} {cells[0]:>20} {cells[1]:>22} "
                f"{ours / stock:>6.1f}x"
            )


def _machine() -> str:
    import keras
    import numpy as np

    return (
        f"{platform.platform()}, {os.cpu_count()} CPUs, Python "
        f"{platform.python_version()}, NumPy {np.__version__}, Keras "
        f"{keras.__version__} on {keras.backend.backend()}"
    )


if __name__ == "__main__":
    main()
