"""Objects that hold what batches depend on, and datasets that use them.

This module does not import Keras, so that a worker which imports it does not.
"""

from __future__ import annotations

import argparse
import collections
import enum
import functools
import os
import sys
import types

import numpy as np
import outside_config as conf
from samples import Holds

from keras_fastdata import FastPyDataset


class Exclusive(Holds):
    """Its workers cannot be there beside former ones."""

    def on_worker_start(self):
        os.mkdir(self.thing)

    def on_worker_stop(self):
        os.rmdir(self.thing)


class SetUp(Holds):
    """Sets up its workers by a function."""

    def on_worker_start(self):
        self.thing[0]()


def sets_up(kind):
    """A function for `on_worker_start`, and one that reads what it sets."""

    class Config:
        size = 1

    return {
        "class": (lambda: setattr(Config, "size", 5), lambda: Config.size),
        "module": (
            lambda: setattr(conf, "SCALE", 5),
            lambda: conf.SCALE,
        ),
        "item of a module": (
            lambda: conf.HELD.update(scale=5),
            lambda: conf.HELD["scale"],
        ),
        "setting": (
            lambda: np.seterr(under="raise"),
            lambda: 5 * (np.geterr()["under"] == "raise"),
        ),
    }[kind]


SIZE = "KERAS_FASTDATA_SIZE"


def size_in_environment(more, index):
    return more + int(os.environ.get("KERAS_FASTDATA_SIZE", "1"))


def size_by_a_constant(more, index):
    return more + int(os.environ[SIZE])


class OfVariable(FastPyDataset):
    """Its class names an environment variable, and so does the dataset."""

    NAME = SIZE

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.name = "KERAS_FASTDATA_OTHER_SIZE"

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return np.array([int(os.environ[self.NAME]), self._size()])

    def _size(self):
        return int(os.getenv(self.name))


def number_of_arguments(more, index):
    return more + len(sys.argv)


def parsed_size(more, index):
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int)
    return more + parser.parse_known_args()[0].size


def size_of_floats(more, index):
    import keras

    return more + np.dtype(keras.config.floatx()).itemsize


SIZES = {
    "environment": size_in_environment,
    "constant": size_by_a_constant,
    "arguments": number_of_arguments,
    "parsed": parsed_size,
    "floats": size_of_floats,
}


class Level(enum.Enum):
    """Its members are keys."""

    EASY = 1


class Bag(list):
    """Has items."""


# Classes of a user's that derive from a container, by the name of that.
SUBCLASSES = {
    base.__name__: type(f"My{base.__name__}", (base,), {"__module__": __name__})
    for base in (
        *(list, set, dict, collections.deque, collections.OrderedDict),
        *(collections.defaultdict, collections.Counter),
        *(collections.UserList, collections.UserDict),
    )
}
globals().update({kind.__name__: kind for kind in SUBCLASSES.values()})


def add_number(container, number):
    """Adds a number to a container."""
    if isinstance(container, set):
        container.add(number)
    elif isinstance(container, (dict, collections.UserDict)):
        container[number] = number
    else:
        container.append(number)


def greatest_in(container, _):
    """Returns the greatest item of a container, or the greatest key."""
    return max(container)


Row = collections.namedtuple("Row", ["options"])


def holders_of_a_number():
    """Objects that hold a number, how to read it and how to set it."""
    keyed = {Level.EASY: {"a": 0}, ("a", 0): np.zeros(2)}
    row, bag = Row({"a": 0}), Bag([0])
    masked = np.ma.masked_array([0, 1], [False, True])
    objects = np.array([{"a": 0}, None], object)
    partial = functools.partial(lambda held: held["a"], {"a": 0})
    bound = collections.UserDict(a=0).get
    library = np.vectorize(abs)
    library.thing = conf.Config(0)
    import keras  # here, so that few workers import it

    tracked = keras.callbacks.Callback()
    tracked.thing = conf.Config(0)
    return {
        "enum": (
            lambda: keyed[Level.EASY]["a"],
            lambda n: keyed[Level.EASY].update(a=n),
        ),
        "tuple": (lambda: keyed["a", 0][0], lambda n: keyed["a", 0].fill(n)),
        "named": (
            lambda: row.options["a"],
            lambda n: row.options.update(a=n),
        ),
        "bag": (lambda: bag[0], lambda n: bag.__setitem__(0, n)),
        "masked": (lambda: masked[0], lambda n: masked.__setitem__(0, n)),
        "objects": (lambda: objects[0]["a"], lambda n: objects[0].update(a=n)),
        "partial": (partial, lambda n: partial.args[0].update(a=n)),
        "bound": (
            lambda: bound("a"),
            lambda n: bound.__self__.update(a=n),
        ),
        "library": (
            lambda: library.thing.depth,
            lambda n: setattr(library.thing, "depth", n),
        ),
        "keras": (
            lambda: tracked.thing.depth,
            lambda n: setattr(tracked.thing, "depth", n),
        ),
    }


class Refusing(list):
    """Refuses to be looked into."""

    def __len__(self):
        raise RuntimeError("on purpose")


class Stage:
    """Has its size in a slot."""

    __slots__ = ("size",)


class AttributeDict(dict):
    """Has its items as attributes."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


def holding(kind):
    """An object with a size, and what holds it."""
    thing = {"slot": Stage, "items": AttributeDict}.get(
        kind, types.SimpleNamespace
    )()
    return thing, [{"key": (thing,)}] if kind == "nested" else thing


def held_by(holder):
    """The function that a container, a namespace or the like holds."""
    if isinstance(holder, types.SimpleNamespace):
        return holder.f
    if isinstance(holder, np.vectorize):
        return holder.pyfunc
    return next(iter(holder))


def made_by_second(kinds, _):
    """Returns the factor of an object of the second class."""
    return kinds[1]().factor


def factor_of(kinds, _):
    """Returns the factor that an object of the second class gets."""
    config, kind = kinds
    item = kind()
    item.factor = config.factor
    return item.factor
