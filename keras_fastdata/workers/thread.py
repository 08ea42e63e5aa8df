"""Worker threads: they share the dataset itself, and the GIL.

    submit -> tickets (queue) -> thread: build -> results (deque) -> collect

The threads are daemons, so that a batch which never ends cannot keep the
interpreter alive, and hold no reference to the dataset between tickets.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import queue
import threading
import time
from collections.abc import Iterable

from keras_fastdata.errors import BatchTimeoutError, LoaderError
from keras_fastdata.health.staff import Staff
from keras_fastdata.health.timing import Stopwatch
from keras_fastdata.memory import ownership
from keras_fastdata.workers import stack
from keras_fastdata.workers.base import Builds, Built, Ticket, where
from keras_fastdata.workers.failures import note
from keras_fastdata.workers.interrupts import Uninterrupted
from keras_fastdata.workers.watch import Watch, Work, building, loading

_CLOSE_TIMEOUT_S = 5.0  # what a batch being built gets to end


class ThreadWorkers:
    """Builds in `count` threads of this process.

    Args:
        builder: What builds a batch; it is called from several threads.
        dataset: The dataset's class name, for messages.
        count: Number of threads, at least 1.
        batch_timeout: Seconds that one batch may take, or `None`.
    """

    def __init__(
        self,
        builder: Builds,
        dataset: str,
        count: int,
        batch_timeout: float | None,
    ) -> None:
        self._builder = builder
        self._dataset = dataset
        self._tickets: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._given = 0  # tickets that threads are to answer
        self._held: list[Ticket] | None = None  # while paused
        self._results = _Results()
        self._cancelled: set[int] = set()
        self._watch = Watch(
            batch_timeout,
            "A stuck thread cannot be replaced; a worker process can "
            "(`use_multiprocessing=True, batch_timeout=...`).",
        )
        self._threads: list[_Thread] = []
        with Uninterrupted():
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

    def submit(self, ticket: Ticket) -> bool:
        if self._held is None:
            self._give(ticket)
        else:
            self._held.append(ticket)
        return True

    def _give(self, ticket: Ticket) -> None:
        self._given += 1
        self._tickets.put(ticket)

    def wait(self, timeout_s: float) -> None:
        self._results.wait(min(timeout_s, self._watch.interval_s))

    def collect(self) -> Iterable[Built]:
        kept = []
        for built, seconds in self._results.take():
            self._given -= 1
            if built.serial == _START_FAILED:
                raise built.error or RuntimeError("on_worker_start failed")
            if built.serial in self._cancelled:
                self._cancelled.discard(built.serial)
            else:
                self._watch.learn(seconds)
                kept.append(built)
        if not kept and self._watch.is_due():
            kept += self._look_at_threads()
        return kept

    def cancel(self, serials: Iterable[int]) -> None:
        self._cancelled.update(serials)

    def pause(self) -> None:
        if self._held is None:
            self._held = self._taken_back()
            self._given -= len(self._held)

    def resume(self) -> None:
        held, self._held = self._held, None
        for ticket in held or ():
            self._give(ticket)

    @property
    def busy(self) -> bool:
        return self._given > 0

    def change(self) -> None:
        """Nothing to do: the threads build from the dataset itself."""

    def expect(self, ahead: int) -> None:
        """Nothing to do: batches take no shared memory."""

    def begin_epoch(self) -> None:
        """Nothing to do: a thread does not die."""

    def staff(self) -> Staff:
        return Staff("thread", len(self._threads))

    def close(self) -> None:
        with Uninterrupted():
            self._end_threads()

    def _start(self, worker: int) -> _Thread:
        thread = _Thread(
            self._builder,
            self._dataset,
            worker,
            self._tickets,
            self._results,
            self._cancelled,
        )
        thread.start()
        return thread

    def _look_at_threads(self) -> list[Built]:
        """Gives up batches whose time is up, and the threads they are in."""
        works = [w for t in self._threads if (w := t.work()) is not None]
        late = []
        for overdue in self._watch.look(works):
            work = overdue.work
            worker, ticket = work.worker, work.ticket
            if not self._threads[worker].give_up(ticket):
                continue  # it has finished after all, a moment ago
            self._threads[worker] = self._start(worker)
            self._given -= ticket is not None
            if ticket is not None and ticket.serial in self._cancelled:
                self._cancelled.discard(ticket.serial)
                continue  # nobody waits for it
            error = BatchTimeoutError(
                f"{overdue.text} A thread cannot be stopped: this one goes "
                "on, and holds whatever it holds. A worker process would have "
                "been replaced (`use_multiprocessing=True`). It was here:\n"
                f"{overdue.stack}",
                dataset=self._dataset,
                worker=worker,
                pid=os.getpid(),
                epoch=ticket.epoch if ticket else None,
                batch_index=ticket.index if ticket else None,
                elapsed_s=work.elapsed_s,
                stack=overdue.stack,
            )
            if ticket is None:
                raise error
            late.append(Built(ticket.serial, worker, error=error))
        return late

    def _taken_back(self) -> list[Ticket]:
        """The tickets that no thread has taken yet."""
        found = []
        with contextlib.suppress(queue.Empty):
            while (ticket := self._tickets.get_nowait()) is not None:
                found.append(ticket)
        return found

    def _end_threads(self) -> None:
        self._taken_back()
        for _ in self._threads:
            self._tickets.put(None)
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in self._threads:
            # The last reference to a dataset may die in one of its threads.
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        self._threads = []
        self._results.wake()


class _Results:
    """What the threads have built, and a wait for there to be some.

    A signal handler that ends the threads may interrupt any line here; so
    there is no lock that it could find taken, as that of an Event.
    """

    def __init__(self) -> None:
        self._built: collections.deque[tuple[Built, float]] = (
            collections.deque()
        )
        self._arrivals: queue.SimpleQueue[None] = queue.SimpleQueue()

    def put(self, built: Built, seconds: float) -> None:
        self._built.append((built, seconds))
        self._arrivals.put(None)

    def wait(self, timeout_s: float) -> None:
        """Waits until something has come, or `wake` was called."""
        with contextlib.suppress(queue.Empty):
            self._arrivals.get(timeout=timeout_s)

    def wake(self) -> None:
        """Ends the wait, if there is one."""
        self._arrivals.put(None)

    def take(self) -> list[tuple[Built, float]]:
        """What has come since, each with the seconds it took."""
        with contextlib.suppress(queue.Empty):
            while not self._arrivals.empty():
                self._arrivals.get_nowait()
        taken = []
        while self._built:
            taken.append(self._built.popleft())
        return taken


_START_FAILED = 0  # the serial of a failure that belongs to no ticket


class _Thread(threading.Thread):
    """One worker.

    Attributes:
        _starting: Whether `on_worker_start` has not ended yet.
        _desk: The ticket it has, and since when.
        _given_up: Whether somebody else answers for that ticket; nothing is
            to be heard of this thread any more.
        _lock: Guards the three.
    """

    def __init__(
        self,
        builder: Builds,
        dataset: str,
        worker: int,
        tickets: queue.SimpleQueue[Ticket | None],
        results: _Results,
        cancelled: set[int],
    ) -> None:
        super().__init__(name=f"keras_fastdata-{dataset}-{worker}", daemon=True)
        self._builder = builder
        self._dataset = dataset
        self._worker = worker
        self._tickets = tickets
        self._results = results
        self._cancelled = cancelled
        self._lock = threading.Lock()
        self._desk: tuple[Ticket, float] | None = None
        self._starting = True
        self._given_up = False
        self._stopwatch = Stopwatch()

    def work(self) -> Work | None:
        """What it is busy with."""
        with self._lock:
            desk, starting = self._desk, self._starting
        if desk is None:
            return None
        ticket, began = desk
        name = f"worker thread {self._worker}"
        return Work(
            self._worker,
            loading(self._dataset, name)
            if starting
            else building(self._dataset, ticket, name),
            None if starting else ticket,
            time.monotonic() - began,
            functools.partial(stack.of_thread, self.ident or 0),
            starting,
        )

    def give_up(self, ticket: Ticket | None) -> bool:
        """Gives it up, if it still is at that ticket, or else at its start."""
        with self._lock:
            if ticket is None:
                self._given_up = self._starting
            elif self._desk is not None:
                self._given_up = self._desk[0] is ticket
            return self._given_up

    def run(self) -> None:
        try:
            while (ticket := self._tickets.get()) is not None:
                if not self._serve(ticket):
                    return
            if not self._starting:
                self._builder.stop(self._worker)
        except ReferenceError:
            # The dataset was collected; nobody is waiting.
            return
        except BaseException as error:
            if isinstance(error, _StartFailed) and error.__cause__ is not None:
                error = error.__cause__
            note(error, f"In worker thread {self._worker} of {self._dataset}.")
            self._deliver(Built(_START_FAILED, self._worker, error=error))
        finally:
            self._stopwatch.close()

    def _serve(self, ticket: Ticket) -> bool:
        """Builds one batch; returns whether to go on."""
        self._lay(ticket, starting=self._starting)
        if self._starting:
            _start(self._builder, self._worker)
            self._lay(ticket, starting=False)
        return self._deliver(self._build(ticket))

    def _lay(self, ticket: Ticket, *, starting: bool) -> None:
        with self._lock:
            self._desk = ticket, time.monotonic()
            self._starting = starting

    def _deliver(self, built: Built) -> bool:
        """Hands over a result, unless the thread has been given up."""
        with self._lock:
            desk, self._desk = self._desk, None
            if self._given_up:
                return False
        began = desk[1] if desk else time.monotonic()
        self._results.put(built, time.monotonic() - began)
        return True

    def _build(self, ticket: Ticket) -> Built:
        serial, worker = ticket.serial, self._worker
        if serial in self._cancelled:
            return Built(serial, worker)
        self._stopwatch.start(ticket.interval_s, ticket.epoch)
        try:
            batch = ownership.take(
                [self._builder.build(ticket.epoch, ticket.index, worker)]
            )
            timing = self._stopwatch.stop()
            return Built(serial, worker, batch, timing=timing)
        except BaseException as error:
            here = where(self._dataset, ticket, f"worker thread {worker}")
            note(error, here)
            usual = isinstance(error, Exception)
            return Built(serial, worker, error=error, by_dataset=usual)


class _StartFailed(Exception):
    """Tells a ReferenceError of the user's from that of a dead dataset."""


def _start(builder: Builds, worker: int) -> None:
    try:
        builder.start(worker)
    except ReferenceError as error:
        raise _StartFailed from error
