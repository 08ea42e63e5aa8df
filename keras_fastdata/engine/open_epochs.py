"""Tracks the epochs whose iterators still exist."""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from keras_fastdata.engine.epoch import Epoch


class _EpochRef(weakref.ref[Any]):
    """A weak reference to an iterator, together with the iterator's epoch."""

    __slots__ = ("epoch",)
    epoch: Epoch


class _Peek:
    """Represents a `Loader.peek` call, which has no iterator."""


class OpenEpochs:
    """Holds each epoch until its iterator is garbage-collected."""

    def __init__(self) -> None:
        self._references: set[_EpochRef] = set()
        self._dropped: collections.deque[weakref.ref[Any]] = collections.deque()

    def register(self, iterator: object, epoch: Epoch) -> None:
        """Registers an epoch until its iterator is garbage-collected."""
        # The callback is C code, for the reason given in memory/arena.py.
        reference = _EpochRef(iterator, self._dropped.append)
        reference.epoch = epoch
        self._references.add(reference)

    @contextlib.contextmanager
    def peeking(self, ahead: Epoch) -> Iterator[None]:
        """Registers the temporary epoch of a `peek` call in a `with` block.

        After an interrupt the epoch may have requests; like those of any
        dropped epoch, `take_dropped` leads to them.
        """
        peek = _Peek()
        self.register(peek, ahead)
        try:
            yield
        finally:
            del peek  # else a traceback would hold it

    @property
    def has_dropped(self) -> bool:
        """Whether any iterator was garbage-collected since `take_dropped`."""
        return bool(self._dropped)

    def take_dropped(self) -> Iterator[Epoch]:
        """Removes and yields epochs whose iterators were garbage-collected.

        If the epoch after one of them was prepared, yields that epoch too.
        """
        while self._dropped:
            reference = self._dropped.popleft()
            assert isinstance(reference, _EpochRef)
            self._references.discard(reference)
            yield reference.epoch
            if reference.epoch.next_epoch is not None:
                yield reference.epoch.next_epoch

    def is_held(self, epoch: Epoch) -> bool:
        """Returns whether the iterator of an epoch still exists."""
        return any(
            reference.epoch is epoch and reference() is not None
            for reference in list(self._references)
        )

    def __iter__(self) -> Iterator[Epoch]:
        # A copy: another thread may make an iterator meanwhile.
        epochs = [reference.epoch for reference in list(self._references)]
        prefetched = [e.next_epoch for e in epochs if e.next_epoch is not None]
        return iter([e for e in epochs + prefetched if not e.is_finished])
