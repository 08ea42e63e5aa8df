"""Copies a batch's arrays if objects outside the batch refer to them.

A `__getitem__` may keep a buffer, fill it again for every batch, and return
it. But batches wait in queues, and tensors may use an array's memory. So an
array that something else still refers to is copied, and so is a list or dict.
Sparse matrices and tables, whose arrays are not looked for, are always copied.
"""

from __future__ import annotations

import array
import collections
import copy
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from keras_fastdata._modules import loaded

_MEMORIES = (memoryview, bytearray, array.array)
_TABLES = ("scipy", "pandas")  # packages of sparse matrices and tables
_CONSTANT = frozenset([str, bytes, int, float, bool, type(None)])
# One reference of the container, and one of the call of `getrefcount`.
_OF_ITS_CONTAINER_ALONE = 2
# Uses of a storage: by one tensor, and by the object that stands for it.
_OF_A_TENSOR_ALONE = 2


def take(batches: list[Any]) -> Any:
    """Takes a batch out of a list; copies arrays that other objects use.

    An array is copied if anything but the batch refers to it, or to the
    memory that it is a view of. Arrays whose memory cannot be written to are
    not copied. The caller must hold no other reference to the batch.
    """
    search = _KeptArrays()
    search.look_into(batches, False)
    kept = search.kept
    batch = batches.pop()
    if not kept and not search.has_kept_containers:
        return batch
    return map_leaves(
        lambda leaf: _copy(leaf) if id(leaf) in kept else leaf, batch
    )


def copied(item: Any) -> Any:
    """Returns a copy of a nested structure and of all its arrays.

    Containers that `collate` or `keras.tree` know are copied too.
    """
    return map_leaves(_copy, item)


class _KeptArrays:
    """Finds a batch's arrays that other objects refer to.

    References are counted on `parts[key]` itself, because a local variable
    would add a reference.
    """

    def __init__(self) -> None:
        # Whether other objects refer to a list, deque or mapping.
        self.has_kept_containers = False
        self._kept: set[int] = set()
        # References to an array, minus those that were found in the batch.
        self._others: dict[int, int] = {}

    @property
    def kept(self) -> set[int]:
        """The ids of all arrays that objects outside the batch refer to."""
        return self._kept.union(k for k, n in self._others.items() if n)

    def look_into(self, parts: Any, is_kept: bool) -> None:
        """Searches a sequence or mapping for arrays.

        `is_kept`: whether other objects refer to the sequence or mapping.
        """
        keys = parts if isinstance(parts, Mapping) else range(len(parts))
        for key in keys:
            others = sys.getrefcount(parts[key]) - _OF_ITS_CONTAINER_ALONE
            part = parts[key]
            if isinstance(part, np.void) or _has_objects(part):
                # A record may be a view. An array in an object array may be
                # filled again.
                self._add(part, others, True)
            elif isinstance(part, np.ndarray):
                is_view = part.base is not None and _is_view(part)
                # Its mask is another array, which may be filled again.
                is_view = is_view or isinstance(part, np.ma.MaskedArray)
                may_be_filled = is_kept or is_view or others
                if may_be_filled and not _is_constant(part):
                    self._add(part, others, is_kept or is_view)
            elif isinstance(
                part, (tuple, list, collections.deque)
            ) or _is_mapping(part):
                self.look_into(part, is_kept or others > 0)
                if others and not isinstance(part, tuple):
                    self.has_kept_containers = True
            elif isinstance(part, _MEMORIES):
                if not memoryview(part).readonly:
                    self._add(part, others, True)
            elif _is_tensor(part):
                self._add(part, others, is_kept or _is_view_tensor(part))
            elif _is_table(part) or _is_variable(part):
                self._add(part, others, True)
            elif _is_on_host_of_jax(part):
                # `jax.device_put` may use the memory of an array of NumPy's.
                self._add(part, others, True)
            else:
                # The object may keep the arrays that it hands out.
                for leaf in _leaves(part):
                    self._add(leaf, 0, True)

    def _add(self, array: Any, others: int, is_kept: bool) -> None:
        key = id(array)
        self._others[key] = self._others.get(key, others + 1) - 1
        if is_kept:
            self._kept.add(key)


def _is_view(array: Any) -> bool:
    """Returns whether an array is a view of memory that is used elsewhere."""
    while isinstance(array.base, np.ndarray):
        if sys.getrefcount(array.base) > _OF_ITS_CONTAINER_ALONE:
            return True
        array = array.base
    return array.base is not None


def _is_constant(array: Any) -> bool:
    """Returns whether no code can write to an array's memory."""
    while isinstance(array.base, np.ndarray) and not array.flags.writeable:
        array = array.base
    if array.flags.writeable:
        return False
    try:
        return array.base is None or memoryview(array.base).readonly
    except TypeError:
        return False


