"""Renders a record as one self-contained HTML page.

The page contains its style and figures and runs no script. It can be opened
from a disk, mailed, or kept beside a checkpoint. The template engine escapes
all names, texts and exceptions of the user.
"""

from __future__ import annotations

import importlib.resources
import math
import os
from collections.abc import Callable
from typing import Any

from keras_fastdata import _atomic_write
from keras_fastdata.health import comparison
from keras_fastdata.health.record import Record
from keras_fastdata.health.report import drawing, flame
from keras_fastdata.health.summary import (
    EpochHealth,
    HealthSummary,
)
from keras_fastdata.metrics import formatting
from keras_fastdata.metrics.cost_model import WORTH
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


# Of the table of epochs: the name of a column, whether it is for few readers,
# and its text for one epoch.
_COLUMNS: tuple[tuple[str, bool, Callable[[EpochHealth], str]], ...] = (
    ("Took", False, lambda e: formatting.duration(e.wall_s)),
    ("Waiting", False, lambda e: formatting.duration(e.waited_s)),
    ("data_wait", False, lambda e: formatting.share(e.data_wait)),
    ("One step alone", True, lambda e: formatting.duration(e.step_s)),
    ("Batches", True, lambda e: f"{e.batches:,}"),
    ("Batches/s", False, lambda e: f"{e.batches_per_s:,.1f}"),
    ("Build, median", False, lambda e: formatting.duration(e.build_s_p50)),
    ("Build, 95%", False, lambda e: formatting.duration(e.build_s_p95)),
    ("Wait, 95%", False, lambda e: formatting.duration(e.wait_s_p95)),
    ("Queue depth", False, lambda e: f"{e.queue_depth_mean:.1f}"),
    ("Workers busy", False, lambda e: formatting.share(e.worker_utilization)),
    ("Cores busy", False, lambda e: _cores(e)),
    ("Arrays", True, lambda e: formatting.size(e.nbytes)),
    ("Workers' memory", True, lambda e: _size(e.workers_nbytes)),
    ("Shared memory", True, lambda e: formatting.size(e.shared_nbytes)),
    ("Workers lost", True, lambda e: f"{e.restarts}"),
    ("Batches retried", True, lambda e: f"{e.retried}"),
    ("Batches skipped", True, lambda e: f"{e.skipped}"),
)


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
    """Raises `ImportError` if Jinja2 is not installed."""
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
    """Returns the variables of the page's template as a dict by name."""
    summary = record.summary
    phases = summary.phases
    timelines = drawing.timelines(record)
    builds = record.column("built_s") - record.column("began_s")
    histograms = [
        drawing.histogram("Time to build a batch", builds),
        drawing.histogram("Wait for a batch", record.column("waited_s")),
    ]
    return {
        "record": record,
        "summary": summary,
        "findings": summary.findings,
        "account": summary.account,
        "figures": summary.figures.to_json(),
        "compared": _compared(summary),
        "account_colours": _ACCOUNT_COLOURS,
        "slowed": _slowed(summary),
        "took_s": summary.account.total_s
        if summary.account is not None
        else record.ended_s - record.began_s,
        "timelines": timelines,
        "most_waiting": max((c.waiting for c in timelines), default=0.0),
        "over_time": drawing.over_time(record),
        "histograms": [chart for chart in histograms if chart],
        "phases": phases,
        "columns": _COLUMNS,
        "epochs_note": summary.note,
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


def _slowed(summary: HealthSummary) -> dict[str, float]:
    """Returns the seconds by which builds slow down steps, by account part.

    The values are the seconds by which builds slow the steps down.
    """
    seconds = {
        "waiting for data": sum(e.slowed_s for e in summary.epochs),
        "validation waiting for data": sum(
            e.slowed_s for e in summary.validations
        ),
    }
    least_s = WORTH * summary.whole_s
    return {name: s for name, s in seconds.items() if s > least_s}


def _stragglers(record: Record) -> list[Slow]:
    """Returns batches of the last epoch with unusually long build times."""
    phases = record.summary.phases
    usual_s = phases[-1].build_s_p50 if phases else 0.0
    least_s = max(2 * usual_s, usual_s + _SLOWER_S)
    slow = [build for build in record.slowest if build.build_s >= least_s]
    return slow[:_MOST_SLOW]


def _compared(summary: HealthSummary) -> list[tuple[str, str, str, str]]:
    if summary.compared is None:
        return []
    return comparison.rows(summary.compared, summary.figures)


def _raised(traceback: str) -> str:
    """Returns the line of a traceback with the name of the exception."""
    lines = traceback.rstrip().splitlines()
    frames = [i for i, line in enumerate(lines) if line.startswith("  ")]
    after = lines[frames[-1] + 1 :] if frames else lines
    return (after or lines or [""])[0]


def _settings(record: Record) -> list[tuple[str, str]]:
    rows = list(record.datasets.items())
    shown = dict(record.settings)
    if record.summary.shard:
        shown["this process has"] = record.summary.shard
    for decision in record.summary.decisions:
        name = f"workers, from batch {decision.batches} on"
        shown[name] = f"{decision.place}. {decision.reason}"
    return rows + [(n, _shown(n, value)) for n, value in shown.items()]


def _shown(name: str, value: Any) -> str:
    # Variables may hold passwords, and reports are shared.
    if value and name in ("worker_env", "ray_options"):
        return f"{', '.join(sorted(value))} (values are not shown)"
    return repr(value)


def _cores(epoch: EpochHealth) -> str:
    """Formats the number of busy cores and, if known, what uses them."""
    busy = "?" if epoch.busy_cores is None else f"{epoch.busy_cores:.1f}"
    users = None if epoch.facts is None else epoch.facts.busy_with
    if users is not None:
        busy = " + ".join(f"{cores:.1f}" for cores in users)
    return f"{busy} of {epoch.cores:g}"


def _size(nbytes: int | None) -> str:
    return "?" if nbytes is None else formatting.size(nbytes)


def _retried(record: Record) -> list[Span]:
    again = record.spans[record.column("retries") > 0]
    return [
        Span(*(int(v) if v.is_integer() else v for v in values))
        for values in again[-_MOST_RETRIED:].tolist()
    ]
