"""Pickles layers, models, metrics and losses with what Keras leaves out.

Keras makes a layer again from its configuration and its weights. A worker
process lacks the classes and functions of a script that the configuration
names, also those that the script registered. And what the program has set since
the layer was made, such as `layer.scale = 10`, is in no configuration.

Below, a metric counts as a layer. A loss has no weights: all of it is in its
attributes.
"""

from __future__ import annotations

import collections
import contextlib
import copyreg
import functools
import importlib
import operator
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from keras_fastdata._modules import is_users_class, is_users_code

Path = tuple[Any, ...]  # of attributes, indices and keys

_DICTS: tuple[Any, ...] = (collections.OrderedDict, dict)
_LEAVES = {str, bytes, int, float, bool, type(None)}
# Keras makes these of the containers that a layer holds.
_TRACKED = {"TrackedList", "TrackedDict", "TrackedOrderedDict", "TrackedSet"}


def is_tracked(kind: type) -> bool:
    """Returns whether Keras has made a container of one that a layer holds."""
    return kind.__name__ in _TRACKED and kind.__module__.startswith("keras.")


def reduce_layer(
    keras: Any, obj: Any, can_travel: Callable[[Any], bool]
) -> Any:
    """Returns the parts of a layer, a metric or a loss.

    `NotImplemented` of anything else, and if its class says itself how to
    pickle it.

    Args:
        keras: The module `keras`.
        obj: The object.
        can_travel: Returns whether a value that a layer holds can be pickled.
    """
    kind: Any = type(obj)
    if kind.__reduce__ is not keras.Layer.__reduce__:
        return NotImplemented
    if isinstance(obj, keras.losses.Loss):
        make = copyreg.__newobj__  # type: ignore[attr-defined]
        return make, (kind,), vars(obj)
    if not isinstance(obj, _kinds_of(keras)):
        return NotImplemented
    make, args, *_ = obj.__reduce__()
    found = dict(_parts_of(keras, obj))
    objects = _named(keras, filter(None, map(_users_own, found.values())))
    layers = {
        path: part
        for path, part in found.items()
        if isinstance(part, _kinds_of(keras))
    }
    paths = {id(layer): path for path, layer in layers.items()}
    attributes = {
        path: (
            set(vars(layer)),
            dict(_data_in(keras, layer, paths, can_travel)),
        )
        for path, layer in layers.items()
    }
    # As a state: an attribute may refer to the layer.
    state = attributes, None, None, _set_attributes
    return _make_again, (make, args, objects), *state


def _named(keras: Any, found: Iterable[Any]) -> dict[str, Any]:
    """Returns classes and functions by the names that configurations have.

    Raises:
        TypeError: Two classes of layers have one name. Keras would use one of
            them for both.
    """
    objects: dict[str, Any] = {}
    for each in found:
        names = {keras.saving.get_registered_name(each)}
        if isinstance(each, types.FunctionType):
            names.add(each.__name__)
        for name in names:
            known = objects.setdefault(name, each)
            # Of other things of one name, layers have the right one anyway.
            if known is not each and _is_layer(keras, known, each):
                raise TypeError(
                    f"cannot pickle a layer with two classes of the name "
                    f"{name!r}: register them under two names, with "
                    "`keras.saving.register_keras_serializable`"
                )
    return objects


def _is_layer(keras: Any, *kinds: Any) -> bool:
    return any(
        isinstance(k, type) and issubclass(k, keras.Layer) for k in kinds
    )


def _make_again(
    make: Any, args: tuple[Any, ...], objects: dict[str, Any]
) -> Any:
    keras: Any = importlib.import_module("keras")
    with keras.saving.custom_object_scope(objects):
        return make(*args)


def _set_attributes(
    made: Any, attributes: dict[Path, tuple[set[str], dict[str, Any]]]
) -> None:
    """Sets attributes, and deletes those that the program has deleted."""
    keras: Any = importlib.import_module("keras")
    parts = dict(_parts_of(keras, made))
    for path, (names, values) in attributes.items():
        # The program may have replaced a layer that Keras makes again.
        layer = parts.get(path)
        if isinstance(layer, _kinds_of(keras)) and is_users_class(type(layer)):
            for name, _ in _attributes_of(keras, layer):
                if name not in names:
                    del vars(layer)[name]
        for name, value in values.items():
            with contextlib.suppress(KeyError):
                vars(layer)[name] = _with_layers(value, parts)


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
        if isinstance(part, _kinds_of(keras)):
            items = _attributes_of(keras, part)
            # Those that only `keras.Sequential` and the like keep come last.
            items = [*items, ("_layers", vars(part).get("_layers"))]
        elif isinstance(part, dict):
            items = part.items()
        elif isinstance(part, (list, tuple)):
            items = enumerate(part)
        waiting += [
            ((*path, name), inner)
            for name, inner in items
            if type(inner) not in _LEAVES
        ]


