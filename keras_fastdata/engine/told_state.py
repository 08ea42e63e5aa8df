"""Receives in a worker process what the trainer tells it of global state.

A module is told when it is imported, or else at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from keras_fastdata._base_class import replace_late_base
from keras_fastdata._call_stack import ignoring_errors
from keras_fastdata.building.variables import Path, name_of
from keras_fastdata.engine import framework_settings, process_settings
from keras_fastdata.engine.framework_settings import SettingsByModule
from keras_fastdata.engine.giving import give, is_of_kind, separate
from keras_fastdata.engine.module_sources import (
    NO_SOURCES,
    PackedSources,
    Sources,
)
from keras_fastdata.engine.plain_values import is_equal
from keras_fastdata.engine.seen_values import Seen
from keras_fastdata.engine.shown_values import Place, ShownValues
from keras_fastdata.engine.told_forms import ToldForm, is_whole
from keras_fastdata.engine.told_import import ToldLoader, spec_of
from keras_fastdata.errors import LoaderError
from keras_fastdata.workers.base import LACKS, ONCE

ValuesByModule = dict[str, dict[Path, Any]]  # by module and path
KindsByModule = dict[str, dict[Path, tuple[str, str]]]  # see `kind_of`


LOST = (
    "This process has set `%s`, and worker processes do not see it: they "
    "import `%s` themselves, and are told of values alone that can be pickled "
    "and have up to 1 MiB, and of nothing of Keras, TensorFlow, JAX or "
    "PyTorch. Make it an attribute of the dataset."
)

_TRAINS = (
    "A worker process was to import `%s`, which has used a dataset while the "
    "training process imported it: the worker would train, too. Put the "
    "training into a function that you call after the import."
)

_log = logging.getLogger("keras_fastdata")


class StateLostError(LoaderError):
    """Raised with `workers="auto"` where others get the `LOST` warning."""


@dataclasses.dataclass(frozen=True)
class Told:
    """Carries global state to a worker, where unpickling applies the state."""

    settings: SettingsByModule
    values: ValuesByModule
    kinds: KindsByModule  # of the variables whose values are not carried
    # Of what cached functions keep; module "": of what the dataset holds.
    results: KindsByModule
    # Whether a worker that has another kind there raises `StateLostError`.
    is_strict: bool
    sources: PackedSources = NO_SOURCES
    scripts: frozenset[str] = frozenset()  # what no worker may import
    # Those of the values that modules change while they are imported.
    changed: set[Place] = dataclasses.field(default_factory=set)

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (getattr(self, each.name) for each in dataclasses.fields(self))
        is_local = "os" in self.settings
        first = _NeededFirst(self.sources, self.scripts, is_local)
        return _take_on, (first, *fields)


class _NeededFirst(NamedTuple):
    """What a worker needs before it can unpickle values of the user's classes.

    It imports their modules then.
    """

    sources: PackedSources
    scripts: frozenset[str]
    is_local: bool  # whether the worker has the trainer's folder: not on Ray

    def __reduce__(self) -> tuple[Any, ...]:
        return _begin, tuple(self)


def _begin(
    sources: PackedSources, scripts: frozenset[str], is_local: bool
) -> None:
    _received.begin(sources, scripts, is_local)
    if _AfterImport not in sys.meta_path:
        sys.meta_path.insert(0, _AfterImport)


NOTHING_TOLD = Told({}, {}, {}, {}, is_strict=False)


def _take_on(_: Any, *fields: Any) -> Told:
    """Sets values in modules, immediately or when a module is imported."""
    told = Told(*fields)
    _received.take_on(told)
    return told


def finish() -> None:
    """Gives variables the rest of the values, once all modules are there."""
    _received.finish()


def current() -> Told:
    """Returns what this worker was told last."""
    return _received.told


class _Stage(enum.Enum):
    """How far the modules are that the dataset needs.

    `begin` leads to LOADING, and `finish` to LOADED.
    """

    LOADING = enum.auto()  # some may not be imported yet
    LOADED = enum.auto()  # a module that is imported now is completed at once


class _Received:
    """What this worker was told, and what it has not done yet."""

    def __init__(self) -> None:
        self.told = NOTHING_TOLD
        self.sources: Sources = {}
        self.scripts: frozenset[str] = frozenset()
        self.is_local = False
        self._stage = _Stage.LOADED
        # Variables that were given a value since the latest `_complete`.
        self._given: set[Place] = set()
        # Those whose value may need another module, which is half imported.
        self._late: set[Place] = set()
        # The modules that are being imported, from outer to inner, and what
        # they saw.
        self._importing: list[tuple[str, Seen]] = []
        # Those that were imported since the outermost one began.
        self._imported: list[str] = []
        self._shown = ShownValues()

    def begin(
        self, sources: PackedSources, scripts: frozenset[str], is_local: bool
    ) -> None:
        """Notes what the imports need that follow."""
        self.sources, self.scripts = sources.sources, scripts
        self.is_local = is_local
        self._stage = _Stage.LOADING

    def take_on(self, told: Told) -> None:
        """Sets the values that differ from those of the state before."""
        before, self.told = self.told, told
        for name in {**told.settings, **told.values, **told.kinds}:
            self._tell(name, before)

    def finish(self) -> None:
        """Notes that all modules are there which the dataset needs."""
        self._stage = _Stage.LOADED
        self._complete()

    @contextlib.contextmanager
    def around_import(self, name: str) -> Iterator[None]:
        """Has a module see what it saw in the trainer while it is imported.

        Sets the received values in the module after the outermost import: the
        modules that follow may change them, as they did in the trainer.
        """
        source = self.sources.get(name)
        seen = {} if source is None else source.seen
        if source is not None:  # what it changed in the trainer has been told
            self._shown.show_alone()
        for module in seen:
            # The program has not changed a module that is half imported.
            if all(module != other for other, _ in self._importing):
                self._show(module, seen)
        keeping: contextlib.AbstractContextManager[None]
        keeping = contextlib.nullcontext()
        if source is not None and not self._importing:
            keeping = process_settings.kept(is_local=self.is_local)
        self._importing.append((name, seen))
        try:
            with keeping:
                yield
        finally:
            self._importing.remove((name, seen))  # threads may import, too
            self._imported.append(name)
            for _, seen in self._importing:  # the innermost is the last
                self._show(name, seen)
            if not self._importing:
                self._end_import()
        if self._stage is _Stage.LOADED and not self._importing:
            self._complete()

    def _show(self, name: str, seen: Seen) -> None:
        """Sets the settings of a module that another one saw at its import."""
        is_new = name in self._imported
        for key, value in seen.get(name, {}).items():
            self._shown.show(name, key, value, stays=is_new)

    def _end_import(self) -> None:
        self._shown.end()
        imported, self._imported = self._imported, []
        for name in imported:
            self._tell(name, NOTHING_TOLD)

    def _tell(self, name: str, known: Told) -> None:
        """Sets the received values in a module, if the module is imported.

        Args:
            name: The module's name.
            known: What the module was told before. What the trainer has not
                changed since then is the worker's own: `on_worker_start` may
                have set it.
        """
        module: Any = sys.modules.get(name)
        if module is None:
            return
        former = known.values.get(name, {})
        for path, given in self.told.values.get(name, {}).items():
            if path in former and is_equal(former[path], given):
                continue
            is_given = self._give((name, path), given)
            (self._given if is_given else self._late).add((name, path))
        for path, kind in self.told.kinds.get(name, {}).items():
            is_known = path in known.kinds.get(name, {})
            if not is_known and not is_of_kind(module, path, kind):
                self._late.add((name, path))
        had = known.settings.get(name, {})
        settings = {
            key: value
            for key, value in self.told.settings.get(name, {}).items()
            if key not in had or had[key] != value
        }
        with ignoring_errors():  # another version may lack it
            framework_settings.write(name, module, settings)
            if name == "keras":
                replace_late_base(module.utils.PyDataset)

    def _give(self, place: Place, value: Any, is_whole: bool = False) -> bool:
        def before_change() -> None:
            if place in self.told.changed:
                self._shown.keep_alone(place)

        name, path = place
        return give(
            sys.modules[name],
            path,
            value,
            is_whole=is_whole,
            before_change=before_change,
        )

    def _complete(self) -> None:
        """Gives variables what they lack after all of their parts were told.

        A value may have needed a module that was imported later, or half.
        """
        places, late = self._given | self._late, self._late
        self._given, self._late = set(), set()
        values, kinds = self.told.values, self.told.kinds
        # In the order in which the trainer has found them, parts last.
        told = sorted(
            (
                (name, path)
                for by_path in (values, kinds)
                for name, paths in by_path.items()
                for path in paths
                if (name, path) in places
            ),
            key=_depth,
        )
        given = {
            (name, path): values[name][path]
            for name, path in told
            if path in values.get(name, {})
        }
        for (name, path), value in given.items():
            if (name, path) in late or isinstance(value, ToldForm):
                self._give((name, path), value, is_whole=True)
        separate(given)
        lost: set[Place] = set()
        for name, path in filter(late.__contains__, told):
            wholes = [(name, path[:steps]) for steps in range(len(path))]
            if not lost.isdisjoint(wholes):
                continue  # it is a part of what is lost
            if any(is_whole(given.get(whole)) for whole in wholes):
                continue  # the worker has the whole, as one in a tuple
            module = sys.modules[name]
            if not (
                self._give((name, path), given[name, path])
                if (name, path) in given
                else is_of_kind(module, path, kinds[name][path])
            ):
                lost.add((name, path))
                self._lose(name, path)

    def _lose(self, name: str, path: Path) -> None:
        """Logs once for all workers that they lack the value of a variable.

        Raises:
            StateLostError: This worker was told to be strict.
        """
        lost = name_of(name, path)
        if self.told.is_strict:
            raise StateLostError(LOST % (lost, name))
        _log.warning(LOST, lost, name, extra={ONCE: f"{LACKS}{lost}"})


def _depth(place: Place) -> int:
    return len(place[1])


_received = _Received()


class _AfterImport(importlib.abc.MetaPathFinder):
    """Has values set in a module right after its import."""

    @classmethod
    def find_spec(
        cls, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        told, sources = _received.told, _received.sources
        if name in _received.scripts:
            raise LoaderError(_TRAINS % name)
        of_all = told.settings, told.values, told.kinds, sources
        if not any(name in of_some for of_some in of_all):
            return None
        source = sources.get(name)
        folder = ""
        if source is not None and _received.is_local:
            folder = source.folder
        around = _received.around_import
        loader = functools.partial(ToldLoader, folder=folder, around=around)
        return spec_of(name, path, target, source, loader, but=cls)
