"""A module whose class has a property."""

import sys
import types

_scale = 1


class _Module(types.ModuleType):
    @property
    def scale(self):
        return _scale

    @scale.setter
    def scale(self, value):
        global _scale
        _scale = value


sys.modules[__name__].__class__ = _Module
