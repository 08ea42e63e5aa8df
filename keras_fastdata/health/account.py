"""Divides the time of a `fit` into parts, such as steps and waits for data.

Each second from the call of `fit` belongs to one part. Waiting is what
`data_wait` counts: the time that training would save if its batches took no
time to build. So a wait while a device computes belongs to the steps, and so
much of a step as builds beside it cost belongs to waiting.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from keras_fastdata.metrics import formatting


@dataclasses.dataclass(frozen=True)
class TimeAccount:
    """How many seconds each activity of a `fit` or of an epoch took.

    The fields add up to the whole duration.

    Attributes:
        first_batch_s: Starting workers, and the wait for the first batch.
        compiling_s: Building the model, and steps that compiled.
        steps_s: Training steps, with what callbacks do for each batch.
        waiting_s: Waiting for training data, without the first batch: the sum
            of `data_wait * wall_s` over all epochs, without epoch hooks.
        validation_s: Validation, without its waits.
        validation_wait_s: Waiting for validation data, likewise.
        hooks_s: `on_epoch_begin` and `on_epoch_end` of datasets.
        saving_s: Keras's callbacks that save, such as `ModelCheckpoint`, and
            `DatasetCheckpoint`.
        callbacks_s: Other callbacks, between epochs.
    """

    first_batch_s: float = 0.0
    compiling_s: float = 0.0
    steps_s: float = 0.0
    waiting_s: float = 0.0
    validation_s: float = 0.0
    validation_wait_s: float = 0.0
    hooks_s: float = 0.0
    saving_s: float = 0.0
    callbacks_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The sum of all parts, in seconds."""
        return math.fsum(dataclasses.astuple(self))

    @property
    def parts(self) -> list[tuple[str, float]]:
        """Name and seconds of each part longer than 0 s, longest part first."""
        found = dataclasses.asdict(self)
        parts = [(_NAMES[name], seconds) for name, seconds in found.items()]
        return sorted((p for p in parts if p[1] > 0), key=lambda p: -p[1])

    def plus(self, other: TimeAccount, times: float = 1.0) -> TimeAccount:
        """Returns `self + times * other`, computed for each part."""
        ours, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        pairs = zip(ours, theirs, strict=True)
        return TimeAccount(*(one + times * two for one, two in pairs))

    def text(self, least_s: float = 0.0) -> str:
        """Returns the parts of at least `least_s` seconds as text.

        Such as "steps 2.6 s, compiling 1.3 s"; empty if there are none.
        """
        return ", ".join(
            f"{name} {formatting.duration(seconds)}"
            for name, seconds in self.parts
            if seconds >= least_s
        )

    def __str__(self) -> str:
        return f"{formatting.duration(self.total_s)} in all: {self.text()}."


_NAMES = {
    "first_batch_s": "start and first batch",
    "compiling_s": "compiling",
    "steps_s": "steps",
    "waiting_s": "waiting for data",
    "validation_s": "validation",
    "validation_wait_s": "validation waiting for data",
    "hooks_s": "epoch hooks",
    "saving_s": "saving",
    "callbacks_s": "other callbacks",
}


class EpochTimes(NamedTuple):
    """The durations measured in one epoch or validation, in seconds.

    Attributes:
        first_wait_s: The wait for its first batch.
        wait_s: Waiting for batches, as `data_wait` counts.
        hook_s: Epoch hooks of the dataset.
        compiling_s: Steps that compiled.
        excluded_s: What belongs to no step, besides saving: setting up a
            validation, or waits for the data of an evaluation within a
            callback.
    """

    first_wait_s: float = 0.0
    wait_s: float = 0.0
    hook_s: float = 0.0
    compiling_s: float = 0.0
    excluded_s: float = 0.0


class FitTimer:
    """Divides the duration of one `fit` among the parts of a `TimeAccount`.

    Args:
        began_s: When `fit` was called, by `time.monotonic`.

    Attributes:
        account: The account up to the latest moment that was told.
    """

    def __init__(self, began_s: float) -> None:
        self.account = self._before = TimeAccount()
        self._until_s = began_s
        self._has_first_batch = False

    def _rest_s(self, now_s: float, known_s: float) -> float:
        """Returns the seconds since the previous call, minus `known_s`.

        The first call counts from the beginning of `fit`.
        """
        rest_s = now_s - self._until_s - known_s
        self._until_s = now_s
        return rest_s

    def _rest_and_wait_s(
        self, now_s: float, times: EpochTimes
    ) -> tuple[float, float]:
        """Divides the time since the last update into steps and waits.

        Time of hooks, compiling time and excluded time are left out.

        Returns:
            The steps and the waits, both at least 0.
        """
        known_s = times.hook_s + times.compiling_s + times.excluded_s
        rest_s = self._rest_s(now_s, known_s)
        wait_s = max(0.0, min(times.wait_s, rest_s))
        return rest_s - wait_s, wait_s

    def _add(self, **parts_s: float) -> None:
        self.account = self.account.plus(TimeAccount(**parts_s))

    def end_start(self, now_s: float, first_batch_s: float) -> None:
        """Ends the starting phase, and adds its time to the account.

        The phase consists of the first batch and of building the model.
        """
        rest_s = self._rest_s(now_s, first_batch_s)
        self._add(first_batch_s=first_batch_s, compiling_s=rest_s)

    def add_saving(self, seconds: float) -> None:
        """Adds the seconds that a callback took to save."""
        self._until_s += seconds  # all other parts begin later by that
        self._add(saving_s=seconds)

    def end_callbacks(self, now_s: float) -> None:
        """Ends a phase of callbacks, and adds its time to the account."""
        self._add(callbacks_s=self._rest_s(now_s, 0.0))

    def end_epoch(self, now_s: float) -> TimeAccount:
        """Ends an epoch, and returns the account of this epoch alone."""
        self.end_callbacks(now_s)
        before, self._before = self._before, self.account
        return self.account.plus(before, -1.0)

    def end_steps(
        self, now_s: float, times: EpochTimes, *, validates: bool
    ) -> None:
        """Ends the steps of an epoch, and adds their time to the account."""
        steps_s, wait_s = self._rest_and_wait_s(now_s, times)
        first_s = 0.0
        if not self._has_first_batch:
            first_s = min(times.first_wait_s, wait_s)
        self._has_first_batch = True
        self._add(
            steps_s=steps_s,
            first_batch_s=first_s,
            waiting_s=wait_s - first_s,
            hooks_s=times.hook_s,
            compiling_s=times.compiling_s,
            validation_s=times.excluded_s if validates else 0.0,
            callbacks_s=0.0 if validates else times.excluded_s,
        )

    def end_validation(self, now_s: float, times: EpochTimes) -> None:
        """Ends a validation, and adds its time to the account."""
        steps_s, wait_s = self._rest_and_wait_s(now_s, times)
        self._add(
            validation_s=steps_s + times.excluded_s,
            validation_wait_s=wait_s,
            hooks_s=times.hook_s,
            compiling_s=times.compiling_s,
        )
