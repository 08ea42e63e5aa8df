"""A module whose class has properties."""

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

    @property
    def kept_scale(self):
        return vars(self).get("_kept", 1)

    @kept_scale.setter
    def kept_scale(self, value):
        vars(self)["_kept"] = value


sys.modules[__name__].__class__ = _Module
