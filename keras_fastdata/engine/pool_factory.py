"""Creates and updates the workers that a dataset's settings specify."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import sys
import weakref
from collections.abc import Callable
from typing import Any

from keras_fastdata.building import build, interface, keras_draws
from keras_fastdata.building.held_generators import Firsts, Search
from keras_fastdata.building.interface import Dataset
from keras_fastdata.building.script_names import show_script
from keras_fastdata.engine import pickling_errors
from keras_fastdata.engine.autotune import SettingsInEffect
from keras_fastdata.engine.epoch import Epoch
from keras_fastdata.engine.outside_state import (
    Change,
    OutsideState,
    note_nothing_is_built,
)
from keras_fastdata.engine.outside_values import OutsideValues
from keras_fastdata.engine.planner import EpochPlanner
from keras_fastdata.engine.position import KerasPhase, Position
from keras_fastdata.engine.settings import Settings
from keras_fastdata.engine.told_results import check_results
from keras_fastdata.engine.told_state import Told, finish
from keras_fastdata.errors import LoaderError
from keras_fastdata.metrics.worker_kinds import WorkerKind
from keras_fastdata.workers import forks, log_forwarding
from keras_fastdata.workers.base import PoolPlan, WorkerPool
from keras_fastdata.workers.inline import InlinePool
from keras_fastdata.workers.portable import requirements
from keras_fastdata.workers.process.pool import ProcessPool
from keras_fastdata.workers.thread import ThreadPool


def import_process_workers(settings: Settings) -> None:
    """Imports the code that starts processes, if the settings may need it.

    Not with the first batch: a thread may ask for that while another one forks,
    and the child would wait for the thread's import for ever.
    """
    if not (settings.use_multiprocessing or settings.workers == "auto"):
        return
    importlib.import_module("keras_fastdata.workers.portable.channel")
    with contextlib.suppress(ImportError):  # the system lacks what it needs
        importlib.import_module("keras_fastdata.workers.process.channel")


@dataclasses.dataclass(eq=False)
class PoolFactory:
    """Creates a dataset's workers, and sends them the dataset's changes."""

    _dataset: weakref.ref[Dataset]
    _name: str
    _in_effect: SettingsInEffect
    _planner: EpochPlanner
    _position: Position

    def __post_init__(self) -> None:
        self._receiver = log_forwarding.Receiver()  # of workers' log records
        self._outside = OutsideState()  # as the workers got or saw it
        self._seed: int | None = None  # as the workers got it

    def notice_changes(
        self, dataset: Dataset, is_due: bool, is_marked: bool
    ) -> Change:
        """Returns what may have changed without anybody telling, if `is_due`.

        These are changes of the global state outside the dataset, and what a
        hook has changed in place. Keras may have fetched an epoch's first batch
        before the first hooks of callbacks. `is_marked` says that the program
        has changed the dataset.
        """
        if not is_due:
            return Change.NONE
        change = self._outside.notice_changes(is_marked=is_marked)
        builds_ahead = self._in_effect.now.kind.builds_ahead
        if change is Change.BY_BUILDS and not builds_ahead:
            change = Change.NONE
        if interface.has_unnoticed_hook(dataset):
            change = max(change, Change.BY_PROGRAM)
        return change

    def values_for_directory(self, dataset: Dataset) -> OutsideValues:
        """Returns the global values on which a cache's directory depends."""
        return self._outside.values_for_directory(dataset)

    def find_unsent_change(self) -> str | None:
        """Returns what workers lack amid an epoch; see `OutsideState`."""
        has_copies = self._in_effect.now.kind.has_copies
        return self._outside.find_change() if has_copies else None

    def has_drifted(self) -> bool:
        """Returns whether batches that are built now may differ from before."""
        is_here = not self._in_effect.now.kind.has_copies
        return is_here and (
            self._outside.compare(is_quick=True) >= Change.BY_PROGRAM
        )

    @property
    def lacks_values(self) -> bool:
        """Whether workers may build other batches than this process would."""
        has_copies = self._in_effect.now.kind.has_copies
        return has_copies and (
            self._outside.has_lost or self._receiver.tells_of_lack
        )

    def note_delivery(self, epoch: Epoch, workers: WorkerPool) -> None:
        """Notes that a batch was delivered, or that the epoch has ended."""
        if (epoch.is_finished or epoch.is_delivered) and not (
            self._in_effect.now.kind.has_copies or epoch.ahead or workers.busy
        ):
            note_nothing_is_built()

    def note_peek(self, workers: WorkerPool | None) -> None:
        """Notes that first batches were built early.

        Inline, and in threads with a cache, nothing more is built until the
        epoch begins. So what changes until then, the program has changed.
        Without a cache, threads go on to build, and their batches are dropped
        at any change.
        """
        kind = self._in_effect.now.kind
        is_quiet = workers is None or not workers.busy
        if kind is WorkerKind.INLINE or (
            is_quiet and not self.builds_before_epoch
        ):
            self._outside.look_again()

    @property
    def builds_before_epoch(self) -> bool:
        """Whether workers may build more than the first batches before it."""
        settings = self._in_effect.now
        return settings.kind.has_copies or settings.cache is None

    def note_lost_state(self) -> None:
        """Notes that workers are replaced because they lack global state."""
        self._outside.stop_watching()

    def has_seed_changed(self) -> bool:
        """Returns whether the base seed differs from the workers' seed."""
        return self._seed != self._planner.known_seed

    def create(self) -> WorkerPool:
        """Creates the workers that the settings specify.

        Raises:
            DatasetPicklingError: They need a copy of the dataset, which cannot
                be pickled.
            LoaderError: They cannot be started.
        """
        settings = self._in_effect.now
        if settings.kind.builds_ahead and sys.is_finalizing():
            # Python waits for a new thread for ever.
            raise LoaderError(
                f"{self._name} cannot start workers, because the interpreter "
                "ends. Use `workers=0`, or iterate before the end of the "
                "program."
            )
        self._look_outside()
        self._seed = self._planner.seed
        if settings.kind.has_copies:
            with pickling_errors.explained(self._dataset):
                return self._create_remote_pool(settings)
        if settings.kind is WorkerKind.INLINE:
            return self.create_inline()
        keras_draws.take_turns()
        forks.wait_for_builds()
        return ThreadPool(
            self._builder(settings.count),
            self._name,
            settings.count,
            settings.batch_timeout,
        )

    def create_inline(self) -> InlinePool:
        """Returns a pool that builds batches in the calling thread."""
        return InlinePool(self._builder(threads=0), self._name)

    def _create_remote_pool(self, settings: Settings) -> WorkerPool:
        """Creates process or Ray workers, each with a copy of the dataset."""
        cached = settings.cache is not None
        maker = _BuilderMaker(
            self._dataset, self._planner.seed, cached, self._outside
        )
        common: dict[str, Any] = {
            "dataset": self._name,
            "count": settings.count,
            "lookahead": settings.lookahead,
            "max_restarts": settings.max_worker_restarts,
            "batch_timeout": settings.batch_timeout,
            "worker_env": settings.worker_env,
        }
        if settings.kind is WorkerKind.RAY:
            from keras_fastdata.workers.ray.actors import RayPlan
            from keras_fastdata.workers.ray.options import Options
            from keras_fastdata.workers.ray.pool import RayPool

            plan = RayPlan(options=Options.of(settings.ray_options), **common)
            return RayPool(plan, maker, self._receiver)
        return self._create_process_pool(settings.start_method, common, maker)

    def _create_process_pool(
        self,
        method: str | None,
        common: dict[str, Any],
        maker: Callable[[], build.Builder],
    ) -> WorkerPool:
        """Creates worker processes in the best way that the system supports."""
        lacking = requirements.lacking()
        if method not in (None, "spawn", "portable") and lacking:
            raise LoaderError(
                f"`start_method={method!r}` needs {', '.join(lacking)}, which "
                "the system lacks or refuses. Leave `start_method` out."
            )
        if method == "portable" or lacking:
            from keras_fastdata.workers.portable.channel import PipeChannel

            plan = PoolPlan(**common)
            pipes = PipeChannel(plan, maker)
            return ProcessPool(plan, pipes, self._receiver)
        from keras_fastdata.workers.process.channel import Channel, ProcessPlan

        local = ProcessPlan(start_method=method or "forkserver", **common)
        return ProcessPool(local, Channel(local, maker), self._receiver)

    def _builder(self, threads: int) -> build.Builder:
        return build.Builder(
            functools.partial(alive, self._dataset),
            self._planner.seed,
            threads=threads,
            cached=self._in_effect.now.cache is not None,
            observer=self._in_effect.auto,
            glance=functools.partial(_glance, weakref.ref(self)),
        )

    def glance(self, epoch: int) -> None:
        """Looks for changes if a build is for an epoch that has not begun.

        With `steps_per_epoch`, Keras's epoch may end amid one of the dataset.
        """
        position = self._position
        is_between = position.keras_phase is KerasPhase.BETWEEN
        if epoch >= position.next_epoch or is_between:
            self._outside.glance()

    def change(self, workers: WorkerPool, *, anew: bool) -> None:
        """Sends the changed dataset to the workers, or to `anew` started ones.

        May raise the errors that `create` raises.
        """
        self._look_outside()
        with pickling_errors.explained(self._dataset):
            workers.change(anew=anew)

    def _look_outside(self) -> None:
        """Records the global state that affects the workers' builds."""
        settings = self._in_effect.now
        is_here = not settings.kind.has_copies
        self._outside.look(
            alive(self._dataset),
            is_shared=is_here or settings.start_method == "fork",
            is_here=is_here,
            has_folder=settings.kind is not WorkerKind.RAY,
            is_cached=settings.cache is not None,
            is_in_directory=settings.cache not in (None, "memory"),
            is_strict=self._in_effect.auto is not None,
        )


