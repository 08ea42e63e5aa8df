"""The global random generators, left as they were found."""

from __future__ import annotations

import random

from keras_fastdata.engine import mersenne, seeding


class preserved_globals:
    """Leaves the global generators as it found them.

    Attributes:
        depth: How many are entered now, in all threads.
        crossings: How often any was entered or left.
    """

    depth = 0
    crossings = 0

    def __enter__(self) -> None:
        preserved_globals.depth += 1
        preserved_globals.crossings += 1
        self._numpy = mersenne.Snapshot()
        self._python_state = random.getstate()
        self._torch = seeding.loaded_torch()
        self._torch_state = (
            None if self._torch is None else self._torch.get_rng_state()
        )

    def __exit__(self, *_: object) -> None:
        try:
            self._numpy.restore()
        finally:
            random.setstate(self._python_state)
            if self._torch is not None and self._torch_state is not None:
                self._torch.set_rng_state(self._torch_state)
            preserved_globals.depth -= 1
            preserved_globals.crossings += 1
