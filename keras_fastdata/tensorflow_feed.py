"""Batches for TensorFlow's `fit`, straight from Python.

`tf.data.Dataset.from_generator` asks for each batch from a thread of its own
and copies it. Keras passes its iterator to a `tf.function`; and whatever is
passed to one may say what tensors it stands for. Ours stands for its next
batch, which is fetched as the call begins, in the thread that trains:

    train_function(iterator)
        __tf_tracing_type__    a type that is the same for every batch
        to_tensors             the next batch; what is aligned is not copied
        -> inside, get_next() is that batch

With `steps_per_execution` a call asks for further batches, which its graph
fetches one by one (`tf.py_function`).

Imported only where TensorFlow is the Keras backend.
"""

from __future__ import annotations

import collections
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from keras_fastdata.memory.arena import (
    ALIGNMENT,
    Bytes,
    address_of,
    aligned_empty,
)

# What is larger is fresh from the kernel each time, unless it is kept.
_KEPT_BYTES = 1 << 20
_KEPT = 4  # pieces of memory

_numbers = itertools.count(1)
_living: weakref.WeakValueDictionary[int, DirectIterator] = (
    weakref.WeakValueDictionary()
)


def feeds_directly(element_spec: Any) -> bool:
    """Whether batches of such a structure can take this way."""
    specs = tf.nest.flatten(element_spec)
    return all(type(spec) is tf.TensorSpec for spec in specs)


def redirect(
    dataset: tf.data.Dataset,
    batches: Callable[[], Iterator[Any]],
    fail: Callable[[BaseException], None],
) -> tf.data.Dataset:
    """Has a dataset iterated over in Python take our way.

    What makes a graph of it, as the strategies of `tf.distribute` do, finds
    the dataset that it was.

    Args:
        dataset: Has those batches.
        batches: Makes an iterator over them, for each walk.
        fail: Told of an exception where it cannot be raised.
    """
    plain: Any = type(dataset)
    redirected = _redirected(plain)
    dataset.__class__ = redirected
    object.__setattr__(dataset, "_walk", (batches, fail))
    return dataset


@functools.cache
def _redirected(plain: type) -> type:
    class Redirected(plain):  # type: ignore[misc]
        def __iter__(self) -> Any:
            if tf.inside_function() or not tf.executing_eagerly():
                return super().__iter__()
            batches, fail = self._walk
            return DirectIterator(batches(), self.element_spec, fail)

    return Redirected


class DirectIterator(tf.data.Iterator):  # type: ignore[misc]
    """What Keras passes to its train function."""

    def __init__(
        self,
        batches: Iterator[Any],
        element_spec: Any,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._batches = batches
        self._type = _Type(element_spec)
        self._shapes: list[Any] = [None] * len(self._type.specs)  # seen last
        self._fail = fail
        self._copies = _Copies()
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

    def __tf_tracing_type__(self, _: Any) -> _Type:
        return self._type

    def __iter__(self) -> DirectIterator:
        return self

    def __next__(self) -> Any:
        return tf.nest.pack_sequence_as(self.element_spec, self.fetch())

    def get_next(self) -> Any:
        try:
            return next(self)
        except StopIteration:
            raise _end() from None

    def get_next_as_optional(self) -> Any:
        try:
            return tf.experimental.Optional.from_value(next(self))
        except StopIteration:
            return tf.experimental.Optional.empty(self.element_spec)

    def fetch(self) -> list[tf.Tensor]:
        """The tensors of the next batch.

        Raises:
            StopIteration: There is none.
        """
        try:
            batch = next(self._batches)
        except tf.errors.OutOfRangeError as error:
            raise RuntimeError(
                f"The dataset raised {type(error).__name__}; its epoch is not "
                f"over: {error.message}"
            ) from error
        tf.nest.assert_same_structure(self.element_spec, batch)
        leaves = tf.nest.flatten(batch)
        tensors = []
        for place, leaf in enumerate(leaves):
            spec = self._type.specs[place]
            tensor = _tensor(leaf, spec, self._copies)
            shape = tensor.shape
            if shape != self._shapes[place]:
                _check_shape(shape, spec)
                self._shapes[place] = shape
            tensors.append(tensor)
        return tensors

    def tensors(self) -> list[tf.Tensor]:
        """Those of the next batch, and the iterator's number."""
        try:
            return [self._number, *self.fetch()]
        except StopIteration:
            raise _end() from None

    def try_to_fetch(self) -> list[Any]:
        """Whether there is a next batch, and its tensors."""
        try:
            return [True, *self.fetch()]
        except StopIteration:
            pass
        except BaseException as error:
            self._batches = iter(())
            self._fail(error)
        return [False, *map(_nothing, self._type.specs)]


class _Type(tf.types.experimental.TraceType):  # type: ignore[misc]
    """What a `tf.function` knows of an iterator when it is traced."""

    def __init__(self, element_spec: Any) -> None:
        self.element_spec = element_spec
        self._key = repr(element_spec)
        self.specs = tf.nest.flatten(element_spec)
        self._flat = [tf.TensorSpec((), tf.int64), *self.specs]

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
        return _Type(tf.nest.pack_sequence_as(self.element_spec, specs[1:]))

    def placeholder_value(self, placeholder_context: Any) -> _Traced:
        return _Traced(
            self,
            [
                spec.placeholder_value(placeholder_context)
                for spec in self._flat
            ],
        )

    def to_tensors(self, value: DirectIterator | _Traced) -> list[tf.Tensor]:
        return value.tensors()

    def from_tensors(self, tensors: Iterator[tf.Tensor]) -> _Traced:
        return _Traced(
            self, [spec.from_tensors(tensors) for spec in self._flat]
        )

    def flatten(self) -> list[Any]:
        return list(self._flat)

    def cast(self, value: Any, _: Any) -> Any:
        return value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Type) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def _is_like(self, other: Any) -> bool:
        if not isinstance(other, _Type):
            return False
        try:
            tf.nest.assert_same_structure(self.element_spec, other.element_spec)
        except (TypeError, ValueError):
            return False
        return True


