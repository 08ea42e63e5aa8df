"""Compares the values of variables outside of a dataset with their first ones.

A cache's directory is for one state of a program. A fingerprint names the state
at the start; what has changed since then is told by its name and a text. An
object of a library has no such text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from keras_fastdata.building.referred_names import SELF, Variable
from keras_fastdata.engine.fingerprint import covers
from keras_fastdata.engine.plain_values import text_of, weakly


class FirstValues:
    """The values that global variables, and those within objects, had first."""

    def __init__(self, variables: Iterable[Variable]) -> None:
        self._texts: set[tuple[str, str]] = set()
        # Weak references, if possible, to objects that have no text.
        self._objects: dict[str, Any] = {}
        for variable, text in _outside(variables):
            if text is not None:
                self._texts.add((variable.name, text))
            elif _is_only_an_object(variable):
                self._objects[variable.name] = weakly(variable.value)

    def changed(
        self, variables: Iterable[Variable]
    ) -> list[tuple[str, str | None]]:
        """Returns the names and texts of variables that have other values now.

        They are sorted. The text of an object of a library is `None`.
        """
        found: set[tuple[str, str | None]] = set()
        for variable, text in _outside(variables):
            name = variable.name
            if text is not None:
                found |= {(name, text)} - self._texts
            elif _is_only_an_object(variable) and (
                weakly(variable.value) is not self._objects.get(name)
            ):
                found.add((name, None))
        return sorted(found, key=repr)


def _outside(
    variables: Iterable[Variable],
) -> Iterator[tuple[Variable, str | None]]:
    """Yields the variables that are not the dataset's own, and their texts."""
    for variable in variables:
        if variable.path[:1] not in ((), (SELF,)):
            yield variable, text_of(variable.value)


def _is_only_an_object(variable: Variable) -> bool:
    """Returns whether nothing but its identity tells a value from others.

    What builds assign, such as a file that they open, does not count.
    """
    return not (variable.is_assigned or covers(variable.value))
