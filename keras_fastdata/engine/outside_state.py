"""Tracks the global state that affects the batches of a dataset.

Inline and in threads, a build sees whatever the program has set anywhere. A
worker process imports modules anew, and is told of three things:

    settings of frameworks     see framework_settings.py
    `__main__`                 its classes and functions travel by value, with
                               the globals that they refer to
    the user's other modules   variables, and attributes of classes and objects
                               there, that the dataset's code refers to by name,
                               if they can be told (see telling.py)

Workers import the user's modules as the trainer has (see module_sources.py).
All of it is compared when an epoch begins, and sent again if it differs. In a
worker a module is told when it is imported, or else at once. Where a variable
of a module differs, the workers start anew: modules may keep what they have
computed from it. Workers call cached functions themselves, and compare the
results with those of this process.

In every place, a difference means that batches which were built ahead or cached
are out of date. Where the builds themselves may have made the difference, it
concerns only batches that were built ahead. So with a cache the state is
recorded again when an epoch is built: what differs later, while nothing is
built, the program has changed.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from keras_fastdata._call_stack import modules_that_run, raise_of_handler
from keras_fastdata._modules import note_scripts, scripts
from keras_fastdata.building import build_context
from keras_fastdata.building.attributes import first_items
from keras_fastdata.building.referred_names import variables_of
from keras_fastdata.building.variables import ABSENT, Variable
from keras_fastdata.engine import (
    framework_settings,
    module_sources,
    sent_digest,
    slow_descriptions,
)
from keras_fastdata.engine.framework_settings import SettingsByModule
from keras_fastdata.engine.outside_values import FirstValues, OutsideValues
from keras_fastdata.engine.seen_variable import SeenVariable
from keras_fastdata.engine.sent_digest import Digest, digest_of
from keras_fastdata.engine.telling import (
    DeletedVariables,
    LostVariables,
    is_inside,
    is_of_process,
    is_part_of_told,
    tell,
)
from keras_fastdata.engine.told_forms import can_be_told
from keras_fastdata.engine.told_state import NOTHING_TOLD, StateLostError, Told

# Of an array that is always read whole. Workers are told of no larger ones.
_FEW_BYTES = 1 << 20

_log = logging.getLogger("keras_fastdata")


class Change(enum.IntEnum):
    """How the global state has changed; each kind includes those before it."""

    NONE = 0
    # Maybe by builds: batches that were built ahead are out of date.
    BY_BUILDS = 1
    BY_PROGRAM = 2  # cached batches are also out of date
    # Workers start anew: modules may keep what they have computed from it.
    IN_MODULES = 3


class OutsideState:
    """Records the global state that affects the batches of a dataset."""

    def __init__(self) -> None:
        self.told = NOTHING_TOLD  # the state that is sent to workers
        self.is_cached = False  # see `look`
        self._is_here = self._is_strict = self._has_folder = False
        self._is_in_directory = False
        self._is_watched = False
        # What was noticed since `look`, also as another dataset's epoch began:
        # callbacks may set a variable for the time of a validation.
        self._noticed = Change.NONE
        # Whether `glance` has found a change.
        self._was_glimpsed = False
        self._seen: list[SeenVariable] = []
        self._first = FirstValues()
        self._error_state: dict[str, Any] = dict(np.geterr())
        self._lost = LostVariables()
        self._deleted = DeletedVariables()
        # Of what is sent; `None` where the builds see all changes themselves.
        self._digest: Digest | None = None
        self._dataset: Callable[[], Any] = lambda: None
        # How many builds had begun in this process by `look`.
        self._builds = 0
        # The name of a variable that has changed since, while builds ran; and
        # how often a cache was emptied for one.
        self._changed_amid_builds = ""
        self._times_emptied = 0

    def look(
        self,
        dataset: Any,
        *,
        is_shared: bool,
        is_here: bool = False,
        has_folder: bool = False,
        is_cached: bool = False,
        is_in_directory: bool = False,
        is_strict: bool = False,
    ) -> None:
        """Records the current global state.

        Args:
            dataset: The dataset.
            is_shared: Whether the builds see all of it.
            is_here: Whether this process builds. The builds may then edit the
                containers themselves.
            has_folder: Whether builds are to be in the current folder.
            is_cached: Whether batches are kept for later epochs.
            is_in_directory: Whether they are kept in a directory.
            is_strict: Whether state that workers cannot be told of is an error.

        Raises:
            StateLostError: There is such state. A worker may raise it, too, and
                so may all methods that compare.
        """
        self._is_watched, self.is_cached = True, is_cached
        self._is_here, self._has_folder = is_here, has_folder
        self._is_in_directory, self._is_strict = is_in_directory, is_strict
        self._lost.expect(is_shared=is_shared, is_strict=is_strict)
        self._dataset = weakref.ref(dataset)
        if is_here:
            _in_this_process.add(self)
        else:
            note_scripts(modules_that_run())
        self._warn_of_emptied_cache()
        self._digest = None if is_here else digest_of(dataset)
        if self._digest is not None and self._digest != digest_of(dataset):
            self._digest = None  # it differs each time
        self._record_all(dataset)

    def _warn_of_emptied_cache(self) -> None:
        """Logs once that builds may empty the cache again and again."""
        if self.is_cached and self._changed_amid_builds:
            self._times_emptied += 1
            if self._times_emptied == 2:
                name = self._changed_amid_builds.removeprefix(".")
                _log.warning(
                    "The cache of %s was emptied twice, because `%s` changed "
                    "while batches were built. If `__getitem__` changes it, "
                    "assign the result to an attribute of `self`, or leave out "
                    "`cache`.",
                    type(self._dataset()).__name__,
                    name,
                )
        self._changed_amid_builds = ""

    def _record_all(self, dataset: Any) -> None:
        self._builds = build_context.builds_begun()
        self._noticed, self._was_glimpsed = Change.NONE, False
        # Also if workers need none now: the next ones may be processes.
        sources = module_sources.packed()
        told = Told(
            self._settings(), {}, {}, {}, self._is_strict, sources, scripts()
        )
        self._deleted.note(seen.variable for seen in self._seen)
        self._seen = []
        is_covered = self._digest is not None and self._digest.is_whole
        left = 0 if is_covered else sent_digest.MOST_BYTES  # to read whole
        # With a directory, they are compared for each batch, too.
        few_bytes = _FEW_BYTES if self._is_in_directory else None
        for variable in _variables_of(dataset):
            with _looking():
                value, most = variable.value, max(left, _FEW_BYTES)
                self._seen.append(
                    SeenVariable(variable, value, most, few_bytes)
                )
                if _FEW_BYTES < (size := sent_digest.size_of(value)) <= left:
                    left -= size
                tell(variable, told, self._lost)
        self._deleted.note(seen.variable for seen in self._seen)
        self._deleted.tell(told)
        has_changed = module_sources.import_changes().has
        told.changed.update(
            (module, path)
            for module, values in told.values.items()
            for path in values
            if has_changed(module, path)
        )
        self.told = told

    def notice_changes(self, *, is_marked: bool = False) -> Change:
        """Returns how the global state has changed since `look`.

        Logs a change that workers cannot be told of. Takes a millisecond or so.
        If the dataset `is_marked` as changed, the program has changed it.
        """
        for other in first_items(_in_this_process):
            if other is not self:
                other.compare()
        change = self.compare()
        if is_marked:
            self._changed_amid_builds = ""
        return change

    def compare(self, *, is_quick: bool = False) -> Change:
        """Compares the global state with that of `look`.

        Returns the greatest change of all comparisons since then. `is_quick`
        compares samples of large arrays if there is a directory.
        """
        self._noticed = max(self._noticed, self._compared(is_quick))
        if self._was_glimpsed:
            return max(self._noticed, Change.BY_BUILDS)
        return self._noticed

    def find_change(self) -> str | None:
        """Returns the name of a variable that has changed since `look`."""
        for seen in self._seen:
            with _looking():
                if seen.has_changed() and not is_of_process(seen.variable):
                    return seen.variable.name.removeprefix(".")
        return None

    @property
    def has_lost(self) -> bool:
        """Whether workers were not told of a value, and a warning said so."""
        return bool(self._lost)

    def values_for_directory(self, dataset: Any) -> OutsideValues:
        """Returns the values on which a cache's directory depends."""
        variables = [seen.variable for seen in self._seen]
        found = self._first.look(variables or _variables_of(dataset))
        # Directories of former versions are for the default settings.
        known = [*found.known, *framework_settings.changed()]
        return found._replace(known=known)

    def stop_watching(self) -> None:
        """Has `compare` find no more changes until the next `look`."""
        self._is_watched = False

    def look_again(self) -> None:
        """Records the state again, if builds alone can have changed it.

        To be called when this process builds, but nothing at this moment.
        """
        dataset = self._dataset()
        if (
            dataset is not None
            and self._builds != build_context.builds_begun()
            and self.compare() < Change.BY_PROGRAM
        ):
            self._record_all(dataset)

    def glance(self) -> None:
        """Notes which variables hold other objects now than at `look`.

        To be called before and after builds for an epoch that has not begun:
        the program may put the former objects back. Looks into small containers
        alone, so takes a microsecond or two for each variable. May be called by
        any thread.
        """
        for seen in self._seen:
            with _looking():
                if not seen.holds_same() and seen.has_changed():
                    self._was_glimpsed = True
                    return

    def _compared(self, is_quick: bool) -> Change:
        found = Change.NONE
        if not self._is_watched:
            return found
        changed = [
            seen for seen in self._seen if seen.has_changed(is_quick=is_quick)
        ]
        if changed:
            slow_descriptions.forget()
        for seen in changed:
            found = max(found, self._change_of(seen))
        if found < Change.BY_PROGRAM and (
            self.told.settings != self._settings()
            or None is not self._digest != digest_of(self._dataset())
        ):
            return Change.BY_PROGRAM
        return found

    def _change_of(self, seen: SeenVariable) -> Change:
        """Returns what the change of a variable means."""
        variable = seen.variable
        if self._is_here:
            if self._builds == build_context.builds_begun():
                return Change.BY_PROGRAM
            if variable.is_assigned or variable.is_edited:
                return Change.BY_BUILDS
            if self._noticed < Change.BY_PROGRAM:  # else before the builds
                self._changed_amid_builds = variable.name
            return Change.BY_PROGRAM
        if variable.is_kept:
            if variable.is_assigned:  # there is a new result
                return Change.BY_BUILDS
            self._lost.add(variable)
        if is_of_process(variable):
            return Change.NONE
        if variable.by_value:
            return Change.BY_PROGRAM
        value = variable.value
        if value is ABSENT or not variable.is_told:
            return Change.IN_MODULES  # workers import the module again
        is_told_itself = not is_inside(variable) and (
            seen.differs_in_items or can_be_told(value)
        )
        if not (is_told_itself or is_part_of_told(variable, self.told)):
            self._lost.add(variable)
        # Builds of another dataset in this process may have edited it.
        is_edited = variable.is_edited
        return Change.BY_PROGRAM if is_edited else Change.IN_MODULES

    def _settings(self) -> SettingsByModule:
        # NumPy has one for each thread, and `fit` may ask for batches in a
        # thread of TensorFlow's.
        if threading.current_thread() is threading.main_thread():
            self._error_state = dict(np.geterr())
        return framework_settings.read_all(
            self._error_state, has_folder=self._has_folder
        )


def _variables_of(dataset: Any) -> list[Variable]:
    """Returns the variables that a dataset's batches can depend on."""
    try:
        return variables_of(dataset)
    except Exception as error:
        raise_of_handler(error)
        _log.warning(
            "Changes of variables outside of %s will not be noticed, because "
            "of a fault of keras_fastdata. Please report it, with this "
            "traceback.",
            type(dataset).__name__,
            exc_info=True,
        )
        return []


def note_nothing_is_built() -> None:
    """Has all datasets with a cache that are built here look again."""
    for state in first_items(_in_this_process):
        if state.is_cached:
            state.look_again()


@contextlib.contextmanager
def _looking() -> Iterator[None]:
    """Ignores errors: objects of the user's may refuse to be looked into."""
    try:
        yield
    except StateLostError:
        raise
    except Exception as error:
        raise_of_handler(error)
        _log.debug("State outside of a dataset:", exc_info=True)


# Those of datasets whose builds see every change at once.
_in_this_process: weakref.WeakSet[OutsideState] = weakref.WeakSet()
