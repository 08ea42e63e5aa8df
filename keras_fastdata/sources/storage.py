"""`Storage` finds and reads files, and keeps what is costly to fetch."""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from keras_fastdata._validation import integer, seconds
from keras_fastdata.sources.file_cache import FileCache
from keras_fastdata.sources.remote import RemoteFiles

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

_REMOTE = re.compile(r"[a-zA-Z][\w+.-]*://")
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_SUFFIX = re.compile(r"\.[a-zA-Z0-9]{1,10}(?=$|\?)")


def is_remote(path: Any) -> bool:
    """Returns whether a path is one such as `s3://...`."""
    return isinstance(path, str) and _REMOTE.match(path) is not None


class Storage:
    """Finds and reads files by path, on this machine and elsewhere.

    A path such as `s3://bucket/name` or `https://host/name` is read by
    `fsspec`. What was fetched is kept in a directory on disk, which all
    processes of this user share. A file that has changed is fetched again by a
    new `Storage`; one that is in use keeps to what it has found.

    Args:
        options: Arguments of `fsspec`'s file system, such as `{"anon": True}`
            for `s3://`.
        cache_dir: The directory of the cache. In it, a folder is made that
            this user alone may read. Defaults to `~/.cache`, or what the
            environment variable `XDG_CACHE_HOME` names.
        cache_bytes: The most bytes that the cache may take. The least recently
            used files are evicted; those in use stay, even if they are larger,
            and files that are being fetched come on top. 0 keeps a file while
            it is in use. Trainings may share a directory; each evicts down to
            its own limit. Defaults to 16 GiB.
        attempts: How often a request is tried, at least 1, with growing pauses
            in between. Missing files and missing rights end at once.
        timeout_s: The longest that one request may take, in seconds. Requests
            ask for up to 16 MiB; a server that only sends whole files gets
            this time for each 16 MiB. It holds for file systems that use
            `asyncio`, as `s3://`, `gs://` and `https://` do; others have their
            own limits.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: An argument is out of range.

    Example:

    >>> import os, tempfile
    >>> from keras_fastdata.sources import Storage
    >>> storage = Storage()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for number in range(3):
    ...         with open(f"{folder}/{number}.txt", "w") as file:
    ...             _ = file.write(f"file {number}")
    ...     paths = storage.find(folder + "/{1..2}.txt")
    ...     print([os.path.basename(path) for path in paths])
    ...     print(storage.read(paths[0]))
    ['1.txt', '2.txt']
    b'file 1'
    """

    def __init__(
        self,
        options: Mapping[str, Any] | None = None,
        *,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int = 16 << 30,
        attempts: int = 5,
        timeout_s: float = 60.0,
    ) -> None:
        parent = None
        if cache_dir is not None:
            parent = os.path.abspath(os.path.expanduser(os.fspath(cache_dir)))
        self._keeps = integer("cache_bytes", cache_bytes, least=0) > 0
        self._cache = FileCache(parent, cache_bytes)
        self._remote = RemoteFiles(
            options or {},
            integer("attempts", attempts, least=1),
            seconds("timeout_s", timeout_s),
        )

    def find(self, paths: Paths) -> list[str]:
        """Returns all files that paths and patterns name, in order.

        A pattern has `*`, `?`, `[...]` or a range such as `{000..099}`; on
        `https://`, a question mark is part of the path. The files of a pattern
        come sorted by name. A path without a pattern is returned as it is,
        whether or not there is such a file.

        Args:
            paths: A path or pattern, or several.

        Raises:
            FileNotFoundError: No file matches a pattern.
        """
        if isinstance(paths, (str, os.PathLike)):
            paths = [paths]
        found: list[str] = []
        for path in paths:
            for pattern in _expanded(os.fspath(path)):
                found += self._matching(pattern)
        if not found:
            raise FileNotFoundError("`paths` is empty: there is no file.")
        return found

    def _matching(self, pattern: str) -> list[str]:
        is_far = is_remote(pattern)
        has_magic = "*" in pattern or (
            glob.has_magic(pattern) and not pattern.startswith("http")
        )
        if not has_magic or (not is_far and os.path.lexists(pattern)):
            return [pattern]
        if is_far:
            found = self._remote.find(pattern)
        else:
            found = glob.glob(pattern, recursive=True)
        if not found:
            raise FileNotFoundError(f"No file matches {pattern!r}.")
        return sorted(found)

    def version(self, path: str) -> str:
        """Returns a text that changes when the file does.

        Raises the same errors as `read`.
        """
        if is_remote(path):
            found = self._remote.version(path)
            return f"{found.tag} {found.size}"
        about = os.stat(path)
        return f"{about.st_size} {about.st_mtime_ns}"

    def read(self, path: str) -> bytes:
        """Returns the content of a file.

        Raises:
            OSError: The file could not be read. The error of a file elsewhere
                names the file, the number of attempts and the last error.
        """
        if is_remote(path) and not self._keeps:
            version = self._remote.version(path)
            return b"".join(self._remote.parts(path, version))
        with self.local(path) as local, open(local, "rb") as file:
            return file.read()

    @contextlib.contextmanager
    def local(self, path: str) -> Iterator[str]:
        """Gives the path of a local file with the content of `path`.

        The file stays until the end of the `with` block. It must not be
        written to.

        Raises:
            OSError: As in `read`.
        """
        if not is_remote(path):
            yield path
            return
        version = self._remote.version(path)

        def fetch(target: str) -> None:
            with open(target, "wb") as file:
                for part in self._remote.parts(path, version):
                    file.write(part)

        suffix = _SUFFIX.search(path)
        key = f"{path}\n{version.tag}\n{version.size}"
        name = suffix[0] if suffix else ""
        with self._cache.entry(key, fetch, name) as local:
            yield local

    @contextlib.contextmanager
    def entry(self, key: str, make: Callable[[str], Any]) -> Iterator[str]:
        """Gives the path of a local file that `make(path)` writes once.

        `key` must change when the content would. One process makes the file,
        and others wait for it. If that process dies, or `make` raises there,
        the next one makes it. `make` must not ask for the same key.

        The file stays until the end of the `with` block; a memory map of it
        may stay longer. It must not be written to.

        Raises:
            OSError: The cache directory cannot be used, or its disk is full.
        """
        with self._cache.entry(f"made\n{key}", make) as path:
            yield path


def _expanded(pattern: str) -> Iterator[str]:
    """Yields what a pattern with ranges stands for."""
    found = _RANGE.search(pattern)
    if found is None or os.path.lexists(pattern):
        yield pattern
        return
    first, last = found.groups()
    for number in range(int(first), int(last) + 1):
        text = f"{number:0{len(first)}}"
        yield from _expanded(_RANGE.sub(text, pattern, count=1))
