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
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from keras_fastdata.errors import LoaderError, WorkerDiedError
from keras_fastdata.memory import codec, payload
from keras_fastdata.memory.arena import Arena
from keras_fastdata.workers import child, failures, launch, messages, relay
from keras_fastdata.workers.base import Builds, Built, Done, Ticket, where
from keras_fastdata.workers.interrupts import Uninterrupted
from keras_fastdata.workers.messages import Flag, Kind, Result, Task
from keras_fastdata.workers.recovery import losses_of

_GRACE_S = 2.0  # for a worker to end by itself when asked to
_EXIT_CODE_TIMEOUT_S = 2.0
_STRIKES = 2  # deaths of workers over one batch before the batch is blamed


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the processes of one loader are to be run.

    Attributes:
        dataset: The dataset's class name, for messages.
        count: Number of workers, at least 1.
        start_method: "forkserver", "spawn" or "fork".
        lookahead: Batches that may wait to be delivered.
        max_restarts: Worker deaths survived in one epoch.
        worker_env: Environment variables over the clean defaults.
    """

    dataset: str
    count: int
    start_method: str
    lookahead: int
    max_restarts: int
    worker_env: dict[str, str] | None


@dataclasses.dataclass
class _Sent:
    """A ticket on its way, under the number it has on the wire."""

    ticket: Ticket
    slot: int
    strikes: int = 0


@dataclasses.dataclass
class _Limbo:
    """Slots that some living worker may yet write to.

    They are free once each of `awaited` has answered a ticket that was sent
    after `mark`, for a worker builds one batch at a time.
    """

    slots: list[int]
    mark: int
    awaited: set[int]


@dataclasses.dataclass
class _Worker:
    index: int
    process: launch.Child
    control: socket.socket
    version: int
    kept_slots: list[int] = dataclasses.field(default_factory=list)


class _Delivery:
    """A batch in its slot, waiting to be opened."""

    def __init__(
        self,
        serial: int,
        worker: int,
        encoded: codec.Encoded,
        arena: Arena,
        slot: int,
        where: str,
    ) -> None:
        self._where = where
        self.serial = serial
        self.worker = worker
        self.nbytes = encoded.used
        self._encoded = encoded
        self._arena = arena
        self._slot = slot

    def open(self) -> Any:
        try:
            return codec.decode(self._encoded, self._arena, self._slot)
        except Exception as error:
            failures.note(error, self._where)
            raise

    def discard(self) -> None:
        self._arena.put(self._slot)


class ProcessWorkers:
    """Builds in processes.

    Args:
        plan: How many, started how.
        make_builder: Makes a worker's builder. It is pickled at once, and
            again at each `change`, with the dataset it refers to.

    Raises:
        Exception: Whatever pickling the dataset raises.
    """

    def __init__(self, plan: Plan, make_builder: Callable[[], Builds]) -> None:
        self._plan = plan
        self._make_builder = make_builder
        self._version = 1
        self._by_fork = plan.start_method == "fork"
        self._payload = self._write_payload()
        self._arena = Arena(
            warm_slots=plan.lookahead + plan.count,
            hold_limit=max(16, plan.lookahead),
        )
        self._launcher = launch.make_launcher(
            plan.start_method, plan.worker_env, make_builder
        )
        self._wire = 0
        self._sent: dict[int, _Sent] = {}
        self._cancelled: dict[int, int] = {}  # wire -> slot
        self._limbo: list[_Limbo] = []
        self._backlog: collections.deque[int] = collections.deque()
        self._workers: dict[int, _Worker] = {}
        self._restarts = 0
        self._nursery_fell = False
        self._receiver = relay.Receiver()
        self._relayed: collections.deque[Result] = collections.deque()
        self._last_words: dict[int, bytes] = {}  # by worker
        self._buffer = memoryview(bytearray(messages.RECEIVE_BYTES))
        self._closed = False
        self._open_sockets()

    # -- what the engine calls ----------------------------------------------

    def submit(self, ticket: Ticket) -> bool:
        slot = self._arena.take()
        if slot is None:
            return False
        self._queue(_Sent(ticket, slot))
        self._flush()
        return True

    def wait(self, timeout_s: float) -> None:
        self._poll.poll(timeout_s * 1000)

    def collect(self) -> Iterable[Done]:
        self._hire()
        done = self._receive()
        if not done:
            ended = self._ended(0)
            done = self._receive()
            for worker in ended:
                done += self._bury(worker)
        self._flush()
        self._hand_on()
        return done

    def cancel(self, serials: Iterable[int]) -> None:
        gone = set(serials)
        wires = {w for w, s in self._sent.items() if s.ticket.serial in gone}
        if not wires:
            return
        self._unqueue()
        for wire in wires:
            slot = self._sent.pop(wire).slot
            if wire in self._backlog:
                self._backlog.remove(wire)
                self._arena.put(slot)
            else:
                self._cancelled[wire] = slot
        self._flush()

    def change(self) -> None:
        self._version += 1
        previous, self._payload = self._payload, self._write_payload()
        if previous is not None:
            os.close(previous)
        if self._by_fork:
            self._end_workers()
            self._open_sockets()
        self._flush()

    def begin_epoch(self) -> None:
        self._restarts = 0

    def close(self) -> None:
        if self._closed:
            return
        with Uninterrupted():
            self._closed = True
            self._end_workers()
            self._launcher.close()
            if self._payload is not None:
                os.close(self._payload)
            self._arena.close()
        self._hand_on()

    # -- sending ------------------------------------------------------------

    def _queue(self, sent: _Sent) -> None:
        self._wire += 1
        self._sent[self._wire] = sent
        self._backlog.append(self._wire)

    def _flush(self) -> None:
        """Sends what the sockets take without waiting."""
        if not self._workers:
            return
        for worker in self._workers.values():
            if worker.version < self._version:
                self._send_version(worker)
        while self._backlog:
            wire = self._backlog[0]
            sent = self._sent[wire]
            task = Task(
                wire,
                sent.ticket.epoch,
                sent.ticket.index,
                self._version,
                sent.slot,
            )
            try:
                self._tasks.send(task.pack(), socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            self._backlog.popleft()

    def _send_version(self, worker: _Worker) -> None:
        if self._payload is None:
            return
        number = self._version.to_bytes(8, "little")
        try:
            socket.send_fds(
                worker.control, [number], [self._payload], socket.MSG_DONTWAIT
            )
            worker.version = self._version
        except BlockingIOError:
            pass  # it is far behind; tried again with every flush
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has died, which the next wait will notice

    def _unqueue(self) -> list[int]:
        """Empties the task socket; puts what was in it before the backlog."""
        found = []
        while True:
            try:
                datagram = self._tasks_taken.recv(
                    messages.TASK_BYTES, socket.MSG_DONTWAIT
                )
            except BlockingIOError:
                break
            wire = Task.unpack(datagram).serial
            if wire in self._sent:
                found.append(wire)
            else:
                self._arena.put(self._cancelled.pop(wire))
        self._backlog.extendleft(reversed(found))
        return found

    # -- receiving ----------------------------------------------------------

    def _ended(self, timeout_s: float) -> list[_Worker]:
        """The workers that ended, after waiting for that or a message."""
        ready = {fd for fd, _ in self._poll.poll(timeout_s * 1000)}
        return [w for w in self._workers.values() if w.process.pidfd in ready]

    def _receive(self) -> list[Done]:
        """Takes in every message there is."""
        done: list[Done] = []
        for result in self._messages():
            match result.kind:
                case Kind.LOG | Kind.WARNING:
                    self._relayed.append(result)
                case Kind.READY:
                    pass
                case Kind.START_FAILED:
                    begun = self._last_words.pop(result.worker, b"")
                    if not result.serial:
                        raise failures.put_together(begun + result.body)
                    self._last_words[result.worker] = begun + result.body
                case _:
                    done += self._settle(result)
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

    def _settle(self, result: Result) -> Iterator[Done]:
        """Accounts for the ticket and the slot of one result."""
        self._leave_limbo(result.worker, result.serial)
        wire = result.serial
        sent = self._sent.pop(wire, None)
        slot = sent.slot if sent else self._cancelled.pop(wire, None)
        if slot is None:
            return  # it was in limbo; another worker builds it
        if sent is None or result.kind is Kind.STALE:
            self._release(slot, result)
            if sent is not None:
                self._queue(dataclasses.replace(sent, slot=self._take()))
            return
        serial = sent.ticket.serial
        extents, body = self._body_of(result, slot)
        if result.kind is Kind.FAILURE:
            self._release(slot, result)
            error = failures.put_together(body)
            yield Built(serial, result.worker, error=error)
            return
        here = where(
            self._plan.dataset, sent.ticket, f"worker {result.worker}"
        ).replace("building", "loading")
        kept = Flag.KEPT in result.flags
        encoded = codec.Encoded(body, extents, result.used, kept)
        if kept:
            # The worker may still write to the slot, and die: copied at once.
            built = Built(serial, result.worker)
            try:
                built.batch = codec.decode(encoded, self._arena, slot)
            except Exception as broken:
                failures.note(broken, here)
                built.error = broken
            self._release(slot, result)
            yield built
        else:
            yield _Delivery(
                serial, result.worker, encoded, self._arena, slot, here
            )

    def _body_of(self, result: Result, slot: int) -> tuple[bytes, bytes]:
        if Flag.SPILLED not in result.flags:
            return result.extents, result.body
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
        if Flag.KEPT in result.flags and worker is not None:
            worker.kept_slots.append(slot)
        else:
            self._arena.put(slot)

    def _take(self) -> int:
        slot = self._arena.take()
        if slot is None:
            raise LoaderError(
                "No slot of shared memory is left. Batches of this dataset "
                "are held in too many places; copy those you keep."
            )
        return slot

    def _hand_on(self) -> None:
        while self._relayed:
            result = self._relayed.popleft()
            self._receiver.receive(result.kind, result.body)

    # -- starting workers ---------------------------------------------------

    def _open_sockets(self) -> None:
        kind = socket.AF_UNIX, socket.SOCK_SEQPACKET
        self._tasks, self._tasks_taken = socket.socketpair(*kind)
        self._results, self._results_told = socket.socketpair(*kind)
        self._poll = select.poll()
        self._poll.register(self._results, select.POLLIN)

    def _hire(self) -> None:
        """Starts the workers that are missing, as far as that is allowed."""
        if len(self._workers) == self._plan.count:
            return
        for index in range(self._plan.count):
            if index not in self._workers and (
                self._restarts <= self._plan.max_restarts
            ):
                with Uninterrupted():
                    self._start(index)

    def _start(self, index: int) -> None:
        control, theirs = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET
        )
        self._arena.segment.note(index, 0)
        start_fd = payload.write_payload(self._describe_start(index))
        files = child.Files(
            start=start_fd,
            # A fork needs no payload; the descriptor is closed unread.
            dataset=start_fd if self._payload is None else self._payload,
            arena=self._arena.segment.fd,
            tasks=self._tasks_taken.fileno(),
            results=self._results_told.fileno(),
            control=theirs.fileno(),
        )
        try:
            process = self._launcher.start(files)
        except BaseException:
            control.close()
            raise
        finally:
            os.close(start_fd)
            theirs.close()
        self._nursery_fell = False
        self._workers[index] = _Worker(index, process, control, self._version)
        self._poll.register(process.pidfd, select.POLLIN)

    def _describe_start(self, index: int) -> child.Start:
        try:
            cwd = os.getcwd()
        except OSError:
            cwd = None  # it has been deleted
        return child.Start(
            worker=index,
            dataset=self._plan.dataset,
            version=self._version,
            stride=self._arena.segment.stride,
            environ=launch.environment(self._plan.worker_env),
            cwd=cwd,
            path=list(sys.path),
            argv=list(getattr(sys, "argv", [])),
            umask=_umask(),
            habits=relay.Habits.of_this_process(),
        )

    def _write_payload(self) -> int | None:
        if self._by_fork:
            return None
        return payload.write_payload(self._make_builder)

    # -- the end of workers -------------------------------------------------

    def _bury(self, worker: _Worker) -> list[Done]:
        """Accounts for a worker that ended without being asked to.

        What it held is built again, by its replacement or another worker,
        unless it may not be: then those tickets end in WorkerDiedError.
        """
        exit_code = worker.process.exit_code(_EXIT_CODE_TIMEOUT_S)
        self._dismiss(worker)
        # All at once, and nobody to say how: their nursery died. That is one
        # death, however many workers it had.
        nursery_fell = exit_code is None and self._nursery_fell
        self._restarts += not nursery_fell
        self._nursery_fell = exit_code is None
        queued = self._unqueue()
        segment = self._arena.segment
        living = {i: segment.noted(i) for i in self._workers}
        losses = losses_of(
            self._sent.keys() - set(self._backlog) | self._cancelled.keys(),
            queued,
            segment.noted(worker.index),
            living,
        )
        done: list[Done] = []
        limbo = _Limbo([], self._wire + 1, set(self._workers))
        for wire in losses.unclaimed:
            if wire in self._cancelled:
                limbo.slots.append(self._cancelled.pop(wire))
            else:
                sent = self._sent.pop(wire)
                limbo.slots.append(sent.slot)
                self._send_again(dataclasses.replace(sent, slot=self._take()))
        if limbo.slots:
            self._limbo.append(limbo)
        self._leave_limbo(worker.index, self._wire + 1)
        if losses.suspect is not None:
            done += self._judge(losses.suspect, worker, exit_code)
        if not self._workers and self._restarts > self._plan.max_restarts:
            done += self._fail_all(worker, exit_code)
        return done

    def _judge(
        self, wire: int, worker: _Worker, exit_code: int | None
    ) -> Iterator[Done]:
        """Decides about the batch that a worker died over."""
        if wire in self._cancelled:
            self._arena.put(self._cancelled.pop(wire))
            return
        sent = self._sent.pop(wire)
        sent.strikes += 1
        if (
            sent.strikes < _STRIKES
            and self._restarts <= self._plan.max_restarts
        ):
            self._send_again(sent)
            return
        self._arena.put(sent.slot)
        error = self._death_of(worker, exit_code, sent)
        yield Built(sent.ticket.serial, worker.index, error=error)

    def _send_again(self, sent: _Sent) -> None:
        """Sends a lost ticket before all others: it is the oldest."""
        self._queue(sent)
        self._backlog.rotate(1)

    def _fail_all(
        self, worker: _Worker, exit_code: int | None
    ) -> Iterator[Done]:
        for sent in self._sent.values():
            self._arena.put(sent.slot)
            error = self._death_of(worker, exit_code, None)
            yield Built(sent.ticket.serial, worker.index, error=error)
        self._sent.clear()
        self._backlog.clear()

    def _death_of(
        self, worker: _Worker, exit_code: int | None, sent: _Sent | None
    ) -> WorkerDiedError:
        plan = self._plan
        ticket = sent.ticket if sent else None
        doing = ""
        if sent and ticket:
            doing = (
                f" while building batch {ticket.index} of epoch {ticket.epoch}"
            )
            if sent.strikes >= _STRIKES:
                doing += ", for the second time"
        allowed = (
            f" `max_worker_restarts={plan.max_restarts}` is used up."
            if self._restarts > plan.max_restarts
            else ""
        )
        index = ticket.index if ticket else None
        return WorkerDiedError(
            f"Worker {worker.index} (pid {worker.process.pid}) of "
            f"{plan.dataset} {_how(exit_code)}{doing}.{allowed} "
            f"{_remedy(exit_code, index)}",
            dataset=plan.dataset,
            worker=worker.index,
            pid=worker.process.pid,
            exit_code=exit_code,
            epoch=ticket.epoch if ticket else None,
            batch_index=index,
        )

    def _leave_limbo(self, worker: int, wire: int) -> None:
        for limbo in self._limbo[:]:
            if wire >= limbo.mark:
                limbo.awaited.discard(worker)
            if not limbo.awaited:
                self._limbo.remove(limbo)
                for slot in limbo.slots:
                    self._arena.put(slot)

    def _dismiss(self, worker: _Worker) -> None:
        """Forgets a worker that has ended."""
        del self._workers[worker.index]
        self._poll.unregister(worker.process.pidfd)
        os.close(worker.process.pidfd)
        worker.control.close()
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
            if launch.has_ended(worker.process, _GRACE_S):
                worker.process.exit_code(_EXIT_CODE_TIMEOUT_S)
            self._dismiss(worker)
        self._drop_results()
        for wire in list(self._sent):
            self._arena.put(self._sent.pop(wire).slot)
        for wire in list(self._cancelled):
            self._arena.put(self._cancelled.pop(wire))
        for limbo in self._limbo:
            for slot in limbo.slots:
                self._arena.put(slot)
        self._limbo.clear()
        self._backlog.clear()
        for end in (
            self._tasks,
            self._tasks_taken,
            self._results,
            self._results_told,
        ):
            end.close()

    def _drop_results(self) -> None:
        """Takes in the messages of workers that end; keeps log and warnings."""
        for result in self._messages():
            if result.kind in (Kind.LOG, Kind.WARNING):
                self._relayed.append(result)


def _how(exit_code: int | None) -> str:
    if exit_code is None:
        return "ended in a way that could not be learned"
    if exit_code >= 0:
        return f"exited with status {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"


def _remedy(exit_code: int | None, index: int | None) -> str:
    look = (
        "" if index is None else f" Look at that batch with `dataset[{index}]`."
    )
    if exit_code == -signal.SIGKILL:
        return (
            "The kernel kills processes when memory runs out: lower `workers` "
            f"or `max_queue_size`.{look}"
        )
    if exit_code is not None and exit_code < 0:
        return f"A library that `__getitem__` calls has crashed.{look}"
    return (
        "Something in `__getitem__` or `on_worker_start` ended the process; "
        f"raise an exception instead.{look}"
    )


def _umask() -> int:
    """The file mode creation mask, which os.umask cannot read unchanged."""
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o022
