"""Objects of C that keep a function, or refer to an object weakly."""

import dataclasses
import functools
import random
import typing
import weakref

import numpy as np

scale = 1
_rng = random.Random(3)


def set_scale(value):
    global scale
    scale = value


def scaled(number):
    return number * scale


class Scaling:
    def scale(self):
        return scale

    def draw(self):
        return _rng.random()


@dataclasses.dataclass
class Options:
    size: int = dataclasses.field(default=1, metadata={"change": scaled})
    length: typing.Annotated[int, scaled] = 1


_held = Scaling()
ufunc = np.frompyfunc(scaled, 1, 1)
key = functools.cmp_to_key(lambda one, other: scaled(one - other))
method = weakref.WeakMethod(_held.scale)
values = weakref.WeakValueDictionary(scaling=_held)
