"""What the engine asks of workers, wherever they are.

The engine submits tickets and collects what became of them. It never learns
what a worker is; a worker never learns what an epoch's order is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from keras_fastdata.health.staff import Staff
from keras_fastdata.health.timing import Timing

# The attribute of a log record that one worker of all is to give.
ONCE = "once_per_dataset"


@dataclasses.dataclass(slots=True)
class Ticket:
    """An order to build one batch.

    Attributes:
        serial: Unique among the tickets of one set of workers, from 1.
        epoch: The epoch the batch is for.
        index: The batch's index in the dataset.
        interval_s: How often to tell how batches are built; see
            `health.timing.Stopwatch.start`.
    """

    serial: int
    epoch: int
    index: int
    interval_s: float | None = None


class Done(Protocol):
    """What became of one ticket.

    Attributes:
        serial: The ticket's.
        worker: Index of the worker that built the batch, from 0.
        nbytes: Bytes that the batch takes while it waits to be delivered.
        by_dataset: Whether `open` raises an `Exception` of the dataset's own.
        is_lost: Whether it raises another, for want of workers.
        timing: How the batch was built, if the ticket asks for it.
    """

    serial: int
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
    """What workers run; `engine.build.Builder` is the one there is."""

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


class Workers(Protocol):
    """A set of workers that serves one dataset.

    All methods but `wait` and `close` are called by one thread at a time, in
    the process that made the workers; none of those waits. Several threads may
    wait, also while another calls any of the methods; a signal handler may end
    the workers amid a wait.
    """

    def submit(self, ticket: Ticket) -> bool:
        """Takes a ticket, or returns False when there is no room for it."""
        ...

    def collect(self) -> Iterable[Done]:
        """Returns what is done, without waiting."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Waits until `collect` has something to do, or for `timeout_s`.

        Workers that are the caller build here. It may be interrupted at any
        point, and nothing is lost; and it ends soon once they are closed.
        """
        ...

    def cancel(self, serials: Iterable[int]) -> None:
        """Takes tickets back; nothing more is heard of them."""
        ...

    def pause(self) -> None:
        """Has the workers finish what they are at, and begin nothing."""
        ...

    def resume(self) -> None:
        """Has them go on. Idempotent."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a ticket is out that `collect` has not returned."""
        ...

    def change(self) -> None:
        """Has every later ticket built from the dataset as it is now."""
        ...

    def expect(self, ahead: int) -> None:
        """Says that no more than so many batches will be asked for ahead."""
        ...

    def begin_epoch(self) -> None:
        """Allows the worker restarts of a new epoch."""
        ...

    def staff(self) -> Staff:
        """Says who they are."""
        ...

    def close(self) -> None:
        """Ends the workers and returns when they are gone. Idempotent."""
        ...


@dataclasses.dataclass
class Built:
    """A batch that was built in this process.

    Attributes:
        serial: The ticket's.
        worker: Index of the worker.
        batch: The batch, if building it went well.
        error: What it raised, if not.
        by_dataset: Whether the dataset's own code raised it, an `Exception`.
        nbytes: Not measured: such a batch takes no shared memory.
        timing: How it was built, if the ticket asks for it.
    """

    serial: int
    worker: int
    batch: Any = None
    error: BaseException | None = None
    by_dataset: bool = False
    nbytes: int = 0
    timing: Timing | None = None

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


def where(
    dataset: str, ticket: Ticket, worker: str, doing: str = "building"
) -> str:
    """Names a batch in the words that every error uses."""
    return (
        f"While {doing} batch {ticket.index} of epoch {ticket.epoch} of "
        f"{dataset}, in {worker}."
    )
