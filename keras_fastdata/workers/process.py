"""Worker processes, and the training process's side of their sockets.

    submit -> backlog -> task socket  -> whichever worker is free
    collect <------------ result socket <- every worker

Nothing here blocks in a send: what the task socket does not take waits in the
backlog. The one wait, in `collect`, is over the result socket and the end of
every worker. A ticket is only sent together with a free slot, so a worker
never waits for memory.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
import os
import select
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from keras_fastdata.health.staff import Staff
from keras_fastdata.health.timing import Timing
from keras_fastdata.memory import codec, limits
from keras_fastdata.memory.arena import Arena, memfd
from keras_fastdata.memory.payload import Payload, write_payload
from keras_fastdata.workers import (
    child,
    deaths,
    failures,
    launch,
    messages,
    relay,
    stack,
)
from keras_fastdata.workers.base import (
    Builds,
    Built,
    Done,
    Ticket,
    where,
)
from keras_fastdata.workers.interrupts import Uninterrupted
from keras_fastdata.workers.ledger import Ledger, Sent
from keras_fastdata.workers.messages import KEPT, SPILLED, Kind, Result, Task
from keras_fastdata.workers.toll import Toll, strike
from keras_fastdata.workers.watch import Overdue, Watch, Work, building, loading

_GRACE_S = 2.0  # for a worker to end by itself when asked to
_EXIT_CODE_TIMEOUT_S = 2.0
_IDLE_LOOKS = 4  # in a row, before a worker that builds nothing is suspect

_log = logging.getLogger("keras_fastdata")


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the processes of one loader are to be run.

    Attributes:
        dataset: The dataset's class name, for messages.
        count: Number of workers, at least 1.
        start_method: "forkserver", "spawn" or "fork".
        lookahead: Batches that may wait to be delivered.
        max_restarts: Worker deaths survived in one epoch.
        batch_timeout: Seconds that one batch may take, or `None`.
        worker_env: Environment variables over the clean defaults.
    """

    dataset: str
    count: int
    start_method: str
    lookahead: int
    max_restarts: int
    batch_timeout: float | None
    worker_env: dict[str, str] | None


@dataclasses.dataclass
class _Worker:
    """A worker process.

    Attributes:
        index: From 0, below the number of workers.
        process: As it was launched.
        control: The training process's end of its control socket.
        stacks: The file that it writes its stacks into.
        version: Of the dataset's state that it has been sent.
        hired: When it was started, by `time.monotonic`.
        ready: Whether it has loaded the dataset.
        kept_slots: Slots that its copy of the dataset holds on to.
        seen: What the board said of it when it was last looked at.
        idle: What it had not done when it was last looked at, although it
            was not building; since when; and how many looks ago.
        overdue: Why it was killed, if it was.
        killed: When, by `time.monotonic`.
    """

    index: int
    process: launch.Child
    control: socket.socket
    stacks: int
    version: int
    hired: float
    ready: bool = False
    kept_slots: list[int] = dataclasses.field(default_factory=list)
    seen: tuple[int, float] = (0, 0.0)
    idle: tuple[tuple[int, int] | None, float, int] = (None, 0.0, 0)
    overdue: Overdue | None = None
    killed: float = 0.0

    @property
    def name(self) -> str:
        return f"worker {self.index} (pid {self.process.pid})"


class _Delivery:
    """A batch in its slot, waiting to be opened."""

    __slots__ = (
        "_arena",
        "_dataset",
        "_encoded",
        "_sent",
        "nbytes",
        "serial",
        "timing",
        "worker",
    )
    by_dataset = is_lost = False

    def __init__(
        self,
        dataset: str,
        sent: Sent,
        worker: int,
        encoded: codec.Encoded,
        arena: Arena,
        timing: Timing | None,
    ) -> None:
        self.serial = sent.ticket.serial
        self.worker = worker
        self.nbytes = encoded.used
        self.timing = timing
        self._dataset = dataset
        self._sent = sent
        self._encoded = encoded
        self._arena = arena

    def open(self) -> Any:
        try:
            return codec.decode(self._encoded, self._arena, self._sent.slot)
        except Exception as error:
            worker, ticket = f"worker {self.worker}", self._sent.ticket
            failures.note(
                error, where(self._dataset, ticket, worker, "loading")
            )
            raise

    def discard(self) -> None:
        self._arena.put(self._sent.slot)


