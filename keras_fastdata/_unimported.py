"""Finds the sources of modules that code may import, and imports none."""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import importlib.util
import pathlib
import types
from collections.abc import Container, Iterator
from typing import NamedTuple

from keras_fastdata._modules import imports_in, is_users_file

Import = tuple[str, tuple[str, ...]]  # a module, and what is imported from it


class FoundSource(NamedTuple):
    """The source of a module of the user's."""

    name: str  # the module's name
    text: bytes
    package: str | None  # where relative imports begin

    @property
    def code(self) -> types.CodeType:
        """The code that runs when the module is imported."""
        return _compiled(self.text)

    @property
    def imports(self) -> tuple[Import, ...]:
        """What the module imports, also within its functions."""
        return _imports_in(self.code, self.package)


def sources_of(
    module: str, names: tuple[str, ...], seen: set[str], but: Container[str]
) -> Iterator[FoundSource]:
    """Yields the source of a user's module, and of its imports.

    Args:
        module: The name of the module.
        names: What is imported from the module, which may be modules.
        seen: The names of modules that were found before. Grows.
        but: The names of modules that are left out, with their imports.
    """
    for spec in _specs_of(module, names):
        if spec.name in seen or not spec.has_location or spec.name in but:
            continue
        seen.add(spec.name)
        if not is_users_file(str(spec.origin)):
            continue
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            text = pathlib.Path(str(spec.origin)).read_bytes()
            found = FoundSource(spec.name, text, spec.parent)
            imports = found.imports
            yield found
            for further, parts in imports:
                yield from sources_of(further, parts, seen, but)


@functools.lru_cache(maxsize=256)
def _compiled(text: bytes) -> types.CodeType:
    return compile(text, "<module>", "exec", dont_inherit=True)


@functools.lru_cache(maxsize=256)
def _imports_in(
    code: types.CodeType, package: str | None
) -> tuple[Import, ...]:
    return tuple(imports_in(code, package))


def _specs_of(
    module: str, names: tuple[str, ...]
) -> Iterator[importlib.machinery.ModuleSpec]:
    """Yields the import specs of a module, its packages and its submodules."""
    first, *others = module.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except (ImportError, ValueError):
        return
    find = importlib.machinery.PathFinder.find_spec
    for name in others:
        if spec is None:
            return
        yield spec
        folders = spec.submodule_search_locations or ()
        spec = find(f"{spec.name}.{name}", [*folders])
    if spec is not None:
        yield spec
        folders = spec.submodule_search_locations or ()
        found = (find(f"{module}.{name}", [*folders]) for name in names)
        yield from filter(None, found)
