"""Manages a loader's anonymous shared memory, divided into slots for batches.

The segment is a sparse `memfd`: it has no name, does not count against
`/dev/shm`, and the kernel frees it with the last process that maps it. Slot k
begins at k times a fixed stride. Address space is reserved for all slots at
once and costs nothing until it is used, so a slot never moves, grows, or needs
a descriptor of its own. The heartbeats come first: the task that each worker
builds, and the time at which it began.

Invariant: the training process alone decides which slot is free, and a slot is
free only after the last array over it has died (see `leases`).

A forked process must have batches of its own, like all other memory. Before a
fork, leased slots are therefore made private: their pages become a copy that
this process alone has, at the same address. A private slot is mapped to the
segment again before its next use.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import errno
import gc
import math
import mmap
import operator
import os
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from keras_fastdata import _process_role
from keras_fastdata.errors import LoaderError
from keras_fastdata.memory import os_limits
from keras_fastdata.memory.leases import Bytes, Leases

ALIGNMENT = 64  # bytes; what TensorFlow and JAX need to take an array as it is
HEARTBEATS_BYTES = 1 << 16  # one 64-byte line for each of up to 1,024 workers
HEARTBEAT_BYTES = 64

_MAP_FIXED = 0x10  # on Linux; the `mmap` module lacks it

_CLOCK = struct.Struct("<d")
_LEAST_SLOTS = 256
_MOST_SLOTS = 4096  # of 1 GiB each; more do not fit the address space
# Address space of one segment. A process on x86-64 has 128 TiB in all. Half of
# them are for segments of up to 4 TiB; the more segments there are, the smaller
# are further ones, down to 64 GiB.
_MOST_ADDRESS_SPACE = 1 << 42
_LEAST_ADDRESS_SPACE = 1 << 36
_FOR_SEGMENTS = 1 << 46
_PARTS = 8  # a segment takes one of so many parts of what is left of these
_LEAST_STRIDE = 1 << 24  # 16 MiB; with less address space, mapping fails

USUAL_STRIDE = 1 << 32  # slots are smaller under a limit on address space


class _File:
    """Owns a file descriptor, and closes it when this object is deleted."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.fd)


class Heartbeats:
    """Stores the task that each worker builds, and when the build started.

    Args:
        memory: Shared memory that begins with one line for each worker.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._mmap = memory

    def set_heartbeat(self, worker: int, task_id: int) -> None:
        """Stores the id of the task that `worker` builds, or 0 if none."""
        line = worker * HEARTBEAT_BYTES
        self._mmap[line : line + 8] = task_id.to_bytes(8, "little")

    def heartbeat(self, worker: int) -> int:
        """Returns the id of the task that `worker` builds, or 0 if none."""
        line = worker * HEARTBEAT_BYTES
        return int.from_bytes(self._mmap[line : line + 8], "little")

    def both(self, worker: int) -> tuple[int, float]:
        """Returns the task that `worker` builds, and the build's start time."""
        return self.heartbeat(worker), self.started_s(worker)

    def set_unwanted(self, worker: int, task_id: int) -> None:
        """Stores the highest task id that `worker` must skip, or 0 if none."""
        start = worker * HEARTBEAT_BYTES + 16
        self._mmap[start : start + 8] = task_id.to_bytes(8, "little")

    def unwanted(self, worker: int) -> int:
        """Returns the highest task id that `worker` must skip, or 0 if none."""
        start = worker * HEARTBEAT_BYTES + 16
        return int.from_bytes(self._mmap[start : start + 8], "little")

    def set_started(self, worker: int, began_s: float) -> None:
        """Stores the start time of `worker`'s build, or 0 after the build.

        Call `set_heartbeat` first: readers read the task before the time.
        """
        start = worker * HEARTBEAT_BYTES + 8
        self._mmap[start : start + 8] = _CLOCK.pack(began_s)

    def started_s(self, worker: int) -> float:
        """Returns the start time of `worker`'s build, or 0 if none."""
        start = worker * HEARTBEAT_BYTES + 8
        return float(_CLOCK.unpack_from(self._mmap, start)[0])


