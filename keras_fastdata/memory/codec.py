"""Writes a nested batch into a slot, and reads it back as views of the slot.

A layout describes the structure of a plain batch; a pickle (protocol 5)
describes other batches. The bytes of each array lie in the slot, on a 64-byte
boundary; those of an array that `self.empty` placed there are not copied. Dense
tensors become NumPy arrays, because a worker uses no device. Sparse and ragged
tensors are split into arrays, and rebuilt.

`encode` runs in a worker, `decode` in the training process.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, SupportsIndex

import cloudpickle
import numpy as np
import numpy.typing as npt

from keras_fastdata._modules import is_main, loaded
from keras_fastdata.errors import LoaderError
from keras_fastdata.memory import class_refs, layout
from keras_fastdata.memory.arena import (
    USUAL_STRIDE,
    Segment,
    address_of,
    aligned_copy,
    aligned_empty,
    count_of,
    round_up,
)
from keras_fastdata.memory.leases import Bytes

# Smaller arrays are copied on delivery, so that a consumer who keeps the labels
# does not keep the slot with the images. Such a copy costs about 2 us.
SMALL_BYTES = 32 * 1024

# The arrays of a batch up to this size are copied together.
TINY_BYTES = 4 * 1024

_EXTENT = struct.Struct("<QQ")  # start in the slot, number of bytes


class Encoded(NamedTuple):
    """Describes a batch in a slot, so that `decode` can read the batch."""

    # The nested structure, without the arrays' bytes: a packed layout, or a
    # pickle.
    structure: bytes
    # The position of each array's bytes: packed (start, nbytes) pairs.
    extents: bytes
    used: int  # bytes of the slot in use
    # Whether the dataset still holds an array that `self.empty` made in this
    # slot, so that the slot must not be used again.
    retained: bool


class Writer(Protocol):
    """The methods that `encode` needs to store the arrays of a batch.

    A write returns the location and the byte count.
    """

    def write(self, source: Bytes) -> tuple[int, int]: ...

    def write_all(
        self, arrays: list[npt.NDArray[Any]]
    ) -> list[tuple[int, int]]: ...

    def allocate_copy(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]: ...

    def copy_retained(self, extents: list[tuple[int, int]]) -> bool: ...

    @property
    def used(self) -> int: ...


class Lender(Protocol):
    """The methods of an arena that `decode` needs to lease slots."""

    @property
    def segment(self) -> Roots:
        """The memory of the slots."""

    @property
    def crowded(self) -> bool:
        """Whether the consumer holds the maximum number of slots or more."""

    def lease(self, slot: int, nbytes: int) -> Bytes:
        """Leases a slot, and returns an array over the slot's first bytes."""

    def free(self, slot: int) -> None:
        """Frees a slot that was taken and is not leased."""


class Roots(Protocol):
    """The method of a segment that returns arrays over slots."""

    def root(self, slot: int, start: int, nbytes: int) -> Bytes:
        """Returns a new array over part of a slot."""


