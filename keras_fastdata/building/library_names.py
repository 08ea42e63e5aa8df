"""Finds what the program may have set in the modules of libraries.

A script may replace a function of a library, or add a name that older code
needs (`np.float = float`). A worker process imports the library itself.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from keras_fastdata._modules import (
    is_users_class,
    is_users_code,
    is_users_module,
)

# Of values that no library need have made.
_PLAIN = (bool, int, float, str)


def set_in_library(
    module: Any, names: frozenset[str]
) -> Iterator[tuple[types.ModuleType, str]]:
    """Yields the variables of a library, among `names`, that may be set.

    Each with its module. Modules in the module are searched as well.
    """
    waiting, seen = [module], set()
    for part in waiting:  # grows
        if not isinstance(part, types.ModuleType) or part in seen:
            continue
        seen.add(part)
        if is_users_module(part) or part.__name__.startswith("keras_fastdata"):
            continue
        variables = vars(part)
        for name in sorted(names & variables.keys()):
            value = variables.get(name)
            waiting.append(value)
            if _may_be_set(value):
                yield part, name


def _may_be_set(value: Any) -> bool:
    """Returns whether the program may have set a variable of a library."""
    if isinstance(value, types.FunctionType):
        return is_users_code(value.__globals__.get("__name__"))
    if isinstance(value, type):
        return value.__module__ == "builtins" or is_users_class(value)
    return type(value) in _PLAIN
