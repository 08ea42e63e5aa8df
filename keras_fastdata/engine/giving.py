"""Gives variables of a worker the values that the trainer's variables have."""

from __future__ import annotations

import copy
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

from keras_fastdata._call_stack import ignoring_errors, raise_of_handler
from keras_fastdata.building.variables import ABSENT, Path
from keras_fastdata.engine.kinds import bare_kind_of, kind_of
from keras_fastdata.engine.plain_values import is_equal
from keras_fastdata.engine.told_forms import ToldForm
from keras_fastdata.engine.variable_parts import fill, part_of, set_part

# Owners of variables that have one object under all names.
_NEVER_COPIED = (type, types.ModuleType, types.FunctionType)


def give(
    module: Any,
    path: Path,
    given: Any,
    *,
    is_whole: bool = False,
    before_change: Callable[[], None] = lambda: None,
) -> bool:
    """Sets a variable; returns whether the user's class lets it be set.

    Args:
        module: The module that the variable is in.
        path: The path to the variable in the module.
        given: The value, or its form.
        is_whole: Whether a value with another content is also set anew, and not
            only one of another kind.
        before_change: Is called if the variable has another value.
    """
    try:
        value = copy.deepcopy(given)  # the worker may edit its own
        *owners, last = path
        owner = functools.reduce(part_of, owners, module)
        before = part_of(owner, last)
    except Exception as error:
        raise_of_handler(error)
        return True  # it may be made later
    if owner is ABSENT:
        return True
    with ignoring_errors():
        if isinstance(value, ToldForm):
            lacks = value.differs if is_whole else value.is_missing
            is_lacking = lacks(before)
        else:
            is_lacking = not is_equal(before, value)
        if is_lacking:
            value = _made(value)
            before_change()
            if value is ABSENT or not fill(before, value):
                set_part(owner, last, value)
        return True
    return False


def separate(values: dict[tuple[str, Path], Any]) -> None:
    """Gives variables objects of their own if the trainer's are not one object.

    After the import of a module, two names may stand for one object, which the
    program has then replaced under one of the names. Each variable has been
    given its value, and the last one of those that share an object has changed
    the others.
    """
    for (name, path), value in values.items():
        with ignoring_errors():  # the user's class may refuse
            owner = _found(name, path[:-1])
            if owner is ABSENT or _has(part_of(owner, path[-1]), value):
                continue
            if len(path) > 1 and not isinstance(owner, _NEVER_COPIED):
                holder = _found(name, path[:-2])
                owner = copy.copy(owner)
                set_part(holder, path[-2], owner)
            set_part(owner, path[-1], _made(copy.deepcopy(value)))


def _found(name: str, path: Path) -> Any:
    return functools.reduce(part_of, path, sys.modules[name])


def _has(value: Any, given: Any) -> bool:
    """Returns whether a variable has the value that it was given."""
    if isinstance(given, ToldForm):
        return not given.differs(value)
    return is_equal(value, given)


def _made(given: Any) -> Any:
    return given.make() if isinstance(given, ToldForm) else given


def is_of_kind(module: Any, path: Path, kind: tuple[str, str]) -> bool:
    """Returns whether a variable has a value of a kind, or has none yet."""
    try:
        value = functools.reduce(part_of, path, module)
        return value is ABSENT or kind in (bare_kind_of(value), kind_of(value))
    except Exception as error:  # the user's class may refuse
        raise_of_handler(error)
        return True
