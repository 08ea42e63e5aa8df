"""Sets what a worker process is told of global state.

A module is told when it is imported, or else at once.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import importlib.abc
import importlib.machinery
import logging
import mmap
import sys
import types
from typing import Any

import numpy as np

from keras_fastdata._modules import is_users_class
from keras_fastdata.building.assignments import cells_of
from keras_fastdata.building.attributes import attributes_of, slot_values
from keras_fastdata.building.cached_functions import calls_of
from keras_fastdata.building.variables import (
    ABSENT,
    NAMESPACES,
    CellName,
    Inside,
    ItemKey,
    Kept,
    PartKey,
    Path,
    Step,
    name_of,
    part_at,
)
from keras_fastdata.engine import framework_settings
from keras_fastdata.engine.framework_settings import SettingsByModule
from keras_fastdata.engine.kinds import bare_kind_of, is_frozen, kind_of
from keras_fastdata.engine.module_sources import NO_SOURCES, PackedSources
from keras_fastdata.engine.plain_values import is_equal
from keras_fastdata.engine.told_forms import ToldForm
from keras_fastdata.engine.told_import import ToldLoader, spec_of
from keras_fastdata.errors import LoaderError
from keras_fastdata.memory.shared_arrays import owner_of
from keras_fastdata.workers.base import LACKS, ONCE

ValuesByModule = dict[str, dict[Path, Any]]  # by module and path
KindsByModule = dict[str, dict[Path, tuple[str, str]]]  # see `kind_of`


LOST = (
    "This process has set `%s`, and worker processes do not see it: they "
    "import `%s` themselves, and are told of values alone that can be pickled "
    "and have up to 1 MiB, of functions that can be imported, and of nothing "
    "of Keras, TensorFlow, JAX or PyTorch. Make it an attribute of the dataset."
)

_TRAINS = (
    "A worker process was to import `%s`, which has used a dataset while the "
    "training process imported it: the worker would train, too. Put the "
    "training into a function that you call after the import."
)

# What `_fill` knows to fill; a subclass comes before its base class.
_FILLED = (list, collections.deque, set, collections.OrderedDict, dict)

# Owners of variables that have one object under all names.
_NEVER_COPIED = (type, types.ModuleType, types.FunctionType)

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

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (getattr(self, each.name) for each in dataclasses.fields(self))
        return _take_on, tuple(fields)


NOTHING_TOLD = Told({}, {}, {}, {}, is_strict=False)


def _take_on(
    settings: SettingsByModule,
    values: ValuesByModule,
    kinds: KindsByModule,
    results: KindsByModule,
    is_strict: bool,
    sources: PackedSources,
    scripts: frozenset[str],
) -> Told:
    """Sets values in modules, immediately or when a module is imported."""
    told = Told(settings, values, kinds, results, is_strict, sources, scripts)
    before = _AfterImport.told
    _AfterImport.told, _AfterImport.are_all_there = told, False
    for name in {**settings, **values, **kinds}:
        _tell(name, before)
    if _AfterImport not in sys.meta_path:
        sys.meta_path.insert(0, _AfterImport)
    return told


def _tell(name: str, known: Told | None = None) -> None:
    """Sets the received values in a module, if the module is imported.

    Args:
        name: The module's name.
        known: What the module was told before. What the trainer has not changed
            since then is the worker's own: `on_worker_start` may have set it.
    """
    module: Any = sys.modules.get(name)
    if module is None:
        return
    told, known = _AfterImport.told, known or NOTHING_TOLD
    former = known.values.get(name, {})
    for path, given in told.values.get(name, {}).items():
        if path in former and is_equal(former[path], given):
            continue
        if _give(module, path, given):
            _AfterImport.given.append((name, path))
        else:
            _AfterImport.late.append((name, path))
    for path, kind in told.kinds.get(name, {}).items():
        if path in known.kinds.get(name, {}) or _is_of_kind(module, path, kind):
            continue
        _AfterImport.late.append((name, path))
    had = known.settings.get(name, {})
    settings = {
        key: value
        for key, value in told.settings.get(name, {}).items()
        if key not in had or had[key] != value
    }
    with contextlib.suppress(Exception):  # another version may lack it
        framework_settings.write(name, module, settings)


def _give(
    module: Any, path: Path, given: Any, *, is_whole: bool = False
) -> bool:
    """Sets a variable; returns whether the user's class lets it be set.

    `is_whole` is whether a value with another content is also set anew, and not
    only one of another kind.
    """
    try:
        value = copy.deepcopy(given)  # the worker may edit its own
        *owners, last = path
        owner = functools.reduce(part_of, owners, module)
        before = part_of(owner, last)
    except Exception:
        return True  # it may be made later
    with contextlib.suppress(Exception):
        if isinstance(value, ToldForm):
            lacks = value.differs if is_whole else value.is_missing
            is_lacking = lacks(before)
        else:
            is_lacking = not is_equal(before, value)
        if is_lacking:
            value = _made(value)
            if not _fill(before, value):
                _set_part(owner, last, value)
        return True
    return False


def finish() -> None:
    """Gives variables the rest of the values, once all modules are there."""
    _AfterImport.are_all_there = True
    _complete()


def _complete() -> None:
    """Gives variables what they lack after all of their parts were told.

    A value may have needed a module that was imported later, or half.
    """
    told = _AfterImport.told
    given, _AfterImport.given = _AfterImport.given, []
    late, _AfterImport.late = _AfterImport.late, []
    values = {
        (name, path): told.values[name][path]
        for name, path in sorted(
            [*given, *late], key=lambda place: len(place[1])
        )
        if path in told.values.get(name, {})
    }
    for (name, path), value in values.items():
        if (name, path) in late or isinstance(value, ToldForm):
            _give(sys.modules[name], path, value, is_whole=True)
    _separate(values)
    lost: set[tuple[str, Path]] = set()
    for name, path in sorted(late, key=lambda place: len(place[1])):
        module = sys.modules[name]
        if not lost.isdisjoint((name, path[:n]) for n in range(len(path))):
            continue  # it is a part of what is lost
        if not (
            _give(module, path, values[name, path])
            if (name, path) in values
            else _is_of_kind(module, path, told.kinds[name][path])
        ):
            lost.add((name, path))
            _lose(name, path)


def _separate(values: dict[tuple[str, Path], Any]) -> None:
    """Gives variables objects of their own if the trainer's are not one object.

    After the import of a module, two names may stand for one object, which the
    program has then replaced under one of the names. Each variable has been
    given its value, and the last one of those that share an object has changed
    the others.
    """
    for (name, path), value in values.items():
        with contextlib.suppress(Exception):  # the user's class may refuse
            owner = _found(name, path[:-1])
            if _has(part_of(owner, path[-1]), value):
                continue
            if len(path) > 1 and not isinstance(owner, _NEVER_COPIED):
                holder = _found(name, path[:-2])
                owner = copy.copy(owner)
                _set_part(holder, path[-2], owner)
            _set_part(owner, path[-1], _made(copy.deepcopy(value)))


def _found(name: str, path: Path) -> Any:
    return functools.reduce(part_of, path, sys.modules[name])


def _has(value: Any, given: Any) -> bool:
    """Returns whether a variable has the value that it was given."""
    if isinstance(given, ToldForm):
        return not given.differs(value)
    return is_equal(value, given)


def _made(given: Any) -> Any:
    return given.make() if isinstance(given, ToldForm) else given


def _lose(name: str, path: Path) -> None:
    """Logs once for all workers that they lack the value of a variable.

    Raises:
        StateLostError: It was told to be strict.
    """
    lost = name_of(name, path)
    if _AfterImport.told.is_strict:
        raise StateLostError(LOST % (lost, name))
    _log.warning(LOST, lost, name, extra={ONCE: f"{LACKS}{lost}"})


def _is_of_kind(module: Any, path: Path, kind: tuple[str, str]) -> bool:
    """Returns whether a variable has a value of a kind, or has none yet."""
    try:
        value = functools.reduce(part_of, path, module)
        return value is ABSENT or kind in (bare_kind_of(value), kind_of(value))
    except Exception:  # the user's class may refuse
        return True


def _fill(container: Any, value: Any) -> bool:
    """Gives a container or array the items of another one, if it can.

    Default values, closures and other modules may hold that container. An
    array that is a file mapped into memory stays as it is.
    """
    kind: Any = type(value)
    if container is value:  # a class with one object returns that one
        return True
    if type(container) is not kind:
        return False
    if kind is np.ndarray:
        is_alike = container.dtype == value.dtype
        is_alike = is_alike and container.shape == value.shape
        is_file = isinstance(owner_of(container).base, mmap.mmap)
        if is_alike and container.flags.writeable and not is_file:
            container[...] = value
            return True
        return False
    if kind in NAMESPACES:
        container, value = vars(container), vars(value)
    if isinstance(value, collections.defaultdict):
        container.default_factory = value.default_factory
    for base in _FILLED:
        if isinstance(value, base):
            _fill_as(base, container, value)
            dict.update(attributes_of(container), attributes_of(value))
            return True
    # No class, no member of an enumeration, no tuple.
    is_object = all(map(is_users_class, kind.__mro__[:-1]))
    if is_object := is_object and not is_frozen(value):
        _fill_attributes(container, value)
    return is_object


def _fill_attributes(container: Any, value: Any) -> None:
    attributes = attributes_of(container)
    attributes.clear()
    attributes.update(attributes_of(value))
    for name, slot in slot_values(value):
        setattr(container, name, slot)


def _fill_as(base: Any, container: Any, value: Any) -> None:
    """Fills an instance of a subclass without the subclass's own methods."""
    base.clear(container)
    if issubclass(base, dict):
        for key, item in base.items(value):
            base.__setitem__(container, key, item)
    else:
        fill = base.update if base is set else base.extend
        fill(container, base.__iter__(value))


