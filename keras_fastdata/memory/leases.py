"""Counts the slots of shared memory that the consumer's arrays lie in.

A slot is leased from the moment its batch is handed out until the last array
over it has died. A weak reference to the root array of the batch reports that
death. The reference's callback is `deque.append`, which is C code: it runs in
the thread that drops the array, takes no lock, and has no Python frame that
could swallow a KeyboardInterrupt.
"""

from __future__ import annotations

import collections
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class _SlotRef(weakref.ref[Any]):
    """A weak reference to a batch's root array, with the slot's number."""

    __slots__ = ("slot",)
    slot: int


class Leases:
    """Tracks which slots are leased. A subclass has the memory.

    Args:
        hold_limit: How many slots may be leased to arrays that the consumer
            holds. Beyond it `crowded` is true, and batches are copied.
    """

    def __init__(self, hold_limit: int) -> None:
        self._hold_limit = hold_limit
        self._leased: dict[int, _SlotRef] = {}
        self._returned: collections.deque[_SlotRef] = collections.deque()

    def root(self, slot: int, start: int, nbytes: int) -> Bytes:
        """Returns a new array over part of a slot."""
        raise NotImplementedError

    def free(self, slot: int) -> None:
        """Frees a slot that was taken and is not leased."""
        raise NotImplementedError

    @property
    def crowded(self) -> bool:
        """Whether the consumer holds the maximum number of slots or more."""
        self._reclaim()
        return len(self._leased) >= self._hold_limit

    def lease(self, slot: int, nbytes: int) -> Bytes:
        """Leases a slot, and returns an array over the slot's first bytes."""
        root = self.root(slot, 0, nbytes)
        self._leased[slot] = lease = _SlotRef(root, self._returned.append)
        lease.slot = slot
        return root

    def _reclaim(self) -> None:
        """Frees the slots whose last array has died."""
        while self._returned:
            slot = self._returned.popleft().slot
            if self._may_be_used_again(slot):
                del self._leased[slot]
                self.free(slot)

    def _may_be_used_again(self, slot: int) -> bool:
        """Returns whether a slot is to be freed; if not, it stays leased."""
        return True
