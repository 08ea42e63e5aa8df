"""Keeps the settings that a module saw in other modules while it was imported.

`if config.FAST: def augment(x): ...` depends on `config.FAST` at that moment. A
worker imports the module later, when the program may have changed the setting.
So the trainer notes the settings of all modules as soon as there are new ones,
and a worker has them while it imports these.

Settings are values that are plain, or objects with such attributes.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import types
from collections.abc import Container, Iterable, Iterator
from typing import Any, NamedTuple

from keras_fastdata._modules import (
    imported_names,
    is_main,
    is_users,
    is_users_class,
    names_in,
    nested_code,
)
from keras_fastdata.building.attributes import attributes_of
from keras_fastdata.building.code_names import Root, changed_by, names_of
from keras_fastdata.engine.plain_values import is_plain
from keras_fastdata.engine.told_forms import pickled

Seen = dict[str, dict[str, Any]]  # settings or their forms, by module and name

_DEEPEST = 4  # levels of objects within settings
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
# Methods that make an object, or restore it.
_MAKING = ("__init__", "__post_init__", "__setstate__")
# Packages for settings.
_OF_SETTINGS = ("omegaconf", "ml_collections")


def users_among(names: Iterable[str]) -> list[str]:
    """Returns the names of the user's modules among those of modules."""
    is_top_users = functools.cache(is_users)
    return [
        name for name in list(names) if is_top_users(name.partition(".")[0])
    ]


class Noted:
    """The settings that the user's modules had at one moment."""

    def __init__(self, modules: Iterable[str]) -> None:
        self._all = {
            name: dict(_settings_in(name))
            for name in users_among(modules)
            if not is_main(name)
        }

    @functools.cached_property
    def _lasting(self) -> Seen:
        """Those that modules do not change themselves.

        What functions change in their own module is no setting, and neither is
        what modules change in others while they are imported: a worker does the
        same.
        """
        changing: dict[str, set[str]] = {}  # modules, by what they change
        for module in self._all:
            for key in _facts_of(module).changed:
                changing.setdefault(key, set()).add(module)
        return {
            module: {
                key: value
                for key, value in values.items()
                if key not in _facts_of(module).changed_by_functions
                and changing.get(key, {module}) <= {module}
            }
            for module, values in self._all.items()
        }

    def seen_by(self, name: str) -> Seen:
        """Returns the settings that a module could see at its import.

        These have names that its code uses, or the code of modules that it
        imports.
        """
        names = _names_for(name, self._all)
        return {
            module: found
            for module, values in self._lasting.items()
            if module != name
            and (
                found := {
                    key: values[key] for key in sorted(names & values.keys())
                }
            )
        }


def _names_for(name: str, modules: Container[str]) -> set[str]:
    """Returns the names that a module uses, or those that it imports.

    Only modules among `modules` count.
    """
    names: set[str] = set()
    waiting = [name]
    for module in waiting:  # grows
        facts = _facts_of(module)
        names |= facts.names
        waiting += [
            other
            for other in facts.imported
            if other in modules and other not in waiting
        ]
    return names


def _settings_in(name: str) -> Iterator[tuple[str, Any]]:
    module = sys.modules.get(name)
    if not isinstance(module, types.ModuleType):
        return
    for key, value in list(vars(module).items()):
        if key.startswith("__"):
            continue
        if _is_of_python(value):
            yield key, copy.deepcopy(value)
        elif _is_settings(value) and (form := pickled(value)) is not None:
            yield key, form


def _is_of_python(value: Any) -> bool:
    """Returns whether a plain value can be unpickled without an import."""
    if not is_plain(value):
        return False
    waiting = [value]
    for item in waiting:  # grows
        if type(item) in (list, tuple, set, frozenset):
            waiting += item
        elif type(item) is dict:
            waiting += [*item, *item.values()]
        elif type(item) not in _SCALARS:
            return False
    return True


def _is_settings(value: Any, deepest: int = _DEEPEST) -> bool:
    kind: Any = type(value)
    if is_plain(value):
        return True
    if kind.__module__.partition(".")[0] in _OF_SETTINGS:
        return True
    if isinstance(value, type) or not is_users_class(kind) or not deepest:
        return False
    if _changes_itself(kind):  # a registry, or the like
        return False
    parts = attributes_of(value).values()
    return bool(parts) and all(
        _is_settings(part, deepest - 1) for part in list(parts)
    )


@functools.lru_cache(maxsize=1024)
def _changes_itself(kind: type) -> bool:
    """Returns whether a method of a class changes its object."""
    return any(
        target.root is Root.SELF
        for base in kind.__mro__
        if is_users_class(base)
        for name, method in vars(base).items()
        if isinstance(method, types.FunctionType) and name not in _MAKING
        for names in [names_of(method.__code__, None)]
        for target in names.assigned | names.edited
    )


class _Facts(NamedTuple):
    """What the code of a module says."""

    spec: Any  # of the import that this is about
    names: frozenset[str]  # all that the code uses
    imported: tuple[str, ...]  # modules, or what is imported from them
    changed: frozenset[str]  # what its body changes in variables
    changed_by_functions: frozenset[str]


_facts: dict[str, _Facts] = {}


def _facts_of(name: str) -> _Facts:
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    known = _facts.get(name)
    if known is not None and known.spec is spec:
        return known
    try:
        assert spec is not None
        code = spec.loader.get_code(name)
        found = _read(spec, code, getattr(module, "__package__", None))
    except Exception:  # it has no code, or somebody has edited the file
        found = _Facts(spec, frozenset(), (), frozenset(), frozenset())
    _facts[name] = found
    return found


def _read(spec: Any, code: types.CodeType, package: str | None) -> _Facts:
    parts = [*nested_code(code)]
    functions = [one for one in parts if one.co_flags & inspect.CO_OPTIMIZED]
    body = [one for one in parts if one not in functions]
    return _Facts(
        spec,
        names_in(code),
        imported_names(code, package),
        changed_by(body),
        changed_by(functions),
    )
