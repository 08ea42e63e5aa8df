"""Iterators and generators that several threads can share."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, ParamSpec, TypeVar

_T = TypeVar("_T")
_P = ParamSpec("_P")


class ThreadSafeIterator(Iterator[_T], Generic[_T]):
    """Lets several threads call `next` on one iterator.

    Each item goes to exactly one thread. An exception from the iterator
    reaches exactly one caller, and ends the iteration for all. After the end,
    every call raises `StopIteration`.

    Args:
        iterable: The iterable. Do not use it elsewhere.

    Raises:
        TypeError: `iterable` cannot be iterated over.
        ValueError: Raised by `next` if the iterator calls `next` on itself.
        RuntimeError: Raised by `next` in a child that was forked while a
            thread was inside the iterator.

    Example:

    >>> shared = ThreadSafeIterator(range(3))
    >>> list(shared)
    [0, 1, 2]
    """

    def __init__(self, iterable: Iterable[_T]) -> None:
        self._iterator: Iterator[_T] | None = iter(iterable)
        # Reentrant, for signal handlers that interrupt `next` or `close`.
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._closing = False
        self._running_in = 0  # the thread inside the iterator, if any

    def __next__(self) -> _T:
        if self._pid != os.getpid() and self._leave_parent():
            raise RuntimeError(
                "This process was forked while a thread was inside the "
                "iterator of a ThreadSafeIterator, so the iterator cannot go "
                "on here. Fork before, or make a new iterator in the child."
            )
        if self._running_in == threading.get_ident():
            # The iterator is under way below in this thread's own stack.
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
                # `close` found the lock taken, and left the end to this thread.
                self._end_if_idle()

    def close(self) -> None:
        """Ends the iterator, and runs a generator's `finally` blocks.

        `close` never waits: if another thread is inside `next`, that thread
        ends the iterator after its item. Idempotent.
        """
        self._closing = True
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        # If the lock is taken, return: the thread that holds it looks at
        # `_closing` again after it releases the lock.
        if self._pid != os.getpid():
            self._leave_parent()
        if self._running_in == threading.get_ident():
            return  # the iterator closes itself
        if self._lock.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._lock.release()

    def _end(self) -> None:
        iterator, self._iterator = self._iterator, None
        close = getattr(iterator, "close", None)
        if close is not None:
            try:
                self._running_in = threading.get_ident()
                close()
            finally:
                self._running_in = 0

    def _leave_parent(self) -> bool:
        """Replaces the lock after a fork, in the child process.

        Returns:
            Whether the iterator has ended: another thread was inside, which
            does not exist in the child.
        """
        self._pid = os.getpid()
        if self._running_in == threading.get_ident():
            return False  # this thread is inside, and holds the lock
        self._lock = threading.RLock()
        is_broken, self._running_in = self._running_in != 0, 0
        if is_broken:
            self._iterator = None
        return is_broken


def threadsafe_generator(
    function: Callable[_P, Iterable[_T]],
) -> Callable[_P, ThreadSafeIterator[_T]]:
    """Decorates a generator function so that threads can share its iterators.

    Args:
        function: A generator function, or a function that returns an iterable.

    Returns:
        A function that returns a `ThreadSafeIterator`.

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
