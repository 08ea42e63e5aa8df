"""Errors and log messages about workers that died or were killed."""

from __future__ import annotations

import dataclasses
import signal

from keras_fastdata.errors import (
    BatchTimeoutError,
    LoaderError,
    WorkerDiedError,
)
from keras_fastdata.metrics import ram
from keras_fastdata.workers.base import BatchRequest
from keras_fastdata.workers.watchdog import Expired

_SIGKILL = getattr(signal, "SIGKILL", 9)  # Windows has no such name


@dataclasses.dataclass(frozen=True)
class WorkerExit:
    """Describes how one worker ended."""

    dataset: str
    worker: int
    pid: int
    exit_code: int | None  # as in `Popen.returncode`; `None` if unknown
    expired: Expired | None  # why it was killed, if it was by us
    starting: bool  # whether it was still loading the dataset
    how: str = ""  # what is known of its end, where no exit code can say
    request: BatchRequest | None = None  # the batch it was building, or `None`
    second_crash: bool = False  # whether that batch has cost two workers now
    # `max_worker_restarts`, if that is why there is an error at all.
    restarts_used_up: int | None = None

    def news(self, restarts: int, most: int) -> str:
        """Returns the log message for a worker's death without an error."""
        again = " and its batch is built again" if self.request else ""
        fate = f"is replaced{again}"
        number = f" (restart {restarts} of at most {most} in this epoch)"
        if self.restarts_used_up is not None:
            fate = f"is not replaced: `max_worker_restarts={most}` is used up"
            number = ""
        if self.expired is None:
            return f"{self._what()}. It {fate}{number}."
        return (
            f"{self.expired.text} The worker {fate}. It was "
            f"here:\n{self.expired.stack}"
        )

    def error(self) -> LoaderError:
        """Returns the error that reports the end of the worker to the user."""
        request = self.request
        where = {
            "dataset": self.dataset,
            "worker": self.worker,
            "pid": self.pid,
            "epoch": request.epoch if request else None,
            "batch_index": request.index if request else None,
        }
        if self.expired is None:
            return WorkerDiedError(
                self._text(), exit_code=self.exit_code, **where
            )
        return BatchTimeoutError(
            self._timeout_text(self.expired),
            elapsed_s=self.expired.activity.elapsed_s,
            stack=self.expired.stack,
            **where,
        )

    def _text(self) -> str:
        again = ", for the second time" if self.second_crash else ""
        remedy = "" if self.how else f" {_remedy(self.exit_code)}"
        return (
            f"{self._what()}{again}.{self._used_up()}{remedy}"
            f"{self._look('end')}"
        )

    def _what(self) -> str:
        doing = ""
        if self.starting:
            doing = (
                " while it was starting (loading the dataset, or in "
                "`on_worker_start`)"
            )
        elif self.request is not None:
            doing = (
                f" while building batch {self.request.index} of epoch "
                f"{self.request.epoch}"
            )
        return (
            f"Worker {self.worker} (pid {self.pid}) of {self.dataset} "
            f"{'died' if self.how else how_it_ended(self.exit_code)}{doing}"
            f"{f' ({self.how})' if self.how else ''}"
        )

    def _timeout_text(self, expired: Expired) -> str:
        again = " That was the second time." if self.second_crash else ""
        return (
            f"{expired.text}{again}{self._used_up()} If that is what it takes, "
            "pass a larger `batch_timeout` to the constructor."
            f"{self._look('hang')} It was here:\n{expired.stack}"
        )

    def _used_up(self) -> str:
        if self.restarts_used_up is None:
            return ""
        return f" `max_worker_restarts={self.restarts_used_up}` is used up."

    def _look(self, risk: str) -> str:
        if self.request is None:
            return ""
        return (
            f" `dataset[{self.request.index}]` builds that batch in this "
            f"process, which may {risk} as well."
        )


def how_it_ended(exit_code: int | None) -> str:
    """Returns how a process ended, by its code as in `Popen.returncode`."""
    if exit_code is None:
        return "ended in a way that could not be learned"
    if exit_code >= 0:
        return f"exited with status {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"


def _remedy(exit_code: int | None) -> str:
    if exit_code == -_SIGKILL:
        return (
            "The kernel kills processes when memory runs out, and so do job "
            f"schedulers. {ram.left_now()} If that is little, lower "
            "`workers` or `max_queue_size`."
        )
    if exit_code is not None and exit_code < 0:
        return "A library that `__getitem__` calls has crashed."
    if exit_code is None:
        return (
            "Where SIGCHLD is ignored, or somebody else waits for all children "
            "of the training process, nobody learns how a worker ended."
        )
    return (
        "Something that the dataset called ended the process; raise an "
        "exception instead."
    )
