"""Converts a record into shapes for the SVG charts of the report.

Coordinates begin at the top left. The plane is `WIDTH` wide and as high as the
figure; the page stretches it to its own width.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from keras_fastdata.health.record import Record
from keras_fastdata.health.report import axes, windows
from keras_fastdata.metrics import formatting

WIDTH = 1000
HEIGHT = 100  # of charts; the height of a timeline depends on its rows
_BINS = 240  # over the whole run, at most
_LEAST_BINS = 30
_LEAST_WIDTH = 0.8  # of a visible shape
_QUANTILES = {"median": "median", "p95": "95% are within"}
_GAP = 1.0  # between batches
_LEAST_OPACITY = 0.35
_SEEN = 0.005  # of the time; less is not drawn
_ROW_KEYS = {
    "compute": "training computes",
    "compile": "training compiles",
    "wait": "training waits for data",
    "slowed": "slowed down by builds, counted as waiting",
    "build": "a batch is built",
    "copy": "and copied to shared memory",
    "idle": "idle",
    "lost": "lost, until replaced",
}
_VERBS = {
    "wait": "waits for data",
    "slowed": "is slowed down by builds",
    "compile": "compiles",
    "compute": "computes",
}


class Box(NamedTuple):
    """A rectangle in a chart.

    Attributes:
        what: The class in the style sheet.
        x: The left side.
        y: The upper side.
        width: The width.
        height: The height.
        opacity: From 0 to 1.
        title: The text that the page shows for it.
    """

    what: str
    x: float
    y: float
    width: float
    height: float
    opacity: float
    title: str


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart with its shapes, axes, title and legend.

    Attributes:
        name: The title.
        note: Its main numbers, as text; may be empty.
        height: The height of its plane.
        boxes: Its rectangles.
        lines: Curves: class, and points in SVG's format.
        x_marks: Marks along the width.
        y_marks: Marks along the height.
        rows: Rows of a timeline: name, description, height.
        uprights: Vertical lines: class, and position from 0 to 1.
        keys: The legend: class and meaning.
        waiting: The share of a timeline in which training waits.
    """

    name: str
    note: str
    height: float
    boxes: tuple[Box, ...]
    x_marks: tuple[axes.Mark, ...]
    y_marks: tuple[axes.Mark, ...] = ()
    lines: tuple[tuple[str, str], ...] = ()
    rows: tuple[tuple[str, str, int], ...] = ()
    uprights: tuple[tuple[str, float], ...] = ()
    keys: tuple[tuple[str, str], ...] = ()
    waiting: float = 0.0


def timelines(record: Record) -> list[Chart]:
    """Returns one timeline chart for each time window of the record."""
    return [_timeline(record, window) for window in windows.windows(record)]


def histogram(name: str, seconds: npt.NDArray[np.float64]) -> Chart | None:
    """Returns a histogram chart of durations, or `None` for an empty array."""
    figure = axes.histogram(seconds)
    if figure is None:
        return None
    most = int(figure.counts.max())
    width = WIDTH / len(figure.counts)
    median, p95 = figure.quantiles
    boxes = []
    for place, count in enumerate(figure.counts):
        height = _rounded(HEIGHT * count / most)
        low, high = figure.edges[place : place + 2]
        title = (
            f"{formatting.count(int(count), 'batch')}: "
            f"{formatting.duration(low)} to {formatting.duration(high)}"
        )
        boxes.append(
            Box(
                "bin",
                _rounded(place * width),
                _rounded(HEIGHT - height),
                _rounded(0.92 * width),
                height,
                1.0,
                title,
            )
        )
    note = (
        f"median {formatting.duration(median)}, 95% within "
        f"{formatting.duration(p95)}"
    )
    if figure.at_once:
        least = formatting.duration(axes.LEAST_S)
        note += f"; {figure.at_once:,} under {least} are not drawn"
    return Chart(
        name,
        note,
        HEIGHT,
        tuple(box for box in boxes if box.height),
        tuple(axes.duration_marks(figure)),
        tuple(axes.count_marks(most)),
        uprights=tuple((name, figure.place(at)) for name, at in figure.lines),
        keys=(
            ("bin", "batches"),
            *((name, _QUANTILES[name]) for name, _ in figure.lines),
        ),
    )