class Segment(Heartbeats):
    """Maps the shared memory of one loader into one process.

    Args:
        fd: A `memfd`, which this object owns from now on.
        stride: Bytes from one slot to the next.
    """

    def __init__(self, fd: int, stride: int) -> None:
        self.stride = stride
        size = os.fstat(fd).st_size
        super().__init__(mmap.mmap(fd, size))
        # A core dump would otherwise fill each hole with a page.
        self._mmap.madvise(mmap.MADV_DONTDUMP)
        # The file; `None` once it is closed.
        self.file: _File | None = _File(fd)

    @property
    def fd(self) -> int:
        """The file descriptor, or -1 if it is closed."""
        file = self.file
        return -1 if file is None else file.fd

    def close(self) -> None:
        """Closes the file descriptor; existing arrays stay valid."""
        self.file = None

    def root(self, slot: int, start: int, nbytes: int) -> Bytes:
        """Returns a new array over part of a slot.

        It is not a slice of one long-lived array: the base of a view would be
        that array, and the death of the view's users could not be noticed.
        """
        offset = self._slot_offset(slot) + start
        return np.frombuffer(self._mmap, np.uint8, nbytes, offset)

    def drop_pages(self, slot: int) -> None:
        """Frees the memory pages of a slot, which erases the content."""
        start = self._slot_offset(slot)
        self._mmap.madvise(mmap.MADV_REMOVE, start, self.stride)

    def make_private(
        self, slot: int, nbytes: int, file: _File | None, *, copy: bool = True
    ) -> None:
        """Replaces a slot's first bytes with a private copy in this process.

        Their address does not change. Threads may read and write meanwhile.
        With `copy`, all pages are copied now, because other processes may go
        on writing to them. If not, writing to a page copies it.

        Raises `OSError` if there is no memory for the copy.
        """
        flags = mmap.MAP_PRIVATE | (mmap.MAP_POPULATE if copy else 0)
        self._map(self._slot_offset(slot), nbytes, flags, file)

    def make_shared(self, slot: int) -> None:
        """Maps a slot to shared memory again; discards its private copy."""
        start = self._slot_offset(slot)
        self._map(start, self.stride, mmap.MAP_SHARED, self.file)
        self._mmap.madvise(mmap.MADV_DONTDUMP, start, self.stride)

    def make_all_shared(self) -> None:
        """Maps all slots and heartbeats to shared memory again."""
        self._map(0, len(self._mmap), mmap.MAP_SHARED, self.file)
        self._mmap.madvise(mmap.MADV_DONTDUMP)

    def _map(
        self, offset: int, nbytes: int, flags: int, file: _File | None
    ) -> None:
        """Remaps a part of the segment without changing its address."""
        if file is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        start: Bytes = np.frombuffer(self._mmap, np.uint8, 1, offset)
        address = address_of(start)
        libc = ctypes.CDLL(None, use_errno=True)
        pointer, size, whole = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        libc.mmap.restype = pointer
        libc.mmap.argtypes = [pointer, size, whole, whole, whole, ctypes.c_long]
        access = mmap.PROT_READ | mmap.PROT_WRITE
        flags |= _MAP_FIXED
        mapped = libc.mmap(address, nbytes, access, flags, file.fd, offset)
        if mapped != address:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def _slot_offset(self, slot: int) -> int:
        return HEARTBEATS_BYTES + slot * self.stride


