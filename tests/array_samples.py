"""Functions that change batches, for workers that do not import Keras."""

from __future__ import annotations


def doubled(x, y):
    return 2 * x, y


def jittered(x, y, rng):
    x += rng.normal(size=x.shape)
    return x, y
