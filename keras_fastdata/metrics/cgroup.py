"""Reads the kernel's files about the cgroup (v1 or v2) of this process."""

from __future__ import annotations

import contextlib
import os


def folders(controller: str) -> list[str]:
    """Returns the cgroup folders of this process, the innermost first.

    The controller is "memory" or "cpu".
    """
    found = []
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as file:
        for line in file:
            _, controllers, path = line.strip().split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = "/sys/fs/cgroup" + (f"/{controller}" if controllers else "")
            while path not in ("", "/"):
                found.append(root + path)
                path = os.path.dirname(path)
            # In a container, the apparent root has the container's limit.
            found.append(root)
    return found


def number(path: str) -> int | None:
    """Returns the number in a file, or `None` if the file cannot be read."""
    with contextlib.suppress(OSError, ValueError), open(path) as file:
        return int(file.read())
    return None


def fields(path: str) -> dict[str, int]:
    """Reads a file whose lines are `name number` or `name: number unit`."""
    found = {}
    with contextlib.suppress(OSError), open(path) as file:
        for line in file:
            name, number, *_ = [*line.replace(":", " ").split(), "", ""]
            if number.isdigit():
                found[name] = int(number)
    return found
