"""Pickles classes by reference when a worker sends them back.

cloudpickle sends a class of `__main__`, or one made inside a function, by
value. That is right on the way to a worker, but not on the way back: loading
the class would replace the methods and globals of the training process's own
class, and `except MyError` would not match. So a returning class is looked up
by name, then by cloudpickle's id of a class that it has sent before. It comes
by value only if the training process has neither.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

import cloudpickle

from keras_fastdata._call_stack import raise_of_handler
from keras_fastdata._modules import is_main


def reduce_class(cls: type) -> Any:
    """Returns the pickle reduction of a class that cannot be imported.

    Returns `NotImplemented` for a class that can be imported.
    """
    if is_importable(cls):
        return NotImplemented
    return resolve_class, (
        cls.__module__,
        cls.__qualname__,
        tracker_id(cls),
        _by_value(cls),
    )


@functools.lru_cache(maxsize=256)
def _by_value(cls: Any) -> bytes:
    pickled: bytes = cloudpickle.dumps(cls)
    return pickled


def is_importable(cls: Any) -> bool:
    """Returns whether another process can import a class or function."""
    is_of_script = is_main(cls.__module__)
    return not is_of_script and _lookup(cls.__module__, cls) is cls


def resolve_class(
    module: str, qualname: str, mark: str | None, by_value: bytes
) -> Any:
    """Finds a class in this process, or unpickles the class that was sent."""
    found = _getattr_path(sys.modules.get(module), qualname)
    if isinstance(found, type):
        return found
    return known_class(mark) or cloudpickle.loads(by_value)


def known_class(mark: str | None) -> type | None:
    """Returns the class with one of cloudpickle's ids, if it is there."""
    known = getattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", {})
    found: type | None = known.get(mark)
    return found


def tracker_id(cls: type) -> str | None:
    """Returns cloudpickle's id of a class, or `None` if it has no id.

    cloudpickle gives an id to each class that it rebuilds in this process.
    """
    marks = getattr(
        cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", {}
    )
    mark = marks.get(cls)
    return mark if isinstance(mark, str) else None


def tracked(cls: type, mark: str | None) -> type:
    """Gives an id to a class that was made again.

    Returns the class that has the id already, if there is one, else `cls`.
    """
    track = getattr(cloudpickle.cloudpickle, "_lookup_class_or_track", None)
    return cls if track is None else track(mark, cls)


def _lookup(module: str, cls: Any) -> Any:
    try:
        return _getattr_path(importlib.import_module(module), cls.__qualname__)
    except Exception as error:
        raise_of_handler(error)
        # Importing runs the user's code, which may raise anything. The class
        # then counts as not importable.
        return None


def _getattr_path(found: Any, qualname: str) -> Any:
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return found
