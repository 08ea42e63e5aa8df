"""`Storage` finds and reads files, and keeps what is costly to fetch."""

from __future__ import annotations

import contextlib
import glob
import math
import os
import re
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from keras_fastdata import _process_role
from keras_fastdata._validation import integer, seconds
from keras_fastdata.sources.file_cache import FileCache

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
_T = TypeVar("_T")

_REMOTE = re.compile(r"([a-zA-Z][\w+.-]*)://")
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_SUFFIX = re.compile(r"\.\w{1,10}$", re.ASCII)
_FIRST_DELAY_S, _MOST_DELAY_S = 0.2, 20.0  # before a request is repeated
_REQUEST_BYTES = 1 << 24  # of a large file, which one request asks for
_MOST_VERSIONS = 1 << 17  # of files, that a process remembers
# What `fsspec` says about an object, and which changes when the object does.
_VERSIONS = [
    *("ETag", "etag", "md5Hash", "generation", "content_md5", "blob_id"),
    *("Last-Modified", "LastModified", "last_modified", "mtime"),
    *("updated", "modified", "created"),
]
# Errors that come again when the request is repeated.
_LASTING = (
    *(FileNotFoundError, PermissionError, IsADirectoryError),
    *(ImportError, TypeError, ValueError, AttributeError, LookupError),
    *(NotADirectoryError, NotImplementedError),
)
_PASSING_STATUS = (408, 425, 429)  # of HTTP, below 500


