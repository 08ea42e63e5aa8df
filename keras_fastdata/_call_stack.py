"""Reads the call stack.

No other module reads frames, except for `keras_bridge.keras_internals`, which
reads Keras's.
"""

from __future__ import annotations

import collections
import contextlib
import operator
import sys
import traceback
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any

_MOST_CALLS = 100  # of one stack
_MOST_KNOWN = 4096
_caller_of = operator.attrgetter("f_back")
Place = tuple[tuple[CodeType, int], ...]  # a thread's stack, innermost first


def frame_id(depth: int) -> int:
    """Returns the `id` of the stack frame `depth` calls above the caller."""
    return id(sys._getframe(depth + 1))


def place_of(thread: int, outermost: int) -> Place:
    """Returns the call stack of a thread.

    Args:
        thread: The thread's `threading.get_ident`.
        outermost: The `id` of a frame; it and its callers are left out.
    """
    found = []
    for frame in _callers(sys._current_frames().get(thread)):
        if id(frame) == outermost:
            break
        found.append((frame.f_code, frame.f_lasti))
    return tuple(found)


def _callers(frame: FrameType | None) -> list[FrameType]:
    """Returns a stack frame and all its callers, innermost first.

    The frame may be of another thread. So no Python code runs between two
    steps: that thread would go on meanwhile, and leave some of the frames.
    """
    found: list[Any] = [frame]
    with contextlib.suppress(AttributeError):  # raised behind the outermost
        found.extend(map(_caller_of, found))
    return found[:-1]


def folded_stack(threads: Iterable[int], within: str) -> tuple[int, str] | None:
    """Returns one thread's call stack in the folded format of flame graphs.

    Args:
        threads: Of each thread its `threading.get_ident`. The stack is of the
            first of them that has a frame of the file `within`.
        within: The file of the innermost frame to leave out, with its callers.

    Returns:
        The thread, and "function (file:line);function (file:line)", the
        outermost call first. Of a deep stack the inner calls are left out,
        and of calls of a line by itself all but one. `None`: no thread has
        such a frame.
    """
    frames = sys._current_frames()
    for thread in threads:
        calls: collections.deque[str] = collections.deque(maxlen=_MOST_CALLS)
        for frame in _callers(frames.get(thread)):
            if frame.f_code.co_filename == within:
                if calls:
                    return thread, ";".join(calls)
                break
            text, begins = _described(frame)
            # A thread gives up the GIL as it enters a function: that is its
            # caller's time.
            is_entering = begins and not calls
            if not is_entering and (not calls or calls[0] != text):
                calls.appendleft(text)
    return None


# By code and place in it, since Python searches for the number of a line.
_calls: dict[tuple[int, int], tuple[CodeType, str, bool]] = {}


def _described(frame: FrameType) -> tuple[str, bool]:
    """Describes a stack frame by its function, file and line.

    Returns:
        "function (file:line)", and whether this is the function's first line.
    """
    code = frame.f_code
    key = id(code), frame.f_lasti
    known = _calls.get(key)
    if known is None or known[0] is not code:
        line = frame.f_lineno or 0
        text = f"{code.co_name} ({code.co_filename}:{line})".replace(";", ",")
        if len(_calls) >= _MOST_KNOWN:
            _calls.clear()
        known = _calls[key] = code, text, line == code.co_firstlineno
    return known[1], known[2]


def is_being_made(instance: Any) -> bool:
    """Whether an object's `__init__` or `__setstate__` is on the call stack."""
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        code = frame.f_code
        if (
            code.co_name in ("__init__", "__setstate__")
            and code.co_argcount
            and frame.f_locals.get(code.co_varnames[0]) is instance
        ):
            return True
    return False


def module_at(filename: str, lineno: int) -> str | None:
    """Returns the name of the module that is executing a given line.

    Returns `None` if no frame of the call stack is at that line.
    """
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        if frame.f_code.co_filename == filename and line == lineno:
            return str(frame.f_globals.get("__name__"))
    return None
