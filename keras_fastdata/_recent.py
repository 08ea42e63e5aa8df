"""`Recent` keeps the latest results of a function."""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Recent(Generic[_T]):
    """Keeps the latest results of a function. Its pickles are empty.

    Threads share it without a lock, which a fork could leave locked: each
    operation is atomic. Two threads may make the same result.

    Args:
        most: The number of results to keep.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._results: dict[Hashable, _T] = {}
        self._keys: collections.deque[Hashable] = collections.deque()

    def get(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Returns the result for a key, which `make()` makes if needed."""
        result = self._results.get(key)
        if result is None:
            result = self._results[key] = make()
            self._keys.append(key)
            if len(self._keys) > self._most:
                self._results.pop(self._keys.popleft(), None)
        return result

    def __reduce__(self) -> tuple[type[Recent[_T]], tuple[int]]:
        return Recent, (self._most,)
