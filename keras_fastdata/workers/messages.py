"""Defines the messages between the training process and its workers.

How they travel is the pools' matter: by sockets, pipes, or actors' results.

    trainer --TaskMessage--> a worker
    trainer <--ResultMessage, log record-- every worker
    trainer --version of the dataset's state--> a worker
"""

from __future__ import annotations

import dataclasses
import enum
import struct
from typing import NamedTuple

from keras_fastdata.metrics.timing import Timing

# One datagram holds at most about 200 KB; what is larger lies in the slot.
MAX_INLINE_BYTES = 32 * 1024
MAX_DATAGRAM_BYTES = 160 * 1024
RECEIVE_BYTES = 192 * 1024
NOBODY = 0xFFFF  # in place of a worker's index, before it knows its own


class MessageKind(enum.IntEnum):
    """The kind of a message from a worker."""

    BATCH = 1  # the request's batch lies in its slot
    FAILURE = 2  # building it raised
    STALE = 3  # the request was for a state of the dataset that has passed
    READY = 4  # the dataset is loaded and `on_worker_start` has run
    START_FAILED = 5  # it could not be loaded, or `on_worker_start` raised
    LOG = 6  # a log record
    WARNING = 7  # a warning
    MEMORY = 8  # new memory for the slot of a task; see `portable`


_KINDS = {int(kind): kind for kind in MessageKind}

# Facts about a message, added up. (Not an `enum.IntFlag`, whose arithmetic
# takes longer than all else that is done with a message.)
RETAINED = 1  # the dataset holds on to memory of the slot
SPILLED = 2  # the body lies in the slot, behind the batch's arrays
_TIMED = 4  # the message has a `Timing`


# A version of the dataset's state, and where the state begins in its file.
VERSION = struct.Struct("<QQ")
TASK = struct.Struct("<QQqIId")  # the fields of a `TaskMessage`
NO_INTERVAL_S = -1.0  # in place of `None`
_RESULT = struct.Struct("<BBHQQQQQ")
_TIMING = struct.Struct("<5dI")
_MOST_STACK_BYTES = 16 * 1024  # of the text in one message


@dataclasses.dataclass(slots=True)
class TaskMessage:
    """The message that asks a worker to build one batch."""

    task_id: int  # the number of this sending; see `in_flight.Task`
    epoch: int
    index: int
    version: int  # the version of the dataset's state to build it from
    slot: int  # the slot to build it in
    # How often results are to come with a `Timing`; see
    # `metrics.timing.Stopwatch.start`.
    interval_s: float | None

    @staticmethod
    def unpack(datagram: bytes) -> TaskMessage:
        task = TaskMessage(*TASK.unpack(datagram))
        if task.interval_s == NO_INTERVAL_S:
            task.interval_s = None
        return task


class ResultMessage(NamedTuple):
    """A message from a worker about one task or about the worker."""

    kind: MessageKind  # what it tells
    worker: int
    # The task that it answers; 0 if it is about no task. Of `START_FAILED`, how
    # many messages are to follow.
    task_id: int = 0
    flags: int = 0  # `RETAINED`, `SPILLED`, both added up, or 0
    used: int = 0  # bytes of the slot that the batch's arrays take
    build_ns: int = 0  # how long building and encoding the batch took
    extents: bytes = b""  # where those arrays lie, packed; empty if spilled
    # A batch's structure, a failure, a record; empty if spilled.
    body: bytes = b""
    extents_nbytes: int = 0  # size of `extents`, wherever they are
    body_nbytes: int = 0  # size of `body`, wherever it is
    timing: Timing | None = None  # how it was built, if the task asks for it

    def pack(self) -> bytes:
        flags, timing = self.flags, b""
        if self.timing is not None:
            flags |= _TIMED
            timing = _pack_timing(self.timing)
        head = _RESULT.pack(
            self.kind,
            flags,
            self.worker,
            self.task_id,
            self.used,
            self.build_ns,
            self.extents_nbytes or len(self.extents),
            self.body_nbytes or len(self.body),
        )
        return head + timing + self.extents + self.body

    @staticmethod
    def unpack(datagram: bytes) -> ResultMessage:
        kind, flags, worker, task_id, used, build_ns, extents, body = (
            _RESULT.unpack_from(datagram)
        )
        start, timing = _RESULT.size, None
        if flags & _TIMED:
            *times, size = _TIMING.unpack_from(datagram, start)
            start += _TIMING.size + size
            stacks = datagram[start - size : start].decode(errors="replace")
            timing = Timing(*times)._replace(stacks=tuple(stacks.splitlines()))
        split = start + extents
        return ResultMessage(
            _KINDS[kind],
            worker,
            task_id,
            flags & ~_TIMED,
            used,
            build_ns,
            datagram[start:split],
            datagram[split : split + body],
            extents,
            body,
            timing,
        )


def _pack_timing(timing: Timing) -> bytes:
    """Serializes a `Timing`, without call stacks beyond the size limit."""
    text = b""
    for stack in timing.stacks:
        line = stack.encode(errors="replace").replace(b"\n", b" ") + b"\n"
        if len(text) + len(line) <= _MOST_STACK_BYTES:
            text += line
    return _TIMING.pack(*timing[:5], len(text)) + text
