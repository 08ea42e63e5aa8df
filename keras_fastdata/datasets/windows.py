"""`Windows` has the windows of a series as its rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from keras_fastdata.building.build_context import Empty


class Windows:
    """The windows of a series, as the rows of an array that is never made.

    `ArrayDataset` copies the windows of a batch from the series at once.

    Args:
        series: An array whose first axis is time.
        length: Steps in a window, at least 1.
        stride: Steps from the beginning of a window to that of the next.
        rate: Steps from one element of a window to the next.
        count: The number of windows.
    """

    def __init__(
        self,
        series: npt.NDArray[Any],
        length: int,
        stride: int,
        rate: int,
        count: int,
    ) -> None:
        if not (series.flags.c_contiguous and series.flags.aligned):
            # `np.take` would make this copy for each batch.
            series = np.ascontiguousarray(series)
        self.series = series
        self.shape = (count, length, *series.shape[1:])
        self.dtype = series.dtype
        self._stride, self._rate = stride, rate

    def rows(
        self, indices: npt.NDArray[np.int64], empty: Empty
    ) -> npt.NDArray[Any]:
        """Returns a copy of the windows `indices`, which must be in range."""
        steps = np.arange(self.shape[1]) * self._rate
        places = indices[:, np.newaxis] * self._stride + steps
        if self.dtype.hasobject or self.dtype.kind == "T":
            found: npt.NDArray[Any] = self.series[places]
            return found
        found = empty((len(indices), *self.shape[1:]), self.dtype)
        # With mode="raise", NumPy would copy once more.
        np.take(self.series, places, axis=0, out=found, mode="clip")
        return found
