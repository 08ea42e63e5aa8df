"""`keras-fastdata doctor`: what this machine can do, and what follows."""

from __future__ import annotations

import dataclasses
import enum
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from keras_fastdata.memory import os_limits
from keras_fastdata.metrics import cpu, formatting, ram
from keras_fastdata.workers.portable import requirements

_NAME = "keras-fastdata"
_BACKENDS = ("tensorflow", "jax", "torch")
_TESTED = ((3, 11), (3, 13))
_TRIAL_S = 240.0
_LITTLE_MEMORY = 2 << 30
_LITTLE_SHARED_MEMORY = 256 << 20
_FEW_FILES = 256
_SHARED_MEMORY = "/dev/shm"
_FOR = {  # what an extra is for
    "images": "reads image files",
    "report": "writes reports, and draws samples",
    "remote": "reads files from https:// and other addresses",
    "ray": 'runs workers on other machines (`executor="ray"`)',
}
_DEVELOPERS = {"test", "bench", "examples", "docs"}


class Level(enum.Enum):
    """How a fact matters to a user."""

    OK = "ok"
    NOTE = "note"
    BROKEN = "BROKEN"


@dataclasses.dataclass(frozen=True)
class Fact:
    """A fact about the machine, and what follows from it."""

    level: Level
    fact: str
    follows: str = ""

    def __str__(self) -> str:
        width = min(80, max(50, shutil.get_terminal_size().columns)) - 9
        lines = formatting.wrapped(self.fact, width).splitlines()
        lines += formatting.wrapped(self.follows, width).splitlines()
        first, *rest = [f"  {self.level.value:6} {lines[0]}", *lines[1:]]
        return "\n".join([first, *(f"{'':9}{line}" for line in rest)])


def run() -> int:
    """Prints all facts; returns 1 if something is broken, and else 0."""
    version = vars(sys.modules["keras_fastdata"])["__version__"]
    print(f"{_NAME} {version}, {platform.platform(terse=True)}")
    broken = 0
    sections: dict[str, Callable[[], Iterator[Fact]]] = {
        "This machine": _machine,
        "Packages": _packages,
        "System calls and shared memory": _system,
        "Keras and worker processes, tried in a process of their own": _tried,
    }
    for title, find in sections.items():
        print(f"\n{title}", flush=True)
        for fact in find():
            broken += fact.level is Level.BROKEN
            print(fact, flush=True)
    count = formatting.count(broken, "thing")
    verb = "is" if broken == 1 else "are"
    print(f"\n{count} {verb} broken." if broken else "\nNothing is broken.")
    return 1 if broken else 0


# -- the machine -------------------------------------------------------------


def _machine() -> Iterator[Fact]:
    reading = cpu.read()
    whole = max(1, int(reading.allowed))
    why = ", by the CPU quota of its cgroup" if reading.quota else ""
    yield Fact(
        Level.OK if reading.allowed >= 2 else Level.NOTE,
        f"This process may use {reading.allowed:g} of "
        f"{formatting.cores(os.cpu_count() or 1)}{why}.",
        f"Builds that compute gain from up to {whole} workers, and training "
        "needs cores too. Builds that wait, for files or a network, gain from "
        "more."
        if whole > 1
        else "Builds that compute gain nothing from workers. Builds that wait, "
        "for files or a network, do.",
    )
    free = ram.free()
    if free is None:
        yield Fact(
            Level.NOTE,
            "How much memory is free cannot be read: there is no /proc.",
            '`cache="memory"` needs `cache_bytes=`.',
        )
    else:
        yield Fact(
            Level.NOTE if free < _LITTLE_MEMORY else Level.OK,
            ram.left_now(),
            "Batches that wait in a dataset's queue take some of it; "
            "`max_queue_bytes=` limits how much.",
        )
    files = os_limits.open_files()
    yield Fact(
        Level.NOTE if files < _FEW_FILES else Level.OK,
        f"A process may open {files:,} files.",
        "Many workers need more: raise the limit (`ulimit -n 4096`)."
        if files < _FEW_FILES
        else "",
    )


# -- packages ----------------------------------------------------------------


def _packages() -> Iterator[Fact]:
    yield _python()
    try:
        needs = importlib.metadata.requires(_NAME) or []
    except importlib.metadata.PackageNotFoundError:
        folder = pathlib.Path(__file__).parents[2]
        yield Fact(
            Level.NOTE,
            f"The package is not installed, but imported from {folder}.",
            "Whether the packages that it needs are new enough is not known.",
        )
        return
    by_extra: dict[str, list[str]] = {}
    for need in needs:
        requirement, _, marker = need.partition(";")
        found = re.search(r"extra\s*==\s*['\"]([^'\"]+)", marker)
        extra = found[1] if found else ""
        if not requirement.strip().startswith(_NAME):
            by_extra.setdefault(extra, []).append(requirement.strip())
    yield _required(by_extra.pop("", []))
    for extra, requirements_ in by_extra.items():
        if extra not in _DEVELOPERS:
            yield _extra(extra, requirements_)


