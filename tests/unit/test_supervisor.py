"""The supervisor by itself: states of workers, exits, and who answers for what.

The state machine plays the pool and its transport. A worker's end, its time
running out, and the work of others come in any order.
"""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from keras_fastdata import BatchTimeoutError, WorkerDiedError
from keras_fastdata.workers import supervisor
from keras_fastdata.workers.base import BatchRequest, PoolPlan
from keras_fastdata.workers.in_flight import InFlight
from keras_fastdata.workers.supervisor import (
    Supervisor,
    Worker,
    WorkerEnd,
    WorkerState,
)
from keras_fastdata.workers.watchdog import Activity

_COUNT = 3
_RESTARTS = 2
_SLOTS = 12


class Clock:
    """A clock that tests set."""

    def __init__(self):
        self.now_s = 100.0

    def monotonic(self):
        return self.now_s


class Slots:
    """Counts the slots that are taken."""

    taken = 0

    def take(self, leave=0):
        if self.taken + leave >= _SLOTS:
            return None
        self.taken += 1
        return 0

    def free(self, slot):
        self.taken -= 1


@dataclasses.dataclass(eq=False, kw_only=True)
class FakeWorker(Worker):
    """A worker that has tasks, and may be late with the first."""

    tasks: list = dataclasses.field(default_factory=list)
    is_late: bool = False
    builds_for_somebody: bool = True
    was_killed: bool = False

    @property
    def pid(self):
        return 1000 + self.index


class FakeTransport:
    """Starts and kills nothing but `FakeWorker`s."""

    def __init__(self, in_flight, clock):
        self.in_flight = in_flight
        self.clock = clock
        self.workers = {}
        self.started = []
        self.moved_on = set()

    def start(self, index):
        worker = FakeWorker(index=index, started_s=self.clock.now_s)
        self.started.append(worker)
        return worker

    def activities(self, now_s):
        for index, worker in self.workers.items():
            if worker.state is not WorkerState.KILLED and worker.is_late:
                request = worker.tasks[0].request if worker.tasks else None
                yield Activity(
                    *(index, "A batch", request, 1e3, str),
                    starting=not worker.is_ready,
                    is_wanted=worker.builds_for_somebody,
                )

    def has_moved_on(self, worker):
        return worker.index in self.moved_on

    def kill(self, worker):
        worker.was_killed = True

    def abandon(self, worker):
        return WorkerEnd()

    def recover(self, worker):
        tasks = [
            self.in_flight.complete(task.task_id, worker.index)
            for task in worker.tasks
        ]
        for task, slot in tasks:
            if task is None:
                self.in_flight._slots.free(slot)
        return [task for task, _ in tasks if task is not None]

    def assign(self, task):
        """Gives a task to the ready worker that has the fewest."""
        ready = [w for w in self.workers.values() if w.is_ready]
        if not ready:
            return False
        worker = min(ready, key=lambda worker: len(worker.tasks))
        if len(worker.tasks) == 2:
            return False
        worker.tasks.append(task)
        return True


class Pool:
    """A supervisor, its book and its transport."""

    def __init__(self, count=_COUNT, restarts=_RESTARTS, batch_timeout=1.0):
        self.clock = Clock()
        self.slots = Slots()
        self.in_flight = InFlight(self.slots)
        self.transport = FakeTransport(self.in_flight, self.clock)
        self.workers = self.transport.workers
        self.supervisor = Supervisor(
            PoolPlan(
                dataset="Images",
                count=count,
                lookahead=8,
                max_restarts=restarts,
                batch_timeout=batch_timeout,
                worker_env=None,
            ),
            self.transport,
        )

    def submit(self, *request_ids):
        for request_id in request_ids:
            assert self.in_flight.enter(BatchRequest(request_id, 0, request_id))
        self.in_flight.send(self.transport.assign)

    def make_ready(self):
        self.supervisor.start_missing()
        for worker in self.workers.values():
            worker.loaded()

    def end(self, index=0, **facts):
        return self.supervisor.on_exit(self.workers[index], WorkerEnd(**facts))


@pytest.fixture
def pool(monkeypatch):
    pool = Pool(count=1)
    monkeypatch.setattr(supervisor, "time", pool.clock)
    pool.make_ready()
    return pool


def _worker():
    return FakeWorker(index=0, started_s=0.0)


# -- states --------------------------------------------------------------------


def test_a_worker_is_starting_then_ready_then_exited():
    worker = _worker()
    assert worker.state is WorkerState.STARTING
    worker.loaded()
    assert worker.is_ready
    worker.move(WorkerState.EXITED)
    assert not worker.is_ready


@pytest.mark.parametrize("end", [WorkerState.EXITED, WorkerState.ABANDONED])
def test_a_worker_that_has_ended_stays_so(end):
    worker = _worker()
    worker.move(end)
    for state in WorkerState:
        with pytest.raises(RuntimeError, match=f"Worker 0 is {end.name}"):
            worker.move(state)


