"""Sends messages through pipes with one writer and one reader.

A message is sent in parts, and the system writes a part as a whole or not at
all. A reader that has found a pipe readable therefore never waits for the rest
of a part, even if the writer is killed. A message without its last part is
dropped.
"""

from __future__ import annotations

import collections
import select
import threading
from multiprocessing.connection import Connection
from typing import Any

# POSIX writes up to PIPE_BUF bytes as a whole; Windows keeps messages apart.
# The length of a part (4 bytes) and one of the marks below precede the part.
_MOST_BYTES = getattr(select, "PIPE_BUF", 4096) - 8
_MORE, _LAST = b"+", b"."


class Outbox:
    """Sends messages through a pipe, from any thread and any signal handler.

    A signal handler, or a `__del__` method, may send while its thread sends.
    Its message is then sent after the interrupted message, by that call.
    """

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self._lock: Any = threading.RLock()
        self._waiting: collections.deque[bytes] = collections.deque()
        # Of the message that is being sent. An exception of a signal handler
        # leaves some here, and the next call sends them first.
        self._parts: collections.deque[bytes] = collections.deque()

    def send(self, message: bytes) -> None:
        """Sends a message; waits while the pipe is full.

        Raises:
            OSError: The reader has ended.
        """
        self._waiting.append(message)
        while self._waiting and not self._lock._is_owned():
            with self._lock:
                while self._parts or self._waiting:
                    if not self._parts:
                        self._parts.extend(_parts_of(self._waiting.popleft()))
                    self.pipe.send_bytes(self._parts[0])
                    self._parts.popleft()


def _parts_of(message: bytes) -> list[bytes]:
    size = _MOST_BYTES
    parts = [
        message[start : start + size]
        for start in range(0, max(len(message), 1), size)
    ]
    *others, last = parts
    return [*(_MORE + part for part in others), _LAST + last]


class Inbox:
    """Receives the messages that one `Outbox` sends."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self._parts: list[bytes] = []

    def receive_part(self) -> bytes | None:
        """Waits for a part of a message; returns a message once complete.

        Raises:
            EOFError: The writer has ended. (Also `OSError`.)
        """
        part = self.pipe.recv_bytes()
        self._parts.append(part[1:])
        if part[:1] == _MORE:
            return None
        message = b"".join(self._parts)
        self._parts.clear()
        return message

    def receive(self) -> bytes:
        """Waits for a message, and returns the message.

        Raises:
            EOFError: The writer has ended. (Also `OSError`.)
        """
        while (message := self.receive_part()) is None:
            pass
        return message
