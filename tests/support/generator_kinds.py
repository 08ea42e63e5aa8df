"""Random generators in all the places where datasets have them."""

from __future__ import annotations

import functools
import random

import numpy as np

from keras_fastdata import FastPyDataset

RNG = np.random.default_rng(100)


@functools.lru_cache
def kept():
    """Returns a generator that is made at the first call."""
    return np.random.default_rng(101)


class Slots:
    __slots__ = ("rng",)

    def __init__(self):
        self.rng = np.random.default_rng(102)


class Seedable:
    """Has numbers of its own kind, and a method that seeds them."""

    def __init__(self):
        self.state = 1

    def set_random_seed(self, seed):
        self.state = seed

    def draw(self):
        self.state = (self.state * 6364136223846793005 + 1) % 2**63
        return self.state


class OwnKind(random.Random):
    """Draws from a generator that its `seed` does not know of."""

    def __init__(self):
        super().__init__(0)
        self.source = np.random.default_rng(103)

    def draw(self):
        return self.source.integers(2**60)


class Environment:
    """What it calls `seed` is none of our business."""

    def seed(self, seed=None):
        raise AssertionError

    def step(self):
        """Goes on."""


class Transform:
    """As albumentations 2 has it: shared by all, made anew by a seed."""

    def __init__(self, rng=None):
        self.random_generator = rng
        if rng is None:
            self.set_random_seed(None)

    def set_random_seed(self, seed):
        self.random_generator = np.random.default_rng(seed)

    def draw(self):
        return self.random_generator.integers(2**60)


class Lazily:
    """Makes its generator when it first draws."""

    rng = None

    def draw(self):
        if self.rng is None:
            self.rng = np.random.default_rng(104)
            self.rng.integers(9)
        return self.rng.integers(2**60)


class Aug:
    shared = np.random.RandomState(105)  # of the class

    def draw(self):
        return self.shared.randint(2**60)


def _closure():
    rng = np.random.default_rng(106)
    return lambda: rng.integers(2**60)


def _with_default(rng=np.random.default_rng(107)):  # noqa: B008
    return rng.integers(2**60)


def of_the_module():
    return RNG.integers(2**60)


class Everywhere(FastPyDataset):
    """Draws from generators in all places, one number each."""

    tool = np.random.default_rng(108)

    def __init__(self, length=6, **kwargs):
        super().__init__(**kwargs)
        self.length = length
        deep = {"a": [{"b": ({"c": [[np.random.RandomState(109)]]},)}]}
        self.deep = [deep]
        self.slots = Slots()
        self.bits = np.random.PCG64(110)
        self.pcg = np.random.RandomState(np.random.PCG64(111))
        self.python = [random.Random(112)]
        self.own = OwnKind()
        self.sequence = np.random.SeedSequence(0)
        self.spawning = np.random.default_rng(113)
        self.closure = _closure()
        self.partial = functools.partial(
            np.random.Generator.integers, np.random.default_rng(114), 2**60
        )
        self.method = np.random.default_rng(115).integers
        self.pythons_own = random.getrandbits
        self.numpys_own = np.random.randint
        self.seedable = (Seedable(),)
        transform = Transform()
        self.transforms = [transform, Transform(transform.random_generator)]
        self.lazily = Lazily()
        self.aug = Aug()
        self.weights = {np.random.default_rng(116): 0.5}
        self.table = np.array([None, random.Random(117)], object)
        self.environment = Environment()
        self.many = list(map(str, range(100_000)))

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if not hasattr(self, "late"):
            self.late = np.random.default_rng(118)
        nested = self.deep[0]["a"][0]["b"][0]["c"][0][0]
        return np.array(
            [
                nested.randint(2**60),
                self.slots.rng.integers(2**60),
                self.bits.random_raw() >> 4,
                self.pcg.randint(2**60),
                self.python[0].getrandbits(60),
                self.own.draw(),
                *(
                    np.random.default_rng(child).integers(2**60)
                    for child in self.sequence.spawn(2)
                ),
                *(one.integers(2**60) for one in self.spawning.spawn(2)),
                self.closure(),
                self.partial(),
                self.method(2**60),
                self.pythons_own(60),
                self.numpys_own(2**60),
                self.seedable[0].draw() >> 3,
                *(one.draw() for one in self.transforms),
                self.lazily.draw(),
                self.aug.draw(),
                *(one.integers(2**60) for one in self.weights),
                self.table[1].getrandbits(60),
                self.tool.integers(2**60),
                self.late.integers(2**60),
                of_the_module(),
                _with_default(),
            ]
        )
