"""Pickles arrays that share memory so that their copies share memory too.

A dataset may fill one array, and return others that are views of it. Pickle
would copy each of them. So an object is pickled a second time if the first time
has met arrays whose memory overlaps: each of these becomes a view of one array
of bytes.
"""

from __future__ import annotations

import bisect
import operator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_ALIGNMENT = 64  # bytes


class _Span(NamedTuple):
    """The memory of arrays that overlap."""

    low: int  # its address
    high: int  # the address behind its last byte
    array: npt.NDArray[np.uint8]  # an array over it


class SharedArrays:
    """Finds the arrays of one object that share memory, and reduces them."""

    def __init__(self) -> None:
        self._seen: list[npt.NDArray[Any]] = []
        self._spans: dict[int, list[_Span]] = {}  # by the id of the owner

    def find_spans(self) -> bool:
        """Returns whether any of the arrays seen so far share memory."""
        seen, self._seen = self._seen, []
        views: dict[int, list[npt.NDArray[Any]]] = {}
        owners: dict[int, npt.NDArray[Any]] = {}
        for array in seen:
            owner = owner_of(array)
            owners[id(owner)] = owner
            views.setdefault(id(owner), []).append(array)
        for key, owner in owners.items():
            if len(views[key]) > 1 and _has_plain_bytes(owner):
                self._spans[key] = _overlaps(owner, views[key])
        return any(self._spans.values())

    def reduce(self, array: npt.NDArray[Any]) -> tuple[Any, ...] | None:
        """Returns the pickle reduction of an array that shares memory.

        Returns `None` for other arrays, and before `find_spans`.
        """
        if not self._spans:
            self._seen.append(array)
            return None
        spans = self._spans.get(id(owner_of(array)))
        if not spans or not array.nbytes:
            return None
        low, high = np.lib.array_utils.byte_bounds(array)
        place = bisect.bisect_right(spans, low, key=operator.itemgetter(0))
        span = spans[place - 1] if place else spans[0]
        if array is span.array or low < span.low or high > span.high:
            return None
        return view_again, (
            span.array,
            array.__array_interface__["data"][0] - span.low,
            array.shape,
            array.dtype,
            array.strides,
            array.flags.writeable,
        )


def owner_of(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns the array that an array is a view of, or the array itself."""
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return owner


def _has_plain_bytes(owner: npt.NDArray[Any]) -> bool:
    """Returns whether an array's memory can be copied as bytes.

    Not that of objects and Python strings; a memory map is mapped again.
    """
    return (
        type(owner) is np.ndarray
        and not owner.dtype.hasobject
        and owner.dtype.char != "T"
        and owner.nbytes > 0
        and owner.flags.writeable
        and (owner.flags.c_contiguous or owner.flags.f_contiguous)
    )


def _overlaps(
    owner: npt.NDArray[Any], views: list[npt.NDArray[Any]]
) -> list[_Span]:
    """Returns the parts of an owner's memory that several views use.

    Leaves out parts that are far larger than the views together.
    """
    first, _ = np.lib.array_utils.byte_bounds(owner)
    memory = owner.reshape(-1, order="A").view(np.uint8)
    bounds = sorted(
        (*np.lib.array_utils.byte_bounds(view), view.nbytes, 1)
        for view in views
        if view.nbytes
    )
    merged: list[tuple[int, int, int, int]] = []
    for low, high, nbytes, count in bounds:
        if merged and low < merged[-1][1]:
            low, before, used, number = merged.pop()
            high, nbytes, count = max(high, before), used + nbytes, number + 1
        merged.append((low, high, nbytes, count))
    spans: list[_Span] = []
    for low, high, nbytes, count in merged:
        if count > 1 and high - low <= nbytes:
            start = max(first, low - low % _ALIGNMENT)
            raw = memory[start - first : high - first]
            spans.append(_Span(start, high, raw))
    return spans


def view_again(
    raw: npt.NDArray[np.uint8],
    start: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    strides: tuple[int, ...],
    writeable: bool,
) -> npt.NDArray[Any]:
    """Creates an array over `raw`, from byte `start` on."""
    array: npt.NDArray[Any] = np.ndarray(shape, dtype, raw, start, strides)
    if not writeable:
        array.flags.writeable = False
    return array
