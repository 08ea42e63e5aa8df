"""Files that are replaced in one piece.

A new file is written beside the old one and takes its name once it is whole:
whoever reads finds the one or the other, whenever the writer is killed. Until
then it has a name that nobody can guess, and must be new, so that a link that
somebody put there is never followed. Its permissions follow the umask.
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
    """Opens a file to write that takes the place of `path` at the end.

    Args:
        path: The file to replace; folders that are missing are made.
        durable: Whether the new file is to be on the disk before it has the
            name, so that it is whole even after a power failure.

    Raises:
        OSError: The file could not be written. The old one is as it was.
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
    """Returns a name in the folder of `path`, which is made if need be.

    The file must be opened with `O_EXCL`.
    """
    folder, name = os.path.split(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    # A part of the name, since there is a limit of 255 bytes.
    return os.path.join(folder, f".{name[:50]}.{secrets.token_hex(8)}.tmp")
