"""Renders a record as one self-contained HTML page.

The page contains its style and figures and runs no script. It can be opened
from a disk, mailed, or kept beside a checkpoint. The template engine escapes
all names, texts and exceptions of the user.
"""

from __future__ import annotations

import importlib.resources
import math
import os
from typing import Any

from keras_fastdata import _atomic_write
from keras_fastdata.health import comparison
from keras_fastdata.health.record import Record
from keras_fastdata.health.report import drawing, flame
from keras_fastdata.health.summary import Finding, HealthSummary
from keras_fastdata.metrics import formatting
from keras_fastdata.metrics.recorder import Slow, Span

_MOST_SLOW = 12
_SLOWER_S = 0.005  # than usual builds: what is shorter is not worth a look
_MOST_TRACEBACKS = 50
_MOST_RETRIED = 50
_ACCOUNT_COLOURS = {  # classes of bars, by the name of a part
    "steps": "compute",
    "compiling": "compile",
    "start and first batch": "wait",
    "waiting for data": "wait",
    "validation waiting for data": "wait",
}


def write_report(record: Record, path: str | os.PathLike[str]) -> None:
    """Writes a record as an HTML page.

    The page appears at once: it is written beside `path` and then renamed. An
    existing file is replaced.

    Args:
        record: The record.
        path: The file to write; missing folders are made.

    Raises:
        ImportError: Jinja2 is not installed.
        OSError: The file could not be written.
    """
    # Tracebacks may hold surrogates, as file names do.
    page = _render(record).encode(errors="backslashreplace")
    with _atomic_write.replacing(path) as file:
        file.write(page)


def require() -> None:
    """Raises `ImportError` if Jinja2, which reports need, is missing."""
    try:
        import jinja2  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "Reports need Jinja2: pip install 'keras-fastdata[report]'"
        ) from error


def _render(record: Record) -> str:
    require()
    import jinja2

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        duration=formatting.duration,
        share=formatting.share,
        size=formatting.size,
        counted=formatting.count,
        prose=formatting.prose,
        last_line=_raised,
    )
    files = importlib.resources.files("keras_fastdata.health.report")
    source = files.joinpath("page.html.jinja").read_text("utf-8")
    return environment.from_string(source).render(_view(record))


def _view(record: Record) -> dict[str, Any]:
    """Returns the values of all variables of the page's template."""
    summary = record.summary
    phases = summary.phases
    builds = record.column("built_s") - record.column("began_s")
    histograms = [
        drawing.histogram("Time to build a batch", builds),
        drawing.histogram("Wait for a batch", record.column("waited_s")),
    ]
    return {
        "record": record,
        "summary": summary,
        "findings": summary.findings,
        "speedup": _speedup,
        "account": summary.account,
        "figures": summary.figures.to_json(),
        "compared": _compared(summary),
        "account_colours": _ACCOUNT_COLOURS,
        "took_s": record.ended_s - record.began_s,
        "timelines": drawing.timelines(record),
        "over_time": drawing.over_time(record),
        "histograms": [chart for chart in histograms if chart],
        "phases": phases,
        "batches": sum(phase.batches for phase in phases),
        "settings": _settings(record),
        "hot_lines": summary.hot_lines,
        "flame": flame.frames(record.stacks),
        "slowest": _stragglers(record),
        "usual_s": phases[-1].build_s_p50 if phases else math.nan,
        "skips": sum(phase.skipped for phase in phases),
        "tracebacks": record.skipped[:_MOST_TRACEBACKS],
        "retries": sum(phase.retried for phase in phases),
        "retried": _retried(record),
        "width": drawing.WIDTH,
    }


def _stragglers(record: Record) -> list[Slow]:
    """Returns the builds of the last epoch that took far longer than most."""
    phases = record.summary.phases
    usual_s = phases[-1].build_s_p50 if phases else 0.0
    least_s = max(2 * usual_s, usual_s + _SLOWER_S)
    slow = [build for build in record.slowest if build.build_s >= least_s]
    return slow[:_MOST_SLOW]


def _compared(summary: HealthSummary) -> list[tuple[str, str, str, str]]:
    if summary.compared is None:
        return []
    return comparison.rows(summary.compared, summary.figures)


def _speedup(finding: Finding) -> str:
    """Returns the speedup if data cost no time, such as "2.6 times"."""
    times = finding.wall_s / max(finding.free_s, 1e-9)
    if times >= 100:
        return "over 100 times"
    return f"{times:.2f} times" if times < 2 else f"{times:.1f} times"


def _raised(traceback: str) -> str:
    """Returns the line of a traceback that names the exception."""
    lines = traceback.rstrip().splitlines()
    frames = [i for i, line in enumerate(lines) if line.startswith("  ")]
    after = lines[frames[-1] + 1 :] if frames else lines
    return (after or lines or [""])[0]


def _settings(record: Record) -> list[tuple[str, str]]:
    shown = dict(record.settings)
    if record.summary.shard:
        shown["this process has"] = record.summary.shard
    for decision in record.summary.decisions:
        name = f"workers, from batch {decision.batches} on"
        shown[name] = f"{decision.place}. {decision.reason}"
    return [(name, _shown(name, value)) for name, value in shown.items()]


def _shown(name: str, value: Any) -> str:
    # Variables may hold passwords, and reports are shared.
    if value and name in ("worker_env", "ray_options"):
        return f"{', '.join(sorted(value))} (values are not shown)"
    return repr(value)


def _retried(record: Record) -> list[Span]:
    again = record.spans[record.column("retries") > 0]
    return [
        Span(*(int(v) if v.is_integer() else v for v in values))
        for values in again[-_MOST_RETRIED:].tolist()
    ]