def over_time(record: Record) -> list[Chart]:
    """Returns charts of epochs, waits and queue depth over the whole run."""
    moments = [m for step in record.steps for m in (step.began_s, step.ended_s)]
    asked = windows.asked_s(record)
    if len(asked):
        moments += [float(asked.min()), float(asked.max())]
    if not moments or max(moments) <= min(moments):
        return []
    view = _View(record.began_s, min(moments), max(moments))
    charts = []
    if record.steps:
        charts += [_epochs(record, view), _waiting(record, view)]
    if len(asked) and windows.has_queue(record):
        charts.append(_queue(record, view, asked))
    return charts


class _View(NamedTuple):
    """The time interval that a chart shows."""

    origin_s: float
    begin_s: float
    end_s: float

    def x(self, moment_s: float) -> float:
        share = (moment_s - self.begin_s) / (self.end_s - self.begin_s)
        return _rounded(WIDTH * min(1.0, max(0.0, share)))

    def marks(self) -> tuple[axes.Mark, ...]:
        return tuple(axes.time_marks(self.begin_s, self.end_s, self.origin_s))

    def between(self, begin_s: float, end_s: float) -> str:
        return (
            f"{formatting.duration(max(0.0, begin_s - self.origin_s))} to "
            f"{formatting.duration(max(0.0, end_s - self.origin_s))}"
        )


def _timeline(record: Record, window: windows.Window) -> Chart:
    view = _View(record.began_s, window.begin_s, window.end_s)
    pixel_s = (view.end_s - view.begin_s) / WIDTH
    rows = windows.rows(record, window, pixel_s)
    heights = _heights(len(rows))
    boxes = []
    for row, height, top in zip(
        rows, heights, itertools.accumulate(heights, initial=0), strict=False
    ):
        pad = 1 + height // 15
        for bar in row.bars:
            x = view.x(bar.begin_s)
            width = _rounded(view.x(bar.end_s) - x)
            if bar.what == "build":
                width -= min(_GAP, width / 4)  # separates it from the next
            boxes.append(
                Box(
                    bar.what,
                    x,
                    top + pad,
                    max(_LEAST_WIDTH, _rounded(width)),
                    height - 2 * pad,
                    round(max(bar.share, _LEAST_OPACITY), 2),
                    f"{bar.title} ({view.between(bar.begin_s, bar.end_s)})",
                )
            )
    return Chart(
        window.name,
        f"{formatting.duration(view.end_s - view.begin_s)} of "
        f"{formatting.duration(record.ended_s - record.began_s)}",
        sum(heights),
        tuple(boxes),
        view.marks(),
        rows=tuple(
            (row.name, row.title, height)
            for row, height in zip(rows, heights, strict=True)
        ),
        keys=tuple(
            (what, label)
            for what, label in _ROW_KEYS.items()
            if what == "idle" or any(box.what == what for box in boxes)
        ),
        waiting=sum(
            bar.share * (bar.end_s - bar.begin_s)
            for bar in rows[0].bars
            if bar.what in ("wait", "slowed")
        )
        / (view.end_s - view.begin_s),
    )


def _heights(rows: int) -> list[int]:
    """Returns the height of the training row and of each worker's row."""
    height = 22 if rows <= 9 else 15 if rows <= 18 else 11
    return [22, *[height] * (rows - 1)]


def _epochs(record: Record, view: _View) -> Chart:
    boxes = []
    for number, (name, begin_s, end_s) in enumerate(windows.epochs(record)):
        x = view.x(begin_s)
        kind = "validation" if name.startswith("validation") else "epoch"
        boxes.append(
            Box(
                f"{kind} odd" if number % 2 else kind,
                x,
                0.0,
                max(_LEAST_WIDTH, _rounded(view.x(end_s) - x)),
                10.0,
                1.0,
                f"{name} ({view.between(begin_s, end_s)})",
            )
        )
    keys = [("epoch", "epoch"), ("validation", "validation")]
    if not any(step.phase == "validation" for step in record.steps):
        del keys[1:]
    return Chart("Epochs", "", 10, tuple(boxes), (), keys=tuple(keys))


