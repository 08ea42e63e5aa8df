"""The state of `np.random`, read and written where it lies in memory.

NumPy's own functions take 90 us to read that state and to put it back, and
another 8 us to derive one from a seed: as long as all else that a small batch
costs. The state of a Mersenne Twister is 624 words and a position, of which
NumPy gives the address.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

SEED_NBYTES = 4 * 624

_AT_THE_END = bytes(ctypes.c_int(624))  # the position of a fresh state
_NBYTES = SEED_NBYTES + len(_AT_THE_END)

_random: Any = np.random  # whose stubs leave out what is used here


class Snapshot:
    """What `np.random` will draw next."""

    def __init__(self) -> None:
        self._memory = _present()
        self._bytes = self._memory.read()
        self._state: Any = None
        if not self._bytes or self._bytes != self._memory.without_normal:
            state: Any = np.random.get_state(legacy=False)
            if self._bytes and not state["has_gauss"]:
                self._memory.without_normal = self._bytes
            else:
                self._state = state

    def restore(self) -> None:
        # This forgets a normal number that was drawn in advance.
        _random.set_bit_generator(self._memory.bits)
        if self._state is not None:
            np.random.set_state(self._state)
        else:
            self._memory.write(self._bytes)


def seed(random_bytes: bytes) -> None:
    """Puts `np.random` into the state that `SEED_NBYTES` random bytes are."""
    memory = _present()
    if memory.is_known:
        # This forgets a normal number that was drawn in advance.
        _random.set_bit_generator(memory.bits)
        memory.write(random_bytes + _AT_THE_END)
    elif type(memory.bits) is np.random.MT19937:
        words = np.frombuffer(random_bytes, np.uint32)
        np.random.set_state(("MT19937", words, 624, 0, 0.0))
    else:
        # Put there by the user; it may take a seed, or refuse it.
        np.random.seed(np.frombuffer(random_bytes[:16], np.uint32))


def state() -> bytes:
    """The state of `np.random`; empty if it cannot be read like this."""
    return _present().read()


class _Memory:
    """The memory of a bit generator.

    Attributes:
        bits: The generator.
        is_known: Whether its state lies there as expected.
        without_normal: What was read when no second normal number, which
            NumPy draws along with a first one, was waiting to be used. It
            does not lie in this memory: where `np.random.set_state` goes back
            to the same bytes with such a number, it is lost.
    """

    def __init__(self, bits: Any) -> None:
        self.bits = bits
        self.without_normal = b""
        self._view: Any = None
        if type(bits) is np.random.MT19937:
            address = bits.ctypes.state_address
            view = (ctypes.c_char * _NBYTES).from_address(address)
            if view.raw == _packed(bits.state["state"]):
                self._view = view
        self.is_known = self._view is not None

    def read(self) -> bytes:
        """The state; empty if it does not lie there as expected."""
        if not self.is_known:
            return b""
        with self.bits.lock:  # another thread may be drawing
            return bytes(self._view.raw)

    def write(self, state: bytes) -> None:
        with self.bits.lock:
            self._view.raw = state


def _packed(state: Any) -> bytes:
    position = ctypes.c_int(state["pos"])
    return np.asarray(state["key"], np.uint32).tobytes() + bytes(position)


_known: _Memory | None = None  # that of the present bit generator


def _present() -> _Memory:
    global _known
    bits = _random.get_bit_generator()
    if _known is None or _known.bits is not bits:
        _known = _Memory(bits)
    return _known
