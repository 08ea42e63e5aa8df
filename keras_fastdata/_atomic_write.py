"""Replaces files atomically.

A new file is written beside the old one, and renamed once it is complete. A
reader finds either the old file or the new one, even if the writer is killed.
The temporary name is random, and the file must not exist yet, so that a link
that somebody placed there is never followed. Permissions follow the umask.
A writer that is killed leaves its temporary file behind.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterator
from typing import BinaryIO

_TOKEN_BYTES = 8  # of a temporary name
_TEMPORARY = re.compile(rf"\..+\.[0-9a-f]{{{2 * _TOKEN_BYTES}}}\.tmp")
_ABANDONED_S = 24 * 3600.0  # without a write; no writer takes that long


@contextlib.contextmanager
def replacing(
    path: str | os.PathLike[str], *, durable: bool = False
) -> Iterator[BinaryIO]:
    """Opens a temporary file that replaces `path` after the `with` block.

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
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.errno and not error.filename:
            # `write` does not name the file.
            raise OSError(error.errno, error.strerror, target) from error
        raise


def name_beside(path: str | os.PathLike[str]) -> str:
    """Returns a temporary file name in the folder of `path`.

    Creates the folder if it is missing.

    Open the file with `O_EXCL`.
    """
    folder, name = os.path.split(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    token = secrets.token_hex(_TOKEN_BYTES)
    # Only a part of the name: file names are limited to 255 bytes.
    return os.path.join(folder, f".{name[:50]}.{token}.tmp")


def remove_abandoned(folder: str | os.PathLike[str]) -> None:
    """Removes temporary files that killed writers have left in a folder.

    Only files that nobody has written to for a day are removed. A writer that
    was suspended for longer fails, as if its disk were full.
    """
    latest_s = time.time() - _ABANDONED_S
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _TEMPORARY.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_mtime < latest_s:
                        os.unlink(entry.path)
