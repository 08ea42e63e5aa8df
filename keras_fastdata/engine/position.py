"""Where a dataset stands: the next epoch, and how far the latest one is."""

from __future__ import annotations

from typing import NamedTuple

from keras_fastdata.engine.epoch import Epoch
from keras_fastdata.engine.open_epochs import OpenEpochs
from keras_fastdata.engine.state_dict import State


class Place(NamedTuple):
    """A place in the batches of a dataset.

    Attributes:
        epoch: The epoch of the next batch.
        position: How many batches come before it in that epoch.
        shuffle: Whether the order of that epoch is drawn; `None` before it has
            begun.
        next_epoch: The number of the epoch that begins after that one; `None`
            if that is the one behind it.
    """

    epoch: int
    position: int = 0
    shuffle: bool | None = None
    next_epoch: int | None = None


class Position:
    """Numbers the epochs of one dataset, and knows the latest one.

    Args:
        open_epochs: The epochs that somebody still iterates over.

    Attributes:
        next_epoch: The number of the epoch that begins next.
        resumed: The state that it begins at; `None`: at its first batch.
    """

    def __init__(self, open_epochs: OpenEpochs) -> None:
        self.next_epoch = 0
        self.resumed: State | None = None
        self._open_epochs = open_epochs
        self._latest: Epoch | None = None  # that a batch was delivered from
        # The epoch that has begun last, while it has delivered no batch; and
        # `next_epoch` and `resumed` before it began.
        self._beginning: tuple[Epoch, int, State | None] | None = None

    def begin(self, epoch: Epoch) -> None:
        """Has an epoch begin, and numbers the next one."""
        later = None if self.resumed is None else self.resumed.next_epoch
        self._beginning = epoch, self.next_epoch, self.resumed
        self.resumed = None
        epoch.activate()
        if later is None:
            later = self.next_epoch + 1
        self.next_epoch = later

    def note_delivery(self, epoch: Epoch) -> None:
        """Notes that an epoch has delivered a batch."""
        self._latest, self._beginning = epoch, None

    def note_finish(self, epoch: Epoch) -> None:
        """Notes that an epoch is finished."""
        if self._beginning is not None and self._beginning[0] is epoch:
            self._beginning = None

    def go_to(self, state: State) -> None:
        """Has the next epoch begin at a state."""
        self.next_epoch, self.resumed = state.epoch, state
        self._beginning = None

    def place(self, epoch: Epoch | None, lag: int) -> State | Place:
        """Returns where an epoch stood before its latest `lag` batches.

        Args:
            epoch: The epoch; `None`: the latest one. While another one begins,
                that is the one before.
            lag: How many of its batches do not count.

        Returns:
            The state that the next epoch begins at, if it was resumed.
        """
        later, resumed = self.next_epoch, self.resumed
        if epoch is None:
            epoch, beginning = self._latest, self._beginning
            if beginning is not None and self._open_epochs.is_held(
                beginning[0]
            ):
                _, later, resumed = beginning
        if resumed is not None:
            return resumed
        if (
            epoch is None
            or not epoch.has_begun
            or (epoch.is_finished and not lag)
        ):
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
        )
