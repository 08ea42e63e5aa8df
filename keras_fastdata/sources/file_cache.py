"""`FileCache` keeps files that are costly to make, for all processes.

    NAME         an entry; whoever uses it holds a shared lock on it
    .NAME.tmp    an entry that is being made
    .NAME.lock   locked by the process that makes the entry
    .size        the size of all entries; locked to add or evict entries

The locks are those of `flock`: the kernel frees them when their holder dies.
Where the system has none, two processes may both make an entry, and an entry
counts as in use for an hour after its last use.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from typing import Any

from keras_fastdata import _atomic_write, _process_role

fcntl: Any = None
if os.name == "posix":
    fcntl = importlib.import_module("fcntl")

_UNKNOWN_USE_NS = 3600 * 10**9
# What `flock` raises on file systems that do not have it.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
_DIGITS = 20  # of a size in bytes


class FileCache:
    """Keeps files that are costly to make, in a folder of this user.

    Args:
        folder: The folder. It is made, with the mode 0700.
        most: The most bytes of all entries together. The least recently used
            ones are evicted. Entries in use stay, even if they are larger.
    """

    def __init__(self, folder: str, most: int) -> None:
        self._folder = folder
        self._most = most
        self._has_cleaned = False

    @contextlib.contextmanager
    def entry(
        self, key: str, make: Callable[[str], Any], suffix: str = ""
    ) -> Iterator[str]:
        """Gives the path of an entry, which `make(path)` writes if needed.

        It ends in `suffix`, and stays until the end of the `with` block.
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
            with contextlib.suppress(OSError):  # read-only, or removed
                os.utime(path)
            yield path
        finally:
            held.close()
            with contextlib.suppress(OSError):  # the next time will do
                self._trim()

    def _check_folder(self) -> None:
        """Makes the folder; raises `PermissionError` if others may write."""
        try:
            found = os.lstat(self._folder)
        except FileNotFoundError:
            with self._explained():
                os.makedirs(self._folder, 0o700, exist_ok=True)
                found = os.lstat(self._folder)
        is_ours = found.st_uid == _user() and not found.st_mode & 0o022
        if not stat.S_ISDIR(found.st_mode) or not (is_ours or fcntl is None):
            raise PermissionError(
                f"The cache directory {self._folder} is not a directory that "
                "this user alone may write to. Remove it, or pass another "
                "`cache_dir`."
            )

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Raises errors about the disk or the folder with a remedy."""
        try:
            yield
        except OSError as error:
            at = str(error.filename or "")
            if error.errno in _FULL:
                remedy = "Free space on its disk, or pass a smaller "
                remedy += "`cache_bytes` or another `cache_dir`"
            elif error.errno in _REFUSED and at.startswith(self._folder):
                remedy = "Let this user write there, or pass another "
                remedy += "`cache_dir`"
            else:
                raise
            raise OSError(
                error.errno,
                f"The cache directory {self._folder} cannot be written to: "
                f"{error.strerror}. {remedy}.",
            ) from error

    # -- making entries ------------------------------------------------------

    def _make(self, name: str, make: Callable[[str], Any]) -> _Held:
        """Makes an entry, or waits for the process that makes it."""
        path = os.path.join(self._folder, name)
        lock_path = os.path.join(self._folder, f".{name}.lock")
        with self._explained():
            lock = _locked(lock_path, create=True)
            assert lock is not None
            try:
                if not self._has_cleaned:
                    self._has_cleaned = True
                    self._remove_leftovers()
                made = _locked(path, shared=True) or self._write(path, make)
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(lock_path)
                lock.close()
        return made

    def _write(self, path: str, make: Callable[[str], Any]) -> _Held:
        """Makes an entry, under its lock; returns it with a shared lock."""
        temporary = _atomic_write.name_beside(path)
        if _has_locks(self._folder):
            folder, name = os.path.split(path)
            temporary = os.path.join(folder, f".{name}.tmp")
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)  # of a process that was killed
        try:
            make(temporary)
            os.chmod(temporary, 0o600)
            made = _Held(os.open(temporary, os.O_RDWR))
            try:
                os.fsync(made.fd)  # else a power failure may leave it empty
                made.lock(shared=True)
                self._add(temporary, path, os.fstat(made.fd).st_size)
            except BaseException:
                made.close()
                raise
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        return made

    # -- the size of all -----------------------------------------------------

    def _add(self, temporary: str, path: str, size: int) -> None:
        """Renames a new entry, after others were evicted for it."""
        with self._size_locked() as file:
            total = _total(file)
            if total is None or total + size > self._most:
                total = self._evict(self._most - size)
            # If this process dies in between, the size is too large until the
            # next eviction. The other way round it would be too small.
            _write_total(file, total + size)
            os.replace(temporary, path)

    def _trim(self) -> None:
        """Evicts entries that could not be evicted before, as in use."""
        path = os.path.join(self._folder, ".size")
        file = os.open(path, os.O_RDONLY)
        try:
            total = _total(file)
        finally:
            os.close(file)
        if total is None or total > self._most:
            with self._size_locked() as file:
                _write_total(file, self._evict(self._most))

    @contextlib.contextmanager
    def _size_locked(self) -> Iterator[int]:
        lock = _locked(os.path.join(self._folder, ".size"), create=True)
        assert lock is not None
        try:
            yield lock.fd
        finally:
            lock.close()

    def _evict(self, most: int) -> int:
        """Evicts unused entries until at most `most` bytes are left.

        Returns:
            The size of all entries that are left.
        """
        self._remove_leftovers()
        now = time.time_ns()
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    about = entry.stat(follow_symlinks=False)
                    used = about.st_mtime_ns
                    # A time to come is of a clock that was wrong.
                    used = used if used <= now else 0
                    found.append((used, about.st_size, entry.path))
        total = sum(size for _, size, _ in found)
        for used, size, path in sorted(found):
            # Of small entries, more are evicted: to look at all takes time.
            spare = most >> 4 if size < most >> 10 else 0
            if total <= most - spare:
                break
            if _remove_unused(path, used, now):
                total -= size
        return total

    def _remove_leftovers(self) -> None:
        """Removes what killed processes have left of their unmade entries."""
        if not _has_locks(self._folder):
            _atomic_write.remove_abandoned(self._folder)
            return
        names = {
            name.removesuffix(".tmp").removesuffix(".lock")
            for name in os.listdir(self._folder)
            if name.startswith(".") and name.endswith((".tmp", ".lock"))
        }
        for name in names:
            start = os.path.join(self._folder, name)
            lock = _locked(f"{start}.lock", create=True, wait=False)
            if lock is not None:
                for suffix in (".tmp", ".lock"):
                    with contextlib.suppress(OSError):
                        os.unlink(start + suffix)
                lock.close()


# -- locks -------------------------------------------------------------------


class _Held:
    """An open file, with or without a lock."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        _held.add(self)

    def lock(self, *, shared: bool = False, wait: bool = True) -> bool:
        """Locks the file; returns whether that has succeeded."""
        return _flock(self.fd, shared=shared, wait=wait)

    def close(self) -> None:
        fd = self.abandon()
        if fd >= 0:
            if fcntl is not None:
                # A process that was forked just now may have a copy.
                with contextlib.suppress(OSError):
                    fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def abandon(self) -> int:
        """Returns the descriptor, which is the caller's to close."""
        _held.discard(self)
        fd, self.fd = self.fd, -1
        return fd


