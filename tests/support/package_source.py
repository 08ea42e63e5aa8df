"""The source of the package, parsed once for all tests that look at it."""

from __future__ import annotations

import ast
import functools
import pathlib

import keras_fastdata

ROOT = pathlib.Path(keras_fastdata.__file__).parent


@functools.cache
def trees() -> dict[str, ast.Module]:
    """The syntax tree of each file, by its path within the package."""
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text("utf-8"))
        for path in sorted(ROOT.rglob("*.py"))
    }
