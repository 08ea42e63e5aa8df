"""Pickles arrays that share memory so that their copies share memory too.

A dataset may fill one array, and return others that are views of it. Pickle
would copy each of them. So an object is pickled a second time if the first time
has met arrays whose memory overlaps: each of these becomes a view of one array
of bytes. The memory may also belong to a tensor of PyTorch (see tensors.py), or
to a `bytearray`. That is pickled itself, and arrays become views of its copy.
"""

from __future__ import annotations

import array
import bisect
import dataclasses
import operator
from collections.abc import Callable, Container
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_ALIGNMENT = 64  # bytes

_bounds = np.lib.array_utils.byte_bounds


class _Span(NamedTuple):
    """The memory of arrays that overlap."""

    low: int  # its address
    high: int  # the address behind its last byte
    memory: Any  # an array of bytes over it, or the `bytearray` that has it


@dataclasses.dataclass
class _SharedBlock:
    """A block of memory, with the arrays that lie in it."""

    owner: npt.NDArray[Any]  # an array over all of it
    views: list[npt.NDArray[Any]] = dataclasses.field(default_factory=list)


class SharedArrays:
    """Finds the arrays of one object that share memory, and reduces them."""

    def __init__(self) -> None:
        # They stay alive, so that no two have one address.
        self._seen: list[npt.NDArray[Any]] = []
        self._spans: list[_Span] = []  # in the order of addresses

    def find_spans(self, memo: Callable[[], Container[int]]) -> bool:
        """Returns whether any of the arrays seen so far share memory.

        `memo` returns the ids of the objects that were pickled.
        """
        seen, self._seen = self._seen, []
        pickled: Container[int] | None = None
        spans: list[_Span] = []
        for block in _blocks_of(seen):
            buffer = _buffer_of(block.owner)
            if buffer is not None and pickled is None:
                pickled = memo()
            if pickled is not None and id(buffer) in pickled:
                low, high = _bounds(np.frombuffer(buffer, np.uint8))
                spans.append(_Span(low, high, buffer))
            elif len(block.views) > 1:
                spans += _overlaps(block)
        self._spans = sorted(spans, key=operator.itemgetter(0))
        return bool(spans)

    def reduce(self, view: npt.NDArray[Any]) -> tuple[Any, ...] | None:
        """Returns the pickle reduction of an array that shares memory.

        Returns `None` for other arrays, and before `find_spans`.
        """
        if not self._spans:
            self._seen.append(view)
            return None
        if not view.nbytes or view.dtype.hasobject:
            return None
        low, high = _bounds(view)
        place = bisect.bisect_right(
            self._spans, low, key=operator.itemgetter(0)
        )
        span = self._spans[max(0, place - 1)]
        if view is span.memory or low < span.low or high > span.high:
            return None
        return view_again, (
            span.memory,
            view.__array_interface__["data"][0] - span.low,
            view.shape,
            view.dtype,
            view.strides,
            view.flags.writeable,
        )


def owner_of(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns the array that an array is a view of, or the array itself."""
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return owner


def _blocks_of(seen: list[npt.NDArray[Any]]) -> list[_SharedBlock]:
    """Returns the blocks of memory that can be copied as bytes."""
    blocks: dict[int, _SharedBlock] = {}
    for view in seen:
        owner = owner_of(view)
        blocks.setdefault(id(owner), _SharedBlock(owner)).views.append(view)
    found = [each for each in blocks.values() if _has_plain_bytes(each.owner)]
    if all(each.owner.base is None for each in found):
        return found
    # NumPy does not tell whose the memory is: others may lie in it.
    places = {id(each): _bounds(each.owner) for each in found}
    found.sort(key=lambda each: (places[id(each)][0], -places[id(each)][1]))
    outer: list[_SharedBlock] = []
    for each in found:
        if outer and places[id(each)][1] <= places[id(outer[-1])][1]:
            outer[-1].views += each.views
        else:
            outer.append(each)
    return outer


def _buffer_of(owner: npt.NDArray[Any]) -> Any:
    """Returns the `bytearray` or `array.array` that an array is a view of."""
    base: Any = owner.base
    if isinstance(base, memoryview):
        base = base.obj
    return base if type(base) in (bytearray, array.array) else None


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
    )


def _overlaps(block: _SharedBlock) -> list[_Span]:
    """Returns the parts of a block that several views use.

    Leaves out parts that are far larger than the views together.
    """
    owner = block.owner
    if not (owner.flags.c_contiguous or owner.flags.f_contiguous):
        return []
    first, _ = _bounds(owner)
    memory = owner.reshape(-1, order="A").view(np.uint8)
    bounds = sorted(
        (*_bounds(view), view.nbytes, 1) for view in block.views if view.nbytes
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
    raw: Any,
    start: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    strides: tuple[int, ...],
    writeable: bool,
) -> npt.NDArray[Any]:
    """Creates an array over the buffer `raw`, from byte `start` on."""
    array: npt.NDArray[Any] = np.ndarray(shape, dtype, raw, start, strides)
    if not writeable:
        array.flags.writeable = False
    return array
