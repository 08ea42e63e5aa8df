"""What a death has cost, told from what can be seen, against a model.

The model plays the training process and its workers step by step, in any
order, and knows where every ticket really is.
"""

from __future__ import annotations

import collections
import dataclasses
import enum

from hypothesis import event, given, settings
from hypothesis import strategies as st
from places import FULL

from keras_fastdata.memory.arena import Arena
from keras_fastdata.workers.base import BatchRequest
from keras_fastdata.workers.in_flight import InFlight, losses_of

WORKERS = 3


class Step(enum.Enum):
    """How far a worker is with the ticket in its hand."""

    IDLE = 0
    TAKEN = 1
    NOTED = 2
    ANSWERED = 3


@dataclasses.dataclass
class Worker:
    """One worker, and its line on the board."""

    step: Step = Step.IDLE
    hand: int = 0
    note: int = 0
    alive: bool = True


class World:
    """A training process, a task socket, a result socket, and workers."""

    def __init__(self):
        self.serials = 0
        self.sent = set()
        self.cancelled = set()
        self.queue = collections.deque()
        self.results = collections.deque()
        self.workers = [Worker() for _ in range(WORKERS)]

    # -- what may happen at any time -----------------------------------------

    def submit(self):
        self.serials += 1
        self.sent.add(self.serials)
        self.queue.append(self.serials)

    def cancel(self, which):
        """Takes one ticket back, which a worker may have in its hand."""
        if not self.sent:
            return
        gone = sorted(self.sent)[which % len(self.sent)]
        self.sent.discard(gone)
        if gone in self.queue:
            self.queue.remove(gone)
        else:
            self.cancelled.add(gone)

    def receive(self):
        while self.results:
            self.forget(self.results.popleft())

    def forget(self, request):
        self.sent.discard(request)
        self.cancelled.discard(request)

    def advance(self, index):
        """One step of one worker, if it lives and can take it."""
        worker = self.workers[index]
        if not worker.alive:
            return
        match worker.step:
            case Step.IDLE:
                if self.queue:
                    worker.hand = self.queue.popleft()
                    worker.step = Step.TAKEN
            case Step.TAKEN:
                worker.note = worker.hand
                worker.step = Step.NOTED
            case Step.NOTED:
                self.results.append(worker.hand)
                worker.step = Step.ANSWERED
            case Step.ANSWERED:
                worker.note = worker.hand = 0
                worker.step = Step.IDLE

    def kill(self, index):
        self.workers[index].alive = False

    # -- the burial ----------------------------------------------------------

    def on_exit(self, index, meanwhile):
        """Accounts for a dead worker; the living go on `meanwhile`.

        Args:
            index: The dead worker.
            meanwhile: Steps of workers after each of the three things that
                the training process looks at in turn.
        """
        dead = self.workers[index]
        after_results, after_queue, between_notes = meanwhile
        self.receive()
        for other in after_results:
            self.advance(other)
        queued = list(self.queue)
        self.queue.clear()
        for other in after_queue:
            self.advance(other)
        heartbeat = {}
        for other, worker in enumerate(self.workers):
            if other != index:
                heartbeat[other] = worker.note
                if between_notes:
                    self.advance(between_notes.pop())
        outstanding = self.sent | self.cancelled
        losses = losses_of(outstanding - {*queued}, dead.note, heartbeat)
        self.check(losses, outstanding, queued, dead, heartbeat)
        self.workers[index] = Worker()
        self.queue.extend(queued)
        lost = {*losses.unclaimed, losses.suspect} - {None}
        for request in lost:
            again = request in self.sent
            self.forget(request)
            if again:
                self.submit()
        return losses

    def check(self, losses, outstanding, queued, dead, heartbeat):
        building = dead.step is Step.NOTED and dead.hand in outstanding
        assert losses.suspect == (dead.hand if building else None)

        declared = {*losses.unclaimed, losses.suspect} - {None}
        assert list(losses.unclaimed) == sorted(set(losses.unclaimed))
        assert losses.suspect not in losses.unclaimed
        assert declared <= outstanding
        assert not declared & set(queued)
        assert not declared & set(heartbeat.values())

        if dead.step in (Step.TAKEN, Step.NOTED) and dead.hand in outstanding:
            assert dead.hand in declared
        held = [w.hand for w in self.workers if w.alive]
        nowhere = outstanding - {*queued, *held, *self.results}
        others = {w.hand for w in self.workers if not w.alive and w is not dead}
        assert nowhere - others <= declared


_SOME_WORKER = st.integers(0, WORKERS - 1)
_STEPS = st.lists(_SOME_WORKER, max_size=4)
_MEANWHILE = st.tuples(_STEPS, _STEPS, _STEPS)
_EVENTS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 3)),
    st.tuples(st.just("advance"), st.lists(_SOME_WORKER, min_size=3)),
    st.tuples(st.just("receive")),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("kill"), _SOME_WORKER),
    st.tuples(st.just("on_exit"), _MEANWHILE),
    st.tuples(st.just("lose"), _SOME_WORKER, _MEANWHILE),
)
_HISTORIES = st.lists(_EVENTS, min_size=10, max_size=40)


def _play(history):
    """Plays a history, tells how telling it is, and returns its end."""
    world = World()
    for what, *details in history:
        match what:
            case "submit":
                for _ in range(details[0]):
                    world.submit()
            case "advance":
                for index in details[0]:
                    world.advance(index)
            case "on_exit":
                _bury_one(world, details[0])
            case "lose":
                world.kill(details[0])
                _bury_one(world, details[1])
            case _:
                getattr(world, what)(*details)
    return world


def _bury_one(world, meanwhile):
    dead = [i for i, w in enumerate(world.workers) if not w.alive]
    if dead:
        losses = world.on_exit(dead[0], [list(steps) for steps in meanwhile])
        event(f"suspect: {losses.suspect is not None}")
        event(f"unclaimed: {min(len(losses.unclaimed), 2)}")


@settings(max_examples=500 if FULL else 100)
@given(_HISTORIES)
def test_a_death_costs_what_the_dead_had_and_nothing_that_others_have(history):
    _play(history)


@settings(max_examples=300 if FULL else 100)
@given(_HISTORIES)
def test_after_all_burials_every_request_is_built_or_on_its_way(history):
    world = _play(history)
    for index, worker in enumerate(world.workers):
        if not worker.alive:
            world.on_exit(index, ([], [], []))
    for _ in range(5 * (world.serials + 1)):
        for index in range(WORKERS):
            world.advance(index)
    world.receive()
    assert not world.sent
    assert not world.cancelled


def test_a_request_that_a_death_cost_has_a_slot_although_all_are_in_use():
    arena = Arena(warm_slots=1, hold_limit=1)
    try:
        in_flight = InFlight(arena, spare=2)
        request_id = 0
        while in_flight.enter(
            BatchRequest(request_id + 1, epoch=0, index=request_id)
        ):
            request_id += 1
        task_ids = []
        in_flight.send(lambda task: not task_ids.append(task.task_id))
        # Two were received and never noted: by the dead worker and by another.
        in_flight.requeue(task_ids[2:])
        assert in_flight.recover(0, 0, {1: 0}, ended=True) is None
        sent = []
        in_flight.send(lambda task: not sent.append(task))
        assert sorted(s.request.request_id for s in sent) == [
            *range(1, request_id + 1)
        ]
        assert len({s.slot for s in sent}) == request_id
    finally:
        arena.close()
