"""What a process inherits from the one that forks it, or starts it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from keras_fastdata.workers import stack_dump
from keras_fastdata.workers.process import imports

STREAMS = (1, 2)  # descriptors; the standard input of workers is empty
_OF_RIGHTS = ("Cap", "NoNewPrivs", "Seccomp")  # in /proc/*/status


class Key(NamedTuple):
    """The properties that all workers of one fork server have at their start.

    Attributes:
        worker_env: Environment variables over the clean defaults.
        inherited: User, groups, capabilities, limits, cores, priority, and
            files that standard output and error are.
        imports: What it has imported, if more than this package.
    """

    worker_env: tuple[tuple[str, str], ...]
    inherited: tuple[object, ...]
    imports: imports.Imports | None = None


def key_of_this_process(worker_env: Iterable[tuple[str, str]]) -> Key:
    """Returns the key of a fork server that starts now, without packages."""
    return Key(tuple(worker_env), (*_rights(), *_settings(), *_streams()))


def open_streams() -> list[int]:
    """Returns those of `STREAMS` that are open."""
    return [fd for fd, *_ in _streams()]


def _rights() -> Iterator[object]:
    """Yields the user, groups and capabilities."""
    yield from (os.getresuid(), os.getresgid(), tuple(sorted(os.getgroups())))
    status = stack_dump.status_of("thread-self")
    yield from sorted(
        pair for pair in status.items() if pair[0].startswith(_OF_RIGHTS)
    )


def _settings() -> Iterator[object]:
    """Yields the limits, and the main thread's cores and priority."""
    import resource

    for name in sorted(vars(resource)):
        if name.startswith("RLIMIT_"):
            yield resource.getrlimit(getattr(resource, name))
    yield tuple(sorted(os.sched_getaffinity(os.getpid())))
    yield os.getpriority(os.PRIO_PROCESS, os.getpid())


def _streams() -> Iterator[tuple[int, int, int]]:
    for fd in STREAMS:
        with contextlib.suppress(OSError):  # it is closed
            status = os.fstat(fd)
            yield fd, status.st_dev, status.st_ino
