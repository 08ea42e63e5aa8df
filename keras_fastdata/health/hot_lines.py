"""Finds the lines of the user's code where building batches takes longest.

Works on folded stacks: "function (file:line);function (file:line)", the
outermost call first, each with the number of times it was met.
"""

from __future__ import annotations

import collections
import dataclasses
import linecache
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from keras_fastdata import _atomic_write
from keras_fastdata._call_stack import ignoring_errors
from keras_fastdata._modules import is_users_file

_CALL = re.compile(r"(.*) \((.*):(\d+)\)")
_ENOUGH = 20  # stacks; fewer tell too little
_LEAST_SHARE = 0.02  # of the building time
_MOST_OF_IT = 2 / 3  # of a line's share, for the line that it calls to be told
_MOST_SHOWN = 72  # characters of a source line


@dataclasses.dataclass(frozen=True)
class HotLine:
    """A line of source code, and its share of the time of building batches.

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
        """The text of the line, or "" if the file cannot be read."""
        text = linecache.getline(self.file, self.line).strip()
        if len(text) > _MOST_SHOWN:
            text = text[: _MOST_SHOWN - 3] + "..."
        return text

    @property
    def place(self) -> str:
        """The file and the line number, such as "data.py line 19".

        In a notebook, "In[3] line 19".
        """
        name = os.path.basename(self.file)
        shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", None)
        with ignoring_errors():  # not in each version of IPython
            name = shell().compile.format_code_name(self.file)[1]
        return f"{name} line {self.line}"

    def __str__(self) -> str:
        text = self.source or f"{self.function}(...)"
        return f"`{text}`, {self.place}: {self.share:.0%} of building"


Line = tuple[str, str, int]  # function, file, number


def hot_lines(stacks: Mapping[str, int], most: int = 3) -> tuple[HotLine, ...]:
    """Returns the lines of the user's code that take the most build time.

    From `__getitem__` the heaviest calls are followed, as long as one line has
    two thirds of its caller's share. Then the same is done with the stacks
    that do not lead to this line.

    Args:
        stacks: How often each folded stack was met.
        most: The number of lines to return, at most.

    Returns:
        The lines, the hottest first; none where too few stacks were met. No
        line is called by another one of them.
    """
    total = sum(stacks.values())
    found: list[HotLine] = []
    ways: list[list[Line]] = []
    paths = [(_lines_of(stack), count) for stack, count in stacks.items()]
    while paths and total >= _ENOUGH and len(found) < most:
        way, count = _heaviest(paths, ways)
        if count < _LEAST_SHARE * total:
            break
        function, file, number = way[-1]
        found.append(HotLine(file, number, function, count / total))
        ways.append(way)
        paths = [(p, n) for p, n in paths if p[: len(way)] != way]
    found.sort(key=lambda line: line.share, reverse=True)
    return tuple(found)


_Paths = list[tuple[list[Line], int]]


def _heaviest(paths: _Paths, told: list[list[Line]]) -> tuple[list[Line], int]:
    """Returns the call path with the most samples, and its sample count.

    Args:
        paths: Users' lines, outermost first, and how often each was met.
        told: The ways to lines that are told of: no line on them is returned.
    """
    way: list[Line] = []
    heaviest = 0
    while True:
        counts: collections.Counter[Line] = collections.Counter()
        for path, count in paths:
            if len(path) > len(way):
                counts[path[len(way)]] += count
        if not counts:
            return way, heaviest
        line, count = counts.most_common(1)[0]
        is_on_a_way = any(other[: len(way)] == way for other in told)
        if count < heaviest * _MOST_OF_IT and not is_on_a_way:
            return way, heaviest
        way, heaviest = [*way, line], count
        paths = [(p, n) for p, n in paths if p[: len(way)] == way]


def _lines_of(stack: str) -> list[Line]:
    """Returns the lines of user code in a folded stack, outermost line first.

    A stack without a line of the user's has one line, the outermost of all.
    """
    lines = calls_of(stack)
    return [line for line in lines if is_users_file(line[1])] or lines[:1]


def calls_of(stack: str) -> list[Line]:
    """Returns the function, file and line of each call in a folded stack.

    The outermost call comes first.
    """
    calls = (_CALL.fullmatch(call) for call in stack.split(";"))
    return [(c[1], c[2], int(c[3])) for c in calls if c is not None]


def write_folded(
    stacks: Mapping[str, int], path: str | os.PathLike[str]
) -> None:
    """Writes call stacks to a file for speedscope or `flamegraph.pl`.

    Args:
        stacks: How often each folded stack was met.
        path: The file to write; it is replaced in one piece.

    Raises:
        OSError: The file could not be written.
    """
    lines = (f"{stack} {count}\n" for stack, count in sorted(stacks.items()))
    with _atomic_write.replacing(path) as file:
        file.write("".join(lines).encode(errors="backslashreplace"))
