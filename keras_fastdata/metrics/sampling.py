"""Defines the states of a sampler, which measures single training steps.

    OFF --pause--> PAUSING --isolate--> ISOLATED
    OFF --isolate--> ISOLATED
    PAUSING, ISOLATED --the step has ended, or was interrupted--> OFF

Only a `Sampler` changes its state. The code that fetches batches reads it.
"""

from __future__ import annotations

import enum
from typing import Protocol


class SamplingState(enum.Enum):
    """The progress of measuring one training step with paused workers."""

    OFF = enum.auto()  # no effect: workers build ahead
    PAUSING = enum.auto()  # pause the workers: the next step may be measured
    ISOLATED = enum.auto()  # pause them: the device computes one step alone


class Sampler(Protocol):
    """Decides which training steps are measured while the workers pause."""

    @property
    def state(self) -> SamplingState:
        """The current `SamplingState`."""
        ...

    def before_wait(self) -> None:
        """Prepares the sampler for a wait for the next batch."""
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