def _python() -> Fact:
    version = platform.python_version()
    first, last = (".".join(map(str, bound)) for bound in _TESTED)
    if not _TESTED[0] <= sys.version_info[:2] <= _TESTED[1]:
        return Fact(
            Level.NOTE,
            f"Python {version}",
            f"The package is tested on Python {first} to {last}.",
        )
    has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
    return Fact(
        Level.OK,
        f"Python {version}",
        ""
        if has_lock
        else "Threads compute at the same time, as processes do.",
    )


def _required(requirements_: list[str]) -> Fact:
    have = {each: _installed(each) for each in requirements_}
    bad = [each for each, (version, fits) in have.items() if not fits]
    if bad:
        names = ", ".join(
            f"{each} ({have[each][0] or 'missing'})" for each in bad
        )
        quoted = " ".join(f"'{each}'" for each in bad)
        return Fact(
            Level.BROKEN,
            f"Needed, and missing or of another version: {names}",
            f"Run `pip install {quoted}`.",
        )
    found = ", ".join(
        f"{_distribution(each)} {version}"
        for each, (version, _) in have.items()
    )
    return Fact(Level.OK, f"Needed, and new enough: {found}")


def _extra(extra: str, requirements_: list[str]) -> Fact:
    lacking = [each for each in requirements_ if not _installed(each)[1]]
    use = f": {_FOR[extra]}" if extra in _FOR else ""
    if not lacking:
        have = ", ".join(
            f"{_distribution(each)} {_installed(each)[0]}"
            for each in requirements_
        )
        return Fact(Level.OK, f"`{extra}`{use} ({have})")
    missing = ", ".join(_distribution(each) for each in lacking)
    return Fact(
        Level.NOTE,
        f"`{extra}`{use}; not installed, or too old: {missing}",
        f"To have it: `pip install '{_NAME}[{extra}]'`",
    )


def _distribution(requirement: str) -> str:
    return re.split(r"[\[<>=!~ (]", requirement, maxsplit=1)[0]


def _installed(requirement: str) -> tuple[str, bool]:
    """Returns the version ("": none), and whether it is as required."""
    name = _distribution(requirement)
    version = _version_of(name)
    if not version:
        return "", False
    try:
        from packaging.requirements import Requirement
    except ImportError:  # it comes with Keras
        return version, True
    return version, Requirement(requirement).specifier.contains(
        version, prereleases=True
    )


