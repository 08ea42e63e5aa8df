"""Worker threads: they share the dataset itself, and the GIL.

    submit -> tickets (queue) -> thread: build -> results (deque) -> collect

The threads are daemons, so that a batch which never ends cannot keep the
interpreter alive, and hold no reference to the dataset between tickets.
"""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
import time
from collections.abc import Iterable

from keras_fastdata.workers.base import Builds, Built, Ticket, where
from keras_fastdata.workers.failures import note
from keras_fastdata.workers.interrupts import Uninterrupted

_CLOSE_TIMEOUT_S = 5.0  # what a batch being built gets to end


class ThreadWorkers:
    """Builds in `count` threads of this process.

    Args:
        builder: What builds a batch; it is called from several threads.
        dataset: The dataset's class name, for messages.
        count: Number of threads, at least 1.
    """

    def __init__(self, builder: Builds, dataset: str, count: int) -> None:
        self._tickets: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._results = _Results()
        self._cancelled: set[int] = set()
        self._threads = [
            threading.Thread(
                target=_serve,
                name=f"keras_fastdata-{dataset}-{worker}",
                args=(
                    builder,
                    dataset,
                    worker,
                    self._tickets,
                    self._results,
                    self._cancelled,
                ),
                daemon=True,
            )
            for worker in range(count)
        ]
        with Uninterrupted():
            for thread in self._threads:
                thread.start()

    def submit(self, ticket: Ticket) -> bool:
        self._tickets.put(ticket)
        return True

    def wait(self, timeout_s: float) -> None:
        self._results.arrived.wait(timeout_s)

    def collect(self) -> Iterable[Built]:
        kept = []
        for built in self._results.take():
            if built.serial == _START_FAILED:
                raise built.error or RuntimeError("on_worker_start failed")
            if built.serial in self._cancelled:
                self._cancelled.discard(built.serial)
            else:
                kept.append(built)
        return kept

    def cancel(self, serials: Iterable[int]) -> None:
        self._cancelled.update(serials)

    def change(self) -> None:
        """Nothing to do: the threads build from the dataset itself."""

    def begin_epoch(self) -> None:
        """Nothing to do: a thread does not die."""

    def close(self) -> None:
        with Uninterrupted():
            self._end_threads()

    def _end_threads(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._tickets.get_nowait()
        for _ in self._threads:
            self._tickets.put(None)
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in self._threads:
            # The last reference to a dataset may die in one of its threads.
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        self._threads = []


class _Results:
    """What the threads have built, and an event that says there is some."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self._built: collections.deque[Built] = collections.deque()

    def put(self, built: Built) -> None:
        self._built.append(built)
        self.arrived.set()

    def take(self) -> list[Built]:
        self.arrived.clear()
        taken = []
        while self._built:
            taken.append(self._built.popleft())
        return taken


_START_FAILED = 0  # the serial of a failure that belongs to no ticket


def _serve(
    builder: Builds,
    dataset: str,
    worker: int,
    tickets: queue.SimpleQueue[Ticket | None],
    results: _Results,
    cancelled: set[int],
) -> None:
    try:
        started = False
        while (ticket := tickets.get()) is not None:
            if not started:
                started = True
                _start(builder, worker)
            results.put(_build(builder, dataset, worker, ticket, cancelled))
        if started:
            builder.stop(worker)
    except ReferenceError:
        # The dataset was collected; nobody is waiting.
        return
    except BaseException as error:
        if isinstance(error, _StartFailed) and error.__cause__ is not None:
            error = error.__cause__
        note(error, f"In worker thread {worker} of {dataset}.")
        results.put(Built(_START_FAILED, worker, error=error))


class _StartFailed(Exception):
    """Tells a ReferenceError of the user's from that of a dead dataset."""


def _start(builder: Builds, worker: int) -> None:
    try:
        builder.start(worker)
    except ReferenceError as error:
        raise _StartFailed from error


def _build(
    builder: Builds,
    dataset: str,
    worker: int,
    ticket: Ticket,
    cancelled: set[int],
) -> Built:
    if ticket.serial in cancelled:
        return Built(ticket.serial, worker)
    try:
        batch = builder.build(ticket.epoch, ticket.index, worker)
        return Built(ticket.serial, worker, batch)
    except BaseException as error:
        note(error, where(dataset, ticket, f"worker thread {worker}"))
        return Built(ticket.serial, worker, error=error)