class Arena(Leases):
    """Tracks, in the training process, which slots are free or leased.

    Args:
        warm_slots: How many free slots keep their pages. The kernel gets the
            pages of further slots back when they become free.
        hold_limit: How many slots may be leased to arrays that the consumer
            holds. Beyond it `crowded` is true, and batches are copied.
    """

    def __init__(self, warm_slots: int, hold_limit: int) -> None:
        slots = max(_LEAST_SLOTS, 4 * (warm_slots + hold_limit))
        slots = min(slots, _MOST_SLOTS)
        super().__init__(min(hold_limit, slots // 2))
        self.segment = _reserve_segment(slots)
        self._warm_slots = warm_slots
        # Last in, first out: the slot used last has its pages, and is most
        # likely to be in the CPU's caches.
        self._warm: collections.deque[int] = collections.deque()
        self._cold = list(reversed(range(slots)))
        self._private: set[int] = set()
        self._seen_by_forks: set[int] = set()  # lacked memory for a copy
        _make_private_before_forks(self)

    @property
    def nbytes(self) -> int:
        """The number of bytes of memory that the slots use now."""
        file = self.segment.file
        return 0 if file is None else os.fstat(file.fd).st_blocks * 512

    def take(self, leave: int = 0) -> int | None:
        """Takes a free slot, or returns `None` if at most `leave` are free."""
        if self._returned:
            self._reclaim()
        if leave and len(self._warm) + len(self._cold) <= leave:
            return None
        if self._warm:
            return self._warm.pop()
        return self._cold.pop() if self._cold else None

    def free(self, slot: int) -> None:
        self._warm.append(slot)
        if len(self._warm) > self._warm_slots:
            self.keep_warm(self._warm_slots)

    def keep_warm(self, slots: int) -> None:
        """Sets the number of free slots that keep their memory pages."""
        self._warm_slots = slots
        while len(self._warm) > slots:
            coldest = self._warm.popleft()
            self.segment.drop_pages(coldest)
            self._cold.append(coldest)

    def root(self, slot: int, start: int, nbytes: int) -> Bytes:
        return self.segment.root(slot, start, nbytes)

    def make_private(self, *, copy: bool = True) -> None:
        """Makes all leased slots private; see `Segment.make_private`.

        Any thread may call it. If there is no memory for a copy of a slot, the
        slot is never used again.
        """
        file = self.segment.file  # another thread may close the segment
        if file is None:
            return
        for slot, lease in list(self._leased.items()):
            root = lease()  # this reference keeps the slot leased
            if root is None or slot in self._private:
                continue
            try:
                self._private.add(slot)
                self.segment.make_private(slot, root.nbytes, file, copy=copy)
            except OSError:
                self._seen_by_forks.add(slot)

    def close(self) -> None:
        """Closes the file descriptor; existing arrays stay valid."""
        # No worker is left that could write to them, but forks may follow.
        self.make_private(copy=False)
        self.segment.close()

    def _may_be_used_again(self, slot: int) -> bool:
        """Makes a private slot shared again; returns whether this succeeded."""
        if slot not in self._private:
            return True
        if slot in self._seen_by_forks:
            return False
        try:
            self.segment.make_shared(slot)
        except OSError:
            return False
        self._private.discard(slot)
        return True


_arenas: list[weakref.ref[Arena]] = []


def _make_private_before_forks(arena: Arena) -> None:
    """Registers an arena to make its leased slots private before each fork."""
    if not _arenas:
        # Again in the child: another thread may have leased one in between.
        _process_role.at_fork(
            before=_make_all_private, after_in_child=_make_all_private
        )
    living = [ref for ref in _arenas if ref() is not None]
    _arenas[:] = [*living, weakref.ref(arena)]


def _make_all_private() -> None:
    for reference in list(_arenas):
        arena = reference()
        if arena is not None:
            arena.make_private()


def address_of(array: npt.NDArray[Any]) -> int:
    """Returns the address of an array's first byte."""
    try:
        first: Any = array
        return ctypes.addressof(ctypes.c_char.from_buffer(first))
    except (TypeError, ValueError):
        # Read-only, not contiguous, or unknown to the buffer protocol: this
        # way takes several times as long.
        return int(array.__array_interface__["data"][0])


def aligned_empty(
    shape: SupportsIndex | Sequence[SupportsIndex],
    dtype: npt.DTypeLike = "float32",
) -> npt.NDArray[Any]:
    """Returns an uninitialized, 64-byte-aligned array in private memory."""
    kind = np.dtype(dtype)
    nbytes = count_of(shape) * kind.itemsize
    if kind.hasobject or not nbytes:
        return np.empty(shape, kind)
    return _aligned_bytes(nbytes).view(kind).reshape(shape)


def aligned_copy(source: Bytes) -> Bytes:
    """Copies bytes into private, 64-byte-aligned memory."""
    copy = _aligned_bytes(source.nbytes)
    copy[:] = source
    return copy


def _aligned_bytes(nbytes: int) -> Bytes:
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -address_of(raw) % ALIGNMENT
    return raw[start : start + nbytes]


def round_up(offset: int, step: int = ALIGNMENT) -> int:
    """Rounds `offset` up to a multiple of `step`."""
    return -(-offset // step) * step


def count_of(shape: SupportsIndex | Sequence[SupportsIndex]) -> int:
    """Returns the number of elements of an array with this shape."""
    try:
        sides: Any = [operator.index(shape)]  # type: ignore[arg-type]
    except TypeError:
        sides = shape
    numbers = [operator.index(side) for side in sides]
    if numbers and min(numbers) < 0:
        raise ValueError(f"negative dimensions are not allowed: {shape}")
    return math.prod(numbers)


def memfd(name: str) -> int:
    """Creates an anonymous file, and returns the file's descriptor."""
    with (
        os_limits.named("Shared memory could not be made"),
        os_limits.allowed("memfd_create"),
    ):
        return os.memfd_create(name, os.MFD_CLOEXEC)


def _address_space() -> int:
    """Returns how much address space the next segment should take."""
    used = 0
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * mmap.PAGESIZE
    part = (_FOR_SEGMENTS - used) // _PARTS
    return min(max(part, _LEAST_ADDRESS_SPACE), _MOST_ADDRESS_SPACE)


def _reserve_segment(slots: int) -> Segment:
    """Creates a segment, with smaller slots if system limits require it."""
    stride = _address_space() // slots
    collected = False
    while True:
        stride -= stride % mmap.PAGESIZE
        fd = memfd("keras_fastdata-batches")
        try:
            os.ftruncate(fd, HEARTBEATS_BYTES + slots * stride)
            return Segment(fd, stride)
        except (OSError, ValueError) as error:
            os.close(fd)
            if isinstance(error, OSError) and error.errno == errno.EMFILE:
                # mmap duplicates the descriptor.
                with os_limits.named("Shared memory could not be mapped"):
                    raise
            if stride <= _LEAST_STRIDE:
                limit = "address space (`ulimit -v unlimited`)"
                if isinstance(error, OSError) and error.errno == errno.EFBIG:
                    limit = "file size (`ulimit -f unlimited`)"
                raise LoaderError(
                    f"Could not map {slots} slots of {stride} bytes of "
                    f"shared memory ({error}). Raise the limit on {limit}, "
                    "or use threads."
                ) from error
            if collected:
                stride //= 4
            else:
                # Dead datasets in reference cycles may still hold segments.
                gc.collect()
                collected = True
