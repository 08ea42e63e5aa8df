"""Runs a dataset's epoch hooks, and repeats them after a state is loaded."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Collection
from typing import Any

from keras_fastdata._modules import names_in
from keras_fastdata.building import build, interface, seeding
from keras_fastdata.building.interface import EPOCH_HOOKS, Dataset
from keras_fastdata.building.referred_names import attributes_changed_by_builds
from keras_fastdata.engine import state_dict
from keras_fastdata.engine.planner import EpochPlanner
from keras_fastdata.engine.pool_handle import ForkSafeLock
from keras_fastdata.engine.position import KerasPhase, Position


class Changes:
    """Tracks the changes of a dataset that its workers do not have yet."""

    def __init__(self) -> None:
        # Whether the workers have the dataset as it was before.
        self.are_new = False
        # Whether there may be changes that nobody tells of.
        self._are_expected = True
        self.built: set[str] = set()  # the attributes that builds have set
        self.version = object()  # an object that each change replaces

    def mark(self) -> None:
        """Marks the dataset as changed; undelivered batches are built again."""
        self.version = object()
        self.are_new = True

    def mark_sent(self) -> None:
        """Marks all changes as sent to the workers."""
        self.are_new = False

    def expect(self) -> None:
        """Notes that an epoch of Keras begins: callbacks may change anything.

        With `steps_per_epoch`, that may be amid an epoch of the dataset.
        """
        self._are_expected = True

    def take_expected(self) -> bool:
        """Returns whether to look for changes, and notes that it is done."""
        expected, self._are_expected = self._are_expected, False
        return expected

    def note_assigned(self, name: str, by_build: bool) -> None:
        """Notes that an attribute was assigned or deleted.

        A build may keep notes on `self`; any other code makes a new state.
        """
        if by_build:
            self.built.add(name)
        else:
            self.built.discard(name)
            self.mark()


class HookReplay:
    """Seeds and runs epoch hooks, so that they can be repeated."""

    def __init__(
        self,
        dataset: Dataset,
        planner: EpochPlanner,
        position: Position,
        changes: Changes,
    ) -> None:
        self._planner = planner
        self._position = position
        self._changes = changes
        self._attributes = _attributes_of_hooks(dataset)
        self._ran: list[tuple[str, int]] = []
        # Of a version of the dataset, after that many hooks.
        self._digest: tuple[object, int, str] = None, 0, ""
        # The epoch of a loaded state, until a hook runs or is skipped.
        self._restored: int | None = None
        self._lock = ForkSafeLock()

    @property
    def lock(self) -> Any:
        """The lock that is held while a hook runs."""
        return self._lock.own()

    @property
    def ran(self) -> tuple[tuple[str, int], ...]:
        """The name and the epoch of each hook that has run."""
        return tuple(self._ran)

    @property
    def within_epoch(self) -> bool:
        """Whether Keras is between the begin and the end of an epoch."""
        return self._position.keras_phase is KerasPhase.WITHIN

    def run(
        self,
        dataset: Dataset,
        name: str,
        hook: Callable[[], Any] | None = None,
    ) -> Any:
        """Runs the epoch hook `name`, or the function `hook` in its place.

        Marks the dataset as changed.
        """
        self._restored = None
        try:
            return self._run(dataset, name, self._position.next_epoch, hook)
        finally:
            self._changes.mark()

    def call(self, dataset: Dataset, name: str, hook: Callable[[], Any]) -> Any:
        """Runs a hook now, in place of the user's own call of the hook.

        Skips a hook that has run before the state that was loaded.
        """
        skips = self.skips(name, starting=False)
        result = None if skips else self.run(dataset, name, hook)
        self.note(name)
        return result

    def _run(
        self,
        dataset: Dataset,
        name: str,
        epoch: int,
        hook: Callable[[], Any] | None = None,
    ) -> Any:
        with self.lock:
            stream = self._planner.seed, seeding.HOOK, len(self._ran)
            self._ran.append((name, epoch))
            hook = hook or getattr(dataset, name)
            return build.run_seeded(dataset, hook, stream, epoch)

    def note(self, name: str) -> None:
        """Notes that Keras begins or ends an epoch, if hooks ran or not."""
        begins = name == "on_epoch_begin"
        self._position.note_keras(within=begins)
        if begins:
            self._changes.expect()
        self._restored = None

    def skips(self, name: str, *, starting: bool) -> bool:
        """Returns whether to skip a hook that ran before the state was saved.

        `starting`: whether Keras is only about to begin its first epoch.
        """
        resumes = name == "on_epoch_begin" and self.within_epoch
        is_restored = self._restored == self._position.upcoming
        return is_restored and (starting or resumes)

    def restore(
        self, dataset: Dataset, state: state_dict.State
    ) -> state_dict.State:
        """Runs the hooks of a loaded state that this dataset has not run yet.

        Returns the state; if it was at the end of an epoch, the one after the
        end hook.

        Raises:
            ValueError: The dataset has another length than that of the state.
            LoaderError: The hooks do not do what they did.
        """
        try:
            return self._repeat(dataset, state)
        finally:
            self._changes.mark()

    def _repeat(
        self, dataset: Dataset, state: state_dict.State
    ) -> state_dict.State:
        name = type(dataset).__name__
        for hook, epoch in state.hooks[len(self._ran) :]:
            self._run(dataset, hook, epoch)
        state.check_length(name, interface.length_of(dataset))
        state.check_digest(name, self.digest(dataset))
        if state.within and not state.position:
            if interface.overrides(dataset, "on_epoch_end"):
                self._run(dataset, "on_epoch_end", state.epoch)
            state = dataclasses.replace(state, within=False)
        self._position.note_loaded(within=state.within)
        self._restored = state.epoch if self._ran else None
        return state

    def digest(self, dataset: Dataset) -> str:
        """Returns a digest of the dataset, or "" if no hook has run."""
        count, version = len(self._ran), self._changes.version
        if count and self._digest[:2] != (version, count):
            found = state_dict.digest(dataset, self._attributes)
            self._digest = version, count, found
        return self._digest[-1]


def _attributes_of_hooks(dataset: Dataset) -> Collection[str]:
    """Returns the attributes that hooks name, or that no build changes.

    To be called before the first build, which may set other attributes.
    """
    found = frozenset(vars(dataset))
    if any(interface.overrides(dataset, name) for name in EPOCH_HOOKS):
        found -= attributes_changed_by_builds(dataset) - _named_by_hooks(
            dataset
        )
    return found


def _named_by_hooks(dataset: Dataset) -> set[str]:
    """Returns all names in the code of hooks, and of methods named there."""
    found: set[str] = set()
    waiting: list[str] = [*EPOCH_HOOKS]
    for name in waiting:  # grows
        method: Any = getattr(type(dataset), name, None)
        method = inspect.unwrap(method)
        if isinstance(method, types.FunctionType):
            named = names_in(method.__code__)
            waiting += named - found - {*waiting}
            found |= named
    return found