def test_a_worker_that_was_killed_is_not_ready_any_more():
    worker = _worker()
    worker.mark_killed(None, 5.0)
    worker.loaded()
    assert worker.state is WorkerState.KILLED
    assert worker.killed_s == 5.0


# -- decisions -----------------------------------------------------------------


def test_missing_workers_are_started_and_no_others():
    pool = Pool()
    pool.supervisor.start_missing()
    assert sorted(pool.workers) == [0, 1, 2]
    pool.supervisor.start_missing()
    assert len(pool.transport.started) == _COUNT
    pool.end(1)
    pool.supervisor.start_missing()
    assert [w.index for w in pool.transport.started] == [0, 1, 2, 1]


def test_what_an_exit_costs_is_built_again_in_the_same_order(pool, caplog):
    pool.submit(1, 2, 3)
    assert pool.end(exit_code=-9) == []
    sent = []
    pool.in_flight.send(lambda task: not sent.append(task))
    assert [task.request.request_id for task in sent] == [1, 2, 3]
    assert [task.crashes for task in sent] == [1, 1, 0]
    assert "was killed by SIGKILL while building batch 1" in caplog.text
    assert pool.supervisor.policy.losses[0].pid == 1000


def test_a_batch_that_costs_a_second_worker_ends_in_an_error(pool):
    pool.submit(1)
    pool.end(exit_code=-11)
    pool.make_ready()
    pool.submit()
    (result,) = pool.end(exit_code=-11)
    assert result.request_id == 1
    with pytest.raises(WorkerDiedError, match="for the second time"):
        result.open()
    assert pool.slots.taken == 0


def test_no_batch_is_to_blame_for_the_end_of_a_node(pool):
    pool.submit(1)
    pool.end(how="Its node has left the cluster.", blames=False)
    (task,) = pool.in_flight._queued.values()
    assert task.crashes == 0


def test_an_end_together_with_that_of_others_uses_up_no_restart(pool):
    for _ in range(_RESTARTS + 3):
        pool.end(counts=False)
        pool.supervisor.start_missing()
        assert pool.workers


def test_a_worker_whose_time_is_up_is_killed_and_then_replaced(pool, caplog):
    pool.submit(1)
    worker = pool.workers[0]
    worker.is_late = True
    assert pool.supervisor.look() == []
    assert worker.was_killed
    assert worker.state is WorkerState.KILLED
    assert worker.killed_s == pool.clock.now_s
    pool.end(exit_code=-9)
    assert worker.state is WorkerState.EXITED
    assert "A batch has taken 1e+03 s" in caplog.text


def test_a_worker_at_what_nobody_wants_is_replaced_and_uses_up_no_restart(
    monkeypatch, caplog
):
    pool = Pool(count=1, restarts=0, batch_timeout=None)
    monkeypatch.setattr(supervisor, "time", pool.clock)
    pool.make_ready()
    pool.submit(1)
    worker = pool.workers[0]
    worker.is_late = True
    assert pool.supervisor.look() == []
    assert not worker.was_killed
    worker.builds_for_somebody = False
    pool.supervisor.look()
    assert worker.was_killed
    assert pool.end(exit_code=-9) == []
    pool.supervisor.start_missing()
    assert pool.workers
    assert "and nobody waits for it any more. The worker is replaced" in (
        caplog.text
    )


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_start_is_wanted_until_all_it_was_for_is_cancelled(is_ready):
    pool = Pool(count=2)
    pool.supervisor.start_missing()
    first, second = pool.workers.values()
    if is_ready:
        second.loaded()
    pool.supervisor.note_cancel()
    assert first.is_wanted == is_ready
    pool.end(0)
    pool.supervisor.start_missing()
    assert pool.workers[0].is_wanted


def test_a_worker_that_has_moved_on_is_not_killed(pool):
    pool.submit(1)
    pool.workers[0].is_late = True
    pool.transport.moved_on.add(0)
    pool.supervisor.look()
    assert pool.workers[0].is_ready


def test_a_worker_that_does_not_end_is_abandoned_after_a_while(pool):
    pool.submit(1)
    worker = pool.workers[0]
    worker.is_late = True
    pool.supervisor.look()
    pool.clock.now_s += supervisor.GRACE_S
    pool.supervisor.look()
    assert worker.state is WorkerState.KILLED
    pool.clock.now_s += 0.1
    pool.supervisor.look()
    assert worker.state is WorkerState.ABANDONED
    assert not pool.workers
    assert pool.in_flight._queued


