"""What a source is: samples by index, whatever is behind them.

The order of samples, shuffling, shards and resuming belong to the dataset that
reads the source. A source only answers which sample has index i, and the answer
must not change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
# A column of a batch: an array with one row for each sample, or a list with an
# array for each sample where these differ in shape.
Column = npt.NDArray[Any] | list[npt.NDArray[Any]]


class Source(Protocol):
    """Samples by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class BulkSource(Source, Protocol):
    """A source that fetches several samples at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Returns the samples with the given indices, in their order."""


class ColumnSource(Source, Protocol):
    """A source whose samples are rows of a table."""

    columns: Sequence[str]

    def get_columns(
        self, indices: Indices, names: Sequence[str]
    ) -> Mapping[str, Column]:
        """Returns the columns `names` of the rows `indices`, in their order."""


class PartedSource(Source, Protocol):
    """A source whose neighbouring samples are best read together.

    Attributes:
        part_lengths: The number of samples of each part, such as a row group
            of a Parquet file, or a shard. Their sum is the source's length.
    """

    part_lengths: Sequence[int]
