"""Compares the measured values of a run with an earlier run's values.

A page of `LoaderHealth` contains its main figures as JSON, in an element that
no browser shows. So a later run can be compared with the page alone.
"""

from __future__ import annotations

import dataclasses
import html
import json
import math
import os
import re
from typing import Any

from keras_fastdata.metrics import formatting

_NAME = "loader-health"  # of the element
_ELEMENT = re.compile(rf'<meta name="{_NAME}" content="([^"]*)">'.encode())
_VERSION = 1
_LITTLE = 1.05  # times: what differs by less is not called a change


@dataclasses.dataclass(frozen=True)
class Figures:
    """The main measured values of one `fit`, `evaluate` or `predict`.

    A figure that is unknown is NaN.

    Attributes:
        dataset: The class name of the dataset.
        began: The date and time of the beginning, as text.
        workers: The kind and number of workers, such as "2 processes".
        verdict: The kind of the verdict.
        epoch_s: Seconds of the steps and waits of an epoch: the median of the
            later half of all epochs.
        data_wait: The share of these that is waiting for data.
        batches_per_s: Batches per second of these epochs.
        build_s: Median time to build a batch.
        first_batch_s: Seconds until the first batch had come.
        total_s: Seconds of the whole `fit`.
    """

    dataset: str = ""
    began: str = ""
    workers: str = ""
    verdict: str = ""
    epoch_s: float = math.nan
    data_wait: float = math.nan
    batches_per_s: float = math.nan
    build_s: float = math.nan
    first_batch_s: float = math.nan
    total_s: float = math.nan

    def to_json(self) -> str:
        """Returns the known values as JSON; leaves out unknown values."""
        found = dataclasses.asdict(self)
        known = {k: v for k, v in found.items() if v == v}
        return json.dumps({"version": _VERSION, **known})

    @classmethod
    def from_json(cls, text: str) -> Figures:
        """Parses the JSON text that `to_json` returned.

        Raises:
            ValueError: The text is something else.
        """
        found = json.loads(text)
        if not isinstance(found, dict) or found.pop("version", 0) != _VERSION:
            raise ValueError("no figures of a known version")
        kinds = {
            field.name: str if field.type == "str" else (int, float)
            for field in dataclasses.fields(cls)
        }
        for name, value in found.items():
            if name not in kinds or not isinstance(value, kinds[name]):
                raise ValueError(f"an unknown figure: {name}")
        return cls(**found)

    @property
    def name(self) -> str:
        """The dataset's class name and the date of the run, as one text."""
        return f"{self.dataset}, {self.began}".strip(", ")


def read(path: str | os.PathLike[str]) -> Figures:
    """Reads the measured values from an HTML report of `LoaderHealth`.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is no such page.
    """
    with open(path, "rb") as file:
        found = _ELEMENT.search(file.read())
    problem = (
        f"`compare` must be a page that `LoaderHealth(report=...)` wrote. "
        f"{os.fspath(path)!r} is none, or one of another version."
    )
    if found is None:
        raise ValueError(problem)
    try:
        return Figures.from_json(html.unescape(found[1].decode()))
    except ValueError as error:
        raise ValueError(problem) from error


def rows(before: Figures, now: Figures) -> list[tuple[str, str, str, str]]:
    """Returns the name, old value, new value and change of each quantity.

    Figures that one of the runs lacks are left out.
    """
    found: list[tuple[str, str, str, str]] = []
    for name, attribute, show, is_rate in _ROWS:
        old, new = getattr(before, attribute), getattr(now, attribute)
        if isinstance(old, str):
            if old and new:
                found.append((name, old, new, ""))
        elif old == old and new == new:
            change = _change(old, new, is_rate)
            found.append((name, show(old), show(new), change))
    return found


def _change(old: float, new: float, is_rate: bool | None) -> str:
    """Describes a change, such as "2.1 times faster" or "the same".

    Empty for values that are neither rates nor durations, and for values of 0.
    """
    if is_rate is None or min(old, new) <= 0:
        return ""
    times = new / old if is_rate else old / new
    if 1 / _LITTLE < times < _LITTLE:
        return "the same"
    what = "faster" if times > 1 else "slower"
    times = max(times, 1 / times)
    digits = 2 if times < 2 else 1
    return f"{times:.{digits}f} times {what}"


def _rate(number: float) -> str:
    return f"{number:,.1f}"


_ROWS: tuple[tuple[str, str, Any, bool | None], ...] = (
    ("workers", "workers", None, None),
    ("verdict", "verdict", None, None),
    ("a later epoch, median", "epoch_s", formatting.duration, False),
    ("data_wait, later epochs", "data_wait", formatting.share, None),
    ("batches/s, later epochs", "batches_per_s", _rate, True),
    ("build, median", "build_s", formatting.duration, False),
    ("first batch", "first_batch_s", formatting.duration, False),
    ("the whole fit", "total_s", formatting.duration, False),
)


def text(before: Figures, now: Figures) -> str:
    """Returns the comparison of two runs as a plain-text table."""
    cells = [("", "before", "now", ""), *rows(before, now)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        f"{name:{widths[0]}}  {old:>{widths[1]}}  {new:>{widths[2]}}"
        f"  {change}".rstrip()
        for name, old, new, change in cells
    ]
    return "\n".join([f"Compared with {before.name}:", *lines])
