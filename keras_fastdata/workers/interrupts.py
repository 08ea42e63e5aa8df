"""Putting Ctrl-C off while something is being started or ended.

A KeyboardInterrupt between the start of a process and the line that remembers
it would leave a process that nobody ends. So the few sections that start and
end workers run uninterrupted. They are bounded in time, and the interrupt is
raised at their end.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Uninterrupted:
    """A `with` block at whose end, and not before, SIGINT is acted on.

    Only the main thread receives signals; in another one it does nothing.
    """

    def __init__(self) -> None:
        self._previous: Any = None
        self._caught: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            # One that was not set from Python could not be put back.
            if callable(handler):
                self._previous = handler
                signal.signal(signal.SIGINT, self._catch)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._previous is None:
            return
        signal.signal(signal.SIGINT, self._previous)
        if self._caught is not None:
            self._previous(*self._caught)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self._caught = number, frame
