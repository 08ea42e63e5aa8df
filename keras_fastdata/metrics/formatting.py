"""Formats numbers, texts, batches and tables for display."""

from __future__ import annotations

import html
import math
import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from keras_fastdata.metrics.worker_kinds import WorkerKind

_CELL = "padding:.15em .8em;text-align:"
_TEXTS = {"U": "str", "S": "bytes"}  # by the kind of NumPy's dtype
# Spaces at which no line ends: between a number and its unit, "line" and 9.
_TIED = re.compile(
    r"(?<=\d) (?=(?:ms|s|min|h|B|KB|MB|GB|TB)\b)|(?<=line) (?=\d)"
)
_FIRST_CELL = "padding:.15em .8em .15em 0;text-align:left"


def duration(seconds: float) -> str:
    """Formats seconds: "1 h 12 min", "41 s", "9.7 s", "12 ms", "0.31 ms"."""
    if not math.isfinite(seconds):
        return "?"
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    if seconds >= 600:
        return f"{seconds / 60:.0f} min"
    if seconds >= 0.9995:
        return f"{_three_digits(seconds)} s"
    if seconds >= 1e-3:
        return f"{_three_digits(seconds * 1e3)} ms"
    return f"{seconds * 1e3:.2g} ms" if seconds > 0 else "0 ms"


def size(nbytes: float) -> str:
    """Formats bytes: "38.5 MB", "512 B"."""
    units = ["B", "KB", "MB", "GB", "TB"]
    while nbytes >= 999.5 and len(units) > 1:
        nbytes /= 1000
        del units[0]
    return f"{_three_digits(nbytes)} {units[0]}"


def share(fraction: float) -> str:
    """Formats a fraction: "31%"."""
    return "?" if math.isnan(fraction) else f"{fraction:.0%}"


def count(number: int, noun: str) -> str:
    """Formats a count: "1 batch", "3 batches", "2 epochs", "2 workers"."""
    if number == 1:
        return f"1 {noun}"
    hisses = noun.endswith(("tch", "sh", "x", "s"))
    return f"{number:,} {noun}{'es' if hisses else 's'}"


def workers(kind: WorkerKind, number: int) -> str:
    """Formats a `WorkerKind` and a number: "2 threads", "inline"."""
    return count(number, kind.noun) if number and kind.noun else "inline"


def cores(number: float) -> str:
    """Formats a number of cores: "1 core", "1.5 cores"."""
    return f"{number:g} core{'' if number == 1 else 's'}"


def listed(numbers: list[int], most: int = 5) -> str:
    """Formats at most `most` numbers: "3, 17, 20" or "3, 17, 20, ..."."""
    shown = ", ".join(str(number) for number in numbers[:most])
    return shown + (", ..." if len(numbers) > most else "")


def wrapped(text: str, width: int = 0) -> str:
    """Wraps a text into lines, but not inside code or before a unit.

    A `width` of 0 is that of the terminal, at most 80 characters.
    """
    if not width:
        width = min(80, max(40, shutil.get_terminal_size().columns))
    pieces = _TIED.sub("\0", text).split("`")
    pieces[1::2] = [code.replace(" ", "\0") for code in pieces[1::2]]
    lines = textwrap.wrap(
        "`".join(pieces), width, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines).replace("\0", " ")


def prose(text: str) -> list[tuple[bool, str]]:
    """Splits a text at backquotes into pairs `(is_code, piece)`."""
    kept = _TIED.sub("\N{NO-BREAK SPACE}", text)
    pieces = kept.split("`")
    if len(pieces) % 2 == 0:
        return [(False, kept)]
    return [(place % 2 == 1, piece) for place, piece in enumerate(pieces)]


def structure(batch: Any) -> str:
    """Returns the dtypes and shapes of the arrays in a batch, as text.

    Such as "(float32 (32, 64), int64 (32,))". What is no array is named by
    its class.
    """
    if isinstance(batch, dict):
        return (
            f"{{{', '.join(f'{k!r}: {structure(batch[k])}' for k in batch)}}}"
        )
    if isinstance(batch, (tuple, list)):
        parts = ", ".join(map(structure, batch))
        if isinstance(batch, list):
            return f"[{parts}]"
        return f"({parts},)" if len(batch) == 1 else f"({parts})"
    shape, dtype = getattr(batch, "shape", None), getattr(batch, "dtype", None)
    if shape is None or dtype is None:
        return type(batch).__name__
    kind = _TEXTS.get(getattr(dtype, "kind", ""))
    return f"{kind or getattr(dtype, 'name', dtype)} {tuple(shape)}"


def html_table(
    rows: Iterable[Sequence[str]], header: Sequence[str] = (), align: str = ""
) -> str:
    """Returns an HTML table of texts, and escapes the texts.

    `align` says where the texts of all columns but the first stand.
    """
    written = [_html_row(header, "th", align)] if header else []
    written += [_html_row(cells, "td", align) for cells in rows]
    body = "".join(written)
    return f'<div style="overflow-x:auto"><table>{body}</table></div>'


def shortened(text: str, most: int) -> str:
    """Shortens a text to one line of at most `most` characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def _html_row(cells: Sequence[str], tag: str, align: str) -> str:
    rest = f"{_CELL}{align or 'right'}"
    written = "".join(
        f'<{tag} style="{rest if place else _FIRST_CELL}">'
        f"{html.escape(cell)}</{tag}>"
        for place, cell in enumerate(cells)
    )
    return f"<tr>{written}</tr>"


def _three_digits(number: float) -> str:
    if number >= 99.95:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 1 else f"{number:.2g}"