def _unwrapped(owner: Any) -> Any:
    """Returns the function in a static or class method."""
    is_method = isinstance(owner, (staticmethod, classmethod))
    return owner.__func__ if is_method else owner


def _set_part(owner: Any, step: Step, value: Any) -> None:
    owner = _unwrapped(owner)
    if isinstance(step, ItemKey):
        owner[step.key] = value
    elif isinstance(step, CellName):
        cells_of(owner)[step.name].cell_contents = value
    elif isinstance(step, str):
        kept = getattr(owner, "__dict__", None)
        if isinstance(kept, dict) and step in kept:
            kept[step] = value  # not by a setter, which may convert again
        else:
            setattr(owner, step, value)


def current() -> Told:
    """Returns what this worker was told last."""
    return _AfterImport.told


def part_of(owner: Any, step: Step) -> Any:
    """Returns an item, or an attribute that the object itself has."""
    owner = _unwrapped(owner)
    if isinstance(step, (ItemKey, PartKey)):
        return owner[step.key]
    if isinstance(step, CellName):
        return cells_of(owner)[step.name].cell_contents
    if isinstance(step, Inside):
        return part_at(owner, step.number)
    if isinstance(step, Kept):
        return dict(calls_of(owner))[step.call]
    is_function = isinstance(owner, types.FunctionType)
    if step == "__bases__" or (is_function and hasattr(type(owner), step)):
        return getattr(owner, step)  # not in its `__dict__`
    # That of a slot is not in there, and an inherited one is not its own.
    kept = getattr(owner, "__dict__", {})
    if step in kept:
        return kept[step]
    return dict(slot_values(owner)).get(step, ABSENT)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Sets values in a module right after its import."""

    told = NOTHING_TOLD
    # The variables that were given a value since the latest `finish`.
    given: list[tuple[str, Path]] = []
    # Those whose value may need another module, which is half imported.
    late: list[tuple[str, Path]] = []
    are_all_there = False  # the modules that the dataset needs

    @classmethod
    def find_spec(
        cls, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        told = cls.told
        if name in told.scripts:
            raise LoaderError(_TRAINS % name)
        sources = told.sources.sources
        of_all = told.settings, told.values, told.kinds, sources
        if not any(name in of_some for of_some in of_all):
            return None
        source = sources.get(name)
        folder = ""
        if source is not None and "os" in told.settings:  # not on Ray
            folder = source.folder
        loader = functools.partial(ToldLoader, folder=folder, after=cls.tell)
        return spec_of(name, path, target, source, loader, but=cls)

    @classmethod
    def tell(cls, name: str) -> None:
        """Sets values in a module that was imported just now."""
        _tell(name)
        if cls.are_all_there:
            _complete()
