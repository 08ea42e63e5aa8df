"""Reads the call stack.

No other module reads frames, except for `keras_bridge.keras_internals`, which
reads Keras's.
"""

from __future__ import annotations

import collections
import faulthandler
import functools
import linecache
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

_MOST_CALLS = 100  # of one stack
_MOST_BYTES = 1 << 20  # of a dump: 100 threads with 100 calls each
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_CALL = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")
# The line of a function's `def`, or of a decorator, without its body.
_HEADER = re.compile(r"\s*(@.*|((async\s+)?def\b.*[:(,]\s*))(#.*)?\s*")


class Call(NamedTuple):
    """A function that a thread is in, and the line that it is at."""

    file: str
    line: int
    function: str


Place = tuple[Call, ...]  # a thread's stack, innermost first


def caller(depth: int) -> tuple[str, str]:
    """Returns file and name of the function `depth` calls above the caller."""
    code = sys._getframe(depth + 1).f_code
    return code.co_filename, code.co_name


def stack_of(thread: int) -> Place:
    """Returns the call stack of a thread; empty if the thread has ended.

    Args:
        thread: The thread's `threading.get_ident`.
    """
    return next((stack for one, stack in _stacks() if one == thread), ())


def place_of(thread: int, outermost: tuple[str, str]) -> Place:
    """Returns the inner part of a thread's call stack.

    Args:
        thread: The thread's `threading.get_ident`.
        outermost: File and name of a function. Its outermost call and the
            callers of this call are left out.
    """
    stack = stack_of(thread)
    ends = [
        depth
        for depth, call in enumerate(stack)
        if (call.file, call.function) == outermost
    ]
    return stack[: ends[-1]] if ends else stack


def _stacks() -> Iterator[tuple[int, Place]]:
    """Yields each thread of this process with its call stack.

    `faulthandler` writes the stacks while it holds the GIL, without frame
    objects. `sys._current_frames` makes such objects for calls that go on in
    other threads; CPython 3.11 may crash when these calls return.
    """
    try:
        with (
            open(os.memfd_create("stacks"), "wb+", buffering=0)
            if hasattr(os, "memfd_create")
            else tempfile.TemporaryFile(buffering=0)
        ) as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            dump = file.read(_MOST_BYTES).decode("ascii", "replace")
    except OSError:  # such as no free descriptor
        return
    for part in dump.split("\n\n"):
        head, *lines = part.splitlines() or [""]
        if found := _THREAD.match(head):
            calls = tuple(call for line in lines if (call := _parsed(line)))
            yield int(found[1], 16), calls


@functools.lru_cache(maxsize=4096)
def _parsed(line: str) -> Call | None:
    found = _CALL.match(line)
    if found is None:
        return None
    file, function = (
        _ESCAPED.sub(
            lambda code: chr(int("".join(filter(None, code.groups())), 16)),
            text,
        )
        for text in (found[1], found[3])
    )
    return Call(file, int(found[2]), function)


def folded_stack(threads: Iterable[int], within: str) -> tuple[int, str] | None:
    """Returns one thread's call stack in the folded format of flame graphs.

    Args:
        threads: Of each thread its `threading.get_ident`. The stack is of the
            first of them that has a call in the file `within`.
        within: The file of the innermost call to leave out, with its callers.

    Returns:
        The thread, and "function (file:line);function (file:line)", the
        outermost call first. Of a deep stack the inner calls are left out,
        and of calls of a line by itself all but one. `None`: no thread has
        such a call.
    """
    stacks = dict(_stacks())
    for thread in threads:
        calls: collections.deque[str] = collections.deque(maxlen=_MOST_CALLS)
        for call in stacks.get(thread, ()):
            if call.file == within:
                if calls:
                    return thread, ";".join(calls)
                break
            # A thread gives up the GIL as it enters a function: that is its
            # caller's time.
            is_entering = not calls and _is_header(call.file, call.line)
            text = f"{call.function} ({call.file}:{call.line})"
            text = text.replace(";", ",")
            if not is_entering and (not calls or calls[0] != text):
                calls.appendleft(text)
    return None


@functools.lru_cache(maxsize=4096)
def _is_header(file: str, line: int) -> bool:
    return _HEADER.fullmatch(linecache.getline(file, line)) is not None


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
