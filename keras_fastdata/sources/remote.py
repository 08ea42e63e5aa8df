"""`RemoteFiles` finds and reads files elsewhere, and tries again if need be."""

from __future__ import annotations

import math
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from keras_fastdata import _process_role

_T = TypeVar("_T")

_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.2, 20.0  # before another attempt
_REQUEST_BYTES = 1 << 24  # that one request asks for
_MOST_VERSIONS = 1 << 17  # that a process remembers
# What file systems know of an object that changes when the object does.
_TAGS = [
    *("ETag", "etag", "md5Hash", "generation", "content_md5", "blob_id"),
    *("Last-Modified", "LastModified", "last_modified", "mtime"),
    *("updated", "modified", "created"),
]
# Errors that another attempt would bring again.
_LASTING = (
    *(FileNotFoundError, PermissionError, IsADirectoryError),
    *(ImportError, TypeError, ValueError, AttributeError, LookupError),
    *(NotADirectoryError, NotImplementedError),
)
_PASSING = (408, 425, 429)  # of HTTP's status codes from 400 to 499


class Version(NamedTuple):
    """What a file was when it was looked up."""

    tag: str  # "" if the file system has none
    size: int | None  # in bytes; `None` if it is not known


class RemoteFiles:
    """Finds and reads files with `fsspec`.

    The arguments are those of `Storage`.
    """

    def __init__(
        self, options: Mapping[str, Any], attempts: int, timeout_s: float
    ) -> None:
        self._options = dict(options)
        self._attempts = attempts
        self._timeout_s = timeout_s
        self._found: dict[str, Version] = {}  # by path, from `find`
        self.begin_again()

    def __getstate__(self) -> dict[str, Any]:
        own = ("_lock", "_systems", "_asked")
        return {k: v for k, v in vars(self).items() if k not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.begin_again()

    def begin_again(self) -> None:
        """Makes what each process has of its own."""
        self._lock = threading.Lock()
        self._systems: dict[str, Any] = {}  # by protocol
        self._asked: dict[str, Version] = {}  # by path
        _all_files.add(self)

    @property
    def connections(self) -> Any:
        """The objects that hold connections of this process."""
        return self._systems

    def find(self, pattern: str) -> list[str]:
        """Returns all files that match a pattern."""

        def ask(system: Any) -> Any:
            system.invalidate_cache()
            return _call(system, "glob", None, pattern, detail=True)

        listed = self._tried(pattern, ask)
        name_of = self._system(pattern).unstrip_protocol
        found = {
            name_of(name): _version_in(info)
            for name, info in listed.items()
            if info["type"] != "directory"
        }
        if len(self._found) + len(found) < _MOST_VERSIONS:
            self._found |= {k: v for k, v in found.items() if v.tag}
        return list(found)

    def version(self, path: str) -> Version:
        """Returns the version of a file, as it was when first asked for."""
        version = self._found.get(path) or self._asked.get(path)
        if version is None:
            version = self._look_up(path)
            with self._lock:
                if len(self._asked) >= _MOST_VERSIONS:
                    del self._asked[next(iter(self._asked))]
                self._asked[path] = version
        return version

    def parts(self, path: str, version: Version) -> Iterator[bytes]:
        """Yields the content of a file, in parts.

        Raises:
            OSError: Something could not be read in all attempts, or the file
                has changed meanwhile.
        """
        size, start = version.size, 0
        while size is None or start < size:
            part = self._tried(path, self._part, path, start, size)
            yield part
            start += len(part)
            if size is None:
                return
        # The parts must be of one version.
        if start > _REQUEST_BYTES and self._look_up(path) != version:
            self._forget(path)
            raise OSError(f"{path} has changed while it was read. Try again.")

    def _look_up(self, path: str) -> Version:
        def ask(system: Any) -> Any:
            system.invalidate_cache()
            return _call(system, "info", self._timeout_s, path)

        return _version_in(self._tried(path, ask))

    def _part(
        self, system: Any, path: str, start: int, size: int | None
    ) -> bytes:
        """Returns the next bytes of a file; all if its size is not known."""
        data: bytes
        if size is None:
            data = _call(system, "cat_file", self._timeout_s, path)
            return data
        end = min(start + _REQUEST_BYTES, size)
        timeout_s = self._timeout_s
        if path.startswith("http") and not start:  # it may send all
            timeout_s *= math.ceil(size / _REQUEST_BYTES)
        where = {"start": start, "end": end}
        data = _call(system, "cat_file", timeout_s, path, **where)
        if len(data) == size:
            return data[start:]
        if len(data) != end - start:
            raise OSError(f"{len(data)} bytes of {end - start} have arrived")
        return data

    def _tried(self, path: str, request: Callable[..., _T], *args: Any) -> _T:
        """Returns `request(system, *args)`, after several attempts if needed.

        Raises:
            OSError: The last attempt has failed.
        """
        delay_s = _FIRST_DELAY_S
        for left in reversed(range(self._attempts)):
            try:
                return request(self._system(path), *args)
            except Exception as raised:
                error, is_lasting = _explained(path, raised)
                if is_lasting and error is raised:
                    raise
                if is_lasting:
                    raise error from raised
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
            time.sleep(delay_s * (1 + secrets.randbelow(1000) / 1000) / 2)
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
        raise AssertionError

    def _forget(self, path: str) -> None:
        """Has the version of a file looked up again."""
        self._found.pop(path, None)
        with self._lock:
            self._asked.pop(path, None)

    def _system(self, path: str) -> Any:
        """Returns the file system of a path, for this process."""
        try:
            import fsspec
            import fsspec.asyn

            protocol = path.partition("://")[0]
            kind = fsspec.get_filesystem_class(protocol)
        except ImportError as error:
            raise ImportError(
                f"{path} is read with fsspec, and a package is missing "
                f"({error}). Run `pip install 'keras-fastdata[remote]'`, and "
                "also `s3fs` for s3://, `gcsfs` for gs:// or "
                "`huggingface_hub` for hf://; or copy the files here."
            ) from error
        if not issubclass(kind, fsspec.asyn.AsyncFileSystem):
            return kind(**self._options)  # `fsspec` keeps one for each thread
        options = dict(self._options)
        if is_s3 := protocol in ("s3", "s3a"):
            # botocore would try again as well, and draw from `random`.
            config = options.get("config_kwargs", {})
            once = {"retries": {"total_max_attempts": 1}}
            options["config_kwargs"] = once | config
        with self._lock:
            if protocol not in self._systems:
                # `fsspec` would keep it, with its connections, for ever.
                system = kind(skip_instance_cache=True, **options)
                if is_s3:
                    system.retries = 1  # s3fs would try again as well
                self._systems[protocol] = system
            return self._systems[protocol]


_all_files: weakref.WeakSet[RemoteFiles] = weakref.WeakSet()
_parents: list[Any] = []


def _begin_all_again() -> None:
    """Has a forked process make connections of its own.

    Those of its parent are kept: to close one would wait for a thread that
    only the parent has.
    """
    for files in list(_all_files):
        _parents.append(files.connections)
        files.begin_again()


_process_role.at_fork(after_in_child=_begin_all_again)


def _version_in(info: Mapping[str, Any]) -> Version:
    if info["type"] == "directory":
        raise IsADirectoryError(f"{info['name']} is a directory.")
    tags = [str(info[name]) for name in _TAGS if info.get(name)]
    return Version(tags[0] if tags else "", info.get("size"))


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


def _explained(path: str, error: Exception) -> tuple[Exception, bool]:
    """Returns the error to raise, and whether to try again is useless."""
    cause = error.__cause__
    # HTTP's `info` says "not found", whatever has happened.
    if isinstance(cause, Exception) and type(cause).__module__.startswith(
        "aiohttp."
    ):
        error = cause
    status = getattr(error, "status", None)  # of aiohttp
    if status is None:  # of huggingface_hub
        status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return PermissionError(
            f"{path} may not be read (status {status}). Pass what the server "
            "asks for in the `options` of a `Storage`."
        ), True
    if status in (404, 410):
        text = f"{path} does not exist (status {status})."
        return FileNotFoundError(text), True
    if status in range(400, 500) and status not in _PASSING:
        return OSError(f"{path} cannot be read: {_said(error)}"), True
    if isinstance(error, (FileNotFoundError, PermissionError)):
        return type(error)(f"{path} cannot be read: {_said(error)}"), True
    return error, isinstance(error, _LASTING)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")