@dataclasses.dataclass
class _BuilderMaker:
    """A picklable callable that creates a worker's `Builder`."""

    _dataset: weakref.ref[Dataset]
    _seed: int
    _cached: bool
    _outside: OutsideState

    def __call__(self) -> build.Builder:
        return build.builder_in_worker(*self._arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # What it is told comes first: the dataset may need it to be loaded.
        return _maker_in_worker, (self._outside.told, *self._arguments)

    @property
    def _arguments(self) -> tuple[Dataset, int, bool, Firsts]:
        dataset = alive(self._dataset)
        return dataset, self._seed, self._cached, Search(dataset).firsts


def _maker_in_worker(
    _: Told, dataset: Dataset, seed: int, cached: bool, firsts: Firsts
) -> Callable[[], build.Builder]:
    """Returns what a pickled `_BuilderMaker` becomes in a worker."""
    finish()
    show_script(dataset)
    return functools.partial(
        build.builder_in_worker, dataset, seed, cached, firsts, check_results
    )


def _glance(factory: weakref.ref[PoolFactory], epoch: int) -> None:
    """Calls `glance`. What the factory knows may refer to the dataset."""
    if (found := factory()) is not None:
        found.glance(epoch)


def alive(reference: weakref.ref[Dataset]) -> Dataset:
    """Returns the dataset; raises `ReferenceError` if it no longer exists."""
    dataset = reference()
    if dataset is None:
        raise ReferenceError("the dataset has been collected")
    return dataset
