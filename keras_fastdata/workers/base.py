"""Defines the interface between the engine and the worker pools.

The engine submits requests and collects their results. It does not know how a
worker is reached, and a worker does not know the order of an epoch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

from keras_fastdata.metrics.pool_stats import PoolStats
from keras_fastdata.metrics.timing import Timing

# The attribute of a log record that one worker of all is to give.
ONCE = "once_per_dataset"
# How that begins where a worker lacks a value that the training process has.
LACKS = "lacks "
SLOW_START = 0  # see `WorkerPool.slow_requests`


@dataclasses.dataclass(frozen=True, slots=True)
class BatchRequest:
    """A request to a worker pool to build one batch."""

    request_id: int  # unique among the requests of one set of workers, from 1
    epoch: int
    index: int
    # How often to tell how batches are built; see
    # `metrics.timing.Stopwatch.start`.
    interval_s: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolPlan:
    """The settings of a pool whose workers have copies of the dataset."""

    dataset: str  # the dataset's class name, for messages
    count: int  # number of workers, at least 1
    lookahead: int  # batches that may wait to be delivered
    max_restarts: int  # worker deaths survived in one epoch
    batch_timeout: float | None  # seconds that one batch may take, or `None`
    # Environment variables over the clean defaults.
    worker_env: dict[str, str] | None


class BatchResult(Protocol):
    """The result of one request: either a batch or an error."""

    request_id: int
    worker: int  # index of the worker that built the batch, from 0
    nbytes: int  # bytes that the batch takes while it waits to be delivered
    # Whether `open` raises an `Exception` of the dataset's own.
    by_dataset: bool
    timing: Timing | None  # how the batch was built, if the request asks for it

    @property
    def is_lost(self) -> bool:
        """Whether the batch is lost because of an error outside the dataset."""

    def open(self) -> Any:
        """Returns the batch or raises the error; call `open` only once."""

    def discard(self) -> None:
        """Drops the batch, and frees its memory."""


class Builds(Protocol):
    """The interface of `building.build.Builder`, which builds batches."""

    def start(self, worker_index: int) -> None: ...

    def stop(self, worker_index: int) -> None: ...

    def build(
        self,
        epoch: int,
        index: int,
        worker_index: int,
        empty: Callable[..., Any] = ...,
    ) -> Any: ...

    def adopt(self, newer: Any) -> None:
        """Replaces the dataset's state by the state in the builder `newer`."""

    def change(self) -> None:
        """Informs the builder that the dataset has changed."""

    def forget(self, thread: int) -> None:
        """Stops tracking the build in a thread that was abandoned."""


class WorkerPool(Protocol):
    """A set of workers that builds the batches of one dataset.

    All methods but `wait`, `close` and `pool_stats` are called by one thread
    at a time, in the process that made the workers; none of those waits for a
    batch. Several threads may wait, also while another calls any of the
    methods; a signal handler may end the workers amid a wait. A pool inherits
    the methods that mean nothing to it.
    """

    # Whether workers could not start, and a method has raised that.
    has_failed_to_start: bool = False

    @property
    def lacks_workers(self) -> bool:
        """Whether `start_missing` would start a worker, if it can."""
        return False

    def start_missing(self) -> None:
        """Starts the workers that are not there yet, or not any more.

        Those that cannot start yet start at a later call. No signal handler may
        raise meanwhile: a worker would be lost.
        """
        return

    def submit(self, request: BatchRequest) -> bool:
        """Accepts a request, or returns False if the pool has no room."""

    def collect(self) -> Iterable[BatchResult]:
        """Returns the results that are available, without waiting."""

    def wait(self, timeout_s: float) -> None:
        """Waits up to `timeout_s` seconds until there can be new results.

        Workers that are the caller build here. It may be interrupted at any
        point, and nothing is lost; and it ends soon once they are closed.
        """

    def cancel(self, request_ids: Iterable[int]) -> None:
        """Cancels requests, so that `collect` never returns their results."""

    def pause(self) -> None:
        """Stops giving requests to workers; running builds still finish."""
        return

    def resume(self) -> None:
        """Gives requests to workers again after `pause`. Idempotent."""
        return

    @property
    def slow_requests(self) -> Collection[int]:
        """The ids of requests whose builds take far longer than any before.

        `SLOW_START` stands for a worker that takes so long to start. Empty with
        a `batch_timeout`, which ends such builds.
        """
        return ()

    @property
    def busy(self) -> bool:
        """Whether workers have requests that `collect` has not answered."""

    def change(self, *, anew: bool = False) -> None:
        """Makes later builds use the current state of the dataset.

        Args:
            anew: Whether processes end, and others take their place. There must
                be no requests then.
        """
        return

    def expect(self, ahead: int) -> None:
        """Prepares the pool for up to `ahead` outstanding requests."""
        return

    def renew_restarts(self) -> None:
        """Resets the count of worker restarts at the start of an epoch."""
        return

    def pool_stats(self) -> PoolStats:
        """Returns statistics of the workers, such as their process ids."""

    def close(self) -> None:
        """Ends the workers, and waits until they have ended. Idempotent."""


@dataclasses.dataclass
class LocalResult:
    """A result whose batch is an object in this process's memory."""

    request_id: int
    worker: int
    batch: Any = None
    error: BaseException | None = None  # what it raised, if not
    # Whether the dataset's own code raised it, an `Exception`.
    by_dataset: bool = False
    nbytes: int = 0  # bytes of the batch, if they were measured; else 0
    timing: Timing | None = None  # how it was built, if the request asks for it

    @classmethod
    def failed(
        cls, request_id: int, worker: int, error: BaseException
    ) -> LocalResult:
        """Returns the result of a build that raised `error`."""
        by_dataset = isinstance(error, Exception)
        return cls(request_id, worker, error=error, by_dataset=by_dataset)

    @property
    def is_lost(self) -> bool:
        """Whether the batch is lost because of an error outside the dataset."""
        return self.error is not None and not self.by_dataset

    def open(self) -> Any:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        batch, self.batch = self.batch, None
        return batch

    def discard(self) -> None:
        self.batch = self.error = None


def describe_batch(
    dataset: str, request: BatchRequest, worker: str, doing: str = "building"
) -> str:
    """Returns a sentence that identifies a batch, for an error note."""
    return (
        f"While {doing} batch {request.index} of epoch {request.epoch} of "
        f"{dataset}, in {worker}."
    )
