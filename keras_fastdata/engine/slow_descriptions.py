"""Keeps descriptions of objects that take long to describe.

A tokenizer may take 100 ms to pickle. It is described once, until the program
says that something has changed which nobody notices.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

_SLOW_S = 0.02

_Described = TypeVar("_Described")

# By the function and the object's id; with the object.
_kept: dict[tuple[Any, int], tuple[weakref.ref[Any], Any]] = {}


def once_if_slow(
    describe: Callable[[Any], _Described],
) -> Callable[[Any], _Described]:
    """Has a function describe an object once, if it takes long."""

    @functools.wraps(describe)
    def described(value: Any) -> _Described:
        place = describe, id(value)
        if place in _kept:
            reference, found = _kept[place]
            if reference() is value:
                kept: _Described = found
                return kept
        began_s = time.perf_counter()
        found = describe(value)
        if time.perf_counter() - began_s > _SLOW_S:
            with contextlib.suppress(TypeError):  # it cannot be referred to
                _kept[place] = weakref.ref(value), found
        return found

    return described


forget = _kept.clear
