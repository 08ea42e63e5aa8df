"""Checks arguments; errors name the argument and the value received."""

from __future__ import annotations

import difflib
import inspect
import math
import numbers
import operator
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


def integer(name: str, value: Any, *, least: int, or_else: str = "") -> int:
    """Returns an argument as an integer of at least `least`.

    Args:
        name: The argument's name.
        value: The value received.
        least: The smallest value that is allowed.
        or_else: Text for the error about other values that are allowed.

    Raises:
        TypeError: The value is not an integer.
        ValueError: The value is too small.
    """
    wanted = f"`{name}` must be an integer of at least {least}{or_else}."
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{wanted} Received: {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{wanted} Received: {value!r} (of type {type(value).__name__})"
            f"{_as_integer(name, value)}"
        ) from None
    if number < least:
        raise ValueError(f"{wanted} Received: {number}")
    return number


def optional_integer(name: str, value: Any, *, least: int) -> int | None:
    """Returns an argument as an integer, or `None` if it is `None`."""
    return None if value is None else integer(name, value, least=least)


def _as_integer(name: str, value: Any) -> str:
    """Returns advice to pass an integer, or "" if `value` is not integral."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return ""
    is_it = isinstance(value, str) or number == value
    return f". Pass `{name}={number}`, or `int(...)` of it." if is_it else ""


def arguments_of(kind: type) -> list[str]:
    """Returns the constructor arguments of a class and of its base classes."""
    names: dict[str, None] = {}
    for base in kind.__mro__:
        initialize: Any = vars(base).get("__init__")
        if initialize is None or base is object:
            continue
        _, *parameters = inspect.signature(initialize).parameters.values()
        for parameter in parameters:
            if parameter.kind not in (
                parameter.VAR_POSITIONAL,
                parameter.VAR_KEYWORD,
            ):
                names[parameter.name] = None
    return list(names)


def unknown_arguments(
    taker: str, unknown: Iterable[str], allowed: Sequence[str]
) -> TypeError:
    """Returns the `TypeError` to raise for unknown arguments.

    Args:
        taker: The class or function that received them.
        unknown: The names of the unknown arguments.
        allowed: The names of the existing arguments.
    """
    names = sorted(unknown)
    near = [difflib.get_close_matches(name, allowed, 1) for name in names]
    meant = " and ".join(f"`{name}`" for found in near for name in found)
    return TypeError(
        f"{taker} received unknown arguments: {', '.join(names)}. "
        f"It takes: {', '.join(allowed)}."
        + (f" Did you mean {meant}?" if meant else "")
    )


def check_local(name: str, path: Any, way_out: str = "") -> None:
    """Raises `ValueError` for a path that is not local, such as `s3://...`."""
    text = os.fspath(path)
    if isinstance(text, str) and re.match(r"[a-zA-Z][\w+.-]+://", text):
        raise ValueError(
            f"`{name}` must be on a file system of this machine. Received: "
            f"{text!r}. Mount it, or copy the files here"
            f"{way_out or ' first'}."
        )


def seconds(name: str, value: Any) -> float:
    """Returns an argument as a positive, finite number of seconds."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"`{name}` must be a number of seconds. "
            f"Received: {value!r} (of type {type(value).__name__})"
        )
    number = float(value)
    if not 0 < number < math.inf:
        raise ValueError(
            f"`{name}` must be more than 0 seconds, and finite; `None` waits "
            f"for ever. Received: {value!r}"
        )
    return number


def boolean(name: str, value: Any) -> bool:
    """Returns an argument as True or False."""
    # Also accepts NumPy's bool, and 0 and 1 from configuration files.
    if value in (True, False):
        return bool(value)
    raise TypeError(
        f"`{name}` must be True or False. "
        f"Received: {value!r} (of type {type(value).__name__})"
    )


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raises `ValueError` unless an argument is one of the allowed words."""
    if value not in allowed:
        names = ", ".join(repr(choice) for choice in allowed)
        one_of = "one of " if len(allowed) > 1 else ""
        raise ValueError(
            f"`{name}` must be {one_of}{names}. Received: {value!r}"
        )


def fits(value: float, dtype: np.dtype[Any]) -> bool:
    """Returns whether arrays of a dtype can hold a number."""
    if value == 0 and dtype.kind in "biufc":
        return True
    try:
        filled: Any = np.asarray(value, dtype)
        same = bool(filled == value)
        same = same or bool(value != value and filled != filled)  # NaN
        if np.issubdtype(dtype, np.inexact):  # rounding is no surprise
            same = same or bool(np.isfinite(filled))
    except (OverflowError, ValueError):
        return False
    return same
