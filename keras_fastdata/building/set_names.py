"""Finds what the program has set in modules, beside their own code.

A script may replace a function of a library, or add a name that older code
needs (`np.float = float`). A worker process imports the library itself.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from keras_fastdata._call_stack import raise_of_handler
from keras_fastdata._modules import (
    instructions,
    is_users_class,
    is_users_code,
    is_users_module,
    nested_code,
    spec_of,
)

_PLAIN = (bool, int, float, str)


def set_in_library(
    module: Any, names: frozenset[str]
) -> Iterator[tuple[types.ModuleType, str]]:
    """Yields the variables of a library, among `names`, that are the user's.

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
            if _is_users(value) or _is_added(part, name, value):
                yield part, name


def _is_users(value: Any) -> bool:
    """Returns whether a value is a function or a class of the user's."""
    if isinstance(value, types.FunctionType):
        return is_users_code(value.__globals__.get("__name__"))
    return isinstance(value, type) and is_users_class(value)


def _is_added(module: types.ModuleType, name: str, value: Any) -> bool:
    """Returns whether the code of a module seems not to set a variable of it.

    A value that the code sets may belong to one process, such as a process id.
    """
    is_class = isinstance(value, type) and value.__module__ == "builtins"
    if not (is_class or type(value) in _PLAIN):
        return False
    known = names_set_by(module)
    return known is not None and name not in known


def names_set_by(module: types.ModuleType) -> frozenset[str] | None:
    """Returns the names that the code of a module sets in the module.

    `None` if there is no code, as for a module in C.
    """
    spec = spec_of(module)
    return None if spec is None else _names_set_by(spec.loader, spec.name)


@functools.lru_cache(maxsize=1024)
def _names_set_by(loader: Any, module: str) -> frozenset[str] | None:
    try:
        code = loader.get_code(module)
        parts = list(nested_code(code))
    except Exception as error:
        raise_of_handler(error)
        return None
    return frozenset(
        step.argval
        for part in parts
        for step in instructions(part)
        if step.opname == "STORE_GLOBAL"
        or (step.opname == "STORE_NAME" and part is code)
    )
