"""Plans the epochs of one dataset: seed, shard and order of batches."""

from __future__ import annotations

import dataclasses
import logging
import weakref

from keras_fastdata.building import interface
from keras_fastdata.building.drawn_seed import draw_seed
from keras_fastdata.building.interface import Dataset
from keras_fastdata.engine.epoch import Epoch
from keras_fastdata.engine.schedule import plan_epoch
from keras_fastdata.engine.settings import Settings
from keras_fastdata.engine.sharding import Shard, shard_of
from keras_fastdata.engine.state_dict import State

_log = logging.getLogger("keras_fastdata")


@dataclasses.dataclass(eq=False)
class EpochPlanner:
    """Plans the epochs of one dataset in this process."""

    _dataset: weakref.ref[Dataset]
    _name: str
    _settings: Settings

    def __post_init__(self) -> None:
        self._fixed_seed = self._settings.seed  # given or loaded
        self._own_seed: int | None = None  # drawn, or 0, where none is fixed
        self.shard = Shard()  # of this process, as of the last `take_shard`

    @property
    def seed(self) -> int:
        """The base seed; if none is given, a random seed is drawn at first use.

        `keras.utils.set_random_seed` may be called before that.
        """
        dataset = self._dataset()
        if self.known_seed is None and dataset is not None:
            self.take_shard(dataset)
        seed = self.known_seed
        if seed is None:
            seed = self._own_seed = draw_seed(dataset)
        return seed

    @property
    def given_seed(self) -> int | None:
        """The constructor argument `seed`; `None` if it was not given."""
        return self._settings.seed

    @property
    def known_seed(self) -> int | None:
        """The base seed, or `None` before it is given, loaded or drawn."""
        fixed = self._fixed_seed
        return self._own_seed if fixed is None else fixed

    def take_settings(self, settings: Settings) -> None:
        """Replaces the settings and, if they have a seed, the base seed."""
        self._settings = settings
        if settings.seed is not None:
            self._fixed_seed = settings.seed

    def take_seed(self, seed: int) -> None:
        """Replaces the base seed with the seed of a loaded state."""
        self._fixed_seed = seed

    def take_shard(self, dataset: Dataset) -> Shard:
        """Determines and stores the shard of this process, and returns it.

        Sets the seed as well: that of several shards is 0 in all processes,
        unless one is given or loaded.
        """
        shard = shard_of(self._settings.shard, dataset)
        if shard != self.shard:
            self.shard = shard
            if shard.count > 1:
                self._own_seed = 0
                is_found = self._settings.shard == "auto"
                level = logging.WARNING if is_found else logging.INFO
                _log.log(level, "%s has %s.", self._name, shard)
        return shard

    def position(self, state: State) -> int:
        """Returns how many batches of this shard precede `state.position`."""
        dataset = self._dataset()
        if dataset is not None:
            self.take_shard(dataset)
        return self.shard.position(state.position)

    def start(self, epoch: Epoch, state: State) -> None:
        """Sets where an epoch begins that is resumed from a state."""
        epoch.start_at(self.position(state), state.epoch_batches)

    def ensure_order(self, epoch: Epoch, dataset: Dataset) -> None:
        """Sets the order of an epoch that has none."""
        if epoch.schedule is None:
            shard = self.take_shard(dataset)
            self.plan(epoch, interface.length_of(dataset), shard)

    def plan(self, epoch: Epoch, num_batches: int | None, shard: Shard) -> None:
        """Sets an epoch's order; `num_batches` is the total of all shards.

        An epoch that is resumed may have a total of its own.
        """
        assert epoch.number is not None
        schedule = plan_epoch(
            num_batches if epoch.total is None else epoch.total,
            shuffle=epoch.shuffle,
            seed=self.seed,
            epoch=epoch.number,
            shard=shard,
        )
        epoch.plan(epoch.number, schedule)
