"""Chooses the form in which a worker is told of a variable's value.

A value is sent as it is, if it is plain or a small array. A function or class
that a worker can import is sent by its name, and everything else by a pickle.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import io
import operator
import pickle
import sys
import types
from typing import Any

import numpy as np
import numpy.typing as npt

from keras_fastdata._call_stack import raise_of_handler
from keras_fastdata._modules import is_main, is_users_class
from keras_fastdata.building.attributes import attributes_of
from keras_fastdata.building.variables import ABSENT, Variable
from keras_fastdata.engine.kinds import is_frozen, kind_of
from keras_fastdata.engine.library_objects import (
    CODE_TYPES,
    ScriptPickler,
    SmallPickler,
    digest_of,
    is_left_out,
    is_left_out_module,
)
from keras_fastdata.engine.plain_values import can_be_sent
from keras_fastdata.engine.slow_descriptions import once_if_slow
from keras_fastdata.memory.limited_stream import LimitedStream

NOT_TOLD = object()
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType, np.ufunc)
_MOST_STEPS = 2  # to an object that a worker makes if it has none


class ToldForm:
    """Describes a value that is not sent as it is."""

    # Whether a worker has the same content afterwards.
    is_whole = False

    def is_missing(self, before: Any) -> bool:
        """Returns whether a variable that has the value `before` lacks it.

        The content of some values is told part by part; see `differs`.
        """
        raise NotImplementedError

    def differs(self, before: Any) -> bool:
        """Returns whether the value, or its content, is another one."""
        return self.is_missing(before)

    def make(self) -> Any:
        """Returns the value, in a worker."""
        raise NotImplementedError


def is_whole(form: Any) -> bool:
    """Returns whether a worker that was given a form has the same content."""
    return isinstance(form, ToldForm) and form.is_whole


@dataclasses.dataclass(frozen=True)
class Deleted(ToldForm):
    """Describes a variable that the program has deleted."""

    def is_missing(self, before: Any) -> bool:
        return before is not ABSENT

    def make(self) -> Any:
        return ABSENT


@dataclasses.dataclass(frozen=True)
class Named(ToldForm):
    """Describes a function or class by its name, or a module."""

    module: str
    name: str  # "" if it is a module

    def is_missing(self, before: Any) -> bool:
        return _named(before) != self

    def make(self) -> Any:
        module = importlib.import_module(self.module)
        return operator.attrgetter(self.name)(module) if self.name else module


@dataclasses.dataclass(frozen=True)
class Pickled(ToldForm):
    """Describes a value by its kind, its content and its pickle."""

    kind: tuple[str, str]  # see `kind_of`
    content: str | None  # a digest of all that is in the value
    pickle: npt.NDArray[np.uint8] = dataclasses.field(compare=False, repr=False)

    @property
    def is_whole(self) -> bool:  # type: ignore[override]
        return self.content is not None

    def is_missing(self, before: Any) -> bool:
        return kind_of(before) != self.kind

    def differs(self, before: Any) -> bool:
        if self.is_whole:
            return digest_of(before) != self.content
        return self.is_missing(before)

    def make(self) -> Any:
        return pickle.loads(self.pickle.tobytes())


@dataclasses.dataclass(frozen=True, eq=False)
class OfScript(ToldForm):
    """Holds a value with code in it that travels by value, as of `__main__`.

    It is pickled with the dataset, so that both have the same ones.
    """

    value: Any
    is_whole = True

    def __deepcopy__(self, _: Any) -> OfScript:
        return self

    def is_missing(self, before: Any) -> bool:
        if isinstance(self.value, _NAMED):
            return before is not self.value
        return kind_of(before) != kind_of(self.value)

    def differs(self, before: Any) -> bool:
        return self.is_missing(before) or (
            [*map(id, _parts_of(before))] != [*map(id, _parts_of(self.value))]
        )

    def make(self) -> Any:
        return self.value


def _parts_of(value: Any) -> list[Any]:
    """Returns the items of a container, and the attributes of an object."""
    parts = [*attributes_of(value).values()]
    if isinstance(value, dict):
        parts += [*dict.keys(value), *dict.values(value)]
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        parts += value
    return parts


def told_form(variable: Variable, value: Any) -> Any:
    """Returns the value, a `ToldForm`, or `NOT_TOLD`.

    A value is not told if it cannot be sent; if builds edit it, for each
    process has its own; or if it is an object far inside others, whose
    attributes are told.
    """
    if value is ABSENT:
        return NOT_TOLD
    if can_be_sent(value):
        return value
    if (named := _named(value)) is not None:
        own = Named(variable.module, ".".join(map(str, variable.path)))
        return NOT_TOLD if named == own else named
    is_container = isinstance(value, (list, set, dict))
    if variable.is_edited and not is_container:
        return NOT_TOLD
    has_attributes = (
        is_users_class(type(value))
        and not is_container
        and not is_frozen(value)
    )
    # Code that makes an object when it is first needed has none elsewhere.
    is_there = has_attributes and not variable.is_assigned
    if is_there and len(variable.path) > _MOST_STEPS:
        return NOT_TOLD
    return pickled(value) or of_script(value) or NOT_TOLD


def can_be_told(value: Any) -> bool:
    """Returns whether workers can be told of a value."""
    # Code is told (see told_code.py), and so is the object of a method.
    if isinstance(value, (types.CodeType, types.MethodType)):
        return True
    return can_be_sent(value) or None is not (
        _named(value) or pickled(value) or of_script(value)
    )


def _named(value: Any) -> Named | None:
    """Returns the name of what workers can import."""
    if isinstance(value, types.ModuleType):
        name = str(vars(value).get("__name__"))
        can_import = sys.modules.get(name) is value and not is_main(name)
        is_told = can_import and not is_left_out_module(name)
        return Named(name, "") if is_told else None
    if not isinstance(value, _NAMED):
        return None
    is_ufunc = isinstance(value, np.ufunc)
    module = "numpy" if is_ufunc else str(value.__module__)
    named = Named(module, value.__name__ if is_ufunc else value.__qualname__)
    if is_main(named.module) or is_left_out_module(named.module):
        return None
    try:
        found = operator.attrgetter(named.name)(sys.modules[named.module])
    except Exception as error:
        raise_of_handler(error)
        # A module may have a `__getattr__` of the user's.
        return None
    return named if found is value else None


@once_if_slow
def pickled(value: Any) -> Pickled | None:
    """Pickles a value, if it is no code and its pickle is small."""
    kind: Any = type(value)
    if isinstance(value, CODE_TYPES) or is_left_out(kind):
        return None
    stream = io.BytesIO()
    try:
        SmallPickler(LimitedStream(stream.write), protocol=5).dump(value)
    except Exception as error:
        raise_of_handler(error)
        return None
    pickled = np.frombuffer(stream.getvalue(), np.uint8)
    return Pickled(kind_of(value), digest_of(value), pickled)


def of_script(value: Any) -> OfScript | None:
    """Returns a value whose code travels by value, if its pickle is small."""
    return OfScript(value) if _has_small_pickle(value) else None


@once_if_slow
def _has_small_pickle(value: Any) -> bool:
    try:
        ScriptPickler(LimitedStream(lambda _: None), protocol=5).dump(value)
    except Exception as error:
        raise_of_handler(error)
        return False
    return True
