"""Sends messages through pipes with one writer and one reader.

A message is sent in parts, and the system writes a part as a whole or not at
all. A reader that has found a pipe readable therefore never waits for the rest
of a part, even if the writer is killed. A message without its last part is
dropped.
"""

from __future__ import annotations

import select
import threading
from multiprocessing.connection import Connection

# POSIX writes up to PIPE_BUF bytes as a whole; Windows keeps messages apart.
# The length of a part (4 bytes) and one of the marks below precede the part.
_MOST_BYTES = getattr(select, "PIPE_BUF", 4096) - 8
_MORE, _LAST = b"+", b"."


class Outbox:
    """Sends messages through a pipe, from any thread."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self._lock = threading.Lock()

    def send(self, message: bytes) -> None:
        """Sends a message; waits while the pipe is full.

        Raises:
            OSError: The reader has ended.
        """
        size = _MOST_BYTES
        with self._lock:
            for start in range(0, max(len(message), 1), size):
                part = message[start : start + size]
                is_last = start + size >= len(message)
                self.pipe.send_bytes((_LAST if is_last else _MORE) + part)


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
