"""Pickles layers and models of Keras with what Keras leaves out.

Keras makes a layer again from its configuration and its weights. A worker
process lacks the classes and functions of a script that the configuration
names, also those that the script registered. And what the program has set since
the layer was made, such as `layer.scale = 10`, is in no configuration.
"""

from __future__ import annotations

import collections
import enum
import functools
import importlib
import random
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_fastdata._modules import is_users_class, is_users_code, loaded

Path = tuple[Any, ...]  # of attributes, indices and keys

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
_WHOLE = (
    *(enum.Enum, random.Random),
    *(np.random.Generator, np.random.RandomState, types.FunctionType, type),
)
_MOST_LEVELS = 6  # of containers and objects, within an attribute


def reduce_layer(obj: Any) -> Any:
    """Returns the parts of a layer; `NotImplemented` for all other objects.

    Also for one whose class says itself how to pickle it.
    """
    keras: Any = loaded("keras")
    if keras is None or not isinstance(obj, keras.Layer):
        return NotImplemented
    if type(obj).__reduce__ is not keras.Layer.__reduce__:
        return NotImplemented
    make, args, *_ = obj.__reduce__()
    found = dict(_parts_of(keras, obj))
    layers = {k: v for k, v in found.items() if isinstance(v, keras.Layer)}
    attributes = {path: _data_in(keras, part) for path, part in layers.items()}
    objects = [
        (name, known)
        for part in found.values()
        if (known := _users_own(part)) is not None
        for name in (known.__name__, keras.saving.get_registered_name(known))
    ]
    return _make_again, (make, args, dict(objects), attributes)


def _make_again(
    make: Any,
    args: tuple[Any, ...],
    objects: dict[str, Any],
    attributes: dict[Path, dict[str, Any]],
) -> Any:
    keras: Any = importlib.import_module("keras")
    with keras.saving.custom_object_scope(objects):
        made = make(*args)
    for path, part in dict(_parts_of(keras, made)).items():
        if isinstance(part, keras.Layer):
            vars(part).update(attributes.get(path, {}))
    return made


def _users_own(part: Any) -> Any:
    """Returns the user's class or function that a configuration may name."""
    if isinstance(part, types.FunctionType):
        return part if is_users_code(part.__module__) else None
    kind = part if isinstance(part, type) else type(part)
    return kind if is_users_class(kind) else None


def _parts_of(keras: Any, outer: Any) -> Iterator[tuple[Path, Any]]:
    """Yields a layer, and what its attributes hold, with their paths.

    In containers and in layers within as well.
    """
    waiting: list[tuple[Path, Any]] = [((), outer)]
    seen = set()
    for path, part in waiting:  # grows
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield path, part
        items: Any = ()
        if isinstance(part, keras.Layer):
            items = _attributes_of(keras, part)
            # Those that only `keras.Sequential` and the like keep come last.
            items = [*items, ("_layers", vars(part).get("_layers"))]
        elif isinstance(part, dict):
            items = part.items()
        elif isinstance(part, (list, tuple)):
            items = enumerate(part)
        waiting += [((*path, name), inner) for name, inner in items]


def _attributes_of(keras: Any, layer: Any) -> list[tuple[str, Any]]:
    """Returns a layer's attributes that Keras does not manage."""
    is_users = is_users_class(type(layer))
    managed = _managed_by(keras)
    return [
        (name, value)
        for name, value in vars(layer).items()
        if name not in managed and (is_users or not name.startswith("_"))
    ]


@functools.lru_cache(maxsize=1)
def _managed_by(keras: Any) -> frozenset[str]:
    """Returns the names of the attributes that each layer and model has."""
    # Without a name, they would count for the names of the user's layers.
    layer, model = keras.Layer(name="layer"), keras.Sequential(name="model")
    return frozenset([*vars(layer), *vars(model)])


def _data_in(keras: Any, layer: Any) -> dict[str, Any]:
    """Returns a layer's attributes that are data, or functions."""
    return {
        name: _untracked(value)
        for name, value in _attributes_of(keras, layer)
        if _is_data(value, _MOST_LEVELS)
    }


def _untracked(value: Any) -> Any:
    """Returns a value without the containers that Keras makes of the user's.

    These refer to the layer.
    """
    kind = type(value)
    if isinstance(value, tuple):
        inner = map(_untracked, value)
        return getattr(kind, "_make", tuple)(inner)
    if not kind.__module__.startswith("keras."):
        return value
    if isinstance(value, dict):
        return {key: _untracked(item) for key, item in value.items()}
    if isinstance(value, (list, set)):
        plain = list if isinstance(value, list) else set
        return plain(map(_untracked, value))
    return value


def _is_data(value: Any, levels: int) -> bool:
    """Returns whether a value holds no layers, tensors or weights."""
    if isinstance(value, (*_PLAIN, *_WHOLE)):
        return True
    if isinstance(value, np.ndarray):
        return not value.dtype.hasobject
    items: list[Any] = []
    if isinstance(value, dict):
        items += value.values()
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        items += value
    elif not is_users_class(type(value)):
        return False
    items += getattr(value, "__dict__", {}).values()
    if type(value).__module__.startswith("keras."):
        items = [item for item in items if not _is_tracker(item)]
    return bool(levels) and all(_is_data(item, levels - 1) for item in items)


def _is_tracker(value: Any) -> bool:
    """Returns whether Keras's containers have an object to report to."""
    return type(value).__name__ == "Tracker"