class SlotWriter:
    """Writes one batch into one slot, in the worker.

    If it is `in_place`, `empty` may return memory of the slot.
    """

    def __init__(self, segment: Segment, slot: int, in_place: bool) -> None:
        self._segment = segment
        self._slot = slot
        self._in_place = in_place
        self._used = 0
        # Arrays that `empty` made: (weak reference, start, nbytes).
        self._made: list[tuple[weakref.ref[Any], int, int]] = []
        # Address of the slot; 0 until an array over it was handed out.
        self._address = 0
        self._lock = threading.Lock()  # `__getitem__` may have threads

    def empty(
        self,
        shape: SupportsIndex | Sequence[SupportsIndex],
        dtype: npt.DTypeLike = "float32",
    ) -> npt.NDArray[Any]:
        """Returns an uninitialized array, in the slot if possible."""
        kind = np.dtype(dtype)
        nbytes = count_of(shape) * kind.itemsize
        if not self._in_place or kind.hasobject or nbytes < SMALL_BYTES:
            return aligned_empty(shape, kind)
        root, start = self._allocate(nbytes)
        self._note_made(root, start)
        return root.view(kind).reshape(shape)

    def _note_made(self, root: Bytes, start: int) -> None:
        """Remembers memory of the slot that `empty` returns, with its place."""
        self._address = address_of(root) - start
        self._made.append((weakref.ref(root), start, root.nbytes))

    def write(self, source: Bytes) -> tuple[int, int]:
        """Copies bytes into the slot unless they are already in the slot."""
        nbytes = source.nbytes
        if self._address:
            start = address_of(source) - self._address
            if start >= 0 and start + nbytes <= self._used:
                return start, nbytes
        target, start = self._allocate(nbytes)
        target[:] = source
        return start, nbytes

    def write_all(
        self, arrays: list[npt.NDArray[Any]]
    ) -> list[tuple[int, int]]:
        """Copies arrays into the slot, tiny arrays in a single operation."""
        several = len(arrays) > 1
        if not several or sum([a.nbytes for a in arrays]) > TINY_BYTES:
            return [self.write(octets(array, self)) for array in arrays]
        parts: list[bytes] = []
        lies: list[tuple[int, int]] = []
        end = 0
        for array in arrays:
            part = array.tobytes("A")
            lies.append((end, len(part)))
            parts.append(part.ljust(round_up(len(part)), b"\0"))
            end += len(parts[-1])
        target, first = self._allocate(end)
        target[:] = np.frombuffer(b"".join(parts), np.uint8)
        return [(first + start, nbytes) for start, nbytes in lies]

    def allocate_copy(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Copies `array` into the slot, and returns the contiguous copy."""
        target, start = self._allocate(array.nbytes)
        self._address = address_of(target) - start
        copy = target.view(array.dtype).reshape(array.shape)
        np.copyto(copy, array)
        return copy

    def copy_retained(self, extents: list[tuple[int, int]]) -> bool:
        """Copies arrays that the dataset has kept and could overwrite.

        Call it after the batch has died. An array of `empty` that is still
        alive is kept by the dataset. Its bytes are copied to another part of
        the slot, and `extents` then refers to the copy. Returns whether there
        was such an array.
        """
        retained = False
        for reference, start, nbytes in self._made:
            if reference() is None:
                continue
            retained = True
            target, moved = self._allocate(nbytes)
            target[:] = self._segment.root(self._slot, start, nbytes)
            for number, (offset, size) in enumerate(extents):
                if start <= offset and offset + size <= start + nbytes:
                    extents[number] = (moved + offset - start, size)
        # If the dataset kept `empty` itself, it gets private memory now.
        self._in_place = False
        return retained

    def append(self, body: bytes) -> None:
        """Writes a message's body into the slot, after the arrays."""
        target, _ = self._allocate(len(body))
        target[:] = np.frombuffer(body, np.uint8)

    def make_private(self) -> None:
        """Makes the slot private to this process, if memory allows."""
        if self._used:
            with contextlib.suppress(OSError):
                self._segment.make_private(
                    self._slot, self._used, self._segment.file
                )

    @property
    def used(self) -> int:
        """The number of bytes of the slot that are in use so far."""
        return self._used

    def _allocate(self, nbytes: int) -> tuple[Bytes, int]:
        stride = self._segment.stride
        with self._lock:
            start = round_up(self._used)
            if start + nbytes <= stride:
                self._used = start + nbytes
                return self._segment.root(self._slot, start, nbytes), start
        remedy = "Make smaller batches."
        if stride < USUAL_STRIDE:
            remedy = (
                "Make smaller batches, close other datasets, or raise the "
                "limit on address space (`ulimit -v`), which keeps slots this "
                "small."
            )
        raise LoaderError(
            f"A batch of more than {start + nbytes:,} bytes does not fit a "
            f"slot of shared memory ({stride:,} bytes). {remedy}"
        )


def encode(batch: list[Any], writer: Writer) -> Encoded:
    """Writes a batch into a slot, and returns a description for `decode`.

    The batch is the only item of a list. The list is emptied, so that arrays
    that the dataset still holds can be detected.
    """
    extents: list[tuple[int, int]] = []
    arrays: list[npt.NDArray[Any]] = []
    description = layout.describe(batch[0], arrays)
    if description is None:
        structure = _write_pickled(batch[0], writer, extents)
    else:
        extents += writer.write_all(arrays)
        structure = layout.pack(description)
    arrays.clear()
    batch.clear()
    retained = writer.copy_retained(extents)
    packed = b"".join(_EXTENT.pack(*extent) for extent in extents)
    return Encoded(structure, packed, writer.used, retained)


def decode(encoded: Encoded, arena: Lender, slot: int) -> Any:
    """Reads a batch from a slot; large arrays are views of the slot.

    The slot is leased until the last of these views has died. If no array is
    large, or the consumer already holds too many slots, all arrays are copied
    and the slot is free at once, unless it is retained: then it is free when
    its worker has ended.
    """
    structure, packed, used, retained = encoded
    extents = [*_EXTENT.iter_unpack(packed)]
    tiny = used <= TINY_BYTES
    lease = (
        not tiny
        and not retained
        and max((nbytes for _, nbytes in extents), default=0) >= SMALL_BYTES
        and not arena.crowded
    )
    if lease:
        root = arena.lease(slot, used)
    elif used:
        root = arena.segment.root(slot, 0, used)
    try:
        if tiny and used:
            root = aligned_copy(root)
            plain = layout.unpack(structure)
            if plain is not None:
                starts = [start for start, _ in extents]
                return plain.assemble([root] * len(starts), starts)
        buffers: list[Bytes] = []
        for start, nbytes in extents:
            if not nbytes:
                buffers.append(np.empty(0, np.uint8))
                continue
            part = root[start : start + nbytes]
            whole = tiny or (lease and nbytes >= SMALL_BYTES)
            buffers.append(part if whole else aligned_copy(part))
        return assemble(structure, buffers)
    finally:
        if not lease and not retained:
            arena.free(slot)


def extents(encoded: Encoded) -> list[tuple[int, int]]:
    """Returns the start and the number of bytes of each array in the slot."""
    return [*_EXTENT.iter_unpack(encoded.extents)]


def assemble(structure: bytes, buffers: list[Bytes]) -> Any:
    """Rebuilds a batch from its structure and one buffer per array."""
    plain = layout.unpack(structure)
    if plain is not None:
        return plain.assemble(buffers)
    return pickle.loads(structure, buffers=buffers)


def read_appended(segment: Roots, slot: int, used: int, nbytes: int) -> bytes:
    """Returns the message body that `SlotWriter.append` wrote into a slot.

    The arrays before the body take the slot's first `used` bytes.
    """
    return segment.root(slot, round_up(used), nbytes).tobytes()


def rebuild_array(
    buffer: Any, dtype: Any, shape: tuple[int, ...], order: Literal["C", "F"]
) -> npt.NDArray[Any]:
    """Creates an array that uses the memory of `buffer`, during unpickling."""
    if 0 in shape:
        return np.empty(shape, dtype)
    kind = layout.data_type(dtype)
    return np.ndarray(shape, kind, buffer, 0, None, order)


def rebuild_ragged(parts: Sequence[Any]) -> Any:
    """Builds a `tf.RaggedTensor` from flat values and nested row splits."""
    import tensorflow as tf

    return tf.RaggedTensor.from_nested_row_splits(
        parts[0], parts[1], validate=False
    )


def rebuild_tf_sparse(indices: Any, values: Any, shape: Any) -> Any:
    """Builds a `tf.SparseTensor` from its indices, values and shape."""
    import tensorflow as tf

    return tf.SparseTensor(indices, values, shape)


def rebuild_jax_sparse(data: Any, indices: Any, shape: Any) -> Any:
    """Builds a `jax.experimental.sparse.BCOO` from its parts."""
    from jax.experimental import sparse

    return sparse.BCOO((data, indices), shape=shape)


def _write_pickled(
    batch: Any, writer: Writer, extents: list[tuple[int, int]]
) -> bytes:
    """Pickles a batch; passes the arrays to `writer` instead of pickle."""

    def keep(buffer: pickle.PickleBuffer) -> None:
        raw = buffer.raw()
        source = np.frombuffer(raw, np.uint8) if raw.nbytes else None
        extents.append((0, 0) if source is None else writer.write(source))

    structure = io.BytesIO()
    try:
        _BatchPickler(structure, writer, keep).dump(batch)
    except (pickle.PicklingError, TypeError, AttributeError):
        # A lambda, or a class of `__main__`: rare in a batch, so the slower
        # pickler, which pickles them by value, is tried second.
        structure = io.BytesIO()
        extents.clear()
        _BatchCloudPickler(structure, writer, keep).dump(batch)
    return structure.getvalue()


def octets(array: npt.NDArray[Any], writer: Writer) -> Bytes:
    """Returns an array's bytes as a flat array, in C or Fortran order.

    They are a view as uint8, because the buffer protocol knows no datetime or
    bfloat16. An array that has neither order is copied into the slot.
    """
    if array.flags.c_contiguous:
        flat = array.reshape(-1)
    elif array.flags.f_contiguous:
        flat = array.reshape(-1, order="F")
    else:
        flat = writer.allocate_copy(array).reshape(-1)
    return flat.view(np.uint8)


class _ArraysInTheSlot:
    """Base class of the two picklers that write arrays into the slot."""

    def __init__(
        self,
        file: io.BytesIO,
        writer: Writer,
        keep: Callable[[pickle.PickleBuffer], None],
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=keep)  # type: ignore[call-arg]
        self.writer = writer

    def reduce_array(self, array: npt.NDArray[Any]) -> Any:
        dtype = array.dtype
        if dtype.hasobject or dtype.itemsize == 0 or dtype.char == "T":
            return NotImplemented
        kind: Any = dtype if layout.is_extension(dtype) else dtype.str
        if not array.size:
            return rebuild_array, (None, kind, array.shape, "C")
        fortran = array.flags.f_contiguous and not array.flags.c_contiguous
        raw: Any = octets(array, self.writer)
        buffer, order = pickle.PickleBuffer(raw), "F" if fortran else "C"
        return rebuild_array, (buffer, kind, array.shape, order)

    def reduce(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is np.ndarray:
            return self.reduce_array(obj)
        if kind is np.memmap:
            return self.reduce_array(obj.view(np.ndarray))
        if kind is memoryview:  # as threads deliver it
            return _identity, (np.asarray(obj),)
        convert = _converter(kind)
        return NotImplemented if convert is None else convert(obj)


class _BatchPickler(_ArraysInTheSlot, pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and is_main(obj.__module__):
            # A worker's `__main__` may have a class that the script's has not.
            return class_refs.reduce_class(obj)
        return self.reduce(obj)


class _BatchCloudPickler(_ArraysInTheSlot, cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        reduced = self.reduce(obj)
        if reduced is NotImplemented and isinstance(obj, type):
            reduced = class_refs.reduce_class(obj)
        if reduced is NotImplemented:
            return super().reducer_override(obj)
        return reduced


def _converter(kind: type) -> Callable[[Any], Any] | None:
    """Returns the pickle reducer of a tensor type; `None` for other types."""
    package = kind.__module__.partition(".")[0]
    if package == "tensorflow":
        return _TENSORFLOW.get(kind.__name__)
    if package in ("jax", "jaxlib"):
        return _reduce_jax
    torch = loaded("torch")
    if torch is not None and issubclass(kind, torch.Tensor):
        return _reduce_torch
    return None


def _reduce_tf_dense(tensor: Any) -> Any:
    return _identity, (tensor.numpy(),)


def _reduce_tf_ragged(tensor: Any) -> Any:
    splits = [split.numpy() for split in tensor.nested_row_splits]
    return rebuild_ragged, ((tensor.flat_values.numpy(), splits),)


def _reduce_tf_sparse(tensor: Any) -> Any:
    return rebuild_tf_sparse, (
        tensor.indices.numpy(),
        tensor.values.numpy(),
        tensor.dense_shape.numpy(),
    )


def _reduce_jax(tensor: Any) -> Any:
    if type(tensor).__name__ == "BCOO":
        return rebuild_jax_sparse, (
            np.asarray(tensor.data),
            np.asarray(tensor.indices),
            tuple(tensor.shape),
        )
    if hasattr(tensor, "__array__"):
        return _identity, (np.asarray(tensor),)
    return NotImplemented


def _reduce_torch(tensor: Any) -> Any:
    import torch

    if tensor.layout is not torch.strided:
        return NotImplemented
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    name = str(tensor.dtype).removeprefix("torch.")
    if name == "bfloat16" or name.startswith("float8"):
        import ml_dtypes

        is_byte = tensor.dtype.itemsize == 1
        bits = tensor.view(torch.uint8 if is_byte else torch.int16).numpy()
        return _identity, (bits.view(getattr(ml_dtypes, name)),)
    return _identity, (tensor.numpy(),)


def _identity(value: Any) -> Any:
    return value


_TENSORFLOW: dict[str, Callable[[Any], Any]] = {
    "EagerTensor": _reduce_tf_dense,
    "ResourceVariable": _reduce_tf_dense,
    "RaggedTensor": _reduce_tf_ragged,
    "SparseTensor": _reduce_tf_sparse,
}
