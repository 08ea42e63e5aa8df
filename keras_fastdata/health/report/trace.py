"""Writes a trace of all batches and steps for Perfetto and chrome://tracing.

    workers of Images   worker 0   | build | store |      | build | ...
                        worker 1        | build | store |
    training            data                     | deliver | deliver | ...
                        steps      | step                  | step

An arrow goes from each build to the step that used its batch. The file is of
Chrome's trace event format ("JSON Object Format"), in microseconds.

Events are written as they come, one per line, into a temporary file beside the
path. `close` renames it to the path. Memory holds only lines that are not
written yet, and batches and steps without their arrow; both are bounded.
Without `close`, the trace is finished when the writer is garbage-collected or
the interpreter ends. A killed process leaves the temporary file with all epochs
that had ended; appending `]}` makes it a trace.
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import math
import os
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from keras_fastdata import _atomic_write
from keras_fastdata.health.step_clock import Step
from keras_fastdata.metrics.pool_stats import WorkerLoss
from keras_fastdata.metrics.recorder import Span

_WORKERS = 1  # process ids of the trace, not of the system
_TRAINING = 2
_DATA = 0  # threads of `_TRAINING`
_STEPS = 1
# Added to worker indices in a validation, which may have another dataset.
_VALIDATION = 1 << 16
_BUFFER_BYTES = 1 << 18
_EARLY_STEPS = 4096  # steps that are held until the first batch comes
_ARROWS = 1 << 15  # batches, and steps, that wait for their arrow
_LEAST_US = 1e-3  # a nanosecond, the resolution of Perfetto

_log = logging.getLogger("keras_fastdata")


class _BuildSlice(NamedTuple):
    """A batch whose training step is not known yet; times in microseconds."""

    thread: int
    built_us: float
    delivered_us: float


class _Took(NamedTuple):
    """A training step whose batches do not all have an arrow yet.

    Times are in microseconds.
    """

    number: int
    began_us: float
    ended_us: float


class TraceWriter:
    """Writes a trace of the batches and steps of an `EpochMonitor`.

    The k-th batch delivered between `begin` and `end` belongs to the step with
    the greatest `number` that is at most k. A batch has no arrow if there is
    no such step, or if more than 32,768 batches or steps arrive in between.

    If the disk is full or missing, the trace ends and training goes on; this
    is logged once.

    Args:
        path: The file of the trace, which `close` replaces. If no file can be
            made in its folder, a warning is logged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = _TraceFile(os.fspath(path))
        unnamed = [_name("process_name", _WORKERS, 0, "workers")]
        self._finalizer = weakref.finalize(self, self._file.finish, unnamed)
        self._threads: set[int] = set()
        self._origin_s: float | None = None
        self._early: list[Step] = []
        self._phase = ""
        self._arrows = 0
        self._forget()
        for event in (
            _name("process_name", _TRAINING, 0, "training"),
            _name("thread_name", _TRAINING, _DATA, "data"),
            _name("thread_name", _TRAINING, _STEPS, "steps"),
            _order("process_sort_index", _WORKERS, 0),
            _order("process_sort_index", _TRAINING, 1),
        ):
            self._file.write(event)

    def begin(self, phase: str, epoch: int) -> None:
        """Begins an epoch of a phase such as "train"."""
        self._forget()
        self._phase = phase

    def batches(self, spans: npt.NDArray[np.float64]) -> None:
        """Writes delivered batches; each row of `spans` is one batch.

        Batches that come outside of `begin` and `end` belong to no step.
        """
        if not len(spans):
            return
        if self._origin_s is None:
            self._settle_origin(float(spans[:, _BEGAN].min()))
        for row in spans.tolist():
            self._write_batch(Span._make(row))
        self._match()

    def step(self, step: Step) -> None:
        """Writes a step that has ended."""
        if self._origin_s is not None:
            self._write_step(step)
            self._match()
            return
        self._early.append(step)
        if len(self._early) >= _EARLY_STEPS:
            self._settle_origin()

    def end(self) -> None:
        """Ends an epoch, and draws the epoch's remaining arrows."""
        self._settle_origin()
        self._match(ended=True)
        self._forget()
        self._phase = ""
        self._file.flush()

    def close(
        self,
        pids: dict[int, int],
        dataset: str,
        losses: Iterable[WorkerLoss] = (),
    ) -> None:
        """Completes and renames the trace file. Idempotent.

        Args:
            pids: Process ids of workers by index; empty for threads and
                inline.
            dataset: Class name of the training dataset.
            losses: The losses of workers.
        """
        if not self._finalizer.alive:
            return
        self._settle_origin()
        for loss in losses:
            self._write_loss(loss)
        events = [
            _name("process_name", _WORKERS, 0, f"workers of {dataset}"),
            *(self._name_of(thread, pids) for thread in sorted(self._threads)),
        ]
        self._finalizer.detach()
        self._file.finish(events)

    # -- times ---------------------------------------------------------------

    def _settle_origin(self, began_s: float = float("inf")) -> None:
        """Sets time 0 of the trace, and writes the steps that were held back.

        It is the earliest build or step. The model is built from batches that
        were made before its first step.
        """
        if self._origin_s is not None:
            return
        early, self._early = self._early, []
        earliest_s = min([began_s, *(step.began_s for step in early)])
        if earliest_s == float("inf"):
            return
        self._origin_s = earliest_s
        for step in early:
            self._write_step(step)

    def _us(self, moment_s: float) -> float:
        assert self._origin_s is not None
        return round(max(0.0, moment_s - self._origin_s) * 1e6, 3)

    # -- events --------------------------------------------------------------

    def _write_batch(self, span: Span) -> None:
        began_us, built_us = self._us(span.began_s), self._us(span.built_s)
        delivered_us = self._us(span.delivered_s)
        thread = int(span.worker)
        if self._phase == "validation":
            thread += _VALIDATION
        self._threads.add(thread)
        batch = {"batch": int(span.batch), "epoch": int(span.epoch)}
        arguments: dict[str, float] = {
            **batch,
            "bytes": int(span.nbytes),
            "queue_depth": int(span.depth),
            "retries": int(span.retries),
        }
        if not math.isnan(span.cpu_s):  # it is not read for every build
            arguments["cpu_ms"] = _ms(span.cpu_s)
            arguments["core_delay_ms"] = _ms(span.delay_s)
        self._file.write(
            _slice("build", _WORKERS, thread, began_us, built_us, arguments)
        )
        if span.stored_s > span.built_s:
            stored_us = self._us(span.stored_s)
            self._file.write(
                _slice("store", _WORKERS, thread, built_us, stored_us, batch)
            )
        asked_us = self._us(span.delivered_s - span.waited_s)
        arguments = {
            **batch,
            "queue_depth": int(span.depth),
            "waited_ms": _ms(span.waited_s),
            "opened_ms": _ms(span.opened_s),
        }
        self._file.write(
            _slice(
                "deliver", _TRAINING, _DATA, asked_us, delivered_us, arguments
            )
        )
        if self._phase:
            # A moment within the slice: Perfetto binds the arrow to it.
            start_us = max(began_us, built_us - _LEAST_US)
            self._built.append(_BuildSlice(thread, start_us, delivered_us))
            if len(self._built) > _ARROWS:
                self._built.popleft()
                self._first += 1

    def _write_step(self, step: Step) -> None:
        began_us, ended_us = self._us(step.began_s), self._us(step.ended_s)
        arguments = {
            "step": step.number,
            "epoch": step.epoch,
            "phase": step.phase,
            "sampled": step.sampled,
            "waited_ms": _ms(step.waited_s),
        }
        self._file.write(
            _slice("step", _TRAINING, _STEPS, began_us, ended_us, arguments)
        )
        self._took.append(_Took(step.number, began_us, ended_us))
        if len(self._took) > _ARROWS:
            self._took.popleft()

    def _write_loss(self, loss: WorkerLoss) -> None:
        self._threads.add(loss.worker)
        if self._origin_s is None:
            self._origin_s = loss.at_s
        self._file.write(
            _event(
                "i",
                "worker lost",
                _WORKERS,
                loss.worker,
                s="t",
                ts=self._us(loss.at_s),
                args={"pid": loss.pid},
            )
        )

    def _name_of(self, thread: int, pids: dict[int, int]) -> str:
        name = f"worker {thread % _VALIDATION}"
        if thread >= _VALIDATION:
            name = f"validation {name}"
        elif thread in pids:
            name += f" (pid {pids[thread]})"
        return _name("thread_name", _WORKERS, thread, name)

    # -- arrows --------------------------------------------------------------

    def _forget(self) -> None:
        self._built: collections.deque[_BuildSlice] = collections.deque()
        self._took: collections.deque[_Took] = collections.deque()
        self._first = 0  # number of `_built[0]` among the delivered batches

    def _match(self, ended: bool = False) -> None:
        """Draws an arrow from each batch to its step, if the step is known.

        A batch's step is known once the next step, or the end, has come.
        """
        while self._took and self._built:
            took = self._took[0]
            after = self._took[1].number if len(self._took) > 1 else None
            if after is not None and self._first >= after:
                self._took.popleft()
            elif after is None and not ended:
                return
            else:
                built = self._built.popleft()
                if self._first >= took.number:
                    self._draw(built, took)
                self._first += 1

    def _draw(self, built: _BuildSlice, took: _Took) -> None:
        # Within the step: at its very beginning, the step before ends.
        latest_us = max(took.began_us, took.ended_us - _LEAST_US)
        used_us = max(built.delivered_us, took.began_us + _LEAST_US)
        used_us = min(used_us, latest_us)
        if used_us < built.built_us:
            return  # this step ended before the build
        self._arrows += 1
        flow = {"cat": "flow", "id": self._arrows}
        build_us = round(built.built_us, 3)
        self._file.write(
            _event("s", "batch", _WORKERS, built.thread, ts=build_us, **flow)
        )
        step_us = round(used_us, 3)
        self._file.write(
            _event("f", "batch", _TRAINING, _STEPS, ts=step_us, bp="e", **flow)
        )