class _Traced:
    """The iterator inside a `tf.function` that is being traced."""

    def __init__(self, kind: _Type, tensors: Sequence[tf.Tensor]) -> None:
        self.element_spec = kind.element_spec
        self._type = kind
        self._number, *first = tensors
        self._tensors = tuple(tensors)
        self._first: list[tf.Tensor] | None = first

    def tensors(self) -> list[tf.Tensor]:
        """The tensors it stands for."""
        return list(self._tensors)

    def __tf_tracing_type__(self, _: Any) -> _Type:
        return self._type

    def __tf_flatten__(self) -> tuple[Any, tuple[tf.Tensor, ...]]:
        return self._type, self._tensors

    @classmethod
    def __tf_unflatten__(
        cls, kind: _Type, tensors: tuple[tf.Tensor, ...]
    ) -> _Traced:
        return cls(kind, tensors)

    def get_next(self) -> Any:
        first, self._first = self._first, None
        if first is None:
            found, *first = self._fetch()
            check = tf.debugging.Assert(found, ["The data has ended."])
            with tf.control_dependencies([check]):
                first = [tf.identity(tensor) for tensor in first]
        return self._packed(first)

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

    def __next__(self) -> Any:
        return self.get_next()

    def __iter__(self) -> _Traced:
        return self

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
    """A weak reference to a copy that knows whose memory it has."""

    __slots__ = ("root",)
    root: Bytes


class _Copies:
    """Aligned copies of arrays, in memory that is used again and again."""

    def __init__(self) -> None:
        self._free: collections.deque[Bytes] = collections.deque(maxlen=_KEPT)
        self._lent: dict[int, _Copy] = {}
        # TensorFlow drops copies in any thread; see memory/arena.py.
        self._returned: collections.deque[_Copy] = collections.deque()

    def of(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if array.nbytes < _KEPT_BYTES:
            copy = aligned_empty(array.shape, array.dtype)
        else:
            root = self._take(array.nbytes)
            copy = root[: array.nbytes].view(array.dtype).reshape(array.shape)
            lent = _Copy(copy, self._returned.append)
            lent.root = root
            self._lent[id(lent)] = lent
        np.copyto(copy, array)
        return copy

    def _take(self, nbytes: int) -> Bytes:
        while self._returned:
            returned = self._returned.popleft()
            del self._lent[id(returned)]
            self._free.append(returned.root)
        for place, root in enumerate(self._free):
            if nbytes <= root.nbytes <= 2 * nbytes:
                del self._free[place]
                return root
        return aligned_empty(nbytes, np.uint8)


def _tensor(leaf: Any, spec: tf.TensorSpec, copies: _Copies) -> tf.Tensor:
    dtype = spec.dtype.as_numpy_dtype
    if isinstance(leaf, np.ndarray):
        array = leaf if leaf.dtype == dtype else leaf.astype(dtype)
    elif tf.is_tensor(leaf):
        return leaf
    else:
        array = np.asarray(leaf, dtype)
    if spec.dtype == tf.string:
        return tf.constant(array.tolist(), tf.string, array.shape)
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


def _check_shape(shape: tf.TensorShape, spec: tf.TensorSpec) -> None:
    if not spec.shape.is_compatible_with(shape):
        raise ValueError(
            f"A batch has an array of shape {tuple(shape)} where those of the "
            f"first batches had {tuple(spec.shape)}; TensorFlow's `fit` takes "
            "no other. Return arrays of that shape, up to dimensions that "
            "differ between batches 0 and 1 (None)."
        )


def _nothing(spec: tf.TensorSpec) -> tf.Tensor:
    """A tensor that nobody looks at."""
    return tf.zeros([size or 0 for size in spec.shape], spec.dtype)


def _end() -> tf.errors.OutOfRangeError:
    return tf.errors.OutOfRangeError(None, None, "The data has ended.")
