"""Compares results of cached functions in a worker with those in the trainer.

Each worker calls such a function itself. If the program has changed the result
before, as `get_settings().size = 5` does, the worker has another one.
"""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any

from keras_fastdata._call_stack import raise_of_handler
from keras_fastdata._modules import is_main
from keras_fastdata.building.interface import Dataset
from keras_fastdata.building.variables import SELF, Kept, Path, name_of
from keras_fastdata.engine.kinds import kind_of
from keras_fastdata.engine.told_state import (
    NOTHING_TOLD,
    StateLostError,
    current,
)
from keras_fastdata.engine.variable_parts import part_of
from keras_fastdata.workers.base import LACKS, ONCE

DIFFERS = (
    "`%s` differs between this process and worker processes, which call `%s` "
    "themselves. If your program has set it, make the object an attribute of "
    "the dataset."
)

_log = logging.getLogger("keras_fastdata")


class _Unchecked:
    """What this worker was told of, but has not compared yet."""

    told = NOTHING_TOLD
    places: dict[tuple[str, Path], tuple[str, str]] = {}
    builds = 0


def check_results(dataset: Dataset) -> None:
    """Logs results that differ from what this worker was told.

    To be called after each build, which may have called the functions for the
    first time. It compares after 1, 2, 4, 8, ... builds. If workers were told
    to be strict, it compares after each build.

    Raises:
        StateLostError: Such a result differs, and workers are strict.
    """
    unchecked = _Unchecked
    if unchecked.told is not (told := current()):
        unchecked.told, unchecked.builds = told, 0
        unchecked.places = {
            (module, path): kind
            for module, kinds in told.results.items()
            for path, kind in kinds.items()
        }
    unchecked.builds += 1
    is_due = not unchecked.builds & (unchecked.builds - 1)
    if not (is_due or told.is_strict):
        return
    said: list[Path] = []
    for module, path in sorted(unchecked.places, key=_depth, reverse=True):
        kind = unchecked.places[module, path]
        try:
            is_same = kind_of(_value_at(dataset, module, path)) == kind
        except Exception as error:
            raise_of_handler(error)
            # Nobody has called the function; or objects refuse.
            continue
        del unchecked.places[module, path]
        # A container differs with its items.
        if not is_same and path not in (other[: len(path)] for other in said):
            said.append(path)
            _tell_of(module, path)


def _depth(place: tuple[str, Path]) -> int:
    return len(place[1])


def _value_at(dataset: Dataset, module: str, path: Path) -> Any:
    """Returns the value of a variable in this worker."""
    owner: Any = sys.modules.get(module)
    if path[0] == SELF:
        owner, path = dataset, path[1:]
    elif is_main(module):  # its functions travel with their globals
        name, *rest = path
        function: Any = type(dataset).__getitem__
        owner, path = function.__globals__[name], tuple(rest)
    return functools.reduce(part_of, path, owner)


def _tell_of(module: str, path: Path) -> None:
    """Logs once for all workers that a result differs."""
    at = next(n for n, step in enumerate(path) if isinstance(step, Kept))
    names = [name_of(module, path), name_of(module, path[:at])]
    name, function = (each.removeprefix(".") for each in names)
    if _Unchecked.told.is_strict:
        raise StateLostError(DIFFERS % (name, function))
    _log.warning(DIFFERS, name, function, extra={ONCE: f"{LACKS}{name}"})
