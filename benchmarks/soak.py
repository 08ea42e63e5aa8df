"""Trains for minutes while everything goes wrong, and counts what was survived.

    python -m benchmarks.soak [--minutes N] [--seed N] [--pause S]
        [--start-method NAME]

A real `fit`, with validation, of which every batch is compared with what it
must be: its place in the epoch, its bytes, its random draws. Meanwhile workers
are killed, stopped and crashed, their fork server is killed, builds hang or
take long, batches are held on to and looked at again later, the dataset
changes, epochs are broken off by exceptions and begun anew. Exits with 1 if a
batch was wrong, lost or repeated, or if memory, descriptors, mappings or
threads grew.
"""

from __future__ import annotations

import argparse
import collections
import gc
import logging
import os
import random
import sys
import threading
import time

import keras
import numpy as np

from benchmarks.trouble import Trouble, forkservers, workers
from keras_fastdata import FastPyDataset, WorkerDiedError
from keras_fastdata.building import seeding
from keras_fastdata.building.global_rng import preserved_globals

LENGTH = 300
SHAPE = (32, 2048)  # 256 KB: large enough to lie in shared memory
TIMEOUT_S = 1.0
HELD = 40
WARM_UP_S = 20.0  # what the backend and the allocators keep comes first

KINDS = {
    "SIGKILL": 10,
    "SIGSEGV": 3,
    "SIGTERM": 3,
    "SIGABRT": 2,
    "SIGSTOP": 1,
    "forkserver": 1,
}


class Soaked(FastPyDataset):
    """Batches that are a function of seed, epoch, index and `level`.

    Args:
        stuck: The share of builds that never end. A thread that is stuck
            would be so for good: only where workers are replaced.
    """

    def __init__(self, stuck: float = 0.0, **kwargs: object) -> None:
        super().__init__(max_worker_restarts=10**9, **kwargs)  # type: ignore[arg-type]
        self.level = 0
        self.stuck = stuck

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        luck = random.SystemRandom().random()
        if luck < self.stuck:
            time.sleep(3600)
        elif luck < 0.01:
            time.sleep(TIMEOUT_S * 0.3)
        x = self.empty(SHAPE, "float32")
        x[:] = self.rng.random(SHAPE, "float32")
        facts = [index, self.epoch, self.level, np.random.randint(2**20)]
        return x, np.tile(np.array(facts, "float32"), (SHAPE[0], 1))


