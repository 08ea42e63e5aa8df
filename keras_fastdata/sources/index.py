"""An index over files: made once, and kept in the storage."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from keras_fastdata.sources.source import Indices
from keras_fastdata.sources.storage import Paths, Storage, is_remote

Arrays = dict[str, npt.NDArray[Any]]
# Reads a local file, and takes its path for error messages. Its results have
# one dimension; the first one has an element for each sample, or for each group
# of samples.
Scan = Callable[[str, str], Arrays]

_T = TypeVar("_T")

_REQUESTS = 16  # at the same time
_GROUP = 64  # files whose index is kept together; each one kept takes 5 ms
_ALIGNMENT = 64  # bytes
_COUNTS = "counts"


class Index:
    """Stores where the samples of files are.

    Each file is scanned once, in whichever process comes first. A file that
    has changed is scanned again. Pickles of an index are small: each process
    maps the arrays from the storage.

    Attributes:
        paths: The files, in order.
        counts: For each file, the number of elements of the first array that
            `scan` returns.
    """

    def __init__(
        self, storage: Storage | None, paths: Paths, kind: str, scan: Scan
    ) -> None:
        self.storage = Storage() if storage is None else storage
        # Workers may have another working directory.
        self.paths = [
            path if is_remote(path) else os.path.abspath(path)
            for path in self.storage.find(paths)
        ]
        for path in self.paths:
            if os.path.isdir(path):
                raise IsADirectoryError(
                    f"{path} is a folder. Name its files by a pattern, such "
                    f"as {os.path.join(path, '*')!r}."
                )
        self._kind = kind
        self._scan = scan
        self._versions = self._of_each(self.storage.version, self.paths)
        self._arrays: Arrays | None = None
        self.counts = self.arrays[_COUNTS].copy()

    @property
    def arrays(self) -> Arrays:
        """The arrays that `scan` returns, those of all files joined."""
        if self._arrays is None:
            self._arrays = self._kept(range(len(self.paths)))
        return self._arrays

    def key(self, number: int) -> str:
        """A key for `Storage.entry` that changes when the file does."""
        return f"{self._kind} {self.paths[number]} {self._versions[number]}"

    def check(self, number: int) -> None:
        """Raises `RuntimeError` if a file is not the one indexed."""
        path = self.paths[number]
        if self.storage.version(path) != self._versions[number]:
            raise RuntimeError(
                f"{path} has changed since `{self._kind}` looked for its "
                "samples. Make the source again."
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_arrays": None}

    def _kept(self, files: range) -> Arrays:
        """Returns the arrays of some files, which are made if needed."""
        keys = "\n".join(map(self.key, files))
        key = f"{self._kind} {hashlib.sha256(keys.encode()).hexdigest()}"

        def make(target: str) -> None:
            if len(files) > _GROUP:  # a file more changes one group alone
                starts = range(0, len(files), _GROUP)
                parts = [self._kept(files[n : n + _GROUP]) for n in starts]
            else:
                paths = self.paths[files.start : files.stop]
                parts = self._of_each(self._scanned, paths)
            joined = {
                name: np.concatenate([part[name] for part in parts])
                for name in parts[0]
            }
            _write(target, joined)

        with self.storage.entry(key, make) as path:
            return _opened(path)

    def _scanned(self, path: str) -> Arrays:
        with self.storage.local(path) as local:
            arrays = self._scan(local, path)
        count = len(next(iter(arrays.values())))
        return {**arrays, _COUNTS: np.array([count], np.int64)}

    def _of_each(self, ask: Callable[[str], _T], paths: list[str]) -> list[_T]:
        """Returns `ask(path)` for each file, of remote ones several at once."""
        if not any(map(is_remote, paths)):
            return list(map(ask, paths))
        with futures.ThreadPoolExecutor(_REQUESTS) as pool:
            return list(pool.map(ask, paths))


def _write(target: str, arrays: Arrays) -> None:
    kinds = {name: (a.dtype.str, len(a)) for name, a in arrays.items()}
    with open(target, "wb") as file:
        file.write(json.dumps(kinds).encode() + b"\n")
        for array in arrays.values():
            file.write(bytes(-file.tell() % _ALIGNMENT))
            file.write(np.ascontiguousarray(array).data)


def _opened(path: str) -> Arrays:
    """Maps the arrays of a file that `_write` wrote."""
    with open(path, "rb") as file:
        kinds = json.loads(file.readline())
        start = file.tell()
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    arrays = {}
    for name, (kind, length) in kinds.items():
        start += -start % _ALIGNMENT
        arrays[name] = np.frombuffer(memory, kind, length, start)
        start += arrays[name].nbytes
    return arrays


def by_part(
    ends: npt.NDArray[np.int64], indices: Sequence[int] | Indices
) -> Iterator[tuple[int, Indices, Indices]]:
    """Yields each part that has some of the samples with the given indices.

    With it come the places of these samples in `indices`, and their indices
    within the part. `ends` are the cumulated lengths of the parts.
    """
    wanted = np.asarray(indices, np.int64)
    numbers = np.searchsorted(ends, wanted, side="right")
    order = np.argsort(numbers, kind="stable")
    used, starts = np.unique(numbers[order], return_index=True)
    bounds = [*starts.tolist(), len(order)]
    for place, number in enumerate(used.tolist()):
        places = order[bounds[place] : bounds[place + 1]]
        before = ends[number - 1] if number else 0
        yield number, places, wanted[places] - before
