"""Finds what a function uses, but cloudpickle does not find.

After `import PIL.Image`, code names the package `PIL` and its attribute
`Image`. A process that unpickles the code must import `PIL.Image`, too.
cloudpickle notes these modules, but does not look into functions and
comprehensions inside a function. Nor does it find global variables that code
names in a text: `globals()["SIZE"]`, `eval("SIZE")`, `__main__.SIZE`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

from keras_fastdata._modules import names_in, names_in_texts, nested_code


def add(function: types.FunctionType, state: dict[str, Any]) -> None:
    """Adds what a function uses to the state that cloudpickle made of it."""
    hidden = _globals_of(function)
    state["__globals__"] = {**hidden, **state["__globals__"]}
    modules = state.setdefault("_cloudpickle_submodules", [])
    modules += _submodules_of(function)


def _globals_of(function: types.FunctionType) -> dict[str, Any]:
    """Returns the global variables that code names in a text."""
    variables, names = function.__globals__, _names_by_text(function.__code__)
    return {
        name: variables[name]
        for name in sorted(names & variables.keys())
        if not name.startswith("__")
    }


@functools.lru_cache(maxsize=4096)
def _names_by_text(code: types.CodeType) -> frozenset[str]:
    """Returns names of global variables that code may find by a text.

    Code objects nested inside it are included.
    """
    parts = [*nested_code(code)]
    used = {name for part in parts for name in part.co_names}
    texts = {
        text
        for part in parts
        for text in part.co_consts
        if isinstance(text, str)
    }
    names = names_in_texts(code)
    if "globals" in used:
        names |= texts
    has_own_module = "modules" in used and "__name__" in used
    if has_own_module or "__main__" in used | texts:
        names |= names_in(code)
    return names


def _submodules_of(function: types.FunctionType) -> list[types.ModuleType]:
    """Returns the imported submodules that code inside a function uses."""
    code = function.__code__
    if not any(isinstance(part, types.CodeType) for part in code.co_consts):
        return []  # cloudpickle finds all
    names = names_in(code)
    packages = {
        held.__name__
        for held in _held_by(function, names)
        if isinstance(held, types.ModuleType)
    }
    if not packages:
        return []
    found = {
        name: module
        for name, module in sys.modules.copy().items()
        for package in packages
        if name.startswith(f"{package}.")
        and names.issuperset(name.split(".")[package.count(".") + 1 :])
        and isinstance(module, types.ModuleType)
    }
    return [found[name] for name in sorted(found)]


def _held_by(
    function: types.FunctionType, names: frozenset[str]
) -> Iterator[Any]:
    """Yields the global and outer variables that a function may use."""
    variables = function.__globals__
    for name in names:
        yield variables.get(name)
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not assigned yet
            yield cell.cell_contents
