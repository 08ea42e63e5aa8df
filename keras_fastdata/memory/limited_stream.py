"""Ends the pickling of objects that turn out to be large."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

_MOST_BYTES = 1 << 20


class LimitError(Exception):
    """A pickle has reached its limit."""


class LimitedStream(io.RawIOBase):
    """Passes what is written on to `take`, up to 1 MiB.

    Raises:
        LimitError: In `write`, if more is written.
    """

    def __init__(self, take: Callable[[Any], object]) -> None:
        super().__init__()
        self._take = take
        self._left = _MOST_BYTES

    def write(self, content: Any) -> int:
        self._left -= len(content)
        if self._left < 0:
            raise LimitError
        self._take(content)
        return len(content)
