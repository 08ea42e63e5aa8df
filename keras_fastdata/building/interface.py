"""The methods of a dataset that the package calls, and how they are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np

from keras_fastdata._validation import integer

_Method = TypeVar("_Method", bound=Callable[..., Any])


class Dataset(Protocol):
    """Declares the dataset methods that the engine calls."""

    def __getitem__(self, index: int, /) -> Any: ...

    def reseed(self, seed_sequence: np.random.SeedSequence, /) -> None: ...

    def on_worker_start(self) -> None: ...

    def on_worker_stop(self) -> None: ...

    def on_epoch_begin(self) -> None: ...

    def on_epoch_end(self) -> None: ...

    @property
    def num_batches(self) -> int | None: ...


def set_name(dataset: Dataset, name: str) -> None:
    """Has a dataset go by the name of the function that made it."""
    vars(dataset)["_fastdata_name"] = name


def name_of(dataset: Dataset) -> str:
    """Returns the name of a dataset's class, or of the function it is from."""
    name: str = vars(dataset).get("_fastdata_name", type(dataset).__name__)
    return name


def length_of(dataset: Dataset) -> int | None:
    """Returns the number of batches in an epoch, or `None` if unknown."""
    try:
        found = dataset.num_batches
    except NotImplementedError:  # means endless in Keras's `__iter__` too
        found = None
    name = f"{type(dataset).__name__}.num_batches"
    return None if found is None else checked_length(name, found)


def checked_length(name: str, length: Any) -> int:
    """Validates a number of batches, and returns the number as an `int`."""
    if isinstance(length, float):
        raise TypeError(
            f"`{name}` must be an integer. Received: {length!r} (of type "
            f"{type(length).__name__}). Divide with `//`, or round with "
            "`math.ceil`."
        )
    return integer(name, length, least=0)


_DEFAULT_HOOKS: set[Callable[..., Any]] = set()


def default_hook(method: _Method) -> _Method:
    """Marks a method of a base class as an empty default implementation."""
    _DEFAULT_HOOKS.add(method)
    return method


def is_default_hook(method: Callable[..., Any]) -> bool:
    """Returns whether a method was decorated with `default_hook`."""
    return method in _DEFAULT_HOOKS


# On a hook that calls that of other datasets: a function that returns them.
FORWARDS = "_fastdata_forwards"


def overrides(dataset: Dataset, name: str) -> bool:
    """Returns whether a dataset overrides the empty default method `name`."""
    method = getattr(type(dataset), name)
    # Not `getattr`: a mock has any attribute.
    if within := getattr(method, "__dict__", {}).get(FORWARDS):
        return any(overrides(each, name) for each in within(dataset))
    return name in vars(dataset) or not is_default_hook(method)


EPOCH_HOOKS = ("on_epoch_begin", "on_epoch_end")

# On a method whose calls the loader notices.
NOTICED = "_fastdata_notices"


def has_unnoticed_hook(dataset: Dataset) -> bool:
    """Returns whether the user may call an epoch hook that nobody notices.

    Such a hook was set on the dataset, or on its class after the class was
    made, or it is no plain function.
    """
    return any(
        overrides(dataset, name)
        and (
            name in vars(dataset)
            or not hasattr(getattr(type(dataset), name), NOTICED)
        )
        for name in EPOCH_HOOKS
    )
