"""What the machine, or the container, has left: figures for error messages."""

from __future__ import annotations

import contextlib
import os

_GIB = 1 << 30
_UNLIMITED = 1 << 62  # cgroup v1 writes a number near 2**63 for no limit


def memory_now() -> str:
    """A sentence on free memory, of the machine and of a cgroup's limit."""
    parts = []
    machine = _fields("/proc/meminfo")
    if "MemAvailable" in machine and "MemTotal" in machine:
        free, total = machine["MemAvailable"] * 1024, machine["MemTotal"] * 1024
        parts.append(
            f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB of the machine's "
            "memory are free"
        )
    limit, used, kills = _cgroup()
    if limit is not None and used is not None:
        parts.append(
            f"this container uses {used / _GIB:.1f} of the {limit / _GIB:.1f} "
            "GiB it may have"
        )
    if kills:
        parts.append(f"the kernel has killed {kills} processes in it so far")
    return f"Now {', '.join(parts)}." if parts else ""


def _cgroup() -> tuple[int | None, int | None, int]:
    """Limit and use in bytes, and OOM kills, of this process's cgroup."""
    for folder in _cgroup_folders():
        limit = _number(f"{folder}/memory.max")
        used = _number(f"{folder}/memory.current")
        events = _fields(f"{folder}/memory.events")
        if limit is None:
            limit = _number(f"{folder}/memory.limit_in_bytes")
            used = _number(f"{folder}/memory.usage_in_bytes")
            events = _fields(f"{folder}/memory.oom_control")
        if limit is not None and limit < _UNLIMITED:
            return limit, used, events.get("oom_kill", 0)
    return None, None, 0


def _cgroup_folders() -> list[str]:
    """Where this process's memory limit may be written, innermost first."""
    found = []
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as file:
        for line in file:
            _, controllers, path = line.strip().split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root = "/sys/fs/cgroup" + ("/memory" if controllers else "")
            while path not in ("", "/"):
                found.append(root + path)
                path = os.path.dirname(path)
            # In a container, the limit is that of what looks like the root.
            found.append(root)
    return found


def _number(path: str) -> int | None:
    with contextlib.suppress(OSError, ValueError), open(path) as file:
        return int(file.read())
    return None


def _fields(path: str) -> dict[str, int]:
    """A file of lines `name number` or `name: number unit`."""
    found = {}
    with contextlib.suppress(OSError), open(path) as file:
        for line in file:
            name, number, *_ = [*line.replace(":", " ").split(), "", ""]
            if number.isdigit():
                found[name] = int(number)
    return found
