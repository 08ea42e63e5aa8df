"""Defines iterators that pass batches to TensorFlow without a copy.

`tf.data.Dataset.from_generator` requests each batch from a thread of its own
and copies it. These iterators fetch batches in the thread that trains, and do
not copy aligned arrays. An argument of a `tf.function` may say what tensors it
stands for, and their type, which is the same for every batch:

    train_function(iterator)
        Batches.__next__       where Keras asks for the next batch itself
        __tf_tracing_type__    a `TensorBatch`, which stands for its tensors
        -> inside, a step gets these, nested

With `steps_per_execution` Keras passes the iterator on. The iterator stands for
its next batch, fetched when the call begins. The graph requests further batches
one by one (`tf.py_function`). A train function of the user's own may do
anything with an iterator, and so gets one of TensorFlow's.

Imported only where TensorFlow is the Keras backend.
"""

from __future__ import annotations

import abc
import collections
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from keras_fastdata.keras_bridge.batches import IteratorBatches
from keras_fastdata.memory.arena import ALIGNMENT, address_of, aligned_empty
from keras_fastdata.memory.leases import Bytes

# Larger memory would come fresh from the kernel each time, which is slow.
_KEPT_BYTES = 1 << 20
_KEPT = 4  # pieces of memory

_numbers = itertools.count(1)
_living: weakref.WeakValueDictionary[int, DirectIterator] = (
    weakref.WeakValueDictionary()
)


class TensorSource:
    """Converts batches to tensors."""

    def __init__(self, batches: Iterator[Any], element_spec: Any) -> None:
        # The nested `tf.TensorSpec`s of a batch.
        self.element_spec = element_spec
        self._batches = batches
        self._specs = tf.nest.flatten(element_spec)
        self._shapes: list[Any] = [None] * len(self._specs)  # seen last
        self._copies = _Copies()

    def fetch(self) -> list[tf.Tensor]:
        """Returns the tensors of the next batch, or raises `StopIteration`."""
        try:
            batch = next(self._batches)
        except tf.errors.OutOfRangeError as error:
            raise RuntimeError(
                f"The dataset raised {type(error).__name__}; its epoch is not "
                f"over: {error.message}"
            ) from error
        try:
            return self._tensors_of(batch)
        except Exception as error:
            if isinstance(self._batches, IteratorBatches):
                self._batches.name_batch(error)
            raise

    def _tensors_of(self, batch: Any) -> list[tf.Tensor]:
        _check_structure(batch, self.element_spec)
        tensors = []
        leaves = zip(tf.nest.flatten(batch), self._specs, strict=True)
        for place, (leaf, spec) in enumerate(leaves):
            tensor = _tensor(leaf, spec, self._copies)
            shape = tensor.shape
            if shape != self._shapes[place]:
                _check_shape(shape, spec)
                self._shapes[place] = shape
            tensors.append(tensor)
        return tensors

    def fetch_in_graph(self) -> list[tf.Tensor]:
        """Returns the next tensors, or raises `tf.errors.OutOfRangeError`."""
        try:
            return self.fetch()
        except StopIteration:
            raise tf.errors.OutOfRangeError(
                None, None, "The data has ended."
            ) from None

    def end(self) -> None:
        """Discards all remaining batches."""
        self._batches = iter(())


class TensorBatch:
    """A batch that can be passed to a `tf.function` as one argument."""

    __slots__ = ("_type", "tensors")

    def __init__(self, kind: _BatchType, tensors: list[tf.Tensor]) -> None:
        self._type = kind
        self.tensors = tensors

    def __tf_tracing_type__(self, _: Any) -> _BatchType:
        return self._type


class TensorBatches(Iterator[Any]):
    """An iterator whose batches Keras requests outside of a `tf.function`.

    If `is_eager`, Keras needs nested tensors, not a `TensorBatch`.
    """

    def __init__(
        self, source: TensorSource, is_eager: Callable[[], bool]
    ) -> None:
        self._source = source
        self._is_eager = is_eager
        self._type = _BatchType(source.element_spec)

    def __next__(self) -> Any:
        # Keras takes no StopIteration from here.
        tensors = self._source.fetch_in_graph()
        if self._is_eager():
            return tf.nest.pack_sequence_as(self._source.element_spec, tensors)
        return TensorBatch(self._type, tensors)


