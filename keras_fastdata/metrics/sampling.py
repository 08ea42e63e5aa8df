"""The states of measuring a training step alone.

    OFF --pause--> PAUSING --isolate--> ISOLATED
    OFF --isolate--> ISOLATED
    PAUSING, ISOLATED --the step has ended, or was interrupted--> OFF

Only a `Sampler` changes its state. The code that fetches batches reads it.
"""

from __future__ import annotations

import enum
from typing import Protocol


class SamplingState(enum.Enum):
    """How a measurement affects fetching a batch."""

    OFF = enum.auto()  # no effect: workers build ahead
    PAUSING = enum.auto()  # pause the workers: the next step may be measured
    ISOLATED = enum.auto()  # pause them: the device computes one step alone


class Sampler(Protocol):
    """Decides which steps are measured alone."""

    @property
    def state(self) -> SamplingState:
        """The present state."""
        ...

    def before_wait(self) -> None:
        """Called by the thread that trains, before it waits for a batch."""
        ...

    def interrupt(self) -> None:
        """Called when another training begins within a step."""
        ...


class NoSampler:
    """Measures no step."""

    state = SamplingState.OFF

    def before_wait(self) -> None:
        """Does nothing."""

    def interrupt(self) -> None:
        """Does nothing."""
