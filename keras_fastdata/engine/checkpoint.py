"""Saves and restores the state of a dataset."""

from __future__ import annotations

import dataclasses
import logging

from keras_fastdata.building import interface
from keras_fastdata.building.interface import Dataset
from keras_fastdata.building.referred_names import attributes_changed_by_builds
from keras_fastdata.building.seeding import PRIVATE
from keras_fastdata.engine.autotune import SettingsInEffect
from keras_fastdata.engine.epoch import Epoch
from keras_fastdata.engine.hook_replay import HookReplay
from keras_fastdata.engine.planner import EpochPlanner
from keras_fastdata.engine.pool_handle import PoolHandle
from keras_fastdata.engine.position import Position
from keras_fastdata.engine.prefetcher import Prefetcher
from keras_fastdata.engine.state_dict import State

_log = logging.getLogger("keras_fastdata")


@dataclasses.dataclass(eq=False)
class Checkpoint:
    """Saves and restores the state of one dataset."""

    _planner: EpochPlanner
    _position: Position
    _prefetcher: Prefetcher
    _pool: PoolHandle
    _hooks: HookReplay
    _in_effect: SettingsInEffect

    @property
    def resumes(self) -> bool:
        """Whether the next epoch begins at a loaded state."""
        return self._position.resumed is not None

    @property
    def resumed_order(self) -> bool:
        """Whether the order of the resumed epoch is shuffled."""
        state = self._position.resumed
        return bool(state is not None and state.shuffle)

    @property
    def num_done(self) -> int:
        """The number of batches of the resumed epoch that are already done."""
        state = self._position.resumed
        return 0 if state is None else self._planner.position(state)

    def save(
        self, dataset: Dataset, epoch: Epoch | None = None, lag: int = 0
    ) -> State:
        """Returns the dataset's state as it was `lag` batches ago."""
        with self._hooks.lock:  # no state shows a part of what a hook does
            try:
                with self._pool.lock:
                    place = self._position.place(epoch, lag)
            finally:
                self._pool.end_invalid()
            if isinstance(place, State):
                return place
            length, total = interface.length_of(dataset), place.epoch_batches
            return State(
                self._planner.seed,
                place.epoch,
                place.position,
                length,
                place.shuffle,
                self._hooks.within_epoch,
                self._hooks.ran,
                self._hooks.digest(dataset),
                place.next_epoch,
                None if total == length else total,
            )

    def restore(self, dataset: Dataset, state: State) -> None:
        """Resumes a dataset from a state, and repeats the epoch hooks.

        Raises:
            ValueError: The state belongs to another dataset.
            LoaderError: The repeated hooks do something else.
        """
        with self._hooks.lock:
            planner = self._planner
            given, known = planner.given_seed, planner.known_seed
            hooks = self._hooks.ran
            planner.position(state)  # which may refuse it
            seed = known if given is None and hooks else given
            state.check(self._pool.name, seed, hooks, given is None)
            planner.take_seed(state.seed)
            state = self._hooks.restore(dataset, state)
            if not self._in_effect.now.kind.has_copies:
                _warn_of_what_builds_change(dataset, self._pool.name)
            self._pool.run(self._go_to, state, state.seed != known)

    def count_delivered(self, epoch: int) -> int:
        """Returns how many batches of an epoch consumers have."""
        return self._position.count_delivered(epoch)

    def set_epoch(self, dataset: Dataset, epoch: int) -> None:
        """Makes the dataset continue with the first batch of `epoch`.

        If that epoch is next, it may be resumed amid its batches: it stays.
        """
        if epoch == self._position.upcoming:
            self._pool.run(self._position.ask_for, epoch)
            return
        state = State(
            self._planner.seed,
            epoch,
            0,
            interface.length_of(dataset),
            shuffle=None,
            hooks=self._hooks.ran,
            digest=self._hooks.digest(dataset),
        )
        self._pool.run(self._go_to, state, False)

    def _go_to(self, state: State, is_new_seed: bool) -> None:
        self._position.go_to(state)
        self._prefetcher.unplan(self._pool.workers)
        if is_new_seed:  # workers are made with it
            self._pool.invalidate()


def _warn_of_what_builds_change(dataset: Dataset, name: str) -> None:
    """Warns that states lack what builds have changed on the dataset.

    What is `None` at first, such as a file, is opened by builds.
    """
    changed = sorted(attributes_changed_by_builds(dataset))
    if kept := [
        each for each in changed if vars(dataset).get(each) is not None
    ]:
        _log.warning(
            "%s is resumed. Its builds change %s, and the saved state does not "
            "have what they have changed. If batches depend on it, they differ "
            "from those of a training that was not interrupted.",
            name,
            ", ".join(
                "what it was given"
                if each.startswith(PRIVATE)
                else f"`self.{each}`"
                for each in kept
            ),
        )
