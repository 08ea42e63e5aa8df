"""Finds the lines of the user's code that building batches takes longest in.

Works on folded stacks: "function (file:line);function (file:line)", the
outermost call first, each with the number of times it was met.
"""

from __future__ import annotations

import collections
import dataclasses
import linecache
import os
import re
from collections.abc import Iterable, Mapping

from keras_fastdata.building.modules import is_users_file

_CALL = re.compile(r"(.*) \((.*):(\d+)\)")
_ENOUGH = 20  # stacks; fewer tell too little
_MOST_OF_IT = 2 / 3  # of a line's share, for the line that it calls to be told
_MOST_SHOWN = 72  # characters of a source line


@dataclasses.dataclass(frozen=True)
class HotLine:
    """A line of source code, and its share of the time of building.

    Attributes:
        file: The path of the file, as Python knows it.
        line: The number of the line, from 1.
        function: The name of the function that the line is in.
        share: The share of the building time that this line, with all that
            it calls, takes: from 0 to 1.
    """

    file: str
    line: int
    function: str
    share: float

    @property
    def source(self) -> str:
        """The text of the line; empty where the file cannot be read."""
        text = linecache.getline(self.file, self.line).strip()
        if len(text) > _MOST_SHOWN:
            text = text[: _MOST_SHOWN - 3] + "..."
        return text

    def __str__(self) -> str:
        text = self.source or f"{self.function}(...)"
        where = f"{os.path.basename(self.file)} line {self.line}"
        return f"`{text}`, {where}: {self.share:.0%} of building"


Line = tuple[str, str, int]  # function, file, number


def hot_lines(stacks: Mapping[str, int], most: int = 3) -> list[HotLine]:
    """Returns the lines that take longest, at most one for each way to them.

    From each line of `__getitem__` the heaviest calls are followed, as long as
    one line has two thirds of its caller's share.

    Args:
        stacks: How often each folded stack was met.
        most: The number of lines to return, at most.

    Returns:
        The lines, the hottest first; none where too few stacks were met.
    """
    total = sum(stacks.values())
    if total < _ENOUGH:
        return []
    paths = [(_lines_of(stack), count) for stack, count in stacks.items()]
    found = []
    for begin in {path[0] for path, _ in paths if path}:
        of_begin = [(path, n) for path, n in paths if path[:1] == [begin]]
        count, (function, file, number) = _descend(of_begin)
        found.append(HotLine(file, number, function, count / total))
    return sorted(found, key=lambda line: line.share, reverse=True)[:most]


def _descend(paths: list[tuple[list[Line], int]]) -> tuple[int, Line]:
    """Follows the heaviest calls from one line to the line that is told.

    Args:
        paths: Users' lines, outermost first, and how often each was met. All
            begin with the same line.
    """
    line, heaviest = paths[0][0][0], sum(n for _, n in paths)
    depth = 1
    while True:
        counts: collections.Counter[Line] = collections.Counter()
        for path, count in paths:
            if len(path) > depth:
                counts[path[depth]] += count
        if not counts:
            return heaviest, line
        inner, count = counts.most_common(1)[0]
        if count < heaviest * _MOST_OF_IT:
            return heaviest, line
        paths = [(p, n) for p, n in paths if p[depth : depth + 1] == [inner]]
        line, heaviest, depth = inner, count, depth + 1


def _lines_of(stack: str) -> list[Line]:
    """Returns the user's lines of a folded stack, outermost first.

    A stack without a line of the user's has one line, the outermost of all.
    """
    lines = calls_of(stack)
    return [line for line in lines if is_users_file(line[1])] or lines[:1]


def calls_of(stack: str) -> list[Line]:
    """Returns function, file and line of each call, outermost first."""
    calls = (_CALL.fullmatch(call) for call in stack.split(";"))
    return [(c[1], c[2], int(c[3])) for c in calls if c is not None]


def folded(stacks: Mapping[str, int]) -> Iterable[str]:
    """Yields the lines of a file for speedscope or `flamegraph.pl`."""
    for stack, count in sorted(stacks.items()):
        yield f"{stack} {count}\n"
