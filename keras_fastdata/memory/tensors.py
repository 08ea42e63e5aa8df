"""Pickles tensors of PyTorch as arrays, which workers share.

PyTorch's own pickle copies a tensor for each worker, and tensors and arrays
that share memory would share none in the copy.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt


def is_tensor(obj: Any) -> bool:
    """Returns whether an object is a tensor of PyTorch, of no subclass."""
    return type(obj).__name__ == "Tensor" and type(obj).__module__ == "torch"


def reduce_tensor(tensor: Any) -> tuple[Any, ...] | None:
    """Returns the pickle reduction of a tensor, as an array.

    Returns `None` for a tensor that is more than numbers in the memory of this
    process, and for an empty one: a program may resize that.
    """
    torch = sys.modules["torch"]
    if (
        tensor.layout is not torch.strided
        or tensor.device.type != "cpu"
        or tensor.requires_grad
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
        or any(getattr(tensor, "names", ()))
        or vars(tensor)
    ):
        return None
    nbytes, storage = tensor.nbytes, tensor.untyped_storage()
    dtype = _dtype_of(torch, tensor.dtype)
    if dtype is None or not 0 < nbytes <= storage.nbytes():
        return None
    memory = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    array: npt.NDArray[Any] = np.ndarray(
        tuple(tensor.shape),
        dtype,
        memory,
        tensor.storage_offset() * dtype.itemsize,
        tuple(step * dtype.itemsize for step in tensor.stride()),
    )
    name = str(tensor.dtype).removeprefix("torch.")
    return _tensor_again, (array, name)


def _dtype_of(torch: Any, dtype: Any) -> np.dtype[Any] | None:
    """Returns NumPy's dtype, or that of integers with as many bytes."""
    try:
        array: npt.NDArray[Any] = torch.empty(0, dtype=dtype).numpy()
    except TypeError:
        return _BITS.get(dtype.itemsize) if dtype.is_floating_point else None
    return array.dtype


_BITS: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.int16),
}


def _tensor_again(array: npt.NDArray[Any], name: str) -> Any:
    import torch

    found = torch.from_numpy(array)
    dtype = getattr(torch, name)
    return found if found.dtype is dtype else found.view(dtype)
