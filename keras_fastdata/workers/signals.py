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
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                # One that was not set from Python could not be put back.
                if callable(handler):
                    self._previous[number] = handler
                    signal.signal(number, self._catch)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        for number in self._caught:
            signal.raise_signal(number)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if number not in self._caught:
            self._caught.append(number)