def test_when_no_worker_may_be_replaced_all_requests_end_in_an_error(
    monkeypatch,
):
    pool = Pool(count=1, restarts=0)
    pool.make_ready()
    pool.submit(1, 2, 3)
    (first,) = pool.end(exit_code=3)
    pool.supervisor.start_missing()
    assert not pool.workers
    assert pool.supervisor.policy.is_over
    rest = pool.supervisor.fail_all()
    assert [first.request_id, *(r.request_id for r in rest)] == [1, 2, 3]
    for result in (first, *rest):
        with pytest.raises(WorkerDiedError, match="max_worker_restarts=0"):
            result.open()
    assert pool.slots.taken == 0


def test_a_batch_that_takes_too_long_twice_ends_in_that_error(pool):
    pool.submit(1)
    results = []
    for _ in range(2):
        pool.make_ready()
        pool.submit()
        pool.workers[0].is_late = True
        pool.supervisor.look()
        results = pool.end(exit_code=-9)
    (result,) = results
    with pytest.raises(BatchTimeoutError, match="That was the second time"):
        result.open()


# -- any order -----------------------------------------------------------------

_INDEX = st.integers(0, _COUNT - 1)


class Supervised(RuleBasedStateMachine):
    """Exits, kills, answers and cancellations in any order."""

    @initialize()
    def make(self):
        self.pool = Pool()
        patch = mock.patch.object(supervisor, "time", self.pool.clock)
        patch.start()
        self.stop = patch.stop
        self.last_request_id = 0
        self.wanted = set()
        self.ended = []

    def _answered(self, results):
        for result in results:
            assert result.request_id in self.wanted, "twice, or cancelled"
            self.wanted.remove(result.request_id)

    def _send(self):
        self.pool.in_flight.send(self.pool.transport.assign)

    @rule()
    def submit(self):
        self.last_request_id += 1
        request = BatchRequest(self.last_request_id, 0, self.last_request_id)
        if self.pool.in_flight.enter(request):
            self.wanted.add(self.last_request_id)
        self._send()

    @rule()
    def start_missing(self):
        self.pool.supervisor.start_missing()
        if self.pool.supervisor.policy.is_over:
            self._answered(self.pool.supervisor.fail_all())

    @rule(index=_INDEX)
    def load(self, index):
        if index in self.pool.workers:
            self.pool.workers[index].loaded()
            self._send()

    @rule(index=_INDEX)
    def build(self, index):
        worker = self.pool.workers.get(index)
        if worker is None or not worker.tasks:
            return
        task, slot = self.pool.in_flight.complete(
            worker.tasks.pop(0).task_id, index
        )
        self.pool.slots.free(slot)
        if task is not None:
            self.wanted.remove(task.request.request_id)
        self._send()

    @rule(data=st.data())
    def cancel(self, data):
        gone = data.draw(st.sets(st.integers(1, self.last_request_id + 1)))
        self.pool.in_flight.cancel(gone)
        self.wanted -= gone

    @rule(index=_INDEX, counts=st.booleans(), blames=st.booleans())
    def end(self, index, counts, blames):
        if index in self.pool.workers:
            self.ended.append(self.pool.workers[index])
            self._answered(self.pool.end(index, counts=counts, blames=blames))

    @rule(index=_INDEX)
    def be_late(self, index):
        if index in self.pool.workers:
            self.pool.workers[index].is_late = True

    @rule(seconds=st.sampled_from([0.5, 1.5, 5.0]))
    def look(self, seconds):
        self.pool.clock.now_s += seconds
        before = list(self.pool.workers.values())
        self._answered(self.pool.supervisor.look())
        after = self.pool.workers.values()
        self.ended += [worker for worker in before if worker not in after]

    @rule()
    def begin_epoch(self):
        self.pool.supervisor.policy.renew_restarts()

    @invariant()
    def every_request_is_answered_once_or_on_its_way(self):
        on_its_way = [
            task.request.request_id for task in self.pool.in_flight._wanted()
        ]
        assert sorted(on_its_way) == sorted(self.wanted)

    @invariant()
    def a_worker_that_is_left_has_ended(self):
        assert all(w.state in supervisor._ENDS for w in self.ended)
        for index, worker in self.pool.workers.items():
            assert worker.index == index
            assert worker.state not in supervisor._ENDS

    @invariant()
    def as_many_slots_are_taken_as_there_are_tasks(self):
        assert self.pool.slots.taken == len(self.pool.in_flight)

    def teardown(self):
        """All that is wanted is built in the end, and nothing is left."""
        self.begin_epoch()
        for worker in list(self.pool.workers.values()):
            if worker.state is WorkerState.KILLED:
                self._answered(self.pool.end(worker.index, counts=False))
        self.start_missing()
        for index in range(_COUNT):
            self.load(index)
        for _ in range(_SLOTS):
            for index in range(_COUNT):
                self.build(index)
        self.stop()
        assert not self.wanted
        assert not len(self.pool.in_flight)
        assert self.pool.slots.taken == 0


Supervised.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None
)
TestSupervised = Supervised.TestCase
