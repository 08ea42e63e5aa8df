"""Tracks the global state that affects the batches of a dataset.

Inline and in threads, a build sees whatever the program has set anywhere. A
worker process imports modules anew, and is told of three things:

    settings of frameworks     those of `_settings`, where the framework is
                               loaded; a worker does not import it for that
    `__main__`                 its classes and functions travel by value, with
                               the globals that they refer to
    the user's other modules   variables, and attributes of classes and objects
                               there, that the dataset's code refers to by name,
                               if they are plain values (see `_is_plain`)

All of it is compared when an epoch begins, and sent again if it differs. In a
worker a module is told when it is imported, or else at once. If modules keep
what they have computed from their variables, the workers start anew instead.

In every place, a difference means that batches which were built ahead or cached
are out of date. Where the builds themselves may have made the difference, it
concerns only batches that were built ahead.
"""

from __future__ import annotations

import argparse
import array
import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import importlib.abc
import importlib.machinery
import logging
import operator
import pathlib
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from keras_fastdata._modules import is_users_class
from keras_fastdata.building.assignments import cells_of, is_by_value
from keras_fastdata.building.attributes import (
    attributes_of,
    first_items,
    slots_of,
)
from keras_fastdata.building.referred_names import (
    ABSENT,
    SELF,
    CellName,
    Inside,
    ItemKey,
    Path,
    Referred,
    Step,
    Variable,
    name_of,
    variables_of,
)
from keras_fastdata.engine.sent_digest import checksum_of, digest_of
from keras_fastdata.workers.base import ONCE

_MOST_ITEMS = 1000  # of a plain value, in all; so many bytes are one
_BYTES_PER_ITEM = 64
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, tuple, set, frozenset, collections.deque)
_MAPPINGS = (
    dict,
    collections.OrderedDict,
    collections.defaultdict,
    collections.Counter,
)
_SEQUENCES = (list, collections.deque)
# What reads the items of an instance of a subclass.
_SUBCLASSED: dict[Any, Callable[[Any], Any]] = {
    list: list.__iter__,
    set: set.__iter__,
    dict: dict.values,
}
_NAMESPACES = (argparse.Namespace, types.SimpleNamespace)

_Settings = dict[str, dict[str, Any]]  # by module and name
_Values = dict[str, dict[Path, Any]]  # by module and path
_Kinds = dict[str, dict[Path, tuple[str, str]]]  # see `_kind_of`

_LOST = (
    "This process has set `%s`, and worker processes do not see it: they "
    "import `%s` themselves, and are told of numbers, texts and containers of "
    "these alone. Make it an attribute of the dataset."
)

_log = logging.getLogger("keras_fastdata")


# -- in the training process -------------------------------------------------


class Change(enum.IntEnum):
    """How the global state has changed; each kind includes those before it."""

    NONE = 0
    # Maybe by builds: batches that were built ahead are out of date.
    BY_BUILDS = 1
    BY_PROGRAM = 2  # cached batches are also out of date
    # Modules may keep what they have computed from it.
    IN_MODULES = 3


