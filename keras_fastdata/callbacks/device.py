"""Waits until an accelerator, or JAX, has finished the dispatched steps."""

from __future__ import annotations

import sys
from typing import Any


def is_asynchronous() -> bool:
    """Whether a training step may return before its result is computed."""
    import keras

    match keras.backend.backend():
        case "tensorflow":
            import tensorflow as tf

            return len(tf.config.list_logical_devices()) > 1
        case "torch":
            torch = sys.modules["torch"]
            mps = torch.backends.mps
            return bool(torch.cuda.is_available() or mps.is_available())
    return True


def synchronize(model: Any) -> None:
    """Waits until all dispatched training steps have ended.

    Args:
        model: The Keras model that is being trained; may be `None`.
    """
    import keras

    match keras.backend.backend():
        case "jax":
            import jax

            from keras_fastdata import keras_bridge

            for value in keras_bridge.values_in_training(model):
                # A step that began later may have taken over its memory.
                if isinstance(value, jax.Array) and not value.is_deleted():
                    value.block_until_ready()
        case "torch":
            torch = sys.modules["torch"]
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            elif torch.backends.mps.is_available():
                torch.mps.synchronize()
        case "tensorflow":
            import tensorflow as tf

            tf.test.experimental.sync_devices()
