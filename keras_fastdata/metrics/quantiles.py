"""Computes quantiles of a stream of durations, in constant memory."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

_LEAST_S = 1e-6
_MOST_S = 1e5
_GROWTH = 1.02  # ratio of a bucket's bound to the one before
_LOG_GROWTH = math.log(_GROWTH)
_BUCKETS = math.ceil(math.log(_MOST_S / _LEAST_S) / _LOG_GROWTH) + 1


class Distribution:
    """Counts durations in logarithmic buckets.

    Quantiles are within 1% of a duration that was added, from one microsecond
    to a day. One microsecond and less counts as 0. (As in DDSketch, Masson et
    al., VLDB 2019.)
    """

    def __init__(self) -> None:
        self._counts = np.zeros(_BUCKETS, np.int64)

    @property
    def count(self) -> int:
        """The number of durations that were added."""
        return int(self._counts.sum())

    def add(
        self,
        seconds: npt.NDArray[np.float64],
        times: npt.NDArray[np.int64] | int = 1,
    ) -> None:
        """Adds durations; `times` says how often each duration occurred."""
        ratio = np.maximum(seconds, _LEAST_S) / _LEAST_S
        bucket = np.ceil(np.log(ratio) / _LOG_GROWTH).astype(np.int64)
        np.add.at(self._counts, np.minimum(bucket, _BUCKETS - 1), times)

    def quantile(self, share: float) -> float:
        """Returns quantile `share` of the durations; 0 without durations."""
        count = self.count
        if not count:
            return 0.0
        rank = max(1, math.ceil(share * count))
        bucket = int(np.searchsorted(np.cumsum(self._counts), rank))
        if not bucket:
            return 0.0
        return _LEAST_S * math.exp((bucket - 0.5) * _LOG_GROWTH)

    def histogram(self) -> list[tuple[float, float, int]]:
        """Returns `(lower bound, upper bound, count)` of each nonempty bucket.

        The bounds are in seconds.
        """
        return [
            (
                _LEAST_S * math.exp((i - 1) * _LOG_GROWTH) if i else 0.0,
                _LEAST_S * math.exp(i * _LOG_GROWTH),
                int(self._counts[i]),
            )
            for i in np.flatnonzero(self._counts)
        ]
