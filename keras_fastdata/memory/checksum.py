"""Computes checksums of large arrays about as fast as memory can be read."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

_PIECE_NBYTES = 1 << 20  # the processor's cache holds a piece
_ROW = 1 << 14  # words of 64 bits that are added up to one

_iterate: Any = np.nditer  # its type stubs lack "contig"

# An odd factor for each word of a row. So the sum changes with each word, and
# when two words change places.
_FACTORS = np.random.SeedSequence(0).generate_state(_ROW, np.uint64) | 1


def of(values: npt.NDArray[Any]) -> tuple[list[int], int]:
    """Returns the axes in the order of memory, and a checksum of all bytes.

    Reads nine bytes in a nanosecond, where CRC-32 alone reads three. An array
    that is not in one piece takes six times as long: its items are copied, a
    piece at a time.
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
        content = piece.view(np.uint8)
        rows = len(content) // (8 * _ROW)
        words = content[: rows * 8 * _ROW].view(np.uint64)
        sums = np.einsum("ij,j->i", words.reshape(rows, _ROW), _FACTORS)
        rest = content[rows * 8 * _ROW :]
        found = zlib.crc32(rest, zlib.crc32(sums, found))
    return axes, found
