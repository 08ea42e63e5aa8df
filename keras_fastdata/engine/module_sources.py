"""Has workers run the code that the trainer has imported.

A user may edit a module while the program runs. A worker that starts later
would import other code than the trainer has. So the trainer keeps the sources
of the user's modules as they were when a dataset first used them.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import types
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple


class SourceFile(NamedTuple):
    """The file of a module as it was."""

    path: str
    modified_ns: int
    nbytes: int
    text: bytes  # compressed

    @staticmethod
    def of(path: str) -> SourceFile:
        with open(path, "rb") as file:
            text = zlib.compress(file.read())
            found = os.fstat(file.fileno())
        return SourceFile(path, found.st_mtime_ns, found.st_size, text)

    def spec(self, name: str) -> importlib.machinery.ModuleSpec:
        """Returns the spec of a module whose file is not there any more."""
        folder, file = os.path.split(self.path)
        is_package = file == "__init__.py"
        spec = importlib.util.spec_from_file_location(
            name,
            self.path,
            submodule_search_locations=[folder] if is_package else None,
        )
        assert spec is not None
        return spec

    def is_of(self, path: str) -> bool:
        """Returns whether a file seems to have this content."""
        found = os.stat(path)
        stamp = found.st_mtime_ns, found.st_size
        return stamp == (self.modified_ns, self.nbytes)


Sources = dict[str, SourceFile]  # by module

# Of each module: what identifies its import, and its source at the first look.
_first: dict[str, tuple[Any, SourceFile | None]] = {}


def sources_of(modules: Iterable[str]) -> Sources:
    """Returns the sources that modules had when this was asked for first.

    A module that is imported again begins anew.
    """
    found: Sources = {}
    for name in modules:
        module = sys.modules.get(name)
        spec = getattr(module, "__spec__", None)
        if spec is None:
            continue
        known = _first.get(name)
        if known is None or known[0] is not spec:
            known = _first[name] = spec, _source_of(module)
        if known[1] is not None:
            found[name] = known[1]
    return found


def _source_of(module: Any) -> SourceFile | None:
    path = getattr(module, "__file__", None)
    if not isinstance(path, str) or not path.endswith(".py"):
        return None
    try:
        return SourceFile.of(path)
    except OSError:
        return None


def use_former(
    loader: importlib.machinery.SourceFileLoader, source: SourceFile
) -> None:
    """Has a loader run a former source, if the file has another one now."""
    try:
        if source.is_of(loader.path):
            return
    except OSError:
        pass  # somebody has removed it
    text = zlib.decompress(source.text)

    def get_code(_: str) -> types.CodeType:
        code: types.CodeType = compile(
            text, loader.path, "exec", dont_inherit=True
        )
        return code

    setattr(loader, "get_code", get_code)  # noqa: B010 - a method
