"""Reads the call stacks of threads.

No other module reads frames, except for `keras_bridge.keras_internals`, which
reads Keras's.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import itertools
import linecache
import operator
import re
import signal
import sys
import threading
import traceback
import types
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

_MOST_CALLS = 100  # of one stack
# The line of a function's `def`, or of a decorator, without its body.
_HEADER = re.compile(r"\s*(@.*|((async\s+)?def\b.*[:(,]\s*))(#.*)?\s*")


class Call(NamedTuple):
    """One function call in a call stack, with the current line."""

    file: str
    line: int
    function: str


_described = operator.attrgetter(
    "f_code.co_filename", "f_lineno", "f_code.co_name"
)
Place = tuple[Call, ...]  # a thread's stack, innermost first


def caller(depth: int) -> tuple[str, str]:
    """Returns the file and name of the function `depth` levels up the stack.

    The function that calls `caller` has depth 0, its own caller depth 1.
    """
    code = sys._getframe(depth + 1).f_code
    return code.co_filename, code.co_name


def runs_any(codes: Collection[types.CodeType]) -> bool:
    """Returns whether the calling thread runs one of the functions."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def raise_of_handler(error: BaseException) -> None:
    """Raises an error again if a signal handler of the program has raised it.

    Such as that of a time limit, which may come at any moment. Code that
    ignores the errors of a user's objects calls this first, or uses
    `ignoring_errors`.
    """
    if _is_of_handler(error):
        raise error


def ignoring_errors() -> _IgnoringErrors:
    """Ignores the errors of a `with` block, but for those of signal handlers.

    See `raise_of_handler`.
    """
    return _IgnoringErrors()


class _IgnoringErrors(contextlib.AbstractContextManager[None]):
    def __exit__(self, _: Any, error: BaseException | None, *__: Any) -> bool:
        return isinstance(error, Exception) and not _is_of_handler(error)


def _is_of_handler(error: BaseException) -> bool:
    codes = _codes_of_handlers()
    tb = error.__traceback__
    while codes and tb is not None:
        if tb.tb_frame.f_code in codes:
            return True
        tb = tb.tb_next
    return False


def _codes_of_handlers() -> set[types.CodeType]:
    """Returns the code of the functions that handle signals."""
    codes = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        if not callable(handler):
            continue
        found = getattr(handler, "__code__", None)
        if found is None:  # an object with `__call__`
            found = getattr(type(handler).__call__, "__code__", None)
        if found is not None:
            codes.add(found)
    return codes


def handlers_here() -> frozenset[types.CodeType]:
    """Returns the code of the signal handlers that may run in this thread.

    Python runs them in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return frozenset()
    return frozenset(_codes_of_handlers())


def runs_before(
    codes: Collection[types.CodeType], function: types.CodeType
) -> bool:
    """Returns whether `function` has called one of the `codes`.

    The innermost call of `function` in the calling thread counts, and what it
    has called at any depth.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not function:
        if frame.f_code in codes:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def code_of_caller(depth: int) -> types.CodeType:
    """Returns the code of the function `depth` levels up, as for `caller`."""
    return sys._getframe(depth + 1).f_code


def has_gil() -> bool:
    """Returns whether Python runs with its global lock (the GIL)."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


def stack_of(thread: int) -> Place:
    """Returns the call stack of a thread; empty if the thread has ended.

    Also empty without the GIL: another thread's frames change while they are
    read.

    CPython 3.11 makes frame objects when they are asked for, and may collect
    garbage at this moment. If a finalizer then gives up the GIL, the other
    thread goes on, and may leave the function whose frame is being made: the
    frame then refers to memory that is used for something else, and Python
    crashes. So one call in C, which keeps the GIL, disables the collection,
    reads the stack, and enables the collection again if it was enabled.

    Args:
        thread: The thread's `threading.get_ident`.
    """
    if not has_gil():
        return ()
    once = [()]
    enabled, was_enabled = itertools.tee(itertools.starmap(gc.isenabled, once))
    innermost = map(
        operator.methodcaller("get", thread),
        itertools.starmap(sys._current_frames, once),
    )
    frames = itertools.accumulate(
        itertools.chain(innermost, itertools.repeat("f_back")), getattr
    )
    calls = list(
        itertools.chain(
            enabled,
            itertools.starmap(gc.disable, once),
            map(_described, itertools.takewhile(bool, frames)),
            itertools.starmap(gc.enable, itertools.compress(once, was_enabled)),
        )
    )
    return tuple(
        Call(call[0], call[1] or 0, call[2])
        for call in calls
        if isinstance(call, tuple)
    )


def place_of(thread: int, outermost: tuple[str, str]) -> Place:
    """Returns a thread's call stack without the calls outside `outermost`.

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
    for thread in threads:
        calls: collections.deque[str] = collections.deque(maxlen=_MOST_CALLS)
        for call in stack_of(thread):
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
    """Returns whether an object's `__init__` or `__setstate__` is running."""
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        code = frame.f_code
        if (
            code.co_name in ("__init__", "__setstate__")
            and code.co_argcount
            and frame.f_locals.get(code.co_varnames[0]) is instance
        ):
            return True
    return False


def modules_that_run() -> list[str]:
    """Returns the modules whose statements the calling thread runs now.

    Those are the script, and the modules that are imported at this moment.
    """
    return [
        str(frame.f_globals.get("__name__"))
        for frame, _ in traceback.walk_stack(sys._getframe(1))
        if frame.f_code.co_name == "<module>"
    ]


def module_at(filename: str, lineno: int) -> str | None:
    """Returns the name of the module whose code is running at a given line.

    Returns `None` if no frame of the call stack is at that line.
    """
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        if frame.f_code.co_filename == filename and line == lineno:
            return str(frame.f_globals.get("__name__"))
    return None
