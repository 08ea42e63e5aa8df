"""Sends messages through pipes with one writer and one reader.

A message is sent in parts, and the system writes a part as a whole or not at
all. A reader that has found a pipe readable therefore never waits for the rest
of a part, even if the writer is killed. A message without its last part is
dropped.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import select
import threading
from multiprocessing.connection import Connection
from typing import Any

# POSIX writes up to PIPE_BUF bytes as a whole; Windows keeps messages apart.
# The length of a part (4 bytes), one of the marks below, and a number precede
# the part.
_MOST_BYTES = getattr(select, "PIPE_BUF", 4096) - 8
_NUMBERS = [bytes([number]) for number in range(256)]
_MORE, _LAST = b"+", b"."


@dataclasses.dataclass
class _Message:
    data: bytes
    parts: list[bytes] | None = None  # the rest, the next one last


class Outbox:
    """Sends messages through a pipe, from any thread and any signal handler.

    A signal handler, or a `__del__` method, may send while its thread sends.
    Its message is then sent after the interrupted message, by that call.
    """

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self._lock: Any = threading.RLock()
        # An exception of a signal handler leaves the message here that is being
        # sent, and the next call sends the rest first. The exception may come
        # when a part has been sent; the reader drops the part when it comes
        # again, by its number.
        self._waiting: collections.deque[_Message] = collections.deque()
        self._numbers = itertools.cycle(_NUMBERS)

    def send(self, message: bytes) -> None:
        """Sends a message; waits while the pipe is full.

        Raises:
            OSError: The reader has ended.
        """
        self._waiting.append(_Message(message))
        while self._waiting and not self._lock._is_owned():
            with self._lock:
                while self._waiting:
                    self._send_rest(self._waiting[0])
                    self._waiting.popleft()

    def _send_rest(self, message: _Message) -> None:
        if message.parts is None:
            message.parts = self._split(message.data)[::-1]
        while message.parts:
            self.pipe.send_bytes(message.parts[-1])
            del message.parts[-1]

    def _split(self, message: bytes) -> list[bytes]:
        size = _MOST_BYTES
        return [
            (_MORE if start + size < len(message) else _LAST)
            + next(self._numbers)
            + message[start : start + size]
            for start in range(0, max(len(message), 1), size)
        ]


class Inbox:
    """Receives the messages that one `Outbox` sends."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self._parts: list[bytes] = []
        self._number = b""  # of the latest part

    def receive_part(self) -> bytes | None:
        """Waits for a part of a message; returns a message once complete.

        A part that comes twice is dropped.

        Raises:
            EOFError: The writer has ended. (Also `OSError`.)
        """
        part = self.pipe.recv_bytes()
        if part[1:2] == self._number:
            return None
        self._number = part[1:2]
        self._parts.append(part[2:])
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
