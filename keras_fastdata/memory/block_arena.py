"""Manages shared memory that each worker creates for its own batches.

A slot has a block of memory, which one worker has created. If a batch does not
fit the block of its task, the worker creates a larger block under a name that
the training process knows, and sends a message. The training process opens the
block and removes the name at once. A block is used again for tasks of the same
worker, and only after the last array over it has died.

Runs in the training process. `block_writer` is the worker's side.
"""

from __future__ import annotations

import dataclasses
import mmap
import weakref
from collections.abc import Iterable

import numpy as np

from keras_fastdata import _process_role
from keras_fastdata.memory import named_memory
from keras_fastdata.memory.leases import Bytes, Leases

_SLOTS = 256  # at least


@dataclasses.dataclass(eq=False, slots=True)
class _Block:
    """A block of shared memory that one worker creates."""

    number: int  # chosen by the training process
    owner: int  # the number of the worker process
    memory: mmap.mmap | None = None  # until the worker has created it
    is_inherited: bool = False  # a fork of this process may read it

    @property
    def nbytes(self) -> int:
        return 0 if self.memory is None else len(self.memory)


class BlockArena(Leases):
    """Tracks which slots and blocks are free, in use, or leased.

    Args:
        warm_slots: How many free blocks keep their memory.
        hold_limit: How many slots may be leased to arrays that the consumer
            holds. Beyond it `crowded` is true, and batches are copied.

    Attributes:
        prefix: The begin of the names of blocks, before a task id.
    """

    def __init__(self, warm_slots: int, hold_limit: int) -> None:
        slots = max(_SLOTS, 4 * (warm_slots + hold_limit))
        super().__init__(min(hold_limit, slots // 2))
        self.prefix = named_memory.new_prefix()
        self._warm_slots = warm_slots
        self._free = list(range(slots))
        self._bound: dict[int, _Block] = {}  # by slot
        self._idle: dict[int, list[_Block]] = {}  # by owner, latest last
        self._dropped: dict[int, list[int]] = {}  # numbers, by owner
        self._last_number = self._last_owner = 0
        _arenas.add(self)

    @property
    def segment(self) -> BlockArena:
        """This object itself, which implements a segment's method `root`."""
        return self

    @property
    def nbytes(self) -> int:
        """The total size in bytes of all blocks, idle ones included."""
        blocks = [*self._bound.values()]
        for idle in list(self._idle.values()):
            blocks += idle
        return sum(block.nbytes for block in blocks)

    def take(self, leave: int = 0) -> int | None:
        """Takes a free slot, or returns `None` if at most `leave` are free."""
        if self._returned:
            self._reclaim()
        return self._free.pop() if len(self._free) > leave else None

    def free(self, slot: int) -> None:
        block = self._bound.pop(slot, None)
        self._free.append(slot)
        # The owner may have been removed.
        if block is None or block.owner not in self._idle:
            return
        if block.is_inherited or block.memory is None:
            self._dropped[block.owner].append(block.number)
            return
        self._idle[block.owner].append(block)
        self.keep_warm(self._warm_slots)

    def keep_warm(self, slots: int) -> None:
        """Sets the number of free blocks that keep their memory."""
        self._warm_slots = slots
        surplus = sum(map(len, self._idle.values())) - slots
        for _ in range(surplus):
            owner = max(self._idle, key=lambda each: len(self._idle[each]))
            self._dropped[owner].append(self._idle[owner].pop(0).number)

    # -- the blocks of each worker -------------------------------------------

    def add_owner(self) -> int:
        """Registers a worker process, and returns its number as an owner."""
        self._last_owner += 1
        self._idle[self._last_owner] = []
        self._dropped[self._last_owner] = []
        return self._last_owner

    def remove_owner(self, owner: int) -> None:
        """Removes a worker process, and drops its free blocks.

        Its other blocks are dropped when they become free.
        """
        self._idle.pop(owner, None)
        self._dropped.pop(owner, None)

    def bind(self, slot: int, owner: int) -> int:
        """Assigns a worker's block to a slot; returns the block's number."""
        idle = self._idle[owner]
        if idle:
            block = idle.pop()
        else:
            self._last_number += 1
            block = _Block(self._last_number, owner)
        self._bound[slot] = block
        return block.number

    def attach(self, slot: int, task_id: int, nbytes: int) -> None:
        """Opens the memory that a worker has created for a slot's block."""
        name = f"{self.prefix}{task_id:x}"
        try:
            self._bound[slot].memory = named_memory.attach(name, nbytes)
        finally:
            named_memory.remove(name)

    def forget(self, task_ids: Iterable[int]) -> None:
        """Removes the names of the shared memory that a dead worker created."""
        for task_id in task_ids:
            named_memory.remove(f"{self.prefix}{task_id:x}")

    def take_dropped(self, owner: int) -> list[int]:
        """Removes and returns the numbers of blocks that a worker must drop."""
        numbers, self._dropped[owner] = self._dropped[owner], []
        return numbers

    # -- batches -------------------------------------------------------------

    def root(self, slot: int, start: int, nbytes: int) -> Bytes:
        memory = self._bound[slot].memory
        assert memory is not None
        return np.frombuffer(memory, np.uint8, nbytes, start)

    def close(self) -> None:
        """Drops all blocks; existing arrays stay valid."""
        for owner in list(self._idle):
            self.remove_owner(owner)

    def leave_to_forks(self) -> None:
        """Marks leased blocks as not reusable, since a fork could read them."""
        for slot in list(self._leased):
            if (block := self._bound.get(slot)) is not None:
                block.is_inherited = True


_arenas: weakref.WeakSet[BlockArena] = weakref.WeakSet()


def _before_fork() -> None:
    for arena in list(_arenas):
        arena.leave_to_forks()


_process_role.at_fork(before=_before_fork)
