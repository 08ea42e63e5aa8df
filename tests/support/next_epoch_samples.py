"""Datasets that write down what is built, for workers without Keras."""

from __future__ import annotations

import threading
import time

import numpy as np
from samples import Numbered

TIMEOUT_S = 120
LEVEL, OPTIONS = 0, {"level": 0}  # of `LevelOutside`


class Stage:
    """Has its level in a slot."""

    __slots__ = ("level",)

    def __init__(self, level):
        self.level = level


LEVELS = {"now": 0, "stages": [Stage(0)]}  # of `LevelsOutside`


class Noted(Numbered):
    """Writes down every build; the rows of a batch say its epoch and level."""

    def __init__(self, directory, length=6, **kwargs):
        super().__init__(length, **kwargs)
        self.directory = directory
        self.level = 0

    def __getitem__(self, index):
        with open(self.directory / "builds", "a") as file:
            file.write(f"{self.epoch} {index} {self.level}\n")
        y = [[index, self.epoch, self.level, self.rng.integers(2**20)]] * 4
        return np.zeros((4, 3), "float32"), np.array(y, "float32")

    def builds(self):
        """(epoch, index) of every build, in the order of their beginning."""
        return [(epoch, index) for epoch, index, _ in self.builds_and_levels()]

    def builds_and_levels(self):
        path = self.directory / "builds"
        lines = path.read_text().splitlines() if path.exists() else []
        return [tuple(map(int, line.split())) for line in lines]

    def wait_for(self, *wanted):
        deadline = time.monotonic() + TIMEOUT_S
        while not set(wanted) <= set(self.builds()):
            assert time.monotonic() < deadline, self.builds()
            time.sleep(0.01)


class Hooked(Noted):
    def on_epoch_end(self):
        self.level += 1


class LevelOutside(Noted):
    """Takes the level from a variable of its module."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        y[:, 2] = LEVEL + OPTIONS["level"]
        return x, y


class WaitsForGate(LevelOutside):
    """A batch waits for the gate when it is built for the first time.

    It is the batch `gated`, of an epoch and an index; `None`: batch 1 of all
    epochs but the first.
    """

    def __init__(self, *args, gated=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.gated = gated
        self.gate = threading.Event()

    def __getitem__(self, index):
        place, builds = (self.epoch, index), self.builds()
        is_gated = index == 1 and self.epoch > 0
        if self.gated is not None:
            is_gated = place == self.gated
        if is_gated and place not in builds:
            with open(self.directory / "builds", "a") as file:
                file.write(f"{self.epoch} {index} {self.level}\n")
            assert self.gate.wait(TIMEOUT_S)
        return super().__getitem__(index)


class LevelsOutside(Noted):
    """Takes the level from a container of its module."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        y[:, 2] = LEVELS["now"] + LEVELS["stages"][0].level
        return x, y


class LevelInside(Noted):
    """Takes the level from an object that it holds."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.stages = {"first": [Stage(0)]}

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        y[:, 2] = self.stages["first"][0].level
        return x, y


class Cacheable(Numbered):
    """Takes the level from an object that it holds, and nothing else."""

    def __init__(self, **kwargs):
        super().__init__(6, **kwargs)
        self.stages = [Stage(0)]

    def __getitem__(self, index):
        y = [[index, 0, self.stages[0].level, 0]] * 4
        return np.zeros((4, 3), "float32"), np.array(y, "float32")


class KeepsNotes(Noted):
    """Its builds count, and keep what they have made."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.count, self.seen, self.made = 0, (), None

    def __getitem__(self, index):
        self.count += 1
        self.seen += (index,)
        self.made = super().__getitem__(index)
        return self.made


class EditsNotes(Noted):
    """Its builds edit a dict that also holds the level."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.notes = {"builds": 0, "level": 0}

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        self.notes["builds"] += 1
        y[:, 2] = self.notes["level"]
        return x, y
