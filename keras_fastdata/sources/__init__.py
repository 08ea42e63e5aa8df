"""Sources of samples: files by format, and where they lie."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_fastdata.sources.array_record import ArrayRecord
    from keras_fastdata.sources.packing import Packed
    from keras_fastdata.sources.parquet import Parquet
    from keras_fastdata.sources.storage import Storage
    from keras_fastdata.sources.tar import Tar
    from keras_fastdata.sources.tfrecord import TFRecord

__all__ = ["ArrayRecord", "Packed", "Parquet", "Storage", "TFRecord", "Tar"]

# A name's module is imported when the name is first used.
_HOMES = {
    "ArrayRecord": "array_record",
    "Packed": "packing",
    "Parquet": "parquet",
    "Storage": "storage",
    "TFRecord": "tfrecord",
    "Tar": "tar",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
