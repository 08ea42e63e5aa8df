"""The in-flight book by itself: states, slots, and each request answered once.

The state machine plays the training process, the task socket and the workers,
and knows where every task really is.
"""

from __future__ import annotations

import collections
import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from keras_fastdata import LoaderError
from keras_fastdata.workers.base import BatchRequest
from keras_fastdata.workers.in_flight import InFlight, TaskState

_WORKERS = 3
_SLOTS = 8
_SOCKET_SIZE = 4


class Slots:
    """Slots that are numbers."""

    def __init__(self, count=_SLOTS):
        self.left = list(range(count))

    def take(self, leave=0):
        return self.left.pop() if len(self.left) > leave else None

    def free(self, slot):
        assert slot not in self.left
        self.left.append(slot)


def _request(request_id):
    return BatchRequest(request_id, epoch=0, index=request_id)


def _book(requests, slots=None):
    """A book with requests 1, 2, ... that were sent; and their tasks."""
    slots = slots or Slots()
    book, sent = InFlight(slots), []
    for request_id in range(1, requests + 1):
        assert book.enter(_request(request_id))
    book.send(lambda task: not sent.append(task))
    return book, slots, sent


def _sent_by(book):
    sent = []
    book.send(lambda task: not sent.append(task))
    return sent


def test_a_task_is_queued_then_sent_then_done():
    slots = Slots()
    book = InFlight(slots)
    assert book.enter(_request(1))
    assert not book.is_awaited
    book.send(lambda task: False)
    (task,) = _sent_by(book)
    assert task.state is TaskState.SENT
    assert book.is_awaited
    assert book.request_of(task.task_id) == _request(1)
    assert book.complete(task.task_id, 0) == (task, task.slot)
    assert task.state is TaskState.DONE
    assert task.slot not in slots.left
    assert book.complete(task.task_id, 0) == (None, None)
    assert not book.is_awaited


def test_a_request_without_a_slot_is_refused():
    book = InFlight(Slots(3), spare=1)
    assert [book.enter(_request(n)) for n in range(1, 4)] == [True, True, False]


def test_what_is_cancelled_before_it_is_sent_frees_its_slot_at_once():
    slots = Slots()
    book = InFlight(slots)
    book.enter(_request(1))
    assert book.is_out({1})
    book.cancel({1})
    assert not book.is_out({1})
    assert len(slots.left) == _SLOTS
    assert not _sent_by(book)


def test_the_result_of_a_cancelled_task_gives_back_its_slot_alone():
    book, _, (task,) = _book(1)
    book.cancel({1})
    assert task.state is TaskState.CANCELLED
    assert book.is_awaited
    assert not book.is_out({1})
    assert book.complete(task.task_id, 0) == (None, task.slot)
    assert task.state is TaskState.DONE


def test_what_is_found_unread_is_sent_first_and_what_was_cancelled_is_not():
    book, slots, sent = _book(3)
    book.cancel({2})
    book.enter(_request(4))
    book.requeue([task.task_id for task in sent])
    assert sent[1].slot in slots.left
    assert [t.request.request_id for t in _sent_by(book)] == [1, 3, 4]


def test_a_task_whose_sending_was_interrupted_keeps_no_slot_at_the_end():
    book, slots, _ = _book(1)
    book.enter(_request(2))
    sent = []

    def interrupted(task):
        sent.append(task.task_id)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        book.send(interrupted)
    book.requeue(sent)
    book.clear()
    assert len(slots.left) == _SLOTS


def test_a_lost_task_is_sent_again_under_another_id_before_all_others():
    book, slots, (first, second) = _book(2)
    book.enter(_request(3))
    lost = book.recover(0, first.task_id, {1: second.task_id}, ended=True)
    assert lost is first
    assert first.state is TaskState.DONE
    book.send_first(first)
    again, third = _sent_by(book)
    assert again.request.request_id == 1
    assert again.slot == first.slot
    assert again.task_id > third.task_id
    assert book.complete(first.task_id, 0) == (None, None)
    assert len(slots.left) == _SLOTS - 3


def test_a_slot_is_in_quarantine_until_every_worker_has_moved_on():
    book, slots, (lost,) = _book(1)
    assert book.recover(0, 0, {1: 0, 2: 0}, ended=True) is None
    assert lost.state is TaskState.QUARANTINED
    book.enter(_request(2))
    again, later = _sent_by(book)
    assert again.request.request_id == 1
    assert again.slot != lost.slot
    book.complete(again.task_id, 1)
    assert lost.slot not in slots.left
    book.complete(later.task_id, 2)
    assert lost.slot in slots.left
    assert lost.state is TaskState.DONE


