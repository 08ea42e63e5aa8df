"""Classes on their way back from a worker: by reference first.

cloudpickle sends a class of `__main__`, or one made inside a function, by
value. On the way to a worker that is what we want. On the way back it is not:
loading it would replace the methods and globals of the training process's own
class, and `except MyError` would meet a stranger. So a class returns as a name
to look up, then as cloudpickle's own mark for a class it has sent before, and
by value only where the training process has neither.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import cloudpickle


def reduce_class(cls: type) -> Any:
    """How to pickle `cls` so that the receiver resolves it.

    Returns:
        A reduction for pickle, or `NotImplemented` where the class can be
        imported in the worker itself and needs no help.
    """
    if is_importable(cls):
        return NotImplemented
    return resolve_class, (
        cls.__module__,
        cls.__qualname__,
        _mark(cls),
        cloudpickle.dumps(cls),
    )


def is_importable(cls: Any) -> bool:
    """Whether another process has the class, or function, under its name."""
    return cls.__module__ != "__main__" and _lookup(cls.__module__, cls) is cls


def resolve_class(
    module: str, qualname: str, mark: str | None, by_value: bytes
) -> Any:
    """The receiver's own class of that name; pickles name this function."""
    found = _getattr_path(sys.modules.get(module), qualname)
    if isinstance(found, type):
        return found
    known = getattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", {})
    if mark in known:
        return known[mark]
    return cloudpickle.loads(by_value)


def _mark(cls: type) -> str | None:
    """Returns cloudpickle's id of a class that it rebuilt here, or `None`."""
    marks = getattr(
        cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", {}
    )
    mark = marks.get(cls)
    return mark if isinstance(mark, str) else None


def _lookup(module: str, cls: Any) -> Any:
    try:
        return _getattr_path(importlib.import_module(module), cls.__qualname__)
    except Exception:
        # Importing runs other people's code; whatever it raises, the class
        # was not to be had that way.
        return None


def _getattr_path(found: Any, qualname: str) -> Any:
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return found
