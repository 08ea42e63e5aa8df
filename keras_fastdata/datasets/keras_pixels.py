"""Reads image files into the pixels that Keras's utility gives.

Keras decodes and resizes with TensorFlow: without antialiasing, in float32. The
sums here have the same order of additions, so that results are equal.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from keras_fastdata.datasets import decoding

_OWN = ("bilinear", "nearest", "bicubic")
_RARE = ("area", "lanczos3", "lanczos5", "gaussian", "mitchellcubic")
INTERPOLATIONS = (*_OWN, *_RARE)

_ROWS = 32  # that are resized together; all would not fit into a core's cache
_CUBIC_STEPS = 1024  # per pixel, to which TensorFlow rounds for "bicubic"


@dataclasses.dataclass(frozen=True)
class KerasPixels:
    """Reads an image file; a function that can be pickled."""

    size: tuple[int, int]  # height and width
    mode: str  # a key of `decoding.MODES`
    interpolation: str  # one of `INTERPOLATIONS`
    crops: bool  # to the aspect ratio of `size`
    pads: bool  # with black, to that ratio
    channels_first: bool
    noun = "images"
    formats = decoding.FORMATS

    def __call__(self, path: str) -> Any:
        """Returns the image as float32; for "nearest", as uint8."""
        pixels = decoding.decode_as_tensorflow(path, self.mode)
        size = np.array(self.size, np.float32)
        before = np.array(pixels.shape[:2], np.float32)
        if self.crops:
            wanted = (before[::-1] * size / size[::-1]).astype(int)
            kept = np.maximum(np.minimum(pixels.shape[:2], wanted), 1)
            top, left = (pixels.shape[:2] - kept) // 2
            pixels = pixels[top : top + kept[0], left : left + kept[1]]
        if not self.pads:
            image = resize(pixels, *self.size, self.interpolation)
        else:
            after = before / (before / size).max()
            height, width = np.maximum(after.astype(int), 1).tolist()
            top, left = ((size - after) / 2).astype(int)
            inner = resize(pixels, height, width, self.interpolation)
            image = np.zeros((*self.size, inner.shape[2]), inner.dtype)
            image[top : top + height, left : left + width] = inner
        return image.transpose(2, 0, 1) if self.channels_first else image


def resize(pixels: Any, height: int, width: int, method: str) -> Any:
    """Resizes an image `(height, width, channels)` as TensorFlow does."""
    if method in _RARE:
        import tensorflow as tf

        with tf.device("CPU"):
            resizer = tf.image.resize(
                pixels[np.newaxis], (height, width), method
            )
            return resizer[0].numpy()
    rows, columns = (pixels.shape[0], height), (pixels.shape[1], width)
    if method == "nearest":
        for axis, (length, wanted) in enumerate((rows, columns)):
            at = _positions(length, wanted).astype(int)
            pixels = pixels.take(np.minimum(at, length - 1), axis)
        return pixels
    if method == "bilinear":
        return _bilinear(pixels, rows, columns)
    return _weigh(_weigh(pixels, 0, *_cubic(*rows)), 1, *_cubic(*columns))


def _positions(length: int, wanted: int) -> Any:
    """Returns where the centres of the new pixels lie on an axis."""
    scale = np.float32(length) / np.float32(wanted)
    return (np.arange(wanted, dtype=np.float32) + np.float32(0.5)) * scale


def _bilinear(
    pixels: Any, rows: tuple[int, int], columns: tuple[int, int]
) -> Any:
    def neighbours(length: int, wanted: int) -> tuple[Any, Any, Any]:
        at = _positions(length, wanted) - np.float32(0.5)
        low = np.floor(at)
        high = np.minimum(np.ceil(at), length - 1).astype(int)
        return np.maximum(low, 0).astype(int), high, at - low

    upper, lower, down = neighbours(*rows)
    left, right, across = neighbours(*columns)
    across = across.repeat(pixels.shape[2])  # faster than a short last axis
    found = np.empty((rows[1], len(across)), np.float32)
    for first in range(0, len(found), _ROWS):
        some = slice(first, first + _ROWS)
        # The rows above and those below the new ones.
        pairs = pixels.take(np.concatenate([upper[some], lower[some]]), 0)
        start, end = (
            pairs.take(side, 1).reshape(len(pairs), -1).astype(np.float32)
            for side in (left, right)
        )
        end -= start
        end *= across
        end += start
        top, change = np.split(end, 2)
        change -= top
        change *= down[some, np.newaxis]
        np.add(change, top, out=found[some])
    return found.reshape(rows[1], columns[1], -1)


def _weigh(pixels: Any, axis: int, taps: Any, weights: Any) -> Any:
    """Returns the weighted sums of pixels along an axis."""
    total: Any = np.float32(0)
    for places, weight in zip(taps.T, weights.T, strict=True):
        part = pixels.take(places, axis)
        by = weight.repeat(part.shape[2]) if axis else weight[:, np.newaxis]
        total = total + part.reshape(len(part), -1) * by
    return total.reshape(part.shape)


def _cubic(length: int, wanted: int) -> tuple[Any, Any]:
    """Returns which pixels of an axis make up each new one, and how much.

    Both are of shape `(wanted, 4)`. Pixels outside of the image weigh 0.
    """
    at = _positions(length, wanted) - np.float32(0.5)
    low = np.floor(at)
    taps = low[:, np.newaxis].astype(int) + np.arange(-1, 3)
    down = np.rint((at - low) * _CUBIC_STEPS)[:, np.newaxis] / _CUBIC_STEPS
    near = np.hstack([down, 1 - down]).astype(float)
    far = near + 1
    # The kernel of Keys, in float64 and then rounded.
    near = (1.5 * near - 2.5) * near * near + 1
    far = ((-0.5 * far + 2.5) * far - 4) * far + 2
    weights = np.hstack([far[:, :1], near, far[:, 1:]]).astype(np.float32)
    weights[(taps < 0) | (taps >= length)] = 0
    weights *= np.float32(1) / np.cumsum(weights, axis=1)[:, -1:]
    return np.clip(taps, 0, length - 1), weights
