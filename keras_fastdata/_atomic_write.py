"""Replaces files atomically.

A new file is written beside the old one, and renamed once it is complete. A
reader finds either the old file or the new one, even if the writer is killed.
The temporary name is random, and the file must not exist yet, so that a link
that somebody placed there is never followed. Permissions follow the umask.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from typing import BinaryIO


@contextlib.contextmanager
def replacing(
    path: str | os.PathLike[str], *, durable: bool = False
) -> Iterator[BinaryIO]:
    """Opens a temporary file that replaces `path` at the end of the block.

    Args:
        path: The file to replace; missing folders are made.
        durable: Whether to write the new file to the disk before renaming
            it, so that it is complete even after a power failure.

    Raises:
        OSError: The file could not be written. The old one is unchanged.
    """
    target = os.path.abspath(path)
    temporary = name_beside(target)
    try:
        with open(temporary, "xb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def name_beside(path: str | os.PathLike[str]) -> str:
    """Returns a temporary file name in the folder of `path`.

    Creates the folder if it is missing.

    Open the file with `O_EXCL`.
    """
    folder, name = os.path.split(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    # Only a part of the name: file names are limited to 255 bytes.
    return os.path.join(folder, f".{name[:50]}.{secrets.token_hex(8)}.tmp")
