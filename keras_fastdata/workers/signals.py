"""Delays signals while workers are started or ended.

An exception between the start of a process and the line that remembers it, a
KeyboardInterrupt or that of an alarm, would leave a process that nobody ends.
So the few sections that start and end workers run uninterrupted. They are
bounded in time, and the signal is acted on at their end. The user's code, which
may be slow or wait for ever, runs there within `Interruptible`.

Only Python's own handlers are exchanged. What the kernel calls stays: handlers
of C code, as of `faulthandler.register`, run at once, and Python's flags of
the signal (`signal.siginterrupt`) are kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
from types import FrameType
from typing import Any


class DeferredSignals:
    """Delays Python signal handlers until the `with` block ends.

    Only the main thread runs handlers; in another thread it does nothing.
    """

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}
        # By signal: its handler, and the stack frame to call the handler with.
        self._caught: dict[int, tuple[Any, FrameType | None]] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            _blocks.append(self)
            try:
                self.replace_handlers()
            except BaseException:  # of a handler that is not replaced yet
                self._end()
                raise

    def replace_handlers(self) -> None:
        """Has signals be delayed from now on."""
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            # One that was not set from Python could not be put back.
            if callable(handler):
                self._previous[number] = handler
                _set_handler(number, self._catch)

    def restore(self) -> None:
        """Restores all handlers, and then handles the delayed signals.

        Each of them may raise; the others are restored and called as well.
        """
        try:
            while self._previous:
                number = next(iter(self._previous))
                _set_handler(number, self._previous[number])
                del self._previous[number]
            while self._caught:
                number = next(iter(self._caught))
                handler, frame = self._caught.pop(number)
                # Not raised again: C handlers have run when it came.
                handler(number, frame)
        finally:
            if self._previous or self._caught:
                self.restore()

    def _end(self) -> None:
        if self in _blocks:
            _blocks.remove(self)
        self.restore()

    def __exit__(self, *_: object) -> None:
        self._end()

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self._caught[number] = self._previous[number], frame


_blocks: list[DeferredSignals] = []  # those that the main thread is in


class Interruptible:
    """Handles signals at once within a `DeferredSignals` block.

    Whatever is within can be broken off at any point. A signal handler that
    runs there may enter blocks of its own; the outer blocks take no part.
    """

    def __enter__(self) -> None:
        self._blocks: list[DeferredSignals] = []
        if threading.current_thread() is threading.main_thread():
            self._blocks, _blocks[:] = [*_blocks], []
        for block in reversed(self._blocks):
            block.restore()

    def __exit__(self, *_: object) -> None:
        for block in self._blocks:
            _blocks.append(block)
            block.replace_handlers()


def _set_handler(number: int, handler: Any) -> None:
    """Sets a signal's Python handler, but keeps the C-level handler."""
    if _sigaction is None:
        signal.signal(number, handler)
        return
    action = ctypes.create_string_buffer(_LARGEST_ACTION)
    _sigaction(number, None, action)
    try:
        signal.signal(number, handler)
    finally:
        _sigaction(number, action, None)


_LARGEST_ACTION = 1024  # bytes; a `struct sigaction` of glibc has 152
_sigaction: Any = None  # on Windows
with contextlib.suppress(TypeError, AttributeError):
    _sigaction = ctypes.PyDLL(None).sigaction
