"""Generators for workers that do not import Keras."""

from __future__ import annotations

import itertools
import os
import random
import time
from pathlib import Path

import numpy as np

from keras_fastdata import EndOfData, FastPyDataset, GeneratorDataset


class Numbers:
    """Every so-many-th number, each with what is drawn beside it."""

    def __init__(self, count, *, draws=()):
        self.count = count
        self.draws = draws

    def __call__(self, shard_index, num_shards, rng):
        for number in range(shard_index, self.count, num_shards):
            drawn = {
                "rng": lambda: rng.integers(2**60),
                "numpy": lambda: np.random.randint(2**30),
                "random": lambda: random.randrange(2**60),
            }
            yield np.array([number, *(drawn[d]() for d in self.draws)])


def shuffled(shard_index, num_shards):
    """Numbers in an order that is drawn when the generator begins."""
    order = np.random.permutation(20)
    yield from order[shard_index::num_shards]


def uneven(shard_index, num_shards):
    """Shard i has i items."""
    for number in range(shard_index):
        yield 10 * shard_index + number


def without_end():
    yield from itertools.count()


def pairs(count, shard_index, num_shards):
    for number in range(shard_index, count, num_shards):
        yield {"x": np.full(3, number, "float32")}, float(2 * number)


def ragged():
    for length in (1, 3, 2):
        yield np.ones(length)


def failing(shard_index, num_shards):
    yield 1
    if shard_index == 1:
        raise KeyError("nothing here")
    yield 2


def labelled(shard_index, num_shards):
    for number in range(shard_index, 14, num_shards):
        yield np.full((4, 3), number / 14, "float32"), np.ones((4, 1))


def endless(shard_index, num_shards):
    while True:
        yield from labelled(shard_index, num_shards)


class SlowPairs:
    """The rows of 12 batches of two, each of which is waited for."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __call__(self, shard_index, num_shards):
        for row in range(shard_index, 24, num_shards):
            time.sleep(self.seconds)
            yield np.full(3, row, "float32"), np.zeros(1, "float32")


class Dying:
    """Numbers, of which one ends the process that comes to it, once."""

    def __init__(self, directory, count, at):
        self.directory = Path(directory)
        self.count = count
        self.at = at

    def __call__(self, shard_index, num_shards):
        for number in range(shard_index, self.count, num_shards):
            if number == self.at:
                self.die_once()
            yield number

    def die_once(self):
        try:
            (self.directory / "died").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), 9)  # SIGKILL, where it has a name


class DyingTold(Dying):
    """One that is told how many to leave out, and writes that down."""

    def __call__(self, shard_index, num_shards, start):
        with open(self.directory / f"starts {shard_index}", "a") as file:
            file.write(f"{start}\n")
        numbers = range(shard_index, self.count, num_shards)
        for number in numbers[start:]:
            if number == self.at:
                self.die_once()
            yield number


class DyingForgetful(Dying):
    """One that gives something else every time."""

    def __call__(self, shard_index, num_shards):
        for number in super().__call__(shard_index, num_shards):
            yield np.array([number, int.from_bytes(os.urandom(7))])


class DyingShorter(Dying):
    """One that ends at once, the second time."""

    def __call__(self, shard_index, num_shards):
        if not (self.directory / "died").exists():
            yield from super().__call__(shard_index, num_shards)


class Ending(FastPyDataset):
    """Has `count` batches, and says so only when it is asked for another."""

    def __init__(self, count, said=None, **kwargs):
        super().__init__(**kwargs)
        self.count = count
        self.said = said

    @property
    def num_batches(self):
        return self.said

    def __getitem__(self, index):
        if index >= self.count:
            raise EndOfData
        x = np.full((4, 3), index, "float32")
        return x, np.full((4, 1), index, "float32")


class Walks(FastPyDataset):
    """Batch i is how many batches another dataset has."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return np.array([len(list(Ending(3, workers=0)))])


class Hooked(GeneratorDataset):
    """Has something to do between epochs."""

    def on_epoch_end(self):
        self.seen = getattr(self, "seen", 0) + 1


def with_defaults(low=5, high=8):
    yield from range(low, high)


def numbers_from(start, stop, rng=None):
    yield from range(start, stop)


def reusing(shard_index, num_shards):
    """Fills one buffer again and again."""
    buffer = np.zeros(2)
    for number in range(shard_index, 6, num_shards):
        buffer[0] = number
        yield buffer, {"x": buffer[:1]}


def ending():
    yield from range(5)
    raise EndOfData


class Closing:
    """Leaves a file when its generator is closed."""

    def __init__(self, path):
        self.path = str(path)

    def __call__(self):
        try:
            yield from range(100)
        finally:
            Path(self.path).touch()
