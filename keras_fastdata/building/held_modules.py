"""Finds the variables of modules that code may ask for by name.

Code may have a module in an object, or give the module to other code, which
then uses names of its own.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from keras_fastdata._modules import is_users_class, is_users_module, names_in
from keras_fastdata._unimported import FoundSource, sources_of
from keras_fastdata.building.assignments import is_pythons
from keras_fastdata.building.code_names import computes_names, modules_passed_on
from keras_fastdata.building.set_names import names_set_by


class HeldModules:
    """The modules that code may ask for variables under names of its own.

    Attributes:
        modules: Those that objects hold, and that code gives to other code.
    """

    def __init__(self) -> None:
        self.modules: list[types.ModuleType] = []
        self._names: frozenset[str] = frozenset()  # all that the code uses
        self._is_computed = False  # whether the code may use any other name
        self._searched: Any = None  # what there was at the latest search

    def note(self, code: types.CodeType, variables: dict[str, Any]) -> None:
        """Notes code, with its global variables."""
        if not names_in(code) <= self._names:
            self._names |= names_in(code)
        self._is_computed |= computes_names(code)
        self.modules += modules_passed_on(code, variables)

    def unsearched(self) -> list[tuple[types.ModuleType, frozenset[str]]]:
        """Returns the modules, and the names that the code may use there.

        None if nothing was added since the latest call.
        """
        now = id(self._names), self._is_computed, len(self.modules)
        if now == self._searched:
            return []
        self._searched = now
        return [
            (module, self._names.union(_own_names_of(module)))
            if self._is_computed and is_users_module(module)
            else (module, self._names)
            for module in dict.fromkeys(self.modules)
        ]


def sources_to_import(
    module: str, parts: Iterable[str], seen: set[str]
) -> Iterator[FoundSource]:
    """Yields the sources of modules that are not imported yet.

    `parts` are to be imported from `module`.
    """
    there = sys.modules
    held = vars(there[module]) if module in there else {}
    missing = tuple(sorted(part for part in parts if part not in held))
    if missing or module not in there:
        yield from sources_of(module, missing, seen, but=there)


def count_among(names: frozenset[str], module: types.ModuleType) -> int:
    """Returns how many of the names a module has, to show additions."""
    return len(_asked_for(module, names) & vars(module).keys())


def names_known(
    module: types.ModuleType, names: frozenset[str]
) -> frozenset[str]:
    """Returns which of the names a module has, or had when it was imported."""
    names, held = _asked_for(module, names), vars(module).keys()
    had = names_set_by(module) or frozenset()
    return (names & had) | ((names | {"__getattr__"}) & held)


def _asked_for(
    module: types.ModuleType, names: frozenset[str]
) -> frozenset[str]:
    """Returns what code that uses `names` may ask a module for.

    If its class is the user's, a property may ask for any variable.
    """
    is_odd = is_users_class(type(module))
    return names.union(_own_names_of(module)) if is_odd else names


def _own_names_of(module: types.ModuleType) -> Iterator[str]:
    """Yields the names of a module's variables, but not of other modules."""
    for name, value in list(vars(module).items()):
        if not (is_pythons(name, value) or type(value) is types.ModuleType):
            yield name
