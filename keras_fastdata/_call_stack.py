"""Reads the call stack.

No other module reads frames, except for `keras_bridge.keras_internals`, which
reads Keras's.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

Place = tuple[tuple[CodeType, int], ...]  # a thread's stack, innermost first


def frame_id(depth: int) -> int:
    """Returns the `id` of the frame `depth` calls above the caller's."""
    return id(sys._getframe(depth + 1))


def place_of(thread: int, outermost: int) -> Place:
    """Returns the stack of a thread.

    Args:
        thread: The thread's `threading.get_ident`.
        outermost: The `id` of a frame; it and its callers are left out.
    """
    found = []
    frame = sys._current_frames().get(thread)
    while frame is not None and id(frame) != outermost:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def is_being_made(instance: Any) -> bool:
    """Whether an object's `__init__` or `__setstate__` is on the call stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if (
            code.co_name in ("__init__", "__setstate__")
            and code.co_argcount
            and frame.f_locals.get(code.co_varnames[0]) is instance
        ):
            return True
        frame = frame.f_back
    return False


def module_at(filename: str, lineno: int) -> str | None:
    """Returns the name of the module that runs a line now, or `None`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == filename and frame.f_lineno == lineno:
            return str(frame.f_globals.get("__name__"))
        frame = frame.f_back
    return None
