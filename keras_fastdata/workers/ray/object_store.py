"""Manages this process's batches and datasets in Ray's object store.

Batches lie there until the consumer has dropped their last array. A dataset
lies there once for all workers, each of its large arrays by itself, so that a
later state of it refers to those that have not changed.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import weakref
from typing import Any

import numpy as np

from keras_fastdata.memory import codec, shared_state
from keras_fastdata.memory.arena import aligned_copy
from keras_fastdata.memory.leases import Bytes
from keras_fastdata.metrics.timing import Timing
from keras_fastdata.workers import exceptions
from keras_fastdata.workers.ray import actor


class _StoreRef(weakref.ref[Any]):
    """A weak reference to an array, with the counters of the array's batch."""

    __slots__ = ("answer",)
    answer: list[int]  # how many arrays of it are held, and its bytes


class StoreUsage:
    """Counts the bytes of batches in this node's object store.

    An answer lies there until the last of its arrays has died.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._leased = 0
        self._undelivered = 0
        self._references: dict[int, _StoreRef] = {}
        # C code, for the reason given in memory/arena.py.
        self._died: collections.deque[_StoreRef] = collections.deque()

    def lease(self, arrays: list[Bytes], nbytes: int) -> list[Bytes]:
        """Returns views of arrays; `leased` counts them until all have died."""
        answer = [len(arrays), nbytes]
        roots: list[Bytes] = [np.frombuffer(a.data, np.uint8) for a in arrays]
        with self._lock:
            for root in roots:
                reference = _StoreRef(root, self._died.append)
                reference.answer = answer
                self._references[id(reference)] = reference
            self._leased += nbytes
        return roots

    def wait(self, nbytes: int) -> None:
        """Adds `nbytes`, which can be negative, to the undelivered bytes."""
        with self._lock:
            self._undelivered += nbytes

    @property
    def leased(self) -> int:
        """Bytes of batches whose arrays the consumer holds."""
        with self._lock:
            while self._died:
                reference = self._died.popleft()
                del self._references[id(reference)]
                reference.answer[0] -= 1
                if not reference.answer[0]:
                    self._leased -= reference.answer[1]
            return self._leased

    @property
    def nbytes(self) -> int:
        """Bytes of all batches in the store, delivered or not."""
        return self.leased + self._undelivered


store_usage = StoreUsage()


@dataclasses.dataclass(eq=False)
class StoreResult:
    """A result whose batch is still in Ray's object store."""

    request_id: int
    worker: int  # index of the worker that built the batch
    timing: Timing | None  # how the batch was built, if the request asks for it
    _where: str  # what to tell with an error of loading
    _answer: actor.Answer  # how the arrays make up the batch
    _arrays: list[Bytes]  # views of the store
    # Bytes of the store that the consumer may hold; beyond them, batches are
    # copied.
    _limit: int
    nbytes: int = 0  # bytes of the batch, until it is opened
    by_dataset = is_lost = False

    def __post_init__(self) -> None:
        self.nbytes = sum(self._answer.sizes)
        store_usage.wait(self.nbytes)

    def open(self) -> Any:
        nbytes = self.nbytes
        arrays = iter(self._take())
        buffers = [
            next(arrays) if size else np.empty(0, np.uint8)
            for size in self._answer.sizes
        ]
        large = [
            n for n, b in enumerate(buffers) if b.nbytes >= codec.SMALL_BYTES
        ]
        leases = large and store_usage.leased < self._limit
        if leases:
            roots = store_usage.lease([buffers[n] for n in large], nbytes)
            for number, root in zip(large, roots, strict=True):
                buffers[number] = root
        for number, buffer in enumerate(buffers):
            if not leases or buffer.nbytes < codec.SMALL_BYTES:
                buffers[number] = aligned_copy(buffer)
        try:
            return codec.assemble(self._answer.structure, buffers)
        except Exception as error:
            exceptions.note(error, self._where)
            raise

    def discard(self) -> None:
        self._take()

    def _take(self) -> list[Bytes]:
        arrays, self._arrays = self._arrays, []
        store_usage.wait(-self.nbytes)
        self.nbytes = 0
        return arrays


class RemoteDataset:
    """Stores a dataset and its later states in Ray's object store.

    Arrays that have not changed are not put there again.
    """

    def __init__(self) -> None:
        self.state = actor.DatasetState(0, None, ())
        self.nbytes = 0  # what it takes there
        # By place in this process's memory: where an array is in the store,
        # and a view of that.
        self._put: dict[tuple[int, int], tuple[Any, Bytes]] = {}

    def put(self, pickled: memoryview, buffers: list[memoryview]) -> None:
        """Puts the pickled dataset into the object store."""
        import ray

        put: dict[tuple[int, int], tuple[Any, Bytes]] = {}
        parts: list[Any] = []
        for buffer in buffers:
            if buffer.nbytes < actor.SHARED_BYTES:
                parts.append(bytes(buffer))
                continue
            array: Bytes = np.frombuffer(buffer, np.uint8)
            place = shared_state.place_of(buffer)
            found = self._put.get(place)
            if found is None or not np.array_equal(found[1], array):
                reference = ray.put(array)
                found = reference, ray.get(reference)
            put[place] = found
            parts.append(found[0])
        self._put = put
        self.nbytes = pickled.nbytes + sum(size for _, size in put)
        version = self.state.version + 1
        self.state = actor.DatasetState(
            version, ray.put(bytes(pickled)), tuple(parts)
        )

    def drop(self) -> None:
        """Drops the dataset from the object store."""
        self._put.clear()
        self.state = actor.DatasetState(0, None, ())
