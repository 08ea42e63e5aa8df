"""What sources have in common whose files hold one sample after another."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from keras_fastdata.sources.index import Index, by_part
from keras_fastdata.sources.source import Indices


class Records:
    """Base class of sources whose parts are files.

    Attributes:
        part_lengths: The number of samples in each file.
    """

    def __init__(self, index: Index, lengths: npt.NDArray[np.int64]) -> None:
        self._index = index
        self.part_lengths: list[int] = lengths.tolist()
        self._ends = np.cumsum(lengths)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(
                f"There is no sample {index}; there are {len(self)}."
            )
        return self.__getitems__([index % len(self)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Returns the samples with the given indices, in their order."""
        raise NotImplementedError

    def _by_part(
        self, indices: Sequence[int] | Indices
    ) -> Iterator[tuple[int, Indices, Indices]]:
        return by_part(self._ends, indices)

    def _read(
        self,
        indices: Indices,
        starts: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
    ) -> list[bytes]:
        """Returns for each sample the bytes from its start to its end."""
        found = [b""] * len(indices)
        for file, places, _ in self._by_part(indices):
            self._index.check(file)
            path = self._index.paths[file]
            sizes = (ends - starts)[places].tolist()
            ranges = zip(
                places.tolist(), starts[places].tolist(), sizes, strict=True
            )
            with self._index.storage.local(path) as local:
                _read_ranges(local, path, ranges, found)
        return found


def _read_ranges(
    local: str,
    path: str,
    ranges: Iterable[tuple[int, int, int]],
    found: list[bytes],
) -> None:
    """Reads ranges of a file, each into its place of `found`."""
    # `pread` has no position that threads would share. A memory map would end
    # the process if the file became shorter.
    handle = os.open(local, os.O_RDONLY)
    try:
        for place, start, size in ranges:
            data = found[place] = os.pread(handle, size, start)
            if len(data) != size:
                raise ValueError(
                    f"{path} ends at byte {start + len(data)}, within a "
                    f"sample that ends at byte {start + size}. It has "
                    "changed: make the source again."
                )
    finally:
        os.close(handle)
