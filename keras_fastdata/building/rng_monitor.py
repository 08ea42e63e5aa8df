"""Notices worker threads that draw from random generators which they share."""

from __future__ import annotations

import random
import threading
import warnings
from typing import Any

import numpy as np

from keras_fastdata.building import global_rng, seeding
from keras_fastdata.errors import LoaderError


class GlobalRngUsedError(LoaderError):
    """Raised if a build in a thread possibly used shared random generators.

    The batch is then built again, while no other thread builds.
    """


class GlobalRngMonitor:
    """Detects worker threads that draw from shared random generators.

    Args:
        warns: Whether to check only the first builds, and warn once. If not,
            all builds are checked, and `GlobalRngUsedError` is raised for one
            that may have drawn.
    """

    # During one build, another thread of the program may have drawn.
    _TELLING = 2
    # A check costs some 30 us a batch; a dataset that draws does so early.
    _BUILDS_WATCHED = 64

    def __init__(self, *, warns: bool) -> None:
        self._warns = warns
        self._moved = 0
        self._watched = 0
        self._local = threading.local()

    def begin(self) -> None:
        """Records the state of the shared random generators before a build."""
        self._local.before = None
        is_early = self._watched < self._BUILDS_WATCHED
        if (is_early and self._moved < self._TELLING) or not self._warns:
            self._watched += 1
            crossings = global_rng.crossings()
            self._local.before = self._positions(), crossings, self._moved

    def end(self, dataset: str) -> None:
        """Warns or raises if a build changed shared random generators."""
        before = self._local.before
        if before is None:
            return
        positions, crossings, moved = before
        # Another thread may have built inline, and seeded the generators.
        crossed = (
            global_rng.are_preserved() or global_rng.crossings() != crossings
        )
        has_moved = positions != self._positions()
        if not self._warns and (crossed or has_moved):
            raise GlobalRngUsedError(
                "While a thread built a batch, it or another thread drew from "
                "`np.random` or `random`."
            )
        # Several threads build at once; one draw shows in each of the builds.
        is_counted = self._moved != moved
        if self._warns and has_moved and not crossed and not is_counted:
            self._moved += 1
            if self._moved == self._TELLING:
                warnings.warn(
                    f"{dataset}.__getitem__, or other code meanwhile, draws "
                    "from `np.random` or `random`. Worker threads share those "
                    "generators with the program: a batch that draws from them "
                    "cannot be repeated. Draw from `self.rng`, which belongs "
                    "to the batch, or pass `use_multiprocessing=True`.",
                    stacklevel=2,
                )

    def _positions(self) -> tuple[Any, ...]:
        # A model of PyTorch may draw from torch's generator in each step, so
        # no warning depends on that generator.
        return positions(None if self._warns else seeding.loaded_torch())


def positions(torch: Any) -> tuple[Any, ...]:
    """Returns a summary of the states of the global random generators."""
    numpy: Any = np.random.get_state(legacy=False)
    state = numpy["state"]
    return (
        numpy["has_gauss"],
        (state["pos"], int(state["key"][0])) if "pos" in state else repr(state),
        hash(random.getstate()),
        torch and torch.get_rng_state().numpy().tobytes(),
    )
