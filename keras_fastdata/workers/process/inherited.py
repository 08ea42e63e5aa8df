"""What a process inherits from the one that forks it, or starts it."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

from keras_fastdata.workers import stack_dump
from keras_fastdata.workers.process import imports

_OF_RIGHTS = ("Cap", "NoNewPrivs", "Seccomp")  # in /proc/*/status

Rights = tuple[object, ...]


class Key(NamedTuple):
    """The properties that all workers of one fork server have at their start.

    Attributes:
        worker_env: Environment variables over the clean defaults.
        rights: User, groups and capabilities.
        imports: What it has imported, if more than this package.
    """

    worker_env: tuple[tuple[str, str], ...]
    rights: Rights
    imports: imports.Imports | None = None


def rights() -> Rights:
    """Returns the user, groups and capabilities that children inherit."""
    status = stack_dump.status_of("thread-self")
    rest = [(k, v) for k, v in status.items() if k.startswith(_OF_RIGHTS)]
    groups = tuple(sorted(os.getgroups()))
    return os.getresuid(), os.getresgid(), groups, *sorted(rest)


def inherited() -> list[object]:
    """Returns what else children inherit: streams, limits, cores, priority.

    It may differ between an open fork server and its trainer, but a kept fork
    server is not used for a dataset if it does.
    """
    import resource

    found: list[object] = [
        resource.getrlimit(getattr(resource, name))
        for name in sorted(vars(resource))
        if name.startswith("RLIMIT_")
    ]
    for fd in range(3):
        with contextlib.suppress(OSError):  # it is closed
            status = os.fstat(fd)
            found.append((fd, status.st_dev, status.st_ino))
    # Of the main thread; others may have their own.
    found.append(os.sched_getaffinity(os.getpid()))
    found.append(os.getpriority(os.PRIO_PROCESS, os.getpid()))
    return found
