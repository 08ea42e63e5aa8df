"""Locks the global random generators during a build, then restores them.

Builds in the caller and epoch hooks seed `np.random`, `random` and torch's
generator, which all threads of a process share. A thread holds the generators
until it has restored them, and other such builds wait. So two datasets in two
threads have the same bytes as each has alone.

A build that holds the generators may wait for a thread that builds batches of
another dataset. That thread waits for the generators: a deadlock. A waiting
thread therefore watches the holder's stack. If it does not change for
`_STUCK_S`, the holder is assumed to wait, and other builds run nested in the
holder's; from then on this also happens whenever a holder is at that place.
Without the GIL stacks cannot be read: every holder that takes this long is
assumed to wait.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from typing import Any

from keras_fastdata import _call_stack, _process_role
from keras_fastdata.building import mt19937, seeding

_LOOK_S = 0.05  # between two looks at the holder's stack
_STUCK_S = 10.0  # at one place, before a holder is assumed to wait

_log = logging.getLogger("keras_fastdata")


class preserved_globals:  # noqa: N801 - called like a function
    """Restores the global random generators' states after a `with` block."""

    def __enter__(self) -> None:
        self._turn = _take_turn(_call_stack.caller(1))
        try:
            self._numpy = mt19937.Snapshot()
            self._python_state = random.getstate()
            self._torch = seeding.loaded_torch()
            self._torch_state = (
                None if self._torch is None else self._torch.get_rng_state()
            )
        except BaseException:
            self._turn.release()
            raise

    def __exit__(self, *_: object) -> None:
        # A signal handler may raise in any of these calls.
        try:
            self._numpy.restore()
        finally:
            try:
                random.setstate(self._python_state)
            finally:
                try:
                    if self._torch is not None:
                        self._torch.set_rng_state(self._torch_state)
                finally:
                    self._turn.release()


def are_preserved() -> bool:
    """Returns whether any thread is in a `preserved_globals` block."""
    return any(turn.depth for turn in list(_turns))


def crossings() -> int:
    """Returns how often this package has used the generators.

    That is how often threads have entered or left `preserved_globals`, and how
    many seeds were drawn.
    """
    return sum(turn.crossings for turn in list(_turns)) + _seeds_drawn


def note_seed_drawn() -> None:
    """Counts a seed of a dataset that was drawn from the generators."""
    global _seeds_drawn
    _seeds_drawn += 1


class _Turn:
    """Locks the global random generators; records which thread has the lock.

    Attributes:
        lock: Held by that thread, once for each nested build.
        depth: How often that thread holds it.
        crossings: How often it was taken and released.
    """

    def __init__(self) -> None:
        self.lock: Any = threading.RLock()
        self.depth = self.crossings = 0
        self._thread = 0
        self._outermost = "", ""  # the outermost build's file and function

    def begin(self, caller: tuple[str, str]) -> None:
        """Records that the calling thread has acquired the lock."""
        if not self.depth:
            self._thread, self._outermost = threading.get_ident(), caller
        self.depth += 1
        self.crossings += 1

    def release(self) -> None:
        """Releases one level of the reentrant lock."""
        self.depth -= 1
        self.crossings += 1
        self.lock.release()

    def release_all(self) -> None:
        """Releases all levels of the lock, if the calling thread holds it."""
        while self.lock._is_owned():
            self.depth = 0
            self.crossings += 1
            self.lock.release()

    def place(self) -> _call_stack.Place:
        """Returns the call stack of the thread that holds this lock."""
        return _call_stack.place_of(self._thread, self._outermost)


_seeds_drawn = 0
_turns = [_Turn()]  # each later one is nested in a holder that waits
# Stacks at which holders were found waiting.
_waits_at: set[_call_stack.Place] = set()


def _take_turn(caller: tuple[str, str]) -> _Turn:
    if len(_turns) > 1:
        for turn in _turns[:0:-1]:
            if turn.lock._is_owned():
                turn.lock.acquire()
                turn.begin(caller)
                return turn
    level = 0
    while not (
        _turns[level].lock.acquire(blocking=False) or _wait_for(_turns[level])
    ):
        level += 1
        if level == len(_turns):
            _turns.append(_Turn())
    _turns[level].begin(caller)
    return _turns[level]


def _wait_for(turn: _Turn) -> bool:
    """Acquires the lock; returns `False` if the lock's holder seems stuck."""
    before: _call_stack.Place | None = None
    since_s = 0.0
    while not turn.lock.acquire(timeout=_LOOK_S):
        place, now_s = turn.place(), time.monotonic()
        if place in _waits_at:
            return False
        if place != before:
            before, since_s = place, now_s
        elif now_s - since_s > _STUCK_S:
            if place:
                _waits_at.add(place)
            _log.warning(
                "A build of a batch (or `on_worker_start`) has been in one "
                "place for %d s. It is slow, or it seems to wait for a batch "
                "that thread %r builds, which now goes on. If it draws from "
                "`np.random` or `random` meanwhile, what it builds cannot be "
                "repeated.",
                _STUCK_S,
                threading.current_thread().name,
            )
            return False
    return True


def release_interrupted() -> None:
    """Releases the locks that an interrupted build of this thread holds."""
    for turn in _turns:
        turn.release_all()


def _after_fork_in_child() -> None:
    """Drops all locks that this thread does not own."""
    _turns[:] = [turn for turn in _turns if turn.lock._is_owned()] or [_Turn()]


_process_role.at_fork(after_in_child=_after_fork_in_child)
