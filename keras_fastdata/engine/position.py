"""Keeps track of the latest epoch and the number of the next epoch."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import sys
from collections.abc import Iterator
from typing import NamedTuple

from keras_fastdata.engine.epoch import Epoch, Finish
from keras_fastdata.engine.open_epochs import OpenEpochs
from keras_fastdata.engine.schedule import Schedule
from keras_fastdata.engine.state_dict import State
from keras_fastdata.workers.signals import DeferredSignals


class Place(NamedTuple):
    """The fields of a `State` that identify the next batch and its epoch."""

    epoch: int
    position: int = 0
    shuffle: bool | None = None
    next_epoch: int | None = None
    epoch_batches: int | None = None


class KerasPhase(enum.Enum):
    """Where Keras is: its epochs need not be those of the dataset.

    on_epoch_begin: WITHIN; on_epoch_end: WITHIN -> BETWEEN; a state that is
    loaded: WITHIN if it was saved there, else WITHIN -> OUTSIDE.
    """

    OUTSIDE = enum.auto()  # no epoch has begun, or a state was loaded
    WITHIN = enum.auto()  # an epoch of Keras goes on
    BETWEEN = enum.auto()  # an epoch has ended; callbacks may run


@dataclasses.dataclass
class _Beginning:
    """An epoch that has begun."""

    epoch: Epoch
    # Those of `Position` before it began.
    next_epoch: int
    resumed: State | None
    # Whether `set_epoch` has asked for its number since.
    is_asked_again: bool = False


class Position:
    """Assigns numbers to a dataset's epochs, and tracks the latest epoch."""

    def __init__(self, open_epochs: OpenEpochs) -> None:
        self.next_epoch = 0  # the number of the epoch that begins next
        # The state where that epoch begins; `None`: at its first batch.
        self.resumed: State | None = None
        self.keras_phase = KerasPhase.OUTSIDE
        self._open_epochs = open_epochs
        self._latest: Epoch | None = None  # that a batch was asked for
        # The epoch that has begun last; and the same while it has delivered no
        # batch.
        self._begun: _Beginning | None = None
        self._beginning: _Beginning | None = None

    def begin(self, epoch: Epoch) -> None:
        """Begins an epoch, and sets the number of the next epoch."""
        with DeferredSignals():  # no two epochs have one number
            self._begun = self._beginning = _Beginning(
                epoch, self.next_epoch, self.resumed
            )
            later = None if self.resumed is None else self.resumed.next_epoch
            epoch.activate()
            self.resumed = None
            self.next_epoch = self.next_epoch + 1 if later is None else later

    def ask_for(self, number: int) -> None:
        """Notes that the program asks for the epoch that is upcoming.

        If that epoch has begun, nothing tells whether its iterator goes on, or
        a new one is to begin the epoch: an interrupt may have ended the first.
        """
        begun = self._begun
        if begun is not None and not begun.epoch.delivered:
            begun.is_asked_again = number == begun.next_epoch

    def begin_again(self) -> bool:
        """Takes back a begin, for a new iterator that begins the same epoch.

        Returns whether to do so: the epoch must then be unplanned.
        """
        begun = self._begun
        if begun is None or not begun.is_asked_again or begun.epoch.delivered:
            return False
        self.next_epoch, self.resumed = begun.next_epoch, begun.resumed
        self._begun = self._beginning = None
        return True

    def note_delivery(self, epoch: Epoch) -> None:
        """Notes that an epoch has delivered a batch."""
        self._latest, self._beginning = epoch, None

    @property
    def latest_schedule(self) -> Schedule | None:
        """The order of the epoch that delivered the latest batch, if known."""
        return None if self._latest is None else self._latest.schedule

    def count_delivered(self, number: int) -> int:
        """Returns how many batches of an epoch consumers have."""
        epoch = self._latest
        if epoch is None or epoch.number is None or epoch.number < number:
            return 0
        if epoch.number > number:
            return sys.maxsize  # all that will ever be
        return epoch.position_before(0)

    @property
    def upcoming(self) -> int:
        """The number of the epoch that delivers its first batch next.

        That epoch may have begun: Keras builds a model from its first batch.
        """
        beginning = self._beginning
        epoch = self._latest if beginning is None else beginning.epoch
        if (
            epoch is None
            or epoch.number is None
            or epoch.delivered
            or epoch.is_finished
            or not self._open_epochs.is_held(epoch)
        ):
            return self.next_epoch
        return epoch.number

    def note_finish(self, epoch: Epoch) -> None:
        """Notes that an epoch is finished."""
        begun = self._begun
        if begun is None or begun.epoch is not epoch:
            return
        if epoch.finished_by is Finish.FAILED:
            self._note_failure(epoch)
        self._beginning = None
        is_dropped = epoch.finished_by is Finish.ABANDONED
        if epoch.delivered or not (begun.is_asked_again and is_dropped):
            self._begun = None  # else a new iterator begins this epoch

    @contextlib.contextmanager
    def noting_failure(self, epoch: Epoch, ahead: Epoch) -> Iterator[None]:
        """Notes if a batch that `ahead` fetches early for `epoch` raises."""
        try:
            yield
        except Exception:
            if ahead.finished_by is Finish.FAILED:
                self._note_failure(epoch)
            raise

    def _note_failure(self, epoch: Epoch) -> None:
        """Notes that a batch has raised an error, maybe the first batch."""
        if self._begun is not None and self._begun.epoch is epoch:
            self._latest, self._beginning = epoch, None

    def note_keras(self, *, within: bool) -> None:
        """Notes that Keras begins or ends an epoch."""
        self.keras_phase = KerasPhase.WITHIN if within else KerasPhase.BETWEEN

    def note_loaded(self, *, within: bool) -> None:
        """Notes that a state was loaded, which may be within a Keras epoch."""
        if within:
            self.keras_phase = KerasPhase.WITHIN
        elif self.keras_phase is KerasPhase.WITHIN:
            self.keras_phase = KerasPhase.OUTSIDE

    def go_to(self, state: State) -> None:
        """Makes the next epoch begin at the position of `state`."""
        self.next_epoch, self.resumed = state.epoch, state
        self._begun = self._beginning = None

    def place(self, epoch: Epoch | None, lag: int) -> State | Place:
        """Returns the position that an epoch had `lag` batches ago.

        `None` stands for the epoch that delivered the latest batch. If the next
        epoch begins at a loaded state, the result is that state.
        """
        later, resumed = self.next_epoch, self.resumed
        if epoch is None:
            epoch, beginning = self._latest, self._beginning
            if beginning is not None and self._open_epochs.is_held(
                beginning.epoch
            ):
                later, resumed = beginning.next_epoch, beginning.resumed
        if resumed is not None:
            return resumed
        if epoch is None or not epoch.has_begun:
            return Place(later)
        # What has raised an error is still to come.
        goes_on = epoch.finished_by is Finish.FAILED
        requeued = epoch.acknowledgements.has_requeued
        if epoch.is_finished and not (lag or requeued or goes_on):
            return Place(later)
        assert epoch.number is not None
        assert epoch.schedule is not None
        position = epoch.position_before(lag)
        # Nothing tells whether the end has been asked for.
        if position == epoch.schedule.num_batches:
            return Place(later, 0, epoch.shuffle)
        return Place(
            epoch.number,
            position * epoch.schedule.shard.count,
            epoch.shuffle,
            None if later == epoch.number + 1 else later,
            epoch.schedule.total,
        )
