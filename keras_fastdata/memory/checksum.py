"""Computes a checksum of all that is in an array, and chooses samples."""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

_PIECE_NBYTES = 1 << 20

_iterate: Any = np.nditer  # its type stubs lack "contig"


def of(values: npt.NDArray[Any]) -> tuple[list[int], int]:
    """Returns the axes in the order of memory, and the CRC-32 of all bytes.

    The items of an array that is not in one piece are copied, 1 MiB at a time.
    """
    values = np.squeeze(values)
    strides = np.abs(values.strides)
    axes = np.argsort(-strides, kind="stable").tolist()
    pieces = _iterate(
        values.transpose(axes),
        flags=["external_loop", "buffered", "zerosize_ok"],
        op_flags=[["readonly", "contig"]],
        order="C",
        buffersize=max(1, _PIECE_NBYTES // max(1, values.itemsize)),
    )
    found = 0
    for piece in pieces:
        found = zlib.crc32(piece.view(np.uint8), found)
    return axes, found


def step_through(count: int, most: int) -> int:
    """Returns the distance between the items of a sample of about `most` items.

    It has no factor in common with the number of items. So the sample of an
    array has items of each column, and of each colour of an image.
    """
    step = max(1, count // most)
    while math.gcd(step, count) > 1:
        step += 1
    return step
