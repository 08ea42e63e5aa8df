"""Imports a module as the trainer has, and tells when it is there.

The module has its former source, and is run in the folder in which the trainer
has imported it.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any

from keras_fastdata.engine.module_sources import (
    SourceFile,
    in_folder,
    use_former,
)


class ToldLoader(importlib.abc.Loader):
    """Runs a module with its own loader, within what `around` returns."""

    def __init__(
        self,
        loader: Any,
        folder: str,
        around: Callable[[str], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._loader = loader
        self._folder = folder
        self._around = around

    def create_module(
        self, spec: importlib.machinery.ModuleSpec
    ) -> types.ModuleType | None:
        """Returns what the module's own loader makes."""
        created: types.ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: types.ModuleType) -> None:
        """Runs the module, which then has its own loader."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        with self._around(module.__name__), in_folder(self._folder):
            self._loader.exec_module(module)


def spec_of(
    name: str,
    path: Any,
    target: Any,
    source: SourceFile | None,
    loader: Callable[[Any], ToldLoader],
    but: Any,
) -> importlib.machinery.ModuleSpec | None:
    """Finds a module as all finders do, except `but`.

    Args:
        name: The module's name.
        path: Where the package looks for its parts, or `None`.
        target: A module that may help to find it, or `None`.
        source: Its former source, if that is known.
        loader: Returns the loader to use in place of the module's own.
        but: The finder that asks.
    """
    spec = None
    for finder in sys.meta_path:
        if finder is not but and hasattr(finder, "find_spec"):
            spec = finder.find_spec(name, path, target)
        if spec is not None:
            break
    if source is not None and source.text:
        if spec is None or (
            source.is_package is (spec.submodule_search_locations is None)
        ):
            spec = source.spec(name)
        if isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            use_former(spec.loader, source)
    if spec is None or not hasattr(spec.loader, "exec_module"):
        return None
    spec.loader = loader(spec.loader)
    return spec
