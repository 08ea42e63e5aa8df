"""Synchronizes the device, measures compiling, and describes the machine."""

from __future__ import annotations

import functools
import math
import platform
import sys
import threading
from collections.abc import Callable
from typing import Any

from keras_fastdata._call_stack import ignoring_errors
from keras_fastdata.metrics import cpu, formatting


def is_asynchronous() -> bool:
    """Returns whether the backend computes training steps asynchronously."""
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


def is_on_cpu() -> bool:
    """Returns whether training steps run on the CPU."""
    import keras

    if keras.backend.backend() == "jax":
        import jax

        return bool(jax.default_backend() == "cpu")
    return not is_asynchronous()


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


class _Compiling(threading.local):
    """The total time that the current thread has spent compiling."""

    total_s = 0.0


_compiling = _Compiling()


@functools.cache
def compiling_clock() -> Callable[[], float] | None:
    """Returns a function that reads the total compile time in seconds.

    Returns:
        The function; it tells the time of the current thread with JAX, and of
        the process with PyTorch. `None` if the backend does not tell.
    """
    import keras

    with ignoring_errors():  # not in each version
        if keras.backend.backend() == "jax":
            from jax import monitoring

            monitoring.register_event_duration_secs_listener(_add_if_compiling)
            return lambda: _compiling.total_s
        if keras.backend.backend() == "torch":
            from torch._dynamo.utils import compilation_time_metrics as times

            return lambda: math.fsum(times.get("_compile.compile_inner", ()))
    return None


def _add_if_compiling(event: str, seconds: float, **_: Any) -> None:
    """Adds the duration of a JAX event if the event concerns compiling."""
    if event.startswith("/jax/core/compile/"):
        _compiling.total_s += seconds


def machine() -> dict[str, str]:
    """Describes the CPU, the devices and the software versions in use."""
    import keras

    backend = keras.backend.backend()
    found = {
        "CPU": cpu.model(),
        "cores": formatting.cores(cpu.read().allowed),
        "devices": "",
        "keras": keras.__version__,
        backend: getattr(sys.modules.get(backend), "__version__", ""),
        "keras-fastdata": sys.modules["keras_fastdata"].__version__,
        "Python": platform.python_version(),
    }
    with ignoring_errors():  # not on each backend and version
        found["devices"] = ", ".join(keras.distribution.list_devices())
    return {name: text for name, text in found.items() if text}
