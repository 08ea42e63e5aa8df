"""Writes batches into blocks of shared memory that this worker creates.

Runs in a worker. `block_arena` is the training process's side.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from keras_fastdata.errors import LoaderError
from keras_fastdata.memory import named_memory, os_limits
from keras_fastdata.memory.arena import (
    address_of,
    aligned_empty,
    count_of,
    round_up,
)
from keras_fastdata.memory.codec import SMALL_BYTES, SlotWriter
from keras_fastdata.memory.leases import Bytes

_GROWTH = 1.25  # so that batches of slightly different sizes fit


class Blocks:
    """The blocks of shared memory that this worker has created.

    Args:
        prefix: The begin of their names, before a task id.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._blocks: dict[int, mmap.mmap] = {}
        self._names: list[str] = []
        self._lock = threading.Lock()
        self._largest = 0

    def get(self, number: int) -> mmap.mmap | None:
        """Returns the memory of a block, or `None` if it has none."""
        return self._blocks.get(number)

    def make(self, number: int, task_id: int, nbytes: int) -> mmap.mmap:
        """Creates new memory for a block, and replaces any former memory."""
        name = f"{self._prefix}{task_id:x}"
        self._largest = max(self._largest, int(nbytes * _GROWTH))
        size = round_up(self._largest, mmap.PAGESIZE)
        with (
            self._lock,
            os_limits.named("Shared memory for a batch could not be made"),
        ):
            if name in self._names:  # a batch has outgrown its block twice
                named_memory.remove(name)
            else:
                self._names.append(name)
            self._blocks[number] = named_memory.create(name, size)
        return self._blocks[number]

    def drop(self, number: int) -> None:
        """Drops a block; existing arrays stay valid."""
        self._blocks.pop(number, None)

    def remove_names(self) -> None:
        """Removes the names that a dead training process has left.

        Call it last: no thread can create a block after this.
        """
        self._lock.acquire()
        for name in self._names:
            named_memory.remove(name)


class _GrowingBlock:
    """The block of one task, which can be replaced by a larger one."""

    file = None

    def __init__(self, blocks: Blocks, number: int, task_id: int) -> None:
        self._blocks = blocks
        self._key = number, task_id
        self._memory = blocks.get(number)
        # While these are mapped, no other array can get their addresses.
        self._outgrown: list[mmap.mmap] = []
        self.is_new = False

    @property
    def stride(self) -> int:
        """The size of the block in bytes."""
        return 0 if self._memory is None else len(self._memory)

    def root(self, slot: int, start: int, nbytes: int) -> Bytes:
        """Returns a new array over part of the block."""
        assert self._memory is not None
        return np.frombuffer(self._memory, np.uint8, nbytes, start)

    def grow(self, nbytes: int, used: int) -> None:
        """Replaces the memory with larger memory, and copies the used part."""
        old = self._memory
        self._memory = self._blocks.make(*self._key, nbytes)
        self.is_new = True
        if old is not None:
            self._outgrown.append(old)
            self._memory[:used] = memoryview(old)[:used]

    def make_private(self, slot: int, nbytes: int, file: object) -> None:
        """Raises an error, because this memory cannot be made private."""
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))


class BlockWriter(SlotWriter):
    """Writes one batch into one block, in the worker.

    Args:
        blocks: The blocks of this worker.
        number: The number of the block.
        task_id: The number of the task.
        in_place: Whether `empty` may return memory of the block.
    """

    _segment: Any

    def __init__(
        self, blocks: Blocks, number: int, task_id: int, in_place: bool
    ) -> None:
        super().__init__(_GrowingBlock(blocks, number, task_id), 0, in_place)  # type: ignore[arg-type]
        self._is_lent = False  # to the dataset, by `empty`
        # The address of each memory before a growth, and its used bytes.
        self._outgrown: list[tuple[int, int]] = []

    @property
    def made_nbytes(self) -> int:
        """The size of the memory created for this batch; 0 if none."""
        return self._segment.stride if self._segment.is_new else 0

    def empty(
        self,
        shape: SupportsIndex | Sequence[SupportsIndex],
        dtype: npt.DTypeLike = "float32",
    ) -> npt.NDArray[Any]:
        kind = np.dtype(dtype)
        nbytes = count_of(shape) * kind.itemsize
        if self._in_place and not kind.hasobject and nbytes >= SMALL_BYTES:
            with self._lock:
                fits = round_up(self._used) + nbytes <= self._segment.stride
                may_grow = not self._is_lent
                if fits or may_grow:
                    self._is_lent = True
                    root, start = self._place(nbytes)
                    self._note_made(root, start)
                    return root.view(kind).reshape(shape)
        # The block may not grow: the dataset has arrays over it.
        return aligned_empty(shape, kind)

    def write(self, source: Bytes) -> tuple[int, int]:
        if self._outgrown:
            address = address_of(source)
            for base, used in self._outgrown:
                start = address - base
                if start >= 0 and start + source.nbytes <= used:
                    return start, source.nbytes
        return super().write(source)

    def _allocate(self, nbytes: int) -> tuple[Bytes, int]:
        with self._lock:
            return self._place(nbytes)

    def _place(self, nbytes: int) -> tuple[Bytes, int]:
        """Allocates the next part of the block; grows the block if needed."""
        start, block = round_up(self._used), self._segment
        if start + nbytes > block.stride:
            if self._address:
                self._outgrown.append((self._address, self._used))
                self._address = 0
            try:
                block.grow(start + nbytes, self._used)
            except (OverflowError, ValueError) as error:
                raise LoaderError(
                    f"A batch of {start + nbytes:,} bytes does not fit shared "
                    "memory. Make smaller batches."
                ) from error
        self._used = start + nbytes
        return block.root(0, start, nbytes), start
