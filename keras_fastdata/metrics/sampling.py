"""Defines the states in the measurement of a single training step.

    OFF --pause--> PAUSING --isolate--> ISOLATED
    OFF --isolate--> ISOLATED
    PAUSING, ISOLATED --the step has ended, or was interrupted--> OFF

Only a `Sampler` changes its state. The code that fetches batches reads it.
"""

from __future__ import annotations

import enum
from typing import Protocol


class SamplingState(enum.Enum):
    """Whether the workers pause so that a training step can be measured."""

    OFF = enum.auto()  # no effect: workers build ahead
    PAUSING = enum.auto()  # pause the workers: the next step may be measured
    ISOLATED = enum.auto()  # pause them: the device computes one step alone


class Sampler(Protocol):
    """Decides which steps are measured alone, while the workers pause."""

    @property
    def state(self) -> SamplingState:
        """The current `SamplingState`."""
        ...

    def before_wait(self) -> None:
        """Informs the sampler that training now waits for a batch."""
        ...

    def interrupt(self) -> None:
        """Cancels an unfinished measurement, because an epoch begins."""
        ...


class NoSampler:
    """A sampler that never measures a step."""

    state = SamplingState.OFF

    def before_wait(self) -> None:
        """Does nothing."""

    def interrupt(self) -> None:
        """Does nothing."""