class ProcessWorkers:
    """Builds in processes.

    Args:
        plan: How many, started how.
        make_builder: Makes a worker's builder. It is pickled at once, and
            again at each `change`, with the dataset it refers to.
        receiver: Hands on what they log, and warn of.

    Raises:
        Exception: Whatever pickling the dataset raises.
    """

    def __init__(
        self,
        plan: Plan,
        make_builder: Callable[[], Builds],
        receiver: relay.Receiver,
    ) -> None:
        self._plan = plan
        self._make_builder = make_builder
        self._version = 1
        self._by_fork = plan.start_method == "fork"
        self._watch = Watch(
            plan.batch_timeout,
            "`batch_timeout` replaces a worker that is stuck.",
        )
        self._workers: dict[int, _Worker] = {}
        self._toll = Toll(plan.count, plan.max_restarts)
        self._fallen: int | None = None  # the last nursery that died
        self._receiver = receiver
        self._relayed: collections.deque[Result] = collections.deque()
        self._last_words: dict[int, bytes] = {}  # by worker
        self._buffer = memoryview(bytearray(messages.RECEIVE_BYTES))
        self._closed = False
        self._paused = False
        self._told = True  # whether every worker was sent the version
        limits.keep_standard_files()
        with contextlib.ExitStack() as undo:
            self._payload = None if self._by_fork else Payload(make_builder)
            if self._payload is not None:
                undo.callback(self._payload.close)
            self._arena = Arena(
                warm_slots=plan.lookahead + plan.count,
                hold_limit=max(16, plan.lookahead),
            )
            undo.callback(self._arena.close)
            with limits.named("Worker processes could not be started"):
                self._launcher = launch.make_launcher(
                    plan.start_method,
                    plan.worker_env,
                    make_builder,
                    self._arena.segment,
                )
                undo.callback(self._launcher.close)
                self._open_sockets()
            undo.pop_all()
        self._ledger = Ledger(self._arena, spare=plan.count)

    # -- what the engine calls ----------------------------------------------

    def submit(self, ticket: Ticket) -> bool:
        if not self._ledger.enter(ticket):
            return False
        self._flush()
        return True

    def wait(self, timeout_s: float) -> None:
        poll = self._poll
        try:
            poll.poll(min(timeout_s, self._watch.interval_s))
        except (OSError, ValueError):
            if not poll.closed:  # by whoever has ended the workers
                raise

    def collect(self) -> Iterable[Done]:
        self._hire()
        done = self._receive()
        # Now and then also while batches flow: one worker may be missing.
        due = self._watch.is_due()
        if due or not done:
            ended = self._ended(0)
            done += self._receive()
            for worker in ended:
                done += self._bury(worker)
            if due:
                done += self._look_at_workers()
            self._hire()
        if self._toll.is_over:
            done += self._fail_all()
        self._flush()
        self._hand_on()
        return done

    def cancel(self, serials: Iterable[int]) -> None:
        gone = set(serials)
        if self._ledger.is_out(gone):
            self._unqueue()
            self._ledger.cancel(gone)
            self._flush()

    def pause(self) -> None:
        if not self._paused:
            self._unqueue()
            self._paused = True

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._flush()

    @property
    def busy(self) -> bool:
        return self._ledger.is_awaited

    def change(self) -> None:
        if self._payload is None:
            self._end_workers()
            self._open_sockets()
        else:
            self._payload.renew(self._make_builder)
        # Even if no byte of it is new: what it refers to (a file) may be.
        self._version += 1
        self._told = False
        self._flush()

    def expect(self, ahead: int) -> None:
        self._arena.keep_warm(ahead + self._plan.count)

    def begin_epoch(self) -> None:
        self._toll.begin_epoch()

    def staff(self) -> Staff:
        return Staff(
            "process",
            self._plan.count,
            {i: w.process.pid for i, w in list(self._workers.items())},
            self._toll.losses,
            self._arena.nbytes,
        )

    def close(self) -> None:
        if self._closed:
            return
        with Uninterrupted():
            self._closed = True
            self._end_workers()
            self._launcher.close()
            if self._payload is not None:
                self._payload.close()
            self._arena.close()
        self._hand_on()

    # -- sending ------------------------------------------------------------

    def _flush(self) -> None:
        """Sends what the sockets take without waiting."""
        if not self._workers or self._paused:
            return
        if not self._told:
            self._tell_version()
        self._ledger.send(self._send_task)

    def _send_task(self, wire: int, sent: Sent) -> bool:
        ticket = sent.ticket
        task = Task(
            wire,
            ticket.epoch,
            ticket.index,
            self._version,
            sent.slot,
            ticket.interval_s,
        )
        try:
            self._tasks.send(task.pack(), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def _tell_version(self) -> None:
        for worker in self._workers.values():
            if worker.version < self._version:
                self._send_version(worker)
        self._told = all(
            worker.version == self._version for worker in self._workers.values()
        )

    def _send_version(self, worker: _Worker) -> None:
        if self._payload is None:
            return
        news = messages.pack_version(self._version, self._payload.start)
        try:
            socket.send_fds(
                worker.control, [news], [self._payload.fd], socket.MSG_DONTWAIT
            )
            worker.version = self._version
        except BlockingIOError:
            pass  # it is far behind; tried again with every flush
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has died, which the next wait will notice

    def _unqueue(self) -> list[int]:
        """Empties the task socket; what was in it waits to be sent again.

        Returns:
            The wire numbers found.
        """
        wires = []
        with contextlib.suppress(BlockingIOError):
            while True:
                datagram = self._tasks_taken.recv(
                    messages.TASK_BYTES, socket.MSG_DONTWAIT
                )
                wires.append(Task.unpack(datagram).serial)
        return self._ledger.take_back(wires)

    # -- receiving ----------------------------------------------------------

    def _ended(self, timeout_s: float) -> list[_Worker]:
        """The workers that ended, after waiting for that or a message."""
        ready = {fd for fd, _ in self._poll.poll(timeout_s)}
        return [w for w in self._workers.values() if w.process.pidfd in ready]

    def _receive(self) -> list[Done]:
        """Takes in every message there is."""
        done: list[Done] = []
        for result in self._messages():
            match result.kind:
                case Kind.BATCH | Kind.FAILURE | Kind.STALE:
                    self._settle(result, done)
                case Kind.LOG | Kind.WARNING:
                    self._relayed.append(result)
                case Kind.READY:
                    if result.worker in self._workers:
                        self._workers[result.worker].ready = True
                case Kind.START_FAILED:
                    begun = self._last_words.pop(result.worker, b"")
                    if not result.serial:
                        raise failures.put_together(begun + result.body)
                    self._last_words[result.worker] = begun + result.body
        return done

    def _messages(self) -> Iterator[Result]:
        """Every message that waits in the result socket."""
        while True:
            try:
                nbytes = self._results.recv_into(
                    self._buffer, 0, socket.MSG_DONTWAIT
                )
            except BlockingIOError:
                return
            yield Result.unpack(bytes(self._buffer[:nbytes]))

    def _settle(self, result: Result, done: list[Done]) -> None:
        """Accounts for the ticket and the slot of one result."""
        sent, slot = self._ledger.settle(result.serial, result.worker)
        if slot is None:
            return
        if sent is None or result.kind is Kind.STALE:
            self._release(slot, result)
            if sent is not None:
                self._ledger.send_anew(sent)
            return
        self._watch.learn(result.build_ns / 1e9)
        serial = sent.ticket.serial
        extents, body = result.extents, result.body
        if result.flags & SPILLED:
            extents, body = self._spilled(result, slot)
        if result.kind is Kind.FAILURE:
            self._release(slot, result)
            error = failures.put_together(body)
            usual = isinstance(error, Exception)
            done.append(
                Built(serial, result.worker, error=error, by_dataset=usual)
            )
            return
        timing = result.timing
        if timing is not None and sent.strikes:
            timing = timing._replace(retries=sent.strikes)
        kept = bool(result.flags & KEPT)
        delivery = _Delivery(
            self._plan.dataset,
            sent,
            result.worker,
            codec.Encoded(body, extents, result.used, kept),
            self._arena,
            timing,
        )
        if not kept:
            done.append(delivery)
            return
        # The worker may still write to the slot, and die: copied at once.
        built = Built(serial, result.worker, nbytes=result.used, timing=timing)
        try:
            built.batch = delivery.open()
        except Exception as broken:
            built.error = broken
        self._release(slot, result)
        done.append(built)

    def _spilled(self, result: Result, slot: int) -> tuple[bytes, bytes]:
        """The extents and body of a result, which lie in its slot."""
        split = result.extents_nbytes
        spilled = codec.read_appended(
            self._arena.segment,
            slot,
            result.used,
            split + result.body_nbytes,
        )
        return spilled[:split], spilled[split:]

    def _release(self, slot: int, result: Result) -> None:
        """Frees a slot, unless the dataset in the worker holds on to it."""
        worker = self._workers.get(result.worker)
        if result.flags & KEPT and worker is not None:
            worker.kept_slots.append(slot)
        else:
            self._arena.put(slot)

    def _hand_on(self) -> None:
        while self._relayed:
            result = self._relayed.popleft()
            self._receiver.receive(result.kind, result.body)

    # -- starting workers ---------------------------------------------------

    def _open_sockets(self) -> None:
        self._tasks, self._tasks_taken = messages.socket_pair()
        self._results, self._results_told = messages.socket_pair()
        # Unlike a poll object, it stands being used by a signal handler, or
        # another thread, that ends the workers while they are waited for.
        self._poll = select.epoll()
        self._poll.register(self._results, select.EPOLLIN)

    def _hire(self) -> None:
        """Starts the workers that are missing, as far as that is allowed."""
        if len(self._workers) == self._plan.count:
            return
        for index in range(self._plan.count):
            if index not in self._workers and self._toll.replaces(index):
                with (
                    Uninterrupted(),
                    limits.named(f"Worker {index} could not be started"),
                ):
                    self._start(index)

    def _start(self, index: int) -> None:
        segment = self._arena.segment
        segment.note(index, 0)
        segment.clock(index, 0)  # one that was killed left its own
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as handed:
            control, theirs = messages.socket_pair()
            undo.callback(control.close)
            handed.callback(theirs.close)
            start_fd = write_payload(
                child.Start.by_this_process(
                    index,
                    self._plan.dataset,
                    self._version,
                    self._payload.start if self._payload else 0,
                    segment.stride,
                    launch.environment(self._plan.worker_env),
                )
            )
            handed.callback(os.close, start_fd)
            stacks = memfd("keras_fastdata-stacks")
            undo.callback(os.close, stacks)
            files = child.Files(
                start=start_fd,
                # A fork needs no payload; the descriptor is closed unread.
                dataset=self._payload.fd if self._payload else start_fd,
                arena=segment.fd,
                tasks=self._tasks_taken.fileno(),
                results=self._results_told.fileno(),
                control=theirs.fileno(),
                stacks=stacks,
            )
            process = self._launcher.start(files)
            undo.pop_all()
        self._workers[index] = _Worker(
            index, process, control, stacks, self._version, time.monotonic()
        )
        self._poll.register(process.pidfd, select.EPOLLIN)

    # -- workers that are stuck ---------------------------------------------

    def _look_at_workers(self) -> list[Done]:
        """Kills workers whose time is up; leaves behind what survives that."""
        now = time.monotonic()
        for overdue in self._watch.look(list(self._works(now))):
            worker = self._workers[overdue.work.worker]
            if worker.seen != self._seen(worker):
                continue  # it has moved on after all, a moment ago
            worker.overdue, worker.killed = overdue, now
            launch.kill(worker.process)
        done: list[Done] = []
        for worker in list(self._workers.values()):
            if worker.killed and now - worker.killed > _GRACE_S:
                self._leave_behind(worker)
                done += self._bury(worker, ended=False)
        return done

    def _works(self, now: float) -> Iterator[Work]:
        """What each worker is busy with."""
        for worker in self._workers.values():
            worker.seen = self._seen(worker)
        notes = {i: w.seen[0] for i, w in self._workers.items()}
        unclaimed = self._ledger.oldest_unclaimed(notes.values())
        name = self._plan.dataset
        for index, worker in self._workers.items():
            if worker.killed:
                continue
            process = worker.process
            ask = functools.partial(
                stack.ask, process.pid, process.pidfd, worker.stacks
            )
            noted, began = worker.seen
            ticket = self._ledger.ticket_of(noted)
            if not worker.ready:
                what = loading(name, worker.name)
                elapsed_s = now - worker.hired
                yield Work(index, what, None, elapsed_s, ask, starting=True)
            elif ticket is not None and began:
                what = building(name, ticket, worker.name)
                yield Work(index, what, ticket, now - began, ask)
            elif (idle_s := _idle_s(worker, noted, unclaimed, now)) > 0:
                what = f"Taking or delivering a batch of {name}, {worker.name},"
                yield Work(index, what, None, idle_s, ask)

    def _seen(self, worker: _Worker) -> tuple[int, float]:
        """What a worker has noted, and when it began to build that."""
        segment = self._arena.segment
        return segment.noted(worker.index), segment.clocked(worker.index)

    def _leave_behind(self, worker: _Worker) -> None:
        why = (
            "does not end, although it was killed (SIGKILL). It is left "
            "behind; it ends when the system call it is in does."
        )
        if not launch.may_be_killed(worker.process):
            why = (
                "does not end, and may not be killed (EPERM): it runs as the "
                "user that this process was when it started it. It is left "
                "behind; it ends when its batch does."
            )
        worker.process.abandon()
        _log.warning(
            "%s of %s %s", worker.name.capitalize(), self._plan.dataset, why
        )

    # -- the end of workers -------------------------------------------------

    def _bury(self, worker: _Worker, *, ended: bool = True) -> list[Done]:
        """Accounts for a worker that ended without being asked to.

        What it held is built again, by its replacement or another worker,
        unless it may not be: then those tickets end in an error.
        """
        exit_code = None
        if ended:
            exit_code = worker.process.exit_code(_EXIT_CODE_TIMEOUT_S)
        self._dismiss(worker, ended=ended)
        # Nobody to say how: their nursery died. That is one death, however
        # many workers it had.
        nursery = worker.process.nursery if ended else None
        fell = nursery is not None and exit_code is None
        self._toll.record(
            worker.index,
            worker.process.pid,
            counts=not (fell and nursery == self._fallen),
        )
        if fell:
            self._fallen = nursery
        queued = self._unqueue()
        segment = self._arena.segment
        suspect = self._ledger.recover(
            worker.index,
            queued,
            segment.noted(worker.index),
            {i: segment.noted(i) for i in self._workers},
            ended=ended,
        )
        # A batch is not to blame for the death of a nursery.
        if suspect is not None and not fell:
            strike(suspect)
        error = self._toll.judge(
            deaths.Death(
                dataset=self._plan.dataset,
                worker=worker.index,
                pid=worker.process.pid,
                exit_code=exit_code,
                overdue=worker.overdue,
                starting=not worker.ready,
            ),
            suspect,
        )
        if suspect is None:
            return []
        if error is None:
            self._ledger.send_first(suspect)
            return []
        self._arena.put(suspect.slot)
        return [Built(suspect.ticket.serial, worker.index, error=error)]

    def _fail_all(self) -> Iterator[Done]:
        """Ends all there is: no worker is left, and none may be hired."""
        death = self._toll.end()
        for ticket in self._ledger.give_up():
            yield Built(ticket.serial, death.worker, error=death.error())

    def _dismiss(self, worker: _Worker, *, ended: bool = True) -> None:
        """Forgets a worker that has ended, or is left behind."""
        del self._workers[worker.index]
        self._last_words.pop(worker.index, None)
        self._poll.unregister(worker.process.pidfd)
        os.close(worker.process.pidfd)
        os.close(worker.stacks)
        worker.control.close()
        if ended:
            for slot in worker.kept_slots:
                self._arena.put(slot)

    def _end_workers(self) -> None:
        """Asks the workers to end, and kills those that do not."""
        if self._workers:
            self._unqueue()
        for end in (self._tasks, self._tasks_taken):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for worker in self._workers.values():
            with contextlib.suppress(OSError):
                worker.control.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + _GRACE_S
        while self._workers and time.monotonic() < deadline:
            ended = self._ended(0.1)
            self._drop_results()
            for worker in ended:
                worker.process.exit_code(_EXIT_CODE_TIMEOUT_S)
                self._dismiss(worker)
        for worker in list(self._workers.values()):
            launch.kill(worker.process)
        deadline = time.monotonic() + _GRACE_S
        for worker in list(self._workers.values()):
            left_s = max(0.0, deadline - time.monotonic())
            if launch.has_ended(worker.process, left_s):
                worker.process.exit_code(_EXIT_CODE_TIMEOUT_S)
                self._dismiss(worker)
            else:
                self._leave_behind(worker)
                self._dismiss(worker, ended=False)
        self._drop_results()
        self._ledger.clear()
        for end in (
            self._tasks,
            self._tasks_taken,
            self._results,
            self._results_told,
        ):
            end.close()
        self._poll.close()

    def _drop_results(self) -> None:
        """Takes in the messages of workers that end; keeps log and warnings."""
        for result in self._messages():
            if result.kind in (Kind.LOG, Kind.WARNING):
                self._relayed.append(result)


def _idle_s(
    worker: _Worker, noted: int, unclaimed: int | None, now: float
) -> float:
    """How long a worker that builds nothing has left something undone.

    It has not delivered what it noted, or not taken a ticket that nobody has.
    Each may be so for a moment; it is not, when seen several times in a row.
    """
    undone = (noted, 0) if noted else (0, unclaimed) if unclaimed else None
    before, since, looks = worker.idle
    if undone is None or undone != before:
        worker.idle = undone, now, 0
        return 0.0
    worker.idle = undone, since, looks + 1
    return now - since if looks >= _IDLE_LOOKS else 0.0
