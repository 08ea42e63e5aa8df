"""Explains which part of a dataset cannot be pickled, and suggests a fix."""

from __future__ import annotations

import contextlib
import os
import types
import weakref
from collections.abc import Iterator
from typing import Any

from keras_fastdata._call_stack import raise_of_handler
from keras_fastdata._modules import nested_code
from keras_fastdata.building.seeding import PRIVATE
from keras_fastdata.errors import DatasetPicklingError, LoaderError
from keras_fastdata.memory import reducers, shared_state

_MAX_DEPTH = 6  # of attributes of attributes
_MAX_ITEMS = 100  # of a container that is searched
_FORK = (
    " `start_method='fork'` pickles nothing, but all workers then share what "
    "this process has open."
)
_TRAINING = (
    "JAX trains this model at the moment, and holds the values of its "
    "variables. Keep what `__getitem__` needs of the model in an array. "
)


@contextlib.contextmanager
def explained(dataset: weakref.ref[Any]) -> Iterator[None]:
    """Replaces a pickling error with an error that names the unpicklable part.

    Raises:
        DatasetPicklingError: Something in the dataset cannot be pickled.
    """
    try:
        yield
    except (LoaderError, OSError, MemoryError):
        raise
    except Exception as error:
        raise_of_handler(error)
        # Pickling runs the user's `__reduce__` and `__getstate__`: anything.
        owner = dataset()
        if shared_state.can_be_written(owner):
            raise
        found = _culprit("dataset", owner, _MAX_DEPTH, [])
        path, value = found or ("dataset", owner)
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        is_training = getattr(value, "_jax_state_synced", True) is False
        raise DatasetPicklingError(
            f"{type(owner).__name__} cannot be sent to a worker process: "
            f"`{path}` is a {kind}, which cannot be pickled ({error}). "
            f"{_TRAINING * is_training}"
            "Ways out: make it in `on_worker_start`, which runs in each "
            "worker, and not in `__init__`; leave it out in `__getstate__` "
            "and make it again in `__setstate__`; or use threads "
            f"(`use_multiprocessing=False`).{_FORK * hasattr(os, 'fork')}",
            path=path,
            type_name=kind,
        ) from error


def _culprit(
    path: str, value: Any, depth: int, above: list[Any]
) -> tuple[str, Any] | None:
    """Returns the innermost part that cannot be pickled, with its path.

    The objects `above`, on the path to `value`, are not searched again. An
    object that cannot be pickled because it refers to them is not returned.
    """
    if shared_state.can_be_written(value):
        return None
    circular = False
    is_model = hasattr(value, "_jax_state_synced")
    if depth and not is_model and not isinstance(value, reducers.LIVE):
        above = [*above, value]
        for name, part in _named_parts(value):
            if any(part is one for one in above):
                circular = True
                continue
            found = _culprit(f"{path}{name}", part, depth - 1, above)
            if found is not None:
                return found
    return None if circular else (path, value)


def _named_parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, part in list(value.items())[:_MAX_ITEMS]:
            yield f"[{key!r}]", part
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value[:_MAX_ITEMS]):
            yield f"[{number}]", part
    elif isinstance(value, types.FunctionType):
        # One of `__main__`, or a lambda: it takes along what it refers to.
        for name, cell in zip(
            value.__code__.co_freevars, value.__closure__ or (), strict=True
        ):
            with contextlib.suppress(ValueError):  # not assigned yet
                yield f" -> {name}", cell.cell_contents
        for code in nested_code(value.__code__):
            for name in code.co_names:
                if name in value.__globals__:
                    yield f" -> {name}", value.__globals__[name]
    elif isinstance(value, (staticmethod, classmethod)):
        yield "", value.__func__
    elif isinstance(value, property):
        yield "", value.fget
    elif isinstance(value, type):
        for name, part in vars(value).items():
            if name not in ("__dict__", "__weakref__"):
                yield f".{name}", part
    else:
        for name, part in getattr(value, "__dict__", {}).items():
            if name != PRIVATE:
                yield f".{name}", part
        yield ".__class__", type(value)
