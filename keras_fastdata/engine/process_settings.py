"""Keeps the settings of a process as they are while modules are imported.

A module may set the settings of frameworks, environment variables and the like.
In the trainer, it did so before the program made the settings that a worker has
been told of.
"""

from __future__ import annotations

import contextlib
import csv
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_fastdata._call_stack import ignoring_errors
from keras_fastdata._modules import loaded
from keras_fastdata.engine import framework_settings


@contextlib.contextmanager
def kept(*, is_local: bool) -> Iterator[None]:
    """Restores the settings that the block changes.

    Only those of frameworks that are imported before the block. `is_local`:
    whether this process has also been told of the trainer's environment
    variables, current folder and limits of Python.
    """
    before = framework_settings.read_all(np.geterr(), has_folder=is_local)
    arguments, environment = list(sys.argv), dict(os.environ)
    recursion, field_size = sys.getrecursionlimit(), csv.field_size_limit()
    try:
        yield
    finally:
        now = framework_settings.read_all(np.geterr(), has_folder=is_local)
        for name, settings in before.items():
            _restore(name, settings, now.get(name, {}))
        sys.argv[:] = arguments
        if is_local:
            _restore_environment(environment)
            sys.setrecursionlimit(recursion)
            csv.field_size_limit(field_size)


def _restore(name: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    changed = {
        key: value for key, value in before.items() if now.get(key) != value
    }
    with ignoring_errors():  # the folder may be gone
        framework_settings.write(name, loaded(name), changed)


def _restore_environment(before: dict[str, str]) -> None:
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    for name, value in before.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
