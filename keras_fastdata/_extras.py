"""Imports packages that the extras of this package install."""

from __future__ import annotations

import functools
import importlib
from typing import Any


def import_extra(module: str, use: str, extra: str) -> Any:
    """Imports a module that an extra installs, and returns the module.

    Args:
        module: The name of the module.
        use: What it is needed for, such as "Parquet files are read with
            pyarrow".
        extra: The name of the extra.

    Raises:
        ImportError: The module cannot be imported; the error names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{use}, which cannot be imported ({error}). "
            f"Run `pip install 'keras-fastdata[{extra}]'`."
        ) from None


@functools.cache
def import_faster(module: str) -> Any:
    """Imports a module that is quicker; returns `None` if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None
