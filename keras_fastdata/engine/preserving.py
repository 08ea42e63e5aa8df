"""The global random generators, left as they were found.

NumPy's own functions take 90 us to read the state of `np.random` and to put it
back, as long as all else that a small batch costs. So its memory is copied:
the state of a Mersenne Twister is 2,500 bytes, of which NumPy gives the
address.
"""

from __future__ import annotations

import ctypes
import random
from typing import Any

import numpy as np

from keras_fastdata.engine import seeding

_WORDS = 624
_NBYTES = 4 * _WORDS + 4  # and the position, an int

_random: Any = np.random  # whose stubs leave out what is used here


class preserved_globals:
    """Leaves the global generators as it found them."""

    def __enter__(self) -> None:
        self._numpy = _NumpyState()
        self._python_state = random.getstate()
        self._torch = seeding.loaded_torch()
        self._torch_state = (
            None if self._torch is None else self._torch.get_rng_state()
        )

    def __exit__(self, *_: object) -> None:
        try:
            self._numpy.restore()
        finally:
            random.setstate(self._python_state)
            if self._torch is not None and self._torch_state is not None:
                self._torch.set_rng_state(self._torch_state)


class _NumpyState:
    """What `np.random` will draw next."""

    def __init__(self) -> None:
        global _known
        bits = _random.get_bit_generator()
        if _known is None or _known.bits is not bits:
            _known = _Memory(bits)
        self._memory = _known
        self._bytes = _known.read()
        self._state: Any = None
        if not self._bytes or self._bytes != _known.without_normal:
            state: Any = np.random.get_state(legacy=False)
            if self._bytes and not state["has_gauss"]:
                _known.without_normal = self._bytes
            else:
                self._state = state

    def restore(self) -> None:
        # This forgets a normal number that was drawn in advance.
        _random.set_bit_generator(self._memory.bits)
        if self._state is not None:
            np.random.set_state(self._state)
        else:
            self._memory.write(self._bytes)


class _Memory:
    """The memory of a bit generator.

    Attributes:
        bits: The generator.
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

    def read(self) -> bytes:
        """The state; empty if it does not lie there as expected."""
        return b"" if self._view is None else bytes(self._view.raw)

    def write(self, state: bytes) -> None:
        self._view.raw = state


def _packed(state: Any) -> bytes:
    position = ctypes.c_int(state["pos"])
    return np.asarray(state["key"], np.uint32).tobytes() + bytes(position)


_known: _Memory | None = None  # that of the present bit generator