class _TraceFile:
    """The trace file, with one event per line.

    It is not buffered by Python: a forked child would write the buffer again.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._pid = os.getpid()
        self._lines: list[str] = []
        self._waiting = 0  # bytes of `_lines`
        self._fd = -1
        try:
            self._temporary = _atomic_write.name_beside(path)
            self._fd = os.open(
                self._temporary,
                os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC,
                0o666,
            )
        except OSError as error:
            _log.warning("The trace cannot be written: %s.", error)
        self._separator = '{"displayTimeUnit":"ms","traceEvents":[\n'

    def write(self, event: str) -> None:
        if self._fd < 0:
            return
        self._lines.append(self._separator + event)
        self._separator = ",\n"
        self._waiting += len(event)
        if self._waiting >= _BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        self._waiting = 0
        if self._fd < 0 or not lines:
            return
        try:
            _write_all(self._fd, "".join(lines).encode())
        except OSError as error:
            self._give_up(error)

    def finish(self, events: list[str]) -> None:
        """Writes the last events, and renames the file to its final path."""
        if self._pid != os.getpid():
            return  # a forked child; the parent writes the trace
        for event in events:
            self.write(event)
        self.flush()
        if self._fd < 0:
            return
        try:
            _write_all(self._fd, b"\n]}\n")
            os.replace(self._temporary, self._path)
        except OSError as error:
            self._give_up(error)
        else:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _give_up(self, error: OSError) -> None:
        """Closes the file; removes it if nothing was written."""
        fd, self._fd = self._fd, -1
        is_empty = not os.fstat(fd).st_size
        os.close(fd)
        if is_empty:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)
            _log.warning("The trace cannot be written: %s.", error)
            return
        _log.warning(
            "The trace %s ends here: %s. Its first part is in %s; "
            "append ']}' to read it.",
            self._path,
            error,
            self._temporary,
        )


def _write_all(fd: int, text: bytes) -> None:
    view = memoryview(text)
    while view:
        view = view[os.write(fd, view) :]


_BEGAN = Span._fields.index("began_s")
_encode = json.JSONEncoder(separators=(",", ":")).encode


def _event(
    phase: str, name: str, process: int, thread: int, **more: Any
) -> str:
    """Returns a trace event as JSON."""
    return _encode(
        {"ph": phase, "name": name, "pid": process, "tid": thread, **more}
    )


def _slice(
    name: str,
    process: int,
    thread: int,
    began_us: float,
    ended_us: float,
    arguments: dict[str, Any],
) -> str:
    """Returns a trace event with a duration, as JSON."""
    took_us = round(max(0.0, ended_us - began_us), 3)
    return _event(
        "X", name, process, thread, ts=began_us, dur=took_us, args=arguments
    )


def _name(kind: str, process: int, thread: int, name: str) -> str:
    return _event("M", kind, process, thread, args={"name": name})


def _order(kind: str, process: int, place: int) -> str:
    return _event("M", kind, process, 0, args={"sort_index": place})


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
