"""Pickles objects of `__main__` by value that pickle would send by name.

Pickle sends such an object as "the one named `UserId` in `__main__`". In a
worker, `__main__` is another module, which lacks the name. These are objects of
`typing` such as `NewType`, and objects whose `__reduce__` returns their name,
such as a marker for a missing value. The class of an array of `ctypes` says
that it is in the module that made it, where it has no name.
"""

from __future__ import annotations

import contextlib
import copyreg
import ctypes
import importlib
import operator
import sys
import types
import typing
from typing import Any

from keras_fastdata._modules import MADE_BY_CODE, is_main

Reduced = tuple[Any, ...]

_ARRAY_CLASS: Any = type(ctypes.Array)


def reduce_by_value(obj: Any) -> Any:
    """Returns the parts of an object that pickle would send by name.

    Returns `NotImplemented` for all other objects.
    """
    kind = type(obj)
    if kind.__module__ == "typing":
        if kind in _OF_TYPING and is_main(obj.__module__):
            return _OF_TYPING[kind](obj)
    elif is_main(kind.__module__) and _has_own_reduction(kind):
        reduced = obj.__reduce_ex__(5)
        if not isinstance(reduced, str):
            return reduced
        base: Any = next(b for b in kind.__mro__ if _is_of_c(b))
        values = () if base is object else (base(obj),)
        return made_by_base, (kind, base, values), obj.__getstate__()
    return NotImplemented


def reduce_by_origin(obj: Any) -> Any:
    """Returns where a class or a module comes from.

    A class of arrays of `ctypes`, or a module to which the program has given
    another class. Returns `NotImplemented` for all other objects.
    """
    if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
        name = obj.__name__
        if sys.modules.get(name) is obj and not is_main(name):
            return importlib.import_module, (name,)
    if type(obj) is _ARRAY_CLASS and obj is not ctypes.Array:
        item, length = obj._type_, obj._length_
        if obj is item * length:  # the only class of this item and length
            return operator.mul, (item, length)
    return NotImplemented


def _has_own_reduction(kind: type) -> bool:
    """Returns whether pickle would call a user's `__reduce__`."""
    return (
        kind not in copyreg.dispatch_table
        and not issubclass(kind, type)
        and any(
            isinstance(getattr(kind, name), types.FunctionType)
            for name in ("__reduce__", "__reduce_ex__")
        )
    )


def _is_of_c(kind: type) -> bool:
    """Returns whether a class is written in C."""
    return not kind.__flags__ & MADE_BY_CODE


def made_by_base(kind: Any, base: Any, values: tuple[Any, ...]) -> Any:
    """Makes an object as its builtin base class does.

    The methods of its own class may not be there yet.
    """
    made = base.__new__(kind, *values)
    if base.__init__ is not object.__init__:  # of a list or a dict
        base.__init__(made, *values)
    return made


def _reduce_new_type(obj: Any) -> Reduced:
    args = typing.NewType, (obj.__name__, obj.__supertype__), obj.__module__
    return _make, args


def _reduce_variable(obj: Any) -> Reduced:
    return _make, (type(obj), (obj.__name__,), obj.__module__)


def _reduce_alias(obj: Any) -> Reduced:
    args = obj.__name__, obj.__value__
    return _make, (_make_alias, (*args, obj.__type_params__), obj.__module__)


def _make_alias(name: str, value: Any, parameters: tuple[Any, ...]) -> Any:
    """Makes what the statement `type name[parameters] = value` makes."""
    kind: Any = getattr(typing, "TypeAliasType")  # noqa: B009 - of Python 3.12
    return kind(name, value, type_params=parameters)


def _make(kind: Any, args: tuple[Any, ...], module: str) -> Any:
    made = kind(*args)
    with contextlib.suppress(AttributeError):  # read-only
        made.__module__ = module
    return made


_OF_TYPING = {
    typing.NewType: _reduce_new_type,
    typing.ParamSpec: _reduce_variable,
    typing.TypeVarTuple: _reduce_variable,
}
if hasattr(typing, "TypeAliasType"):  # from Python 3.12 on
    _OF_TYPING[typing.TypeAliasType] = _reduce_alias