def _version_of(name: str) -> str:
    """Returns the version of a distribution, or of one with its module."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        # Such as "tensorflow-cpu" and "keras-nightly".
        others = importlib.metadata.packages_distributions().get(name)
        return importlib.metadata.version(others[0]) if others else ""


# -- the system --------------------------------------------------------------


def _system() -> Iterator[Fact]:
    lacking = requirements.lacking()
    if lacking:
        yield Fact(
            Level.NOTE,
            f"The system lacks or refuses {', '.join(lacking)}.",
            'Workers will be new interpreters (`start_method="portable"`): '
            "each imports your packages itself, and batches lie in shared "
            "memory with a name.",
        )
    else:
        yield Fact(
            Level.OK,
            "The system permits fork, memfd_create, pidfd_open and "
            "SOCK_SEQPACKET.",
            "Workers will be forked from a process that has imported your "
            "packages once. Batches lie in shared memory without a name, which "
            "the size of /dev/shm does not limit.",
        )
    if sys.platform == "linux":
        yield _dev_shm(is_needed=bool(lacking))
    if not os.path.isdir("/proc/self"):
        yield Fact(
            Level.NOTE,
            "There is no /proc.",
            "`LoaderHealth` will not know the memory of workers, nor how busy "
            "the cores are.",
        )


def _dev_shm(is_needed: bool) -> Fact:
    users = 'Ray and `start_method="portable"`'
    level = Level.BROKEN if is_needed else Level.NOTE
    path = _SHARED_MEMORY
    if not os.path.isdir(path) or not os.access(path, os.W_OK | os.X_OK):
        state = "cannot be written to" if os.path.isdir(path) else "is missing"
        return Fact(
            level,
            f"{path} {state}.",
            "Worker processes need it here: mount it (`docker run "
            "--shm-size=2g`), or use threads."
            if is_needed
            else f"{users} need it; other workers do not.",
        )
    usage = shutil.disk_usage(path)
    fact = (
        f"{path} is writable, and {formatting.size(usage.free)} of "
        f"{formatting.size(usage.total)} are free."
    )
    if usage.free >= _LITTLE_SHARED_MEMORY:
        return Fact(Level.OK, fact)
    return Fact(
        Level.NOTE,
        fact,
        "All batches that wait must fit into it: enlarge it (`docker run "
        "--shm-size=2g`), or set `max_queue_bytes=`."
        if is_needed
        else f"{users} need more; other workers do not.",
    )


# -- what is tried -----------------------------------------------------------


def _tried() -> Iterator[Fact]:
    yield _backends()
    chosen = _chosen()  # Keras writes its file when it is imported
    results, ended = _trial()
    steps = {result["step"]: result for result in results}
    keras = steps.pop("keras", {})
    if "version" not in keras:
        error = keras.get("error") or f"the process {ended}"
        have = [name for name in _BACKENDS if _is_there(name)]
        yield Fact(
            Level.BROKEN,
            f"Keras cannot be imported ({chosen}): {error}",
            f"Choose a backend that is installed ({', '.join(have)}), such as "
            f"by `export KERAS_BACKEND={have[0]}`."
            if have
            else "Install a backend: `pip install tensorflow`.",
        )
        return
    on = ", ".join(keras["devices"])
    yield Fact(
        Level.OK,
        f"Keras {keras['version']} uses {keras['backend']} ({chosen}). Its "
        f"import took {formatting.duration(keras['took_s'])}.",
        f"Models train on {on}." if on else "",
    )
    yield from _start_methods(steps, ended)


def _start_methods(
    steps: dict[str, dict[str, Any]], ended: str
) -> Iterator[Fact]:
    works = {name: step for name, step in steps.items() if "took_s" in step}
    # The default is tried first.
    default = next(iter(steps), "")
    if works:
        shown = ", ".join(
            f"{name} ({formatting.duration(step['took_s'])})"
            for name, step in works.items()
        )
        yield Fact(
            Level.OK,
            f"Workers that were started in these ways built batches: {shown}.",
            f"`use_multiprocessing=True` uses {default}; `start_method=` "
            "chooses another."
            if default in works and len(works) > 1
            else "",
        )
    for name in steps.keys() - works.keys():
        why = steps[name].get("error") or f"the process {ended}"
        is_default = name == default
        yield Fact(
            Level.BROKEN if is_default else Level.NOTE,
            f"No worker could be used that was started by {name}: "
            f"{formatting.shortened(why, 400)}",
            "Use threads (`use_multiprocessing=False`)"
            + (f", or `start_method={next(iter(works))!r}`." if works else ".")
            if is_default
            else f"Leave out `start_method={name!r}`.",
        )
    if not steps:
        yield Fact(
            Level.BROKEN,
            f"No worker process was tried: the process {ended}.",
            "Use threads (`use_multiprocessing=False`).",
        )


def _trial() -> tuple[list[dict[str, Any]], str]:
    """Returns the results of `trial`, and how its process ended."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        "from keras_fastdata.commands import trial; trial.main()"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TRIAL_S,
        )
        said, ended = done.stdout, f"ended with status {done.returncode}"
        if done.returncode:
            last = done.stderr.decode(errors="replace").strip()[-300:]
            ended += f": {last}"
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        ended = f"did not end within {formatting.duration(_TRIAL_S)}"
    latest: dict[str, dict[str, Any]] = {}
    for line in said.decode(errors="replace").splitlines():
        if line.startswith("{"):
            result = json.loads(line)
            latest[result["step"]] = result
    return [*latest.values()], ended


def _backends() -> Fact:
    have = [
        f"{name} {_version_of(name)}" for name in _BACKENDS if _is_there(name)
    ]
    if not have:
        return Fact(
            Level.BROKEN,
            "No backend of Keras is installed.",
            "Install one: `pip install tensorflow`, `jax` or `torch`.",
        )
    return Fact(
        Level.OK,
        f"Backends that are installed: {', '.join(have)}",
        "`KERAS_BACKEND=... python train.py` chooses one."
        if len(have) > 1
        else "",
    )


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _chosen() -> str:
    """Returns why Keras chooses the backend that it chooses."""
    if "KERAS_BACKEND" in os.environ:
        return f"KERAS_BACKEND={os.environ['KERAS_BACKEND']} is set"
    home = os.environ.get("KERAS_HOME", os.path.expanduser("~/.keras"))
    path = os.path.join(home, "keras.json")
    try:
        with open(path, encoding="utf-8") as file:
            name = json.load(file)["backend"]
    except (OSError, ValueError, KeyError, TypeError):
        return "KERAS_BACKEND is not set"
    return f"{path} says {name}, and KERAS_BACKEND is not set"
