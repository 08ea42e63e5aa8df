"""What to tell the user about a worker that died, or had to be killed."""

from __future__ import annotations

import dataclasses
import signal

from keras_fastdata.errors import (
    BatchTimeoutError,
    LoaderError,
    WorkerDiedError,
)
from keras_fastdata.workers import machine
from keras_fastdata.workers.base import Ticket
from keras_fastdata.workers.watch import Overdue


@dataclasses.dataclass(frozen=True)
class Death:
    """The facts.

    Attributes:
        dataset: The dataset's class name.
        worker: Index of the worker.
        pid: Its process id.
        exit_code: As in `Popen.returncode`; `None` if unknown.
        overdue: Why it was killed, if it was by us.
        ticket: The batch it was building, or `None`.
        again: Whether that batch has cost a worker before.
        restarts_used_up: `max_worker_restarts`, if that is why there is an
            error at all.
    """

    dataset: str
    worker: int
    pid: int
    exit_code: int | None
    overdue: Overdue | None
    ticket: Ticket | None
    again: bool
    restarts_used_up: int | None

    def error(self) -> LoaderError:
        """The error that ends the epoch."""
        ticket = self.ticket
        where = {
            "dataset": self.dataset,
            "worker": self.worker,
            "pid": self.pid,
            "epoch": ticket.epoch if ticket else None,
            "batch_index": ticket.index if ticket else None,
        }
        if self.overdue is None:
            return WorkerDiedError(
                self._text(), exit_code=self.exit_code, **where
            )
        return BatchTimeoutError(
            self._timeout_text(self.overdue),
            elapsed_s=self.overdue.work.elapsed_s,
            stack=self.overdue.stack,
            **where,
        )

    def _text(self) -> str:
        doing = ""
        if self.ticket is not None:
            doing = (
                f" while building batch {self.ticket.index} of epoch "
                f"{self.ticket.epoch}"
            )
        again = ", for the second time" if self.again else ""
        return (
            f"Worker {self.worker} (pid {self.pid}) of {self.dataset} "
            f"{_how(self.exit_code)}{doing}{again}.{self._used_up()} "
            f"{_remedy(self.exit_code)}{self._look()}"
        )

    def _timeout_text(self, overdue: Overdue) -> str:
        again = " That was the second time." if self.again else ""
        return (
            f"{overdue.text}{again}{self._used_up()} Raise `batch_timeout` if "
            f"such a batch takes that long.{self._look()} It was here:\n"
            f"{overdue.stack}"
        )

    def _used_up(self) -> str:
        if self.restarts_used_up is None:
            return ""
        return f" `max_worker_restarts={self.restarts_used_up}` is used up."

    def _look(self) -> str:
        if self.ticket is None:
            return ""
        return f" Look at that batch with `dataset[{self.ticket.index}]`."


def _how(exit_code: int | None) -> str:
    if exit_code is None:
        return "ended in a way that could not be learned"
    if exit_code >= 0:
        return f"exited with status {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"


def _remedy(exit_code: int | None) -> str:
    if exit_code == -signal.SIGKILL:
        return (
            "The kernel kills processes when memory runs out: lower `workers` "
            f"or `max_queue_size`. {machine.memory_now()}"
        )
    if exit_code is not None and exit_code < 0:
        return "A library that `__getitem__` calls has crashed."
    return (
        "Something in `__getitem__` or `on_worker_start` ended the process; "
        "raise an exception instead."
    )
