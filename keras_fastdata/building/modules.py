"""Distinguishes the user's modules from installed modules.

Also reads the names that a code object uses, and the modules it imports.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib.util
import os
import sys
import sysconfig
import types
from collections.abc import Iterator
from typing import Any

_STDLIB = sysconfig.get_path("stdlib")
_INSTALLED = ("site-packages", "dist-packages")


def is_users(name: Any, *, if_unknown: bool = False) -> bool:
    """Returns whether a module is part of the user's program.

    The user's modules are `__main__`, and files outside of the standard
    library and of the folders of installed packages. `if_unknown` is the
    result for a module that has no file, or is not imported in this process.
    """
    if not isinstance(name, str):
        return False  # a class may set `__module__` to anything
    if name == "__main__":
        return True
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or top == "keras_fastdata":
        return False
    module = sys.modules.get(top)
    file = getattr(module, "__file__", None)
    folders = list(getattr(module, "__path__", ()))
    if folders:
        return not _has_installed(os.path.dirname(folders[0]))
    if file is None:
        return if_unknown
    return not _has_installed(os.path.dirname(file))


@functools.lru_cache(maxsize=4096)
def is_users_file(file: str) -> bool:
    """Returns whether a file of Python code is part of the user's program.

    Code without a file has a name such as "<stdin>".
    """
    if file.startswith("<frozen"):
        return False
    ours = (_STDLIB, os.path.dirname(os.path.dirname(__file__)))
    folder = os.path.dirname(os.path.abspath(file))
    inside = any(os.path.join(folder, "").startswith(o + os.sep) for o in ours)
    return not inside and not _has_installed(folder)


@functools.lru_cache(maxsize=4096)
def _has_installed(folder: str) -> bool:
    """Returns whether a folder holds installed packages."""
    folder = os.path.abspath(folder)
    if any(part in _INSTALLED for part in folder.split(os.sep)):
        return True
    try:
        # Installed packages have `.dist-info` folders beside them.
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    except OSError:
        return False


def nested_code(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields a code object and all code objects nested inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested_code(constant)


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> frozenset[str]:
    """Returns the names of globals and attributes that a code object uses.

    Code objects nested inside it are included.
    """
    return frozenset(n for part in nested_code(code) for n in part.co_names)


def imports_in(
    code: types.CodeType, package: str | None
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields the modules that a code object imports, with the names from each.

    Code objects nested inside it are included. Relative imports begin at
    `package`.
    """
    for part in nested_code(code):
        loaded: list[Any] = []
        for step in dis.get_instructions(part):
            if step.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
                loaded.append(step.argval)
            elif step.opname == "IMPORT_NAME":
                level, names = loaded[-2:]
                with contextlib.suppress(ImportError):  # beyond the package
                    module = "." * level + step.argval
                    name = importlib.util.resolve_name(module, package)
                    yield name, names or ()
