"""Objects of C that keep a function, or refer to an object weakly."""

import functools
import weakref

import numpy as np

scale = 1


def set_scale(value):
    global scale
    scale = value


def scaled(number):
    return number * scale


class Scaling:
    def scale(self):
        return scale


_held = Scaling()
ufunc = np.frompyfunc(scaled, 1, 1)
key = functools.cmp_to_key(lambda one, other: scaled(one - other))
method = weakref.WeakMethod(_held.scale)
values = weakref.WeakValueDictionary(scaling=_held)
