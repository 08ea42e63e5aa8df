"""Defines the kinds of workers and their properties."""

from __future__ import annotations

import enum
from typing import NamedTuple


class WorkerKind(enum.StrEnum):
    """A kind of worker; a member equals its name, such as "thread"."""

    noun: str  # one worker in words; empty for the caller itself
    builds_ahead: bool  # whether batches are built before they are asked for
    # Whether workers are processes, each with a copy of the dataset.
    has_copies: bool
    lends_read_only: bool  # whether batches are views of read-only memory

    def __new__(
        cls, name: str, noun: str, ahead: bool, copies: bool, read_only: bool
    ) -> WorkerKind:
        kind = str.__new__(cls, name)
        kind._value_, kind.noun = name, noun
        kind.builds_ahead, kind.has_copies = ahead, copies
        kind.lends_read_only = read_only
        return kind

    INLINE = "inline", "", False, False, False
    THREAD = "thread", "thread", True, False, False
    PROCESS = "process", "process", True, True, False
    RAY = "ray", "Ray actor", True, True, True

    @classmethod
    def local(cls, workers: int, are_processes: bool) -> WorkerKind:
        """Returns the kind of local workers: `INLINE` if there are none."""
        if not workers:
            return cls.INLINE
        return cls.PROCESS if are_processes else cls.THREAD


class WorkerLimit(NamedTuple):
    """The workers that a dataset can use.

    Attributes:
        most: The most workers; `None` for any number.
        are_processes: Whether they can be processes.
        how_more: What to change so that it can use more, as a sentence.
    """

    most: int | None = None
    are_processes: bool = True
    how_more: str = ""


NO_LIMIT = WorkerLimit()
