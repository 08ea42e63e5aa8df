"""The recorded value of a variable, for detecting later changes."""

from __future__ import annotations

import operator
from typing import Any

from keras_fastdata._modules import is_users_class
from keras_fastdata.building.attributes import attributes_of
from keras_fastdata.building.variables import SELF, Variable
from keras_fastdata.engine.plain_values import (
    CONTAINERS,
    MAPPINGS,
    Items,
    content_of,
    is_equal,
    is_plain,
    weakly,
)

_OWN = 2  # steps of the path to an attribute of the dataset


class SeenVariable:
    """The value that a variable had, or a weak reference to the value.

    Values that are not plain are held by weak references, if possible.

    Args:
        variable: The variable.
        value: Its present value.
        most_bytes: Of an array with more, only a sample is compared. `None` is
            the limit of `checksum_of`.
    """

    __slots__ = (
        *("_content", "_is_weak", "_items", "_most_bytes", "_value"),
        "variable",
    )

    def __init__(
        self, variable: Variable, value: Any, most_bytes: int | None = None
    ) -> None:
        self.variable = variable
        self._most_bytes = most_bytes
        self._content = self._content_of(value)
        can_be_kept = is_plain(value)
        self._value = value if can_be_kept else weakly(value)
        self._items = _items_of(value) if can_be_kept else None
        self._is_weak = self._value is not value

    @property
    def differs_in_items(self) -> bool:
        """Whether the container is the same, with as many other items.

        Its items are variables as well, if they are few.
        """
        content = self._content_of(value := self.variable.value)
        return (
            self.variable.has_items
            and self._is_recorded(value)
            and isinstance(content, Items)
            and isinstance(self._content, Items)
            and len(content) == len(self._content)
        )

    @property
    def _is_told_by_assignment(self) -> bool:
        """Whether it is an attribute of the dataset that builds may assign.

        What the program assigns to it, the dataset itself notices.
        """
        variable = self.variable
        is_own = variable.path[:1] == (SELF,) and len(variable.path) == _OWN
        return is_own and (variable.is_assigned or variable.is_edited)

    def _content_of(self, value: Any) -> Any:
        try:
            if self.variable.is_assigned and is_users_class(type(value)):
                attributes = attributes_of(value)
                if is_plain(attributes):
                    return repr(attributes)
            return content_of(value, self._most_bytes)
        except Exception:  # the user's object may refuse to be looked into
            return None

    def holds_same(self) -> bool:
        """Returns whether the variable holds the recorded objects."""
        value = self.variable.value
        if not self._is_recorded(value):
            return False
        if self._items is None:
            return True
        items = _items_of(value)
        return len(items) == len(self._items) and all(
            map(operator.is_, items, self._items)
        )

    def _is_recorded(self, value: Any) -> bool:
        # Not what a weak reference refers to: `None`, if that is gone.
        return (weakly(value) if self._is_weak else value) is self._value

    def has_changed(self) -> bool:
        """Returns whether the variable has another value than the recorded."""
        value = self.variable.value
        if self._is_recorded(value):
            return self._content is not None and (
                self._content != self._content_of(value)
            )
        if self._is_told_by_assignment:
            return False
        can_be_equal = not self._is_weak and is_plain(value)
        return not (can_be_equal and is_equal(value, self._value))


def _items_of(value: Any) -> list[Any]:
    """Returns the keys and items of a container, [] of anything else."""
    if type(value) not in (*CONTAINERS, *MAPPINGS):
        return []
    values = value.values() if isinstance(value, dict) else ()
    return [*value, *values]
