"""Iterators and generators that any number of threads may share."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, ParamSpec, TypeVar

_T = TypeVar("_T")
_P = ParamSpec("_P")


class ThreadSafeIterator(Iterator[_T], Generic[_T]):
    """Serializes `next` on an iterator.

    Whatever the number of threads, each item is handed out once. An exception
    from the iterator reaches exactly one caller and ends it for all others.
    After the end every call raises `StopIteration`.

    Args:
        iterable: What to iterate over. It is not to be used elsewhere.

    Raises:
        TypeError: `iterable` cannot be iterated over.
        ValueError: From `next`, when the iterator calls `next` on itself.

    Example:

    >>> shared = ThreadSafeIterator(range(3))
    >>> list(shared)
    [0, 1, 2]
    """

    def __init__(self, iterable: Iterable[_T]) -> None:
        self._iterator: Iterator[_T] | None = iter(iterable)
        self._lock = threading.Lock()
        self._closing = False
        self._running_in = 0  # the thread that is inside `next`, if any

    def __next__(self) -> _T:
        if self._running_in == threading.get_ident():
            # Waiting for the lock would be waiting for oneself.
            raise ValueError("ThreadSafeIterator: next() called from within")
        try:
            with self._lock:
                if self._closing:
                    self._end()
                if self._iterator is None:
                    raise StopIteration
                try:
                    self._running_in = threading.get_ident()
                    return next(self._iterator)
                except BaseException:
                    self._iterator = None
                    raise
                finally:
                    self._running_in = 0
        finally:
            if self._closing:
                # `close` may have found the lock taken, and left it to us.
                self._end_if_idle()

    def close(self) -> None:
        """Ends the iterator, and runs a generator's `finally` blocks.

        Never waits: while another thread is inside `next`, that thread ends
        the iterator when its item has come. Idempotent.
        """
        self._closing = True
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        # Who finds the lock taken may leave: its holder looks at `_closing`
        # again once the lock is free.
        if self._lock.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._lock.release()

    def _end(self) -> None:
        iterator, self._iterator = self._iterator, None
        close = getattr(iterator, "close", None)
        if close is not None:
            close()


def threadsafe_generator(
    function: Callable[_P, Iterable[_T]],
) -> Callable[_P, ThreadSafeIterator[_T]]:
    """Decorates a generator function so that threads may share its iterators.

    Args:
        function: A generator function, or any that returns an iterable.

    Returns:
        A function that returns `ThreadSafeIterator`s.

    Example:

    >>> @threadsafe_generator
    ... def count(n):
    ...     yield from range(n)
    >>> next(count(2))
    0
    """

    @functools.wraps(function)
    def make(*args: _P.args, **kwargs: _P.kwargs) -> ThreadSafeIterator[_T]:
        return ThreadSafeIterator(function(*args, **kwargs))

    return make
