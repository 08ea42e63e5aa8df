"""Tells on which values outside of a dataset the batches depend.

A cache's directory is for one set of these values. What builds assign is not
among them, unless the program has changed it since the start; nor is the folder
that the program starts in. A large object of a library, other than a table,
cannot be compared with that of another run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from keras_fastdata._modules import current_folder
from keras_fastdata.building.variables import ABSENT, SELF, Variable
from keras_fastdata.engine.covered_values import covers, is_data, is_table
from keras_fastdata.engine.library_objects import content_of
from keras_fastdata.engine.plain_values import text_of, weakly

_FOLDER = "the current folder"


class OutsideValues(NamedTuple):
    """The values of variables that are not attributes of a dataset."""

    # Names and values; the values are plain, arrays or tables, or digests.
    known: list[tuple[str, Any]]
    # The name of a variable with another object of a library than at first.
    replaced: str = ""


class FirstValues:
    """Compares variables with the values that they had at the first look."""

    def __init__(self) -> None:
        # By name: texts, and weak references to objects that have none.
        self._first: dict[str, Any] | None = None

    def look(self, variables: Iterable[Variable]) -> OutsideValues:
        """Returns the values that matter for a cache's directory."""
        known: list[tuple[str, Any]] = []
        compared: dict[str, Any] = {_FOLDER: current_folder()}
        if self._has_changed(_FOLDER, compared[_FOLDER]):
            known.append((_FOLDER, compared[_FOLDER]))
        for variable in variables:
            if variable.path[:1] in ((), (SELF,)):
                continue
            name, value = variable.name, variable.value
            if value is ABSENT:
                continue
            is_by_builds = variable.is_assigned or variable.is_edited
            text = text_of(value)
            if not is_by_builds:
                if text is not None or is_data(value) or is_table(value):
                    known.append((name, value))
                elif (content := content_of(value)) is not None:
                    known.append((name, content))
                elif not covers(value):
                    compared[name] = weakly(value)
            elif text is not None:
                compared[name] = text
                if self._has_changed(name, text):
                    known.append((name, value))
        replaced = (
            name
            for name, value in compared.items()
            if not isinstance(value, str) and self._has_changed(name, value)
        )
        found = OutsideValues(known, next(replaced, ""))
        if self._first is None:
            self._first = compared
        return found

    def _has_changed(self, name: str, value: Any) -> bool:
        """Returns whether a variable is new, or has another value than first.

        `value` is a text or a weak reference.
        """
        if self._first is None:
            return False
        first = self._first.get(name)
        return first != value if isinstance(value, str) else first is not value
