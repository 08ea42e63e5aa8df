"""`FileCache` keeps files that are costly to make, for all processes.

    NAME         an entry; whoever uses it holds a shared lock on it
    .NAME.tmp    an entry that is being made
    .NAME.lock   locked by the process that makes the entry
    .size        the size of all entries; locked to add or evict entries

The kernel frees a lock (of `flock`) when its holder dies. Where there are no
locks, several processes may make the same entry, and an entry counts as in use
for an hour.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import importlib
import io
import os
import stat
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from keras_fastdata import _atomic_write, _process_role

fcntl: Any = None
with contextlib.suppress(ImportError):  # not every system has it
    fcntl = importlib.import_module("fcntl")

_IN_USE_NS = 3600 * 10**9  # where there are no locks
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_FOLDER = (errno.ENOTDIR, errno.EEXIST, errno.ELOOP)
_DIGITS = 20  # of the size of all entries

_cleaned: set[str] = set()  # folders, by this process


class FileCache:
    """Keeps files that are costly to make, in a folder of this user.

    Args:
        parent: The directory to make the folder in; `None` is the user's
            directory of caches.
        most: The most bytes of all entries together. The least recently used
            entries are evicted. Those in use stay, even if they are larger.
    """

    def __init__(self, parent: str | None, most: int) -> None:
        self._parent = parent
        self._most = most

    @property
    def _folder(self) -> str:
        """The folder, which another host may have elsewhere."""
        parent = self._parent or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        parent = os.path.expanduser(parent)
        return os.path.join(parent, f"keras_fastdata-{_user()}")

    @contextlib.contextmanager
    def entry(
        self, key: str, make: Callable[[str], Any], suffix: str = ""
    ) -> Iterator[str]:
        """Gives the path of an entry, which `make(path)` writes if needed.

        The path ends in `suffix`. The entry stays until the end of the `with`
        block.
        """
        encoded = key.encode("utf-8", "surrogatepass")
        name = hashlib.sha256(encoded).hexdigest()[:40] + suffix
        path = os.path.join(self._folder, name)
        held = None
        while held is None:
            self._check_folder()
            try:
                held = _locked(path, shared=True) or self._make(name, make)
            except FileNotFoundError:
                if os.path.isdir(self._folder):
                    raise
                # Somebody has removed the folder.
        try:
            with contextlib.suppress(OSError):  # not writable, or removed
                now = time.time_ns()  # the system's own time has steps
                os.utime(path, ns=(now, now))
            yield path
        finally:
            _free(held)
            with contextlib.suppress(OSError):
                self._trim()

    def _check_folder(self) -> None:
        """Makes the folder; raises `PermissionError` if others may write."""
        with self._named_errors():
            os.makedirs(self._folder, 0o700, exist_ok=True)
            found = os.lstat(self._folder)
        is_ours = found.st_uid == _user() and not found.st_mode & 0o022
        if not stat.S_ISDIR(found.st_mode) or (fcntl and not is_ours):
            raise PermissionError(
                f"The cache directory {self._folder} must be this user's, and "
                "others must not be able to write there. Remove it, or pass "
                "another `cache_dir` to `Storage`."
            )

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Raises errors about the disk or the folder with a remedy."""
        try:
            yield
        except OSError as error:
            is_ours = str(error.filename).startswith(
                os.path.dirname(self._folder)
            )
            if error.errno in _FULL:
                remedy = "Free space on the disk, or pass `Storage` a smaller "
                remedy += "`cache_bytes` or another `cache_dir`."
            elif is_ours and error.errno in _REFUSED:
                remedy = "Let this user write there, or pass another "
                remedy += "`cache_dir` to `Storage`."
            elif is_ours and error.errno in _NO_FOLDER:
                remedy = "Pass another `cache_dir` to `Storage`."
            else:
                raise
            raise OSError(
                error.errno,
                f"The cache directory {self._folder} cannot be written to: "
                f"{error.strerror}. {remedy}",
            ) from error

    # -- making entries ------------------------------------------------------

    def _make(self, name: str, make: Callable[[str], Any]) -> io.FileIO:
        """Makes an entry, or waits for the process that makes it."""
        start = os.path.join(self._folder, f".{name}")
        path = os.path.join(self._folder, name)
        with self._named_errors(), _made_and_locked(f"{start}.lock") as lock:
            try:
                if self._folder not in _cleaned:
                    _cleaned.add(self._folder)
                    self._remove_leftovers(lock)
                if held := _locked(path, shared=True):
                    return held  # of another process
                temporary = f"{start}.tmp"
                if not _has_locks(lock):
                    temporary = _atomic_write.name_beside(path)
                while True:
                    _remove(temporary)  # a killed process may have left it
                    try:
                        make(temporary)
                        return self._add(temporary, path)
                    except BaseException as error:
                        _remove(temporary)
                        if getattr(error, "errno", None) not in _FULL:
                            raise
                        if not self._halve():
                            raise
            finally:
                _remove(f"{start}.lock")

    def _add(self, temporary: str, path: str) -> io.FileIO:
        """Renames a new file, after others were evicted for it."""
        os.chmod(temporary, 0o600)
        added = _opened(temporary, "r+b")
        os.fsync(added)  # else a power failure may leave it empty
        _flock(added, shared=True)
        size = os.fstat(added.fileno()).st_size
        with self._total_locked() as file:
            total = _read_total(file)
            if total is None or total + size > self._most:
                total = self._evict(file, self._most - size)
            # If this process dies in between, the total is too large until the
            # next eviction. Otherwise it would be too small.
            _write_total(file, total + size)
            os.replace(temporary, path)
        return added

    # -- evicting entries ----------------------------------------------------

    def _total_locked(self) -> contextlib.AbstractContextManager[io.FileIO]:
        return _made_and_locked(os.path.join(self._folder, ".size"))

    def _trim(self) -> None:
        """Evicts what could not be evicted before, because it was in use."""
        with open(os.path.join(self._folder, ".size"), "rb", 0) as file:
            total = _read_total(file)
        if total is None or total > self._most:
            with self._total_locked() as file:
                _write_total(file, self._evict(file, self._most))

    def _halve(self) -> bool:
        """Evicts unused entries of a full disk; returns whether it could."""
        with self._total_locked() as file:
            before = self._evict(file, sys.maxsize)
            left = self._evict(file, before // 2)
            _write_total(file, left)
        return left < before

    def _evict(self, lock: io.FileIO, most: int) -> int:
        """Evicts unused entries until at most `most` bytes are left.

        Returns:
            The size of all entries that are left.
        """
        self._remove_leftovers(lock)
        now = time.time_ns()
        found = []
        with os.scandir(self._folder) as files:
            for file in files:
                with contextlib.suppress(FileNotFoundError):
                    if not file.name.startswith("."):
                        about = file.stat(follow_symlinks=False)
                        used = about.st_mtime_ns
                        # A time to come was set by a clock that was wrong.
                        used = used if used <= now else 0
                        found.append((used, about.st_size, file.path))
        total = sum(size for _, size, _ in found)
        oldest = now - (0 if _has_locks(lock) else _IN_USE_NS)
        for used, size, path in sorted(found):
            # Of small entries, more are evicted: to look at all takes time.
            spare = most >> 4 if size < most >> 10 else 0
            if total <= most - spare or used > oldest:
                break
            if held := _locked(path, wait=False):
                _remove(path)
                _free(held)
                total -= size
        return total

    def _remove_leftovers(self, lock: io.FileIO) -> None:
        """Removes what killed processes have left of unmade entries."""
        if not _has_locks(lock):
            _atomic_write.remove_abandoned(self._folder)
            return
        for name in os.listdir(self._folder):
            start, suffix = os.path.splitext(name)
            if name.startswith(".") and suffix in (".tmp", ".lock"):
                start = os.path.join(self._folder, start)
                held = _locked(f"{start}.lock", create=True, wait=False)
                if held is not None:
                    _remove(f"{start}.tmp")
                    _remove(f"{start}.lock")
                    _free(held)


# -- files and locks ---------------------------------------------------------

# A file object closes itself, even if a KeyboardInterrupt comes just then.
_open_files: weakref.WeakSet[io.FileIO] = weakref.WeakSet()
_private = functools.partial(os.open, mode=0o600)


def _close_all() -> None:
    """Closes a forked process's copies of its parent's locked files."""
    for file in list(_open_files):
        file.close()


_process_role.at_fork(after_in_child=_close_all)


def _opened(path: str, mode: str) -> io.FileIO:
    file = io.FileIO(path, mode, opener=_private)
    _open_files.add(file)
    return file


def _free(file: io.FileIO) -> None:
    """Closes a file; frees its lock, even if a forked process has a copy."""
    if fcntl and not file.closed:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
    file.close()


def _locked(
    path: str, *, create: bool = False, shared: bool = False, wait: bool = True
) -> io.FileIO | None:
    """Opens and locks a file, which nobody has removed meanwhile.

    Returns:
        The file. `None` if there is none and `create` is False, or if others
        have locked it and `wait` is False.
    """
    while True:
        try:
            file = _opened(path, "rb" if shared else "r+b")
        except FileNotFoundError:
            if not create:
                return None
            with contextlib.suppress(FileExistsError):
                _opened(path, "xb").close()
            continue
        if not _flock(file, shared=shared, wait=wait):
            file.close()
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.lstat(path)):
                return file
        file.close()


@contextlib.contextmanager
def _made_and_locked(path: str) -> Iterator[io.FileIO]:
    file = _locked(path, create=True)
    assert file is not None
    try:
        yield file
    finally:
        _free(file)


def _flock(file: io.FileIO, *, shared: bool = False, wait: bool = True) -> bool:
    """Locks an open file; returns False if others have locked it."""
    if fcntl:
        how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(file, how if wait else how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
    return True


def _has_locks(locked: io.FileIO) -> bool:
    """Returns whether a file that was to be locked is locked."""
    try:
        if fcntl:
            fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return fcntl is not None


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _read_total(file: io.FileIO) -> int | None:
    """Returns the size of all entries, or `None` if the file is damaged."""
    text = file.read(_DIGITS + 1) or b""
    return int(text) if len(text) == _DIGITS and text.isdigit() else None


def _write_total(file: io.FileIO, total: int) -> None:
    file.seek(0)
    file.write(b"%0*d" % (_DIGITS, total))
    file.truncate()


def _user() -> int:
    """Returns the number of this user; 0 where users have no numbers."""
    return os.geteuid() if hasattr(os, "geteuid") else 0
