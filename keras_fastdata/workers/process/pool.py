"""Worker processes, and the training process's side of their sockets.

    submit -> in flight -> task socket   -> whichever worker is free
    collect <------------- result socket <- every worker

Nothing here blocks in a send: what the task socket does not take waits in the
queue. The one wait, in `collect`, is over the result socket and the end of
every worker. A request is only sent together with a free slot, so a worker
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

from keras_fastdata.memory import codec, os_limits
from keras_fastdata.memory.arena import Arena, memfd
from keras_fastdata.memory.shared_state import SharedState, write_shared_state
from keras_fastdata.metrics.pool_stats import PoolStats
from keras_fastdata.metrics.timing import Timing
from keras_fastdata.workers import (
    exceptions,
    exit_messages,
    log_forwarding,
    stack_dump,
)
from keras_fastdata.workers.base import (
    BatchRequest,
    BatchResult,
    Builds,
    LocalResult,
    describe_batch,
)
from keras_fastdata.workers.in_flight import InFlight, Task
from keras_fastdata.workers.process import launchers, messages, worker_main
from keras_fastdata.workers.process.messages import (
    RETAINED,
    SPILLED,
    MessageKind,
    ResultMessage,
    TaskMessage,
)
from keras_fastdata.workers.restart_policy import RestartPolicy, record_crash
from keras_fastdata.workers.signals import DeferredSignals
from keras_fastdata.workers.watchdog import (
    Activity,
    Expired,
    Watchdog,
    building,
    loading,
)

_GRACE_S = 2.0  # for a worker to end by itself when asked to
_EXIT_CODE_TIMEOUT_S = 2.0
_IDLE_LOOKS = 4  # in a row, before a worker that builds nothing is suspect

_log = logging.getLogger("keras_fastdata")


@dataclasses.dataclass(frozen=True)
class ProcessPlan:
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
class _ProcessWorker:
    """A worker process.

    Attributes:
        index: From 0, below the number of workers.
        process: As it was launched.
        control: The training process's end of its control socket.
        stacks: The file that it writes its stacks into.
        version: Of the dataset's state that it has been sent.
        started: When it was started, by `time.monotonic`.
        ready: Whether it has loaded the dataset.
        retained_slots: Slots that its copy of the dataset holds on to.
        seen: What its heartbeat said of it when it was last looked at.
        idle: What it had not done when it was last looked at, although it
            was not building; since when; and how many looks ago.
        expired: Why it was killed, if it was.
        killed: When, by `time.monotonic`.
    """

    index: int
    process: launchers.Child
    control: socket.socket
    stacks: int
    version: int
    started: float
    ready: bool = False
    retained_slots: list[int] = dataclasses.field(default_factory=list)
    seen: tuple[int, float] = (0, 0.0)
    idle: tuple[tuple[int, int] | None, float, int] = (None, 0.0, 0)
    expired: Expired | None = None
    killed: float = 0.0

    @property
    def name(self) -> str:
        return f"worker {self.index} (pid {self.process.pid})"


class SlotResult:
    """A batch in its slot, waiting to be opened."""

    __slots__ = (
        "_arena",
        "_dataset",
        "_encoded",
        "_task",
        "nbytes",
        "request_id",
        "timing",
        "worker",
    )
    by_dataset = is_lost = False

    def __init__(
        self,
        dataset: str,
        task: Task,
        worker: int,
        encoded: codec.Encoded,
        arena: Arena,
        timing: Timing | None,
    ) -> None:
        self.request_id = task.request.request_id
        self.worker = worker
        self.nbytes = encoded.used
        self.timing = timing
        self._dataset = dataset
        self._task = task
        self._encoded = encoded
        self._arena = arena

    def open(self) -> Any:
        try:
            return codec.decode(self._encoded, self._arena, self._task.slot)
        except Exception as error:
            worker, request = f"worker {self.worker}", self._task.request
            exceptions.note(
                error, describe_batch(self._dataset, request, worker, "loading")
            )
            raise

    def discard(self) -> None:
        self._arena.release(self._task.slot)


class ProcessPool:
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
        plan: ProcessPlan,
        make_builder: Callable[[], Builds],
        receiver: log_forwarding.Receiver,
    ) -> None:
        self._plan = plan
        self._make_builder = make_builder
        self._version = 1
        self._by_fork = plan.start_method == "fork"
        self._watchdog = Watchdog(
            plan.batch_timeout,
            "`batch_timeout` replaces a worker that is stuck.",
        )
        self._workers: dict[int, _ProcessWorker] = {}
        self._restart_policy = RestartPolicy(plan.count, plan.max_restarts)
        self._last_dead_forkserver: int | None = (
            None  # the last fork server that died
        )
        self._receiver = receiver
        self._relayed: collections.deque[ResultMessage] = collections.deque()
        self._last_words: dict[int, bytes] = {}  # by worker
        self._buffer = memoryview(bytearray(messages.RECEIVE_BYTES))
        self._closed = False
        self._paused = False
        self._version_is_sent = (
            True  # whether every worker was sent the version
        )
        os_limits.keep_standard_files()
        with contextlib.ExitStack() as undo:
            self._shared_state = (
                None if self._by_fork else SharedState(make_builder)
            )
            if self._shared_state is not None:
                undo.callback(self._shared_state.close)
            self._arena = Arena(
                warm_slots=plan.lookahead + plan.count,
                hold_limit=max(16, plan.lookahead),
            )
            undo.callback(self._arena.close)
            with os_limits.named("Worker processes could not be started"):
                self._launcher = launchers.make_launcher(
                    plan.start_method,
                    plan.worker_env,
                    make_builder,
                    self._arena.segment,
                )
                undo.callback(self._launcher.close)
                self._open_sockets()
            undo.pop_all()
        self._in_flight = InFlight(self._arena, spare=plan.count)

    # -- what the engine calls ----------------------------------------------

    def submit(self, request: BatchRequest) -> bool:
        if not self._in_flight.enter(request):
            return False
        self._flush()
        return True

    def wait(self, timeout_s: float) -> None:
        poll = self._poll
        try:
            poll.poll(min(timeout_s, self._watchdog.interval_s))
        except (OSError, ValueError):
            if not poll.closed:  # by whoever has ended the workers
                raise

    def collect(self) -> Iterable[BatchResult]:
        self._start_missing()
        done = self._receive()
        # Now and then also while batches flow: one worker may be missing.
        due = self._watchdog.is_due()
        if due or not done:
            ended = self._ended(0)
            done += self._receive()
            for worker in ended:
                done += self._on_exit(worker)
            if due:
                done += self._look_at_workers()
            self._start_missing()
        if self._restart_policy.is_over:
            done += self._fail_all()
        self._flush()
        if self._relayed:
            self._hand_on()
        return done

    def cancel(self, request_ids: Iterable[int]) -> None:
        gone = set(request_ids)
        if self._in_flight.is_out(gone):
            self._unqueue()
            self._in_flight.cancel(gone)
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
        return self._in_flight.is_awaited

    def change(self) -> None:
        if self._shared_state is None:
            self._end_workers()
            self._open_sockets()
        else:
            self._shared_state.renew(self._make_builder)
        # Even if no byte of it is new: what it refers to (a file) may be.
        self._version += 1
        self._version_is_sent = False
        self._flush()

    def expect(self, ahead: int) -> None:
        self._arena.keep_warm(ahead + self._plan.count)

    def begin_epoch(self) -> None:
        self._restart_policy.begin_epoch()

    def pool_stats(self) -> PoolStats:
        return PoolStats(
            "process",
            self._plan.count,
            {i: w.process.pid for i, w in list(self._workers.items())},
            self._restart_policy.losses,
            self._arena.nbytes,
        )

    def close(self) -> None:
        if self._closed:
            return
        with DeferredSignals():
            self._closed = True
            self._end_workers()
            self._launcher.close()
            if self._shared_state is not None:
                self._shared_state.close()
            self._arena.close()
        self._hand_on()

    # -- sending ------------------------------------------------------------

    def _flush(self) -> None:
        """Sends what the sockets take without waiting."""
        if not self._workers or self._paused:
            return
        if not self._version_is_sent:
            self._tell_version()
        self._in_flight.send(self._send)

    def _send(self, task: Task) -> bool:
        request = task.request
        message = messages.pack_task(
            task.task_id,
            request.epoch,
            request.index,
            self._version,
            task.slot,
            request.interval_s,
        )
        try:
            self._tasks.send(message, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def _tell_version(self) -> None:
        for worker in self._workers.values():
            if worker.version < self._version:
                self._send_version(worker)
        self._version_is_sent = all(
            worker.version == self._version for worker in self._workers.values()
        )

    def _send_version(self, worker: _ProcessWorker) -> None:
        if self._shared_state is None:
            return
        news = messages.pack_version(self._version, self._shared_state.start)
        try:
            socket.send_fds(
                worker.control,
                [news],
                [self._shared_state.fd],
                socket.MSG_DONTWAIT,
            )
            worker.version = self._version
        except BlockingIOError:
            pass  # it is far behind; tried again with every flush
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has died, which the next wait will notice

    def _unqueue(self) -> None:
        """Empties the task socket; what was in it waits to be sent again."""
        task_ids = []
        with contextlib.suppress(BlockingIOError):
            while True:
                datagram = self._tasks_taken.recv(
                    messages.TASK_BYTES, socket.MSG_DONTWAIT
                )
                task_ids.append(TaskMessage.unpack(datagram).task_id)
        self._in_flight.requeue(task_ids)

    # -- receiving ----------------------------------------------------------

    def _ended(self, timeout_s: float) -> list[_ProcessWorker]:
        """The workers that ended, after waiting for that or a message."""
        ready = {fd for fd, _ in self._poll.poll(timeout_s)}
        return [w for w in self._workers.values() if w.process.pidfd in ready]

    def _receive(self) -> list[BatchResult]:
        """Takes in every message there is."""
        done: list[BatchResult] = []
        for result in self._messages():
            match result.kind:
                case (
                    MessageKind.BATCH | MessageKind.FAILURE | MessageKind.STALE
                ):
                    self._complete(result, done)
                case MessageKind.LOG | MessageKind.WARNING:
                    self._relayed.append(result)
                case MessageKind.READY:
                    if result.worker in self._workers:
                        self._workers[result.worker].ready = True
                case MessageKind.START_FAILED:
                    begun = self._last_words.pop(result.worker, b"")
                    if not result.task_id:
                        raise exceptions.load_exception(begun + result.body)
                    self._last_words[result.worker] = begun + result.body
        return done

    def _messages(self) -> Iterator[ResultMessage]:
        """Every message that waits in the result socket."""
        while True:
            try:
                nbytes = self._results.recv_into(
                    self._buffer, 0, socket.MSG_DONTWAIT
                )
            except BlockingIOError:
                return
            yield ResultMessage.unpack(bytes(self._buffer[:nbytes]))

    def _complete(self, result: ResultMessage, done: list[BatchResult]) -> None:
        """Accounts for the request and the slot of one result."""
        task, slot = self._in_flight.complete(result.task_id, result.worker)
        if slot is None:
            return
        if task is None or result.kind is MessageKind.STALE:
            self._release(slot, result)
            if task is not None:
                self._in_flight.send_anew(task)
            return
        built_s = result.build_ns / 1e9
        if built_s > self._watchdog.slowest_s:
            self._watchdog.learn(built_s)
        request_id = task.request.request_id
        extents, body = result.extents, result.body
        if result.flags & SPILLED:
            extents, body = self._spilled(result, slot)
        if result.kind is MessageKind.FAILURE:
            self._release(slot, result)
            raised = exceptions.load_exception(body)
            done.append(
                LocalResult(
                    request_id,
                    result.worker,
                    error=raised,
                    by_dataset=isinstance(raised, Exception),
                )
            )
            return
        timing = result.timing
        if timing is not None and task.crashes:
            timing = timing._replace(retries=task.crashes)
        retained = bool(result.flags & RETAINED)
        delivery = SlotResult(
            self._plan.dataset,
            task,
            result.worker,
            codec.Encoded(body, extents, result.used, retained),
            self._arena,
            timing,
        )
        if not retained:
            done.append(delivery)
            return
        # The worker may still write to the slot, and die: copied at once.
        batch: Any = None
        error: Exception | None = None
        try:
            batch = delivery.open()
        except Exception as broken:
            error = broken
        self._release(slot, result)
        done.append(
            LocalResult(
                request_id,
                result.worker,
                batch,
                error,
                nbytes=result.used,
                timing=timing,
            )
        )

    def _spilled(self, result: ResultMessage, slot: int) -> tuple[bytes, bytes]:
        """The extents and body of a result, which lie in its slot."""
        split = result.extents_nbytes
        spilled = codec.read_appended(
            self._arena.segment,
            slot,
            result.used,
            split + result.body_nbytes,
        )
        return spilled[:split], spilled[split:]

    def _release(self, slot: int, result: ResultMessage) -> None:
        """Frees a slot, unless the dataset in the worker holds on to it."""
        worker = self._workers.get(result.worker)
        if result.flags & RETAINED and worker is not None:
            worker.retained_slots.append(slot)
        else:
            self._arena.release(slot)

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

    def _start_missing(self) -> None:
        """Starts the workers that are missing, as far as that is allowed."""
        if len(self._workers) == self._plan.count:
            return
        for index in range(self._plan.count):
            if index not in self._workers and self._restart_policy.replaces(
                index
            ):
                with (
                    DeferredSignals(),
                    os_limits.named(f"Worker {index} could not be started"),
                ):
                    self._start(index)

    def _start(self, index: int) -> None:
        segment = self._arena.segment
        segment.set_heartbeat(index, 0)
        segment.set_started(index, 0)  # one that was killed left its own
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as handed:
            control, theirs = messages.socket_pair()
            undo.callback(control.close)
            handed.callback(theirs.close)
            start_fd = write_shared_state(
                worker_main.WorkerStart.by_this_process(
                    index,
                    self._plan.dataset,
                    self._version,
                    self._shared_state.start if self._shared_state else 0,
                    segment.stride,
                    launchers.environment(self._plan.worker_env),
                )
            )
            handed.callback(os.close, start_fd)
            stacks = memfd("keras_fastdata-stacks")
            undo.callback(os.close, stacks)
            files = worker_main.Files(
                start=start_fd,
                # A fork needs no payload; the descriptor is closed unread.
                dataset=self._shared_state.fd
                if self._shared_state
                else start_fd,
                arena=segment.fd,
                tasks=self._tasks_taken.fileno(),
                results=self._results_told.fileno(),
                control=theirs.fileno(),
                stacks=stacks,
            )
            process = self._launcher.start(files)
            undo.pop_all()
        self._workers[index] = _ProcessWorker(
            index, process, control, stacks, self._version, time.monotonic()
        )
        self._poll.register(process.pidfd, select.EPOLLIN)

    # -- workers that are stuck ---------------------------------------------

    def _look_at_workers(self) -> list[BatchResult]:
        """Kills workers whose time is up; leaves behind what survives that."""
        now = time.monotonic()
        for expired in self._watchdog.look(list(self._activities(now))):
            worker = self._workers[expired.activity.worker]
            if worker.seen != self._seen(worker):
                continue  # it has moved on after all, a moment ago
            worker.expired, worker.killed = expired, now
            launchers.kill(worker.process)
        done: list[BatchResult] = []
        for worker in list(self._workers.values()):
            if worker.killed and now - worker.killed > _GRACE_S:
                self._leave_behind(worker)
                done += self._on_exit(worker, ended=False)
        return done

    def _activities(self, now: float) -> Iterator[Activity]:
        """What each worker is busy with."""
        for worker in self._workers.values():
            worker.seen = self._seen(worker)
        notes = {i: w.seen[0] for i, w in self._workers.items()}
        unclaimed = self._in_flight.oldest_unclaimed(notes.values())
        name = self._plan.dataset
        for index, worker in self._workers.items():
            if worker.killed:
                continue
            process = worker.process
            ask = functools.partial(
                stack_dump.request, process.pid, process.pidfd, worker.stacks
            )
            heartbeat, began = worker.seen
            request = self._in_flight.request_of(heartbeat)
            if not worker.ready:
                what = loading(name, worker.name)
                elapsed_s = now - worker.started
                yield Activity(index, what, None, elapsed_s, ask, starting=True)
            elif request is not None and began:
                what = building(name, request, worker.name)
                yield Activity(index, what, request, now - began, ask)
            elif (idle_s := _idle_s(worker, heartbeat, unclaimed, now)) > 0:
                what = f"Taking or delivering a batch of {name}, {worker.name},"
                yield Activity(index, what, None, idle_s, ask)

    def _seen(self, worker: _ProcessWorker) -> tuple[int, float]:
        """What a worker has noted, and when it began to build that."""
        segment = self._arena.segment
        return segment.heartbeat(worker.index), segment.started_s(worker.index)

    def _leave_behind(self, worker: _ProcessWorker) -> None:
        why = (
            "does not end, although it was killed (SIGKILL). It is left "
            "behind; it ends when the system call it is in does."
        )
        if not launchers.may_be_killed(worker.process):
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

    def _on_exit(
        self, worker: _ProcessWorker, *, ended: bool = True
    ) -> list[BatchResult]:
        """Accounts for a worker that ended without being asked to.

        What it held is built again, by its replacement or another worker,
        unless it may not be: then those requests end in an error.
        """
        exit_code = None
        if ended:
            exit_code = worker.process.exit_code(_EXIT_CODE_TIMEOUT_S)
        self._dismiss(worker, ended=ended)
        # Nobody to say how: their fork server died. That is one death, however
        # many workers it had.
        forkserver = worker.process.forkserver if ended else None
        fell = forkserver is not None and exit_code is None
        self._restart_policy.record(
            worker.index,
            worker.process.pid,
            counts=not (fell and forkserver == self._last_dead_forkserver),
        )
        if fell:
            self._last_dead_forkserver = forkserver
        self._unqueue()
        segment = self._arena.segment
        suspect = self._in_flight.recover(
            worker.index,
            segment.heartbeat(worker.index),
            {i: segment.heartbeat(i) for i in self._workers},
            ended=ended,
        )
        # A batch is not to blame for the death of a fork server.
        if suspect is not None and not fell:
            record_crash(suspect)
        error = self._restart_policy.judge(
            exit_messages.WorkerExit(
                dataset=self._plan.dataset,
                worker=worker.index,
                pid=worker.process.pid,
                exit_code=exit_code,
                expired=worker.expired,
                starting=not worker.ready,
            ),
            suspect,
        )
        if suspect is None:
            return []
        if error is None:
            self._in_flight.send_first(suspect)
            return []
        self._in_flight.release(suspect)
        return [
            LocalResult(suspect.request.request_id, worker.index, error=error)
        ]

    def _fail_all(self) -> Iterator[BatchResult]:
        """Ends all there is: no worker is left, and none may be started."""
        worker_exit = self._restart_policy.end()
        for request in self._in_flight.give_up():
            yield LocalResult(
                request.request_id,
                worker_exit.worker,
                error=worker_exit.error(),
            )

    def _dismiss(self, worker: _ProcessWorker, *, ended: bool = True) -> None:
        """Forgets a worker that has ended, or is left behind."""
        del self._workers[worker.index]
        self._last_words.pop(worker.index, None)
        self._poll.unregister(worker.process.pidfd)
        os.close(worker.process.pidfd)
        os.close(worker.stacks)
        worker.control.close()
        if ended:
            for slot in worker.retained_slots:
                self._arena.release(slot)

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
            launchers.kill(worker.process)
        deadline = time.monotonic() + _GRACE_S
        for worker in list(self._workers.values()):
            left_s = max(0.0, deadline - time.monotonic())
            if launchers.has_ended(worker.process, left_s):
                worker.process.exit_code(_EXIT_CODE_TIMEOUT_S)
                self._dismiss(worker)
            else:
                self._leave_behind(worker)
                self._dismiss(worker, ended=False)
        self._drop_results()
        self._in_flight.clear()
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
            if result.kind in (MessageKind.LOG, MessageKind.WARNING):
                self._relayed.append(result)


def _idle_s(
    worker: _ProcessWorker, heartbeat: int, unclaimed: int | None, now: float
) -> float:
    """How long a worker that builds nothing has left something undone.

    It has not delivered what it noted, or not taken a request that nobody has.
    Each may be so for a moment; it is not, when seen several times in a row.
    """
    undone = (
        (heartbeat, 0) if heartbeat else (0, unclaimed) if unclaimed else None
    )
    before, since, looks = worker.idle
    if undone is None or undone != before:
        worker.idle = undone, now, 0
        return 0.0
    worker.idle = undone, since, looks + 1
    return now - since if looks >= _IDLE_LOOKS else 0.0
