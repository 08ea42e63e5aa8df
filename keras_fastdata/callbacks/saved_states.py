"""Reads and writes the file in which `DatasetCheckpoint` saves states."""

from __future__ import annotations

import json
from typing import Any

from keras_fastdata import _atomic_write
from keras_fastdata._dataset_internals import loader_of
from keras_fastdata.engine.batch_iterator import has_rest
from keras_fastdata.engine.state_dict import at_end

# "epoch": the epoch of `fit`; "saved_at": the moment of the weights, or `None`;
# "dataset": its `state_dict()`.
Saved = dict[str, Any]

# Keras saves the weights after the state, and may be killed in between. So the
# states of two moments are kept, and the one of the weights is restored.
_KEPT = 2


class SavedStates:
    """The latest saved states of a dataset, kept in a file.

    Args:
        path: The file; it may be missing.

    Attributes:
        added: The state that this object saved last, if any.

    Raises:
        ValueError: The file is damaged, or is none of `DatasetCheckpoint`.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._states: list[Saved] = []
        self.added: Saved | None = None
        try:
            with open(path) as file:
                self._states += map(_checked, json.load(file)["states"])
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{path} was not written by DatasetCheckpoint, or is "
                f"damaged: {error!r:.200}. Pass another `path`, or remove the "
                "file."
            ) from error

    @property
    def latest(self) -> Saved | None:
        """The state that was saved last, or `None` without saved states."""
        return self._states[-1] if self._states else None

    def find(self, key: str, value: Any) -> Saved | None:
        """Returns the latest state whose field `key` equals `value`.

        Returns `None` if there is no such state.
        """
        for saved in reversed(self._states):
            if saved[key] == value:
                return saved
        return None

    def find_moment(self, moment: list[int]) -> Saved | None:
        """Finds the saved state that belongs to the given model weights.

        Keras may be killed after it saved the weights and before it saved
        their epoch and batch. Then only the optimizer step and the checksum
        are compared. The checksum does not count where no state has it: an
        earlier version saved none, and a model may restore other weights than
        it saved.

        Args:
            moment: Epoch, batch, optimizer step and checksum that identify the
                weights.
        """
        step = moment[2]
        known = [one for one in self._states if one["saved_at"] is not None]
        for part in (
            slice(4),
            slice(2, 4),  # without epoch and batch
            slice(3),  # without the checksum
            *([slice(2, 3)] if step else []),  # the step alone
        ):
            for saved in reversed(known):
                if saved["saved_at"][part] == moment[part]:
                    return saved
        return None

    def keep_only(self, saved: Saved | None) -> None:
        """Forgets all states but the one that training goes on from, if any.

        Its weights are the only ones that exist until others are saved. The
        file changes with the next state that is added.
        """
        self._states = [] if saved is None else [saved]

    def add(self, saved: Saved) -> None:
        """Saves a state; replaces an earlier state of the same model weights.

        `saved["saved_at"]` identifies the weights. A state in which it is
        `None` replaces no other state.
        """
        moment = saved["saved_at"]
        others = [
            other
            for other in self._states
            if moment is None or other["saved_at"] != moment
        ]
        self._states = [*others, saved][-_KEPT:]
        self.added = saved
        with _atomic_write.replacing(self._path, durable=True) as file:
            file.write(json.dumps({"states": self._states}).encode())


def _checked(saved: Any) -> Saved:
    """Validates a state from the file, except the content of "dataset".

    Raises:
        ValueError: The state is damaged; or a `KeyError` or `TypeError`.
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


def state_after(
    adapter: Any, steps: int | None, length: int | None
) -> dict[str, Any]:
    """Returns the state of the training data after some steps of an epoch.

    Keras takes as many batches as the dataset had when `fit` was called,
    though the dataset may have become longer. Then its epoch is over.

    Args:
        adapter: The adapter of the dataset.
        steps: Steps in Keras's present epoch; `None` after its end.
        length: How many batches Keras takes of the dataset's epoch, if known.
    """
    state: dict[str, Any] = adapter.state(steps)
    shard = loader_of(adapter.py_dataset).description().shard
    if length is not None and state["position"] // shard.count >= length:
        return at_end(state)
    return state


def after_empty_rest(dataset: Any, saved: Saved, length: int | None) -> Saved:
    """Moves the state to the next epoch if the saved epoch has no batches left.

    When a state is saved, nobody may know yet that all batches behind its
    position are skipped, or that there are none.

    Args:
        dataset: The dataset, which has loaded the state.
        saved: The saved state.
        length: How many batches `fit` takes in an epoch, if that is known.

    Returns:
        The state that the dataset now has.
    """
    state = saved["dataset"]
    if not (state["within"] and state["position"]):
        return saved
    loader = loader_of(dataset)
    if not has_rest(loader, dataset, length):
        saved = {
            **saved,
            "epoch": saved["epoch"] + 1,
            "dataset": at_end(state),
        }
    elif loader.checkpoint.resumes:
        return saved  # no batch was built to find out
    dataset.load_state_dict(saved["dataset"])
    return saved
