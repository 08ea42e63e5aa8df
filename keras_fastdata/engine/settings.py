"""Checks the constructor arguments of a dataset."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, Literal

from keras_fastdata._validation import (
    boolean,
    check_local,
    integer,
    one_of,
    seconds,
)
from keras_fastdata.metrics.worker_kinds import WorkerKind
from keras_fastdata.workers.ray.options import Options

MAX_WORKERS = 1024  # as many lines as the arena's heartbeats has
START_METHODS = ("forkserver", "spawn", "fork", "portable")
_LONGEST_QUEUE = 1024  # batches; a dataset may have no end


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The validated constructor arguments of `FastPyDataset`.

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
        self._check("use_multiprocessing", boolean)
        self._check_workers()
        self._check("max_queue_size", integer, least=0)
        self._check("max_queue_bytes", integer, optional=True, least=1)
        self._check("seed", integer, optional=True, least=0)
        self._check("shuffle", boolean, optional=True)
        self._check("start_method", _start_method, optional=True)
        self._check("batch_timeout", seconds, optional=True)
        self._check("max_worker_restarts", integer, least=0)
        one_of("on_error", self.on_error, ("raise", "skip"))
        self._check("shard", _shard, optional=True)
        self._check_cache()
        self._check("worker_env", _environment, optional=True)
        self._check_executor()

    @property
    def kind(self) -> WorkerKind:
        """The kind of workers; `INLINE` if `workers` is 0 or "auto"."""
        if self.count and self.executor == "ray":
            return WorkerKind.RAY
        return WorkerKind.local(self.count, self.use_multiprocessing)

    @property
    def count(self) -> int:
        """The number of workers; 0 if `workers` is "auto"."""
        return 0 if self.workers == "auto" else self.workers

    @property
    def builds_next_epoch(self) -> bool:
        """Whether batches are built before their epoch begins.

        Not for a cache if this process builds: between epochs, only the program
        then changes what cached batches depend on.
        """
        is_cached_here = self.cache is not None and not self.kind.has_copies
        return self.kind.builds_ahead and not is_cached_here

    @property
    def lookahead(self) -> int:
        """The maximum number of batches requested but not yet delivered."""
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
        self._set("workers", workers)

    def _check_executor(self) -> None:
        one_of("executor", self.executor, ("local", "ray"))
        if self.executor != "ray":
            if self.ray_options is not None:
                raise ValueError(
                    "`ray_options` is for `executor='ray'`, and the executor "
                    f"is {self.executor!r}."
                )
            return
        Options.of(self.ray_options)
        if self.ray_options is not None:
            self._set("ray_options", dict(self.ray_options))
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
            self._set("cache", os.fspath(self.cache))
        self._check("cache_bytes", integer, optional=True, least=1)
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
                "whenever batches change for a reason that cannot be seen: a "
                "file in a folder, or an installed package."
            )

    def _check(
        self,
        name: str,
        check: Callable[..., Any],
        *,
        optional: bool = False,
        **bounds: int,
    ) -> None:
        """Validates an argument with `check`, and stores the result."""
        value = getattr(self, name)
        if value is not None or not optional:
            self._set(name, check(name, value, **bounds))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


def _start_method(name: str, value: Any) -> Any:
    one_of(name, value, START_METHODS)
    if value in ("forkserver", "fork") and not hasattr(os, "fork"):
        raise ValueError(
            f"`{name}={value!r}` needs fork, which this platform lacks. "
            "Leave it out."
        )
    return value


def _shard(_: str, value: Any) -> tuple[int, int] | str:
    if isinstance(value, str) and value == "auto":
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


def _environment(_: str, value: Any) -> dict[str, str]:
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