class OutsideState:
    """Records the global state that affects the batches of a dataset."""

    def __init__(self) -> None:
        self.told = Told({}, {}, {})  # the state that is sent to workers
        self._is_shared = self._is_here = False
        self._is_watched = False
        self._keeps_results = False  # whether modules do
        # What was noticed since `look`, also as another dataset's epoch began:
        # callbacks may set a variable for the time of a validation.
        self._noticed = Change.NONE
        self._seen: list[_SeenVariable] = []
        self._error_state: dict[str, Any] = dict(np.geterr())
        self._lost: set[str] = set()
        # Of what is sent; `None` where the builds see all changes themselves.
        self._digest: bytes | None = None
        self._dataset: Callable[[], Any] = lambda: None

    def look(
        self, dataset: Any, *, is_shared: bool, is_here: bool = False
    ) -> None:
        """Records the current global state.

        Args:
            dataset: The dataset.
            is_shared: Whether the builds see all of it.
            is_here: Whether this process builds. The builds may then edit the
                containers themselves.
        """
        self._is_watched, self._is_shared = True, is_shared
        self._is_here = is_here
        self._dataset = weakref.ref(dataset)
        self._noticed = Change.NONE
        if is_here:
            _in_this_process.add(self)
        values: _Values = {}
        kinds: _Kinds = {}
        self._seen = []
        try:
            referred = variables_of(dataset)
        except Exception:
            # Objects of the user's may refuse to be looked into.
            _log.debug("State outside of a dataset:", exc_info=True)
            referred = Referred([], keeps_results=False)
        self._keeps_results = referred.keeps_results
        for variable in referred.variables:
            value = variable.value
            by_code = variable.is_assigned or variable.is_edited
            if variable.path[:1] == (SELF,) and by_code:
                continue
            self._seen.append(_SeenVariable(variable, value))
            if variable.by_value or _is_of_process(variable):
                continue
            if _is_inside(variable):
                continue
            if variable.is_assigned and (made := _as_made(value)) is not None:
                values.setdefault(variable.module, {})[variable.path] = made
            elif _is_plain(value):
                values.setdefault(variable.module, {})[variable.path] = value
            elif _is_of_main(value):
                self._lose(variable)
            elif not isinstance(value, types.ModuleType):
                kind = _kind_of(value)
                kinds.setdefault(variable.module, {})[variable.path] = kind
        self.told = Told(self._settings(), values, kinds)
        self._digest = None if is_here else digest_of(dataset)
        if self._digest is not None and self._digest != digest_of(dataset):
            self._digest = None  # it differs each time

    def notice_changes(self) -> Change:
        """Returns how the global state has changed since `look`.

        Logs a change that workers cannot be told of. Takes some microseconds.
        """
        for other in first_items(_in_this_process):
            if other is not self:
                other.compare()
        return self.compare()

    def compare(self) -> Change:
        """Compares the global state with that of `look`.

        Returns the greatest change of all comparisons since then.
        """
        self._noticed = max(self._noticed, self._compared())
        return self._noticed

    def _compared(self) -> Change:
        found = Change.NONE
        if not self._is_watched:
            return found
        for seen in [seen for seen in self._seen if seen.has_changed()]:
            found = max(found, self._change_of(seen))
        if found < Change.BY_PROGRAM and (
            self.told.settings != self._settings()
            or None is not self._digest != digest_of(self._dataset())
        ):
            return Change.BY_PROGRAM
        return found

    def _change_of(self, seen: _SeenVariable) -> Change:
        """Returns what the change of a variable means."""
        variable = seen.variable
        if self._is_here:
            by_builds = variable.is_assigned or variable.is_edited
            # Builds may change the dataset in ways that nothing shows.
            by_builds = by_builds or variable.path[:1] == (SELF,)
            return Change.BY_BUILDS if by_builds else Change.BY_PROGRAM
        if _is_of_process(variable):
            return Change.NONE
        if variable.by_value:
            return Change.BY_PROGRAM
        value = variable.value
        can_be_told = _is_plain(value) or _as_made(value) is not None
        if not (can_be_told or seen.differs_in_items) or _is_inside(variable):
            self._lose(variable)
        # Builds of another dataset in this process may have edited it.
        starts_anew = self._keeps_results and not variable.is_edited
        return Change.IN_MODULES if starts_anew else Change.BY_PROGRAM

    def _lose(self, variable: Variable) -> None:
        """Logs once that workers do not receive the value of a variable."""
        name = variable.name
        if self._is_shared or name in self._lost:
            return
        self._lost.add(name)
        _log.warning(_LOST, name, variable.module)

    def _settings(self) -> _Settings:
        # NumPy has one for each thread, and `fit` may ask for batches in a
        # thread of TensorFlow's.
        if threading.current_thread() is threading.main_thread():
            self._error_state = dict(np.geterr())
        return {"numpy": self._error_state, **_settings()}


