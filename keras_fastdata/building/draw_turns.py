"""Has worker threads take turns if builds draw from Keras's seed generators.

A `keras.random.SeedGenerator`, as random layers have one, reads its state and
then assigns the next: two threads that do so at once draw the same numbers.
Generators of NumPy, Python and PyTorch lock themselves.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable

from keras_fastdata.building.generator_wrappers import KerasSeedGenerator
from keras_fastdata.building.held_generators import Held

_LONGEST_TURN_S = 60.0  # of another thread, which may never end


class _Draws(enum.Enum):
    """Whether builds draw from such generators; a draw is never forgotten."""

    UNKNOWN = enum.auto()  # no build has ended
    NEVER_SEEN = enum.auto()
    SEEN = enum.auto()


class DrawTurns:
    """Lets one thread build at a time, if any build draws.

    Args:
        threads: How many threads build.
        held: Returns the random generators that the builds may draw from.
    """

    def __init__(self, threads: int, held: Callable[[], list[Held]]) -> None:
        self._threads, self._held = threads, held
        self._finding, self._turn = threading.Lock(), threading.Lock()
        self._draws = _Draws.UNKNOWN

    def turn(self) -> DrawTurn:
        """Returns the turn of this thread, which is a `with` block."""
        if self._threads < 2:
            return DrawTurn(self, [])
        with self._finding:
            found = [
                held.generator
                for held in self._held()
                if isinstance(held.generator, KerasSeedGenerator)
                and not held.is_of_model
            ]
        return DrawTurn(self, found)

    def begin(self) -> bool:
        """Waits for the other threads, if any build may draw.

        Returns whether they wait for this one.
        """
        return self._draws is not _Draws.NEVER_SEEN and (
            self._turn.acquire(timeout=_LONGEST_TURN_S)
        )

    def end(self, *, has_turn: bool, has_drawn: bool) -> None:
        """Notes whether a build has drawn, and lets the next thread begin."""
        if has_drawn:
            self._draws = _Draws.SEEN
        elif self._draws is _Draws.UNKNOWN:
            self._draws = _Draws.NEVER_SEEN
        if has_turn:
            self._turn.release()


class DrawTurn:
    """The turn of one thread.

    Not `contextlib.contextmanager`, which sets attributes of exceptions.
    """

    def __init__(
        self, turns: DrawTurns, generators: list[KerasSeedGenerator]
    ) -> None:
        self._turns, self._generators = turns, generators
        self._has_turn = False
        self._before: list[list[int]] = []

    def __enter__(self) -> None:
        if self._generators:
            self._has_turn = self._turns.begin()
            self._before = self._states()

    def __exit__(self, *_: object) -> None:
        if self._generators:
            has_drawn = self._before != self._states()
            self._turns.end(has_turn=self._has_turn, has_drawn=has_drawn)

    def _states(self) -> list[list[int]]:
        return [generator.state() for generator in self._generators]
