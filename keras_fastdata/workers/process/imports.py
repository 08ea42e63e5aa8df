"""Imports packages once, in the process that forks the workers.

Workers share the memory of the packages that their fork server has imported,
and need not import them. The fork server must remain a process that can be
forked. So it ends after an import that

- raises,
- leaves a thread, a running process, an open device or shared memory behind,
- makes a lock of `multiprocessing`, which a worker may hold when it dies, or
- imports a module of the user's, which may change until the next worker.

Each worker replaces the seeds that packages drew for their random generators.
Else all workers would draw the same numbers.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import importlib
import logging
import multiprocessing.util
import os
import random
import stat
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import SemLock
from typing import Any

import numpy as np

from keras_fastdata._modules import is_main, is_users
from keras_fastdata.workers import exceptions, worker_process
from keras_fastdata.workers.process.packages import Stamp

_SETTLE_S = 1.0  # for threads and processes that are about to end
_LOOK_S = 0.01
# Names of threads. jemalloc, which pyarrow brings, ends its thread before a
# fork, and starts it again. pandas imports pyarrow, and Keras pandas.
_FORK_SAFE = {"jemalloc_bg_thd"}
# Major numbers of character devices that are open in any process: null, zero
# and random; terminals.
_COMMON_DEVICES = {1, 4, 5, *range(136, 144)}
_MOST_BITS = 64  # of a seed that a package chose; NumPy draws 128

# The packages' random generators without a chosen seed: Python's, and the bit
# generators of NumPy's.
_unseeded: weakref.WeakSet[random.Random] = weakref.WeakSet()
_unseeded_bits: list[Any] = []


@dataclasses.dataclass(frozen=True)
class Imports:
    """The packages that a fork server imports, and its process settings.

    Two that are equal have the same result.

    Attributes:
        names: Modules, in the order of their import.
        stamps: For each top-level package, what changes with its version.
        surroundings: Environment, folder and paths.
    """

    names: tuple[str, ...]
    stamps: tuple[Stamp, ...]
    surroundings: worker_process.Surroundings


class NotShareableError(Exception):
    """Raised when an import has made this process unsafe to fork."""


def run(imports: Imports, begin: Callable[[int], None]) -> None:
    """Imports packages into this process.

    Args:
        imports: The packages.
        begin: Called with the number of each package before its import.

    Raises:
        NotShareableError: The process must not fork workers any more.
    """
    imports.surroundings.apply()
    importlib.invalidate_caches()
    sys.breakpointhook = exceptions.no_breakpoint
    # The training process has imported the same, and heard the same. Each
    # worker replaces these settings.
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    known, opened = {*sys.modules}, _open_paths()
    gc.disable()  # the many objects of an import are no garbage
    for number, name in enumerate(imports.names):
        begin(number)
        try:
            with _noting_unseeded():
                importlib.import_module(name)
        except BaseException as error:
            text = f"its import raised {type(error).__name__}: {error}"
            raise NotShareableError(text) from error
        if reason := _reason_against(known, opened):
            raise NotShareableError(reason)
        known |= sys.modules.keys()
    warnings.simplefilter("ignore")  # a package may have set its own filters
    _flush()
    kinds = {*_subclasses_of(np.random.BitGenerator)}
    # There may be some 100,000 objects, so that most are left out first.
    bits = [value for value in gc.get_objects() if type(value) in kinds]
    _unseeded_bits.extend(filter(_is_unseeded, bits))
    gc.freeze()
    gc.enable()


def reseed() -> None:
    """Gives the packages' unseeded random generators new seeds."""
    for generator in _unseeded:
        generator.seed()
    kind: Any = np.random.BitGenerator
    for bits in _unseeded_bits:
        fresh = type(bits)()
        kind.__setstate__(bits, (fresh.state, fresh.seed_seq))


@contextlib.contextmanager
def _noting_unseeded() -> Iterator[None]:
    """Records `random.Random` objects that the `with` block leaves unseeded."""
    seed = random.Random.seed

    def note(self: random.Random, a: Any = None, version: int = 2) -> None:
        seed(self, a, version)
        (_unseeded.add if a is None else _unseeded.discard)(self)

    random.Random.seed = note  # type: ignore[method-assign]
    try:
        yield
    finally:
        random.Random.seed = seed  # type: ignore[method-assign]


def _subclasses_of(kind: Any) -> Iterator[Any]:
    """Yields all direct and indirect subclasses of a class."""
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses_of(subclass)


def _is_unseeded(bits: Any) -> bool:
    """Returns whether NumPy drew the seed of a bit generator."""
    entropy = getattr(bits.seed_seq, "entropy", None)
    return isinstance(entropy, int) and entropy.bit_length() > _MOST_BITS


def threads() -> int:
    """Counts the threads of this process; returns 1 if /proc is missing.

    Threads that prepare for a fork by themselves do not count.
    """
    try:
        tasks = os.listdir("/proc/self/task")
    except FileNotFoundError:
        return 1
    return sum(_name_of(task) not in _FORK_SAFE for task in tasks)


def _name_of(task: str) -> str:
    try:
        with open(f"/proc/self/task/{task}/comm") as file:
            return file.read().strip()
    except OSError:  # it has ended
        return ""


def _reason_against(known: set[str], before: set[str]) -> str:
    """Returns the reason not to fork this process; "" if there is none."""
    deadline = time.monotonic() + _SETTLE_S
    while (more := threads() - 1) or _has_children():
        if time.monotonic() > deadline:
            if more:
                return f"it leaves {more} thread{'s' * (more > 1)} running"
            return "it leaves a process running"
        time.sleep(_LOOK_S)
    if opened := _open_paths() - before:
        return f"it opens {', '.join(sorted(opened))}"
    if _has_shared_locks():
        worker_process.run_finalizers()  # which removes their names
        return "it makes a lock that all workers would share"
    tops = {
        name.partition(".")[0] for name in sys.modules.copy().keys() - known
    }
    # `multiprocessing` adds a second name of `__main__`.
    users = (name for name in tops if is_users(name) and not is_main(name))
    if theirs := sorted(users):
        return f"it imports {', '.join(theirs)}, which is not installed"
    return ""


def _has_children() -> bool:
    """Returns whether a child process is running, without reaping any."""
    pids: list[str] = []
    with (
        contextlib.suppress(FileNotFoundError),
        open("/proc/thread-self/children") as file,
    ):
        pids = file.read().split()
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            how = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if os.waitid(os.P_PID, int(pid), how) is None:
                return True
    return False


def _has_shared_locks() -> bool:
    """Returns whether locks of `multiprocessing` exist in this process."""
    util: Any = multiprocessing.util
    made = util._afterfork_registry.copy().values()  # noqa: SLF001
    return any(isinstance(value, SemLock) for value in made)


def _open_paths() -> set[str]:
    """Returns the paths of open shared memory and of open, rare devices."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.stat(f"/proc/self/fd/{fd}")
            path = os.readlink(f"/proc/self/fd/{fd}")
            is_device = stat.S_ISCHR(status.st_mode)
            if path.startswith("/dev/shm/") or (
                is_device and os.major(status.st_rdev) not in _COMMON_DEVICES
            ):
                found.add(path)
    return found


def _flush() -> None:
    """Writes out buffered output, which each fork would otherwise repeat."""
    worker_process.flush()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)
