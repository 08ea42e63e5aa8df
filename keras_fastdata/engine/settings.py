"""What a user may configure, checked once, in the constructor's words."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import numbers
import operator
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, Literal

import numpy as np

from keras_fastdata.workers.ray import cluster

MAX_WORKERS = 1024  # as many lines as the arena's heartbeats has
START_METHODS = ("forkserver", "spawn", "fork")
_LONGEST_QUEUE = 1024  # batches; a dataset may have no end

PoolKind = Literal["inline", "thread", "process", "ray"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The constructor arguments of `FastPyDataset`, validated.

    For what each one means, see `FastPyDataset`.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: An argument is out of range.
    """

    workers: int | Literal["auto"] = 1
    use_multiprocessing: bool = False
    max_queue_size: int = 10
    max_queue_bytes: int | None = None
    seed: int | None = None
    shuffle: bool | None = None
    start_method: str | None = None
    batch_timeout: float | None = None
    max_worker_restarts: int = 3
    on_error: str = "raise"
    shard: Any = "auto"
    cache: str | os.PathLike[str] | None = None
    cache_bytes: int | None = None
    cache_version: str | int | None = None
    executor: str = "local"
    worker_env: Mapping[str, str] | None = None
    ray_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check = self._set_checked
        check(
            "use_multiprocessing",
            boolean("use_multiprocessing", self.use_multiprocessing),
        )
        self._check_workers()
        check(
            "max_queue_size",
            integer("max_queue_size", self.max_queue_size, least=0),
        )
        if self.max_queue_bytes is not None:
            check(
                "max_queue_bytes",
                integer("max_queue_bytes", self.max_queue_bytes, least=1),
            )
        if self.seed is not None:
            check("seed", integer("seed", self.seed, least=0))
        if self.shuffle is not None:
            check("shuffle", boolean("shuffle", self.shuffle))
        if self.start_method is not None:
            one_of("start_method", self.start_method, START_METHODS)
            _require_posix("start_method", self.start_method)
        if self.batch_timeout is not None:
            check(
                "batch_timeout", _seconds("batch_timeout", self.batch_timeout)
            )
        check(
            "max_worker_restarts",
            integer("max_worker_restarts", self.max_worker_restarts, least=0),
        )
        one_of("on_error", self.on_error, ("raise", "skip"))
        check("shard", _shard(self.shard))
        self._check_cache()
        check("worker_env", _environment(self.worker_env))
        self._check_executor()

    @property
    def kind(self) -> PoolKind:
        """Where batches are built; to begin with, if that is not decided."""
        if not self.count:
            return "inline"
        if self.executor == "ray":
            return "ray"
        return "process" if self.use_multiprocessing else "thread"

    @property
    def count(self) -> int:
        """How many workers; 0 if that is not decided yet."""
        return 0 if self.workers == "auto" else self.workers

    @property
    def lookahead(self) -> int:
        """How many batches may be being built or ready, in all."""
        return self.max_queue_size or _LONGEST_QUEUE

    def _check_workers(self) -> None:
        if self.workers == "auto":
            if self.use_multiprocessing:
                raise ValueError(
                    "`workers='auto'` chooses between threads and processes "
                    "itself. Leave out `use_multiprocessing`, or give the "
                    "number of workers."
                )
            return
        workers = integer(
            "workers", self.workers, least=0, or_else=' or "auto"'
        )
        if workers > MAX_WORKERS:
            raise ValueError(
                f"`workers` must be at most {MAX_WORKERS}. Received: {workers}"
            )
        self._set_checked("workers", workers)

    def _check_executor(self) -> None:
        one_of("executor", self.executor, ("local", "ray"))
        if self.executor != "ray":
            if self.ray_options is not None:
                raise ValueError(
                    "`ray_options` is for `executor='ray'`, and the executor "
                    f"is {self.executor!r}."
                )
            return
        cluster.Options.of(self.ray_options)
        if self.ray_options is not None:
            self._set_checked("ray_options", dict(self.ray_options))
        if self.workers == "auto":
            raise ValueError(
                "`workers='auto'` chooses among what this machine has. With "
                "`executor='ray'`, give the number of workers."
            )
        if self.start_method is not None:
            raise ValueError(
                f"`start_method={self.start_method!r}` is for processes of "
                "this machine. With `executor='ray'`, Ray starts the workers."
            )

    def _check_cache(self) -> None:
        if self.cache is not None:
            if not isinstance(self.cache, (str, os.PathLike)):
                raise TypeError(
                    '`cache` must be "memory", or the path of a directory, or '
                    f"None. Received: {self.cache!r}"
                )
            check_local("cache", self.cache)
            self._set_checked("cache", os.fspath(self.cache))
        if self.cache_bytes is not None:
            nbytes = integer("cache_bytes", self.cache_bytes, least=1)
            self._set_checked("cache_bytes", nbytes)
        version = self.cache_version
        if isinstance(version, bool) or not isinstance(
            version, (str, int, NoneType)
        ):
            raise TypeError(
                "`cache_version` must be a string or an integer. Received: "
                f"{version!r}"
            )
        if self.cache not in (None, "memory") and version is None:
            raise ValueError(
                f"`cache={self.cache!r}` is a directory, whose batches outlive "
                "the program. Pass `cache_version` with it, and another one "
                "whenever code that makes batches changes: functions that "
                "`__getitem__` calls are not looked at."
            )

    def _set_checked(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


def integer(name: str, value: Any, *, least: int, or_else: str = "") -> int:
    """An argument that must be an integer of at least `least`.

    Args:
        name: Of the argument.
        value: What was received.
        least: The smallest that is allowed.
        or_else: What the error is to say of other values that are allowed.
    """
    wanted = f"`{name}` must be an integer of at least {least}{or_else}."
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{wanted} Received: {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{wanted} Received: {value!r} (of type {type(value).__name__})"
            f"{_as_integer(name, value)}"
        ) from None
    if number < least:
        raise ValueError(f"{wanted} Received: {number}")
    return number


def _as_integer(name: str, value: Any) -> str:
    """Says how to pass the integer that was meant, where there is one."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return ""
    is_it = isinstance(value, str) or number == value
    return f". Pass `{name}={number}`, or `int(...)` of it." if is_it else ""


def arguments_of(kind: type) -> list[str]:
    """Names that the constructor of a class takes, its bases' included."""
    names: dict[str, None] = {}
    for base in kind.__mro__:
        initialize: Any = vars(base).get("__init__")
        if initialize is None or base is object:
            continue
        _, *parameters = inspect.signature(initialize).parameters.values()
        for parameter in parameters:
            if parameter.kind not in (
                parameter.VAR_POSITIONAL,
                parameter.VAR_KEYWORD,
            ):
                names[parameter.name] = None
    return list(names)


def unknown_arguments(
    taker: str, unknown: Iterable[str], allowed: Sequence[str]
) -> TypeError:
    """The error for arguments that nothing takes.

    Args:
        taker: Name of the class or function they were passed to.
        unknown: Their names.
        allowed: Names of the arguments there are.
    """
    names = sorted(unknown)
    near = [difflib.get_close_matches(name, allowed, 1) for name in names]
    meant = " and ".join(f"`{name}`" for found in near for name in found)
    return TypeError(
        f"{taker} received unknown arguments: {', '.join(names)}. "
        f"It takes: {', '.join(allowed)}."
        + (f" Did you mean {meant}?" if meant else "")
    )


def check_local(name: str, path: Any, way_out: str = "") -> None:
    """Refuses an address such as `s3://...`, which is no path of a file."""
    text = os.fspath(path)
    if isinstance(text, str) and re.match(r"[a-zA-Z][\w+.-]+://", text):
        raise ValueError(
            f"`{name}` must be on a file system of this machine. Received: "
            f"{text!r}. Mount it, or copy the files here"
            f"{way_out or ' first'}."
        )


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"`{name}` must be a number of seconds. "
            f"Received: {value!r} (of type {type(value).__name__})"
        )
    seconds = float(value)
    if not 0 < seconds < math.inf:
        raise ValueError(
            f"`{name}` must be more than 0 seconds, and finite; `None` waits "
            f"for ever. Received: {value!r}"
        )
    return seconds


