"""Reads the records of ArrayRecord files by index."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_fastdata._recent import Recent
from keras_fastdata.sources.index import Arrays, Index
from keras_fastdata.sources.records import Records
from keras_fastdata.sources.storage import Paths, Storage

_OPEN = 128  # files that a process keeps open
# What suits single records best. Readers with threads would not survive a fork.
_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
_BUFFER_BYTES = 1 << 15


class ArrayRecord(Records):
    """Records of ArrayRecord files, by index: a sample is bytes.

    Files that were written with "group_size:1" are read fastest.

    Args:
        paths: A path, a pattern such as "data/*.array_record", or a list of
            these.
        storage: Finds, reads and caches files. `None`: `Storage()`.

    Raises:
        FileNotFoundError: There is no such file.
        ImportError: The package array-record is missing.
        ValueError: A file is damaged.

    Example:

    >>> import os, tempfile
    >>> from array_record.python import array_record_module
    >>> from keras_fastdata import sources
    >>> path = os.path.join(tempfile.mkdtemp(), "numbers.array_record")
    >>> writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
    >>> for number in range(3):
    ...     _ = writer.write(b"record %d" % number)
    >>> writer.close()
    >>> sources.ArrayRecord(path)[1]
    b'record 1'
    """

    def __init__(self, paths: Paths, *, storage: Storage | None = None) -> None:
        _module()
        index = Index(storage, paths, "ArrayRecord", _scan)
        super().__init__(index, index.arrays["records"])
        self._readers: Recent[Any] = Recent(_OPEN)

    def __getitems__(self, indices: Sequence[int]) -> list[bytes]:
        """Returns the samples with the given indices, in their order."""
        found = [b""] * len(indices)
        for file, places, within in self._by_part(indices):
            self._index.check(file)
            make = functools.partial(self._open, file)
            reader = self._readers.get(file, make)
            try:
                records = reader.read(within.tolist())
            except RuntimeError as error:
                raise _damaged(self._index.paths[file], error) from error
            for place, record in zip(places.tolist(), records, strict=True):
                found[place] = record
        return found

    def _open(self, file: int) -> Any:
        with self._index.storage.local(self._index.paths[file]) as local:
            return _reader(local)


def _module() -> Any:
    try:
        from array_record.python import array_record_module
    except ImportError as error:
        raise ImportError(
            "ArrayRecord files are read with the package array-record, which "
            f"cannot be imported ({error}). "
            "Run `pip install 'keras-fastdata[arrayrecord]'`."
        ) from None
    return array_record_module


def _reader(local: str) -> Any:
    return _module().ArrayRecordReader(
        local, options=_OPTIONS, file_reader_buffer_size=_BUFFER_BYTES
    )


def _scan(local: str, path: str) -> Arrays:
    reader = _reader(local)
    if not reader.ok():
        try:
            reader.read([0])  # raises the error that the reader has had
        except (RuntimeError, IndexError) as error:
            raise _damaged(path, error) from error
    return {"records": np.array([reader.num_records()], np.int64)}


def _damaged(path: str, error: Exception) -> ValueError:
    return ValueError(
        f"{path} cannot be read: {error}. It is damaged, not complete, or no "
        "ArrayRecord file. Write or copy it again, or leave it out of `paths`."
    )
