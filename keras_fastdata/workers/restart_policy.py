"""Decides which dead workers are replaced, and which batches fail.

How a pool learns that a worker has died, and how it starts another, is for the
pool's own file.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import time

from keras_fastdata.errors import LoaderError
from keras_fastdata.metrics.pool_stats import WorkerLoss
from keras_fastdata.workers.exit_messages import WorkerExit
from keras_fastdata.workers.in_flight import Task

MAX_CRASHES_PER_BATCH = 2  # workers that die over a batch before it is blamed

_MOST_LOSSES = 1000  # remembered

_log = logging.getLogger("keras_fastdata")


class RestartPolicy:
    """Decides which dead workers are replaced."""

    def __init__(self, count: int, max_restarts: int) -> None:
        self._count = count
        self._most = max_restarts
        self._restarts = 0
        self._unreplaced: set[int] = set()
        self._last: WorkerExit | None = None
        self._losses: collections.deque[WorkerLoss] = collections.deque(
            maxlen=_MOST_LOSSES
        )
        # Whether every worker has died and none is replaced.
        self.is_over = False

    def renew_restarts(self) -> None:
        """Resets the count of restarts at the start of an epoch."""
        self._restarts = 0
        self._unreplaced.clear()
        self.is_over = False

    @property
    def losses(self) -> tuple[WorkerLoss, ...]:
        """The latest deaths of workers, oldest first."""
        return tuple(self._losses)

    def replaces(self, worker: int) -> bool:
        """Returns whether to replace a dead worker."""
        return worker not in self._unreplaced

    def record(self, worker: int, pid: int, *, counts: bool = True) -> None:
        """Records the death of a worker; `pid` is 0 if unknown.

        Of workers that die together, one death `counts`.
        """
        self._losses.append(WorkerLoss(time.monotonic(), worker, pid))
        self._restarts += counts
        if self._restarts > self._most:
            self._unreplaced.add(worker)
            self.is_over = len(self._unreplaced) == self._count

    def judge(
        self, worker_exit: WorkerExit, held: Task | None
    ) -> LoaderError | None:
        """Decides whether the batch of a dead worker fails or is built again.

        Returns the error that the batch ends in; `None` if it is built again,
        or the worker had no batch. Every other death is logged.
        """
        used_up = self._restarts > self._most
        self._last = dataclasses.replace(
            worker_exit, restarts_used_up=self._most if used_up else None
        )
        worker_exit = dataclasses.replace(
            self._last,
            request=held.request if held else None,
            second_crash=bool(held and held.crashes >= MAX_CRASHES_PER_BATCH),
        )
        if held and (used_up or worker_exit.second_crash):
            return worker_exit.error()
        _log.warning("%s", worker_exit.news(self._restarts, self._most))
        return None

    def end(self) -> WorkerExit:
        """Returns how the last worker ended, as the reason for failures."""
        assert self._last is not None
        return self._last
