"""Stores built batches for later epochs, in memory or in files.

Only plain batches are kept (see memory/layout.py). What is served is a view:
the arrays of a batch lie in memory that is never written again, or in a file
that is mapped, and cannot be written to.

No key tells all that batches depend on. So of the batches that an earlier run
has left in a directory, one is built again and compared before any is served.
Each file names its writer: a run whose batches were found equal to those of an
earlier writer goes on with that name.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import logging
import pathlib
import secrets
from typing import Any

import numpy as np
import numpy.typing as npt

from keras_fastdata import _atomic_write
from keras_fastdata._call_stack import raise_of_handler
from keras_fastdata.engine import batch_file
from keras_fastdata.engine.batch_file import OpenBatch
from keras_fastdata.memory import layout
from keras_fastdata.memory.arena import aligned_empty
from keras_fastdata.metrics import ram

# On some versions of Python each mapping takes a descriptor, of which a process
# often has 1,024.
_MOST_OPEN = 128

_log = logging.getLogger("keras_fastdata")


class _BoundedCache:
    """Base class of the caches, with an optional limit in bytes."""

    def __init__(self, name: str, most: int | None, used: int = 0) -> None:
        self.keeps_all = True  # whether every batch that was put was kept
        self._name = name
        self._most = most
        self._used = used
        self._is_full = False

    def _admit(self, batch: Any) -> tuple[Any, list[Any]] | None:
        """Counts a batch's bytes towards the limit, or refuses the batch.

        Returns:
            The structure and the arrays of the batch; `None` if it is refused.
        """
        arrays: list[npt.NDArray[Any]] = []
        description = layout.describe(batch, arrays)
        if description is None:
            self._refuse(
                "Not all batches",
                "some hold other things than arrays, each of them once, in "
                "tuples, lists and dicts",
            )
            return None
        nbytes = sum(array.nbytes for array in arrays)
        if self._is_full:
            return None
        if self._most is not None and self._used + nbytes > self._most:
            self._close(
                f"{self._used:,} bytes are in use, and `cache_bytes` is "
                f"{self._most:,}"
            )
            return None
        self._used += nbytes
        return description, arrays

    def _close(self, reason: str) -> None:
        """Stops the cache from storing further batches."""
        self._is_full = True
        self._refuse("No more batches", reason)

    def _refuse(self, which: str, reason: str) -> None:
        """Logs once that some batches are not cached."""
        if self.keeps_all:
            self.keeps_all = False
            _log.warning(
                "%s of %s are cached: %s. The others are built in every epoch.",
                which,
                self._name,
                reason,
            )


class MemoryCache(_BoundedCache):
    """Stores batches in memory, by default in up to half of the free memory."""

    def __init__(self, name: str, most: int | None) -> None:
        if most is None and (free := ram.free()) is not None:
            most = free // 2
        super().__init__(name, most)
        self._batches: dict[int, OpenBatch] = {}

    def holds(self, index: int, *, is_wanted: bool = False) -> bool:
        """Returns whether the cache holds batch `index`.

        `is_wanted` says that the caller takes the batch now.
        """
        return index in self._batches

    def get(self, index: int) -> Any:
        """Returns batch `index` with read-only arrays."""
        return self._batches[index].assemble()

    def put(self, index: int, batch: Any) -> None:
        """Stores a copy of a batch, unless the cache refuses the batch."""
        if index in self._batches or (plain := self._admit(batch)) is None:
            return
        description, arrays = plain
        buffers = []
        for array in arrays:
            flat = aligned_empty(array.nbytes, np.uint8)
            np.copyto(flat, batch_file.bytes_of(array))
            batch_file.lock(flat)
            buffers.append(flat)
        described = layout.Layout(layout.read_only(description))
        self._batches[index] = OpenBatch(described, buffers)

    def lose(self, index: int) -> None:
        """Drops batch `index`, because reading the batch has failed."""
        del self._batches[index]

    def note_failed_build(self, index: int, error: Exception) -> bool:
        """Returns whether the cache serves a batch whose build has failed."""
        return False


class _CachedFile(enum.Enum):
    """The state of the file that stores one batch."""

    MISSING = enum.auto()  # or damaged: the batch is built, and written
    WRITTEN = enum.auto()  # this object has written the batch
    FOUND = enum.auto()  # the batch was there
    FORBIDDEN = enum.auto()  # another user's: the batch is built every time


class _Comparison(enum.Enum):
    """Whether a writer's batches are those that would be built now.

    DUE --a batch is found--> RUNNING --equal, or its build fails--> PASSED
    RUNNING --different--> FAILED
    """

    DUE = enum.auto()
    RUNNING = enum.auto()  # a batch of the writer is to be built, too
    PASSED = enum.auto()
    FAILED = enum.auto()  # the writer's batches are built again, and replaced


class _EarlierWriter:
    """A writer whose batches were found."""

    def __init__(self) -> None:
        self.comparison = _Comparison.DUE
        self._compared = -1  # the index of the batch that is compared

    def may_serve(self, index: int, is_wanted: bool) -> bool:
        """Returns whether a batch is served, or may be soon.

        Until the comparison has passed, the batch that is wanted is built.
        """
        if self.comparison is _Comparison.DUE or (
            is_wanted and self.comparison is _Comparison.RUNNING
        ):
            self.comparison, self._compared = _Comparison.RUNNING, index
        if self.comparison is _Comparison.RUNNING:
            return index != self._compared
        return self.comparison is _Comparison.PASSED

    @property
    def is_to_be_compared(self) -> bool:
        return self.comparison in (_Comparison.DUE, _Comparison.RUNNING)

    def end_comparison(self, is_same: bool) -> None:
        """Sets the result of the comparison."""
        passed, failed = _Comparison.PASSED, _Comparison.FAILED
        self.comparison = passed if is_same else failed


class DiskCache(_BoundedCache):
    """Stores batches in files, with the same methods as `MemoryCache`.

    If the directory cannot be made, nothing is cached, and a warning is logged.
    """

    def __init__(
        self, name: str, directory: pathlib.Path, most: int | None
    ) -> None:
        # What was kept of other states of the dataset lies beside it.
        self._states = f"{name}-*"
        self._directory = directory
        for state in directory.parent.glob(self._states):
            _atomic_write.remove_abandoned(state)
        super().__init__(name, most, self._size())
        self._open: collections.OrderedDict[int, OpenBatch] = (
            collections.OrderedDict()
        )
        self._files: dict[int, _CachedFile] = {}  # by index, once looked for
        # Those whose batches were found, by name; and their indices.
        self._writers: dict[str, _EarlierWriter] = {}
        self._found: dict[int, _EarlierWriter] = {}
        self._name_of_writer = secrets.token_hex(8)  # of this object
        self._has_told = False
        self._make_directory()

    def holds(self, index: int, *, is_wanted: bool = False) -> bool:
        if (file := self._files.get(index)) is None:
            file = self._files[index] = self._look_for(index)
        if file is _CachedFile.FOUND:
            return self._found[index].may_serve(index, is_wanted)
        return file is _CachedFile.WRITTEN

    def get(self, index: int) -> Any:
        if index not in self._open:
            self._keep_open(index, is_trusted=True)
        return self._open[index].assemble()

    def put(self, index: int, batch: Any) -> None:
        missing = _CachedFile.MISSING
        file = self._files.get(index, missing)
        if file is _CachedFile.FOUND and not self._is_current(index, batch):
            self._remove(self._path(index))
            file = missing
        if file is not missing:
            return
        if (plain := self._admit(batch)) is None:
            return
        path = self._path(index)
        try:
            batch_file.write(path, *plain, self._name_of_writer)
            self._keep_open(index, is_trusted=True)
        except Exception as error:
            raise_of_handler(error)
            self._close(f"{path} cannot be written ({error})")
        else:
            self._files[index] = _CachedFile.WRITTEN

    def note_failed_build(self, index: int, error: Exception) -> bool:
        """Ends the comparison if its batch cannot be built; see `MemoryCache`.

        The files that the batches were made of may be gone.
        """
        file = self._files.get(index)
        if file is not _CachedFile.FOUND:
            return False
        writer = self._found[index]
        if not writer.is_to_be_compared:
            return False
        _log.warning(
            "Batch %d of %s cannot be built any more (%s: %s), so it was not "
            "compared with the batch in %s. The batches there are used.",
            *(index, self._name, type(error).__name__),
            *(str(error), self._directory),  # a record would keep its frames
        )
        writer.end_comparison(is_same=True)
        return True

    def _is_current(self, index: int, batch: Any) -> bool:
        """Returns whether a batch that was found is one that is built now.

        `batch` is the build; compares the two if that is due.
        """
        writer = self._found[index]
        if writer.is_to_be_compared:
            try:
                found = self.get(index)
            except (OSError, ValueError) as error:
                raise_of_handler(error)
                return False
            writer.end_comparison(_is_same(found, batch))
            if writer.comparison is _Comparison.PASSED:
                self._name_of_writer = self._open[index].writer
            else:
                self._tell_of_others(index)
        return writer.comparison is _Comparison.PASSED

    def _tell_of_others(self, index: int) -> None:
        _log.warning(
            "The batches of %s in %s were built from something else than now: "
            "batch %d differs. All batches are built again. Pass another "
            "`cache_version` after such a change. If you have changed nothing, "
            "the batches differ each time: then do not cache them.",
            *(self._name, self._directory, index),
        )

    def empty(self) -> None:
        """Removes all batches."""
        self._open.clear()
        self._files.clear()
        for path in self._directory.glob("*.batch"):
            self._remove(path)

    def _remove(self, path: pathlib.Path) -> None:
        with contextlib.suppress(OSError):
            nbytes = path.stat().st_size
            path.unlink()
            self._used -= nbytes

    def lose(self, index: int) -> None:
        self._files[index] = _CachedFile.MISSING
        self._open.pop(index, None)
        if not self._directory.exists():  # somebody has removed it
            self._files = dict.fromkeys(self._files, _CachedFile.MISSING)
            self._open.clear()
            self._used = self._size()
            self._make_directory()

    def _make_directory(self) -> None:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise_of_handler(error)
            self._close(f"the directory cannot be made ({error})")

    def _size(self) -> int:
        """Returns the size in bytes of the batches of all states."""
        states = self._directory.parent.glob(self._states)
        return sum(map(_size_of, states))

    def _look_for(self, index: int) -> _CachedFile:
        try:
            self._keep_open(index, is_trusted=False)
        except (FileNotFoundError, NotADirectoryError):
            return _CachedFile.MISSING
        except PermissionError as error:
            if not self._has_told:
                self._has_told = True
                _log.warning(
                    "%s. This and any other file there that this user may not "
                    "read is left as it is, and its batch is built in every "
                    "epoch. Let this user read the directory, or pass another "
                    "one as `cache`.",
                    error,
                )
            return _CachedFile.FORBIDDEN
        except (OSError, ValueError) as error:
            raise_of_handler(error)
            _log.warning(
                "%s is not a batch that was cached, or is damaged (%s); it is "
                "built again.",
                self._path(index),
                error,
            )
            return _CachedFile.MISSING
        name = self._open[index].writer
        self._found[index] = self._writers.setdefault(name, _EarlierWriter())
        return _CachedFile.FOUND

    def _keep_open(self, index: int, *, is_trusted: bool) -> None:
        """Opens a batch file; checks the arrays unless `is_trusted`."""
        self._open[index] = batch_file.read(self._path(index), is_trusted)
        if len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)

    def _path(self, index: int) -> pathlib.Path:
        return self._directory / f"{index}.batch"


Cache = MemoryCache | DiskCache


def _size_of(directory: pathlib.Path) -> int:
    """Returns the total size in bytes of the batch files in a directory."""
    size = 0
    for path in directory.glob("*.batch"):
        with contextlib.suppress(OSError):
            size += path.stat().st_size
    return size


def _is_same(one: Any, other: Any) -> bool:
    """Returns whether two batches have the same structure and bytes."""
    arrays: tuple[list[Any], list[Any]] = [], []
    first, second = map(layout.describe, (one, other), arrays)
    if first is None or second is None:
        return False
    return layout.read_only(first) == layout.read_only(second) and all(
        np.array_equal(batch_file.bytes_of(a), batch_file.bytes_of(b))
        for a, b in zip(*arrays, strict=True)
    )
