"""Pickles layers and models of Keras with what Keras leaves out.

Keras makes a layer again from its configuration and its weights. A worker
process lacks the classes of a script, also those that the script registered.
And attributes that the program has set since the layer was made, such as
`layer.scale = 10`, are in no configuration.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from keras_fastdata._modules import is_users_class, loaded

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.ndarray)


def reduce_layer(obj: Any) -> Any:
    """Returns the parts of a layer; `NotImplemented` for all other objects.

    Also for one whose class says itself how to pickle it.
    """
    keras: Any = loaded("keras")
    if keras is None or not isinstance(obj, keras.Layer):
        return NotImplemented
    kind = type(obj)
    if kind.__reduce__ is not keras.Layer.__reduce__:
        return NotImplemented
    make, args, *_ = obj.__reduce__()
    layers = _layers_in(keras, obj)
    classes = {
        name: type(layer)
        for layer in layers.values()
        if is_users_class(type(layer))
        for name in _names_of(keras, type(layer))
    }
    attributes = {path: _plain_in(layer) for path, layer in layers.items()}
    return _make_again, (make, args, classes, attributes)


def _layers_in(keras: Any, outer: Any) -> dict[tuple[Any, ...], Any]:
    """Returns a layer and the layers in it, by their paths."""
    found: dict[tuple[Any, ...], Any] = {}
    waiting: list[tuple[tuple[Any, ...], Any]] = [((), outer)]
    seen = set()
    for path, layer in waiting:  # grows
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        found[path] = layer
        parts = [*vars(layer).items(), *enumerate(getattr(layer, "layers", ()))]
        waiting += [
            ((*path, name), part)
            for name, part in parts
            if isinstance(part, keras.Layer)
        ]
    return found


def _names_of(keras: Any, kind: Any) -> tuple[str, str]:
    return kind.__name__, keras.saving.get_registered_name(kind)


def _plain_in(layer: Any) -> dict[str, Any]:
    """Returns a layer's public attributes that are plain values or arrays."""
    return {
        name: value
        for name, value in vars(layer).items()
        if type(value) in _PLAIN and not name.startswith("_")
    }


def _make_again(
    make: Any,
    args: tuple[Any, ...],
    classes: dict[str, type],
    attributes: dict[tuple[Any, ...], dict[str, Any]],
) -> Any:
    keras: Any = importlib.import_module("keras")
    with keras.saving.custom_object_scope(classes):
        made = make(*args)
    for path, layer in _layers_in(keras, made).items():
        _set_others(layer, attributes.get(path, {}))
    return made


def _set_others(layer: Any, values: dict[str, Any]) -> None:
    """Sets the attributes that differ."""
    own = vars(layer)
    for name, value in values.items():
        same = name in own and type(own[name]) is type(value)
        if not same or not np.array_equal(own[name], value):
            setattr(layer, name, value)