def _waiting(record: Record, view: _View) -> Chart:
    """Charts the shares of waiting, computing and compiling in the steps."""
    bins = min(_BINS, max(_LEAST_BINS, len(record.steps)))
    edges = np.linspace(view.begin_s, view.end_s, bins + 1)
    began = np.array([step.began_s for step in record.steps])
    ended = np.array([step.ended_s for step in record.steps])
    ended -= np.array([step.excluded_s for step in record.steps])
    waited, slowed = windows.waits(record)
    turned = np.minimum(began + waited, ended)
    slower = np.maximum(ended - slowed, turned)
    bin_s = edges[1] - edges[0]
    is_compiling = np.array([step.compiled for step in record.steps])
    computed = np.where(is_compiling, turned, slower)
    shares = {
        "wait": _covered(edges, began, turned) / bin_s,
        "slowed": _covered(edges, slower, ended) / bin_s,
        "compile": _covered(edges, computed, slower) / bin_s,
        "compute": _covered(edges, turned, computed) / bin_s,
    }
    boxes = []
    for place in range(bins):
        top = float(HEIGHT)
        when = view.between(edges[place], edges[place + 1])
        for what, found in shares.items():
            share = float(found[place])
            if share < _SEEN:
                continue
            height = min(top, _rounded(HEIGHT * share))
            top = _rounded(top - height)
            boxes.append(
                Box(
                    what,
                    _rounded(WIDTH * place / bins),
                    top,
                    _rounded(WIDTH / bins),
                    height,
                    1.0,
                    f"{_VERBS[what]} {formatting.share(share)} of the time "
                    f"({when})",
                )
            )
    return Chart(
        "Training",
        "shares of the time, counted as in the table of epochs",
        HEIGHT,
        tuple(boxes),
        view.marks(),
        tuple(axes.Mark(s, formatting.share(s)) for s in (0.0, 0.5, 1.0)),
        keys=tuple(
            (what, verb)
            for what, verb in _VERBS.items()
            if any(box.what == what for box in boxes)
        ),
    )


def _covered(
    edges: npt.NDArray[np.float64],
    begin: npt.NDArray[np.float64],
    end: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """Returns how many seconds of each bin the intervals cover.

    The intervals are in order and do not overlap.
    """
    moments = np.stack([begin, end], 1).ravel()
    so_far = np.repeat(np.cumsum(end - begin), 2)
    so_far[::2] -= end - begin
    covered: npt.NDArray[np.float64] = np.diff(
        np.interp(edges, np.maximum.accumulate(moments), so_far)
    )
    return np.maximum(covered, 0.0)


def _queue(
    record: Record, view: _View, asked: npt.NDArray[np.float64]
) -> Chart:
    depth = record.column("depth")
    found = axes.series(asked, depth, _BINS)
    assert found is not None
    most = max(1.0, float(depth.max()))
    scale = HEIGHT / (1.08 * most)

    def y(batches: float) -> float:
        return _rounded(HEIGHT - scale * batches)

    boxes = []
    for begin_s, end_s, mean, low, high in zip(*found, strict=True):
        x = view.x(begin_s)
        boxes.append(
            Box(
                "range",
                x,
                y(high),
                max(_LEAST_WIDTH, _rounded(view.x(end_s) - x)),
                max(1.0, _rounded(y(low) - y(high))),
                1.0,
                f"{mean:.1f} batches ready, from {low:.0f} to {high:.0f} "
                f"({view.between(begin_s, end_s)})",
            )
        )
    curves = [
        " ".join(
            f"{view.x(moment_s)},{y(mean)}"
            for begin_s, end_s, mean in zip(
                part.begin_s, part.end_s, part.mean, strict=True
            )
            for moment_s in (begin_s, end_s)
        )
        for part in found.parts()
    ]
    size = record.settings.get("max_queue_size")
    note = "batches that were ready when one was asked for"
    if size:
        note += f"; at most {size:,} may wait"
    return Chart(
        "Queue depth",
        note,
        HEIGHT,
        tuple(boxes),
        view.marks(),
        tuple(
            mark._replace(place=mark.place / 1.08)
            for mark in axes.count_marks(most)
        ),
        lines=tuple(("mean", curve) for curve in curves),
        keys=(("mean", "mean"), ("range", "least to most")),
    )


def _rounded(number: float) -> float:
    return round(float(number), 2)
