"""What the figures were measured on, and with."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform

PACKAGES = (
    "keras-fastdata",
    "keras",
    "tensorflow",
    "jax",
    "torch",
    "numpy",
    "grain",
    "loky",
    "spdl-core",
    "ray",
    "pyarrow",
    "datasets",
    "webdataset",
)


def describe() -> dict[str, object]:
    """The machine and the versions of all that takes part."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory / 1e9, 1),
        "kernel": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def in_words(machine: dict[str, object]) -> str:
    """The same in a few lines."""
    versions = machine["versions"]
    assert isinstance(versions, dict)
    return (
        f"{machine['cores']} cores of {machine['cpu']}, "
        f"{machine['memory_gb']} GB, {machine['kernel']}\n"
        f"Python {machine['python']}, "
        + ", ".join(f"{name} {number}" for name, number in versions.items())
    )


def _cpu_model() -> str:
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        ours = package == "keras-fastdata"
        return "from its sources" if ours else "not installed"
