"""Tells objects of libraries from others of their class by their pickles.

Such as a scaler that the program has fitted, or a graph.
"""

from __future__ import annotations

import hashlib
import pickle
import types
from typing import Any

import numpy as np
import numpy.typing as npt

from keras_fastdata._call_stack import raise_of_handler
from keras_fastdata._modules import is_main, is_users_class, packages_of
from keras_fastdata.building.generator_wrappers import wrapper_of
from keras_fastdata.building.variables import NAMESPACES
from keras_fastdata.engine.plain_values import CONTAINERS, MAPPINGS
from keras_fastdata.engine.sent_digest import checksum_of
from keras_fastdata.engine.slow_descriptions import once_if_slow
from keras_fastdata.engine.stable_pickle import StablePickler
from keras_fastdata.memory import rebuilt_classes
from keras_fastdata.memory.limited_stream import LimitedStream, LimitError
from keras_fastdata.memory.reducers import Pickler, Reduced

# Packages whose objects are on a device, have a long pickle, or import much.
_LEFT_OUT = {"jax", "jaxlib", "keras", "keras_fastdata", "tensorflow", "torch"}
CODE_TYPES = (
    *(type, types.ModuleType, types.FunctionType, types.MethodType),
    *(types.BuiltinFunctionType, types.CodeType, np.ufunc),
)
_CODE = (type, types.FunctionType)
_NOT_OF_LIBRARIES = (
    *(types.CellType, types.MappingProxyType),
    *(*CONTAINERS, *MAPPINGS, *NAMESPACES),
)


class ScriptPickler(Pickler):
    """Pickles an object, unless that takes long or is of no use to a worker.

    Raises:
        LimitError: In `dump`, if there are objects of certain libraries.
    """

    def reducer_override(self, obj: Any) -> Reduced:
        is_code = isinstance(obj, (*_CODE, rebuilt_classes.MemberMaker))
        if not is_code and is_left_out(type(obj)):
            raise LimitError
        reduced: Reduced = super().reducer_override(obj)
        return reduced


class SmallPickler(ScriptPickler):
    """Does the same for what is not of `__main__`.

    Raises:
        LimitError: In `dump`, also if there is code of `__main__`, which a
            worker would make a second time.
    """

    def reducer_override(self, obj: Any) -> Reduced:
        if isinstance(obj, _CODE) and is_main(obj.__module__):
            raise LimitError
        return super().reducer_override(obj)


class _ContentPickler(SmallPickler, StablePickler):
    """Pickles equal objects to equal bytes, with the same exceptions.

    Random generators count as equal, for each batch has a seed of its own.
    """

    def reducer_override(self, obj: Any) -> Reduced:
        if wrapper_of(obj) is not None:
            return str, (type(obj).__qualname__,)
        return super().reducer_override(obj)


def is_left_out(kind: Any) -> bool:
    """Returns whether objects of a class are not looked into."""
    return not packages_of(kind).isdisjoint(_LEFT_OUT)


def is_left_out_module(name: str) -> bool:
    """Returns whether workers do not import a module on their own."""
    return name.partition(".")[0] in _LEFT_OUT


def content_of(value: Any) -> str | None:
    """Returns a digest of the content of an object of a library.

    Of large arrays, only a sample counts. Returns `None` for other objects, and
    for those that have too much content, or cannot be pickled.
    """
    kind = type(value)
    if kind in _NOT_OF_LIBRARIES or isinstance(value, CODE_TYPES):
        return None
    if is_users_class(kind) or wrapper_of(value) is not None:
        return None
    return digest_of(value)


@once_if_slow
def digest_of(value: Any) -> str | None:
    """Returns a digest of all that an object has, if that is not too much."""
    digest = hashlib.blake2b(digest_size=16)
    arrays: list[pickle.PickleBuffer] = []
    stream = LimitedStream(digest.update)
    pickler = _ContentPickler(stream, protocol=5, buffer_callback=arrays.append)
    try:
        pickler.dump(value)
        for array in arrays:
            checksum = checksum_of(np.frombuffer(array.raw(), np.uint8))
            digest.update(repr(checksum).encode())
    except Exception as error:
        raise_of_handler(error)
        return None
    return digest.hexdigest()


def weights_of(value: Any) -> list[npt.NDArray[Any]]:
    """Returns the weights of a model or a layer of Keras or PyTorch."""
    kind: Any = type(value)
    packages = packages_of(kind)
    if "torch" in packages and hasattr(kind, "state_dict"):
        tensors = [*value.state_dict().values()]
        return [t.detach().cpu().float().numpy() for t in tensors]
    if "keras" in packages and hasattr(kind, "get_weights"):
        return [*map(np.asarray, value.get_weights())]
    return []
