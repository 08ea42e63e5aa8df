"""Whose a module is: the user's own, or something that was installed."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

_INSTALLED = ("site-packages", "dist-packages")


def is_users(name: Any, *, if_unknown: bool = False) -> bool:
    """Whether a module is part of the user's program.

    Such are `__main__`, and files outside of the standard library and of
    folders that packages are installed in.

    Args:
        name: The module's name.
        if_unknown: What to return where the module has no file, or is not
            imported here.
    """
    if not isinstance(name, str):
        return False  # a class may say anything
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
def _has_installed(folder: str) -> bool:
    """Whether packages are installed in a folder."""
    folder = os.path.abspath(folder)
    if any(part in _INSTALLED for part in folder.split(os.sep)):
        return True
    try:
        # Where packages are installed, their descriptions lie beside them.
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    except OSError:
        return False
