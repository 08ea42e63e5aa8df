"""Computes the bins, the scales and the axis marks of charts."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_WIDE = 10.0  # times the lowest value: beyond, bins have equal ratios
LEAST_S = 1e-5  # shorter durations are counted, not drawn
_PAUSE = 2  # empty bins: a curve is interrupted there


class Mark(NamedTuple):
    """A mark on an axis, with its position and label.

    Attributes:
        place: The position, from 0 (left, or bottom) to 1.
        label: The text, with a unit.
    """

    place: float
    label: str


@dataclasses.dataclass(frozen=True)
class Histogram:
    """A histogram of durations, with linear or logarithmic bins.

    Attributes:
        edges: Bounds of the bins in seconds: shape `(bins + 1,)`.
        counts: The number of durations in each bin: shape `(bins,)`.
        is_log: Whether the bins have equal ratios instead of equal widths.
        quantiles: The median and the 95% quantile, in seconds.
        at_once: How many durations were below `LEAST_S`, and are in no bin.
    """

    edges: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]
    is_log: bool
    quantiles: tuple[float, float]
    at_once: int

    @property
    def lines(self) -> list[tuple[str, float]]:
        """The name and value of each quantile to mark in the histogram."""
        named = zip(("median", "p95"), self.quantiles, strict=True)
        return [(name, at) for name, at in named if at >= self.edges[0]]

    def place(self, seconds: float) -> float:
        """Returns the position of a duration on the axis, from 0 to 1."""
        low, high = float(self.edges[0]), float(self.edges[-1])
        value = max(seconds, LEAST_S)
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return min(1.0, max(0.0, (value - low) / (high - low)))


def histogram(
    seconds: npt.NDArray[np.float64], bins: int = 40
) -> Histogram | None:
    """Returns a histogram of durations, or `None` for an empty array."""
    if not len(seconds):
        return None
    seen = seconds[seconds >= LEAST_S]
    if not len(seen):
        seen = np.full(len(seconds), LEAST_S)
    low, high = float(seen.min()), float(seen.max())
    is_log = high > _WIDE * low
    if is_log:
        edges = np.geomspace(low, high, bins + 1)
    else:
        room = max(0.05 * (high - low), 0.02 * high)
        edges = np.linspace(max(0.0, low - room), high + room, bins + 1)
    edges[0], edges[-1] = min(edges[0], low), max(edges[-1], high)
    counts, _ = np.histogram(seen, edges)
    median, most = np.quantile(seconds, (0.5, 0.95))
    return Histogram(
        edges,
        counts,
        is_log,
        (float(median), float(most)),
        len(seconds) - len(seen),
    )


def duration_marks(figure: Histogram, most: int = 5) -> list[Mark]:
    """Returns axis marks at round durations, such as 10 ms, for a histogram."""
    low, high = float(figure.edges[0]), float(figure.edges[-1])
    values = _round_ratios(low, high, most) if figure.is_log else []
    if len(values) < 2:
        values = round_values(low, high, most)
    step = min((b - a for a, b in itertools.pairwise(values)), default=1.0)
    if figure.is_log:
        return [Mark(figure.place(v), _exact(v, v)) for v in values]
    unit = values[-1] if values else high
    return [Mark(figure.place(v), _exact(v, step, unit)) for v in values]


def time_marks(
    begin_s: float, end_s: float, origin_s: float, most: int = 8
) -> list[Mark]:
    """Returns axis marks at round numbers of seconds after `origin_s`."""
    values = round_values(begin_s - origin_s, end_s - origin_s, most)
    step = values[1] - values[0] if len(values) > 1 else 1.0
    return [
        Mark(
            (value - (begin_s - origin_s)) / (end_s - begin_s),
            _exact(value, step, 1.0),
        )
        for value in values
    ]


def count_marks(most_value: float, most: int = 4) -> list[Mark]:
    """Returns axis marks at round integers from 0 to `most_value`."""
    values = round_values(0.0, most_value, most)
    return [
        Mark(value / most_value, f"{value:,.0f}")
        for value in values
        if value == round(value)
    ]


def round_values(low: float, high: float, most: int) -> list[float]:
    """Returns up to `most + 1` round numbers between `low` and `high`."""
    if not high > low:
        return []
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    while (high - low) / step > most:
        for factor in (2.0, 5.0, 10.0):
            if (high - low) / (step * factor) <= most:
                step *= factor
                break
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def _round_ratios(low: float, high: float, most: int) -> list[float]:
    first = math.floor(math.log10(low))
    decades = range(first, math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        values = [f * 10.0**decade for decade in decades for f in factors]
        values = [v for v in values if low <= v <= high]
        if len(values) <= most:
            return values
    return values[:: math.ceil(len(values) / most)]


def _exact(seconds: float, step: float, unit: float | None = None) -> str:
    """Formats a duration with enough digits for multiples of `step` seconds."""
    factor, name = (1.0, "s") if (unit or seconds) >= 1 else (1e3, "ms")
    digits = max(0, -math.floor(math.log10(step * factor) + 1e-9))
    return f"{seconds * factor:,.{digits}f} {name}"


class Series(NamedTuple):
    """The mean, lowest and highest value in each time bin.

    All fields are arrays of shape `(n,)`.

    Attributes:
        begin_s: The beginning of each bin.
        end_s: The end of each bin.
        mean: The mean of the values in each bin.
        least: The lowest value in each bin.
        most: The highest value in each bin.
    """

    begin_s: npt.NDArray[np.float64]
    end_s: npt.NDArray[np.float64]
    mean: npt.NDArray[np.float64]
    least: npt.NDArray[np.float64]
    most: npt.NDArray[np.float64]

    def parts(self) -> list[Series]:
        """Splits the series at gaps of several empty bins."""
        pause = _PAUSE * (self.end_s - self.begin_s)[:-1]
        cuts = np.flatnonzero(np.diff(self.begin_s) > pause) + 1
        columns = [np.split(column, cuts) for column in self]
        return [Series(*part) for part in zip(*columns, strict=True)]


def series(
    moments_s: npt.NDArray[np.float64],
    values: npt.NDArray[np.float64],
    most_bins: int = 240,
) -> Series | None:
    """Groups values into time bins of equal length; leaves out empty bins.

    Returns:
        The series, or `None` if there are no values.
    """
    if not len(moments_s):
        return None
    bins = min(most_bins, max(1, len(moments_s) // 2))
    low, high = float(moments_s.min()), float(moments_s.max())
    width = max((high - low) / bins, 1e-9)
    bin_of = np.minimum(((moments_s - low) / width).astype(int), bins - 1)
    order = np.argsort(bin_of, kind="stable")
    used, first = np.unique(bin_of[order], return_index=True)
    ordered = values[order]
    total = np.add.reduceat(ordered, first)
    counts = np.diff(np.append(first, len(ordered)))
    return Series(
        low + used * width,
        low + (used + 1) * width,
        total / counts,
        np.minimum.reduceat(ordered, first),
        np.maximum.reduceat(ordered, first),
    )
