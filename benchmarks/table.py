"""The results of a benchmark on a terminal: a line for each case."""

from __future__ import annotations

import statistics
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.harness import Figure, Result

OURS = "fastdata"


def show(benchmark: ModuleType, results: list[Result]) -> None:
    """Prints medians and spreads, and how much better ours is."""
    print(f"\n{benchmark.__doc__.splitlines()[0]}")
    if not results:
        return
    used = [
        figure
        for figure in benchmark.FIGURES
        if any(figure.key in result.figures for result in results)
    ]
    labels = list(dict.fromkeys(key for r in results for key in r.case))
    rounds = max(len(v) for r in results for v in [*r.figures.values(), []])
    print(
        f"median (least to most) of {rounds}; ours: times better in the first"
    )
    rows = [[*labels, *(figure.title for figure in used), "ours"]]
    for result in results:
        cells = [str(result.case.get(label, "")) for label in labels]
        cells += [_spread(result.figures.get(f.key)) for f in used]
        rows.append([*cells, _ratio(result, results, used)])
        if result.outcome != "ok":
            rows[-1][-1] = result.outcome
    _print_aligned(rows)


def _spread(values: list[float] | None) -> str:
    if not values:
        return "-"
    middle = _short(statistics.median(values))
    if len(values) == 1:
        return middle
    return f"{middle} ({_short(min(values))} to {_short(max(values))})"


def _short(value: float) -> str:
    """Three digits, or all before the point."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _ratio(result: Result, results: list[Result], used: list[Figure]) -> str:
    """How many times better ours is in the first figure of the other."""
    if result.case.get("loader") in (None, OURS):
        return ""
    ours = {**result.case, "loader": OURS}
    for other in results:
        for figure in used:
            theirs, mine = (r.figures.get(figure.key) for r in (result, other))
            if other.case != ours or not theirs or not mine:
                continue
            a, b = statistics.median(mine), statistics.median(theirs)
            if min(a, b) <= 0:
                return ""
            return f"{a / b if figure.larger_is_better else b / a:.2f}x"
    return ""


def _print_aligned(rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        ]
        print("  ".join(cells).rstrip())