def _attributes_of(keras: Any, layer: Any) -> list[tuple[str, Any]]:
    """Returns a layer's attributes that Keras does not manage."""
    is_users = is_users_class(type(layer))
    managed = _managed_by(keras, layer)
    return [
        (name, value)
        for name, value in vars(layer).items()
        if name not in managed and (is_users or not name.startswith("_"))
    ]


def _managed_by(keras: Any, layer: Any) -> frozenset[str]:
    """Returns the names of attributes that all such layers or models have."""
    if isinstance(layer, keras.Model):
        return _attributes_made_by(keras.Sequential)
    kinds = (each for each in _kinds_of(keras) if isinstance(layer, each))
    return _attributes_made_by(next(kinds))


def collected_by(keras: Any, layer: Any) -> list[str]:
    """Returns the names of the containers in which Keras collects things.

    Such as a layer's weights and losses. Other objects have none.
    """
    if not isinstance(layer, _kinds_of(keras)):
        return []
    held = vars(layer)
    managed = _managed_by(keras, layer)
    return [name for name in managed if is_tracked(type(held.get(name)))]


@functools.lru_cache(maxsize=8)
def _attributes_made_by(kind: Any) -> frozenset[str]:
    # Without a name, it would count for the names of the user's layers.
    return frozenset(vars(kind(name="one")))


def _kinds_of(keras: Any) -> tuple[Any, ...]:
    """Returns what Keras makes again from a configuration and weights."""
    return keras.Layer, keras.metrics.Metric


# -- attributes ----------------------------------------------------------------


class _PartAt(NamedTuple):
    """Stands for a layer within a layer."""

    path: Path


class _KerasError(Exception):
    """A value has in it what Keras makes again itself."""


def _data_in(
    keras: Any,
    layer: Any,
    paths: dict[int, Path],
    can_travel: Callable[[Any], bool],
) -> Iterator[tuple[str, Any]]:
    """Yields the attributes that can travel, with marks in place of layers."""
    for name, value in _attributes_of(keras, layer):
        with contextlib.suppress(_KerasError):
            found = _without_layers(value, keras, paths)
            if can_travel(found):
                yield name, found


def _without_layers(value: Any, keras: Any, paths: dict[int, Path]) -> Any:
    """Returns a value with a `_PartAt` in place of each layer.

    And without the containers that Keras makes of the user's, which refer to
    the layer that has them.

    Raises:
        _KerasError: It has other objects of Keras in it, such as weights.
    """
    if id(value) in paths:
        return _PartAt(paths[id(value)])
    if isinstance(value, (types.FunctionType, type)):
        return value
    # It has drawn a seed, which is not in its configuration.
    if isinstance(value, keras.initializers.Initializer):
        return value
    if _is_container(value):
        return _mapped(_without_layers, value, keras, paths)
    kind = type(value)
    is_kerass = kind.__module__.startswith("keras.")
    is_layer = isinstance(value, (*_kinds_of(keras), keras.Variable))
    if is_kerass or is_layer or "Variable" in kind.__name__:
        raise _KerasError
    return value


def _is_container(value: Any) -> bool:
    """Returns whether a value may have one of Keras's containers in it."""
    return isinstance(value, (dict, list, set, tuple))


def _mapped(change: Callable[..., Any], value: Any, *args: Any) -> Any:
    """Returns a container with changed items.

    It is the same one if no item changes, and Keras has not made it.
    """
    is_dict = isinstance(value, dict)
    items = list(value.values() if is_dict else value)
    changed = [change(item, *args) for item in items]
    if not is_tracked(type(value)) and all(map(operator.is_, items, changed)):
        return value
    if is_dict:
        kind = next(k for k in _DICTS if isinstance(value, k))
        return kind(zip(value, changed, strict=True))
    kind = next(k for k in (list, set, tuple) if isinstance(value, k))
    return getattr(value, "_make", kind)(changed)  # of a named tuple


def _with_layers(value: Any, parts: dict[Path, Any]) -> Any:
    """Returns a value with the layers that it has in it; see `_PartAt`."""
    if isinstance(value, _PartAt):
        return parts[value.path]
    if _is_container(value):
        return _mapped(_with_layers, value, parts)
    return value