class Checker:
    """Compares what training gets with what it must get."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.counts: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.last: tuple[int, int] | None = None
        self._rng = random.Random(seed)
        self._held: list[tuple[object, np.ndarray]] = []

    def see(self, x: object, y: object) -> None:
        index, epoch, _, draw = (int(n) for n in np.asarray(y)[0])
        place = epoch, index
        if index and self.last != (epoch, index - 1):
            self.wrong.append(f"{place} came after {self.last}")
        self.last = place
        stream = self.seed, seeding.BATCH, epoch, index
        expected = seeding.generator(*stream).random(SHAPE, "float32")
        if not np.array_equal(np.asarray(x), expected):
            self.wrong.append(f"wrong bytes in {place}")
        with preserved_globals():
            seeding.reseed_globals(self.seed, seeding.GLOBALS, epoch, index)
            if draw != np.random.randint(2**20):
                self.wrong.append(f"wrong draw of np.random in {place}")
        self.counts["batches"] += 1
        if self._rng.random() < 0.05:
            self._held.append((x, expected))
        while self._held and self._rng.random() < len(self._held) / HELD / 10:
            self._let_go()

    def _let_go(self) -> None:
        held, expected = self._held.pop(self._rng.randrange(len(self._held)))
        if not np.array_equal(np.asarray(held), expected):
            self.wrong.append("a held batch has changed")
        self.counts["batches held on to"] += 1

    def forget(self) -> None:
        while self._held:
            self._let_go()


class Checked(keras.Model):
    """A model that shows the checker every batch it is trained on."""

    def __init__(self, checker: Checker) -> None:
        super().__init__()
        self.checker = checker
        self.dense = keras.layers.Dense(1)

    def call(self, x: object) -> object:
        return self.dense(x)

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):  # type: ignore[no-untyped-def]
        if training:
            self.checker.see(x, y)
        return keras.ops.mean(y_pred) * 0.0


class Unrest(keras.callbacks.Callback):
    """Breaks epochs off, changes the dataset, and ends it all in time."""

    def __init__(self, dataset: Soaked, checker: Checker, until: float) -> None:
        super().__init__()
        self.dataset = dataset
        self.counts = checker.counts
        self.until = until
        self.rng = random.Random(checker.seed)

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        luck = self.rng.random()
        if luck < 0.0005:
            raise BrokenOff
        if luck < 0.0015:
            self.dataset.level += 1
            self.counts["changes of the dataset"] += 1
        elif luck < 0.0020:
            self.dataset.close()
            self.counts["closings in mid-epoch"] += 1
        if time.monotonic() > self.until:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        self.counts["epochs"] += 1


class BrokenOff(Exception):
    """What a training step might raise."""


class Stuck(logging.Handler):
    """Counts workers that were replaced because they hung."""

    def __init__(self, checker: Checker) -> None:
        super().__init__()
        self.counts = checker.counts

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "batch_timeout" in text:
            self.counts["hung workers replaced"] += 1
        elif "It is replaced" not in text:
            print(text)


def figures(dataset: Soaked) -> dict[str, float]:
    """What must not grow, with workers at work."""
    next(iter(dataset))  # it may just have been closed
    gc.collect()
    with open("/proc/self/maps") as maps:
        mappings = len(maps.readlines())
    family = [os.getpid(), *forkservers(), *workers()]
    return {
        "memory of all processes, MB (PSS)": sum(map(_pss_mb, family)),
        "memory of the trainer, MB (PSS)": _pss_mb(os.getpid()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": mappings,
        "threads": threading.active_count(),
        "entries in /dev/shm": len(os.listdir("/dev/shm")),
    }


# How much more is still no growth: the allocators of the backend breathe.
# A worker, which has up to 5 descriptors here, may be missing at a look. The
# memory of a batch from a portable worker has a name until it is received.
SLACK = {"memory": 60, "mappings": 60, "descriptors": 10, "entries": 16}


def _pss_mb(pid: int) -> float:
    """Without mapped files: libraries are shared with other programs."""
    kilobytes = 0
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            for line in file:
                if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                    kilobytes += int(line.split()[1])
    except OSError:
        pass  # it has just ended
    return kilobytes / 1024


def train(dataset: Soaked, checker: Checker, until: float) -> None:
    """Trains until then, whatever happens."""
    model = Checked(checker)
    model.compile("sgd", run_eagerly=True)
    validation = Soaked(workers=2, seed=3)
    with validation:
        while time.monotonic() < until:
            checker.last = None
            try:
                model.fit(
                    dataset,
                    epochs=10**6,
                    shuffle=False,
                    verbose=0,
                    validation_data=validation,
                    validation_steps=3,
                    callbacks=[Unrest(dataset, checker, until)],
                )
            except BrokenOff:
                checker.counts["fits broken off and begun anew"] += 1
            except WorkerDiedError as error:
                if "second time" not in str(error):
                    raise
                # By chance, one batch has been struck twice.
                checker.counts["batches struck twice, reported"] += 1
    checker.forget()


def shared_memory_names() -> set[str]:
    """The names of shared memory that this package has created."""
    return {n for n in os.listdir("/dev/shm") if n.startswith("kfd_")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--pause",
        type=float,
        default=0.3,
        help="seconds between two kills, more than a worker takes to start",
    )
    parser.add_argument("--start-method")
    arguments = parser.parse_args()
    checker = Checker(arguments.seed)
    names_before = shared_memory_names()
    logging.getLogger("keras_fastdata").addHandler(Stuck(checker))
    logging.getLogger("keras_fastdata").propagate = False
    dataset = Soaked(
        stuck=0.0005,
        workers=2,
        use_multiprocessing=True,
        start_method=arguments.start_method,
        seed=arguments.seed,
        batch_timeout=TIMEOUT_S,
    )
    trouble = Trouble(arguments.seed, arguments.pause, KINDS)
    with dataset, trouble:
        total_s = arguments.minutes * 60
        train(dataset, checker, time.monotonic() + min(WARM_UP_S, total_s / 2))
        before = figures(dataset)
        train(
            dataset, checker, time.monotonic() + max(5.0, total_s - WARM_UP_S)
        )
        after = figures(dataset)
    for name, count in [*checker.counts.items(), *trouble.done.items()]:
        print(f"{count:8d}  {name}")
    grown = []
    for name, value in after.items():
        slack = SLACK.get(name.split()[0], 2)
        more = value - before[name]
        print(f"{before[name]:8.0f} -> {value:.0f}  {name}")
        if more > slack:
            grown.append(name)
    left = [*forkservers(), *workers()]
    # Programs beside this one, and before it, may have names there as well.
    names = shared_memory_names() - names_before
    for line in checker.wrong[:20]:
        print("WRONG:", line)
    print(
        f"{len(checker.wrong)} wrong batches; "
        f"{', '.join(grown) or 'nothing'} grew; {len(left)} processes and "
        f"{len(names)} names of shared memory left."
    )
    return 1 if checker.wrong or grown or left or names else 0


if __name__ == "__main__":
    sys.exit(main())
