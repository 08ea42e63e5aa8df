"""Finds the dataset that a command line names.

    MODULE:NAME      a module in the current folder, or an installed one
    FILE.py:NAME     a file, run as a module with its folder on the path

A file needs no main guard: it does not run as `__main__`, and worker processes
receive its classes by value, without running the file again.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import sys
import types
from typing import Any

import cloudpickle

from keras_fastdata.dataset import FastPyDataset

_FILE_MODULE = "__fastdata_file__"


class UsageError(Exception):
    """Raised when the target does not exist, or is not a dataset."""


def find(target: str) -> FastPyDataset:
    """Returns the dataset that `MODULE_OR_FILE:FACTORY` names.

    Args:
        target: The factory is a dataset, a dataset class that needs no
            arguments, or a function without arguments that returns a
            dataset. Dots lead into classes and objects.

    Raises:
        UsageError: The target does not exist, or is not a dataset.
    """
    place, colon, path = target.rpartition(":")
    if not colon or not place or not path:
        raise UsageError(
            "Name a dataset, its class, or a function that makes one, as "
            f"MODULE:NAME or FILE.py:NAME. Received: {target}. Pass "
            f"{place or path}:NAME."
        )
    module = _load(place)
    factory = _attribute(module, place, path)
    if isinstance(factory, FastPyDataset):
        return factory
    makes = isinstance(factory, (type, functools.partial))
    if not makes and not inspect.isroutine(factory):  # such as a model
        raise UsageError(_not_a_dataset(target, "is", factory))
    if isinstance(factory, type) and not issubclass(factory, FastPyDataset):
        raise UsageError(_not_a_dataset(target, "is the class", factory))
    _require_no_arguments(target, factory)
    made = factory()
    if not isinstance(made, FastPyDataset):
        raise UsageError(_not_a_dataset(f"{target}()", "returned", made))
    return made


def _load(place: str) -> types.ModuleType:
    if place.endswith(".py") or os.sep in place:
        return _load_file(place)
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if place != missing and not place.startswith(f"{missing}."):
            raise  # the module exists, but a module that it imports does not
        raise UsageError(
            f"There is no module {missing!r}, here or installed. Received: "
            f"{place}; a file is named with its .py."
        ) from None


def _load_file(path: str) -> types.ModuleType:
    if not os.path.isfile(path):
        raise UsageError(f"There is no file {path}.")
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    spec = importlib.util.spec_from_file_location(_FILE_MODULE, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file (.py).")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_FILE_MODULE] = module
    cloudpickle.register_pickle_by_value(module)
    spec.loader.exec_module(module)
    return module


def _attribute(module: types.ModuleType, place: str, path: str) -> Any:
    found: Any = module
    for name in path.split("."):
        if not hasattr(found, name):
            raise UsageError(
                f"{place} has no {path!r}. {_offer(module, place)}"
            )
        found = getattr(found, name)
    return found


def _offer(module: types.ModuleType, place: str) -> str:
    """Returns a sentence that lists the datasets of a module."""
    names = [
        name
        for name, value in vars(module).items()
        if isinstance(value, FastPyDataset)
        or (
            isinstance(value, type)
            and issubclass(value, FastPyDataset)
            and value is not FastPyDataset
        )
    ]
    if not names:
        return "It has no FastPyDataset either; name a function that makes one."
    return f"It has: {', '.join(f'{place}:{name}' for name in sorted(names))}."


def _require_no_arguments(target: str, factory: Any) -> None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return  # a function in C may have no signature
    try:
        signature.bind()
    except TypeError as error:
        raise UsageError(
            f"{target} cannot be called without arguments: {error}. Write a "
            "function without arguments that returns the dataset, and name "
            "that."
        ) from None


def _not_a_dataset(target: str, is_: str, found: Any) -> str:
    shown = found.__qualname__ if isinstance(found, type) else repr(found)
    if len(shown) > 60:
        shown = f"{shown[:60]}..."
    return (
        f"{target} {is_} {shown} (of type {type(found).__name__}). It must be "
        "a FastPyDataset, a subclass of it that needs no arguments, or a "
        "function without arguments that returns one."
    )
