"""Pickles layers and models of Keras with what Keras leaves out.

Keras makes a layer again from its configuration and its weights. A worker
process lacks the classes and functions of a script that the configuration
names, also those that the script registered. And what the program has set since
the layer was made, such as `layer.scale = 10`, is in no configuration.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any

from keras_fastdata._modules import is_users_class, is_users_code, loaded

Path = tuple[Any, ...]  # of attributes, indices and keys

_MOST_LEVELS = 6  # of containers within an attribute
_CONTAINERS = (list, tuple, set, frozenset)


def reduce_layer(obj: Any, can_travel: Callable[[Any], bool]) -> Any:
    """Returns the parts of a layer; `NotImplemented` for all other objects.

    Also for one whose class says itself how to pickle it.

    Args:
        obj: Any object.
        can_travel: Returns whether a value that a layer holds can be pickled.
    """
    keras: Any = loaded("keras")
    if keras is None or not isinstance(obj, keras.Layer):
        return NotImplemented
    if type(obj).__reduce__ is not keras.Layer.__reduce__:
        return NotImplemented
    make, args, *_ = obj.__reduce__()
    found = dict(_parts_of(keras, obj))
    objects = [
        (name, known)
        for part in found.values()
        if (known := _users_own(part)) is not None
        for name in (known.__name__, keras.saving.get_registered_name(known))
    ]
    attributes = {
        path: {
            name: plain
            for name, value in _attributes_of(keras, part)
            if not _holds_layers(keras, value, _MOST_LEVELS)
            and can_travel(plain := _untracked(value))
        }
        for path, part in found.items()
        if isinstance(part, keras.Layer)
    }
    # As a state: an attribute may refer to the layer.
    state = attributes, None, None, _set_attributes
    return _make_again, (make, args, dict(objects)), *state


def _make_again(
    make: Any, args: tuple[Any, ...], objects: dict[str, Any]
) -> Any:
    keras: Any = importlib.import_module("keras")
    with keras.saving.custom_object_scope(objects):
        return make(*args)


def _set_attributes(made: Any, attributes: dict[Path, dict[str, Any]]) -> None:
    keras: Any = importlib.import_module("keras")
    for path, part in dict(_parts_of(keras, made)).items():
        if isinstance(part, keras.Layer):
            vars(part).update(attributes.get(path, {}))


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


def _holds_layers(keras: Any, value: Any, levels: int) -> bool:
    """Returns whether a value is, or has in it, what Keras makes itself."""
    if isinstance(value, (types.FunctionType, type)):
        return False
    if isinstance(value, (*_CONTAINERS, dict)) and levels:
        items = value.values() if isinstance(value, dict) else value
        return any(_holds_layers(keras, item, levels - 1) for item in items)
    kind = type(value)
    is_kerass = kind.__module__.startswith("keras.")
    is_layer = isinstance(value, (keras.Layer, keras.Variable))
    return is_kerass or is_layer or "Variable" in kind.__name__
