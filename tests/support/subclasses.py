"""Subclasses of classes whose `__reduce__` forgets what a subclass adds."""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import pathlib
import random

import numpy as np


class _Scaled:
    """Has a default that an object may replace."""

    scale = 1


class Generator(_Scaled, np.random.Generator):
    def normal(self, *args):
        return self.scale


class RandomState(_Scaled, np.random.RandomState):
    def normal(self, *args):
        return self.scale


class Bits(_Scaled, np.random.PCG64):
    pass


class Random(random.Random):
    def __init__(self, scale):
        super().__init__(3)
        self.scale = scale

    def setstate(self, state):
        assert self.scale
        super().setstate(state)


class Array(_Scaled, np.ndarray):
    pass


class Masked(_Scaled, np.ma.MaskedArray):
    pass


class Counter(collections.Counter):
    def __init__(self, scale):
        self.scale = scale
        super().__init__("aab")

    def update(self, *args):
        assert self.scale
        super().update(*args)


class Defaults(collections.defaultdict):
    def __init__(self, scale):
        super().__init__(int, {"a": 1})
        self.scale = scale


class Slots(collections.defaultdict):
    __slots__ = ("empty", "scale")


class Time(_Scaled, datetime.datetime):
    pass


class Span(_Scaled, datetime.timedelta):
    pass


class Decimal(_Scaled, decimal.Decimal):
    pass


class Fraction(_Scaled, fractions.Fraction):
    pass


class Path(_Scaled, type(pathlib.Path())):
    pass


class Text(_Scaled, str):
    pass


def _of(thing, scale=5):
    thing.scale = scale
    return thing


# What makes an object whose scale is 5.
MAKERS = {
    "generator": lambda: _of(Generator(np.random.PCG64(1))),
    "generator of bits": lambda: np.random.Generator(_of(Bits(1))),
    "RandomState": lambda: _of(RandomState(1)),
    "bits": lambda: _of(Bits(1)),
    "Random": lambda: Random(5),
    "array": lambda: _of(np.arange(3.0).view(Array)),
    "array of objects": lambda: _of(np.array(["a", None]).view(Array)),
    "masked array": lambda: _of(Masked([1, 2], mask=[0, 1])),
    "counter": lambda: Counter(5),
    "dict of defaults": lambda: Defaults(5),
    "dict with slots": lambda: _of(Slots(int, a=1)),
    "time": lambda: _of(Time(2020, 1, 1)),
    "span": lambda: _of(Span(3)),
    "decimal": lambda: _of(Decimal(3)),
    "fraction": lambda: _of(Fraction(1, 3)),
    "path": lambda: _of(Path("a/b")),
    "text": lambda: _of(Text("a")),
}
