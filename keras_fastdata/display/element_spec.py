"""Describes the batches of a dataset by shapes and dtypes."""

from __future__ import annotations

from typing import Any

from keras_fastdata.display.samples import build_batch
from keras_fastdata.engine.sharding import has_random_access
from keras_fastdata.errors import EndOfData


def element_spec(dataset: Any) -> Any:
    """Returns the structure of a batch, with a `KerasTensor` for each array.

    The first two batches and the last one are built. An axis whose length
    differs between them has the length `None`.
    """
    from keras_fastdata import keras_bridge

    count = dataset.num_batches
    indices = {0, 1}
    if count is not None:
        indices = {0, 1, count - 1}.intersection(range(count))
    if not has_random_access(dataset):
        indices &= {0, 1}  # all batches before the last one would be built
    batches = []
    for index in sorted(indices):
        try:
            batches.append(build_batch(dataset, index))
        except EndOfData:
            break
    if not batches:
        raise ValueError(
            f"This {type(dataset).__name__} has no batch, so that the shapes "
            "of its arrays are not known."
        )
    return keras_bridge.spec_of(batches)
