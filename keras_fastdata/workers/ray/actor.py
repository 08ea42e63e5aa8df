"""The code of a worker that runs as a Ray actor.

Everything that it is asked is answered, also by what went wrong: nothing here
raises but what ends the process. The arrays of a batch go into Ray's object
store by themselves, beside an answer that says how to put them together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from keras_fastdata import _process_role
from keras_fastdata.memory import codec
from keras_fastdata.memory.arena import aligned_empty
from keras_fastdata.memory.leases import Bytes
from keras_fastdata.metrics.timing import Stopwatch, Timing
from keras_fastdata.workers import exceptions, log_forwarding, stack_dump
from keras_fastdata.workers.base import BatchRequest, Builds, describe_batch
from keras_fastdata.workers.messages import MessageKind
from keras_fastdata.workers.ray import cluster

# Smaller arrays of the dataset travel in its pickle, and the worker may write
# to them; larger ones are there once per node, and read-only.
SHARED_BYTES = 1 << 20


class DatasetState(NamedTuple):
    """One state of the dataset, stored in Ray's object store."""

    version: int  # from 1; a later state has a higher one
    pickled: Any  # where the pickle is
    # Where each array is that it leaves out; small ones come along as they are.
    buffers: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class ActorStart:
    """The settings that an actor receives before it loads the dataset."""

    worker: int
    dataset: str  # the dataset's class name, for messages
    state: DatasetState
    folder: str  # the training process's working directory; "" to stay
    path: list[str]  # its `sys.path`
    leads: bool  # whether that comes before the worker's own
    argv: list[str]  # its `sys.argv`
    logging_config: log_forwarding.LoggingConfig  # how it logs and warns


class WorkerLocation(NamedTuple):
    """The process, node and machine of an actor."""

    pid: int  # its process
    node: str  # the node's id in the cluster
    host: str  # the node's name or address, for messages
    machine: str  # see `cluster.machine`


class Answer(NamedTuple):
    """The answer of an actor to one call."""

    failure: bytes | None = None  # what it raised, taken apart, or `None`
    # Whether the failure leaves the worker without a dataset.
    by_start: bool = False
    structure: bytes = b""  # the batch without its arrays
    sizes: tuple[int, ...] = ()  # bytes of each array
    build_s: float = 0.0  # how long building took
    timing: Timing | None = None  # how it was built, if the request asks for it
    # Log records and warnings since the last answer.
    forwarded: tuple[tuple[MessageKind, bytes], ...] = ()
    at_s: float = math.nan  # the worker's `time.monotonic`


