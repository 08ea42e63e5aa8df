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
# The same, of classes that are no user's.
OF_LIBRARIES = {
    "counter of Python": lambda: _of(collections.Counter("ab")),
    "Random of Python": lambda: _of(random.Random(1)),
    "recarray": lambda: _of(np.rec.array([(1, 2.0)], names="a,b")),
    "masked array of NumPy": lambda: _of(np.ma.array([1, 2], mask=[0, 1])),
}


# -- classes whose methods change what they are given -------------------------


class Divided(dict):
    def __setitem__(self, key, value):
        super().__setitem__(key, value / 2)


class Counted(collections.defaultdict):
    def __setitem__(self, key, value):
        super().__setitem__(key, value + 1)


class Latest(collections.OrderedDict):
    def __init__(self, size):
        super().__init__()
        self.size = size

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        if len(self) > self.size:
            self.popitem(last=False)


class Sums(list):
    def append(self, value):
        super().append(value + sum(self))

    def extend(self, values):
        for value in values:
            self.append(value)


class Queue(collections.deque):
    def append(self, value):
        super().append(value + 1)


class Celsius(float):
    def __new__(cls, fahrenheit):
        return super().__new__(cls, (fahrenheit - 32) * 5 / 9)


class Lower(str):
    def __new__(cls, text, note):
        made = super().__new__(cls, text.lower() + "!")
        made.note = note
        return made


class Names(set):
    def __init__(self, path, count):
        super().__init__(f"{path}{number}" for number in range(count))


class Point(collections.namedtuple("Point", "x, y")):
    def __new__(cls, x):
        return super().__new__(cls, x, 2 * x)


class Failure(ValueError):
    def __init__(self, path, line):
        super().__init__(f"{path}:{line}")
        self.line = line


class Delegated(dict):
    """A well-known recipe."""

    __getattr__ = dict.__getitem__

    def __setattr__(self, name, value):
        self[name] = value

    def __setitem__(self, key, value):
        super().__setitem__(key, value)


def _filled(thing, *pairs):
    for key, value in pairs:
        thing[key] = value
    return thing


CHANGING = {
    "dict": lambda: _filled(Divided(), ("a", 4)),
    "defaultdict": lambda: _filled(Counted(int), ("a", 4)),
    "OrderedDict": lambda: _filled(Latest(2), ("a", 1), ("b", 2), ("c", 3)),
    "list": lambda: _extended(Sums(), [1, 2, 3]),
    "deque": lambda: _extended(Queue(maxlen=2), [1, 2, 3]),
    "float": lambda: Celsius(100),
    "str": lambda: Lower("A", "b"),
    "set": lambda: Names("a", 3),
    "namedtuple": lambda: Point(3),
    "exception": lambda: Failure("a", 3),
    "delegated": lambda: _filled(Delegated(), ("a", 1)),
}


def _extended(thing, values):
    for value in values:
        thing.append(value)
    return thing
