"""Gives `FastPyDataset` its base class of Keras, in worker processes late.

A worker process imports the user's module, and imports no Keras for it. Once
the process has imported Keras, datasets are of the class `PyDataset` there,
too.
"""

from __future__ import annotations

from typing import Any

from keras_fastdata._call_stack import ignoring_errors


class LateBase:
    """The base of `FastPyDataset` until a worker process has imported Keras."""


def replace_late_base(base: type) -> None:
    """Gives `FastPyDataset` another base than `LateBase`."""
    for kind in LateBase.__subclasses__():
        dataset_class: Any = kind
        with ignoring_errors():  # a user's class may not allow this order
            dataset_class.__bases__ = (base,)
