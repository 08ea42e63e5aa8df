"""The errors that this package defines.

    RuntimeError
    └── LoaderError                  the loader failed
        ├── WorkerDiedError          a worker process ended unexpectedly
        ├── BatchTimeoutError        a batch took longer than `batch_timeout`
        └── DatasetPicklingError     the dataset cannot be sent to a process

`EndOfData` is not an error: a dataset raises it as an iterator raises
`StopIteration`.

An exception of the user's `__getitem__` is not wrapped: it arrives as itself.
If it cannot be rebuilt in the training process, a `LoaderError` with its full
text takes its place.
"""

from __future__ import annotations

from typing import Any


class EndOfData(Exception):  # noqa: N818 - no error, as `StopIteration`
    """Raised by `__getitem__(index)` at the end of the data.

    It is for datasets whose `num_batches` is `None`: the epoch ends before
    this batch. In other datasets it is an error like any other.

    Example:

    >>> from keras_fastdata import EndOfData, FastPyDataset
    >>> class Pages(FastPyDataset):
    ...     num_batches = None
    ...     def __getitem__(self, index):
    ...         if index == 3:
    ...             raise EndOfData
    ...         return f"page {index}"
    >>> list(Pages(workers=2))
    ['page 0', 'page 1', 'page 2']
    """


class LoaderError(RuntimeError):
    """Raised when the loader fails; the message says what to do."""


class _DetailedError(LoaderError):
    """Base class of errors that carry attributes.

    A subclass declares each attribute with its default.
    """

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        for name, value in details.items():
            getattr(type(self), name)  # an unknown name is an error
            setattr(self, name, value)


class WorkerDiedError(_DetailedError):
    """Raised when a worker process has ended unexpectedly.

    Attributes:
        dataset: Class name of the dataset the worker was serving.
        worker: Index of the worker, from 0; if no worker was left, of the one
            that ended last. `None` if it is unknown.
        pid: Process id of the worker, or `None`.
        exit_code: Exit status as in `subprocess.Popen.returncode`: negative
            for a signal, `None` if it is unknown.
        epoch: Epoch of the batch it was building, or `None`.
        batch_index: Index of that batch, or `None`.
    """

    dataset: str | None = None
    worker: int | None = None
    pid: int | None = None
    exit_code: int | None = None
    epoch: int | None = None
    batch_index: int | None = None


class BatchTimeoutError(_DetailedError):
    """Raised when a batch takes longer to build than `batch_timeout` seconds.

    Attributes:
        dataset: Class name of the dataset.
        worker: Index of the worker, from 0.
        pid: Process id of the worker, or of this process for a thread.
        epoch: Epoch of the batch; `None` if the worker was still starting.
        batch_index: Index of that batch, or `None`.
        elapsed_s: Seconds since the build, or the start, began.
        stack: The Python stack of the worker, as text.
    """

    dataset: str | None = None
    worker: int | None = None
    pid: int | None = None
    epoch: int | None = None
    batch_index: int | None = None
    elapsed_s: float | None = None
    stack: str | None = None


class DatasetPicklingError(_DetailedError):
    """Raised when the dataset or an object in it cannot be sent to a process.

    Attributes:
        path: The object that cannot be pickled, such as
            `"dataset.reader.handle"`.
        type_name: Qualified name of that object's type.
    """

    path: str | None = None
    type_name: str | None = None
