"""Functions for files, for workers that do not import Keras."""

from __future__ import annotations

import numpy as np


def brightness(image):
    return image[:4, :4] / 255


def first_bytes(text):
    assert type(text) is bytes
    return np.frombuffer(text[:4].ljust(4), "uint8")