_held: set[_Held] = set()


def _leave_to_parent() -> None:
    """Closes a forked process's copies of its parent's locks."""
    for held in list(_held):
        os.close(held.abandon())


_process_role.at_fork(after_in_child=_leave_to_parent)


def _locked(
    path: str, *, create: bool = False, shared: bool = False, wait: bool = True
) -> _Held | None:
    """Opens and locks a file that has not been removed meanwhile.

    Returns:
        The file; or `None` if there is none and `create` is False, or if
        others have locked it and `wait` is False.
    """
    flags = os.O_RDONLY if shared else os.O_RDWR
    flags |= os.O_CREAT if create else 0
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    while True:
        try:
            held = _Held(os.open(path, flags, 0o600))
        except FileNotFoundError:
            if create:
                raise
            return None
        try:
            if not held.lock(shared=shared, wait=wait):
                held.close()
                return None
            if os.path.samestat(os.fstat(held.fd), os.lstat(path)):
                return held
        except FileNotFoundError:
            pass
        except BaseException:
            held.close()
            raise
        held.close()


def _flock(fd: int, *, shared: bool, wait: bool) -> bool:
    """Locks an open file, where that is possible."""
    if fcntl is None:
        return True
    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(fd, how if wait else how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _has_locks(folder: str) -> bool:
    """Returns whether files in a folder can be locked."""
    if fcntl is None:
        return False
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        return error.errno not in _NO_LOCKS
    finally:
        os.close(fd)
    return True


def _remove_unused(path: str, used: int, now: int) -> bool:
    """Removes an entry unless a process uses it; returns whether it did."""
    if not _has_locks(os.path.dirname(path)):
        if now - used < _UNKNOWN_USE_NS:
            return False
        held = None
    elif (held := _locked(path, wait=False)) is None:
        return False
    try:
        os.unlink(path)
    except OSError:
        return False
    finally:
        if held is not None:
            held.close()
    return True


def _total(fd: int) -> int | None:
    """Returns the size that the open file `.size` has; `None` if damaged."""
    text = os.read(fd, _DIGITS + 1)
    return int(text) if len(text) == _DIGITS and text.isdigit() else None


def _write_total(fd: int, total: int) -> None:
    os.lseek(fd, 0, os.SEEK_SET)
    os.write(fd, b"%0*d" % (_DIGITS, total))


def _user() -> int:
    """Returns the number of this user; 0 where users have none."""
    return os.geteuid() if hasattr(os, "geteuid") else 0
