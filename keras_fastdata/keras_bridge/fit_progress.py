"""Tracks how far Keras has read the data of one adapter.

    NOT_STARTED --reset--> BETWEEN --begin--> IN_EPOCH --end--> BETWEEN
    NOT_STARTED --begin--> PROBE --reset--> BETWEEN
                           PROBE --end--> NOT_STARTED
    IN_EPOCH --reset--> BETWEEN

`fit` and `evaluate` reset the data before their first epoch. What they fetched
until then was a probe, to build the model. `predict` resets after a probe
alone: without one, its only epoch looks like a probe that comes to its end.

With `steps_per_epoch`, several of Keras's epochs may share one iterator over
the data, and an epoch may go on from one iterator to the next.
"""

from __future__ import annotations

import enum


class FitPhase(enum.Enum):
    """The phase of Keras's work with the data, such as a probe or an epoch."""

    NOT_STARTED = enum.auto()  # no epoch is under way; a probe may follow
    PROBE = enum.auto()  # it fetches a batch to build the model, or predicts
    BETWEEN = enum.auto()  # the data was reset, and no epoch is under way
    IN_EPOCH = enum.auto()  # it trains, evaluates, or predicts after a probe


_NEXT = {
    FitPhase.NOT_STARTED: (
        FitPhase.NOT_STARTED,
        FitPhase.PROBE,
        FitPhase.BETWEEN,
    ),
    FitPhase.PROBE: (FitPhase.NOT_STARTED, FitPhase.BETWEEN),
    FitPhase.BETWEEN: (FitPhase.BETWEEN, FitPhase.IN_EPOCH),
    FitPhase.IN_EPOCH: (FitPhase.BETWEEN,),
}


class EpochProgress:
    """Tracks Keras's epochs, and the batches delivered in them."""

    def __init__(self) -> None:
        self.phase = FitPhase.NOT_STARTED
        # How many steps the user wants in the present epoch; `None` without
        # `steps_per_epoch` and the like.
        self.steps: int | None = None
        # How many batches the present iterator has delivered.
        self.delivered = 0
        self.trained = 0  # how many of these were for epochs that have ended
        self._steps_run = 0  # `steps`, in whole executions
        # Iterators that the epoch needs for itself; below 0 if the iterator
        # of the next epoch has begun already.
        self._iterators_due = 0

    @property
    def has_started(self) -> bool:
        """Whether training or evaluation has begun.

        Keras resets the data then.
        """
        return self.phase in (FitPhase.BETWEEN, FitPhase.IN_EPOCH)

    @property
    def is_within_epoch(self) -> bool:
        """Whether an epoch of Keras has begun and has not ended."""
        return self.phase in (FitPhase.PROBE, FitPhase.IN_EPOCH)

    @property
    def delivered_now(self) -> int:
        """How many batches the current iterator has delivered in this epoch."""
        return self.delivered - self.trained

    def _move_to(self, phase: FitPhase) -> None:
        """Changes the phase; no other method changes it."""
        assert phase in _NEXT[self.phase], (self.phase, phase)
        self.phase = phase

    def begin_epoch(
        self,
        steps: int | None = None,
        steps_per_execution: int = 1,
        *,
        continues: bool = False,
    ) -> None:
        """Updates the phase when Keras begins an epoch.

        Args:
            steps: How many steps the user wants; `None` for no limit.
            steps_per_execution: Steps in one call of the train function.
            continues: Whether the epoch goes on with the present iterator.
        """
        if self.is_within_epoch:
            raise ValueError(
                "`on_epoch_begin` was called twice without `on_epoch_end` "
                "having been called."
            )
        started = self.has_started
        self._move_to(FitPhase.IN_EPOCH if started else FitPhase.PROBE)
        self.steps = steps
        executions = -(-(steps or 0) // steps_per_execution)
        self._steps_run = executions * steps_per_execution
        self._iterators_due = 0 if continues else 1

    def begin_iterator(self) -> None:
        """Resets the batch counts when Keras starts a new iterator."""
        self.delivered = self.trained = 0
        self._iterators_due -= 1

    def count_batch(self) -> None:
        """Counts a batch that the current iterator has delivered."""
        self.delivered += 1

    def end_epoch(self, *, is_reset: bool) -> bool:
        """Updates the phase when Keras ends an epoch or resets the data.

        Returns whether this is the first reset, which undoes a probe.
        """
        is_first_reset = is_reset and not self.has_started
        if self._iterators_due >= 0:
            self.trained += self._steps_run
        started = self.has_started or is_first_reset
        self._move_to(FitPhase.BETWEEN if started else FitPhase.NOT_STARTED)
        return is_first_reset

    def lag(self, steps: int | None) -> int:
        """Returns the number of batches delivered but not yet trained on.

        `steps` counts those of the present epoch; `None` after its end.
        """
        if steps is None and self.steps is None:
            return 0
        return max(0, self.delivered_now - (steps or 0))
