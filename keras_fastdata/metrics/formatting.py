"""Formats figures with their units, and wraps texts into lines."""

from __future__ import annotations

import math
import textwrap


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
    """Formats a count: "1 batch", "3 batches", "2 workers"."""
    if number == 1:
        return f"1 {noun}"
    plural = (
        f"{noun}es" if noun.endswith(("ch", "sh", "x", "s")) else f"{noun}s"
    )
    return f"{number:,} {plural}"


def cores(number: float) -> str:
    """Formats a number of cores: "1 core", "1.5 cores"."""
    return f"{number:g} core{'' if number == 1 else 's'}"


def listed(numbers: list[int], most: int = 5) -> str:
    """Formats at most `most` numbers: "3, 17, 20" or "3, 17, 20, ..."."""
    shown = ", ".join(str(number) for number in numbers[:most])
    return shown + (", ..." if len(numbers) > most else "")


def wrapped(text: str, width: int = 80) -> str:
    """Wraps a text into lines, but never breaks code in backquotes."""
    pieces = text.split("`")
    pieces[1::2] = [code.replace(" ", "\0") for code in pieces[1::2]]
    lines = textwrap.wrap(
        "`".join(pieces),
        width,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace("\0", " ")


def _three_digits(number: float) -> str:
    if number >= 99.95:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 1 else f"{number:.2g}"
