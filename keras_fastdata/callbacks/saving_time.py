"""Measures the time that callbacks such as `ModelCheckpoint` need to save.

The hooks of these callbacks become attributes of the objects, which measure the
hooks of the class. `SavingTimer.close` removes these attributes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from keras_fastdata.callbacks.dataset_checkpoint import DatasetCheckpoint

_OF_KERAS = ("ModelCheckpoint", "BackupAndRestore", "OrbaxCheckpoint")


def savers_among(callbacks: list[Any]) -> list[Any]:
    """Returns the callbacks that save a model, or the position in the data."""
    import keras

    classes = [getattr(keras.callbacks, name, None) for name in _OF_KERAS]
    known = (DatasetCheckpoint, *(cls for cls in classes if cls is not None))
    return [callback for callback in callbacks if isinstance(callback, known)]


class _TimedHook:
    """Calls a callback's hook, and reports the duration of the call."""

    def __init__(
        self, hook: Callable[..., None], tell: Callable[[float], None]
    ) -> None:
        self._hook = hook
        self._tell = tell

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        began_s = time.monotonic()
        try:
            self._hook(*args, **kwargs)
        finally:
            self._tell(time.monotonic() - began_s)


class SavingTimer:
    """Measures how long callbacks take to save, until `close` is called.

    Args:
        callbacks: The callbacks; see `savers_among`.
        tell: Called with the seconds that a hook took.
    """

    def __init__(
        self, callbacks: list[Any], tell: Callable[[float], None]
    ) -> None:
        self._timed: list[tuple[Any, str]] = []
        for callback in callbacks:
            hooks = ["on_epoch_end"]
            if getattr(callback, "save_freq", "epoch") != "epoch":
                hooks.append("on_train_batch_end")
            for name in hooks:
                found = vars(callback).get(name)
                if found is not None and not isinstance(found, _TimedHook):
                    continue  # somebody else replaced the hook
                # The attribute of a `fit` that was interrupted is replaced.
                hook = getattr(type(callback), name).__get__(callback)
                setattr(callback, name, _TimedHook(hook, tell))
                self._timed.append((callback, name))

    def close(self) -> None:
        """Restores the hooks of the callbacks. Idempotent."""
        while self._timed:
            callback, name = self._timed.pop()
            vars(callback).pop(name, None)
