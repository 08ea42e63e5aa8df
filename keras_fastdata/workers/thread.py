"""Builds batches in worker threads, which share the dataset and the GIL.

    submit -> requests (queue) -> thread: build -> results (deque) -> collect

The threads are daemons, so that a batch which never ends cannot keep the
interpreter alive, and hold no reference to the dataset between requests. They
build in a copy of the caller's context, which includes NumPy's `seterr`.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import logging
import os
import queue
import threading
import time
from collections.abc import Collection, Iterable

from keras_fastdata.errors import BatchTimeoutError, LoaderError
from keras_fastdata.metrics.pool_stats import PoolStats
from keras_fastdata.metrics.timing import Stopwatch
from keras_fastdata.metrics.worker_kinds import WorkerKind
from keras_fastdata.workers import forks, stack_dump
from keras_fastdata.workers.base import (
    BatchRequest,
    Builds,
    LocalResult,
    WorkerPool,
)
from keras_fastdata.workers.exceptions import note
from keras_fastdata.workers.inline import build_here
from keras_fastdata.workers.signals import DeferredSignals
from keras_fastdata.workers.watchdog import (
    Activity,
    Watchdog,
    building,
    loading,
)

_CLOSE_TIMEOUT_S = 5.0  # what a batch being built gets to end

_log = logging.getLogger("keras_fastdata")


class ThreadPool(WorkerPool):
    """Builds batches in threads; `PoolPlan` documents the arguments."""

    def __init__(
        self,
        builder: Builds,
        dataset: str,
        count: int,
        batch_timeout: float | None,
    ) -> None:
        self._builder = builder
        self._dataset = dataset
        self._requests: queue.SimpleQueue[BatchRequest | None] = (
            queue.SimpleQueue()
        )
        self._given = 0  # requests that threads are to answer
        self._held: list[BatchRequest] | None = None  # while paused
        self._results = _Results()
        self._cancelled: set[int] = set()
        self._watchdog = Watchdog(
            batch_timeout,
            "A stuck thread cannot be replaced; a worker process can "
            "(`use_multiprocessing=True, batch_timeout=...`).",
        )
        self._context = contextvars.copy_context()
        self._threads: list[_Thread] = []
        with DeferredSignals():
            for worker in range(count):
                try:
                    self._threads.append(self._start(worker))
                except RuntimeError as error:
                    self._end_threads()
                    raise LoaderError(
                        f"Thread {worker} of {count} could not be started: "
                        f"{error}. Raise the limit on processes and threads "
                        "(`ulimit -u`), or lower `workers`."
                    ) from error

    def submit(self, request: BatchRequest) -> bool:
        if self._held is None:
            self._assign(request)
        else:
            self._held.append(request)
        return True

    def _assign(self, request: BatchRequest) -> None:
        self._given += 1
        self._requests.put(request)

    def wait(self, timeout_s: float) -> None:
        self._results.wait(min(timeout_s, self._watchdog.interval_s))

    def collect(self) -> Iterable[LocalResult]:
        forks.note_consumer()
        kept = []
        for built, seconds in self._results.take():
            self._given -= 1
            if built.request_id == _START_FAILED:
                raise built.error or RuntimeError("on_worker_start failed")
            if built.request_id in self._cancelled:
                self._cancelled.discard(built.request_id)
            else:
                self._watchdog.learn(seconds)
                kept.append(built)
        if not kept and self._watchdog.begin_look():
            kept += self._look_at_threads()
        return kept

    def cancel(self, request_ids: Iterable[int]) -> None:
        self._cancelled.update(request_ids)

    def pause(self) -> None:
        if self._held is None:
            self._held = self._taken_back()
            self._given -= len(self._held)

    def resume(self) -> None:
        held, self._held = self._held, None
        for request in held or ():
            self._assign(request)

    @property
    def slow_requests(self) -> Collection[int]:
        return self._watchdog.slow

    @property
    def busy(self) -> bool:
        return self._given > 0

    def change(self, *, anew: bool = False) -> None:
        # A thread of TensorFlow's, which may ask for batches, has an empty one.
        if threading.current_thread() is threading.main_thread():
            self._context = contextvars.copy_context()
            for thread in self._threads:
                thread.context = self._context.copy()

    def pool_stats(self) -> PoolStats:
        return PoolStats(WorkerKind.THREAD, len(self._threads))

    def close(self) -> None:
        with DeferredSignals():
            self._end_threads()

    def _start(self, worker: int) -> _Thread:
        thread = _Thread(
            self._builder,
            self._dataset,
            worker,
            self._requests,
            self._results,
            self._cancelled,
            self._context.copy(),
        )
        thread.start()
        return thread

    def _look_at_threads(self) -> list[LocalResult]:
        """Replaces overdue threads, and returns their errors as results.

        A thread whose batch nobody waits for is replaced with a warning.
        """
        activities = [
            w for t in self._threads if (w := t.activity()) is not None
        ]
        late = []
        for expired in self._watchdog.look(activities):
            activity = expired.activity
            worker, request = activity.worker, activity.request
            lost = self._threads[worker].abandon_if_at(request)
            if lost is None:
                continue  # it has finished after all, a moment ago
            self._threads[worker] = self._start(worker)
            self._given -= 1
            text = (
                f"{expired.text} A thread cannot be stopped: this one goes "
                "on, and holds whatever it holds."
            )
            if lost.request_id in self._cancelled:
                self._cancelled.discard(lost.request_id)
                _log.warning(
                    "%s Another thread takes its place. It was here:\n%s",
                    *(text, expired.stack),
                )
                continue
            error = BatchTimeoutError(
                f"{text} A worker process would have been replaced "
                "(`use_multiprocessing=True`). It was here:\n"
                f"{expired.stack}",
                dataset=self._dataset,
                worker=worker,
                pid=os.getpid(),
                epoch=request.epoch if request else None,
                batch_index=request.index if request else None,
                elapsed_s=activity.elapsed_s,
                stack=expired.stack,
            )
            if request is None:
                raise error
            late.append(LocalResult(request.request_id, worker, error=error))
        return late

    def _taken_back(self) -> list[BatchRequest]:
        """Removes and returns requests that no thread has taken yet."""
        found = []
        with contextlib.suppress(queue.Empty):
            while (request := self._requests.get_nowait()) is not None:
                found.append(request)
        return found

    def _end_threads(self) -> None:
        self._taken_back()
        for _ in self._threads:
            self._requests.put(None)
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in self._threads:
            # The last reference to a dataset may die in one of its threads.
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    thread.abandon()  # its successor may have begun
        self._threads = []
        self._results.wake()


class _Results:
    """Holds the results of the threads until `collect` removes them.

    A signal handler that ends the threads, or asks for batches, may interrupt
    any line here; so there is no lock that it could find taken for ever.
    """

    def __init__(self) -> None:
        self._built: collections.deque[tuple[LocalResult, float]] = (
            collections.deque()
        )
        # Free once there is news. After a slow signal handler, a queue would
        # not notice that time has run out; a lock does.
        self._news = threading.Lock()
        self._news.acquire()

    def put(self, built: LocalResult, seconds: float) -> None:
        self._built.append((built, seconds))
        self.wake()

    def wait(self, timeout_s: float) -> None:
        """Waits until a result arrives, `wake` is called or time runs out."""
        self._news.acquire(timeout=max(0.0, timeout_s))

    def wake(self) -> None:
        """Makes a running `wait` return at once."""
        with contextlib.suppress(RuntimeError):  # it is free already
            self._news.release()

    def take(self) -> list[tuple[LocalResult, float]]:
        """Removes and returns all results, each with its build time."""
        self._news.acquire(blocking=False)
        taken = []
        while self._built:
            taken.append(self._built.popleft())
        return taken


_START_FAILED = 0  # the request id of a failure that belongs to no request


class _Thread(threading.Thread):
    """One worker thread.

    Attributes:
        context: The context variables for the next build.
    """

    def __init__(
        self,
        builder: Builds,
        dataset: str,
        worker: int,
        requests: queue.SimpleQueue[BatchRequest | None],
        results: _Results,
        cancelled: set[int],
        context: contextvars.Context,
    ) -> None:
        super().__init__(name=f"keras_fastdata-{dataset}-{worker}", daemon=True)
        self.context = context
        self._builder = builder
        self._dataset = dataset
        self._worker = worker
        self._requests = requests
        self._results = results
        self._cancelled = cancelled
        self._lock = threading.Lock()  # guards the three
        # The request it has, and since when.
        self._assigned: tuple[BatchRequest, float] | None = None
        self._starting = True  # whether `on_worker_start` has not ended yet
        # Whether somebody else answers for that request; nothing is to be heard
        # of this thread any more.
        self._given_up = False
        self._stopwatch = Stopwatch()

    @property
    def is_given_up(self) -> bool:
        """Whether the pool has abandoned the thread."""
        return self._given_up

    def activity(self) -> Activity | None:
        """Returns the thread's current activity, or `None` if it is idle."""
        with self._lock:
            assigned, starting = self._assigned, self._starting
        if assigned is None:
            return None
        request, began = assigned
        name = f"worker thread {self._worker}"
        return Activity(
            self._worker,
            loading(self._dataset, name)
            if starting
            else building(self._dataset, request, name),
            None if starting else request,
            time.monotonic() - began,
            functools.partial(stack_dump.of_thread, self.ident or 0),
            starting,
            request.request_id not in self._cancelled,
        )

    def abandon_if_at(
        self, request: BatchRequest | None
    ) -> BatchRequest | None:
        """Abandons the thread if it still works on `request`.

        `None` stands for `on_worker_start`. Returns the request that it has
        had, or `None` if it is not abandoned.
        """
        with self._lock:
            if self._assigned is None:
                return None
            assigned, _ = self._assigned
            at = None if self._starting else assigned
            if at is not request:
                return None
            self._given_up = True
        self._builder.forget(self.ident or 0)
        forks.forget(self.ident or 0)
        return assigned

    def abandon(self) -> None:
        """Abandons the thread, which then ends without `on_worker_stop`."""
        with self._lock:
            self._given_up = True
        forks.forget(self.ident or 0)

    def _stops(self) -> bool:
        with self._lock:
            return not (self._starting or self._given_up)

    def run(self) -> None:
        forks.note_worker()
        try:
            while (request := self._requests.get()) is not None:
                with forks.held_back():
                    if not self.context.run(self._serve, request):
                        return
            if self._stops():
                with forks.held_back():
                    self.context.run(self._builder.stop, self._worker)
        except ReferenceError:
            # The dataset was collected; nobody is waiting.
            return
        except BaseException as error:
            if isinstance(error, _StartFailed) and error.__cause__ is not None:
                error = error.__cause__
            note(error, f"In worker thread {self._worker} of {self._dataset}.")
            self._deliver(LocalResult(_START_FAILED, self._worker, error=error))
        finally:
            self._stopwatch.close()

    def _serve(self, request: BatchRequest) -> bool:
        """Builds one batch; returns False if the thread must end."""
        self._set_assigned(request, starting=self._starting)
        if self._starting:
            _start(self._builder, self._worker)
            self._set_assigned(request, starting=False)
        return self._deliver(self._build(request))

    def _set_assigned(self, request: BatchRequest, *, starting: bool) -> None:
        with self._lock:
            self._assigned = request, time.monotonic()
            self._starting = starting

    def _deliver(self, built: LocalResult) -> bool:
        """Stores a result for `collect`, unless the thread is abandoned."""
        with self._lock:
            assigned, self._assigned = self._assigned, None
            if self._given_up:
                return False
        began = assigned[1] if assigned else time.monotonic()
        self._results.put(built, time.monotonic() - began)
        return True

    def _build(self, request: BatchRequest) -> LocalResult:
        request_id, worker = request.request_id, self._worker
        if request_id in self._cancelled:
            return LocalResult(request_id, worker)
        return build_here(
            self._builder,
            self._dataset,
            request,
            worker,
            f"worker thread {worker}",
            self._stopwatch,
            BaseException,
        )


class _StartFailed(Exception):
    """Wraps a ReferenceError that the user's `on_worker_start` raised."""


def _start(builder: Builds, worker: int) -> None:
    try:
        builder.start(worker)
    except ReferenceError as error:
        raise _StartFailed from error