class DirectIterator(tf.data.Iterator):  # type: ignore[misc]
    """The iterator that Keras passes to a `tf.function`."""

    def __init__(
        self, source: TensorSource, put_aside: Callable[[BaseException], bool]
    ) -> None:
        self._source = source
        self._type = _IteratorType(source.element_spec)
        self._put_aside = put_aside
        number = next(_numbers)
        with tf.device("CPU:0"):
            self._number = tf.constant(number, tf.int64)
        _living[number] = self

    @property
    def element_spec(self) -> Any:
        return self._type.element_spec

    @property
    def _type_spec(self) -> Any:
        raise TypeError(
            "An iterator over a FastPyDataset is no composite tensor: it can "
            "be passed to a tf.function, but not returned from one."
        )

    def __tf_tracing_type__(self, _: Any) -> _IteratorType:
        return self._type

    def __iter__(self) -> DirectIterator:
        return self

    def __next__(self) -> Any:
        tensors = self._source.fetch()
        return tf.nest.pack_sequence_as(self.element_spec, tensors)

    def get_next(self) -> Any:
        tensors = self._source.fetch_in_graph()
        return tf.nest.pack_sequence_as(self.element_spec, tensors)

    def get_next_as_optional(self) -> Any:
        try:
            return tf.experimental.Optional.from_value(next(self))
        except StopIteration:
            return tf.experimental.Optional.empty(self.element_spec)

    def tensors(self) -> list[tf.Tensor]:
        """Returns this iterator's number in `_living`, and the next tensors."""
        return [self._number, *self._source.fetch_in_graph()]

    def try_to_fetch(self) -> list[Any]:
        """Returns whether there is a next batch, and the batch's tensors."""
        try:
            return [True, *self._source.fetch()]
        except StopIteration:
            pass
        except BaseException as error:
            self._source.end()
            if not self._put_aside(error):
                raise
        return [False, *map(_nothing, self._type.specs)]


class _Type(tf.types.experimental.TraceType):  # type: ignore[misc]
    """The trace type of an argument that represents a batch's tensors."""

    _heads: tuple[tf.TensorSpec, ...] = ()  # of tensors before the batch's

    def __init__(self, element_spec: Any) -> None:
        # The nested `tf.TensorSpec`s of a batch.
        self.element_spec = element_spec
        self._key = repr(element_spec)
        self.specs = tf.nest.flatten(element_spec)  # the same as a flat list
        self._flat = [*self._heads, *self.specs]

    def is_subtype_of(self, other: Any) -> bool:
        return self._is_like(other) and all(
            mine.is_subtype_of(theirs)
            for mine, theirs in zip(self._flat, other._flat, strict=True)
        )

    def most_specific_common_supertype(
        self, others: Sequence[Any]
    ) -> _Type | None:
        if not all(map(self._is_like, others)):
            return None
        specs = [
            spec.most_specific_common_supertype(theirs)
            for spec, *theirs in zip(
                self._flat, *(other._flat for other in others), strict=True
            )
        ]
        if None in specs:
            return None
        of_batch = specs[len(self._heads) :]
        return type(self)(tf.nest.pack_sequence_as(self.element_spec, of_batch))

    def placeholder_value(self, placeholder_context: Any) -> Any:
        return self._traced(
            [spec.placeholder_value(placeholder_context) for spec in self._flat]
        )

    def from_tensors(self, tensors: Iterator[tf.Tensor]) -> Any:
        return self._traced([spec.from_tensors(tensors) for spec in self._flat])

    @abc.abstractmethod
    def _traced(self, tensors: list[tf.Tensor]) -> Any:
        """Returns the argument that the traced function gets."""

    def flatten(self) -> list[Any]:
        return list(self._flat)

    def cast(self, value: Any, _: Any) -> Any:
        return value

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def _is_like(self, other: Any) -> bool:
        if type(other) is not type(self):
            return False
        try:
            tf.nest.assert_same_structure(self.element_spec, other.element_spec)
        except (TypeError, ValueError):
            return False
        return True


class _BatchType(_Type):
    """The trace type of a `TensorBatch`."""

    def to_tensors(self, value: Any) -> list[tf.Tensor]:
        if isinstance(value, TensorBatch):
            return value.tensors
        # TensorFlow traces a function that makes variables within another.
        tensors: list[tf.Tensor] = tf.nest.flatten(value)
        return tensors

    def _traced(self, tensors: list[tf.Tensor]) -> Any:
        return tf.nest.pack_sequence_as(self.element_spec, tensors)


class _IteratorType(_Type):
    """The trace type of a `DirectIterator`, with the next batch's tensors."""

    _heads = (tf.TensorSpec((), tf.int64),)  # of the iterator's number

    def to_tensors(self, value: DirectIterator | _Traced) -> list[tf.Tensor]:
        return value.tensors()

    def _traced(self, tensors: list[tf.Tensor]) -> _Traced:
        return _Traced(self, tensors)


