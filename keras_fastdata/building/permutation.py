"""Random permutations of any length that need little memory.

Up to a million items, it is NumPy's permutation, drawn as a whole. Beyond, a
Feistel network shuffles the positions. It is a bijection on `bits` bits for
any round function: each position has one index and each index one position,
and nothing needs to be stored. A result beyond the length goes through the
network again until it is within (less than twice, on average).

    a, b = high bits, low bits
    a ^= mix(b, key 0);  b ^= mix(a, key 1);  a ^= mix(b, key 2);  ...
"""

from __future__ import annotations

from typing import Any, overload

import numpy as np
import numpy.typing as npt

# The longest order that is stored. So small a network would also be uneven.
STORED = 1 << 20

_ROUNDS = 8
_BLOCK = 1024  # positions computed at a time
_BLOCKS = 4  # remembered, for batches requested and batches delivered

_Words = npt.NDArray[np.uint64]


class Permutation:
    """A random permutation of `range(length)`, determined by a seed."""

    def __init__(self, length: int, stream: np.random.SeedSequence) -> None:
        self._length = length
        self._stored: npt.NDArray[np.int64] | None = None
        if length <= STORED:
            bits = np.random.PCG64(stream)
            self._stored = np.random.Generator(bits).permutation(length)
            return
        self._keys = stream.generate_state(_ROUNDS, np.uint64)
        width = (length - 1).bit_length()
        self._low = np.uint64(width // 2)
        self._low_mask = np.uint64((1 << (width // 2)) - 1)
        self._high_mask = np.uint64((1 << (width - width // 2)) - 1)
        self._blocks: dict[int, npt.NDArray[np.int64]] = {}

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, position: int) -> int: ...

    @overload
    def __getitem__(self, position: slice) -> npt.NDArray[np.int64]: ...

    def __getitem__(self, position: Any) -> Any:
        """Returns the item at a position, or an array of items for a slice.

        Sequential access is fastest.
        """
        if isinstance(position, slice):
            return self.at(np.arange(*position.indices(self._length)))
        if not 0 <= position < self._length:
            raise IndexError(
                f"Position {position} of an order of {self._length} items."
            )
        if self._stored is not None:
            return int(self._stored[position])
        number, place = divmod(position, _BLOCK)
        block = self._blocks.get(number)
        if block is None:
            end = min(self._length, (number + 1) * _BLOCK)
            block = self.at(np.arange(number * _BLOCK, end))
            # One assignment, because threads may share the permutation.
            kept = list(self._blocks.items())[-(_BLOCKS - 1) :]
            self._blocks = {**dict(kept), number: block}
        return int(block[place])

    def at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns the items at `positions`; each must be below the length."""
        if self._stored is not None:
            return self._stored[positions]
        items = self._shuffled(positions.astype(np.uint64))
        beyond = np.flatnonzero(items >= self._length)
        while len(beyond):
            items[beyond] = self._shuffled(items[beyond])
            beyond = beyond[items[beyond] >= self._length]
        return items.astype(np.int64)

    def _shuffled(self, items: _Words) -> _Words:
        high, low = items >> self._low, items & self._low_mask
        for even, odd in self._keys.reshape(-1, 2):
            high ^= _mixed(low, even) & self._high_mask
            low ^= _mixed(high, odd) & self._low_mask
        return (high << self._low) | low


def _mixed(words: _Words, key: np.uint64) -> _Words:
    """Hashes each 64-bit word with a key (SplitMix64's finalizer)."""
    words = words ^ key
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words