def test_a_late_result_ends_a_quarantine():
    book, _, (lost,) = _book(1)
    book.recover(0, 0, {1: 0, 2: 0}, ended=True)
    assert book.complete(lost.task_id, 2) == (None, lost.slot)
    assert lost.state is TaskState.DONE


def test_the_slot_of_a_worker_that_was_abandoned_is_not_used_again():
    book, slots, (lost,) = _book(1)
    slot = lost.slot
    again = book.recover(0, lost.task_id, {1: 0}, ended=False)
    assert again.slot != slot
    book.send_first(again)
    book.clear()
    assert sorted([*slots.left, slot]) == list(range(_SLOTS))


def test_the_replacement_of_an_abandoned_worker_ends_no_quarantine_of_it():
    book, slots, (lost,) = _book(1)
    book.recover(0, 0, {}, ended=False)
    (again,) = _sent_by(book)
    book.enter(_request(2))
    (later,) = _sent_by(book)
    book.complete(again.task_id, 0)
    book.complete(later.task_id, 0)
    book.recover(0, 0, {}, ended=True)
    assert lost.slot not in slots.left
    assert book.complete(lost.task_id, 0) == (None, lost.slot)


def test_what_the_last_worker_has_lost_has_its_slot_again():
    book, _, lost = _book(2, Slots(2))
    book.recover(0, 0, {}, ended=True)
    again = _sent_by(book)
    assert [t.request for t in again] == [t.request for t in lost]


def test_lost_tasks_wait_for_the_next_free_slot():
    book, slots, (first, second) = _book(2, Slots(3))
    book.recover(0, 0, {1: 0}, ended=True)
    (again,) = _sent_by(book)
    assert again.request == first.request
    assert book.complete(second.task_id, 1) == (None, second.slot)
    assert not _sent_by(book)
    slots.free(second.slot)
    (again,) = _sent_by(book)
    assert again.request == second.request


def test_it_is_an_error_when_no_slot_is_left_and_no_worker_has_a_task():
    book, _, _ = _book(2, Slots(2))
    book.recover(0, 0, {1: 0}, ended=True)
    with pytest.raises(LoaderError, match="No slot of shared memory is left"):
        _sent_by(book)
    assert book.is_out({1})
    assert book.is_out({2})


@pytest.mark.parametrize("heartbeat", [0, 1])
def test_clearing_frees_no_slot_that_an_abandoned_worker_may_write_to(
    heartbeat,
):
    book, slots, (lost,) = _book(1)
    book.recover(0, heartbeat, {1: 0}, ended=False)
    book.clear()
    assert sorted([*slots.left, lost.slot]) == list(range(_SLOTS))


def test_what_is_given_up_is_told_and_what_was_cancelled_is_not():
    book, slots, _ = _book(2)
    book.cancel({1})
    book.enter(_request(3))
    assert [r.request_id for r in book.take_wanted()] == [2, 3]
    assert len(slots.left) == _SLOTS - 1
    book.clear()
    assert len(slots.left) == _SLOTS


@dataclasses.dataclass
class Worker:
    """One worker: the task in its hand, and its heartbeat."""

    hand: tuple[int, int] | None = None  # task id and slot, while it writes
    heartbeat: int = 0


