"""Looks into what cached functions keep (`functools.cache`, `lru_cache`)."""

from __future__ import annotations

import gc
from typing import Any

from keras_fastdata.building.assignments import is_by_value
from keras_fastdata.building.variables import (
    CONTAINERS,
    Kept,
    Path,
    Variable,
    is_key,
    is_users_object,
)

_MOST_RESULTS = 8  # of a function that does not cache data


def runs_of(cached: Any, module: str, path: Path) -> Variable:
    """Returns how often a cached function with few results has run.

    It is a variable that builds may assign.
    """

    def read() -> int:
        info = cached.cache_info()
        return int(info.misses) if info.currsize <= _MOST_RESULTS else -1

    there = (*path, Kept(0, is_count=True))
    return Variable(
        read, there, module, is_by_value(module, path), is_assigned=True
    )


def calls_of(cached: Any) -> list[tuple[Any, Any]]:
    """Returns the few calls that a cached function keeps, with their results.

    Only results that are containers or objects of the user's classes count. A
    function with more results caches data.

    Returns:
        Pairs of a call and its result. The call is a tuple that is the same in
        each process, or a number if that cannot be.
    """
    if cached.cache_info().currsize > _MOST_RESULTS:
        return []
    parts = [
        part for part in gc.get_referents(cached) if part is not vars(cached)
    ]
    # The dict from calls to results; where results are limited in number, it
    # holds them in links, and each call and its result are parts in a row.
    own = [part for part in parts if type(part) is dict]
    pairs: list[tuple[Any, Any]] = []
    if cached.cache_parameters()["maxsize"] is None:
        pairs += (pair for each in own for pair in each.items())
    else:
        own = [each for each in own if all(map(_is_link, each.values()))]
        calls = {id(call) for each in own for call in each}
        left = iter(parts)
        pairs += ((part, next(left)) for part in left if id(part) in calls)
    return [
        (_portable(call, number), result)
        for number, (call, result) in enumerate(pairs)
        if type(result) in CONTAINERS or is_users_object(result)
    ]


def _portable(call: Any, number: int) -> Any:
    """Returns a call as a tuple that is the same in each process, or `number`.

    A call is the argument itself, or a tuple of arguments, with a mark before
    those that have a keyword.
    """
    parts = call if type(call) is tuple else (call,)
    marked = tuple("=" if type(part) is object else part for part in parts)
    return marked if all(map(is_key, marked)) else number


def _is_link(value: Any) -> bool:
    """Returns whether a cache of limited size keeps a result in an object."""
    return type(value).__name__ == "_lru_list_elem"