# Those of datasets whose builds see every change at once.
_in_this_process: weakref.WeakSet[OutsideState] = weakref.WeakSet()


class _SeenVariable:
    """The recorded value of a variable, for detecting later changes.

    Holds values that are not plain by a weak reference, if possible.
    """

    __slots__ = ("_content", "_is_weak", "_value", "variable")

    def __init__(self, variable: Variable, value: Any) -> None:
        self.variable = variable
        self._content = self._content_of(value)
        self._value = value if _is_plain(value) else _weakly(value)
        self._is_weak = self._value is not value

    @property
    def differs_in_items(self) -> bool:
        """Whether the container is the same, with as many other items.

        Its items are variables as well, if they are few.
        """
        content = self._content_of(value := self.variable.value)
        return (
            self.variable.has_items
            and (_weakly(value) if self._is_weak else value) is self._value
            and isinstance(content, _Items)
            and isinstance(self._content, _Items)
            and len(content) == len(self._content)
        )

    def _content_of(self, value: Any) -> Any:
        if self.variable.is_assigned and (made := _as_made(value)) is not None:
            return repr(made.attributes)
        return _content(value)

    def has_changed(self) -> bool:
        value = self.variable.value
        # Not what a weak reference refers to: `None`, if that is gone.
        if (_weakly(value) if self._is_weak else value) is self._value:
            return self._content is not None and (
                self._content != self._content_of(value)
            )
        is_plain = not self._is_weak and _is_plain(value)
        return not (is_plain and _is_equal(value, self._value))


# Reads the settings of each framework.
_READERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "keras": lambda keras: {
        name: getattr(keras.config, name)()
        for name in ("floatx", "epsilon", "image_data_format")
    },
    "torch": lambda torch: {
        "default_dtype": str(torch.get_default_dtype()).rpartition(".")[2]
    },
    "jax": lambda jax: {"jax_enable_x64": jax.config.jax_enable_x64},
    "PIL.Image": lambda image: {"MAX_IMAGE_PIXELS": image.MAX_IMAGE_PIXELS},
    "PIL.ImageFile": lambda file: {
        "LOAD_TRUNCATED_IMAGES": file.LOAD_TRUNCATED_IMAGES
    },
}


def _settings() -> _Settings:
    """Returns the global settings of the imported frameworks."""
    found: _Settings = {}
    for name, read in _READERS.items():
        if (module := sys.modules.get(name)) is not None:
            # A module that is being imported may lack anything.
            with contextlib.suppress(AttributeError):
                found[name] = read(module)
    return found


def _is_plain(value: Any) -> bool:
    """Returns whether a value is small and consists of basic types only."""
    waiting = [value]
    size = 0
    for item in waiting:
        kind = type(item)
        if kind in _CONTAINERS:
            waiting += item
        elif kind in _MAPPINGS:
            factory = getattr(item, "default_factory", None)
            if factory is not None and not isinstance(factory, type):
                return False  # a function, which may not be picklable
            waiting += [*item, *item.values()]
        elif kind in _NAMESPACES:
            waiting += vars(item).values()
        elif kind in (str, bytes):
            size += len(item) // _BYTES_PER_ITEM
        elif not (
            kind in _SCALARS or isinstance(item, (np.generic, pathlib.PurePath))
        ):
            return False
        if len(waiting) + size > _MOST_ITEMS:
            return False
    return True


@dataclasses.dataclass(frozen=True)
class _Made:
    """Describes an object that the user's code makes when it is first needed.

    A worker makes the object if it does not have it yet.
    """

    module: str  # of the object's class
    name: str  # of that class
    attributes: dict[str, Any]

    def make(self) -> Any:
        names = self.name.split(".")
        found: Any = functools.reduce(getattr, names, sys.modules[self.module])
        made = object.__new__(found)
        vars(made).update(self.attributes)
        return made


