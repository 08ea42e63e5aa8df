"""Has threads take turns at drawing from Keras's seed generators.

`keras.random.SeedGenerator.next`, which random layers call, reads the state and
then assigns the next one: two threads that do so at once draw the same numbers.
Generators of NumPy, Python and PyTorch lock themselves.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from keras_fastdata import _process_role
from keras_fastdata._modules import loaded

# Of one draw, which takes milliseconds. A signal handler may have interrupted
# it, and wait for the thread whose turn is next.
_STUCK_S = 10.0

# Not a plain lock: a signal handler of the main thread may draw, too.
_turn: Any = threading.RLock()


def take_turns() -> None:
    """Replaces `SeedGenerator.next`, if that was not done before."""
    keras_random = getattr(loaded("keras"), "random", None)
    kind: Any = getattr(keras_random, "SeedGenerator", None)
    if kind is None or hasattr(kind.next, "takes_turns"):
        return
    draw = kind.next

    @functools.wraps(draw)
    def draw_in_turn(*args: Any, **kwargs: Any) -> Any:
        turn = _take_turn()
        try:
            return draw(*args, **kwargs)
        finally:
            turn.release()

    draw_in_turn.takes_turns = True  # type: ignore[attr-defined]
    kind.next = draw_in_turn


def _take_turn() -> Any:
    """Acquires the lock, or a new one if the thread that has it is stuck."""
    global _turn
    while not (turn := _turn).acquire(timeout=_STUCK_S):
        if turn is _turn:
            _turn = threading.RLock()
    return turn


def _after_fork() -> None:
    """Makes a new lock: a thread that does not exist here may hold it."""
    global _turn
    _turn = threading.RLock()


_process_role.at_fork(after_in_child=_after_fork)
