"""Reads and sets variables by their paths.

A container, array or object keeps its identity, and is filled: default values,
closures and other modules may hold it.
"""

from __future__ import annotations

import collections
import mmap
import types
from typing import Any

import numpy as np

from keras_fastdata._call_stack import raise_of_handler
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
    Step,
    part_at,
)
from keras_fastdata.engine.kinds import is_frozen
from keras_fastdata.memory.shared_arrays import owner_of

# What `fill` knows to fill; a subclass comes before its base class.
_FILLED = (list, collections.deque, set, collections.OrderedDict, dict)


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


def fill(container: Any, value: Any) -> bool:
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


def twin_of(value: Any) -> Any:
    """Returns another object that `fill` has filled, or `None` if it cannot."""
    kind: Any = type(value)
    bases = (
        base for base in (*_FILLED, *NAMESPACES) if isinstance(value, base)
    )
    try:
        if kind is np.ndarray:
            return value.copy()
        twin = next(bases, object).__new__(kind)  # not by the user's method
        return twin if fill(twin, value) else None
    except Exception as error:
        raise_of_handler(error)
        return None


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


def set_part(owner: Any, step: Step, value: Any) -> None:
    """Sets an item or an attribute, if it can without a setter.

    Deletes an attribute if the value is `ABSENT`.
    """
    owner = _unwrapped(owner)
    if isinstance(step, ItemKey):
        owner[step.key] = value
    elif isinstance(step, CellName):
        cells_of(owner)[step.name].cell_contents = value
    elif isinstance(step, str):
        kept = getattr(owner, "__dict__", None)
        if value is ABSENT:
            delattr(owner, step)
        elif isinstance(kept, dict) and step in kept:
            kept[step] = value  # not by a setter, which may convert again
        else:
            setattr(owner, step, value)
