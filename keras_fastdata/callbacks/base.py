"""Defines the base class of this package's callbacks.

It is Keras's class, except in workers: a worker imports the user's module, and
must not import Keras for a callback in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from keras_fastdata import _process_role

if TYPE_CHECKING or _process_role.is_worker():
    Callback = object

    def registered(cls: type) -> type:
        """Replaces Keras's decorator in workers; returns `cls` unchanged."""
        return cls
else:
    import keras

    Callback = keras.callbacks.Callback
    registered = keras.saving.register_keras_serializable(
        package="keras_fastdata"
    )
