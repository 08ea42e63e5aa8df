"""Whatever happens in whatever order, every batch comes once, and right."""

from __future__ import annotations

import collections
import gc
import os
import tempfile
import time
import warnings
import weakref

import numpy as np
import processes
import psutil
import pytest
from crash_samples import Stated, kill
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)
from places import FULL

from keras_fastdata import WorkerDiedError
from keras_fastdata.building import seeding

SEED = 11
AHEAD = 3
LENGTH = Stated.length


def _expected(epoch, index, state):
    draws = seeding.generator(SEED, seeding.BATCH, epoch, index)
    return (
        np.array([epoch, index, state]),
        draws.integers(2**40, size=Stated.shape) + state,
    )


def _parts(batch, form):
    """The parts of a batch that a consumer holds on to."""
    header, large = batch
    match form:
        case "all":
            return [header, large]
        case "header":
            return [header]
        case "rows":
            return [large[2:5]]
        case _:
            return [large[::-3, 1::7]]


class Loading(RuleBasedStateMachine):
    """One dataset in two worker processes, and one consumer of it.

    No rule has a precondition: who is hit by a kill is not the same in two
    runs, and which rules there are must be.
    """

    def __init__(self):
        super().__init__()
        self.children = _children()
        self.descriptors = _descriptors()
        self.directory = tempfile.TemporaryDirectory()
        self.dataset = Stated(
            self.directory.name,
            workers=2,
            use_multiprocessing=True,
            max_queue_size=AHEAD,
            max_worker_restarts=9999,
            seed=SEED,
        )
        self.state = 0
        self.epochs = 0
        self.batches = None
        self.position = 0
        self.held = []
        # Deaths that each batch of this pass may have been in the hand of.
        self.crashes = collections.Counter()

    # -- what a consumer does ------------------------------------------------

    @rule(count=st.integers(1, 5))
    def take(self, count):
        for _ in range(count):
            self._next()

    @rule(count=st.integers(1, 5))
    def take_while_the_workers_rest(self, count):
        for _ in range(count):
            self._next(pause_after=True)

    @rule(
        count=st.integers(1, 3),
        form=st.sampled_from(["all", "header", "rows", "strided"]),
    )
    def hold(self, count, form):
        for _ in range(count):
            if (taken := self._next()) is not None:
                batch, expected = taken
                self.held += zip(
                    _parts(batch, form), _parts(expected, form), strict=True
                )

    @rule(which=st.integers(0, 99))
    def drop(self, which):
        if self.held:
            del self.held[which % len(self.held)]

    @rule()
    def finish_the_epoch(self):
        while self.batches:
            self._next()

    @rule()
    def abandon_the_epoch(self):
        self._pass_is_over()

    @rule(state=st.integers(1, 9))
    def change(self, state):
        self.dataset.state = self.state = state
        self.crashes.clear()

    @rule()
    def close(self):
        self.dataset.close()
        self.crashes.clear()

    @rule()
    def fork(self):
        """A child looks at what is held, closes its copy, and exits."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pid = os.fork()
        if not pid:
            status = 1
            try:
                self._assert_held_is_right()
                self.held.clear()
                self.batches = None
                self.dataset.close()
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(pid, 0)
        assert status == 0

    # -- what happens to it --------------------------------------------------

    @rule(which=st.integers(0, 1))
    def kill_a_worker(self, which):
        if workers := _workers():
            self._strike()
            kill(workers[which % len(workers)])

    @rule(then=st.sampled_from(["go on", "change", "abandon"]))
    def kill_the_worker_that_builds_the_next_batch(self, then):
        while self.batches is None or self.position + AHEAD >= LENGTH:
            self._next()
        index = self.position + AHEAD
        hold = self.dataset.directory / f"hold-{index}"
        hold.touch()
        if self._next() is not None:
            builders = self._wait_for_builders(index)
            self._strike()
            kill(*builders)
        hold.unlink()
        for mark in self.dataset.directory.glob("at-*"):
            mark.unlink()
        if then == "change":
            self.change(self.state + 1)
        elif then == "abandon":
            self.abandon_the_epoch()

    @rule()
    def kill_both_workers(self):
        self._strike()
        kill(*_workers())

    @rule()
    def kill_the_forkserver(self):
        if workers := _workers():
            self._strike()
            kill(psutil.Process(workers[0]).ppid(), also=workers)

    # -- what must hold ------------------------------------------------------

    @invariant()
    def what_is_held_keeps_its_bytes(self):
        self._assert_held_is_right()

    @invariant()
    def every_slot_is_in_one_place(self):
        slots = _slots(self.dataset)
        assert sorted(slots) == list(range(len(slots)))

    def teardown(self):
        self.held.clear()
        self.batches = None
        self.dataset.close()
        reference = weakref.ref(self.dataset)
        self.dataset = None
        gc.collect()
        self.directory.cleanup()
        assert reference() is None
        assert _children() == self.children
        assert _descriptors() == self.descriptors

    # -- the model -----------------------------------------------------------

    def _next(self, *, pause_after=False):
        """Takes a batch; returns it with what it must be, or `None`."""
        if self.batches is None:
            self.batches, self.position = iter(self.dataset), 0
            self.epoch, self.epochs = self.epochs, self.epochs + 1
        try:
            batch = self.batches.fetch(pause_after=pause_after)
        except StopIteration:
            assert self.position == LENGTH
            self._pass_is_over()
            return None
        except WorkerDiedError as error:
            self._may_have_died_over(error.batch_index)
            self._pass_is_over()
            return None
        expected = _expected(self.epoch, self.position, self.state)
        for one, other in zip(batch, expected, strict=True):
            np.testing.assert_array_equal(one, other, strict=True)
        self.position += 1
        return batch, expected

    def _wait_for_builders(self, index):
        """Who builds a batch; nobody, if no worker is there to take it."""
        while workers := _workers():
            for pid in workers:
                if (self.dataset.directory / f"at-{index}-{pid}").exists():
                    return [pid]
            time.sleep(0.001)
        return []

    def _may_have_died_over(self, index):
        assert index == self.position
        assert self.crashes[index] >= 2

    def _pass_is_over(self):
        self.batches = None
        self.crashes.clear()

    def _strike(self):
        if self.batches is not None:
            ahead = range(self.position, self.position + AHEAD)
            self.crashes.update(ahead)

    def _assert_held_is_right(self):
        for one, other in self.held:
            assert one.tobytes() == other.tobytes()


@pytest.mark.timeout(3000 if FULL else 300)
def test_every_batch_comes_once_and_right_whatever_happens():
    run_state_machine_as_test(
        Loading,
        settings=settings(
            max_examples=300 if FULL else 3,
            stateful_step_count=60 if FULL else 30,
            derandomize=True,
            deadline=None,
            # To shrink a history takes long, with real processes.
            phases=[Phase.generate, *([Phase.shrink] if FULL else [])],
            suppress_health_check=list(HealthCheck),
        ),
    )


def _workers():
    """The living processes that build."""
    return [worker.pid for worker in processes.workers()]


def _children():
    return {child.pid for child in psutil.Process().children(recursive=True)}


def _descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def _slots(dataset):
    """Every slot of the dataset's shared memory, from wherever it is."""
    loader = dataset._fastdata.loader
    workers = loader and loader._pool.workers
    if not workers:
        return []
    arena, in_flight = workers._arena, workers._in_flight
    arena._reclaim()
    ready = [a.done for w in loader._epochs for a in w.ready.values()]
    return [
        *arena._warm,
        *arena._cold,
        *arena._leased,
        *(
            task.slot
            for tasks in in_flight._tasks
            for task in tasks.values()
            if task.slot >= 0  # a lost batch may wait for a worker and a slot
        ),
        *(slot for w in workers._workers.values() for slot in w.retained_slots),
        *(done._task.slot for done in ready if hasattr(done, "_task")),
    ]
