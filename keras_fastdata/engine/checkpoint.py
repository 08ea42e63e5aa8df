"""Saves and restores the state of a dataset."""

from __future__ import annotations

from keras_fastdata.building import build
from keras_fastdata.engine.changes import Changes
from keras_fastdata.engine.epoch import Epoch
from keras_fastdata.engine.hook_replay import HookReplay
from keras_fastdata.engine.planner import EpochPlanner
from keras_fastdata.engine.pool_handle import PoolHandle
from keras_fastdata.engine.position import Position
from keras_fastdata.engine.prefetcher import Prefetcher
from keras_fastdata.engine.state_dict import State


class Checkpoint:
    """Saves and restores the state of one dataset.

    Args:
        planner: Knows seed and shard.
        position: Knows the next epoch.
        prefetcher: What was asked for before another epoch is next.
        pool: The workers.
        hooks: The epoch hooks that have run.
        changes: What has changed of the dataset.
    """

    def __init__(
        self,
        planner: EpochPlanner,
        position: Position,
        prefetcher: Prefetcher,
        pool: PoolHandle,
        hooks: HookReplay,
        changes: Changes,
    ) -> None:
        self._planner = planner
        self._position = position
        self._prefetcher = prefetcher
        self._pool = pool
        self._hooks = hooks
        self._changes = changes

    @property
    def resumes(self) -> bool:
        """Whether a state says where the next epoch begins."""
        return self._position.resumed is not None

    @property
    def resumed_order(self) -> bool:
        """Whether the order of the resumed epoch is drawn."""
        state = self._position.resumed
        return bool(state is not None and state.shuffle)

    @property
    def num_done(self) -> int:
        """How many batches of the resumed epoch this process had before."""
        state = self._position.resumed
        return 0 if state is None else self._planner.position(state)

    def save(
        self, dataset: build.Dataset, epoch: Epoch | None = None, lag: int = 0
    ) -> State:
        """Returns where an epoch, or the latest one, stands.

        See `Position.place`.
        """
        with self._hooks.lock:  # no state shows a part of what a hook does
            try:
                with self._pool.lock:
                    place = self._position.place(epoch, lag)
            finally:
                self._pool.end_invalid()
            if isinstance(place, State):
                return place
            return State(
                self._planner.seed,
                place.epoch,
                place.position,
                build.length_of(dataset),
                place.shuffle,
                self._hooks.within_epoch,
                self._hooks.ran,
                self._hooks.digest(dataset),
                place.next_epoch,
            )

    def restore(self, dataset: build.Dataset, state: State) -> None:
        """Has the next epoch begin where another dataset stood.

        Raises:
            ValueError: The state is that of another dataset.
            LoaderError: The epoch hooks do not do what they did.
        """
        with self._hooks.lock:
            planner = self._planner
            given, known = planner.given_seed, planner.known_seed
            hooks = self._hooks.ran
            planner.position(state)  # which may refuse it
            seed = known if given is None and hooks else given
            state.check(self._pool.name, seed, hooks, given is None)
            planner.take_seed(state.seed)
            try:
                state = self._hooks.restore(dataset, state)
            finally:
                self._changes.mark()
            self._pool.run(self._go_to, state, state.seed != known)

    def set_epoch(self, dataset: build.Dataset, epoch: int) -> None:
        """Has the next epoch be that one, from its first batch."""
        position = self._position
        if epoch == position.next_epoch and position.resumed is None:
            return
        state = State(
            self._planner.seed,
            epoch,
            0,
            build.length_of(dataset),
            shuffle=None,
            hooks=self._hooks.ran,
            digest=self._hooks.digest(dataset),
        )
        self._pool.run(self._go_to, state, False)

    def _go_to(self, state: State, is_new_seed: bool) -> None:
        self._position.go_to(state)
        self._prefetcher.restart(self._pool.workers)
        if is_new_seed:  # workers are made with it
            self._pool.invalidate()
