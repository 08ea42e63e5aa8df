"""The recorded value of a variable, for detecting later changes."""

from __future__ import annotations

import operator
from typing import Any

from keras_fastdata._call_stack import raise_of_handler
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
        few_bytes: The same for a quick comparison; `None` if there is none.
    """

    __slots__ = (
        *("_content", "_few_bytes", "_is_weak", "_items", "_most_bytes"),
        *("_quick_content", "_value", "variable"),
    )

    def __init__(
        self,
        variable: Variable,
        value: Any,
        most_bytes: int | None = None,
        few_bytes: int | None = None,
    ) -> None:
        self.variable = variable
        self._most_bytes, self._few_bytes = most_bytes, few_bytes
        self._content = self._quick_content = self._content_of(value)
        if few_bytes is not None:
            self._quick_content = self._content_of(value, is_quick=True)
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

    def _content_of(self, value: Any, *, is_quick: bool = False) -> Any:
        most_bytes = self._few_bytes if is_quick else self._most_bytes
        try:
            if self.variable.is_assigned and is_users_class(type(value)):
                attributes = attributes_of(value)
                if is_plain(attributes):
                    return repr(attributes)
            return content_of(value, most_bytes)
        except Exception as error:
            raise_of_handler(error)
            return None  # the user's object may refuse to be looked into

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

    def has_changed(self, *, is_quick: bool = False) -> bool:
        """Returns whether the variable has another value than the recorded.

        Of arrays of over `few_bytes`, `is_quick` compares a sample alone.
        """
        value = self.variable.value
        if self._is_recorded(value):
            is_quick = is_quick and self._few_bytes is not None
            before = self._quick_content if is_quick else self._content
            return before is not None and (
                before != self._content_of(value, is_quick=is_quick)
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