def _is_tensor(part: Any) -> bool:
    torch = loaded("torch")
    return torch is not None and isinstance(part, torch.Tensor)


def _is_table(part: Any) -> bool:
    """Returns whether an object is a sparse matrix of SciPy or a table."""
    package = type(part).__module__.partition(".")[0]
    return package in _TABLES and hasattr(part, "copy")


def _is_variable(part: Any) -> bool:
    """Returns whether an object is a variable of TensorFlow or Keras."""
    return any(
        isinstance(part, getattr(loaded(package), "Variable", ()))
        for package in ("tensorflow", "keras")
    )


def _is_on_host_of_jax(part: Any) -> bool:
    """Returns whether an object is a JAX array in CPU memory."""
    jax = loaded("jax")
    if jax is None or not isinstance(part, jax.Array):
        return False
    if jax.dtypes.issubdtype(part.dtype, jax.dtypes.prng_key):
        return False
    return all(device.platform == "cpu" for device in part.devices())


def _is_view_tensor(tensor: Any) -> bool:
    """Returns whether other tensors or arrays could use a tensor's memory."""
    try:
        storage = tensor.untyped_storage()
        # Storage that cannot be resized may be an array's memory.
        alone = tensor._base is None and storage.resizable()
    except (NotImplementedError, RuntimeError):
        return True  # a sparse tensor
    # What `detach` returns, or a slice in inference mode, has no `_base`.
    count = getattr(sys.modules["torch"]._C, "_storage_Use_Count", None)
    uses = count(storage._cdata) if count else sys.maxsize
    return not alone or uses > _OF_A_TENSOR_ALONE


def _has_objects(part: Any) -> bool:
    return isinstance(part, np.ndarray) and part.dtype.kind == "O"


def _copy(leaf: Any) -> Any:
    if _has_objects(leaf) and leaf.ndim:
        again = leaf.copy()
        if not _CONSTANT.issuperset(map(type, leaf.flat)):
            for place in np.ndindex(leaf.shape):
                again[place] = map_leaves(_copy, leaf[place])
        return again
    if isinstance(leaf, np.void):
        return leaf.copy()
    if isinstance(leaf, np.ndarray) or _is_table(leaf):
        return leaf.copy()
    if isinstance(leaf, memoryview):
        return np.array(leaf)
    if isinstance(leaf, _MEMORIES):
        return copy.copy(leaf)
    if _is_tensor(leaf):
        return leaf.clone()
    if _is_variable(leaf):
        if hasattr(leaf, "read_value"):  # of TensorFlow
            return leaf.read_value()
        value = leaf.value
        return _copy(value.detach() if _is_tensor(value) else value)
    if _is_on_host_of_jax(leaf):
        # Not later, when the memory may have been filled again.
        return leaf.copy().block_until_ready()
    return leaf


def map_leaves(function: Callable[[Any], Any], item: Any) -> Any:
    """Returns a nested structure with `function` applied to each leaf.

    Tuples, lists, deques, mappings and classes registered with Keras are
    structures; everything else, `None` included, is a leaf.
    """
    if isinstance(item, tuple):
        kind = type(item)
        make = getattr(kind, "_make", kind)  # named tuples have `_make`
        return make(map_leaves(function, part) for part in item)
    again: Any
    if isinstance(item, (list, collections.deque)):
        again = copy.copy(item)
        for place, part in enumerate(item):
            again[place] = map_leaves(function, part)
        return again
    if _is_mapping(item):
        # The methods of a subclass may do more: `update` of a `Counter` adds.
        items = dict.items(item) if isinstance(item, dict) else item.items()
        parts = {key: map_leaves(function, part) for key, part in items}
        if type(item) is dict or not isinstance(item, dict):
            return parts
        again = copy.copy(item)
        dict.update(again, parts)
        return again
    optree = _optree_of(item)
    if optree is None:
        return function(item)
    return optree.tree_map(
        lambda leaf: map_leaves(function, leaf), item, namespace="keras"
    )


def _is_mapping(item: Any) -> bool:
    """Returns whether an object is a mapping, but not a sparse matrix."""
    return isinstance(item, Mapping) and not hasattr(item, "shape")


def _leaves(item: Any) -> list[Any]:
    """Returns an object's leaves, or [] if optree cannot split the object."""
    optree = _optree_of(item)
    return optree.tree_leaves(item, namespace="keras") if optree else []


def _optree_of(item: Any) -> Any:
    """Returns the module `optree`, or `None` if optree cannot split `item`.

    A class can only be registered with `keras.tree` after optree is imported.
    """
    optree = loaded("optree")
    if optree is None or optree.tree_is_leaf(
        item, none_is_leaf=True, namespace="keras"
    ):
        return None
    return optree
