"""Reads the attributes of the user's objects without running their code."""

from __future__ import annotations

import functools
import threading
import types
from typing import Any


def has_attributes(value: Any) -> bool:
    """Returns whether an object has a `__dict__`."""
    return bool(type(value).__dictoffset__) or isinstance(
        value, threading.local
    )


def attributes_of(value: Any) -> dict[str, Any]:
    """Returns an object's `__dict__` without calling its `__getattr__`.

    That of a `threading.local` is the calling thread's.
    """
    if not has_attributes(value):
        return {}
    is_local = isinstance(value, threading.local)
    read = (threading.local if is_local else object).__getattribute__
    try:
        found = read(value, "__dict__")
    except Exception:
        return {}
    return found if isinstance(found, dict) else {}


@functools.lru_cache(maxsize=1024)
def slots_of(kind: Any) -> tuple[Any, ...]:
    """Returns the slots of a class, which read an object's attributes."""
    return tuple(
        slot
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for slot in vars(base).values()
        if isinstance(slot, types.MemberDescriptorType)
    )
