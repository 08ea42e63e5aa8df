"""Variables that a program sets after this module was imported."""

import dataclasses
import functools

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


_scaled = None


def scaled():
    """Keeps what it computes from `SCALE`."""
    global _scaled
    if _scaled is None:
        _scaled = SCALE
    return _scaled


@functools.lru_cache
def cached():
    """Keeps what it computes from `SCALE`."""
    return SCALE


def rescale(scale):
    """Sets `SCALE`, and drops what was computed from it."""
    global SCALE, _scaled
    SCALE, _scaled = scale, None
    cached.cache_clear()
