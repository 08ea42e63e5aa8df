"""What an iterator asks for, and what a step of fetching may return."""

from __future__ import annotations

import enum
import time
from typing import Any

from keras_fastdata.workers.base import WorkerPool
from keras_fastdata.workers.inline import InlinePool


class Outcome(enum.Enum):
    """What a step of fetching returns in place of a batch."""

    PENDING = enum.auto()  # the batch is still to come: wait, and fetch again
    SKIPPED = enum.auto()  # the batch is left out: fetch the next position
    CACHE_MISS = enum.auto()  # the cache has lost the batch: fetch it again
    RETRY_INLINE = enum.auto()  # threads may not build it: the caller does
    END = enum.auto()  # the epoch has no more batches


class Fetch:
    """A batch that an iterator has asked for, through all waits for it.

    Args:
        pause_after: Whether the workers pause until the next one is asked for.
        is_thorough: Whether to collect results even if the batch is here and
            more of them lie ready than are out.

    Attributes:
        peeked: By index, the batches that a peek has got so far.
    """

    __slots__ = (
        "_awaited",
        "_here_s",
        "_inline",
        "_waits_for",
        "is_thorough",
        "pause_after",
        "peeked",
    )

    def __init__(self, pause_after: bool, is_thorough: bool) -> None:
        self.pause_after = pause_after
        self.is_thorough = is_thorough
        self.peeked: dict[int, Any] = {}
        self._waits_for: WorkerPool | None = None
        self._awaited = -1
        self._here_s: float | None = None
        self._inline: InlinePool | None = None

    @property
    def is_prepared(self) -> bool:
        """Whether the workers have the dataset as it was asked."""
        return self._waits_for is not None

    @property
    def waits_for(self) -> WorkerPool:
        """The workers that build the batch."""
        assert self._waits_for is not None
        return self._waits_for

    def prepare(self, workers: WorkerPool) -> None:
        """Notes which workers build the batch."""
        self._waits_for = workers

    # -- the position that is waited for -------------------------------------

    def awaits(self, position: int) -> bool:
        """Returns whether this position is waited for."""
        return self._awaited == position

    def await_position(self, position: int) -> None:
        """Notes that this position is waited for."""
        self._awaited = position

    # -- workers that pause --------------------------------------------------

    @property
    def is_here(self) -> bool:
        """Whether the batch has come, and only the workers' pause has not."""
        return self._here_s is not None

    def waited_here_s(self) -> float:
        """Returns for how many seconds the batch has been here."""
        now_s = time.monotonic()
        if self._here_s is None:
            self._here_s = now_s
        return now_s - self._here_s

    def end_pause(self) -> None:
        """Notes that the workers have paused."""
        self._here_s = None

    # -- a batch that the caller builds --------------------------------------

    @property
    def inline(self) -> InlinePool | None:
        """The caller as a worker, if it builds this batch."""
        return self._inline

    def build_inline(self, inline: InlinePool) -> None:
        """Has the caller build the batch."""
        self._inline = inline

    def wait_inline(self) -> None:
        """Makes the caller build the batch while it waits."""
        self._waits_for = self._inline

    def end_inline(self) -> None:
        """Notes that the caller has built the batch."""
        self._inline = None
