"""Pickles equal objects to equal bytes, in every run and every process.

The pickles are compared, and never loaded.
"""

from __future__ import annotations

import io
import os
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from keras_fastdata._modules import is_users
from keras_fastdata.engine.stable_forms import stable_form
from keras_fastdata.memory import class_refs, reducers

_OURS = ("keras", "keras_fastdata")  # packages whose code is left out
_TEXTS_OF_POLARS = ("String", "Binary", "Categorical", "Enum", "Object")


class Found:
    """Collects the code, modules and strings that a pickle refers to."""

    def __init__(self) -> None:
        self.texts: dict[str | bytes, None] = {}  # any may be a path
        # Classes, functions and modules that are not installed.
        self.code: list[Any] = []
        # All of them, by id, and what stands for each.
        self.known: dict[int, tuple[Any, list[str] | None]] = {}


def pickle_of(
    value: Any, found: Found, keep: Callable[[Any], None] | None = None
) -> bytes:
    """Pickles a value for hashing; passes the arrays' buffers to `keep`."""
    stream = io.BytesIO()
    pickler = StablePickler(stream, protocol=5, buffer_callback=keep)
    pickler.found = found
    pickler.dump(value)
    return stream.getvalue()


class StablePickler(reducers.Pickler):
    """Pickles equal objects to equal bytes in every run.

    Sets are sorted. Classes, functions and modules of the user are there by
    name.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.found = Found()

    def reducer_override(self, obj: Any) -> reducers.Reduced:
        """Replaces objects whose pickles differ from run to run."""
        if (form := stable_form(obj)) is not None:
            return tuple, (form,)
        reduced: reducers.Reduced = super().reducer_override(obj)
        return reduced

    def persistent_id(self, obj: Any) -> Any:
        """Collects an object's code and strings, and replaces some objects."""
        kind = type(obj)
        if kind is int or kind is float:
            return None
        if isinstance(obj, (str, bytes)):  # `np.str_` is a `str`
            self.found.texts[obj] = None
        elif kind is set or kind is frozenset:
            return [kind.__name__, *sorted(obj, key=repr)]
        elif isinstance(obj, (type, types.FunctionType)):
            known = self.found.known
            if id(obj) not in known:
                by_name = is_installed(obj.__module__)
                by_name = by_name and class_refs.is_importable(obj)
                known[id(obj)] = obj, None if by_name else [obj.__qualname__]
                if not by_name:
                    self.found.code.append(obj)
            return known[id(obj)][1]
        elif kind is types.ModuleType and not is_installed(obj.__name__):
            if id(obj) not in self.found.known:
                self.found.known[id(obj)] = obj, ["module", obj.__name__]
                self.found.code.append(obj)
            return self.found.known[id(obj)][1]
        else:
            self.found.texts.update(dict.fromkeys(_texts_in(obj)))
        return None


def _texts_in(obj: Any) -> Iterator[str | bytes]:
    """Yields the strings and bytes objects in a path, array or table."""
    package = type(obj).__module__.partition(".")[0]
    values: Any = ()
    if isinstance(obj, os.PathLike):
        values = (os.fspath(obj),)
    elif isinstance(obj, np.ndarray):
        if obj.dtype.kind in "STU":
            values = obj.reshape(-1).tolist()
        for name in obj.dtype.names or ():
            yield from _texts_in(obj[name])
    elif package == "keras_fastdata":
        if type(obj).__name__ == "SharedList":
            values = obj
    elif package == "pyarrow" and hasattr(obj, "to_pylist"):
        kind = str(getattr(obj, "type", ""))  # a table has none
        values = obj.to_pylist() if "string" in kind or "bin" in kind else ()
    elif package == "polars" and hasattr(obj, "to_list"):
        values = obj.to_list()
    elif package == "polars" and hasattr(obj, "get_columns"):
        for column in obj.get_columns():
            if str(column.dtype) in _TEXTS_OF_POLARS:
                yield from _texts_in(column)
    elif package == "pandas" and hasattr(obj, "to_numpy"):
        values = np.asarray(obj).reshape(-1)  # texts may be Arrow's
        values = values.tolist() if values.dtype.kind == "O" else ()
    for value in values:
        if isinstance(value, (str, bytes)):
            yield value
        elif isinstance(value, os.PathLike):
            yield os.fspath(value)


def is_installed(module: str | None) -> bool:
    """Returns whether a module belongs to Python or an installed package."""
    if module is None:
        return False
    package = module.partition(".")[0]
    return package in _OURS or not is_users(module, if_unknown=True)
