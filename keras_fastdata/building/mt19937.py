"""Reads and writes the state of `np.random` directly in memory.

NumPy's own functions take 90 us to read and restore the state, and 8 us to
derive a state from a seed; that is as much as the rest of a small batch costs.
The state of a Mersenne Twister is 624 words and a position, and NumPy exposes
its address.
"""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

SEED_NBYTES = 4 * 624

_AT_THE_END = bytes(ctypes.c_int(624))  # the position of a new state
_NBYTES = SEED_NBYTES + len(_AT_THE_END)

_random: Any = np.random  # its type stubs lack the functions used here


class Snapshot:
    """Saves the state of `np.random` for a later `restore`."""

    def __init__(self) -> None:
        self._memory = _present()
        # It tells whether the program has seeded the generator.
        self._sequence = getattr(self._memory.bits, "seed_seq", None)
        self._bytes = self._memory.read()
        self._state: Any = None
        if not self._bytes or self._bytes != self._memory.without_normal:
            state: Any = np.random.get_state(legacy=False)
            if self._bytes and not state["has_gauss"]:
                self._memory.without_normal = self._bytes
            else:
                self._state = state

    def restore(self) -> None:
        """Restores the saved state of `np.random`."""
        bits = self._memory.bits
        if getattr(bits, "seed_seq", None) is not self._sequence:
            kind: Any = np.random.BitGenerator
            kind.__setstate__(bits, (bits.state, self._sequence))
        # This forgets a normal number that was drawn in advance.
        _random.set_bit_generator(bits)
        if self._state is not None:
            np.random.set_state(self._state)
        else:
            self._memory.write(self._bytes)


def seed(random_bytes: bytes) -> None:
    """Seeds `np.random` from `SEED_NBYTES` random bytes."""
    memory = _present()
    if memory.is_known:
        # This forgets a normal number that was drawn in advance.
        _random.set_bit_generator(memory.bits)
        memory.write(random_bytes + _AT_THE_END)
    elif type(memory.bits) is np.random.MT19937:
        words = np.frombuffer(random_bytes, np.uint32)
        np.random.set_state(("MT19937", words, 624, 0, 0.0))
    else:
        # A bit generator of the user's, which may refuse a seed.
        np.random.seed(np.frombuffer(random_bytes[:16], np.uint32))


def state() -> bytes:
    """Returns the state of `np.random`, or `b""` if its format is unknown."""
    return _present().read()


class _Memory:
    """Accesses the memory that holds the state of a bit generator."""

    def __init__(self, bits: Any) -> None:
        self.bits = bits
        # The bytes last read while no normal number was stored. (NumPy draws
        # normal numbers in pairs, and stores the second one outside of this
        # memory. If `np.random.set_state` sets the same bytes with a stored
        # number, that number is lost.)
        self.without_normal = b""
        self._view: Any = None
        if type(bits) is np.random.MT19937:
            address = bits.ctypes.state_address
            view = (ctypes.c_char * _NBYTES).from_address(address)
            if view.raw == _packed(bits.state["state"]):
                self._view = view
        self.is_known = self._view is not None

    def read(self) -> bytes:
        """Returns the state's bytes, or `b""` if the format is unknown."""
        if not self.is_known:
            return b""
        read = functools.partial(getattr, self._view, "raw")
        found: bytes = _locked(self.bits.lock, read)
        return found

    def write(self, state: bytes) -> None:
        write = functools.partial(setattr, self._view, "raw", state)
        _locked(self.bits.lock, write)


def _locked(lock: Any, step: Callable[[], Any]) -> Any:
    """Returns the result of a step; another thread may be drawing.

    All of it runs in C: a signal handler that came while the lock is held could
    wait for a thread that draws, and so for ever.
    """
    steps = lock.acquire, step, lock.release
    _, result, _ = map(operator.call, steps)
    return result


def _packed(state: Any) -> bytes:
    position = ctypes.c_int(state["pos"])
    return np.asarray(state["key"], np.uint32).tobytes() + bytes(position)


_known: _Memory | None = None  # of the present bit generator


def _present() -> _Memory:
    global _known
    bits = _random.get_bit_generator()
    if _known is None or _known.bits is not bits:
        _known = _Memory(bits)
    return _known
