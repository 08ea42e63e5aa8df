"""Defines `DatasetCheckpoint`, which saves the position in the data."""

from __future__ import annotations

import contextlib
import logging
import os
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_fastdata import _process_role
from keras_fastdata._call_stack import ignoring_errors
from keras_fastdata._dataset_internals import internals_of
from keras_fastdata._validation import boolean, integer
from keras_fastdata.building.drawn_seed import is_repeatable
from keras_fastdata.callbacks.base import Callback, registered
from keras_fastdata.callbacks.saved_states import (
    Saved,
    SavedStates,
    after_empty_rest,
    state_after,
)

if TYPE_CHECKING or not _process_role.is_worker():
    import keras

    from keras_fastdata import keras_bridge

_log = logging.getLogger("keras_fastdata")


@registered
class DatasetCheckpoint(Callback):
    """Saves the position in the training data, so that `fit` can resume there.

    Put it behind `keras.callbacks.BackupAndRestore`: it then saves whenever
    BackupAndRestore saves. If a `fit` is killed and called again in a new
    process, BackupAndRestore restores the weights, the optimizer and the epoch.
    This callback restores the position in that epoch: `fit` gets the batches
    that it had not trained on, with the same bytes. So the resumed epoch is
    shorter. The number and the kind of workers may be others.

    Without BackupAndRestore, load the weights yourself, and pass
    `fit(initial_epoch=...)`. The file has the two latest states. The data
    resumes at the latest one that was saved in this epoch. Without such a
    state, the data begins at the start of the epoch.

    With `steps_per_epoch`, the data resumes where it stood, and the resumed
    epoch has all its steps again. The training data must be a `FastPyDataset`.
    Validation data always begins anew.

    A `fit` that was killed during a validation resumes with the next epoch. If
    the training data is also the validation data, later epochs then have other
    numbers than without the crash: use another dataset for the validation.

    Args:
        path: The file to save to: JSON, about a kilobyte. Each save replaces
            the whole file at once, so a crash never leaves half a file.
        save_freq: "epoch", or the number of batches between two saves, at
            least 1. It has no effect beside `BackupAndRestore`.
        delete_checkpoint: Whether to remove the file at the end of `fit`, so
            that the next `fit` starts from the first batch. Defaults to
            `True`, as in `BackupAndRestore`.

    Raises:
        ValueError: An argument is out of range. In `fit`: the state in the
            file belongs to another dataset, or a `BackupAndRestore` comes
            behind this callback.
        LoaderError: In `fit`: the dataset's epoch hooks gave another result
            than when the state was saved.

    Example:

    >>> from keras_fastdata import DatasetCheckpoint
    >>> DatasetCheckpoint("data.json", save_freq=100).get_config()["save_freq"]
    100
    """

    model: Any

    def __init__(
        self,
        path: str | os.PathLike[str],
        save_freq: int | str = "epoch",
        delete_checkpoint: bool = True,
    ) -> None:
        super().__init__()
        self.path = os.fspath(path)
        if save_freq != "epoch":
            if isinstance(save_freq, str):
                raise ValueError(
                    '`save_freq` must be "epoch" or a number of batches. '
                    f"Received: {save_freq!r}"
                )
            save_freq = integer("save_freq", save_freq, least=1)
        self.save_freq = save_freq
        self.delete_checkpoint = boolean("delete_checkpoint", delete_checkpoint)
        self._adapter: Any = None
        self._beside: list[Any] = []
        self._backup: keras_bridge.KerasBackup | None = None
        self._states: SavedStates | None = None
        self._epoch = 0
        self._length: int | None = None  # batches that Keras takes of an epoch
        self._last_batch = -1
        self._since_saved = 0

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments, for `keras.saving`."""
        return {
            "path": self.path,
            "save_freq": self.save_freq,
            "delete_checkpoint": self.delete_checkpoint,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> DatasetCheckpoint:
        """Makes a callback from the result of `get_config`."""
        return cls(**config)

    # -- called by Keras ----------------------------------------------------

    def set_params(self, params: Any) -> None:
        """Accepts Keras's parameters, and finds the other callbacks in use.

        Keras calls this method first.
        """
        super().set_params(params)  # type: ignore[misc]
        self._beside = keras_bridge.callbacks_beside()

    def on_train_begin(self, logs: Any = None) -> None:
        self._adapter = self._backup = None
        feature = keras_bridge.Feature
        needed = feature.FIT, feature.RESUME, feature.BESIDE
        if not all(map(keras_bridge.has, needed)):
            return  # as the warning at the import has said
        training = keras_bridge.training()
        if training.adapter is None:
            _log.warning(
                "DatasetCheckpoint has nothing to save: the training data of "
                "this `fit` is no FastPyDataset."
            )
            return
        backup = _backup_before(self, self._beside)
        if backup is not None and not keras_bridge.has(feature.BACKUP):
            return
        self._adapter, self._backup = training.adapter, backup
        self._length = training.num_batches
        self._states = SavedStates(self.path)
        self._since_saved = 0
        epoch = training.initial_epoch
        saved = self._saved_for(self._states, epoch)
        dataset = self._adapter.py_dataset
        if saved is not None:
            try:
                dataset.load_state_dict(saved["dataset"])
            except ValueError as error:
                error.add_note(f"The state is in {self.path}.")
                raise
            if not training.has_steps:
                saved = after_empty_rest(dataset, saved, training.num_batches)
            if saved["epoch"] != epoch:
                # It was saved behind the last batch of its epoch; or in an
                # epoch that was itself resumed, which BackupAndRestore takes
                # for epoch 0.
                keras_bridge.set_initial_epoch(self.model, saved["epoch"])
        elif epoch:
            self._begin_with(epoch)
        else:
            self._warn_of_a_drawn_seed()
        if backup is not None:
            self._save_before(backup)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        if self._adapter is None or self._states is None:
            return
        latest = self._states.added
        if (
            latest is None
            or latest["epoch"] != epoch
            or latest["dataset"]["position"]
        ):
            return
        # It was saved behind the last batch of the epoch before. Validations
        # may have gone through the dataset since.
        state = state_after(self._adapter, None, self._length)
        if state != latest["dataset"]:
            self._states.add({**latest, "dataset": state})

    @property
    def async_safe(self) -> bool:
        """Whether Keras is allowed to start a step before this callback runs.

        `False` if it may save then: training must stand where the file says.
        """
        return self.save_freq == "epoch"

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch <= self._last_batch:
            self._last_batch = -1  # of a new epoch
        self._since_saved += batch - self._last_batch
        self._last_batch = batch
        if (
            isinstance(self.save_freq, int)
            and self._backup is None
            and self._since_saved >= self.save_freq
        ):
            self._save(batch + 1)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._last_batch = epoch + 1, -1
        if self.save_freq == "epoch" and self._backup is None:
            self._save(None)

    def on_train_end(self, logs: Any = None) -> None:
        is_ours = self._adapter is not None
        self._adapter = self._backup = None
        if is_ours:
            # Else the model's next `fit` begins at the epoch of this one.
            keras_bridge.set_initial_epoch(self.model, None)
        if self.delete_checkpoint and is_ours:
            with contextlib.suppress(FileNotFoundError):
                os.remove(self.path)

    # -- beside BackupAndRestore ----------------------------------------------

    def _save_before(self, backup: keras_bridge.KerasBackup) -> None:
        """Registers a function that saves the state before weights are saved.

        After a kill in between, the weights are the older ones; and their
        state is still in the file.
        """

        def save() -> None:
            if self._adapter is not None and self._backup is backup:
                within = self._adapter.progress.is_within_epoch
                epoch, batch = backup.position
                if not within:
                    self._epoch = epoch
                self._save(batch + 1 if within else None)

        backup.save_first(save)

    # -- where the data goes on ----------------------------------------------

    def _warn_of_a_drawn_seed(self) -> None:
        dataset = self._adapter.py_dataset
        if (
            self._adapter.has_hooks
            and internals_of(dataset).settings.seed is None
            and not is_repeatable()
        ):
            _log.warning(
                "%s has no `seed`: its epoch hooks run with one that is drawn "
                "anew in every process, before DatasetCheckpoint can restore "
                "it. Pass `seed=` to its constructor, or this `fit` cannot be "
                "resumed.",
                type(dataset).__name__,
            )

    def _begin_with(self, epoch: int) -> None:
        """Moves the dataset to the start of `epoch` without a saved state."""
        dataset = self._adapter.py_dataset
        if self._adapter.next_epoch == epoch:
            return  # it was trained on until here
        if self._adapter.has_hooks:
            raise ValueError(
                f"`fit` is to begin with epoch {epoch}, and {self.path} does "
                f"not say what {type(dataset).__name__} was like then, which "
                "its epoch hooks change. Begin anew, or leave out "
                "DatasetCheckpoint."
            )
        dataset.set_epoch(epoch)

    def _save(self, steps: int | None) -> None:
        """Saves the state of the data after `steps` steps of an epoch.

        `None` stands for the end of the epoch.
        """
        if self._adapter is None or self._states is None:
            return
        self._since_saved = 0
        state = state_after(self._adapter, steps, self._length)
        is_over = steps is not None and not state["position"]
        backup = self._backup
        moment = (
            None if backup is None else _moment(self.model, *backup.position)
        )
        self._states.add(
            {
                "epoch": self._epoch + is_over,
                "saved_at": moment,
                "dataset": state,
            }
        )

    def _saved_for(self, states: SavedStates, epoch: int) -> Saved | None:
        """Returns the saved state for a `fit` that begins at `epoch`.

        `None` if there is no such state.
        """
        latest = states.latest
        if self._backup is not None:
            restored = self._backup.restored()
            if restored is None:
                states.keep_only(None)
                return None  # there are no weights to go on with
            found = states.find_moment(_moment(self.model, *restored))
            if found is not None:
                states.keep_only(found)
                return found
            if latest is None and not restored[1]:
                return None  # the beginning of an epoch
            raise _mismatch(self._backup, restored, self.path)
        found = states.find("epoch", epoch)
        if found is None and latest is not None:
            _log.warning(
                "%s says where the data stood in epoch %d, and `fit` begins "
                "with epoch %d: it is not used. Pass `initial_epoch=%d` to go "
                "on, and load the weights of that epoch, or use "
                "`keras.callbacks.BackupAndRestore`.",
                self.path,
                latest["epoch"],
                epoch,
                latest["epoch"],
            )
        return found


def _backup_before(
    callback: DatasetCheckpoint, beside: list[Any]
) -> keras_bridge.KerasBackup | None:
    """Returns the `BackupAndRestore` that Keras calls before `callback`."""
    for place, other in enumerate(beside):
        if isinstance(other, keras.callbacks.BackupAndRestore):
            if callback in beside[:place]:
                raise ValueError(
                    "DatasetCheckpoint must come behind BackupAndRestore "
                    "in `callbacks`: what that restores tells where the "
                    "data is to go on."
                )
            return keras_bridge.KerasBackup(other)
    return None


def _moment(model: Any, epoch: int, batch: int) -> list[int]:
    """Returns four numbers that identify the weights of a model.

    They are the epoch, the batch, the optimizer step and a checksum. The step
    of a model that trains with optimizers of its own may not move.
    """
    checksum = 0
    for weight in model.weights:
        with ignoring_errors():  # in parts on several machines
            values = np.ascontiguousarray(keras.ops.convert_to_numpy(weight))
            content = values.reshape(-1).view(np.uint8).data
            checksum = zlib.crc32(content, checksum)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return [epoch, batch, 0, checksum]
    # `optimizer.iterations` counts several steps as one where gradients are
    # accumulated; and a `LossScaleOptimizer` has a counter that does not move.
    counters = [v for v in optimizer.variables if v.name == "iteration"]
    # Not `int`, which a variable that several devices mirror has not.
    steps = map(keras.ops.convert_to_numpy, counters or [optimizer.iterations])
    return [epoch, batch, int(max(steps)), checksum]


def _mismatch(
    backup: keras_bridge.KerasBackup, restored: tuple[int, int], path: str
) -> ValueError:
    """Returns the error for weights that no state in `path` belongs to."""
    epoch, batch = restored
    if not backup.has_weights:
        return ValueError(
            f"{backup.folder} says that `fit` goes on with epoch {epoch}, but "
            "has no weights. Training may have been killed while Keras deleted "
            f"that folder, at the end of `fit`. Remove the folder and {path} "
            "to begin anew."
        )
    return ValueError(
        f"The weights of {backup.folder} were saved after batch {batch} of "
        f"epoch {epoch}, and {path} does not say where the data stood then. "
        "Another training may have saved the weights. Or Ctrl-C came while "
        "Keras wrote them: if there are files that end in `.bkp`, rename them "
        "to their names without `.bkp`. Otherwise, remove both checkpoints to "
        "begin anew."
    )
