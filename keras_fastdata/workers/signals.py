"""Delays signals while workers are started or ended.

An exception between the start of a process and the line that remembers it, a
KeyboardInterrupt or that of an alarm, would leave a process that nobody ends.
So the few sections that start and end workers run uninterrupted. They are
bounded in time, and the signal is acted on at their end.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class DeferredSignals:
    """Delays Python signal handlers until the `with` block ends.

    Only the main thread runs handlers; in another thread it does nothing.
    """

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}
        self._caught: list[int] = []

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            try:
                self._replace_handlers()
            except BaseException:  # of a handler that is not replaced yet
                self._restore()
                raise

    def _replace_handlers(self) -> None:
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            # One that was not set from Python could not be put back.
            if callable(handler):
                self._previous[number] = handler
                signal.signal(number, self._catch)

    def _restore(self) -> None:
        """Restores all handlers, then calls those of the delayed signals.

        Each of them may raise; the others are restored and called as well.
        """
        try:
            while self._previous:
                number = next(iter(self._previous))
                signal.signal(number, self._previous[number])
                del self._previous[number]
            while self._caught:
                signal.raise_signal(self._caught.pop(0))
        finally:
            if self._previous or self._caught:
                self._restore()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._restore()

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if number not in self._caught:
            self._caught.append(number)