class _GatheredArrays:
    """Collects the arrays of a batch without copying them.

    Where an array begins in a slot, it has a number here.
    """

    used = 0

    def __init__(self) -> None:
        self._arrays: list[Bytes] = []

    def write(self, source: Bytes) -> tuple[int, int]:
        self._arrays.append(source)
        return len(self._arrays) - 1, source.nbytes

    def write_all(
        self, arrays: list[npt.NDArray[Any]]
    ) -> list[tuple[int, int]]:
        return [self.write(codec.octets(array, self)) for array in arrays]

    def allocate_copy(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        copy = aligned_empty(array.shape, array.dtype)
        np.copyto(copy, array)
        return copy

    def copy_retained(self, extents: list[tuple[int, int]]) -> bool:
        return False

    def arrays(self, extents: list[tuple[int, int]]) -> list[Bytes]:
        """Returns the non-empty arrays of the batch."""
        return [self._arrays[number] for number, size in extents if size]


class Actor:
    """A Ray actor that builds batches.

    All methods run in one thread, one after another, but for `stack`.
    """

    def __init__(self) -> None:
        _process_role.become_worker()
        self._forwarded: list[tuple[MessageKind, bytes]] = []
        self._stopwatch = Stopwatch(owns_process=True)
        self._thread = 0
        self._builder: Builds | None = None

    def location(self) -> WorkerLocation:
        """Returns the process, node and machine of the actor."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return WorkerLocation(
            os.getpid(), node, os.uname().nodename, cluster.machine()
        )

    def load(self, start: ActorStart) -> Answer:
        """Loads the dataset, and runs `on_worker_start`."""
        self._thread = threading.get_ident()
        self._start = start
        self._version = start.state.version
        self._name = f"Ray worker {start.worker} (pid {os.getpid()})"
        _set_up(start)
        log_forwarding.install(self._tell)
        try:
            make_builder = self._fetch(start.state)
            builder = make_builder()
            # Once more, now that the user's modules are imported.
            start.logging_config.apply()
            log_forwarding.take_over()
            builder.start(start.worker)
            self._builder = builder
        except SystemExit:
            raise
        except BaseException as error:
            return self._given_up(error)
        return Answer(forwarded=self._take_forwarded())

    def build(
        self, request: BatchRequest, state: DatasetState | None
    ) -> tuple[Answer, list[Bytes]]:
        """Applies `state` if it is newer, and then builds one batch."""
        if self._builder is None:
            raise RuntimeError("no dataset was loaded")
        self._thread = threading.get_ident()
        if state is not None and state.version > self._version:
            try:
                self._builder.adopt(self._fetch(state)())
                self._version = state.version
            except Exception as error:
                return self._given_up(error), []
        return self._build(self._builder, request)

    def stop(self) -> Answer:
        """Runs `on_worker_stop`; the builder logs the hook's exceptions."""
        builder, self._builder = self._builder, None
        if builder is not None:
            builder.stop(self._start.worker)
        self._stopwatch.close()
        return Answer(forwarded=self._take_forwarded())

    def stack(self) -> str:
        """Returns the call stack of the thread that runs `build` or `load`."""
        return stack_dump.of_thread(self._thread)

    def _build(
        self, builder: Builds, request: BatchRequest
    ) -> tuple[Answer, list[Bytes]]:
        gathered = _GatheredArrays()
        batch: list[Any] = []
        failure: bytes | None = None
        structure = b""
        extents: list[tuple[int, int]] = []
        began = time.monotonic()
        self._stopwatch.start(request.interval_s, request.epoch)
        try:
            batch.append(
                builder.build(request.epoch, request.index, self._start.worker)
            )
            self._stopwatch.built()
            encoded = codec.encode(batch, gathered)
            structure, extents = encoded.structure, codec.extents(encoded)
        except SystemExit:
            raise
        except BaseException as error:
            batch.clear()
            exceptions.note(
                error, describe_batch(self._start.dataset, request, self._name)
            )
            failure = exceptions.dump_exception(error)
        timing = self._stopwatch.stop()
        ended = time.monotonic()
        answer = Answer(
            failure=failure,
            structure=structure,
            sizes=tuple(size for _, size in extents),
            build_s=ended - began,
            timing=timing,
            forwarded=self._take_forwarded(),
            at_s=ended,
        )
        return answer, gathered.arrays(extents)

    def _fetch(self, state: DatasetState) -> Callable[[], Builds]:
        """Fetches from the object store a function that makes the builder."""
        import ray

        references = [state.pickled, *state.buffers]
        shared = [r for r in references if isinstance(r, ray.ObjectRef)]
        found = iter(ray.get(shared))
        pickled, *buffers = (
            next(found) if isinstance(r, ray.ObjectRef) else bytearray(r)
            for r in references
        )
        make_builder: Callable[[], Builds] = pickle.loads(
            pickled, buffers=buffers
        )
        return make_builder

    def _tell(self, kind: MessageKind, body: bytes) -> None:
        self._forwarded.append((kind, body))

    def _take_forwarded(self) -> tuple[tuple[MessageKind, bytes], ...]:
        forwarded, self._forwarded = self._forwarded, []
        return tuple(forwarded)

    def _given_up(self, error: BaseException) -> Answer:
        exceptions.note(
            error,
            f"While {self._start.dataset} was loaded or its "
            f"`on_worker_start` ran, in {self._name}.",
        )
        return Answer(
            exceptions.dump_exception(error),
            by_start=True,
            forwarded=self._take_forwarded(),
        )


def _set_up(start: ActorStart) -> None:
    """Sets the actor's working directory, paths, arguments and logging."""
    if start.folder:
        with contextlib.suppress(OSError):
            os.chdir(start.folder)
    theirs = [p for p in start.path if not p or os.path.exists(p)]
    paths = [*theirs, *sys.path] if start.leads else [*sys.path, *theirs]
    sys.path[:] = dict.fromkeys(paths)  # each once, where it is first
    sys.argv[:] = start.argv
    start.logging_config.apply()
    sys.breakpointhook = exceptions.no_breakpoint
