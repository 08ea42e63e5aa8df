"""Decides what workers are told of a variable outside of the dataset."""

from __future__ import annotations

import functools
import logging
import sys
import types
from collections.abc import Iterable
from typing import Any

from keras_fastdata._call_stack import raise_of_handler
from keras_fastdata._modules import is_main, is_users_class
from keras_fastdata.building.process_variables import ENVIRONMENT
from keras_fastdata.building.variables import (
    ABSENT,
    SELF,
    Inside,
    Path,
    Variable,
    last_name,
)
from keras_fastdata.engine.kinds import bare_kind_of, kind_of
from keras_fastdata.engine.plain_values import CONTAINERS, MAPPINGS, is_plain
from keras_fastdata.engine.told_code import code_form, function_form
from keras_fastdata.engine.told_forms import (
    NOT_TOLD,
    Deleted,
    is_whole,
    told_form,
)
from keras_fastdata.engine.told_state import LOST, StateLostError, Told
from keras_fastdata.engine.variable_parts import part_of

_log = logging.getLogger("keras_fastdata")


class LostVariables:
    """Names each variable that workers cannot be told of, once."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._is_shared = self._is_strict = False

    def expect(self, *, is_shared: bool, is_strict: bool) -> None:
        """Sets whether builds see all, and whether a loss is an error."""
        self._is_shared, self._is_strict = is_shared, is_strict

    def __len__(self) -> int:
        return len(self._names)

    def add(self, variable: Variable) -> None:
        """Logs once that workers do not receive the value of a variable.

        Raises:
            StateLostError: This is an error.
        """
        name = variable.name
        if self._is_shared or name in self._names:
            return
        if self._is_strict:
            raise StateLostError(LOST % (name, variable.module))
        self._names.add(name)
        _log.warning(LOST, name, variable.module)


class DeletedVariables:
    """Remembers the variables that the program has deleted."""

    def __init__(self) -> None:
        self._places: set[tuple[str, Path]] = set()

    def note(self, variables: Iterable[Variable]) -> None:
        """Notes those of the former variables that are no more."""
        self._places |= {
            (variable.module, variable.path)
            for variable in variables
            if variable.value is ABSENT
            and last_name(variable.path)
            and variable.is_told
            and not (variable.by_value or variable.path[:1] == (SELF,))
        }

    def tell(self, told: Told) -> None:
        """Adds those that are still deleted to what workers are told."""
        self._places = {place for place in self._places if _is_deleted(*place)}
        for place in self._places:
            _put(told.values, place, Deleted())


def _is_deleted(module: str, path: Path) -> bool:
    """Returns whether a variable is gone, and its owner is not."""
    try:
        *owners, last = path
        owner = functools.reduce(part_of, owners, sys.modules[module])
        return owner is not ABSENT and part_of(owner, last) is ABSENT
    except Exception as error:
        raise_of_handler(error)
        return False  # the owner is gone, too


def tell(variable: Variable, told: Told, lost: LostVariables) -> None:
    """Adds a variable to what workers are told, or to the lost variables."""
    place, value = (variable.module, variable.path), variable.value
    if variable.is_kept:
        if not (variable.is_assigned or variable.is_edited):
            _tell_result(variable, told, lost)
        return
    if variable.by_value or is_of_process(variable) or not variable.is_told:
        return
    if variable.module == ENVIRONMENT:  # workers start with it
        return
    if is_inside(variable):
        _put(told.kinds, place, kind_of(value))
    elif isinstance(value, types.CodeType):
        if (code := code_form(variable, value)) is not None:
            _put(told.values, place, code)
    elif isinstance(value, types.FunctionType) and (
        (function := function_form(value)) is not None
    ):
        _put(told.values, place, function)
    elif (form := told_form(variable, value)) is not NOT_TOLD:
        _put(told.values, place, form)
    elif is_part_of_told(variable, told):
        pass
    elif _is_of_main(value) or _is_shared_by_processes(value):
        lost.add(variable)
    elif not isinstance(value, types.ModuleType):
        # What builds edit may differ between processes.
        kind = (bare_kind_of if variable.is_edited else kind_of)(value)
        _put(told.kinds, place, kind)


def _tell_result(variable: Variable, told: Told, lost: LostVariables) -> None:
    """Adds what workers compare with their own result of a function."""
    can_be_compared = variable.can_be_compared
    if told.is_strict and (variable.by_value or not can_be_compared):
        lost.add(variable)  # they may have made another result
    elif can_be_compared:
        place = variable.module, variable.path
        _put(told.results, place, kind_of(variable.value))


def _put(by_module: dict[str, Any], place: tuple[str, Any], what: Any) -> None:
    module, path = place
    by_module.setdefault(module, {})[path] = what


def is_part_of_told(variable: Variable, told: Told) -> bool:
    """Returns whether workers are told of the whole that a variable is in."""
    forms = told.values.get(variable.module, {})
    path = variable.path
    wholes = (forms.get(path[:steps]) for steps in range(1, len(path)))
    return any(map(is_whole, wholes))


def is_inside(variable: Variable) -> bool:
    """Returns whether a variable is a part of a wrapper, as of `partial`.

    Such a part cannot be set by itself.
    """
    return bool(variable.path) and isinstance(variable.path[-1], Inside)


def is_of_process(variable: Variable) -> bool:
    """Returns whether each process sets a variable for itself.

    Those are flags and counters that code assigns. But what code makes when it
    is first needed, such as a dict of settings, the program may then fill.
    """
    if not variable.is_assigned:
        return False
    value = variable.value
    if is_users_class(type(value)):
        return False
    is_filled = type(value) in (*CONTAINERS, *MAPPINGS) and bool(value)
    return not (is_filled and is_plain(value))


def _is_shared_by_processes(value: Any) -> bool:
    """Returns whether a value is such as `multiprocessing.Value`.

    A worker that imports the module makes another one.
    """
    return str(type(value).__module__).startswith("multiprocessing.")


def _is_of_main(value: Any) -> bool:
    """Returns whether `__main__` defines a value or the value's class."""
    is_named = isinstance(value, (type, types.FunctionType))
    kind = value if is_named else type(value)
    return is_main(kind.__module__)
