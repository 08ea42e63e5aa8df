"""What our callbacks are made of: Keras's base class, but in a worker.

A worker that imports the user's module must not import Keras for a callback.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from keras_fastdata import _process_role

if TYPE_CHECKING or _process_role.is_worker():
    Callback = object

    def registered(cls: type) -> type:
        """Nothing is saved in a worker."""
        return cls
else:
    import keras

    Callback = keras.callbacks.Callback
    registered = keras.saving.register_keras_serializable(
        package="keras_fastdata"
    )
