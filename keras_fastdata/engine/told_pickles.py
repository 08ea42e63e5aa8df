"""Describes values that workers are told of by their pickles."""

from __future__ import annotations

import dataclasses
import io
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt

from keras_fastdata.engine.kinds import kind_of
from keras_fastdata.engine.library_objects import (
    CODE_TYPES,
    SmallPickler,
    is_left_out,
)
from keras_fastdata.engine.slow_descriptions import once_if_slow
from keras_fastdata.memory.limited_stream import LimitedStream


@dataclasses.dataclass(frozen=True)
class Pickled:
    """Describes a value by its kind and its pickle.

    A worker makes the value if its own one is of another kind.
    """

    kind: tuple[str, str]  # see `kind_of`
    pickle: npt.NDArray[np.uint8] = dataclasses.field(compare=False, repr=False)

    def is_missing(self, before: Any, _: object) -> bool:
        """Returns whether a variable that has the value `before` lacks it."""
        return kind_of(before) != self.kind

    def make(self) -> Any:
        return pickle.loads(self.pickle.tobytes())


@once_if_slow
def as_pickled(value: Any) -> Pickled | None:
    """Describes a value, if it is no code and its pickle is small."""
    kind: Any = type(value)
    if isinstance(value, CODE_TYPES) or is_left_out(kind):
        return None
    stream = io.BytesIO()
    try:
        SmallPickler(LimitedStream(stream.write), protocol=5).dump(value)
    except Exception:
        return None
    pickled = np.frombuffer(stream.getvalue(), np.uint8)
    return Pickled(kind_of(value), pickled)
