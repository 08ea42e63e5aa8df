"""Pickles tensors of PyTorch as arrays, which workers share.

PyTorch's own pickle copies a tensor for each worker, and tensors and arrays
that share memory would share none in the copy. Small tensors that share no
memory are left to it: a program may resize these.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from keras_fastdata._modules import loaded

_LARGE = 1 << 20  # bytes of a tensor that workers share


def is_tensor(obj: Any) -> bool:
    """Returns whether an object is a tensor of PyTorch, of no subclass."""
    return type(obj).__name__ == "Tensor" and type(obj).__module__ == "torch"


def as_plain_tensor(obj: Any) -> Any:
    """Returns a tensor, also one of a subclass, as one of no subclass.

    Returns `None` for other objects.
    """
    if is_tensor(obj):
        return obj
    torch = loaded("torch")
    kind = getattr(torch, "Tensor", None)
    if torch is None or kind is None or not isinstance(obj, kind):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return obj.as_subclass(kind)


def is_left_to_pytorch(tensor: Any) -> bool:
    """Returns whether PyTorch pickles a tensor that shares no memory.

    It cannot pickle floats of 8 bits.
    """
    is_tiny = tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
    return tensor.nbytes < _LARGE and not is_tiny


def array_of(tensor: Any) -> npt.NDArray[Any] | None:
    """Returns an array over the memory of a tensor.

    Its items are integers if NumPy lacks the tensor's dtype. Returns `None` for
    a tensor that is more than numbers in the memory of this process.
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
    storage = tensor.untyped_storage()
    dtype = _dtype_of(tensor.dtype)
    if dtype is None or not 0 < tensor.nbytes <= storage.nbytes():
        return None
    memory = _empty(torch.uint8).set_(storage).numpy()
    array: npt.NDArray[Any] = np.ndarray(
        tuple(tensor.shape),
        dtype,
        memory,
        tensor.storage_offset() * dtype.itemsize,
        tuple(step * dtype.itemsize for step in tensor.stride()),
    )
    return array


def reduce_tensor(
    tensor: Any, array: npt.NDArray[Any]
) -> tuple[Any, tuple[Any, ...]]:
    """Returns the pickle reduction of a tensor, as its array."""
    return _tensor_again, (array, str(tensor.dtype).removeprefix("torch."))


def _empty(dtype: Any) -> Any:
    """Returns an empty tensor on the CPU, whatever the default device is."""
    return sys.modules["torch"].empty(0, dtype=dtype, device="cpu")


def _dtype_of(dtype: Any) -> np.dtype[Any] | None:
    """Returns NumPy's dtype, or that of integers with as many bytes."""
    try:
        array: npt.NDArray[Any] = _empty(dtype).numpy()
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
