"""Stores whether this process is a worker.

This must be known before heavy modules are imported.

A worker imports the user's module, which imports this package; and that must
not import Keras. So the fork server and the workers call `become_worker` first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

_worker = False


def become_worker() -> None:
    """Marks this process as a worker, or as the fork server of workers."""
    global _worker
    _worker = True


def is_worker() -> bool:
    """Returns whether this process is a worker, or a fork server of workers."""
    return _worker


def process_numbers() -> tuple[int, ...]:
    """Returns what numbers `multiprocessing` gave to this process.

    That is the place among its parent's children, after the parent's numbers.
    Empty in a process that `multiprocessing` has not started.
    """
    # Imported in each process that it has started.
    module = sys.modules.get("multiprocessing.process")
    return tuple(module.current_process()._identity) if module else ()  # noqa: SLF001


def at_fork(**hooks: Callable[[], Any]) -> None:
    """Registers hooks for forks, on systems where processes can fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(**hooks)