class _Traced:
    """The form of a `DirectIterator` inside a traced `tf.function`."""

    def __init__(
        self, kind: _IteratorType, tensors: Sequence[tf.Tensor]
    ) -> None:
        self.element_spec = kind.element_spec
        self._type = kind
        self._number, *first = tensors
        self._tensors = tuple(tensors)
        self._first: list[tf.Tensor] | None = first

    def tensors(self) -> list[tf.Tensor]:
        """Returns the tensors that represent this iterator in a graph."""
        return list(self._tensors)

    def __tf_tracing_type__(self, _: Any) -> _IteratorType:
        return self._type

    def __tf_flatten__(self) -> tuple[Any, tuple[tf.Tensor, ...]]:
        return self._type, self._tensors

    @classmethod
    def __tf_unflatten__(
        cls, kind: _IteratorType, tensors: tuple[tf.Tensor, ...]
    ) -> _Traced:
        return cls(kind, tensors)

    def get_next_as_optional(self) -> Any:
        optional = tf.experimental.Optional
        first, self._first = self._first, None
        if first is not None:
            return optional.from_value(self._packed(first))
        found, *tensors = self._fetch()
        return tf.cond(
            found,
            lambda: optional.from_value(self._packed(tensors)),
            lambda: optional.empty(self.element_spec),
        )

    def _fetch(self) -> list[tf.Tensor]:
        with tf.device("CPU:0"):
            fetched: list[tf.Tensor] = tf.py_function(
                lambda number: _living[int(number)].try_to_fetch(),
                [self._number],
                [tf.bool, *(spec.dtype for spec in self._type.specs)],
            )
        fetched[0].set_shape(())
        for tensor, spec in zip(fetched[1:], self._type.specs, strict=True):
            tensor.set_shape(spec.shape)
        return fetched

    def _packed(self, tensors: list[tf.Tensor]) -> Any:
        return tf.nest.pack_sequence_as(self.element_spec, tensors)


class _Copy(weakref.ref[Any]):
    """A weak reference to a copied array, and the memory of that array."""

    __slots__ = ("root",)
    root: Bytes


class _Copies:
    """Makes aligned copies of arrays, and reuses their memory."""

    def __init__(self) -> None:
        self._free: collections.deque[Bytes] = collections.deque(maxlen=_KEPT)
        self._leased: dict[int, _Copy] = {}
        # TensorFlow drops copies in any thread; see memory/arena.py.
        self._returned: collections.deque[_Copy] = collections.deque()

    def of(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if array.nbytes < _KEPT_BYTES:
            copy = aligned_empty(array.shape, array.dtype)
        else:
            root = self._take(array.nbytes)
            copy = root[: array.nbytes].view(array.dtype).reshape(array.shape)
            leased = _Copy(copy, self._returned.append)
            leased.root = root
            self._leased[id(leased)] = leased
        np.copyto(copy, array)
        return copy

    def _take(self, nbytes: int) -> Bytes:
        while self._returned:
            returned = self._returned.popleft()
            del self._leased[id(returned)]
            self._free.append(returned.root)
        for place, root in enumerate(self._free):
            if nbytes <= root.nbytes <= 2 * nbytes:
                del self._free[place]
                return root
        return aligned_empty(nbytes, np.uint8)


def strings_as_tensors(leaf: Any) -> Any:
    """Converts an array of strings to a TensorFlow tensor.

    Returns any other leaf unchanged. Keras does not know the type of such an
    array.
    """
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OSTU":
        return tf.constant(leaf.tolist(), shape=leaf.shape, dtype=tf.string)
    return leaf


def _tensor(leaf: Any, spec: tf.TensorSpec, copies: _Copies) -> tf.Tensor:
    dtype = spec.dtype.as_numpy_dtype
    if isinstance(leaf, np.ndarray):
        array = leaf if leaf.dtype == dtype else leaf.astype(dtype)
    elif isinstance(leaf, tf.Tensor) and leaf.dtype == spec.dtype:
        return leaf
    else:
        array = np.asarray(leaf, dtype)
    if spec.dtype == tf.string:
        return strings_as_tensors(array)
    if (
        not array.flags.c_contiguous
        or not array.flags.writeable
        or address_of(array) % ALIGNMENT
    ):
        array = copies.of(array)
    try:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    except (BufferError, TypeError, tf.errors.InvalidArgumentError):
        return tf.convert_to_tensor(array)  # only NumPy knows its type


def _check_structure(batch: Any, element_spec: Any) -> None:
    try:
        tf.nest.assert_same_structure(element_spec, batch)
    except (TypeError, ValueError):
        found = tf.nest.map_structure(lambda x: tuple(np.shape(x)), batch)
        wanted = tf.nest.map_structure(lambda s: tuple(s.shape), element_spec)
        raise ValueError(
            f"A batch has the shapes {found} where the first batches had "
            f"{wanted}, in another structure; TensorFlow's `fit` takes no "
            "other. Return the same nested tuples and dicts for every index."
        ) from None


def _check_shape(shape: tf.TensorShape, spec: tf.TensorSpec) -> None:
    if not spec.shape.is_compatible_with(shape):
        raise ValueError(
            f"A batch has an array of shape {tuple(shape)} where those of the "
            f"first batches had {tuple(spec.shape)}; TensorFlow's `fit` takes "
            "no other. Return arrays of that shape, up to dimensions that "
            "differ between batches 0 and 1 (None)."
        )


def _nothing(spec: tf.TensorSpec) -> tf.Tensor:
    """Returns a tensor of zeros, as a placeholder for a missing batch."""
    return tf.zeros([size or 0 for size in spec.shape], spec.dtype)
