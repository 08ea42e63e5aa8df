"""Defines the states of `LoaderHealth`, and the events that change them.

IDLE --on_train_begin--> FIT --on_train_end--> IDLE
IDLE --on_test_begin--> EVALUATE --on_test_end--> IDLE
IDLE --on_predict_begin--> PREDICT --on_predict_end--> IDLE
FIT --set_params within the fit--> FIT_NESTED
FIT_NESTED --its end, or a training step--> FIT
any --set_params elsewhere--> IDLE: the former call was interrupted
"""

from __future__ import annotations

import enum


class Measured(enum.Enum):
    """The Keras method that `LoaderHealth` measures; `IDLE` if none."""

    IDLE = enum.auto()  # nothing
    FIT = enum.auto()  # a `fit`, and its validations
    # A `fit` that waits while one of its callbacks evaluates or predicts with
    # the same LoaderHealth, which does not measure this.
    FIT_NESTED = enum.auto()
    EVALUATE = enum.auto()  # an `evaluate` by itself
    PREDICT = enum.auto()  # a `predict` by itself
