"""Throughput against batch size, all loaders, from results of `transport`.

python -m benchmarks.plot RESULTS.json PLOT.png
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

from benchmarks.workloads import SIZES

STRUCTURE = "(x, y)"
INK = "#1f2328"
FAINT = "#d8dee4"
# Ours in one hue and heavy; the others tell themselves apart by their labels.
COLORS = {
    "fastdata": "#c2410c",
    "fastdata empty": "#ea580c",
    "fastdata threads": "#fb923c",
    "fastdata portable": "#fdba74",
    "fastdata ray": "#fed7aa",
    "stock inline": "#1e3a5f",
    "stock threads": "#2563eb",
    "stock processes": "#60a5fa",
    "torch": "#7e22ce",
    "grain": "#15803d",
    "loky": "#be185d",
    "spdl": "#0f766e",
    "tf generator": "#a16207",
    "ray": "#64748b",
    "ray loop": "#94a3b8",
}
NAMES = {
    "fastdata": "FastPyDataset",
    "fastdata empty": "with self.empty",
    "fastdata threads": "its threads",
    "fastdata portable": "portable workers",
    "fastdata ray": "its Ray actors",
    "stock inline": "no loader at all",
    "stock threads": "Keras threads",
    "stock processes": "Keras processes",
    "torch": "torch DataLoader",
    "grain": "Grain",
    "loky": "loky",
    "spdl": "SPDL",
    "tf generator": "from_generator",
    "ray": "Ray actors",
    "ray loop": "one at a time",
}
LABEL_GAP = 0.052  # of the height of the axes


def main() -> None:
    source, target = sys.argv[1:]
    with open(source) as file:
        draw(json.load(file)["results"], target)


def draw(results: list[dict[str, Any]], path: str) -> None:
    """Draws one panel for each number of producers."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels = {
        producers: lines
        for producers in (1, 2)
        if (lines := _lines(results, producers))
    }
    if not panels:
        print("No results of `transport` to draw.", file=sys.stderr)
        return
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(5.6 * len(panels), 5.2),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, (producers, lines) in zip(axes[0], panels.items(), strict=True):
        number = "1 producer" if producers == 1 else f"{producers} producers"
        _draw_panel(axis, lines, number)
    axes[0][0].set_ylabel("batches per second", color=INK)
    for axis, lines in zip(axes[0], panels.values(), strict=True):
        _label_ends(axis, lines)
    figure.savefig(path, dpi=160, facecolor="white")
    plt.close(figure)


Line = list[tuple[int, float]]


def _lines(results: list[dict[str, Any]], producers: int) -> dict[str, Line]:
    """For each loader its batch sizes and medians."""
    lines: dict[str, Line] = {}
    for result in results:
        case = result["case"]
        values = result["figures"].get("batches_per_s")
        if (
            result["benchmark"] == "transport"
            and case["structure"] == STRUCTURE
            and case["producers"] == producers
            and values
        ):
            point = SIZES[case["size"]], statistics.median(values)
            lines.setdefault(case["loader"], []).append(point)
    return {name: sorted(line) for name, line in lines.items()}


def _draw_panel(axis: Any, lines: dict[str, Line], title: str) -> None:
    sizes = sorted({size for line in lines.values() for size, _ in line})
    for name, line in lines.items():
        ours = name.startswith("fastdata")
        axis.plot(
            *zip(*line, strict=True),
            color=COLORS[name],
            linewidth=2.6 if name == "fastdata" else 1.5,
            linestyle="--" if name == "stock inline" else "-",
            marker="o",
            markersize=5 if ours else 3.5,
            zorder=3 if ours else 2,
        )
    axis.set(xscale="log", yscale="log", title=title)
    words = {size: name.replace(" ", "\n") for name, size in SIZES.items()}
    axis.set_xticks(sizes, [words[size] for size in sizes])
    axis.minorticks_off()
    axis.set_xlabel("size of a batch", color=INK)
    axis.tick_params(colors=INK, length=0)
    axis.grid(color=FAINT, linewidth=0.7)
    axis.spines[:].set_visible(False)
    axis.yaxis.set_major_formatter("{x:,g}")


def _label_ends(axis: Any, lines: dict[str, Line]) -> None:
    """Writes each name beside the end of its line, none over another."""
    # Room on the right, in the data's logarithm.
    left, right = axis.get_xlim()
    axis.set_xlim(left, right * (right / left) ** 0.38)
    to_axes = axis.transScale + axis.transLimits
    ends = []
    for name, line in lines.items():
        x, y = to_axes.transform(line[-1])
        ends.append([y, x, name])
    ends.sort()
    places = _spread([y for y, _, _ in ends])
    for (y, x, name), place in zip(ends, places, strict=True):
        axis.annotate(
            NAMES[name],
            xy=(x, y),
            xytext=(x + 0.05, place),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=COLORS[name],
            fontsize=9,
            fontweight="bold" if name == "fastdata" else "normal",
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "color": COLORS[name],
                "linewidth": 0.6,
                "relpos": (0, 0.5),
                "shrinkA": 1,
                "shrinkB": 3,
            },
        )


def _spread(heights: list[float]) -> list[float]:
    """Moves sorted heights apart, as little as that needs."""
    places = list(heights)
    for _ in range(200):
        for low in range(len(places) - 1):
            lack = LABEL_GAP - (places[low + 1] - places[low])
            if lack > 0:
                places[low] -= lack / 2
                places[low + 1] += lack / 2
    return places


if __name__ == "__main__":
    main()
