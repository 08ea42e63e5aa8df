"""Values of many kinds, which a program changes between epochs."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import types
import typing

import numpy as np


class Attributes(dict):
    """Has its items as attributes."""

    def __getattr__(self, name):
        return self[name]

    __setattr__ = dict.__setitem__


class Lower(collections.OrderedDict):
    def __setitem__(self, key, value):
        super().__setitem__(key.lower(), value)


class Items(list):
    pass


class Sevens(dict):
    def __missing__(self, key):
        return 7


@dataclasses.dataclass
class Point:
    x: int = 1
    more: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: int = 1


@dataclasses.dataclass(slots=True)
class Slotted:
    x: int = 1
    point: Point = dataclasses.field(default_factory=Point)


class Node:
    def __init__(self, value):
        self.value = value
        self.children = []
        self.parent = None

    def add(self, child):
        child.parent = self
        self.children.append(child)
        return self


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Size(typing.NamedTuple):
    width: int = 1


class Count(int):
    pass


class Settings:
    scale = 1
    sizes = [1]
    point = Point()

    class Inner:
        depth = 1


class Derived(Settings):
    pass


class Single:
    _made = None

    def __new__(cls):
        if cls._made is None:
            cls._made = super().__new__(cls)
            cls._made.scale = 1
        return cls._made


class Keyed:
    def __init__(self):
        self.held = {"a": 1}

    def __getitem__(self, key):
        return self.held[key]

    def __setitem__(self, key, value):
        self.held[key] = value


def plus_one(x):
    return x + 1


def plus_two(x):
    return x + 2


def counter():
    number, point = 1, Point()

    def read():
        return number, point.x

    def write(value):
        nonlocal number
        number = value

    return read, write


attributes = Attributes(a=1, inner=Attributes(b=2))
same_attributes = attributes
lower = Lower(a=1, b=2)
items = Items([1, 2])
sevens = Sevens(a=1)
point = Point()
frozen = Frozen()
slotted = Slotted()
root = Node(1).add(Node(2).add(Node(3)))
color = Color.RED
size = Size()
count = Count(1)
space = types.SimpleNamespace(a=1, point=Point())
lists = collections.defaultdict(list, a=[1])
tree = {"node": Node(1), "mixed": [Slotted(), Frozen()], (1, 2): Point()}
pair = (Point(), Slotted())
sets = {frozenset([1])}
queue = collections.deque([1, Point()], maxlen=5)
chain = collections.ChainMap({"a": 1}, {"b": 2})
array = np.arange(5)
records = np.array([(1, 2.0)], dtype=[("a", int), ("b", float)])
objects = np.array([Point(), None], dtype=object)
power = functools.partial(pow, 2)
functions = {"one": plus_one, "pow": power}
active = "one"
chosen = plus_one
Chosen = Settings
keyed = Keyed()
single = Single()
view = types.MappingProxyType({"a": 1})
read, write = counter()
_late = _late_items = None


def late():
    """Makes a node when it is first needed."""
    global _late
    if _late is None:
        _late = Node(1).add(Node(2))
    return _late


def late_items():
    global _late_items
    if _late_items is None:
        _late_items = Attributes(a=1)
    return _late_items
