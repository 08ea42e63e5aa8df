"""`Storage` finds and reads files, and keeps what is costly to fetch."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


class Storage:
    """Finds and reads files by path."""

    def find(self, paths: Paths) -> list[str]:
        """Returns all files that paths and glob patterns name, in order."""
        if isinstance(paths, (str, os.PathLike)):
            paths = [paths]
        found = []
        for path in [os.fspath(path) for path in paths]:
            found += sorted(glob.glob(path)) if glob.has_magic(path) else [path]
        if not found:
            raise FileNotFoundError(f"No file matches {paths}.")
        return found

    def read(self, path: str) -> bytes:
        """Returns the content of a file."""
        with open(path, "rb") as file:
            return file.read()

    @contextlib.contextmanager
    def local(self, path: str) -> Iterator[str]:
        """Gives the path of a local file with the content of `path`.

        The file stays until the end of the `with` block.
        """
        yield path

    @contextlib.contextmanager
    def entry(self, key: str, make: Callable[[str], Any]) -> Iterator[str]:
        """Gives the path of a local file that `make(path)` writes once.

        `key` must change when the content would. All processes share the
        file. It stays until the end of the `with` block; a memory map of it
        may stay longer.
        """
        raise NotImplementedError
