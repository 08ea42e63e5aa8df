"""Which versions of installed packages the training process has imported.

A fork server imports packages from disk. There may be another version by then:
a package may be upgraded, and reloaded, while the program runs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterable

from keras_fastdata._modules import spec_of

_log = logging.getLogger("keras_fastdata")

# The name of a top-level package, and its main file's inode and mtime.
Stamp = tuple[str, int, int]

# By package: the spec of what is imported, and the stamp when first looked at.
_stamps: dict[str, tuple[object, Stamp]] = {}
_told: set[Stamp] = set()  # differ, as the log has said


def stamp_of(name: str) -> Stamp:
    """Returns the stamp of the version that this process has imported.

    Logs once if another version is on disk.
    """
    spec, on_disk = spec_of(sys.modules.get(name)), _stamp_on_disk(name)
    before, stamp = _stamps.setdefault(name, (spec, on_disk))
    if before is not spec:  # it was imported again
        stamp = on_disk
        _stamps[name] = spec, stamp
    if stamp != on_disk and on_disk not in _told:
        _told.add(on_disk)
        _log.warning(
            "The installed package `%s` has changed on disk since this program "
            "imported it. Worker processes that start from now on may have "
            "the new version, and build other batches. Start the program "
            "again, or reload the package.",
            name,
        )
    return stamp


def specs_of(stamps: Iterable[Stamp]) -> dict[str, object]:
    """Returns the specs of the modules that this process has of packages."""
    tops = {name for name, *_ in stamps}
    return {
        name: spec_of(module)
        for name, module in sys.modules.copy().items()
        if name.partition(".")[0] in tops
    }


def are_current(specs: dict[str, object]) -> bool:
    """Returns whether no module was reloaded, or imported again, since then.

    Args:
        specs: From `specs_of`. A module that is imported again has a new one.
    """
    return all(
        spec_of(sys.modules.get(name)) is spec
        for name, spec in specs.items()
        if name in sys.modules
    )


def _stamp_on_disk(name: str) -> Stamp:
    module = sys.modules.get(name)
    places = [
        getattr(module, "__file__", None),
        *getattr(module, "__path__", ()),
    ]
    with contextlib.suppress(OSError, StopIteration):
        found = os.stat(next(filter(None, places)))
        return name, found.st_ino, found.st_mtime_ns
    return name, 0, 0
