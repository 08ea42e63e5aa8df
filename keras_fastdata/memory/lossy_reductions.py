"""Pickles objects whose `__reduce__` loses a part of them, or runs code again.

Several classes of the standard library and of NumPy forget the attributes that
a user's subclass adds, and call the user's `__init__` with other arguments.
Others give an object's value or items to the user's `__new__`, `__setitem__` or
`append`, which may have changed them before. NumPy's generators forget the
subclass too. Images of Pillow forget the transparency in a palette.
"""

from __future__ import annotations

import collections
import contextlib
import copyreg
import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import pickle
import random
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_fastdata._modules import is_users_class, loaded, packages_of
from keras_fastdata.memory.by_name import made_by_base

_FORGETFUL: tuple[type, ...] = (
    random.Random,
    collections.Counter,
    collections.defaultdict,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    decimal.Decimal,
    fractions.Fraction,
    pathlib.PurePath,
    np.ndarray,
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
)
# What adds an item to a container, whatever methods the user's class has.
_ADDERS: dict[type, Any] = {
    collections.OrderedDict: collections.OrderedDict.__setitem__,
    dict: dict.__setitem__,
    list: list.append,
    collections.deque: collections.deque.append,
}
# Other classes, with the methods that see an object's value or items again.
_SEEN_BY: dict[type, frozenset[str]] = {
    **dict.fromkeys(_ADDERS, frozenset({"__setitem__", "append", "extend"})),
    **dict.fromkeys(
        (int, float, complex, str, bytes, tuple), frozenset({"__new__"})
    ),
    **dict.fromkeys(
        (set, frozenset, bytearray, BaseException),
        frozenset({"__new__", "__init__"}),
    ),
}
# These make objects without a call of a method that the user may override,
# such as `update`.
_MAKERS: dict[type, Any] = {
    collections.Counter: dict,
    random.Random: random.Random.__base__,
}
_MOST_PARTS = 5  # that come before the function which sets the state


def reduce_whole(reduce_map: Callable[[Any], Any], obj: Any) -> Any:
    """Returns the parts of an object that its `__reduce__` loses in part.

    Returns `NotImplemented` for all other objects.

    Args:
        reduce_map: Used in place of the `__reduce__` of a memory map, which
            would copy the file.
        obj: The object.
    """
    kind: Any = type(obj)
    base = _incomplete_base(kind)
    if base is None and _has_own_attributes(obj):
        base = kind
    if base is None:
        has_palette = "PIL" in packages_of(kind)
        return _reduce_image(obj) if has_palette else NotImplemented
    if is_map := isinstance(obj, np.memmap):
        reduced = reduce_map(obj)
    else:
        reduced = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    parts = [*reduced, *[None] * (_MOST_PARTS - len(reduced))]
    make, args, state, items, pairs = parts
    value = _value_of(obj, base)
    if value is None and make is copyreg.__newobj__:  # type: ignore[attr-defined]
        value = args[1:]
    elif value is None and make is kind:
        value = args
    if value is not None:
        make, args = made_by_base, (kind, _MAKERS.get(base, base), value)
    # Nothing of this package's classes, which values of modules may not have.
    attributes = dict(getattr(obj, "__dict__", {}))
    if is_map:
        attributes.pop("_mmap", None)
    whole = (
        state if hasattr(base, "__setstate__") else None,
        attributes,
        _in_slots(obj),
        [(item,) for item in items or ()] or list(pairs or ()),
    )
    return make, args, whole, None, None, _set_state


def _has_own_attributes(obj: Any) -> bool:
    """Returns whether the program has set attributes of a library's object.

    The hard mask of an array counts as one.
    """
    is_array = isinstance(obj, np.ndarray) and not isinstance(obj, np.memmap)
    if not is_array and type(obj) not in (collections.Counter, random.Random):
        return False
    if not _is_of_python_or_numpy(type(obj)):
        return False
    return getattr(obj, "hardmask", False) is True or any(
        not name.startswith("_") and name != "gauss_next"
        for name in getattr(obj, "__dict__", ())
    )


def _value_of(obj: Any, base: Any) -> tuple[Any, ...] | None:
    """Returns the arguments that make an object; `None` if pickle tells."""
    if issubclass(base, np.random.Generator):
        return (obj.bit_generator,)
    if issubclass(base, np.random.RandomState):
        return (obj._bit_generator,)
    if issubclass(base, np.random.BitGenerator):
        return ()
    # Numbers, texts and tuples tell their value so.
    read = getattr(base, "__getnewargs__", None)
    return None if read is None else read(obj)


@functools.lru_cache(maxsize=1024)
def _incomplete_base(kind: Any) -> type | None:
    """Returns the first class that is not the user's, if it is one of these.

    Args:
        kind: The class of an object. If it is not the user's, or says itself
            how to pickle the object, the result is `None`.
    """
    if not is_users_class(kind) or issubclass(kind, enum.Enum):
        return None
    users = [base for base in kind.__mro__ if is_users_class(base)]
    defined = {
        name
        for base in users
        if "_fields" not in vars(base)  # a named tuple
        for name in vars(base)
    }
    names = {"__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"}
    if defined & (names | {"__getnewargs__", "__getnewargs_ex__"}):
        return None
    for base in kind.__mro__:
        if base in users or not issubclass(base, (*_FORGETFUL, *_SEEN_BY)):
            continue
        if not _is_of_python_or_numpy(base):
            return None
        seen_by = _SEEN_BY.get(base, frozenset())
        if issubclass(base, BaseException):
            seen_by = _SEEN_BY[BaseException]
        is_incomplete = issubclass(base, _FORGETFUL) or defined & seen_by
        return base if is_incomplete else None
    return None


def _is_of_python_or_numpy(kind: type) -> bool:
    library = kind.__module__.partition(".")[0]
    return library in ("numpy", *sys.stdlib_module_names)


def _in_slots(obj: Any) -> dict[str, Any]:
    """Returns the attributes in slots of the user's classes."""
    held = {}
    for base in filter(is_users_class, type(obj).__mro__):
        for name, slot in vars(base).items():
            if isinstance(slot, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # without a value
                    held[name] = slot.__get__(obj)
    return held


def _set_state(
    obj: Any,
    parts: tuple[Any, dict[str, Any], dict[str, Any], list[tuple[Any, ...]]],
) -> None:
    """Sets the state, the attributes in `__dict__` and slots, and the items."""
    state, attributes, slots, items = parts
    if items:
        add = next(_ADDERS[b] for b in type(obj).__mro__ if b in _ADDERS)
        for item in items:
            add(obj, *item)
    # A user's `setstate` may read attributes.
    if attributes:
        vars(obj).update(attributes)
    for name, value in slots.items():
        object.__setattr__(obj, name, value)
    if state is not None:
        obj.__setstate__(state)


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