class Storage:
    """Finds and reads files by path, on this machine and elsewhere.

    A path such as `s3://bucket/name` or `https://host/name` is read by
    `fsspec`. What was fetched is kept in a directory on disk, which all
    processes of this user share. A file is fetched again when it has changed.
    Changes while a dataset is in use are not noticed.

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
    >>> from keras_fastdata.sources.storage import Storage
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
        self._options = dict(options or {})
        home = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
        user = os.geteuid() if hasattr(os, "geteuid") else ""
        self._folder = os.path.join(
            os.path.abspath(os.path.expanduser(os.fspath(cache_dir or home))),
            f"keras_fastdata-{user}",
        )
        self._most = integer("cache_bytes", cache_bytes, least=0)
        self._attempts = integer("attempts", attempts, least=1)
        self._timeout_s = seconds("timeout_s", timeout_s)
        self._found: dict[str, _Version] = {}  # of what `find` has found
        self._begin()

    def _begin(self) -> None:
        """Makes what a process does not hand on to another."""
        self._cache = FileCache(self._folder, self._most)
        self._lock = threading.Lock()
        self._systems: dict[str, Any] = {}  # by protocol
        self._versions: dict[str, _Version] = {}  # by path
        _storages.add(self)

    def abandon(self) -> dict[str, Any]:
        """Returns the file systems, to use new ones from now on."""
        systems = self._systems
        self._begin()
        return systems

    def __getstate__(self) -> dict[str, Any]:
        own = ("_cache", "_lock", "_systems", "_versions")
        return {k: v for k, v in vars(self).items() if k not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    # -- what there is -------------------------------------------------------

    def find(self, paths: Paths) -> list[str]:
        """Returns all files that paths and patterns name, in order.

        A pattern has `*`, `?`, `[...]`, or a range such as `{000..099}`. A
        path without a pattern is returned whether or not the file exists.

        Args:
            paths: A path or pattern, or several.

        Raises:
            FileNotFoundError: A pattern matches no file.
        """
        if isinstance(paths, (str, os.PathLike)):
            paths = [paths]
        given = [os.fspath(path) for path in paths]
        found: list[str] = []
        for path in given:
            for each in _expanded(path):
                found += self._matching(each)
        if not found:
            raise FileNotFoundError(f"There are no files in {given!r}.")
        return found

    def _matching(self, pattern: str) -> list[str]:
        """Returns the files that match a pattern, sorted by name."""
        if not is_remote(pattern):
            if not glob.has_magic(pattern) or os.path.lexists(pattern):
                return [pattern]
            found = glob.glob(pattern, recursive=True)
        elif "*" not in pattern and (
            pattern.startswith("http") or not glob.has_magic(pattern)
        ):
            return [pattern]  # a question mark of a URL begins its query
        else:
            found = self._remote_matching(pattern)
        if not found:
            raise FileNotFoundError(f"No file matches {pattern!r}.")
        return sorted(found)

    def _remote_matching(self, pattern: str) -> list[str]:
        def list_files(system: Any) -> Any:
            system.invalidate_cache()
            return _call(system, "glob", None, pattern, detail=True)

        listed = self._tried(pattern, list_files)
        system = self._system(pattern)
        found = []
        for name, info in listed.items():
            if info["type"] != "directory":
                path = system.unstrip_protocol(name)
                found.append(path)
                if (version := _version(info)).tag:
                    self._found[path] = version
        return found

    # -- their content -------------------------------------------------------

    def read(self, path: str) -> bytes:
        """Returns the content of a file.

        Raises:
            OSError: The file could not be read, after all attempts.
        """
        if is_remote(path) and not self._most:
            return b"".join(self._parts(path, self._version(path)))
        with self.local(path) as local, open(local, "rb") as file:
            return file.read()

    @contextlib.contextmanager
    def local(self, path: str) -> Iterator[str]:
        """Gives the path of a local file with the content of `path`.

        The file stays until the end of the `with` block. It must not be
        written to. Raises the same errors as `read`.
        """
        if not is_remote(path):
            yield path
            return
        version = self._version(path)

        def fetch(target: str) -> None:
            with open(target, "wb") as file:
                for part in self._parts(path, version):
                    file.write(part)

        suffix = _SUFFIX.search(path.partition("?")[0])
        key = f"{path}\n{version.tag}\n{version.size}"
        name = suffix[0] if suffix else ""
        with self._cache.entry(key, fetch, name) as local:
            yield local

    @contextlib.contextmanager
    def entry(self, key: str, make: Callable[[str], Any]) -> Iterator[str]:
        """Gives the path of a local file that `make(path)` writes once.

        `key` must change when the content would. All processes share the
        file: one makes it, and others wait for it. If `make` raises, that
        process gets its error, and the next one makes the file. `make` must
        not ask for the same key.

        The file stays until the end of the `with` block; a memory map of it
        may stay longer. It must not be written to.

        Raises:
            OSError: The cache directory cannot be used, or its disk is full.
        """
        with self._cache.entry(f"made\n{key}", make) as path:
            yield path

    # -- requests ------------------------------------------------------------

    def _version(self, path: str) -> _Version:
        """Returns the version of a file, as it was when first asked for."""
        version = self._found.get(path) or self._versions.get(path)
        if version is None:
            version = self._look_up(path)
            with self._lock:
                if len(self._versions) >= _MOST_VERSIONS:
                    del self._versions[next(iter(self._versions))]
                self._versions[path] = version
        return version

    def _look_up(self, path: str) -> _Version:
        def ask(system: Any) -> Any:
            system.invalidate_cache()
            return _call(system, "info", self._timeout_s, path)

        return _version(self._tried(path, ask))

    def _parts(self, path: str, version: _Version) -> Iterator[bytes]:
        """Yields the content of a file, in parts."""
        size, start = version.size, 0
        while size is None or start < size:
            end = None if size is None else min(start + _REQUEST_BYTES, size)
            part = self._tried(path, self._part_of, path, start, end, size)
            yield part
            if size is None:
                return
            start += len(part)
        # All parts must be of one version.
        if start > _REQUEST_BYTES and self._look_up(path) != version:
            self._forget(path)
            raise OSError(f"{path} has changed while it was read. Try again.")

    def _part_of(
        self,
        system: Any,
        path: str,
        start: int,
        end: int | None,
        size: int | None,
    ) -> bytes:
        """Returns the bytes of a file from `start` to `end`, or to its end."""
        patience_s = self._timeout_s
        where: dict[str, int] = {}
        if size is not None and end is not None:
            where = {"start": start, "end": end}
            if path.startswith("http") and not start:
                patience_s *= math.ceil(size / _REQUEST_BYTES)
        data: bytes = _call(system, "cat_file", patience_s, path, **where)
        if end is None or len(data) == end - start:
            return data
        if len(data) == size:  # the server has sent all, whatever was asked
            return data[start:]
        raise OSError(f"{len(data)} bytes of {end - start} have arrived")

    def _tried(self, path: str, request: Callable[..., _T], *args: Any) -> _T:
        """Returns `request(system, *args)`, after several attempts if needed.

        Raises:
            OSError: The last attempt has failed.
        """
        delay_s = _FIRST_DELAY_S
        for left in reversed(range(self._attempts)):
            try:
                return request(self._system(path), *args)
            except Exception as error:
                error = _explained(path, error)
                if isinstance(error, _LASTING):
                    raise error
                if not left:
                    self._forget(path)
                    raise OSError(
                        f"{path} could not be read in {self._attempts} "
                        f"attempts. The last one: {_said(error)}. See whether "
                        "its server can be reached, or pass a "
                        "`storage=Storage(...)` with more `attempts` or a "
                        "larger `timeout_s`."
                    ) from error
            # Not of a generator that the user may have seeded.
            time.sleep(delay_s * (1 + secrets.randbelow(1024) / 1024) / 2)
            delay_s = min(2 * delay_s, _MOST_DELAY_S)
        raise AssertionError

    def _forget(self, path: str) -> None:
        """Has the version of a file looked up again."""
        self._found.pop(path, None)
        with self._lock:
            self._versions.pop(path, None)

    def _system(self, path: str) -> Any:
        """Returns the file system of a path, for this process."""
        protocol = path.partition("://")[0]
        fsspec = _fsspec(path)
        try:
            kind = fsspec.get_filesystem_class(protocol)
        except ImportError as error:
            raise ImportError(
                f"{path} cannot be read, as a package is missing: {error}."
            ) from error
        if not issubclass(kind, fsspec.asyn.AsyncFileSystem):
            return kind(**self._options)  # `fsspec` keeps one for each thread
        with self._lock:
            if protocol not in self._systems:
                # Those that `fsspec` keeps would be there after a fork.
                self._systems[protocol] = kind(
                    skip_instance_cache=True, **self._options
                )
            return self._systems[protocol]


class _Version(NamedTuple):
    """What a file was when it was looked up."""

    tag: str  # "" if the file system has none
    size: int | None  # in bytes; `None` if it is not known


_storages: weakref.WeakSet[Storage] = weakref.WeakSet()
_parents: list[Any] = []  # file systems of the process that has forked this one


def _begin_again() -> None:
    """Has a forked process use nothing of its parent's connections.

    To free them would wait for a thread that does not exist here.
    """
    for storage in list(_storages):
        _parents.append(storage.abandon())


_process_role.at_fork(after_in_child=_begin_again)


def is_remote(path: Any) -> bool:
    """Returns whether a path is one such as `s3://...`."""
    return isinstance(path, str) and _REMOTE.match(path) is not None


def _expanded(pattern: str) -> Iterator[str]:
    """Yields the patterns that a pattern with ranges stands for."""
    found = _RANGE.search(pattern)
    if found is None:
        yield pattern
        return
    first, last = found.groups()
    for number in range(int(first), int(last) + 1):
        middle = f"{number:0{len(first)}}"
        yield from _expanded(found.re.sub(middle, pattern, count=1))


def _version(info: Mapping[str, Any]) -> _Version:
    if info.get("type") == "directory":
        raise IsADirectoryError(f"{info.get('name')} is a directory.")
    tags = [str(info[name]) for name in _VERSIONS if info.get(name)]
    size = info.get("size")
    return _Version(
        tags[0] if tags else "", None if size is None else int(size)
    )


def _fsspec(path: str) -> Any:
    """Imports `fsspec`."""
    try:
        import fsspec
        import fsspec.asyn
    except ImportError as error:
        raise ImportError(
            f"{path} is read with fsspec, which cannot be imported ({error}). "
            "Run `pip install 'keras-fastdata[remote]'`, or copy the files to "
            "this machine."
        ) from None
    return fsspec


def _call(
    system: Any, method: str, timeout_s: float | None, *args: Any, **kwargs: Any
) -> Any:
    """Calls a method of a file system; only `asyncio` heeds `timeout_s`."""
    import fsspec.asyn

    if not isinstance(system, fsspec.asyn.AsyncFileSystem):
        return getattr(system, method)(*args, **kwargs)
    run = getattr(system, f"_{method}")
    return fsspec.asyn.sync(
        system.loop, run, *args, timeout=timeout_s, **kwargs
    )


def _explained(path: str, error: Exception) -> Exception:
    """Returns the error to raise, of a lasting type if repeating is useless."""
    cause = error.__cause__
    # HTTP's `info` says "not found", whatever has happened.
    if type(cause).__module__.partition(".")[0] == "aiohttp":
        assert isinstance(cause, Exception)
        error = cause
    status = getattr(error, "status", None)
    if status in (401, 403):
        return PermissionError(
            f"{path} may not be read (status {status}). Pass what the server "
            "asks for in the `options` of `Storage`."
        )
    if status in (404, 410):
        return FileNotFoundError(f"{path} does not exist (status {status}).")
    if status in range(400, 500) and status not in _PASSING_STATUS:
        return ValueError(f"{path} cannot be read: {_said(error)}")
    return error


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")
