"""`DatasetCheckpoint`: a training that was killed goes on with its data."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from typing import Any

from keras_fastdata import _atomic_write
from keras_fastdata._dataset_internals import internals_of, loader_of
from keras_fastdata._validation import boolean, integer
from keras_fastdata.callbacks.base import Callback, registered
from keras_fastdata.engine.batch_iterator import has_rest
from keras_fastdata.engine.state_dict import at_end

_Saved = dict[str, Any]

# Weights are saved by somebody else, who may be killed in between: the states
# of two moments are kept, and that of the weights is taken.
_KEPT = 2

_log = logging.getLogger("keras_fastdata")


@registered
class DatasetCheckpoint(Callback):
    """Saves where the training data stands, and restores it.

    Put it behind `keras.callbacks.BackupAndRestore`, and it saves when that
    does: a `fit` that was killed and is called again, in a new process, has the
    weights, the epoch and the optimizer from there, and from here the batches
    of that epoch that it had not trained on, with the bytes they would have
    had. That epoch is shorter by those before. Number and kind of workers may
    be others than they were.

    Without `BackupAndRestore`, load the weights yourself, and say by
    `fit(initial_epoch=...)` where to go on: in the middle of that epoch, if
    the latest state is, and else at its beginning.

    With `steps_per_epoch` the data goes on where it was, and the epoch that
    is resumed has all of its steps again. What `fit` gets must be a
    `FastPyDataset`; its validation data begins anew each time in any case.

    A `fit` that was killed amid a validation goes on with the next epoch. If
    the training data is the validation data as well, later epochs then have
    other numbers than without the crash: validate with a dataset of its own.

    Args:
        path: The file to save to, JSON of about a kilobyte. It is replaced in
            one piece, so that it is whole at any time.
        save_freq: "epoch", or after how many batches to save; of no effect
            beside `BackupAndRestore`.
        delete_checkpoint: Whether to remove the file when `fit` has come to
            its end, so that the next one begins at the beginning. Defaults
            to `True`, as for `BackupAndRestore`.

    Raises:
        ValueError: An argument is out of range. In `fit`: the state in the
            file is of another dataset; or a `BackupAndRestore` comes behind.
        LoaderError: In `fit`, the dataset's epoch hooks do not do what they
            did.

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
        self._states: list[_Saved] = []
        self._backup: Any = None
        self._epoch = 0
        self._last_batch = -1
        self._since_saved = 0

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments, for `keras.saving`."""
        return {
            "path": self.path,
            "save_freq": self.save_freq,
            "delete_checkpoint": self.delete_checkpoint,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> DatasetCheckpoint:
        """The callback that `get_config` describes."""
        return cls(**config)

    # -- called by Keras ----------------------------------------------------

    def set_params(self, params: Any) -> None:
        """Keras calls this when `fit`, `evaluate` or `predict` begins."""
        super().set_params(params)  # type: ignore[misc]
        from keras_fastdata import keras_bridge

        self._beside = keras_bridge.callbacks_beside()

    def on_train_begin(self, logs: Any = None) -> None:
        from keras_fastdata import keras_bridge
        from keras_fastdata.keras_bridge import Feature

        self._adapter = self._backup = None
        needed = Feature.FIT, Feature.RESUME, Feature.BESIDE
        if not all(map(keras_bridge.has, needed)):
            return  # as the warning at the import has said
        training = keras_bridge.training()
        self._adapter = training.adapter
        if self._adapter is None:
            _log.warning(
                "DatasetCheckpoint has nothing to save: the training data of "
                "this `fit` is no FastPyDataset."
            )
            return
        backup = self._find_backup()
        if backup is not None and not keras_bridge.has(Feature.BACKUP):
            self._adapter = None
            return
        self._backup = backup
        self._states = self._read()
        self._since_saved = 0
        epoch = training.initial_epoch
        state = self._state_for(epoch)
        dataset = self._adapter.py_dataset
        if state is not None:
            try:
                dataset.load_state_dict(state["dataset"])
            except ValueError as error:
                error.add_note(f"The state is in {self.path}.")
                raise
            if not training.has_steps:
                length = training.num_batches
                state = self._after_empty_rest(state, length)
            if state["epoch"] != epoch:
                # It was saved behind the last batch of its epoch; or in an
                # epoch that was itself resumed, which BackupAndRestore takes
                # for epoch 0.
                keras_bridge.set_initial_epoch(self.model, state["epoch"])
        elif epoch:
            self._begin_with(epoch)
        else:
            self._warn_of_a_drawn_seed()
        if backup is not None:
            self._save_before(backup)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        if self._adapter is None or not self._states:
            return
        latest = self._states[-1]
        if latest["epoch"] != epoch or latest["dataset"]["position"]:
            return
        # It was saved behind the last batch of the epoch before. Validations
        # may have gone through the dataset since.
        state = self._adapter.state(None)
        if state != latest["dataset"]:
            self._write(state, epoch, latest["saved_at"])

    @property
    def async_safe(self) -> bool:
        """Whether Keras may go on while a step is looked at.

        Not where that may save: training must stand where the file says.
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
        if self.delete_checkpoint and is_ours:
            with contextlib.suppress(FileNotFoundError):
                os.remove(self.path)

    # -- beside BackupAndRestore ----------------------------------------------

    def _find_backup(self) -> Any:
        import keras

        from keras_fastdata import keras_bridge

        before = True
        for callback in self._beside:
            if callback is self:
                before = False
            elif isinstance(callback, keras.callbacks.BackupAndRestore):
                if not before:
                    raise ValueError(
                        "DatasetCheckpoint must come behind BackupAndRestore "
                        "in `callbacks`: what that restores tells where the "
                        "data is to go on."
                    )
                return keras_bridge.KerasBackup(callback)
        return None

    def _save_before(self, backup: Any) -> None:
        """Has a state saved just before the weights that belong to it.

        Killed in between, the weights are the older ones; and their state is
        still in the file.
        """

        def save() -> None:
            if self._adapter is not None and self._backup is backup:
                within = self._adapter.is_within_epoch
                epoch, batch = backup.position
                if not within:
                    self._epoch = epoch
                self._save(batch + 1 if within else None)

        backup.save_first(save)

    def _moment(self, epoch: int, batch: int) -> list[int]:
        """What tells which weights a state belongs to."""
        import keras

        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is None:
            return [epoch, batch, 0]
        # Not `int`, which a variable that several devices mirror has not.
        steps = keras.ops.convert_to_numpy(optimizer.iterations)
        return [epoch, batch, int(steps)]

    def _warn_of_a_drawn_seed(self) -> None:
        dataset = self._adapter.py_dataset
        drawn = internals_of(dataset).settings.seed is None
        if drawn and self._adapter.has_hooks and not self._adapter.is_seeded:
            _log.warning(
                "%s has no `seed`: its epoch hooks run with one that is drawn "
                "anew in every process, before DatasetCheckpoint can restore "
                "it. Pass `seed=` to its constructor, or this `fit` cannot be "
                "resumed.",
                type(dataset).__name__,
            )

    def _after_empty_rest(self, state: _Saved, length: int | None) -> _Saved:
        """Has the next epoch begin if no good batch is left in the saved one.

        When a state is saved, nobody may know yet that all batches behind that
        place are skipped, or that there are none.

        Args:
            state: The saved state.
            length: How many batches `fit` takes in an epoch, if that is known.
        """
        dataset, saved = self._adapter.py_dataset, state["dataset"]
        if not (saved["within"] and saved["position"]):
            return state
        loader = loader_of(dataset)
        if not has_rest(loader, dataset, length):
            state = {**state, "epoch": state["epoch"] + 1}
            state["dataset"] = at_end(saved)
        elif loader.checkpoint.resumes:
            return state  # no batch was built to find out
        dataset.load_state_dict(state["dataset"])
        return state

    def _begin_with(self, epoch: int) -> None:
        """Begins a later epoch, of which nothing was saved."""
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

    # -- the file -----------------------------------------------------------

    def _save(self, steps: int | None) -> None:
        """Saves the state after so many steps of an epoch, or its end."""
        if self._adapter is None:
            return
        self._since_saved = 0
        state = self._adapter.state(steps)
        is_over = steps is not None and not state["position"]
        backup, saved_at = self._backup, None
        if backup is not None:
            saved_at = self._moment(*backup.position)
        self._write(state, self._epoch + is_over, saved_at)

    def _write(
        self, state: dict[str, Any], epoch: int, saved_at: list[int] | None
    ) -> None:
        """Writes a state, with which epoch and which weights it belongs to."""
        found: _Saved = {
            "epoch": epoch,
            "saved_at": saved_at,
            "dataset": state,
        }
        others = [
            s
            for s in self._states
            if saved_at is None or s["saved_at"] != saved_at
        ]
        self._states = [*others, found][-_KEPT:]
        with _atomic_write.replacing(self.path, durable=True) as file:
            file.write(json.dumps({"states": self._states}).encode())

    def _read(self) -> list[_Saved]:
        try:
            with open(self.path) as file:
                return [*map(_checked, json.load(file)["states"])]
        except FileNotFoundError:
            return []
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{self.path} was not written by DatasetCheckpoint, or is "
                f"damaged: {error!r:.200}. Pass another `path`, or remove the "
                "file."
            ) from error

    def _state_for(self, epoch: int) -> _Saved | None:
        """The state to go on from, if `fit` is to begin with that epoch."""
        if self._backup is not None:
            restored = self._backup.restored()
            if restored is None:
                return None  # there are no weights to go on with
            saved_at = self._moment(*restored)
            for found in reversed(self._states):
                if found["saved_at"] == saved_at:
                    return found
            if not self._states and not restored[1]:
                return None  # the beginning of an epoch
            raise ValueError(
                f"The weights of {self._backup.folder} were saved after "
                f"batch {restored[1]} of epoch {restored[0]}, and {self.path} "
                "does not say where the data stood then. Was it saved by "
                "another training? Remove both checkpoints to begin anew."
            )
        for found in reversed(self._states):
            if found["epoch"] == epoch:
                return found
        if self._states:
            latest = self._states[-1]["epoch"]
            _log.warning(
                "%s says where the data stood in epoch %d, and `fit` begins "
                "with epoch %d: it is not used. Pass `initial_epoch=%d` to go "
                "on, and load the weights of that epoch, or use "
                "`keras.callbacks.BackupAndRestore`.",
                self.path,
                latest,
                epoch,
                latest,
            )
        return None


def _checked(saved: Any) -> _Saved:
    """Checks what `_save` wrote, except the content of `dataset`.

    Raises:
        ValueError: It did not; or a `KeyError` or `TypeError`.
    """
    epoch, moment, state = (
        saved[name] for name in ("epoch", "saved_at", "dataset")
    )
    numbers = [epoch] if moment is None else [epoch, *moment]
    if any(type(number) is not int for number in numbers) or epoch < 0:
        raise ValueError(f"`epoch` {epoch!r}, `saved_at` {moment!r}")
    if not isinstance(state, dict):
        raise ValueError(f"`dataset` {state!r}")
    return {"epoch": epoch, "saved_at": moment, "dataset": state}
