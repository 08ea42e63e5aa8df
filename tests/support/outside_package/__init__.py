"""A package that imports what it exports when somebody asks for it."""

import importlib


def __getattr__(name):
    if name not in ("draw", "scaled"):
        raise AttributeError(name)
    return getattr(importlib.import_module(".inner", __name__), name)
