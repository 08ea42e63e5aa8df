"""A trace of every batch and step, for Perfetto and chrome://tracing.

    workers of Images   worker 0   | build | store |      | build | ...
                        worker 1        | build | store |
    training            data                     | deliver | deliver | ...
                        steps      | step                  | step

An arrow goes from each build to the step that used its batch. The file is of
Chrome's trace event format ("JSON Object Format"), in microseconds.

Events are written as they come, one to a line, into a temporary file beside
the path, which takes the path's place at `close`. What is kept are the lines
not written yet, and the batches and steps whose arrow is not drawn yet; both
are bounded. Where `close` never comes, the trace is finished when the writer
is collected or the interpreter ends. Of a process that was killed the
temporary file stays, with all epochs that had ended: appended `]}` makes it a
trace.
"""

from __future__ import annotations

import collections
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

_WORKERS = 1  # process ids in the trace, not those of the system
_TRAINING = 2
_DATA = 0  # threads of the latter
_STEPS = 1
# A validation's workers may be those of another dataset.
_VALIDATION = 1 << 16
_BUFFER_BYTES = 1 << 18
_EARLY_STEPS = 4096  # held until a batch says when all began
_ARROWS = 1 << 15  # batches, and steps, that wait for their counterpart
_LEAST_US = 1e-3  # a nanosecond: what Perfetto resolves

_log = logging.getLogger("keras_fastdata")


class _BuildSlice(NamedTuple):
    """A batch that waits for its step; times in microseconds."""

    thread: int
    built_us: float
    delivered_us: float


class _Took(NamedTuple):
    """A step that waits for its batches."""

    number: int
    began_us: float
    ended_us: float


class TraceWriter:
    """Writes what a `health.epoch_monitor.EpochMonitor` tells; a `Sink`.

    The k-th batch that was delivered between `begin` and `end` was used by
    the step of the greatest `number` that is not above k. A batch is without
    an arrow where there is no such step, or more than 32,768 batches or steps
    lie between the two being told.

    A disk that is full, or gone, ends the trace and not the training: that is
    logged once.

    Args:
        path: Where the trace will be; what is there is replaced at `close`.
            If no file can be made in its folder, a warning is logged.
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
        """An epoch of a phase begins."""
        self._forget()
        self._phase = phase

    def batches(self, spans: npt.NDArray[np.float64]) -> None:
        """Batches were delivered: `(n, len(Span._fields))`.

        Those that come outside of `begin` and `end` are without a step.
        """
        if not len(spans):
            return
        if self._origin_s is None:
            self._settle_origin(float(spans[:, _BEGAN].min()))
        for row in spans.tolist():
            self._write_batch(Span._make(row))
        self._match()

    def step(self, step: Step) -> None:
        """A step has ended."""
        if self._origin_s is not None:
            self._write_step(step)
            self._match()
            return
        self._early.append(step)
        if len(self._early) >= _EARLY_STEPS:
            self._settle_origin()

    def end(self) -> None:
        """The epoch has ended; all its batches and steps were told."""
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
        """Completes the trace and puts it where it belongs. Idempotent.

        Args:
            pids: Worker processes by index; empty for threads and inline.
            dataset: Class name of the dataset that trains.
            losses: Workers that were lost.
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
        """Decides when the trace begins, and writes what waited for that.

        A model is built from batches that were made before its first step.
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
        if not math.isnan(span.cpu_s):  # which a short build may come without
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
            # A moment within the slice, so that the arrow is bound to it.
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
        self._first = 0  # the place of `_built[0]` among those delivered

    def _match(self, ended: bool = False) -> None:
        """Draws the arrows of all batches whose step is known.

        That needs the number of the step after it, or the end.
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
        # Within the step: where it begins, the one before ends.
        latest_us = max(took.began_us, took.ended_us - _LEAST_US)
        used_us = max(built.delivered_us, took.began_us + _LEAST_US)
        used_us = min(used_us, latest_us)
        if used_us < built.built_us:
            return  # it cannot have been this step
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
    """The file the events go to, one to a line.

    Not buffered by Python: a forked child would write the buffer too.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._pid = os.getpid()
        self._lines: list[str] = []
        self._waiting = 0  # bytes of them
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
        """Writes the last events and puts the file in its place."""
        if self._pid != os.getpid():
            return  # a forked child: the trace is its parent's
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
        _log.warning(
            "The trace %s ends here: %s. What there is of it is in %s; "
            "append ']}' to read it.",
            self._path,
            error,
            self._temporary,
        )
        fd, self._fd = self._fd, -1
        os.close(fd)


def _write_all(fd: int, text: bytes) -> None:
    view = memoryview(text)
    while view:
        view = view[os.write(fd, view) :]


_BEGAN = Span._fields.index("began_s")
_encode = json.JSONEncoder(separators=(",", ":")).encode


def _event(
    phase: str, name: str, process: int, thread: int, **more: Any
) -> str:
    """One event of the trace, as JSON."""
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
    """An event with a duration."""
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
