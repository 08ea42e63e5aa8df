"""Tells what of a variable's value a fingerprint covers.

Plain data is pickled. Of an object these are its class, the functions and the
user's classes of all that it holds: what else it holds may differ from run to
run. See outside_values.py for the plain data within objects.
"""

from __future__ import annotations

import abc
import array
import collections
import datetime
import enum
import functools
import gc
import io
import logging
import numbers
import operator
import os
import pickle
import re
import threading
import types
import uuid
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_fastdata._modules import is_users_class
from keras_fastdata.building.attributes import (
    attributes_of,
    items_of,
    slot_values,
)
from keras_fastdata.building.generator_wrappers import wrapper_of
from keras_fastdata.building.variables import OPEN
from keras_fastdata.engine.library_objects import CODE_TYPES, content_of
from keras_fastdata.engine.stable_pickle import is_installed
from keras_fastdata.memory import class_refs

_MOST_OBJECTS = 1000  # within a global object
_DATA = (
    *(numbers.Number, str, bytes, type(None), np.ndarray, np.generic, np.dtype),
    *(tuple, list, dict, set, frozenset, range, slice, enum.Enum, os.PathLike),
    *(operator.attrgetter, operator.itemgetter, operator.methodcaller),
    *(re.Pattern, uuid.UUID, types.EllipsisType),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
    *(bytearray, collections.deque, array.array, types.MappingProxyType),
)
_PLAIN = (*_DATA, type, types.FunctionType)
# What cannot be pickled, as a rule, and has no content that batches depend on.
WITHOUT_CONTENT = (
    *(type(threading.Lock()), type(threading.RLock())),
    *(threading.Condition, threading.Semaphore, threading.Event),
    *(types.GetSetDescriptorType, types.MemberDescriptorType),
    type(vars(abc.ABC)["_abc_impl"]),  # each abstract class has one
    *(logging.Logger, logging.Handler, io.IOBase),
)
_TABLES = {"pandas", "polars", "pyarrow"}


def parts_of_value(value: Any) -> tuple[Any, ...]:
    """Returns the parts of a global variable that a fingerprint covers.

    Of an object these are its class, those of the user's objects within, and
    the functions there: what else it holds may differ from run to run.
    """
    if isinstance(value, (*_PLAIN, functools.partial, staticmethod)):
        return parts_inside(value)
    if isinstance(value, types.ModuleType):
        return (value.__name__,)
    return type(value), *_code_within([value])


def parts_inside(value: Any) -> tuple[Any, ...]:
    """Returns the objects in a wrapper such as `partial`, or just `value`."""
    if isinstance(value, (staticmethod, classmethod)):
        return (type(value), value.__func__)
    if isinstance(value, property):
        return value.fget, value.fset
    if isinstance(value, functools.cached_property):
        return (value.func,)
    if isinstance(value, (functools.partial, functools.partialmethod)):
        return value.func, value.args, value.keywords
    if isinstance(value, functools._lru_cache_wrapper):
        return (value.__wrapped__,)
    if isinstance(value, types.MappingProxyType):
        return (dict(value),)
    return (value,)


def is_data(value: Any) -> bool:
    """Returns whether a value is data that can be pickled, as a rule."""
    return isinstance(value, _DATA)


def is_table(value: Any) -> bool:
    """Returns whether a value is a table, or the like, of a library."""
    return type(value).__module__.partition(".")[0] in _TABLES


def covers(value: Any) -> bool:
    """Returns whether a fingerprint tells a variable's value from others.

    The attributes of a user's object are variables themselves.
    """
    is_code = isinstance(
        value,
        (types.ModuleType, types.MethodType, functools.partial, np.ufunc),
    )
    if isinstance(value, types.BuiltinFunctionType):  # a method, or a function
        is_code = isinstance(value.__self__, (types.ModuleType, type(None)))
    return is_code or isinstance(value, _PLAIN) or is_users_class(type(value))


def _code_within(waiting: list[Any]) -> Iterator[Any]:
    """Yields the functions and the user's classes that objects hold.

    Yields an `Untold` if there is something that cannot be told from others.
    """
    seen: set[int] = set()
    for value in waiting:
        if id(value) in seen or len(seen) == _MOST_OBJECTS:
            continue
        seen.add(id(value))
        if isinstance(value, types.MethodType):
            waiting += value.__func__, value.__self__
        elif isinstance(value, weakref.ref):
            waiting.append(value())
        elif isinstance(value, (*CODE_TYPES, functools.partial)):
            is_told = not isinstance(value, types.FunctionType) or (
                not is_installed(value.__module__)
                or class_refs.is_importable(value)
            )
            yield value if is_told else Untold()
            if isinstance(value, np.ufunc):
                waiting += gc.get_referents(value)  # of `np.frompyfunc`
        else:
            if isinstance(value, dict):
                waiting += (item for _, item in items_of(value))
            elif isinstance(value, (list, tuple)):
                waiting += items_of(value)
            if is_users_class(type(value)) or isinstance(value, OPEN):
                yield type(value)
            elif _has_no_code(value):
                continue
            elif not _is_told(value):
                yield Untold()
            waiting += attributes_of(value).values()
            waiting += (held for _, held in slot_values(value))


def _has_no_code(value: Any) -> bool:
    """Returns whether nothing is told of an object here but its items.

    Its content counts elsewhere, or does not: a random generator has a seed for
    each batch.
    """
    return (
        isinstance(value, (*_DATA, *WITHOUT_CONTENT))
        or is_table(value)
        or wrapper_of(value) is not None
    )


def _is_told(value: Any) -> bool:
    """Returns whether an object of a library is told from others elsewhere."""
    is_local = isinstance(value, threading.local)  # pickled as an empty one
    return not is_local and content_of(value) is not None


class Untold:
    """Stands for an object that cannot be told from others of its class."""

    def __reduce__(self) -> str:
        raise pickle.PicklingError("an object that cannot be told from others")
