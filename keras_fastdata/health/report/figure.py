"""Draws a record as a Matplotlib figure, without using `pyplot`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from keras_fastdata.display.figure import new_figure, plain
from keras_fastdata.health.record import Record
from keras_fastdata.health.report import axes, windows
from keras_fastdata.health.summary import HealthSummary
from keras_fastdata.metrics import formatting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The palette of Okabe and Ito, which colour-blind people can distinguish.
_COLORS = {
    "compute": "#009e73",
    "compile": "#cc79a7",
    "wait": "#e69f00",
    "slowed": "#f0e442",
    "build": "#0072b2",
    "copy": "#56b4e9",
    "lost": "#cc3311",
}
_LABELS = {
    "compute": "training computes",
    "compile": "compiles",
    "wait": "waits for data",
    "slowed": "slowed by builds",
    "build": "worker builds",
    "copy": "copies",
    "lost": "lost",
}
_WIDTH_IN = 11.0
_PIXELS = 900  # of the timeline's width
_BINS_ALPHA = 0.55  # of histograms: lines stand out from their bars


def plot(record: Record) -> Figure:
    """Draws a record as a Matplotlib figure with four panels.

    Args:
        record: The record.

    Returns:
        A figure of four panels: a timeline of training and each worker, for a
        late part of training in which single batches are visible; histograms
        of the time to build a batch and of the wait for a batch; and the
        number of ready batches over the whole run. `figure.savefig(path)`
        writes it.

    Raises:
        ImportError: Matplotlib is not installed.
    """
    rows = min(len(windows.worker_names(record)), windows.MOST_ROWS) + 1
    above_in = max(1.6, 0.9 + rows * (0.3 if rows <= 9 else 0.16))
    figure = new_figure("Plots", _WIDTH_IN, above_in + 5.0)
    panels = figure.subplot_mosaic(
        [["timeline", "timeline"], ["build", "wait"], ["queue", "queue"]],
        height_ratios=[above_in, 2.4, 1.8],
    )
    figure.suptitle(_title(record))
    _draw_timeline(panels["timeline"], record)
    builds = record.column("built_s") - record.column("began_s")
    _draw_histogram(panels["build"], "time to build a batch", builds)
    waits = record.column("waited_s")
    _draw_histogram(panels["wait"], "wait for a batch", waits)
    _draw_queue(panels["queue"], record)
    return figure


def _title(record: Record) -> str:
    summary: HealthSummary = record.summary
    if summary.verdict is None:
        return "No batch of a FastPyDataset was seen"
    headline = summary.findings[0].headline
    return plain(f"{record.dataset}: {summary.verdict.kind}. {headline}")


def _draw_timeline(panel: Axes, record: Record) -> None:
    from matplotlib.patches import Patch

    parts = windows.windows(record)
    if not parts:
        _say_empty(panel, "timeline")
        return
    part = parts[-1]
    length_s = part.end_s - part.begin_s
    pixel_s = length_s / _PIXELS
    rows = windows.rows(record, part, pixel_s)
    for number, row in enumerate(rows):
        panel.broken_barh(
            [
                (bar.begin_s - record.began_s, _drawn_s(bar, pixel_s))
                for bar in row.bars
            ],
            (number - 0.4, 0.8),
            linewidth=0,
            facecolors=[
                (_COLORS[bar.what], max(0.35, bar.share)) for bar in row.bars
            ],
        )
    panel.set_xlim(part.begin_s - record.began_s, part.end_s - record.began_s)
    panel.set_ylim(len(rows) - 0.4, -0.6)
    every = 1 if len(rows) <= 18 else 4
    shown = [0, *range(1, len(rows), every)]
    panel.set_yticks(shown, [rows[i].name for i in shown])
    panel.tick_params(axis="y", length=0)
    panel.set_xlabel("time since the start (s)")
    panel.set_facecolor("#eef0f3")
    which = "" if len(parts) == 1 else f", {part.name}"
    panel.set_title(f"timeline{which}", loc="left", fontsize="medium")
    seen = {bar.what for row in rows for bar in row.bars}
    hidden = {"lost", "compile", "slowed"} - seen
    panel.legend(
        handles=[
            Patch(color=_COLORS[what], label=_LABELS[what])
            for what in _COLORS
            if what not in hidden
        ],
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(_COLORS),
        frameon=False,
        fontsize="small",
    )


def _drawn_s(bar: windows.Bar, pixel_s: float) -> float:
    """Returns the length at which to draw a bar, in seconds.

    Builds are shortened, to leave gaps between builds. Other bars get a length
    of at least a pixel.
    """
    length_s = bar.end_s - bar.begin_s
    if bar.what == "build":
        return length_s - min(pixel_s, length_s / 4)
    return max(length_s, pixel_s)


def _draw_histogram(
    panel: Axes, name: str, seconds: npt.NDArray[np.float64]
) -> None:
    figure = axes.histogram(seconds)
    if figure is None:
        _say_empty(panel, name)
        return
    color = _COLORS["build"]
    panel.stairs(
        figure.counts, figure.edges, fill=True, color=color, alpha=_BINS_ALPHA
    )
    if figure.is_log:
        panel.set_xscale("log")
    low, high = float(figure.edges[0]), float(figure.edges[-1])
    panel.set_xlim(low, high)
    marks = [
        (
            low * (high / low) ** place
            if figure.is_log
            else low + (high - low) * place,
            label,
        )
        for place, label in axes.duration_marks(figure)
    ]
    panel.set_xticks([v for v, _ in marks], [label for _, label in marks])
    panel.set_xticks([], minor=True)
    styles = {"median": ("black", "-"), "p95": (_COLORS["lost"], "--")}
    for line, at in figure.lines:
        color, style = styles[line]
        panel.axvline(at, color=color, linestyle=style, label=line)
    panel.set_ylabel("batches")
    panel.locator_params(axis="y", integer=True)
    if figure.at_once:
        least = formatting.duration(axes.LEAST_S)
        name += f" ({figure.at_once:,} under {least} not drawn)"
    panel.set_title(name, loc="left", fontsize="medium")
    if figure.lines:
        panel.legend(frameon=False, fontsize="small")


def _draw_queue(panel: Axes, record: Record) -> None:
    found = axes.series(windows.asked_s(record), record.column("depth"))
    if found is None or not windows.has_queue(record):
        _say_empty(panel, "queue depth")
        return
    origin_s = record.began_s
    for part in found.parts():
        moments = np.stack([part.begin_s, part.end_s], 1).ravel() - origin_s
        band = panel.fill_between(
            moments,
            np.repeat(part.least, 2),
            np.repeat(part.most, 2),
            color=_COLORS["copy"],
            alpha=0.5,
            linewidth=0,
        )
        (curve,) = panel.plot(
            moments, np.repeat(part.mean, 2), color=_COLORS["build"]
        )
    panel.set_ylim(bottom=0, top=max(1.0, 1.08 * float(found.most.max())))
    panel.set_xlabel("time since the start (s)")
    panel.set_ylabel("batches ready")
    panel.locator_params(axis="y", integer=True)
    panel.set_title("queue depth", loc="left", fontsize="medium")
    panel.legend(
        [curve, band],
        ["mean", "least to most"],
        frameon=False,
        fontsize="small",
    )


def _say_empty(panel: Axes, name: str) -> None:
    panel.set_title(name, loc="left", fontsize="medium")
    panel.text(
        0.5, 0.5, "nothing to show", ha="center", transform=panel.transAxes
    )
    panel.set_xticks([])
    panel.set_yticks([])
