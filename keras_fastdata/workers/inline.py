"""Builds batches in the thread that requests them (`workers=0`).

`wait` builds them, because the engine holds no lock while it waits.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable

from keras_fastdata.errors import EndOfData
from keras_fastdata.memory import ownership
from keras_fastdata.metrics.pool_stats import PoolStats
from keras_fastdata.metrics.timing import Stopwatch
from keras_fastdata.metrics.worker_kinds import WorkerKind
from keras_fastdata.workers.base import (
    BatchRequest,
    Builds,
    LocalResult,
    WorkerPool,
    describe_batch,
)
from keras_fastdata.workers.exceptions import note

_CLOSE_TIMEOUT_S = 5.0  # for another thread to finish its batch
_STUCK_S = 60.0  # of a build in another thread, before this one builds, too

_log = logging.getLogger("keras_fastdata")


class InlinePool(WorkerPool):
    """Builds batches in the calling thread."""

    def __init__(self, builder: Builds, dataset: str) -> None:
        self._builder = builder
        self._dataset = dataset
        self._requests: collections.deque[BatchRequest] = collections.deque()
        self._broken_off: set[int] = set()  # ids of interrupted requests
        self._built: tuple[BatchRequest, LocalResult] | None = None
        self._lock = threading.RLock()  # held by the thread that builds
        self._builds_in = 0  # the id of that thread
        # What it builds, and since when.
        self._building: tuple[BatchRequest, float] | None = None
        self._guard = threading.Lock()  # held while the lock is replaced
        self._started = self._closed = False
        self._stopwatch = Stopwatch()

    def submit(self, request: BatchRequest) -> bool:
        self._requests.append(request)
        return True

    def wait(self, timeout_s: float) -> None:
        """Builds the next batch in the calling thread; no other thread builds.

        A later call repeats an interrupted build. A process that the build has
        forked does not repeat one: it would fork again.
        """
        lock = self._lock
        if not lock.acquire(timeout=timeout_s):
            self._look_for_stuck_build(lock)
            return
        try:
            if self._built is None and lock is self._lock:
                self._build_next(lock)
        finally:
            lock.release()

    def _build_next(self, lock: threading.RLock) -> None:
        """Builds the next batch, if there is a request."""
        request = self._next()
        if request is None:
            return  # no request, or a signal handler closed the pool
        outer, process = (self._builds_in, self._building), os.getpid()
        self._builds_in = threading.get_ident()
        self._building = request, time.monotonic()
        try:
            built = self._build(request)
            if built.error is not None and os.getpid() != process:
                raise built.error
            if lock is self._lock:  # else another thread builds instead
                self._built = request, built
        except BaseException:
            self._broken_off.add(request.request_id)
            raise
        finally:
            if lock is self._lock:
                self._builds_in, self._building = outer
            if self._closed:
                self._stop()

    def _look_for_stuck_build(self, lock: threading.RLock) -> None:
        """Lets this thread build if another thread seems to build for ever."""
        with self._guard:
            building = self._building
            if lock is not self._lock or building is None:
                return
            request, since_s = building
            if time.monotonic() - since_s < _STUCK_S:
                return
            _log.warning(
                "Batch %d of epoch %d of %s has taken over %d s in another "
                "thread. This thread now builds the batches that it waits for.",
                *(request.index, request.epoch, self._dataset, _STUCK_S),
            )
            self._broken_off.add(request.request_id)
            self._builds_in, self._building = 0, None
            self._lock = threading.RLock()

    def _next(self) -> BatchRequest | None:
        """Returns the request to build next; interrupted requests come last.

        The caller who was waiting for an interrupted one may never return.
        """
        requests = list(self._requests)
        for request in requests:
            if request.request_id not in self._broken_off:
                return request
        return requests[0] if requests else None

    def collect(self) -> list[LocalResult]:
        if self._built is None:
            return []
        (request, built), self._built = self._built, None
        if request not in self._requests:
            return []  # it was cancelled meanwhile
        self._requests.remove(request)
        self._broken_off.discard(request.request_id)
        return [built]

    def cancel(self, request_ids: Iterable[int]) -> None:
        gone = set(request_ids)
        kept = (t for t in self._requests if t.request_id not in gone)
        self._requests = collections.deque(kept)
        self._broken_off -= gone

    def _build(self, request: BatchRequest) -> LocalResult:
        if not self._started:
            self._builder.start(0)
            self._started = True
        return build_here(
            self._builder,
            self._dataset,
            request,
            0,
            "the calling thread",
            self._stopwatch,
            Exception,
        )

    @property
    def busy(self) -> bool:
        return False

    def change(self, *, anew: bool = False) -> None:
        self._builder.change()

    def pool_stats(self) -> PoolStats:
        return PoolStats(WorkerKind.INLINE, 0)

    def close(self) -> None:
        """Ends the pool; waits a few seconds for a build in another thread.

        If this thread is building, a signal handler called `close`; `wait`
        then ends the pool after the build.
        """
        self._closed = True
        self._requests.clear()
        if self._builds_in != threading.get_ident() and self._lock.acquire(
            timeout=_CLOSE_TIMEOUT_S
        ):
            try:
                self._stop()
            finally:
                self._lock.release()

    def _stop(self) -> None:
        self._stopwatch.close()
        if self._started:
            self._started = False
            # A dataset that was garbage-collected has nothing to stop.
            with contextlib.suppress(ReferenceError):
                self._builder.stop(0)


def build_here(
    builder: Builds,
    dataset: str,
    request: BatchRequest,
    worker: int,
    name: str,
    stopwatch: Stopwatch,
    caught: type[BaseException],
) -> LocalResult:
    """Builds a batch in this thread; returns the batch or the error."""
    stopwatch.start(request.interval_s, request.epoch)
    try:
        batch = ownership.take(
            [builder.build(request.epoch, request.index, worker)]
        )
        timing = stopwatch.stop()
        return LocalResult(request.request_id, worker, batch, timing=timing)
    except EndOfData as error:
        # Its frames refer to the dataset, which would never be collected.
        return LocalResult.failed(
            request.request_id, worker, error.with_traceback(None)
        )
    except caught as error:
        note(error, describe_batch(dataset, request, name))
        return LocalResult.failed(request.request_id, worker, error)
