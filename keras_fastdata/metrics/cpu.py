"""Measures the cores that this process is allowed to use, and their load.

The machine's number of cores misleads: affinity (`taskset`, Slurm, Kubernetes'
static CPU manager) and the CPU quota of a cgroup (`docker --cpus`, a pod's
limit) may allow fewer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import time

from keras_fastdata.metrics import cgroup


@dataclasses.dataclass(frozen=True)
class Reading:
    """The cores that this process is allowed to use, and their busy time.

    `busy_cores` compares two readings.
    """

    at_s: float  # the time of the reading, by `time.monotonic`
    allowed: float  # cores that this process may use; 1.5 is possible
    quota: bool  # whether `allowed` comes from a cgroup's quota, not affinity
    # Seconds for which these cores were busy, in total: with all processes of
    # the machine, or of the cgroup if `quota`. `None` if unknown.
    busy_s: float | None


def read() -> Reading:
    """Reads the number of allowed cores, and their total busy time.

    This takes about 0.1 ms.
    """
    cores = _affinity()
    quota, directory = _cgroup_quota()
    now_s = time.monotonic()
    if quota is not None and quota < len(cores):
        return Reading(now_s, quota, True, _cgroup_busy_s(directory))
    return Reading(now_s, float(len(cores)), False, _cores_busy_s(cores))


def busy_cores(before: Reading, after: Reading) -> float | None:
    """Returns how many cores were busy on average between two readings."""
    elapsed_s = after.at_s - before.at_s
    if before.busy_s is None or after.busy_s is None or elapsed_s <= 0:
        return None
    busy = (after.busy_s - before.busy_s) / elapsed_s
    return min(after.allowed, max(0.0, busy))


def model() -> str:
    """Returns the model name of the CPU, or "" if the name is unknown."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model", "cpu model"):
                return value.strip()
    return platform.processor()


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        # Of the process; a thread may have a narrower affinity.
        return os.sched_getaffinity(os.getpid())
    return set(range(os.cpu_count() or 1))


def _cgroup_quota() -> tuple[float | None, str]:
    """Returns the lowest CPU quota of this process, and its cgroup folder."""
    least: float | None = None
    where = ""
    for folder in cgroup.folders("cpu"):
        quota = _quota_of(folder)
        if quota is not None and (least is None or quota < least):
            least, where = quota, folder
    return least, where


def _quota_of(folder: str) -> float | None:
    with (
        contextlib.suppress(OSError, ValueError),
        open(f"{folder}/cpu.max") as file,
    ):
        quota, period = file.read().split()
        return None if quota == "max" else int(quota) / int(period)
    us = cgroup.number(f"{folder}/cpu.cfs_quota_us")
    period_us = cgroup.number(f"{folder}/cpu.cfs_period_us")
    return us / period_us if us and us > 0 and period_us else None


def _cgroup_busy_s(folder: str) -> float | None:
    usage_us = cgroup.fields(f"{folder}/cpu.stat").get("usage_usec")
    if usage_us is not None:
        return usage_us / 1e6
    usage_ns = cgroup.number(f"{folder}/cpuacct.usage")
    return None if usage_ns is None else usage_ns / 1e9


def _cores_busy_s(cores: set[int]) -> float | None:
    """Returns the summed busy time of `cores` since the machine started."""
    try:
        ticks_per_s = os.sysconf("SC_CLK_TCK")
        with open("/proc/stat") as file:
            lines = file.read().splitlines()
    except (OSError, ValueError):
        return None
    busy = 0
    for line in lines:
        name, *fields = line.split()
        if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in cores:
            ticks = [int(field) for field in fields[:8]]
            busy += sum(ticks) - ticks[3] - ticks[4]  # idle, waiting for I/O
    return busy / ticks_per_s
