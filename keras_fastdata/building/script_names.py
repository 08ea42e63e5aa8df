"""Gives a worker's `__main__` the names of the program's script.

`pickle` finds a class or function of the script there: in a file that a build
reads, or for a pool of processes that a build starts. The functions of the
script have globals of their own in a worker; see `worker_globals.py`.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

from keras_fastdata._modules import is_main
from keras_fastdata.memory.reducers import received_classes

_shown: set[str] = set()  # names that this worker has been given


def show_script(dataset: Any) -> None:
    """Sets what came with a dataset in this worker's `__main__`.

    Names that the process itself has there stay.
    """
    main = vars(sys.modules["__main__"])
    for name, value in _names_of(dataset):
        if name not in main or name in _shown:
            main[name] = value
            _shown.add(name)


def _names_of(dataset: Any) -> Iterator[tuple[str, Any]]:
    classes = dict.fromkeys([*received_classes(), *type(dataset).__mro__])
    of_script = [kind for kind in classes if is_main(kind.__module__)]
    main = vars(sys.modules["__main__"])
    for kind in of_script:
        for function in vars(kind).values():
            if not isinstance(function, types.FunctionType):
                continue
            names = function.__globals__
            if names is not main and is_main(names.get("__name__")):
                for name, value in list(names.items()):
                    if not name.startswith("__"):
                        yield name, value
    for kind in of_script:
        if kind.__qualname__ == kind.__name__:
            yield kind.__name__, kind
