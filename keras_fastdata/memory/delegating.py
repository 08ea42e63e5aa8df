"""Pickles objects whose classes define `__getattr__`.

Unpickling asks an object for `__setstate__` before the object has attributes.
A `__getattr__` that asks one of its attributes in turn, as that of a wrapper
does, would then call itself for ever.
"""

from __future__ import annotations

import functools
import pickle
from typing import Any

from keras_fastdata._modules import is_users_class

_WITH_STATE = 3  # parts of a reduction that has a state
_MOST_PARTS = 5  # that come before the function which sets the state


def reduce_without_asking(obj: Any) -> Any:
    """Returns the parts of an object that has a user's `__getattr__`.

    Returns `NotImplemented` for all other objects.
    """
    kind: Any = type(obj)
    if not _delegates(kind):
        return NotImplemented
    reduced = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if len(reduced) < _WITH_STATE or reduced[_WITH_STATE - 1] is None:
        return reduced
    missing = [None] * (_MOST_PARTS - len(reduced))
    return *reduced, *missing, _set_state


@functools.lru_cache(maxsize=1024)
def _delegates(kind: Any) -> bool:
    """Returns whether objects of a class are pickled in the default way."""
    names = {name for base in kind.__mro__ for name in vars(base)}
    return (
        "__getattr__" in names
        and "__setstate__" not in names
        and not issubclass(kind, type)
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and is_users_class(kind)
    )


def _set_state(obj: Any, state: Any) -> None:
    """Sets the attributes of an object, as unpickling does by default."""
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    if attributes:
        obj.__dict__.update(attributes)
    for name, value in (slots or {}).items():
        setattr(obj, name, value)
