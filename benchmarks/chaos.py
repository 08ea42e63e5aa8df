"""An epoch whose workers are killed all the time, against a quiet one.

    python -m benchmarks.chaos [--batches N] [--every SECONDS] [--rounds N]

The same epoch is consumed in a plain loop, undisturbed and with a random
worker SIGKILLed at a steady pace, in turns. Both must yield the same bytes. A
batch takes 5 ms to build; a kill costs what the worker was building, and its
replacement.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import statistics
import sys
import time

import numpy as np

from benchmarks.trouble import Trouble
from keras_fastdata import FastPyDataset

BUILD_S = 0.005
WORKERS = 2


class Noise(FastPyDataset):
    """Batches of 1.5 MB that take some time."""

    def __init__(self, length: int, **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        until = time.perf_counter() + BUILD_S
        x = self.empty((128, 3072), "float32")
        self.rng.random(dtype="float32", out=x)
        y = np.array([index, np.random.randint(2**60)])
        time.sleep(max(0.0, until - time.perf_counter()))
        return x, y


def consume(length: int, every_s: float | None) -> tuple[float, str, int]:
    """Seconds and digest of an epoch, and how many workers were killed."""
    digest = hashlib.blake2b()
    dataset = Noise(
        length,
        workers=WORKERS,
        use_multiprocessing=True,
        seed=7,
        max_worker_restarts=10**6,
    )
    with dataset:
        batches = iter(dataset)
        first = next(batches)
        trouble = Trouble(0, every_s or 1e9, {"SIGKILL": 1}, spread=0)
        began = time.perf_counter()
        with trouble:
            for x, y in itertools.chain([first], batches):
                digest.update(x.tobytes() + y.tobytes())
            seconds = time.perf_counter() - began
    return seconds, digest.hexdigest(), trouble.done.total()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--every", type=float, default=0.3)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    quiet_s, chaos_s, digests, killed = [], [], set(), []
    for number in range(arguments.rounds):
        seconds, digest, _ = consume(arguments.batches, None)
        quiet_s.append(seconds)
        digests.add(digest)
        seconds, digest, kills = consume(arguments.batches, arguments.every)
        chaos_s.append(seconds)
        digests.add(digest)
        killed.append(kills)
        print(
            f"round {number + 1}: undisturbed {quiet_s[-1]:.2f} s, "
            f"{kills} workers killed {chaos_s[-1]:.2f} s",
            flush=True,
        )
    ratio = statistics.median(chaos_s) / statistics.median(quiet_s)
    same = len(digests) == 1
    print(
        f"{arguments.batches} batches, a worker killed every "
        f"{arguments.every:g} s ({statistics.median(killed):.0f} in all): "
        f"{ratio:.2f} times the undisturbed time; "
        f"{'the same bytes' if same else 'DIFFERENT BYTES'}."
    )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
