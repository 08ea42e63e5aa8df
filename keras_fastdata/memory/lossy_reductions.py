"""Pickles objects whose `__reduce__` loses a part of them.

Several classes of the standard library and of NumPy forget the attributes that
a user's subclass adds, and call the user's `__init__` with other arguments.
NumPy's generators forget the subclass too. Images of Pillow forget the
transparency in a palette.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import decimal
import fractions
import functools
import pathlib
import pickle
import random
import sys
import types
from typing import Any, NamedTuple

import numpy as np

from keras_fastdata._modules import is_users_class, loaded
from keras_fastdata.memory.by_name import made_by_base

_FORGETFUL: tuple[type, ...] = (
    random.Random,
    collections.Counter,
    collections.defaultdict,
    datetime.date,
    datetime.datetime,
    datetime.time,
    datetime.timedelta,
    decimal.Decimal,
    fractions.Fraction,
    pathlib.PurePath,
    np.ndarray,
    np.ma.MaskedArray,
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
)
_MOST_PARTS = 5  # that come before the function which sets the state


def reduce_whole(obj: Any) -> Any:
    """Returns the parts of an object that its `__reduce__` loses in part.

    Returns `NotImplemented` for all other objects.
    """
    kind: Any = type(obj)
    base = _forgetful_base(kind)
    if base is None:
        return _reduce_image(obj)
    reduced: tuple[Any, ...] = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    make, args, *rest = reduced
    generator = _bit_generator(obj, base)
    if generator is not None:
        args = generator
    if generator is not None or make is kind:
        make, args = made_by_base, (kind, _MAKERS.get(base, base), args)
    state = rest[0] if rest else None
    items = (*rest[1:], *[None] * (_MOST_PARTS - 3 - len(rest[1:])))
    parts = _State(state, dict(getattr(obj, "__dict__", {})), _in_slots(obj))
    return make, args, parts, *items, _set_state


def _bit_generator(obj: Any, base: type) -> tuple[Any, ...] | None:
    """Returns the arguments that make a generator of NumPy, else `None`."""
    if issubclass(base, np.random.Generator):
        return (obj.bit_generator,)
    if issubclass(base, np.random.RandomState):
        return (obj._bit_generator,)
    return () if issubclass(base, np.random.BitGenerator) else None


# These make objects without a call of a method that the user may override,
# such as `update`.
_MAKERS: dict[type, Any] = {
    collections.Counter: dict,
    random.Random: random.Random.__base__,
}


@functools.lru_cache(maxsize=1024)
def _forgetful_base(kind: Any) -> type | None:
    """Returns the first class that is not the user's, if that forgets.

    Args:
        kind: The class of an object. If it is not the user's, or says itself
            how to pickle the object, the result is `None`.
    """
    if not issubclass(kind, _FORGETFUL) or not is_users_class(kind):
        return None
    bases = iter(kind.__mro__)
    names = {"__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"}
    for base in bases:
        if not is_users_class(base):
            break
        if names & vars(base).keys():
            return None
    known: type = base
    library = known.__module__.partition(".")[0]
    if library not in ("numpy", *sys.stdlib_module_names):
        return None
    # A memory map's attributes are those of its file.
    return None if issubclass(known, np.memmap) else known


class _State(NamedTuple):
    state: Any  # what `__reduce__` tells of it
    attributes: dict[str, Any]
    slots: dict[str, Any]


def _in_slots(obj: Any) -> dict[str, Any]:
    """Returns the attributes in slots of the user's classes."""
    held = {}
    for base in filter(is_users_class, type(obj).__mro__):
        for name, slot in vars(base).items():
            if isinstance(slot, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # without a value
                    held[name] = slot.__get__(obj)
    return held


def _set_state(obj: Any, parts: _State) -> None:
    # A user's `setstate` may read attributes.
    if parts.attributes:
        vars(obj).update(parts.attributes)
    for name, value in parts.slots.items():
        object.__setattr__(obj, name, value)
    if parts.state is not None:
        obj.__setstate__(parts.state)


# -- images of Pillow ----------------------------------------------------------


def _reduce_image(obj: Any) -> Any:
    """Adds the palette of an image, if its colors are more than RGB."""
    pillow = loaded("PIL.Image")
    if pillow is None or not isinstance(obj, pillow.Image):
        return NotImplemented
    if obj.mode not in ("P", "PA"):
        return NotImplemented
    obj.load()  # this can change the palette
    if not obj.palette or obj.palette.mode == "RGB":
        return NotImplemented
    make, args, state, *_ = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    colors = obj.palette.mode
    palette = obj.getpalette(colors)
    return make, args, (state, palette, colors), None, None, _set_image


def _set_image(image: Any, parts: tuple[Any, Any, str]) -> None:
    state, palette, colors = parts
    image.__setstate__(state)
    image.putpalette(palette, colors)