def _as_made(value: Any) -> _Made | None:
    """Describes an object of a class of the user's, if it has plain values."""
    kind: Any = type(value)
    attributes = attributes_of(value)
    if (
        not is_users_class(kind)
        or is_by_value(kind.__module__, tuple(kind.__qualname__.split(".")))
        or kind.__reduce_ex__ is not object.__reduce_ex__
        or kind.__basicsize__ != _PlainObject.__basicsize__
        or slots_of(kind)
        or not _is_plain(attributes)
    ):
        return None
    return _Made(kind.__module__, kind.__qualname__, attributes)


class _PlainObject:
    """Has a `__dict__` and weak references, and nothing else."""


def _is_inside(variable: Variable) -> bool:
    """Returns whether no path leads to a variable in a worker."""
    return any(isinstance(step, Inside) for step in variable.path)


def _is_of_process(variable: Variable) -> bool:
    """Returns whether each process sets a variable for itself.

    Those are flags and counters that code assigns. But what code makes when it
    is first needed, such as a dict of settings, the program may then fill.
    """
    if not variable.is_assigned:
        return False
    value = variable.value
    is_filled = type(value) in (*_CONTAINERS, *_MAPPINGS) and bool(value)
    return not (is_filled and _is_plain(value)) and _as_made(value) is None


def _is_of_main(value: Any) -> bool:
    """Returns whether `__main__` defines a value or the value's class."""
    is_named = isinstance(value, (type, types.FunctionType))
    kind = value if is_named else type(value)
    return bool(kind.__module__ == "__main__")


def _kind_of(value: Any) -> tuple[str, str]:
    """Returns a module and a name: of code itself, or of an object's class."""
    if isinstance(value, types.FunctionType):
        return str(
            value.__globals__.get("__name__")
        ), value.__code__.co_qualname
    named = value if isinstance(value, type) else type(value)
    return str(named.__module__), named.__qualname__


def _content(value: Any) -> Any:
    """Returns a summary of a container or array, to detect in-place changes.

    Returns `None` for other values.
    """
    kind = type(value)
    if kind in (list, set, collections.deque, *_MAPPINGS, *_NAMESPACES):
        if _is_plain(value):
            return repr(value)
        if kind in _NAMESPACES:
            value = vars(value)
        items = first_items(value)
        if isinstance(value, dict):
            items += first_items(value.values())
        return _Items(len(value), items)
    for base, items_of in _SUBCLASSED.items():
        if isinstance(value, base) and is_users_class(kind):
            return _Items(base.__len__(value), first_items(items_of(value)))
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return _Items(value.size, first_items(value.flat))
    is_array = isinstance(value, (np.ndarray, array.array, bytearray))
    return checksum_of(value) if is_array else None


class _Items:
    """The first items of a container, compared by identity.

    Holds them by weak references, if possible. A weak reference to another
    object at the same address is another one.
    """

    def __init__(self, count: int, items: Iterable[Any]) -> None:
        self._count = count
        self._held = list(map(_weakly, items))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Items)
            and self._count == other._count
            and all(map(operator.is_, self._held, other._held))
        )

    def __len__(self) -> int:
        return self._count

    __hash__ = None  # type: ignore[assignment]


def _weakly(value: Any) -> Any:
    """Returns a weak reference to an object, or the object itself."""
    try:
        return weakref.ref(value)
    except TypeError:
        return value


def _is_equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


# -- in a worker -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Told:
    """Carries global state to a worker, where unpickling applies the state."""

    settings: _Settings
    values: _Values
    kinds: _Kinds  # of the variables whose values are not carried

    def __reduce__(self) -> tuple[Any, ...]:
        return _take_on, (self.settings, self.values, self.kinds)


