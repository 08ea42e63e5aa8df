"""Fast, dependable input pipelines for Keras 3."""

from __future__ import annotations

import importlib
import random
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_fastdata.callbacks.dataset_checkpoint import DatasetCheckpoint
    from keras_fastdata.callbacks.loader_health import LoaderHealth
    from keras_fastdata.dataset import FastPyDataset
    from keras_fastdata.datasets.accelerate import accelerate
    from keras_fastdata.datasets.arrays import ArrayDataset
    from keras_fastdata.datasets.generators import GeneratorDataset
    from keras_fastdata.datasets.images import ImageFileDataset
    from keras_fastdata.datasets.samples import SampleDataset
    from keras_fastdata.datasets.twins import (
        audio_dataset_from_directory,
        image_dataset_from_directory,
        text_dataset_from_directory,
        timeseries_dataset_from_array,
    )
    from keras_fastdata.errors import (
        BatchTimeoutError,
        DatasetPicklingError,
        EndOfData,
        LoaderError,
        WorkerDiedError,
    )
    from keras_fastdata.iterators import (
        ThreadSafeIterator,
        threadsafe_generator,
    )
    from keras_fastdata.profiling import profile
    from keras_fastdata.shared_list import SharedList

__version__ = "0.2.0"

__all__ = [
    "ArrayDataset",
    "BatchTimeoutError",
    "DatasetCheckpoint",
    "DatasetPicklingError",
    "EndOfData",
    "FastPyDataset",
    "GeneratorDataset",
    "ImageFileDataset",
    "LoaderError",
    "LoaderHealth",
    "SampleDataset",
    "SharedList",
    "ThreadSafeIterator",
    "WorkerDiedError",
    "accelerate",
    "audio_dataset_from_directory",
    "image_dataset_from_directory",
    "profile",
    "text_dataset_from_directory",
    "threadsafe_generator",
    "timeseries_dataset_from_array",
]

# A name's module is imported when the name is first used: a worker that
# imports the user's module, and so this package, must not pay for Keras.
_HOMES = {
    "ArrayDataset": "keras_fastdata.datasets.arrays",
    "BatchTimeoutError": "keras_fastdata.errors",
    "DatasetCheckpoint": "keras_fastdata.callbacks.dataset_checkpoint",
    "DatasetPicklingError": "keras_fastdata.errors",
    "EndOfData": "keras_fastdata.errors",
    "FastPyDataset": "keras_fastdata.dataset",
    "GeneratorDataset": "keras_fastdata.datasets.generators",
    "ImageFileDataset": "keras_fastdata.datasets.images",
    "LoaderError": "keras_fastdata.errors",
    "LoaderHealth": "keras_fastdata.callbacks.loader_health",
    "SampleDataset": "keras_fastdata.datasets.samples",
    "SharedList": "keras_fastdata.shared_list",
    "ThreadSafeIterator": "keras_fastdata.iterators",
    "WorkerDiedError": "keras_fastdata.errors",
    "accelerate": "keras_fastdata.datasets.accelerate",
    "audio_dataset_from_directory": "keras_fastdata.datasets.twins",
    "image_dataset_from_directory": "keras_fastdata.datasets.twins",
    "profile": "keras_fastdata.profiling",
    "text_dataset_from_directory": "keras_fastdata.datasets.twins",
    "threadsafe_generator": "keras_fastdata.iterators",
    "timeseries_dataset_from_array": "keras_fastdata.datasets.twins",
}


_MODULES = ("combine", "sources")  # `keras_fastdata.combine.mix(...)`


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if name in _MODULES:
        return importlib.import_module(f"keras_fastdata.{name}")
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Importing Keras draws from `random` and `np.random`.
    python_state, numpy_state = random.getstate(), None
    if "numpy.random" in sys.modules:
        from keras_fastdata.building import mt19937

        numpy_state = mt19937.Snapshot()
    try:
        value = getattr(importlib.import_module(home), name)
    finally:
        random.setstate(python_state)
        if numpy_state is not None:
            numpy_state.restore()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
