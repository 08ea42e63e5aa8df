"""Whose a module is: the user's own, or something that was installed."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

_INSTALLED = ("site-packages", "dist-packages")


def is_users(name: Any) -> bool:
    """Whether a module that is imported here is part of the user's program.

    Such are `__main__`, and files outside of the standard library and of
    folders that packages are installed in.
    """
    if not isinstance(name, str):
        return False  # a class may say anything
    if name == "__main__":
        return True
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or top == "keras_fastdata":
        return False
    return _is_outside(top)


@functools.lru_cache(maxsize=4096)
def _is_outside(top: str) -> bool:
    """Whether a package's folder is none that packages are installed in."""
    module = sys.modules.get(top)
    path = getattr(module, "__file__", None)
    if path is None:
        path = next(iter(getattr(module, "__path__", ())), None)
    if path is None:
        return False
    if not path.endswith("__init__.py") and hasattr(module, "__path__"):
        path = os.path.join(path, "__init__.py")
    is_package = hasattr(module, "__path__")
    folder = os.path.dirname(os.path.abspath(path))
    folder = os.path.dirname(folder) if is_package else folder
    if any(part in _INSTALLED for part in folder.split(os.sep)):
        return False
    return not _has_installed(folder)


@functools.lru_cache(maxsize=64)
def _has_installed(folder: str) -> bool:
    try:
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    except OSError:
        return False
