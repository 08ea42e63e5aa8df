"""Has worker threads take turns if builds draw from Keras's seed generators.

A `keras.random.SeedGenerator`, as random layers have one, reads its state and
then assigns the next: two threads that do so at once draw the same numbers.
Generators of NumPy, Python and PyTorch lock themselves.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Callable, Iterator

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
        held: Returns the random generators that the builds may draw from.
    """

    def __init__(self, held: Callable[[], list[Held]]) -> None:
        self._held = held
        self._finding, self._turn = threading.Lock(), threading.Lock()
        self._draws = _Draws.UNKNOWN

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Waits for the turn of this thread; it ends with the `with` block."""
        with self._finding:
            found = [
                held.generator
                for held in self._held()
                if isinstance(held.generator, KerasSeedGenerator)
                and not held.is_of_model
            ]
        if not found:
            yield
            return
        has_turn = self._draws is not _Draws.NEVER_SEEN and (
            self._turn.acquire(timeout=_LONGEST_TURN_S)
        )
        before = [generator.state() for generator in found]
        try:
            yield
        finally:
            if before != [generator.state() for generator in found]:
                self._draws = _Draws.SEEN
            elif self._draws is _Draws.UNKNOWN:
                self._draws = _Draws.NEVER_SEEN
            if has_turn:
                self._turn.release()
