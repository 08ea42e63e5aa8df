"""The processes that this one's workers are, and those that fork them."""

from __future__ import annotations

import psutil

from benchmarks import trouble


def workers() -> list[psutil.Process]:
    """Returns the worker processes that run."""
    found = []
    for pid in trouble.workers():
        try:
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found
