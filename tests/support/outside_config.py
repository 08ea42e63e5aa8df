"""Variables that a program sets after this module was imported."""

import dataclasses
import enum
import functools
import struct
import types
import typing

import numpy as np

SCALE = 1
OPTIONS = {"sizes": [1]}
ARGS = None
LARGE = list(range(2000))
ARRAY = np.ones(3)
_same_array = ARRAY
SPACE = types.SimpleNamespace(mean=np.ones(2), names=["a"])


@dataclasses.dataclass
class Config:
    depth: int = 1


config = Config()
MISSING = object()
table_or_none = None


class Unset:
    """The class of a marker."""

    NOTHING = object()


UNSET = Unset()
found = {"value": MISSING}
layout = struct.Struct("<i")
transform = abs


class Shallow:
    depth = 1


class Deep:
    depth = 9


Chosen = Shallow


def doubled(x):
    return 2 * x


def total(x, sizes, more):
    return x + sum(sizes) + more


_is_ready = False
_table = None


def same_array():
    """What another name says of the array that the module began with."""
    return _same_array.tolist()


def is_ready():
    """Makes a table of its own when it is first asked."""
    global _is_ready, _table
    if not _is_ready:
        _is_ready, _table = True, object()
    return _table is not None


_scaled = None


def scaled():
    """Keeps what it computes from `SCALE`."""
    global _scaled
    if _scaled is None:
        _scaled = SCALE
    return _scaled


@functools.lru_cache
def cached():
    """Keeps what it computes from `SCALE`."""
    return SCALE


@functools.lru_cache
def get_settings(name="a", *, number=0):
    return types.SimpleNamespace(name=name, number=number, scale=1)


class Memo:
    """Keeps what it computes from `SCALE`."""

    def __init__(self):
        self.kept = {}

    def scaled(self):
        return self.kept.setdefault("scaled", SCALE)


memo = Memo()


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: int = 1


frozen = Frozen()


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    scale: int = 1


class Refuses:
    """Can neither be changed nor be pickled."""

    __slots__ = ("scale",)

    def __init__(self, scale):
        object.__setattr__(self, "scale", scale)

    def __setattr__(self, name, value):
        raise AttributeError(name)

    def __reduce__(self):
        raise TypeError("on purpose")


refuses = Refuses(1)


class Doubled:
    """A descriptor that keeps twice the number which is assigned."""

    def __set_name__(self, owner, name):
        self.name = name

    def __set__(self, instance, value):
        vars(instance)[self.name] = 2 * value

    def __get__(self, instance, owner):
        return vars(instance)[self.name]


class Converting:
    scale = Doubled()

    def __init__(self):
        self.scale = 1


converting = Converting()
DTYPE = np.float32
curve = np.poly1d([1])
frozen_slots = FrozenSlots()
other_frozen_slots = FrozenSlots(7)  # with another value than the class's


class Side(enum.Enum):
    LEFT = 1


BY_KEY = {Side.LEFT: 1, ("a", 1): 1, int: 1}


def rescale(scale):
    """Sets `SCALE`, and drops what was computed from it."""
    global SCALE, _scaled
    SCALE, _scaled = scale, None
    cached.cache_clear()


_options = None


def options():
    """Makes the options when they are first asked for."""
    global _options
    if _options is None:
        _options = {"scale": 1}
    return _options


class Settings:
    """Has one object, which is made when it is first asked for."""

    _only = None

    def __new__(cls):
        if cls._only is None:
            cls._only = super().__new__(cls)
            cls._only.scale = 1
        return cls._only


T = typing.TypeVar("T")


class Box(typing.Generic[T]):
    """Is used by another name."""

    size = 0


IntBox = Box[int]


def constant():
    return 1


class Default:
    """Has a size, but no attribute of its own."""

    size = 0


class Mode:
    """Is a context manager that only the program uses."""

    level = 1

    def __init__(self, level):
        self.own = level

    def __enter__(self):
        Mode.level, self.own = self.own, Mode.level

    def __exit__(self, *_):
        Mode.level = self.own


class Items:
    """Has items that only the program sets."""

    def __init__(self):
        self._values = {"size": 1}

    def __getitem__(self, key):
        return self._values[key]

    def __setitem__(self, key, value):
        self._values[key] = value


items = Items()


class Scaled:
    """Has a method that only the program calls."""

    scale = 1

    @classmethod
    def set_scale(cls, scale):
        cls.scale = scale


def _make_scaled():
    scale = 1

    def scaled_by_cell():
        return scale

    def set_scale(value):
        nonlocal scale
        scale = value

    return scaled_by_cell, set_scale


scaled_by_cell, set_cell = _make_scaled()


def scaled_by_default(scale=1):
    """Has its scale as a default."""
    return scale


HELD = {"scale": 1}


def scaled_by_alias(held=HELD):
    """Has a container of the module as a default."""
    return held["scale"]


class Open(dict):
    """A dict whose items are attributes as well."""

    def __getattr__(self, name):
        return self[name]

    def __setattr__(self, name, value):
        self[name] = value


_open = None


def opened():
    """Makes the options when they are first needed."""
    global _open
    if _open is None:
        _open = Open(scale=1)
    return _open


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Word(enum.StrEnum):
    A = "a"
    B = "b"


class Pair(typing.NamedTuple):
    first: object
    second: int


class Steps(list):
    """A list that is no plain one."""


class Names(set):
    """A set that is no plain one."""


class Attributes(dict):
    """Has its items as attributes, and raises `KeyError` for others."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Number(int):
    """A number that is no plain one."""


class Step:
    def __init__(self, size):
        self.size = size

    def __repr__(self):
        return f"Step({self.size})"


value = None  # of any type
held = types.SimpleNamespace(value=None)
