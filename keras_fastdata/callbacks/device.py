"""Waiting for an accelerator, or for JAX, to finish dispatched steps."""

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
            return bool(
                torch.cuda.is_available() or torch.backends.mps.is_available()
            )
    return True


def synchronize(model: Any) -> None:
    """Waits until all dispatched training steps have ended.

    Args:
        model: The Keras model that is being trained; may be `None`.
    """
    import keras

    match keras.backend.backend():
        case "jax":
            _wait_for_jax(model)
        case "torch":
            _wait_for_torch()
        case "tensorflow":
            import tensorflow as tf

            tf.test.experimental.sync_devices()


def _wait_for_jax(model: Any) -> None:
    import jax

    from keras_fastdata import keras_bridge

    for value in keras_bridge.values_in_training(model):
        # A step that began later may have taken over the value's memory.
        if isinstance(value, jax.Array) and not value.is_deleted():
            value.block_until_ready()


def _wait_for_torch() -> None:
    torch = sys.modules["torch"]
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    elif hasattr(torch, "mps") and torch.backends.mps.is_available():
        torch.mps.synchronize()
