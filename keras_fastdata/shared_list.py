"""`SharedList`: a long list that worker processes share."""

from __future__ import annotations

import array
import io
import operator
import pickle
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, SupportsIndex, TypeVar, overload

import numpy as np

from keras_fastdata._modules import is_main

T = TypeVar("T")


class SharedList(Sequence[T]):
    """An immutable list with one copy for all worker processes.

    Each worker process gets its own copy of every Python object in the
    dataset: a million strings take 60 MB and more, and half a second, in each
    worker. A `SharedList` keeps its items as the bytes of one array, and
    arrays are shared. Indexing makes the item again, in about a microsecond.

    Args:
        items: `str`, `bytes`, or other objects that can be pickled. They are
            read one by one: a generator is not turned into a list first.

    Raises:
        TypeError: `items` cannot be iterated over.
        Exception: Whatever `pickle` raises for an item.

    Example:

    >>> paths = SharedList(f"photos/{i}.jpg" for i in range(1000))
    >>> paths[998:]
    ['photos/998.jpg', 'photos/999.jpg']
    >>> SharedList(range(1000))
    SharedList([0, 1, 2, ...], length=1000)
    """

    def __init__(self, items: Iterable[T]) -> None:
        packed = bytearray()
        ends = array.array("q", [0])
        # Classes and functions of `__main__`, which workers do not import.
        # They are pickled with the dataset.
        self._named: list[Any] = []
        numbers: dict[Any, int] = {}
        for item in items:
            packed += _pack(item, numbers)
            ends.append(len(packed))
        self._named += numbers
        self._bytes = np.frombuffer(packed, np.uint8)
        self._ends = np.frombuffer(ends, np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: SupportsIndex) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: SupportsIndex | slice) -> T | list[T]:
        """Returns one item, or a plain list of the items in a slice.

        Raises:
            IndexError: There is no item at that index.
        """
        if isinstance(index, slice):
            return [self._item(i) for i in range(*index.indices(len(self)))]
        place = operator.index(index)
        if place < 0:
            place += len(self)
        if not 0 <= place < len(self):
            raise IndexError(f"Item {index} of a list of {len(self)}.")
        return self._item(place)

    def __iter__(self) -> Iterator[T]:
        return map(self._item, range(len(self)))

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:3]))
        more = ", ..." if len(self) > 3 else ""
        return f"SharedList([{shown}{more}], length={len(self)})"

    def _item(self, place: int) -> T:
        start, end = self._ends[place : place + 2].tolist()
        item: T = _unpack(self._bytes[start:end].tobytes(), self._named)
        return item


class _ListPickler(pickle.Pickler):
    """Pickles an item; stores classes and functions of `__main__` as numbers.

    A number replaces each of them: its index in `SharedList._named`.
    """

    def __init__(self, file: io.BytesIO, numbers: dict[Any, int]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._numbers = numbers

    def persistent_id(self, obj: Any) -> int | None:
        named = isinstance(obj, type | types.FunctionType)
        if not named or not is_main(obj.__module__):
            return None
        return self._numbers.setdefault(obj, len(self._numbers))


class _ListUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, named: list[Any]) -> None:
        super().__init__(file)
        self._named = named

    def persistent_load(self, number: int) -> Any:
        return self._named[number]


def _pack(item: Any, numbers: dict[Any, int]) -> bytes:
    if type(item) is str:
        # File names may hold bytes that are not UTF-8.
        return b"s" + item.encode("utf-8", "surrogatepass")
    if type(item) is bytes:
        return b"b" + item
    file = io.BytesIO()
    _ListPickler(file, numbers).dump(item)
    return b"p" + file.getvalue()


def _unpack(packed: bytes, named: list[Any]) -> Any:
    kind, rest = packed[:1], packed[1:]
    if kind == b"s":
        return rest.decode("utf-8", "surrogatepass")
    if kind == b"b":
        return rest
    return _ListUnpickler(io.BytesIO(rest), named).load()
