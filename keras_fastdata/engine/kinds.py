"""Describes values by their classes, and by what is known of their content.

A worker compares the description of its own value with that of the trainer.
"""

from __future__ import annotations

import collections
import pprint
import types
import zlib
from typing import Any

import numpy as np

from keras_fastdata._modules import is_users_class
from keras_fastdata.building.attributes import first_items
from keras_fastdata.building.variables import MOST_ITEMS, NAMESPACES, is_key
from keras_fastdata.engine.library_objects import (
    content_of,
    digest_of,
    weights_of,
)
from keras_fastdata.engine.plain_values import (
    CONTAINERS,
    MAPPINGS,
    is_plain,
)
from keras_fastdata.engine.sent_digest import checksum_of, dtype_text

_MOST_ITEMS = 100  # of a container whose kinds are described
_MOST_SAMPLED = 1_000  # items of a container with too much in it
_MOST_ROWS = 1_000  # of a table, and cells of those
_MOST_CHARACTERS = 10_000  # of a text
_SUBCLASSED = (int, float, complex, str, bytes)
_LEAVES = (*_SUBCLASSED, type(None), np.generic)
# Packages whose objects have all of their content in their `repr`.
_WITH_REPR = ("omegaconf", "ml_collections")


def bare_kind_of(value: Any) -> tuple[str, str]:
    """Returns a module and a name: of code itself, or of an object's class."""
    if isinstance(value, types.MethodType):
        value = value.__func__
    if isinstance(value, types.FunctionType):
        return str(
            value.__globals__.get("__name__")
        ), value.__code__.co_qualname
    if isinstance(value, (types.BuiltinFunctionType, np.ufunc)):
        return type(value).__module__, value.__name__
    named = value if isinstance(value, type) else type(value)
    return str(named.__module__), named.__qualname__


def kind_of(value: Any) -> tuple[str, str]:
    """Returns a module and a name, followed by what tells the content.

    It is the same in each process for what the same code has made. So it has
    no identity in it, and no order of a set.
    """
    module, name = bare_kind_of(value)
    content = _content_of(value)
    return module, name if content is None else f"{name} {content}"


def _content_of(value: Any) -> Any:
    """Returns a description of the content; `None` if there is none."""
    kind = type(value)
    package = kind.__module__.partition(".")[0]
    if isinstance(value, np.memmap):
        return digest_of(value)  # with its path
    if isinstance(value, np.ndarray):
        if not value.dtype.hasobject:
            return dtype_text(value.dtype), value.shape, checksum_of(value)
        items = first_items(value.flat)
        return dtype_text(value.dtype), value.shape, _described(value, items)
    if is_plain(value) or package in _WITH_REPR:
        return _text_of(value)
    if kind in (*CONTAINERS, *MAPPINGS, types.MappingProxyType):
        items = first_items(value)
        if not isinstance(value, (*CONTAINERS,)):
            items += first_items(value.values())
        return len(value), _described(value, items)
    if isinstance(value, _SUBCLASSED):
        base = next(base for base in _SUBCLASSED if isinstance(value, base))
        text = base.__repr__(value)
        return text[:_MOST_CHARACTERS], zlib.crc32(text.encode())
    if package == "torch" and kind.__name__ in ("dtype", "device"):
        return repr(value)
    if package == "torch" and hasattr(value, "numpy"):
        is_here = value.device.type == "cpu"
        return _content_of(value.detach().numpy()) if is_here else None
    if package == "pandas" and hasattr(value, "to_numpy"):
        if digest := digest_of(value):
            return digest
        rows = getattr(value, "iloc", value)[:_MOST_ROWS].to_numpy()
        return value.shape, [*map(_item, rows.ravel()[:_MOST_ROWS].tolist())]
    if weights := weights_of(value):
        return [*map(checksum_of, weights)]
    if package in ("jax", "jaxlib") and hasattr(value, "__array__"):
        return _content_of(np.asarray(value))
    has_items = isinstance(value, (list, set, dict))
    if is_users_class(kind) and (has_items or is_frozen(value)):
        return digest_of(value)  # nobody can set its attributes
    return repr(value) if package == "pandas" else content_of(value)


def _described(container: Any, items: list[Any]) -> Any:
    """Describes a container by all that is in it, or by the kinds of its items.

    `items` are its first items. The kinds are enough if the items are variables
    by themselves. Of a container with too much in it, a sample counts.
    """
    if not _has_variables(container, items):
        if digest := digest_of(container):
            return digest
        if isinstance(container, dict):
            container = [*container.items()]
        if not isinstance(container, (set, frozenset)):
            some = [*container][:: max(1, len(container) // _MOST_SAMPLED)]
            if digest := digest_of(some):
                return digest
    found = map(_item, items[:_MOST_ITEMS])
    return (
        sorted(found) if isinstance(container, (set, frozenset)) else [*found]
    )


def _has_variables(container: Any, items: list[Any]) -> bool:
    """Returns whether the items of a container are variables by themselves."""
    return (
        type(container) in (list, tuple, collections.deque, *MAPPINGS)
        and len(container) <= MOST_ITEMS
        and (not isinstance(container, dict) or all(map(is_key, container)))
        and not all(isinstance(item, _LEAVES) for item in items)
    )


def is_frozen(value: Any) -> bool:
    """Returns whether the class of an object may forbid assignments."""
    kind: Any = type(value)
    return kind.__setattr__ is not object.__setattr__


def _text_of(value: Any) -> str:
    """Returns a text of a plain value, in which sets are sorted."""
    waiting = [value]
    for item in waiting:
        if isinstance(item, (set, frozenset)):
            return pprint.pformat(value, width=1, sort_dicts=False)
        if type(item) in NAMESPACES:
            item = vars(item)
        if isinstance(item, dict):
            waiting += item.values()
        if isinstance(item, (list, tuple, collections.deque)):
            waiting += item
    return repr(value)


def _item(value: Any) -> tuple[str, ...]:
    """Describes an item of a container, but not what is within the item."""
    described = bare_kind_of(value)
    is_small = is_plain(value) and type(value) not in (*CONTAINERS, *MAPPINGS)
    return (*described, repr(value)) if is_small else described
