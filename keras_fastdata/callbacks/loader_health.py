"""`LoaderHealth`: does training wait for its data?"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from keras_fastdata.health import waits
from keras_fastdata.workers import role

if TYPE_CHECKING or role.is_worker():
    # A worker that imports the user's module must not import Keras for this.
    _Base = object

    def _registered(cls: type) -> type:
        return cls
else:
    import keras

    _Base = keras.callbacks.Callback
    _registered = keras.saving.register_keras_serializable(
        package="keras_fastdata"
    )

# Below this share of the epoch, free data would hardly be noticed.
_WORTH_MENTIONING = 0.1
_HALF = 0.5


@_registered
class LoaderHealth(_Base):
    """Reports how long training waited for data.

    Adds `data_wait` to the logs of every epoch: the share of the epoch's wall
    time, from 0 to 1, that the training steps waited in the iterators of
    `FastPyDataset`s. Validation does not count. The progress bar, `History`
    and every callback that is listed after this one have it; so list it first.
    In a `fit` without a `FastPyDataset` nothing is added and nothing printed.

    With `on_error="skip"`, `skipped` in the logs is the number of batches
    that the epoch and its validation left out, once there was one; and the
    attribute `skipped` lists those of the latest `fit`, at most 1,000, each
    with `dataset`, `index` and `traceback`.

    Under JAX, and on accelerators, steps run on while the next batch is
    fetched; `data_wait` is then an upper bound of what faster data can save.

    Args:
        verbose: 1 prints a line after each epoch that says whether data or
            compute is the bottleneck; 0 prints nothing. Defaults to 1.

    Raises:
        ValueError: `verbose` is neither 0 nor 1.

    Example:

    >>> from keras_fastdata import LoaderHealth
    >>> LoaderHealth(verbose=0).get_config()
    {'verbose': 0}
    """

    model: Any

    def __init__(self, verbose: int = 1) -> None:
        super().__init__()
        if verbose not in (0, 1):
            raise ValueError(f"`verbose` must be 0 or 1. Received: {verbose!r}")
        self.verbose = int(verbose)
        self._epoch = _Stretch()
        self._validation = _Stretch()
        self._line: str | None = None
        self._skipped_before = 0
        self._skipped_after: int | None = 0

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments, for `keras.saving`."""
        return {"verbose": self.verbose}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> LoaderHealth:
        """The callback that `get_config` describes."""
        return cls(**config)

    def on_train_begin(self, logs: Any = None) -> None:
        self._line = None  # of a fit that was broken off
        self._skipped_before = waits.of_this_thread().skipped
        self._skipped_after = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._print_line()
        self._epoch = _Stretch()
        self._epoch.begin()
        self._validation = _Stretch()

    def on_test_begin(self, logs: Any = None) -> None:
        _wait_for_device(self.model)
        self._validation.begin()

    def on_test_end(self, logs: Any = None) -> None:
        self._validation.end()

    def on_epoch_end(
        self, epoch: int, logs: dict[str, Any] | None = None
    ) -> None:
        _wait_for_device(self.model)
        self._epoch.end()
        batches = self._epoch.batches - self._validation.batches
        wall_s = self._epoch.wall_s - self._validation.wall_s
        wait_s = self._epoch.wait_s - self._validation.wait_s
        if not batches or wall_s <= 0:
            return
        share = min(1.0, max(0.0, wait_s / wall_s))
        skipped = waits.of_this_thread().skipped - self._skipped_before
        if logs is not None:
            logs["data_wait"] = share
            if skipped:
                logs["skipped"] = self._epoch.skipped
        self._line = _describe(epoch, share, wall_s)
        if self._epoch.skipped:
            count = self._epoch.skipped
            were = "batch was" if count == 1 else "batches were"
            self._line += f" {count} {were} skipped."

    @property
    def skipped(self) -> list[waits.Skipped]:
        """The batches that the latest `fit` left out; at most 1,000."""
        after = self._skipped_after
        total = waits.of_this_thread().skipped if after is None else after
        return waits.latest_skipped(self._skipped_before, total)

    def on_train_end(self, logs: Any = None) -> None:
        self._skipped_after = waits.of_this_thread().skipped
        self._print_line()

    def _print_line(self) -> None:
        # One epoch late, when the progress bar has ended its line.
        line, self._line = self._line, None
        if line and self.verbose:
            print(line, flush=True)


class _Stretch:
    """Time and waits summed over a stretch of training, or several."""

    def __init__(self) -> None:
        self.wall_s = 0.0
        self.wait_s = 0.0
        self.batches = 0
        self.skipped = 0

    def begin(self) -> None:
        self._began = time.perf_counter()
        self._before = waits.of_this_thread()

    def end(self) -> None:
        now = waits.of_this_thread()
        self.wall_s += time.perf_counter() - self._began
        self.wall_s -= now.aside_s - self._before.aside_s
        self.wait_s += now.seconds - self._before.seconds
        self.batches += now.batches - self._before.batches
        self.skipped += now.skipped - self._before.skipped


def _describe(epoch: int, share: float, wall_s: float) -> str:
    wall = f"{wall_s:.1f} s" if wall_s >= 1 else f"{wall_s * 1000:.0f} ms"
    waited = (
        f"LoaderHealth: epoch {epoch + 1} waited {share:.0%} of {wall} for "
        "data; "
    )
    if share >= _HALF:
        return waited + "data is the bottleneck."
    if share >= _WORTH_MENTIONING:
        return (
            waited + "compute is the bottleneck. Free data would save up to "
            f"{share:.0%}."
        )
    return waited + "compute is the bottleneck."


def _wait_for_device(model: Any) -> None:
    """Lets training steps end that JAX has only been asked for.

    Else the time they take would be booked on what comes next.
    """
    import keras

    if keras.backend.backend() == "jax" and model is not None:
        import jax

        jax.block_until_ready([v.value for v in model.variables])
