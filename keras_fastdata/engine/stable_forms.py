"""Gives objects whose pickles differ from run to run another form.

The form has the same content, and is equal in each run.
"""

from __future__ import annotations

import io
import zipfile
from typing import Any

from keras_fastdata._modules import packages_of

# A file in what Keras pickles that has the time when it was written.
_DATED = "metadata.json"


def stable_form(value: Any) -> tuple[Any, ...] | None:
    """Returns the content of a tensor of PyTorch, or of a Keras object.

    `None` for all others, and for tensors that have no plain memory.
    """
    kind: Any = type(value)
    packages = packages_of(kind)
    if "torch" in packages and hasattr(value, "untyped_storage"):
        return _of_tensor(value)
    if "keras" in packages and hasattr(value, "get_config"):
        return _of_keras_object(value)
    return None


def _of_tensor(tensor: Any) -> tuple[Any, ...] | None:
    """Returns a tensor's class, dtype, shape and memory."""
    import torch

    try:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        memory = flat.view(torch.uint8).numpy()
    except (RuntimeError, TypeError):  # a sparse one
        return None
    return type(tensor), str(tensor.dtype), tuple(tensor.shape), memory


def _of_keras_object(value: Any) -> tuple[Any, ...] | None:
    """Returns an object's class, and the files of which Keras makes it."""
    reduced = value.__reduce__()
    archive = reduced[1][0] if len(reduced) > 1 and reduced[1] else None
    if not isinstance(archive, io.BytesIO):
        return None
    with zipfile.ZipFile(archive) as files:
        names = [name for name in files.namelist() if name != _DATED]
        return type(value), *((name, files.read(name)) for name in names)
