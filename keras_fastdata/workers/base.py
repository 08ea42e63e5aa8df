"""What the engine asks of workers, wherever they are.

The engine submits requests and collects their results. It does not know how a
worker is reached, and a worker does not know the order of an epoch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from keras_fastdata.metrics.pool_stats import PoolStats
from keras_fastdata.metrics.timing import Timing

# The attribute of a log record that one worker of all is to give.
ONCE = "once_per_dataset"


@dataclasses.dataclass(frozen=True, slots=True)
class BatchRequest:
    """An order to build one batch.

    Attributes:
        request_id: Unique among the requests of one set of workers, from 1.
        epoch: The epoch the batch is for.
        index: The batch's index in the dataset.
        interval_s: How often to tell how batches are built; see
            `metrics.timing.Stopwatch.start`.
    """

    request_id: int
    epoch: int
    index: int
    interval_s: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolPlan:
    """How the workers of one loader are to be run, where they have copies.

    Attributes:
        dataset: The dataset's class name, for messages.
        count: Number of workers, at least 1.
        lookahead: Batches that may wait to be delivered.
        max_restarts: Worker deaths survived in one epoch.
        batch_timeout: Seconds that one batch may take, or `None`.
        worker_env: Environment variables over the clean defaults.
    """

    dataset: str
    count: int
    lookahead: int
    max_restarts: int
    batch_timeout: float | None
    worker_env: dict[str, str] | None


class BatchResult(Protocol):
    """What became of one request.

    Attributes:
        request_id: The request's.
        worker: Index of the worker that built the batch, from 0.
        nbytes: Bytes that the batch takes while it waits to be delivered.
        by_dataset: Whether `open` raises an `Exception` of the dataset's own.
        is_lost: Whether `open` raises another error, as for a dead worker.
        timing: How the batch was built, if the request asks for it.
    """

    request_id: int
    worker: int
    nbytes: int
    by_dataset: bool
    timing: Timing | None

    @property
    def is_lost(self) -> bool: ...

    def open(self) -> Any:
        """Returns the batch, or raises what building it raised. Once only."""
        ...

    def discard(self) -> None:
        """Gives up the batch, and with it the memory it is in."""
        ...


class Builds(Protocol):
    """What workers run; `building.build.Builder` is the one there is."""

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
        """Takes over the dataset's state from a builder made of a newer one."""
        ...

    def change(self) -> None:
        """Told that the dataset itself is in a newer state."""
        ...


class WorkerPool(Protocol):
    """A set of workers that serves one dataset.

    All methods but `wait` and `close` are called by one thread at a time, in
    the process that made the workers; none of those waits for a batch. Several
    threads may wait, also while another calls any of the methods; a signal
    handler may end the workers amid a wait. A pool inherits the methods that
    mean nothing to it.
    """

    def submit(self, request: BatchRequest) -> bool:
        """Takes a request, or returns False when there is no room for it."""
        ...

    def collect(self) -> Iterable[BatchResult]:
        """Returns what is done, without waiting."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Waits until `collect` has something to do, or for `timeout_s`.

        Workers that are the caller build here. It may be interrupted at any
        point, and nothing is lost; and it ends soon once they are closed.
        """
        ...

    def cancel(self, request_ids: Iterable[int]) -> None:
        """Cancels requests; no results of them are returned any more."""
        ...

    def pause(self) -> None:
        """Has the workers finish what they are at, and begin nothing."""
        return

    def resume(self) -> None:
        """Has them go on. Idempotent."""
        return

    @property
    def busy(self) -> bool:
        """Whether a request is out that `collect` has not returned."""
        ...

    def change(self) -> None:
        """Has every later request built from the dataset as it is now."""
        return

    def expect(self, ahead: int) -> None:
        """Says that no more than so many batches will be asked for ahead."""
        return

    def renew_restarts(self) -> None:
        """Allows the worker restarts of a new epoch."""
        return

    def pool_stats(self) -> PoolStats:
        """Says who they are."""
        ...

    def close(self) -> None:
        """Ends the workers and returns when they are gone. Idempotent."""
        ...


@dataclasses.dataclass
class LocalResult:
    """A batch, or an error, that is in the memory of this process.

    Attributes:
        request_id: The request's.
        worker: Index of the worker.
        batch: The batch, if building it went well.
        error: What it raised, if not.
        by_dataset: Whether the dataset's own code raised it, an `Exception`.
        nbytes: Bytes of the batch, if they were measured; else 0.
        timing: How it was built, if the request asks for it.
    """

    request_id: int
    worker: int
    batch: Any = None
    error: BaseException | None = None
    by_dataset: bool = False
    nbytes: int = 0
    timing: Timing | None = None

    @classmethod
    def failed(
        cls, request_id: int, worker: int, error: BaseException
    ) -> LocalResult:
        """What building raised; an `Exception` is the dataset's own."""
        by_dataset = isinstance(error, Exception)
        return cls(request_id, worker, error=error, by_dataset=by_dataset)

    @property
    def is_lost(self) -> bool:
        """Whether it came to an error that is not the dataset's own."""
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
    """Names a batch in the words that every error uses."""
    return (
        f"While {doing} batch {request.index} of epoch {request.epoch} of "
        f"{dataset}, in {worker}."
    )
