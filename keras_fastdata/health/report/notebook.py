"""Renders a summary as HTML for notebooks, without a template engine."""

from __future__ import annotations

import html

from keras_fastdata.health import comparison
from keras_fastdata.health.summary import (
    EpochHealth,
    HealthSummary,
    abridged,
)
from keras_fastdata.metrics import formatting

_COLUMNS = (
    "",
    "verdict",
    "took",
    "waiting",
    "data_wait",
    "build, median",
    "build, 95%",
    "workers busy",
)


def summary_html(summary: HealthSummary) -> str:
    """Returns the verdict and a table of the epochs as HTML.

    Args:
        summary: The summary.

    Returns:
        A `div` that uses the colours of the page around it.
    """
    if summary.verdict is None:
        return "<div>LoaderHealth: no batch of a FastPyDataset was seen.</div>"
    account = "" if summary.account is None else str(summary.account)
    return (
        f"<div>{_conclusions(summary)}"
        f"<p>{html.escape(account)}</p>"
        f"{_decided(summary)}"
        f"{_table(summary)}{_compared(summary)}</div>"
    )


def _conclusions(summary: HealthSummary) -> str:
    """Returns an HTML paragraph for each finding of the summary."""
    written = []
    for finding in summary.findings:
        lines = [
            f"<b>{html.escape(finding.verdict.kind)}</b>: "
            f"{html.escape(finding.headline)}.",
            _marked(finding.evidence),
            f"<b>{_marked(finding.advice)}</b>",
        ]
        if finding.hot_lines:
            lines.append(_marked(f"Hottest line: {finding.hot_lines[0]}."))
        written.append(f"<p>{'<br>'.join(lines)}</p>")
    return "".join(written)


def _marked(text: str) -> str:
    """Converts a text to HTML; text between backquotes becomes `<code>`."""
    return "".join(
        f"<code>{html.escape(piece)}</code>" if is_code else html.escape(piece)
        for is_code, piece in formatting.prose(text)
    )


def _decided(summary: HealthSummary) -> str:
    if not summary.decisions:
        return ""
    return f"<p>{html.escape(str(summary.decisions[-1]))}</p>"


def _compared(summary: HealthSummary) -> str:
    if summary.compared is None:
        return ""
    rows = comparison.rows(summary.compared, summary.figures)
    name = html.escape(summary.compared.name)
    table = formatting.html_table(rows, ("", "before", "now", ""))
    return f"<p>Compared with {name}:</p>{table}"


def _table(summary: HealthSummary) -> str:
    rest = ("",) * (len(_COLUMNS) - 1)
    rows = (
        ("...", *rest) if phase is None else _cells(phase)
        for phase in abridged(summary.phases)
    )
    return f"{formatting.html_table(rows, _COLUMNS)}<p>{summary.note}</p>"


def _cells(phase: EpochHealth) -> tuple[str, ...]:
    return (
        phase.name,
        str(phase.verdict.kind),
        formatting.duration(phase.wall_s),
        formatting.duration(phase.waited_s),
        formatting.share(phase.data_wait),
        formatting.duration(phase.build_s_p50),
        formatting.duration(phase.build_s_p95),
        formatting.share(phase.worker_utilization),
    )
