"""Writes the measurements of `LoaderHealth` as scalars for TensorBoard.

The scalars are not in Keras's logs, because the progress bar shows all logs.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from keras_fastdata.health.summary import EpochHealth


class EventFiles:
    """Writes event files into the folders of TensorBoard callbacks.

    Args:
        log_dirs: The callbacks' `log_dir`s; may be empty.
    """

    def __init__(self, log_dirs: list[str]) -> None:
        self._log_dirs = log_dirs
        self._writers: list[Any] = []  # made at the first `write`

    def write(self, health: EpochHealth) -> None:
        """Writes the scalars of an epoch to the event files."""
        if not self._log_dirs:
            return
        import tensorflow as tf

        self._writers = self._writers or [
            tf.summary.create_file_writer(
                os.path.join(log_dir, "train"), filename_suffix=".loader"
            )
            for log_dir in self._log_dirs
        ]
        scalars = {
            "data_wait": health.data_wait,
            "batches_per_s": health.batches_per_s,
            "build_s_p50": health.build_s_p50,
            "build_s_p95": health.build_s_p95,
            "queue_depth": health.queue_depth_mean,
            "worker_utilization": health.worker_utilization,
            "restarts": health.restarts,
        }
        if health.account is not None:
            for name, seconds in dataclasses.asdict(health.account).items():
                scalars[f"account/{name}"] = seconds
        for writer in self._writers:
            with writer.as_default():
                for name, value in scalars.items():
                    tf.summary.scalar(f"loader/{name}", value, health.epoch)
            writer.flush()

    def close(self) -> None:
        """Closes the event files. Idempotent."""
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.close()


def log_dirs_among(callbacks: list[Any]) -> list[str]:
    """Returns the `log_dir` of each `TensorBoard` callback in a list."""
    import keras

    return [
        callback.log_dir
        for callback in callbacks
        if isinstance(callback, keras.callbacks.TensorBoard)
    ]
