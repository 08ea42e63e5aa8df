"""Whether a training step is being measured by itself.

    OFF --pause--> PAUSING --isolate--> ISOLATED
    OFF --isolate--> ISOLATED
    PAUSING, ISOLATED --the step has ended, or was interrupted--> OFF

A `Sampler` alone changes its state. Whoever fetches batches asks for it.
"""

from __future__ import annotations

import enum
from typing import Protocol


class SamplingState(enum.Enum):
    """What fetching a batch must do for a measurement."""

    OFF = enum.auto()  # nothing: workers build as they like
    PAUSING = enum.auto()  # pause the workers: the next step may be measured
    ISOLATED = enum.auto()  # pause them: the device computes one step alone


class Sampler(Protocol):
    """What decides which steps are measured by themselves."""

    @property
    def state(self) -> SamplingState:
        """What fetching a batch must do."""
        ...

    def before_wait(self) -> None:
        """Called by the thread that trains, before it waits for a batch."""
        ...

    def interrupt(self) -> None:
        """Called when other training begins amid a step."""
        ...


class NoSampler:
    """Measures no step."""

    state = SamplingState.OFF

    def before_wait(self) -> None:
        """Nothing is measured."""

    def interrupt(self) -> None:
        """Nothing is measured."""
