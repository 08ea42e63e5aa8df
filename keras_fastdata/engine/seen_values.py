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
import sys
import types
from collections.abc import Container, Iterable, Iterator
from typing import Any, NamedTuple

from keras_fastdata._modules import is_main, is_users, is_users_class
from keras_fastdata.building.attributes import attributes_of
from keras_fastdata.engine.import_changes import ImportChanges, facts_of
from keras_fastdata.engine.plain_values import is_plain
from keras_fastdata.engine.told_forms import pickled

Seen = dict[str, dict[str, Any]]  # settings or their forms, by module and name

_DEEPEST = 4  # levels of objects within settings
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
# Packages for settings.
_OF_SETTINGS = ("omegaconf", "ml_collections")


def users_among(names: Iterable[str]) -> list[str]:
    """Returns the names of the user's modules among those of modules."""
    is_top_users = functools.cache(is_users)
    return [
        name for name in list(names) if is_top_users(name.partition(".")[0])
    ]


class _Setting(NamedTuple):
    """A value, or its form."""

    value: Any
    names: frozenset[str]  # of attributes in it


class Noted:
    """The settings that the user's modules had at one moment."""

    def __init__(self, modules: Iterable[str]) -> None:
        users = [name for name in users_among(modules) if not is_main(name)]
        self._all = {name: dict(_settings_in(name)) for name in users}
        # What modules change while they are imported.
        self.changes = ImportChanges(users)

    @functools.cached_property
    def _lasting(self) -> Seen:
        """Those that modules do not change while they are imported."""
        has_changed = self.changes.has
        return {
            module: {
                key: setting.value
                for key, setting in settings.items()
                if not has_changed(module, (key,))
                and not any(
                    has_changed(module, (key, name)) for name in setting.names
                )
            }
            for module, settings in self._all.items()
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
        facts = facts_of(module)
        names |= facts.names
        waiting += [
            other
            for other in facts.imported
            if other in modules and other not in waiting
        ]
    return names


def _settings_in(name: str) -> Iterator[tuple[str, _Setting]]:
    module = sys.modules.get(name)
    if not isinstance(module, types.ModuleType):
        return
    for key, value in list(vars(module).items()):
        if key.startswith("__"):
            continue
        names: set[str] = set()
        if _is_of_python(value):
            yield key, _Setting(copy.deepcopy(value), frozenset())
        elif _is_settings(value, names) and (form := pickled(value)):
            yield key, _Setting(form, frozenset(names))


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


def _is_settings(value: Any, names: set[str], deepest: int = _DEEPEST) -> bool:
    """Returns whether a value is settings; adds the names in it to `names`."""
    kind: Any = type(value)
    if is_plain(value):
        return True
    if kind.__module__.partition(".")[0] in _OF_SETTINGS:
        return True
    if isinstance(value, type) or not is_users_class(kind) or not deepest:
        return False
    parts = dict(attributes_of(value))
    names |= parts.keys()
    return bool(parts) and all(
        _is_settings(part, names, deepest - 1) for part in parts.values()
    )
