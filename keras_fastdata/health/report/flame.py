"""Computes a flame graph of the functions that build batches."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from keras_fastdata._modules import is_users_file
from keras_fastdata.health.hot_lines import calls_of

_LEAST_SHARE = 0.004  # of a frame that is drawn
_MOST_DEPTH = 24


class Frame(NamedTuple):
    """A rectangle of a flame graph: a function and its share of build time.

    Attributes:
        name: The function.
        title: The function with its file and its share.
        left: Where the frame begins, from 0 to 1.
        share: The width, from 0 to 1.
        depth: How many calls are above the frame.
        is_users: Whether the function is in a file of the user's.
    """

    name: str
    title: str
    left: float
    share: float
    depth: int
    is_users: bool


def frames(stacks: Mapping[str, int]) -> list[Frame]:
    """Returns the frames of a flame graph.

    Args:
        stacks: How often each folded stack was met.

    Returns:
        The frames, callers before those they call. Frames of less than 0.4%
        are left out, and calls deeper than 24.
    """
    total = sum(stacks.values())
    paths = [
        ([(function, file) for function, file, _ in calls_of(stack)], count)
        for stack, count in stacks.items()
    ]
    return list(_laid_out(paths, total, 0, 0)) if total else []


_Path = tuple[list[tuple[str, str]], int]


def _laid_out(
    paths: list[_Path], total: int, before: int, depth: int
) -> Iterator[Frame]:
    """Yields each frame at `depth`, followed by the frames of its callees.

    Args:
        paths: Functions with their files, outermost first, and how often each
            path was met. All agree in what is above `depth`.
        total: How many stacks there are in all.
        before: How many stacks are to the left.
        depth: The depth to begin at.
    """
    inside: dict[tuple[str, str], list[_Path]] = {}
    for path, count in paths:
        if depth < min(len(path), _MOST_DEPTH):
            inside.setdefault(path[depth], []).append((path, count))
    for (function, file), those in sorted(inside.items()):
        count = sum(n for _, n in those)
        share = count / total
        if share >= _LEAST_SHARE:
            where = os.path.basename(file)
            yield Frame(
                function,
                f"{function}, {where}: {share:.1%} of building",
                before / total,
                share,
                depth,
                is_users_file(file),
            )
            yield from _laid_out(those, total, before, depth + 1)
        before += count
