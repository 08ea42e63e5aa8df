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
import collections
import itertools
import operator
from collections.abc import Callable, Container
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_ALIGNMENT = 64  # bytes
_MOST_COMPARED = 64  # views of one part of the memory

_MOST_WORK = 1000  # of one comparison; after that, they count as sharing

_bounds = np.lib.array_utils.byte_bounds
_may_share_memory: Any = np.may_share_memory  # its type stub forbids a limit


class _Span(NamedTuple):
    """A part of the memory that arrays share."""

    low: int  # its address
    high: int  # the address behind its last byte
    start: int  # the address of the first byte in `memory`
    memory: Any  # an array of bytes, or the `bytearray` that has the memory


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
        views = [view for view in seen if _has_plain_bytes(view)]
        self._spans = _shared_parts(_candidates(views))
        if buffers := {
            id(b): b for b in map(_buffer_of, views) if b is not None
        }:
            pickled = memo()
            for key, buffer in buffers.items():
                if key in pickled:
                    self._add_buffer(buffer)
        return bool(self._spans)

    def _add_buffer(self, buffer: Any) -> None:
        """Has arrays be views of a buffer that is pickled itself."""
        low, high = _bounds(np.frombuffer(buffer, np.uint8))
        others = [each for each in self._spans if not low <= each.low < high]
        span = _Span(low, high, low, buffer)
        self._spans = sorted([*others, span], key=operator.itemgetter(0))

    def reduce(self, view: npt.NDArray[Any]) -> tuple[Any, ...] | None:
        """Returns the pickle reduction of an array that shares memory.

        Returns `None` for other arrays. Before `find_spans`, returns `None`, or
        an empty reduction for an array that would be copied item by item: that
        shares memory with itself, so the object is pickled again.
        """
        if not self._spans:
            self._seen.append(view)
            is_spread = _overlaps_itself(view) and _has_plain_bytes(view)
            return (view_again, ()) if is_spread else None
        if not _has_plain_bytes(view):
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
            view.__array_interface__["data"][0] - span.start,
            view.shape,
            view.dtype,
            view.strides,
            view.flags.writeable,
        )


def owner_of(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns the array that an array is a view of, or the array itself."""
    owner = array
    while True:
        base: Any = owner.base
        if type(base).__name__ == "DummyArray":  # of NumPy's `as_strided`
            base = base.base
        if not isinstance(base, np.ndarray):
            return owner
        owner = base


def _has_plain_bytes(view: npt.NDArray[Any]) -> bool:
    """Returns whether an array's memory can be copied as bytes.

    Not that of objects and Python strings; a memory map is mapped again.
    """
    return (
        type(owner_of(view)) is np.ndarray
        and not view.dtype.hasobject
        and view.dtype.char != "T"
        and view.nbytes > 0
    )


def _candidates(views: list[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
    """Returns the arrays that may share memory with others or with itself."""
    owners = [owner_of(view) for view in views]
    if any(owner.base is not None for owner in owners):
        return views  # NumPy does not tell whose the memory is
    counts = collections.Counter(map(id, owners))
    return [
        view
        for view, owner in zip(views, owners, strict=True)
        if counts[id(owner)] > 1 or _overlaps_itself(view)
    ]


def _overlaps_itself(view: npt.NDArray[Any]) -> bool:
    """Returns whether items of an array share memory, as in a broadcast."""
    if view.flags.c_contiguous or view.flags.f_contiguous:
        return False
    low, high = _bounds(view)
    return view.nbytes > high - low


def _buffer_of(view: npt.NDArray[Any]) -> Any:
    """Returns the `bytearray` or `array.array` that an array is a view of."""
    base: Any = owner_of(view).base
    if isinstance(base, memoryview):
        base = base.obj
    return base if type(base) in (bytearray, array.array) else None


def _shared_parts(views: list[npt.NDArray[Any]]) -> list[_Span]:
    """Returns the parts of the memory that several views use."""
    bounds = [_bounds(view) for view in views]
    order = sorted(range(len(views)), key=bounds.__getitem__)
    spans: list[_Span] = []
    group: list[npt.NDArray[Any]] = []
    low = high = 0
    for number in order:
        first, last = bounds[number]
        if group and first >= high:
            spans += _span_of(group, low, high)
            group = []
        if not group:
            low = high = first
        group.append(views[number])
        high = max(high, last)
    return [*spans, *(_span_of(group, low, high) if group else ())]


def _span_of(views: list[npt.NDArray[Any]], low: int, high: int) -> list[_Span]:
    """Returns the memory between two addresses, if views share it.

    Columns of a large table may share nothing. They are sent without the rest.
    """
    nbytes = sum(view.nbytes for view in views)
    if len(views) == 1 and nbytes <= high - low:
        return []
    is_sparse = nbytes < high - low
    if is_sparse and not (
        any(map(_overlaps_itself, views)) or _share_items(views)
    ):
        return []
    first = min(_bounds(owner_of(view))[0] for view in views)
    start = max(first, low - low % _ALIGNMENT)
    memory = np.asarray(_MemoryAccess(start, high - start, views))
    return [_Span(low, high, start, memory)]


def _share_items(views: list[npt.NDArray[Any]]) -> bool:
    """Returns whether any two of a few views have an item in common."""
    if len(views) > _MOST_COMPARED:
        return False
    return any(
        _may_share_memory(one, other, max_work=_MOST_WORK)
        for one, other in itertools.combinations(views, 2)
    )


class _MemoryAccess:
    """Gives NumPy access to memory that views keep alive."""

    def __init__(self, address: int, nbytes: int, views: Any) -> None:
        self._views = views
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
        }


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