class Book(RuleBasedStateMachine):
    """Requests, cancellations and deaths in any order."""

    def __init__(self):
        super().__init__()
        self.slots = Slots()
        self.book = InFlight(self.slots, spare=_WORKERS)
        self.socket = collections.deque()
        self.results = collections.deque()  # task id and worker's index
        self.workers = dict(enumerate(Worker() for _ in range(_WORKERS)))
        self.abandoned = []
        self.wanted = set()
        self.leased = []
        self.last_request_id = 0

    def _send(self, task):
        if len(self.socket) == _SOCKET_SIZE:
            return False
        self.socket.append((task.task_id, task.slot))
        return True

    def _flush(self):
        try:
            self.book.send(self._send)
        except LoaderError:
            # The engine drops the pool, and with it every request.
            assert not self.slots.left
            assert not self.book.is_awaited
            self._make_anew()

    def _make_anew(self):
        """Replaces every worker, as a change of a dataset that is forked."""
        self._receive()
        for index in list(self.workers):
            self._lose(index, again=False, ended=True)
        self.book.clear()
        self.socket.clear()
        self.wanted.clear()
        self.workers = dict(enumerate(Worker() for _ in range(_WORKERS)))

    def _unqueue(self):
        task_ids = [task_id for task_id, _ in self.socket]
        self.socket.clear()
        self.book.requeue(task_ids)

    def _answer(self, request_id):
        assert request_id in self.wanted, "answered twice, or cancelled"
        self.wanted.remove(request_id)

    def _receive(self):
        while self.results:
            task, slot = self.book.complete(*self.results.popleft())
            if task is not None:
                self._answer(task.request.request_id)
                self.leased.append(slot)
            elif slot is not None:
                self.slots.free(slot)

    # -- the training process ------------------------------------------------

    @rule()
    def submit(self):
        self.last_request_id += 1
        if self.book.enter(_request(self.last_request_id)):
            self.wanted.add(self.last_request_id)
        self._flush()

    @rule()
    def collect(self):
        self._receive()
        self._flush()

    @rule(data=st.data())
    def cancel(self, data):
        some = data.draw(st.sets(st.integers(1, self.last_request_id + 1)))
        self._unqueue()
        self.book.cancel(some)
        self.wanted -= some

    @precondition(lambda self: self.leased)
    @rule()
    def drop_a_batch(self):
        self.slots.free(self.leased.pop())

    @rule()
    def pause(self):
        self._unqueue()

    @rule()
    def fail_all(self):
        for worker in list(self.workers):
            self._lose(worker, again=False, ended=True)
        for request in self.book.take_wanted():
            self._answer(request.request_id)
        self.workers = dict(enumerate(Worker() for _ in range(_WORKERS)))

    @rule()
    def change(self):
        self._make_anew()

    # -- the workers ---------------------------------------------------------

    @precondition(lambda self: self.socket)
    @rule(index=st.integers(0, _WORKERS - 1))
    def take(self, index):
        if self.workers[index].hand is None:
            self.workers[index].hand = self.socket.popleft()

    @rule(index=st.integers(0, _WORKERS - 1))
    def beat(self, index):
        worker = self.workers[index]
        worker.heartbeat = worker.hand[0] if worker.hand else 0

    @rule(index=st.integers(0, _WORKERS - 1))
    def build(self, index):
        worker = self.workers[index]
        if worker.hand is not None and worker.heartbeat == worker.hand[0]:
            self.results.append((worker.hand[0], index))
            worker.hand = None

    @rule(index=st.integers(0, _WORKERS - 1), again=st.booleans())
    def die(self, index, again):
        self._receive()  # as `collect` does once the death is known
        self._lose(index, again=again, ended=True)
        self.workers[index] = Worker()

    @precondition(lambda self: not self.abandoned)
    @rule(index=st.integers(0, _WORKERS - 1), again=st.booleans())
    def stay_behind(self, index, again):
        self._receive()
        self.abandoned.append(self.workers[index])
        self._lose(index, again=again, ended=False)
        self.workers[index] = Worker()

    def _lose(self, index, *, again, ended):
        dead = self.workers.pop(index)
        self._unqueue()
        heartbeats = {i: w.heartbeat for i, w in self.workers.items()}
        task = self.book.recover(index, dead.heartbeat, heartbeats, ended=ended)
        if task is not None and again:
            self.book.send_first(task)
        elif task is not None:
            self.book.free(task)
            self._answer(task.request.request_id)

    # -- what always holds ---------------------------------------------------

    def _tasks(self):
        return [t for tasks in self.book._tasks for t in tasks.values()]

    @invariant()
    def every_request_is_answered_once_or_on_its_way(self):
        on_its_way = [
            task.request.request_id
            for task in self._tasks()
            if task.state in (TaskState.QUEUED, TaskState.SENT)
        ]
        assert sorted(on_its_way) == sorted(self.wanted)

    @invariant()
    def a_task_is_in_the_state_that_it_says(self):
        for state, tasks in enumerate(self.book._tasks):
            for task_id, task in tasks.items():
                assert (task.task_id, task.state) == (task_id, state)

    @invariant()
    def a_slot_is_in_one_place(self):
        held = [task.slot for task in self._tasks() if task.slot >= 0]
        places = [*self.slots.left, *held, *self.leased]
        assert len(places) == len(set(places))

    @invariant()
    def nobody_is_given_a_slot_that_another_may_write_to(self):
        slots = {t.task_id: t.slot for t in self._tasks()}
        for worker in [*self.workers.values(), *self.abandoned]:
            if worker.hand is not None:
                task_id, slot = worker.hand
                assert slot not in [*self.slots.left, *self.leased]
                others = {s for i, s in slots.items() if i != task_id}
                assert slot not in others

    def teardown(self):
        """All that is wanted is built in the end, and every slot is free."""
        for _ in range(10 * _SLOTS):
            self._receive()
            while self.leased:
                self.slots.free(self.leased.pop())
            self._flush()
            for index in self.workers:
                for step in (self.build, self.take, self.beat, self.build):
                    if step != self.take or self.socket:
                        step(index)
            self._receive()
        assert not self.wanted
        assert not self.book.is_awaited
        self.book.clear()
        assert not self._tasks()
        self.nobody_is_given_a_slot_that_another_may_write_to()


Book.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None
)
TestBook = Book.TestCase