def _take_on(settings: _Settings, values: _Values, kinds: _Kinds) -> Told:
    """Sets values in modules, immediately or when a module is imported."""
    before, told = _AfterImport.told, Told(settings, values, kinds)
    _AfterImport.told = told
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
    told, known = _AfterImport.told, known or Told({}, {}, {})
    former = known.values.get(name, {})
    for path, given in told.values.get(name, {}).items():
        if path in former and _is_equal(former[path], given):
            continue
        with contextlib.suppress(Exception):  # the user's class may refuse
            value = copy.deepcopy(given)  # the worker may edit its own
            *owners, last = path
            owner = functools.reduce(_part_of, owners, module)
            before = _part_of(owner, last)
            if not isinstance(value, _Made):
                if not _is_equal(before, value) and not _fill(before, value):
                    _set_part(owner, last, value)
            elif before is None or before is ABSENT:
                _set_part(owner, last, value.make())
    for path, kind in told.kinds.get(name, {}).items():
        if path in known.kinds.get(name, {}):
            continue
        with contextlib.suppress(Exception):  # it may be made later
            value = functools.reduce(_part_of, path, module)
            if value is not ABSENT and _kind_of(value) != kind:
                lost = name_of(name, path)
                _log.warning(_LOST, lost, name, extra={ONCE: f"lost {lost}"})
    had = known.settings.get(name, {})
    settings = {
        key: value
        for key, value in told.settings.get(name, {}).items()
        if key not in had or had[key] != value
    }
    with contextlib.suppress(Exception):  # another version may lack it
        _set(name, module, settings)


def _fill(container: Any, value: Any) -> bool:
    """Gives a container of the same type the items of another one, if it can.

    Default values, closures and other modules may hold that container.
    """
    kind = type(value)
    if type(container) is not kind:
        return False
    if kind in _NAMESPACES:
        container, value = vars(container), vars(value)
    elif kind is collections.defaultdict:
        container.default_factory = value.default_factory
    elif kind not in (list, set, collections.deque, *_MAPPINGS):
        return False
    container.clear()
    fill = container.extend if kind in _SEQUENCES else container.update
    fill(value)
    return True


def _set_part(owner: Any, step: Step, value: Any) -> None:
    if isinstance(step, ItemKey):
        owner[step.key] = value
    elif isinstance(step, CellName):
        cells_of(owner)[step.name].cell_contents = value
    elif isinstance(step, str):
        setattr(owner, step, value)


def _part_of(owner: Any, step: Step) -> Any:
    """Returns an item, or an attribute that the object itself has."""
    if isinstance(step, ItemKey):
        return owner[step.key]
    if isinstance(step, CellName):
        return cells_of(owner)[step.name].cell_contents
    assert isinstance(step, str)
    if isinstance(owner, types.FunctionType) and hasattr(type(owner), step):
        return getattr(owner, step)  # its defaults
    kept = getattr(owner, "__dict__", {})
    # That of a slot is not in there, and an inherited one is not its own.
    is_slot = isinstance(
        getattr(type(owner), step, None), types.MemberDescriptorType
    )
    return getattr(owner, step, ABSENT) if is_slot else kept.get(step, ABSENT)


def _set(name: str, module: Any, settings: dict[str, Any]) -> None:
    if name == "numpy":
        module.seterr(**settings)
        return
    for setting, value in settings.items():
        if name == "keras":
            getattr(module.config, f"set_{setting}")(value)
        elif name == "torch":
            module.set_default_dtype(getattr(module, value))
        elif name == "jax":
            module.config.update(setting, value)
        else:
            setattr(module, setting, value)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Sets values in a module right after its import."""

    told = Told({}, {}, {})

    @classmethod
    def find_spec(
        cls, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        told = cls.told
        if name not in {**told.settings, **told.values, **told.kinds}:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        loader: Any = None if spec is None else spec.loader
        if not isinstance(loader, importlib.machinery.SourceFileLoader):
            return None
        run = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            run(module)
            _tell(name)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
