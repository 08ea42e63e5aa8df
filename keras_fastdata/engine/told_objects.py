"""Describes objects of the user's classes that a worker makes or fills."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

from keras_fastdata._modules import is_users_class
from keras_fastdata.building.assignments import is_by_value
from keras_fastdata.building.attributes import attributes_of, slots_of
from keras_fastdata.engine.kinds import bare_kind_of, is_frozen
from keras_fastdata.engine.plain_values import (
    CONTAINERS,
    MAPPINGS,
    is_equal,
    is_plain,
)

# What reads the items of an instance of a subclass, without its methods.
_ITEMS: dict[Any, Callable[[Any], Any]] = {
    list: list.__iter__,
    set: set.__iter__,
    dict: dict.items,
}


@dataclasses.dataclass(frozen=True)
class Made:
    """Describes an object that the user's code makes when it is first needed.

    A worker makes the object if it does not have it yet. If the class forbids
    assignments, a worker also replaces another object.
    """

    module: str  # of the object's class
    name: str  # of that class
    attributes: dict[str, Any]
    is_frozen: bool  # whether the class has its own `__setattr__`

    def is_missing(self, before: Any, absent: object) -> bool:
        """Returns whether a variable that has the value `before` lacks it."""
        if before is None or before is absent:
            return True
        return self.is_frozen and not is_equal(
            attributes_of(before), self.attributes
        )

    def make(self) -> Any:
        names = self.name.split(".")
        found: Any = functools.reduce(getattr, names, sys.modules[self.module])
        made = object.__new__(found)
        vars(made).update(self.attributes)
        return made


def as_made(value: Any) -> Made | None:
    """Describes an object of a class of the user's, if it has plain values."""
    kind: Any = type(value)
    attributes = attributes_of(value)
    if (
        not all(is_users_class(base) for base in kind.__mro__[:-1])
        or is_by_value(kind.__module__, tuple(kind.__qualname__.split(".")))
        or kind.__reduce_ex__ is not object.__reduce_ex__
        or kind.__basicsize__ != _PlainObject.__basicsize__
        or slots_of(kind)
        or not is_plain(attributes)
    ):
        return None
    return Made(
        kind.__module__, kind.__qualname__, attributes, is_frozen(value)
    )


class _PlainObject:
    """Has a `__dict__` and weak references, and nothing else."""


@dataclasses.dataclass(frozen=True)
class Filled:
    """Describes a container whose class derives from `list`, `set` or `dict`.

    A worker gives its own container the same items and attributes.
    """

    kind: tuple[str, str]  # see `bare_kind_of`
    items: Any  # a plain list, set or dict
    attributes: dict[str, Any]

    def fill(self, container: Any) -> bool:
        """Returns whether the container has the same class, and was filled."""
        if bare_kind_of(container) != self.kind:
            return False
        base: Any = type(self.items)
        base.clear(container)
        fill = list.extend if base is list else base.update
        fill(container, self.items)
        attributes_of(container).update(self.attributes)
        return True


def as_filled(value: Any) -> Filled | None:
    """Describes a container of a subclass, if all in it is plain."""
    if type(value) in (*CONTAINERS, *MAPPINGS):
        return None
    for base, items_of in _ITEMS.items():
        if isinstance(value, base):
            attributes = attributes_of(value)
            # Some have their items as attributes.
            attributes = {} if attributes is value else dict(attributes)
            items = base(items_of(value))
            if is_plain(items) and is_plain(attributes):
                return Filled(bare_kind_of(value), items, attributes)
    return None
