"""Variables that a program sets after this module was imported."""

import dataclasses

SCALE = 1
OPTIONS = {"sizes": [1]}
ARGS = None
LARGE = list(range(2000))


@dataclasses.dataclass
class Config:
    depth: int = 1


config = Config()
transform = abs
_is_ready = False
_table = None


def is_ready():
    """Makes a table of its own when it is first asked."""
    global _is_ready, _table
    if not _is_ready:
        _is_ready, _table = True, object()
    return _table is not None
