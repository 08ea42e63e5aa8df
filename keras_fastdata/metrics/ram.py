"""Measures the memory that processes use, and the memory that is free."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from keras_fastdata.metrics import cgroup

_GIB = 1 << 30
_UNLIMITED = 1 << 62  # cgroup v1 writes a number near 2**63 for no limit


def pss(pids: Iterable[int]) -> int | None:
    """Returns the total proportional set size (PSS) of processes, in bytes.

    Memory that several processes share is divided among them. `None` if the
    kernel does not report it, or there is no process.
    """
    found = [nbytes for pid in pids if (nbytes := _pss_of(pid)) is not None]
    return sum(found) if found else None


def _pss_of(pid: int) -> int | None:
    with (
        contextlib.suppress(OSError),
        open(f"/proc/{pid}/smaps_rollup") as file,
    ):
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return None


def free() -> int | None:
    """Returns how many bytes this process can allocate; `None` if unknown."""
    found = []
    machine = cgroup.fields("/proc/meminfo")
    if "MemAvailable" in machine:
        found.append(machine["MemAvailable"] * 1024)
    limit, used, _ = _cgroup()
    if limit is not None and used is not None:
        found.append(max(0, limit - used))
    return min(found, default=None)


def left_now() -> str:
    """Returns a sentence on the free memory of the machine and the cgroup."""
    parts = []
    machine = cgroup.fields("/proc/meminfo")
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
        noun = "process" if kills == 1 else "processes"
        parts.append(f"the kernel has killed {kills} {noun} in it so far")
    return f"Now {', '.join(parts)}." if parts else ""


def _cgroup() -> tuple[int | None, int | None, int]:
    """Returns the cgroup's memory limit, used bytes and number of OOM kills.

    The page cache that the kernel can drop is not counted as used.
    """
    for folder in cgroup.folders("memory"):
        limit = cgroup.number(f"{folder}/memory.max")
        used = cgroup.number(f"{folder}/memory.current")
        events = cgroup.fields(f"{folder}/memory.events")
        if limit is None:
            limit = cgroup.number(f"{folder}/memory.limit_in_bytes")
            used = cgroup.number(f"{folder}/memory.usage_in_bytes")
            events = cgroup.fields(f"{folder}/memory.oom_control")
        if limit is not None and limit < _UNLIMITED:
            if used is not None:
                used = max(0, used - _reclaimable(folder))
            return limit, used, events.get("oom_kill", 0)
    return None, None, 0


def _reclaimable(folder: str) -> int:
    """Returns the bytes of page cache that the kernel can free immediately."""
    found = cgroup.fields(f"{folder}/memory.stat")
    return found.get("total_inactive_file", found.get("inactive_file", 0))