def boolean(name: str, value: Any) -> bool:
    """An argument that must be True or False."""
    # NumPy's bool and 0 / 1 come out of configuration files.
    if value in (True, False):
        return bool(value)
    raise TypeError(
        f"`{name}` must be True or False. "
        f"Received: {value!r} (of type {type(value).__name__})"
    )


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Refuses an argument that is none of the words allowed."""
    if value not in allowed:
        names = ", ".join(repr(choice) for choice in allowed)
        one_of = "one of " if len(allowed) > 1 else ""
        raise ValueError(
            f"`{name}` must be {one_of}{names}. Received: {value!r}"
        )


def _require_posix(name: str, value: str) -> None:
    if value != "spawn" and not hasattr(os, "fork"):
        raise ValueError(
            f"`{name}={value!r}` needs fork, which this platform lacks. "
            "Use threads (`use_multiprocessing=False`)."
        )


def _shard(value: Any) -> tuple[int, int] | str | None:
    if value is None or (isinstance(value, str) and value == "auto"):
        return value
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(
            "`shard` must be (index, count), the number of this process and "
            'how many there are; or "auto", or None. '
            f"Received: {value!r}"
        )
    index = integer("shard[0]", value[0], least=0)
    count = integer("shard[1]", value[1], least=1)
    if index >= count:
        raise ValueError(
            f"`shard` must be (index, count) with index < count. Received: "
            f"{value!r}"
        )
    return index, count


def _environment(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(
        isinstance(item, str) for pair in value.items() for item in pair
    ):
        raise TypeError(
            "`worker_env` must be a dict of strings to strings, such as "
            f"{{'OMP_NUM_THREADS': '2'}}. Received: {value!r}"
        )
    for name, text in value.items():
        if not name or "=" in name or "\0" in name + text:
            raise ValueError(
                "`worker_env` must name variables that a process can have: "
                "no empty name, no '=' in a name, no NUL anywhere. "
                f"Received: {name!r}: {text!r}"
            )
    return dict(value)
